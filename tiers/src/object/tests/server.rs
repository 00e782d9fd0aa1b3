//! A service that speaks as much of the S3 protocol as the client needs, and can be unwell.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use super::super::{Store, StoreOptions};

/// The state of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mood {
    Well,
    /// Takes requests and does not answer them.
    Silent,
    /// Takes connections and does not even read what is sent.
    Deaf,
    /// Returns every request with this status.
    Refuses(u16),
    /// Sends half of what was asked for and closes the connection.
    CutsOff,
    /// Is not there.
    Down,
}

/// A service on a port of its own. Its threads end with the connections, or with the process.
pub(super) struct Server {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

struct State {
    mood: Mood,
    objects: HashMap<String, Vec<u8>>,
    /// How many requests of each method there were.
    requests: HashMap<String, usize>,
}

impl Server {
    pub(super) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let state = State { mood: Mood::Well, objects: HashMap::new(), requests: HashMap::new() };
        let server =
            Self { address: listener.local_addr().unwrap(), state: Arc::new(Mutex::new(state)) };
        server.listen(listener);
        server
    }

    /// Serves each connection by a thread of its own.
    fn listen(&self, listener: TcpListener) {
        let state = Arc::clone(&self.state);
        thread::spawn(move || {
            for connection in listener.incoming() {
                if state.lock().mood == Mood::Down {
                    return;
                }
                let state = Arc::clone(&state);
                thread::spawn(move || serve(&connection.unwrap(), &state));
            }
        });
    }

