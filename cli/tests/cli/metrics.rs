//! The metrics endpoint.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Stdio;

use rustix::process::Signal;

use crate::interrupt::send;
use crate::{Place, text};

#[test]
fn a_replay_can_be_watched() {
    let place = Place::new();
    place.trace("trace.jsonl", 100_000, 50_000);
    let mut command =
        place.command(&["replay", "trace.jsonl", "-v", "--metrics", "0", "--host-blocks", "200"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    let log = BufReader::new(child.stderr.take().expect("it is piped"));
    let line =
        log.lines().map_while(Result::ok).find(|line| line.contains("/metrics")).expect("it tells where");
    let address = line.split("http://").nth(1).and_then(|rest| rest.strip_suffix("/metrics")).expect("a URL");
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    let page = get(address, "/metrics");
    assert!(page.starts_with("HTTP/1.1 200") && page.contains("# TYPE kvbm_"), "{page}");
    assert!(get(address, "/").starts_with("HTTP/1.1 404"));
    send(&child, Signal::INT);
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("somebody listens");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: kvbm\r\nConnection: close\r\n\r\n")
        .expect("it takes requests");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("it answers");
    text(&answer)
}
