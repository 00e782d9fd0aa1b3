//! The same etcd behind a socket: what HTTP itself does.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::fake::{FakeEtcd, Fault};
use crate::peers::discovery::etcd::http::{Answer, Call, Http, Transport};
use crate::peers::discovery::{EtcdSource, PeerAddress, PeerSource};

const LATE: Duration = Duration::from_mins(1);
const MEMBER: &str = "http://member";

/// The URL at which `etcd` answers as long as the test runs.
async fn served(etcd: FakeEtcd) -> String {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((stream, _)) = socket.accept().await {
            tokio::spawn(answer(etcd.clone(), stream));
        }
    });
    url
}

/// Answers one request, and goes on until all of the answer is sent, or its reader is gone.
async fn answer(etcd: FakeEtcd, mut stream: TcpStream) -> std::io::Result<()> {
    let (head, body) = request(&mut stream).await?;
    assert!(head.contains("grpc-metadata-hasleader: true"), "{head}");
    let path = head.split(' ').nth(1).unwrap_or_default();
    let token = head.lines().find_map(|line| line.strip_prefix("authorization: "));
    let call = Call { url: format!("{MEMBER}{path}"), token, body };
    let Ok(mut answer) = etcd.post(call).await else { return Ok(()) };
    let status = answer.status;
    stream
        .write_all(
            format!(
                "HTTP/1.1 {status} Said\r\nLocation: /other\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            .as_bytes(),
        )
        .await?;
    while let Ok(Some(piece)) = answer.piece().await {
        if !piece.is_empty() {
            stream.write_all(format!("{:x}\r\n", piece.len()).as_bytes()).await?;
            stream.write_all(&piece).await?;
            stream.write_all(b"\r\n").await?;
        }
    }
    stream.write_all(b"0\r\n\r\n").await
}

async fn request(stream: &mut TcpStream) -> std::io::Result<(String, String)> {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            if length.is_some_and(|length| length.parse() == Ok(body.len())) {
                return Ok((head.to_owned(), body.to_owned()));
            }
        }
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
}

fn range(url: &str) -> Call<'static> {
    Call { url: format!("{url}/v3/kv/range"), token: None, body: "{}".into() }
}

#[tokio::test]
async fn workers_see_each_other_over_http() {
    let url = served(FakeEtcd::default()).await;
    let source = PeerSource::Etcd(EtcdSource::new(vec![url], "prod"));
    let watch = source.watch(&Handle::current()).unwrap();
    let own = PeerAddress::new("a/0", "node-1:80").unwrap();
    let announced = source.announce(&own, &Handle::current()).unwrap().unwrap();
    let mut peers = watch.peers();
    timeout(LATE, peers.wait_for(|list| list.get("a/0") == Some("node-1:80")))
        .await
        .unwrap()
        .unwrap();
    announced.withdraw().await;
    timeout(LATE, peers.wait_for(|list| list.is_empty())).await.unwrap().unwrap();
}

#[tokio::test]
async fn the_status_is_told_and_no_redirection_is_followed() {
    let etcd = FakeEtcd::default();
    let url = served(etcd.clone()).await;
    for status in [200, 307, 401, 503] {
        etcd.set_fault(MEMBER, Some(Fault::Says(status, "body".into())));
        let mut answer = Http::new(None).unwrap().post(range(&url)).await.unwrap();
        assert_eq!(Answer::status(&answer), status);
        let mut body = Vec::new();
        while let Some(piece) = answer.piece().await.unwrap() {
            body.extend(piece);
        }
        assert_eq!(body, b"body");
    }
    assert_eq!(etcd.all_calls(), 4);
}

#[tokio::test]
async fn a_refused_or_broken_connection_is_told_without_secrets() {
    let etcd = FakeEtcd::default();
    etcd.set_fault(MEMBER, Some(Fault::Away));
    let broken = served(etcd).await;
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refused = format!("http://{}", closed.local_addr().unwrap());
    drop(closed);
    for (url, token) in [(&broken, "s3cret"), (&refused, "s3cret"), (&broken, "s3cret\n")] {
        let call = Call { token: Some(token), ..range(url) };
        let Err(error) = Http::new(None).unwrap().post(call).await else { panic!("it answers") };
        assert!(!error.is_empty() && !error.contains("s3cret") && !error.contains(url), "{error}");
    }
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_told() {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut stream, _) = socket.accept().await.unwrap();
        request(&mut stream).await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf").await.unwrap();
    });
    let mut answer = Http::new(None).unwrap().post(range(&url)).await.unwrap();
    assert_eq!(answer.piece().await.unwrap().unwrap(), b"half");
    assert!(answer.piece().await.is_err());
}