    /// From here on connections are refused.
    pub(super) fn stop(&self) {
        self.feel(Mood::Down);
        // The listener notices with the next connection.
        while TcpStream::connect(self.address).is_ok() {
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub(super) fn restart(&self) {
        self.feel(Mood::Well);
        self.listen(TcpListener::bind(self.address).unwrap());
    }

    pub(super) fn open(&self) -> Store {
        let options = StoreOptions {
            endpoint: Some(format!("http://{}", self.address)),
            access_key: Some("key".into()),
            secret_key: Some("secret".into()),
            region: None,
        };
        Store::open("s3://bucket/prefix", &options).unwrap()
    }

    pub(super) fn feel(&self, mood: Mood) {
        self.state.lock().mood = mood;
    }

    pub(super) fn requests(&self, method: &str) -> usize {
        self.state.lock().requests.get(method).copied().unwrap_or(0)
    }

    pub(super) fn objects(&self) -> usize {
        self.state.lock().objects.len()
    }

    /// Changes every object.
    pub(super) fn change_objects(&self, change: impl Fn(&mut Vec<u8>)) {
        self.state.lock().objects.values_mut().for_each(change);
    }

    pub(super) fn take_objects(&self) -> HashMap<String, Vec<u8>> {
        std::mem::take(&mut self.state.lock().objects)
    }

    pub(super) fn put_objects(&self, objects: HashMap<String, Vec<u8>>) {
        self.state.lock().objects = objects;
    }
}

struct Request {
    method: String,
    path: String,
    headers: HashMap<String, String>,
}

/// Ends with the connection.
fn serve(connection: &TcpStream, state: &Mutex<State>) {
    let mut reader = BufReader::new(connection.try_clone().unwrap());
    loop {
        while state.lock().mood == Mood::Deaf {
            thread::sleep(Duration::from_millis(5));
        }
        let Some(request) = read_head(&mut reader) else { return };
        while state.lock().mood == Mood::Deaf {
            thread::sleep(Duration::from_millis(5));
        }
        let length =
            request.headers.get("content-length").map_or(0, |length| length.parse().unwrap());
        let mut body = vec![0; length];
        if reader.read_exact(&mut body).is_err() {
            return;
        }
        *state.lock().requests.entry(request.method.clone()).or_default() += 1;
        while state.lock().mood == Mood::Silent {
            thread::sleep(Duration::from_millis(5));
        }
        if state.lock().mood == Mood::Down {
            return;
        }
        let is_over = answer(connection, &request, body, &mut state.lock());
        if is_over.unwrap_or(true) {
            // The reader's clone would keep the connection open.
            let _ = connection.shutdown(std::net::Shutdown::Both);
            return;
        }
    }
}

fn read_head(reader: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim().split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    Some(Request { method, path, headers })
}

/// Returns whether the connection is over.
fn answer(
    to: &TcpStream,
    request: &Request,
    body: Vec<u8>,
    state: &mut State,
) -> std::io::Result<bool> {
    if let Mood::Refuses(status) = state.mood {
        return send(to, status, &[], b"").map(|()| false);
    }
    match (&*request.method, state.objects.get(&request.path)) {
        ("PUT", Some(_)) if request.headers.contains_key("if-none-match") => {
            send(to, 412, &[], b"")?;
        }
        ("PUT", _) => {
            state.objects.insert(request.path.clone(), body);
            send(to, 200, &["ETag: \"1\""], b"")?;
        }
        ("DELETE", _) => {
            state.objects.remove(&request.path);
            send(to, 204, &[], b"")?;
        }
        ("GET", None) if request.path.contains("list-type=2") => {
            send(
                to,
                200,
                &["Content-Type: application/xml"],
                list(&request.path, state).as_bytes(),
            )?;
        }
        (_, None) => send(to, 404, &[], b"")?,
        ("HEAD", Some(object)) => head(to, 200, &["ETag: \"1\""], object.len())?,
        (_, Some(object)) => return send_range(to, request, object, state.mood),
    }
    Ok(false)
}

/// All names behind the prefix that is asked for, however many.
fn list(path: &str, state: &State) -> String {
    let query = path.split_once('?').map_or("", |(_, query)| query);
    let parameter = |name: &str| {
        let value = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        value.unwrap_or_default().replace("%2F", "/")
    };
    let (prefix, after) = (parameter("prefix"), parameter("start-after"));
    let bucket = path.split('?').next().unwrap_or_default().trim_end_matches('/').to_owned() + "/";
    let objects = state.objects.iter();
    let named =
        objects.filter_map(|(path, object)| Some((path.strip_prefix(&bucket)?, object.len())));
    let mut named: Vec<_> =
        named.filter(|&(name, _)| name.starts_with(&prefix) && name > after.as_str()).collect();
    named.sort_unstable();
    let entry = |(name, size)| {
        format!(
            "<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>\
             <ETag>1</ETag><Size>{size}</Size></Contents>"
        )
    };
    let entries: String = named.into_iter().map(entry).collect();
    format!("<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>")
}

fn send_range(
    mut to: &TcpStream,
    request: &Request,
    object: &[u8],
    mood: Mood,
) -> std::io::Result<bool> {
    let range =
        request.headers.get("range").and_then(|range| range.strip_prefix("bytes=")).unwrap();
    let (start, end) = range.split_once('-').unwrap();
    let (start, end): (usize, usize) = (start.parse().unwrap(), end.parse().unwrap());
    if start >= object.len() {
        return send(to, 416, &[], b"").map(|()| false);
    }
    let end = end.min(object.len() - 1);
    let range = format!("Content-Range: bytes {start}-{end}/{}", object.len());
    let bytes = &object[start..=end];
    head(to, 206, &["ETag: \"1\"", &range], bytes.len())?;
    let is_cut_off = mood == Mood::CutsOff;
    to.write_all(if is_cut_off { &bytes[..bytes.len() / 2] } else { bytes })?;
    Ok(is_cut_off)
}

fn send(mut to: &TcpStream, status: u16, headers: &[&str], body: &[u8]) -> std::io::Result<()> {
    head(to, status, headers, body.len())?;
    to.write_all(body)
}

fn head(mut to: &TcpStream, status: u16, headers: &[&str], length: usize) -> std::io::Result<()> {
    let headers = headers.iter().fold(String::new(), |all, header| all + header + "\r\n");
    let date = "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT";
    // No body may follow these, not even an empty one.
    let length =
        if status == 204 { String::new() } else { format!("Content-Length: {length}\r\n") };
    write!(to, "HTTP/1.1 {status} status\r\n{date}\r\n{headers}{length}\r\n")
}
