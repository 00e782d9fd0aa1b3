//! What can be watched: `kvbm serve`, and `--serve` of other commands.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use crate::interrupt::send;
use crate::{Place, text};

#[test]
fn a_replay_can_be_watched() {
    let place = Place::new();
    place.trace("trace.jsonl", 100_000, 50_000);
    let mut command =
        place.command(&["replay", "trace.jsonl", "--serve=0", "--host-blocks", "200"]);
    let mut child =
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    let address = announced(&mut child);
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    let page = get(&address, "/metrics");
    assert!(page.starts_with("HTTP/1.1 200") && page.contains("# TYPE kvbm_"), "{page}");
    assert!(get(&address, "/v1/state").contains("\"tier\":\"host\""));
    let url = format!("http://{address}");
    let why = place.run(&["why", "--url", &url, "--request", "0", "--json"]);
    assert!(
        why.status.success() && text(&why.stdout).contains("\"reason\":\"never_seen\""),
        "{}",
        text(&why.stderr)
    );
    let chain = "0".repeat(32);
    let of_chain = place.run(&["why", "--url", &url, "--chain", &chain]);
    assert!(of_chain.status.success(), "{}", text(&of_chain.stderr));
    assert!(
        text(&of_chain.stdout).ends_with("of 1\nblock 0 (000000…): never_seen\n"),
        "{}",
        text(&of_chain.stdout)
    );
    let of_neither = place.run(&["why", "--url", &url, "--chain", &chain, "--request", "0"]);
    assert_eq!(of_neither.status.code(), Some(2));
    let top = place.run(&["top", "--url", &url]);
    assert!(top.status.success(), "{}", text(&top.stderr));
    for expected in ["hit rate", "\nhost ", "\ndevice>host ", "no faults"] {
        assert!(text(&top.stdout).contains(expected), "{expected}: {}", text(&top.stdout));
    }
    let state = place.run(&["top", "--url", &url, "--json"]);
    let state: serde_json::Value = serde_json::from_slice(&state.stdout).expect("one object");
    assert!(state["uptime_s"].as_f64().expect("a number") > 0.0);
    let absent = place.run(&["top", "--url", "http://127.0.0.1:1"]);
    assert!(absent.status.code() == Some(2) && text(&absent.stderr).contains("does not answer"));
    let unknown = place.run(&["why", "--url", &url, "--request", "chatcmpl-17"]);
    assert!(unknown.status.code() == Some(2) && text(&unknown.stderr).contains("ask by its chain"));
    let absent = place.run(&["why", "--url", "http://127.0.0.1:1", "--request", "0"]);
    assert!(absent.status.code() == Some(2) && text(&absent.stderr).contains("does not answer"));
    send(&child, Signal::INT);
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
}

#[test]
fn serve_shows_what_a_run_left_and_ends_when_asked() {
    let place = Place::new();
    place.trace("trace.jsonl", 20, 5);
    let disk = place.path("disk");
    let disk = disk.to_str().expect("a name in UTF-8");
    let run = ["replay", "trace.jsonl", "--keep", "--disk-blocks", "500", "--disk-dir", disk];
    assert!(place.run(&run).status.success());
    let mut command = place.command(&["serve", "0"]);
    command.envs([
        ("DYN_KVBM_BLOCK_BYTES", "64KiB"),
        ("DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS", "500"),
    ]);
    command.envs([("DYN_KVBM_DISK_KEEP", "true"), ("DYN_KVBM_DISK_CACHE_DIR", disk)]);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().expect("the binary starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("it is piped"))
        .read_line(&mut line)
        .expect("it says where");
    let address = line.trim().trim_start_matches("http://").trim_end_matches('/');
    let state = get(address, "/v1/state");
    let resident =
        state.split("\"resident_blocks\":").nth(1).and_then(|rest| rest.split(',').next());
    assert!(resident.expect("a tier").parse::<u64>().expect("a number") > 50, "{state}");
    send(&child, Signal::TERM);
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}

#[test]
fn serve_needs_tiers_and_an_open_address_needs_a_token() {
    let place = Place::new();
    let output = place.command(&["serve", "0.0.0.0:0"]).output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("DYN_KVBM_METRICS_TOKEN_FILE"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn the_demo_goes_on_for_who_watches() {
    let place = Place::new();
    let mut command = place.command(&["demo", "--serve=0"]);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    let address = announced(&mut child);
    // Its report ends what is always the same; the chats go on.
    let mut report = BufReader::new(child.stdout.take().expect("it is piped"));
    while !place.path("kvbm-demo.html").exists()
        || !report.fill_buf().expect("it is open").is_empty()
    {
        let read = report.fill_buf().expect("it is open").len();
        report.consume(read);
        if place.path("kvbm-demo.html").exists() {
            break;
        }
    }
    let requests = |page: &str| -> f64 {
        let line =
            page.lines().find(|line| line.starts_with("kvbm_requests_total ")).expect("it counts");
        line.split(' ').nth(1).and_then(|count| count.parse().ok()).expect("a number")
    };
    let before = requests(&get(&address, "/metrics"));
    while requests(&get(&address, "/metrics")) <= before {
        std::thread::sleep(Duration::from_millis(50));
    }
    send(&child, Signal::INT);
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}

/// Where a command says, on standard error, that it can be watched.
fn announced(child: &mut Child) -> String {
    let log = BufReader::new(child.stderr.take().expect("it is piped"));
    let mut lines = log.lines().map_while(Result::ok);
    let line = lines.find(|line| line.contains("live page at")).expect("it tells where");
    // Its later lines must find a reader.
    std::thread::spawn(move || lines.for_each(drop));
    let address = line.split("http://").nth(1).and_then(|rest| rest.strip_suffix('/'));
    address.expect("a URL").to_owned()
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("somebody listens");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .expect("it takes requests");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("it answers");
    text(&answer)
}
