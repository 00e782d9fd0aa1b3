//! What a manager says of itself over HTTP.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use kvbm::blocking::Blocks;
use kvbm::{BlockHash, Error, ErrorKind, Manager, Options, RequestId, RequestInfo, Tier};
use kvbm_settings::{Capacity, Settings, WriteBudget};
use kvbm_tests::engine;
use kvbm_tests::rig::{chain, chaos, hash, info_of};
use kvbm_tiers::chaos::Chaos;
use prometheus::Registry;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;

const TOKEN: &str = "a token of tests, 0123456789";

/// An answer: its status and its body.
type Answer = (u16, String);

fn ask(address: SocketAddr, request: &str) -> Answer {
    let mut stream = connect(address);
    stream.write_all(request.as_bytes()).expect("it takes requests");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    let status =
        answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status line");
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (status, body.to_owned())
}

fn connect(address: SocketAddr) -> TcpStream {
    // Sooner than a server gives up who is slow.
    let stream =
        TcpStream::connect_timeout(&address, Duration::from_secs(9)).expect("somebody is let in");
    stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
    stream
}

fn get_with(address: SocketAddr, path: &str, header: &str) -> Answer {
    ask(
        address,
        &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{header}\r\n"),
    )
}

fn get(address: SocketAddr, path: &str) -> Answer {
    get_with(address, path, "")
}

fn json(address: SocketAddr, path: &str) -> Value {
    let (status, body) = get(address, path);
    assert_eq!(status, 200, "{path}: {body}");
    serde_json::from_str(&body).expect("JSON")
}

fn serving(disk: &Path) -> Settings {
    let mut settings = engine::settings(4096, 8, 8);
    engine::add_disk(&mut settings, 16, disk);
    settings.metrics.enabled = true;
    settings.metrics.port = 0;
    settings
}

fn open(settings: Settings) -> (Manager, SocketAddr) {
    let manager = engine::open(settings, &Registry::new()).unwrap();
    let address = manager.admin().serving_at().expect("it serves");
    (manager, address)
}

fn query(chain: &[BlockHash]) -> String {
    chain.iter().map(|hash| format!("{hash:?}")).collect::<Vec<_>>().join(",")
}

#[test]
fn a_manager_answers_who_asks_until_it_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let (manager, address) = open(serving(dir.path()));
    assert!(address.ip().is_loopback());
    engine::serve(&manager, &chain(1, 3));
    engine::serve(&manager, &chain(1, 3));
    assert_eq!(get(address, "/healthz"), (200, "ok".to_owned()));
    assert_eq!(json(address, "/readyz"), serde_json::json!({"ready": true, "degraded": []}));
    let (status, page) = get(address, "/metrics");
    assert!(
        status == 200 && page.contains("kvbm_slots{state=\"resident\",tier=\"device\"} 3"),
        "{page}"
    );
    for (path, start) in [("/", "<!doctype html>"), ("/page.js", ""), ("/page.css", "")] {
        let (status, body) = get(address, path);
        assert!(status == 200 && body.to_lowercase().starts_with(start), "{path}: {body}");
    }
    let state = json(address, "/v1/state");
    assert_eq!(state["block_bytes"], 4096);
    assert_eq!(state["tiers"][0]["tier"], "device");
    assert_eq!(state["tiers"][0]["resident_blocks"], 3);
    assert_eq!(state["tiers"][0]["capacity_blocks"], 8);
    assert_eq!(state["lookups"], serde_json::json!({"blocks_total": 6, "hit_blocks_total": 3}));
    assert_eq!(state["settings"]["disk.capacity"], "16 blocks");
    let down =
        state["routes"].as_array().unwrap().iter().find(|route| route["to"] == "host").unwrap();
    assert_eq!((&down["from"], &down["copied_blocks_total"]), (&"device".into(), &3.into()));
    assert_eq!(down["breaker"], "closed");
    assert_eq!(get(address, "/nowhere").0, 404);
    assert!(manager.close(Duration::from_secs(5)).is_complete());
    TcpStream::connect(address).expect_err("the port is closed");
}

#[test]
fn an_address_that_is_taken_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut settings = serving(dir.path());
    settings.metrics.port = taken.local_addr().unwrap().port();
    let error = engine::open(settings.clone(), &Registry::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("DYN_KVBM_METRICS_PORT"), "{error}");
    drop(taken);
    let manager = engine::open(settings, &Registry::new()).expect("it is free again");
    assert_eq!(get(manager.admin().serving_at().unwrap(), "/healthz").0, 200);
}

#[test]
fn others_than_this_machine_show_a_token() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = serving(dir.path());
    settings.metrics.host = "0.0.0.0".parse().unwrap();
    let error = engine::open(settings.clone(), &Registry::new()).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Invalid && error.to_string().contains("metrics.host"),
        "{error}"
    );
    let file = dir.path().join("token");
    std::fs::write(&file, TOKEN.replace(' ', "_")).unwrap();
    settings.metrics.token_file = Some(file.display().to_string());
    let (manager, address) = open(settings);
    let address = SocketAddr::from(([127, 0, 0, 1], address.port()));
    for path in ["/metrics", "/v1/state", "/v1/lookup", "/v1/why"] {
        assert_eq!(get(address, path).0, 401, "{path}");
        assert_eq!(
            get_with(address, path, "Authorization: Bearer a_token_of_tests\r\n").0,
            401,
            "{path}"
        );
    }
    for path in ["/", "/page.js", "/page.css", "/healthz", "/readyz", "/openapi.json"] {
        assert_eq!(get(address, path).0, 200, "{path} says nothing of requests");
    }
    let header = format!("Authorization: Bearer {}\r\n", TOKEN.replace(' ', "_"));
    let (status, state) = get_with(address, "/v1/state", &header);
    assert_eq!(status, 200);
    assert!(!state.contains("0123456789"), "{state}");
    assert!(!format!("{manager:?}").contains("0123456789"));
}

#[test]
fn an_oversized_request_is_refused_and_the_next_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let (_manager, address) = open(serving(dir.path()));
    let longest: Vec<BlockHash> = (0..1_900).map(hash).collect();
    assert_eq!(json(address, &format!("/v1/lookup?chain={}", query(&longest)))["blocks"], 1_900);
    let huge = "0".repeat(200_000);
    let mut stream = TcpStream::connect(address).unwrap();
    let sent = stream.write_all(
        format!("GET /v1/why?chain={huge} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes(),
    );
    let mut answer = String::new();
    let read = stream.read_to_string(&mut answer);
    assert!(sent.is_err() || read.is_err() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    for wrong in
        ["", "?chain=", "?chain=12", "?chain=é", "?request=", "?request=1&chain=00", "?other=1"]
    {
        let (status, body) = get(address, &format!("/v1/why{wrong}"));
        assert!(status == 400 && body.contains("error"), "{wrong}: {status} {body}");
    }
    let posted = ask(
        address,
        "POST /v1/state HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
    );
    assert_eq!(posted.0, 405);
    assert_eq!(get(address, "/healthz").0, 200);
}

/// Lets this process have this many files open.
fn allow_files(files: u64) {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let current = current.map(|allowed| allowed.max(files));
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).expect("the hard limit is higher");
}

#[test]
fn a_thousand_slow_connections_keep_nobody_from_the_answer() {
    allow_files(4_000);
    let dir = tempfile::tempdir().unwrap();
    let (manager, address) = open(serving(dir.path()));
    let half = |_| {
        let mut stream = connect(address);
        // The server may have closed it already, which is its right.
        let _ = stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: local");
        stream
    };
    let slow: Vec<TcpStream> = (0..1_000).map(half).collect();
    for path in ["/readyz", "/metrics"] {
        let time = |_| {
            let began = Instant::now();
            assert_eq!(get(address, path).0, 200, "{path}");
            began.elapsed()
        };
        // What else this machine does takes its time too: the fastest shows what the server takes.
        let fastest = (0..20).map(time).min().expect("some were asked");
        assert!(fastest < Duration::from_millis(100), "{path}: {fastest:?}");
    }
    drop(slow);
    (0..100).for_each(|_| assert_eq!(get(address, "/readyz").0, 200));
    assert!(manager.close(Duration::from_secs(20)).is_complete());
}

#[test]
fn silent_clients_do_not_keep_a_manager_from_ending() {
    let dir = tempfile::tempdir().unwrap();
    let (manager, address) = open(serving(dir.path()));
    let mut silent: Vec<_> = (0..32).map(|_| connect(address)).collect();
    assert_eq!(get(address, "/healthz").0, 200);
    drop(manager);
    for stream in &mut silent {
        assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
    }
}

#[test]
fn a_page_whose_name_was_led_here_reads_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = serving(dir.path());
    settings.metrics.allowed_hosts = vec!["node-1".to_owned()];
    let (_manager, address) = open(settings);
    let of_host = |host: &str, path: &str| {
        ask(address, &format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
    };
    for path in ["/", "/metrics", "/v1/state", "/v1/why", "/readyz", "/nowhere"] {
        let (status, body) = of_host(&format!("evil.example:{}", address.port()), path);
        assert_eq!(status, 421, "{path}");
        assert!(body.contains("DYN_KVBM_METRICS_ALLOWED_HOSTS"), "{body}");
    }
    for host in [address.to_string().as_str(), "localhost", "[::1]:1", "Node-1:6880"] {
        assert_eq!(of_host(host, "/v1/state").0, 200, "{host}");
    }
    assert_eq!(
        ask(address, "GET /healthz HTTP/1.0\r\n\r\n"),
        (200, "ok".to_owned()),
        "a probe names no tenant"
    );
}

#[test]
fn why_says_what_was_found_and_what_ended_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = serving(dir.path());
    settings.disk.capacity = None;
    let (manager, address) = open(settings);
    let why = |what: &str| json(address, &format!("/v1/why?{what}"));
    let of_chain = |n| why(&format!("chain={}", query(&chain(n, 3))));
    let new = of_chain(1);
    assert_eq!(new["next"]["reason"], "never_seen");
    assert_eq!(new["next"]["block"], format!("{:?}", chain(1, 3)[0]));
    engine::serve(&manager, &chain(1, 3));
    let held = of_chain(1);
    assert_eq!(
        held["found"],
        serde_json::json!([{"tier": "device", "blocks": 3}, {"tier": "host", "blocks": 3}])
    );
    assert_eq!(held["next"], Value::Null);
    // Its last block leaves both tiers.
    [Tier::Device, Tier::Host]
        .into_iter()
        .for_each(|tier| assert_eq!(manager.admin().evict(tier, 1), 1));
    let info = RequestInfo { request: Some(RequestId(77)), ..RequestInfo::default() };
    drop(manager.lease_for(info, &chain(1, 3)));
    let asked = why("request=77");
    assert_eq!((&asked["request"], &asked["blocks"]), (&77.into(), &3.into()));
    assert_eq!(asked["found"][1], serde_json::json!({"tier": "host", "blocks": 2}));
    let next = &asked["next"];
    assert_eq!(
        (&next["reason"], &next["tier"], &next["position"]),
        (&"evicted".into(), &"host".into(), &2.into())
    );
    assert_eq!((&next["age_s"], &next["policy"]), (&0.into(), &"eviction = lru".into()));
    // What happens later does not change what it was told then.
    engine::serve(&manager, &chain(1, 3));
    assert_eq!(why("request=77")["next"]["reason"], "evicted");
    assert_eq!(get(address, "/v1/why?request=78").0, 404);
}

#[test]
fn a_request_is_found_by_the_engines_name_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let (manager, address) = open(serving(dir.path()));
    let name = "chatcmpl-0a/ä 1";
    let info = RequestInfo { request: Some(RequestId::named(name)), ..RequestInfo::default() };
    drop(manager.lease_for(info, &chain(1, 3)));
    let why = json(address, "/v1/why?request=chatcmpl-0a%2F%C3%A4%201");
    assert_eq!(why["next"]["reason"], "never_seen");
    let by_number = json(address, &format!("/v1/why?request={}", why["request"]));
    assert_eq!(by_number["request"], why["request"], "its number is told");
    let (status, other) = get(address, "/v1/why?request=chatcmpl-0b");
    assert!(status == 404 && other.contains("chatcmpl-0b"), "{status} {other}");
}

#[test]
fn why_names_the_rule_that_kept_a_block_off_disk() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = serving(dir.path());
    settings.disk.write_budget = Some(WriteBudget::BytesPerDay(1));
    let (manager, address) = open(settings);
    let why = || json(address, &format!("/v1/why?chain={}", query(&chain(1, 3))));
    engine::serve(&manager, &chain(1, 3));
    // The host tier is the last that it leaves.
    assert_eq!(manager.admin().evict(Tier::Device, 3), 3);
    // Room is made in the background.
    let mut others = (2..500).inspect(|&n| _ = engine::serve(&manager, &chain(n, 3)));
    assert!(others.any(|_| why()["next"] != Value::Null), "it stays in the host");
    let why = why();
    assert_eq!(
        (&why["next"]["reason"], &why["next"]["tier"]),
        (&"admission".into(), &"disk".into()),
        "{why}"
    );
    let policy = why["next"]["policy"].as_str().unwrap();
    assert!(policy.starts_with("disk.write_budget = "), "{policy}");
}

#[test]
fn gains_from_memory_are_told_beside_an_unlimited_object_store() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = serving(dir.path());
    settings.disk.capacity = None;
    settings.host.capacity = Some(Capacity::Blocks(600));
    settings.object.url = Some("memory:///".to_owned());
    let (manager, address) = open(settings);
    // Again and again 1,200 blocks, twice as many as the host holds: under LRU none is there when
    // it is asked for.
    for n in (0..400).cycle().take(1_600) {
        drop(manager.lease(&chain(n, 3)));
    }
    let metrics = get(address, "/metrics").1;
    let estimated = |tier: &str, scale: &str| {
        let series = format!("kvbm_estimated_hit_rate{{scale=\"{scale}\",tier=\"{tier}\"}} ");
        metrics
            .lines()
            .find_map(|line| line.strip_prefix(&series))
            .map(|rate| rate.parse::<f64>().unwrap())
    };
    let (as_it_is, fourfold) = (estimated("host", "1").unwrap(), estimated("host", "4").unwrap());
    assert!(as_it_is < 0.2 && fourfold > 0.6, "{as_it_is} {fourfold}");
    assert_eq!(estimated("object", "1"), None, "there is no multiple of what has no limit");
}

#[test]
fn what_is_broken_is_named_and_then_it_heals() {
    let dir = tempfile::tempdir().unwrap();
    let (manager, address, chaos) = open_with_fault(serving(dir.path()), "disk:enospc@0s+1h");
    chaos.start();
    let until = |what: &str, holds: &dyn Fn(&Value) -> bool| {
        for n in 1.. {
            engine::serve(&manager, &chain(n, 3));
            let _ = manager.drain(Duration::from_millis(50));
            if holds(&json(address, "/readyz")) {
                return;
            }
            assert!(n < 500, "{what}: {}", json(address, "/readyz"));
        }
    };
    until("the disk is full", &|ready| ready["degraded"][0]["what"] == "disk");
    assert_eq!(json(address, "/readyz")["ready"], true, "the host tier is of use all the same");
    let state = json(address, "/v1/state");
    let fault = state["faults"]
        .as_array()
        .unwrap()
        .iter()
        .find(|fault| fault["where"] == "host>disk")
        .unwrap();
    assert!(fault["what"] == "copy_no_space" && fault["count"].as_u64() > Some(0), "{fault}");
    let open = |state: &Value| -> BTreeSet<String> {
        let routes =
            state["routes"].as_array().unwrap().iter().filter(|route| route["breaker"] == "open");
        routes.map(|route| format!("{}>{}", route["from"], route["to"]).replace('"', "")).collect()
    };
    assert!(open(&state).contains("host>disk"), "{state}");
    chaos.heal();
    until("the disk is well", &|ready| ready["degraded"] == serde_json::json!([]));
    assert!(open(&json(address, "/v1/state")).is_empty());
}

/// A manager in which `fault` is the state of things from [`Chaos::start`] on.
fn open_with_fault(settings: Settings, fault: &str) -> (Manager, SocketAddr, Chaos) {
    let chaos = chaos(&[fault]);
    let options = Options { media_layer: Some(chaos.layer()), ..Options::default() };
    let manager = engine::open_with(settings, options).unwrap();
    let address = manager.admin().serving_at().unwrap();
    (manager, address, chaos)
}

/// Has chains come and go until `/readyz` answers as wanted.
fn until_ready_says(manager: &Manager, address: SocketAddr, wanted: impl Fn(u16, &Value) -> bool) {
    let began = Instant::now();
    for n in (1..5).cycle() {
        assert!(began.elapsed() < Duration::from_mins(1), "{:?}", get(address, "/readyz"));
        engine::serve(manager, &chain(n, 3));
        let _ = manager.drain(Duration::from_millis(50));
        let (status, body) = get(address, "/readyz");
        if wanted(status, &serde_json::from_str(&body).expect("JSON")) {
            return;
        }
    }
}

#[test]
fn a_manager_without_a_usable_tier_is_not_ready() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = serving(dir.path());
    settings.host.capacity = None;
    let (manager, address, chaos) = open_with_fault(settings, "disk:eio@0s+1h");
    until_ready_says(&manager, address, |status, _| status == 200);
    chaos.start();
    until_ready_says(&manager, address, |status, ready| {
        status == 503 && ready["ready"] == false && ready["degraded"][0]["what"] == "disk"
    });
    assert_eq!(get(address, "/healthz").0, 200, "it is not to be restarted for that");
    chaos.heal();
    until_ready_says(&manager, address, |status, ready| status == 200 && ready["ready"] == true);
}

#[test]
fn a_directory_that_is_left_alone_is_named() {
    let home = tempfile::tempdir().unwrap();
    let mut settings = serving(home.path());
    settings.disk.dirs = ["a", "b"].map(|name| home.path().join(name)).into();
    settings.transfer.timeout_ms = 300;
    let (manager, address, chaos) = open_with_fault(settings, "disk1:hang@0s+1h");
    chaos.start();
    until_ready_says(&manager, address, |status, ready| {
        let degraded = ready["degraded"].as_array().unwrap();
        status == 200 && degraded.iter().any(|one| one["what"] == "disk.dirs[1]")
    });
    chaos.heal();
    until_ready_says(&manager, address, |_, ready| ready["degraded"] == serde_json::json!([]));
}

const OPENAPI: &str = include_str!("../kvbm/src/serve/openapi.json");

/// What of `answer` is not as `schema` says; as much of JSON Schema as the description uses.
fn deviations(api: &Value, schema: &Value, answer: &Value, at: &str, found: &mut Vec<String>) {
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.rsplit('/').next().unwrap();
        return deviations(api, &api["components"]["schemas"][name], answer, at, found);
    }
    if let Some(choices) = schema["anyOf"].as_array() {
        let fits = |choice: &Value| {
            let mut wrong = Vec::new();
            deviations(api, choice, answer, at, &mut wrong);
            wrong.is_empty()
        };
        if !choices.iter().any(fits) {
            found.push(format!("{at}: {answer} is none of {choices:?}"));
        }
        return;
    }
    let kind = match answer {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_u64() => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let kinds: Vec<&str> = match &schema["type"] {
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        one => one.as_str().into_iter().collect(),
    };
    if !(kinds.contains(&kind) || kind == "integer" && kinds.contains(&"number")) {
        found.push(format!("{at}: {answer} is not of {kinds:?}"));
    }
    if schema["enum"].as_array().is_some_and(|choices| !choices.contains(answer)) {
        found.push(format!("{at}: {answer} is not in {}", schema["enum"]));
    }
    answer.as_array().into_iter().flatten().enumerate().for_each(|(i, item)| {
        deviations(api, &schema["items"], item, &format!("{at}[{i}]"), found);
    });
    let Some(fields) = answer.as_object() else { return };
    for required in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !fields.contains_key(required) {
            found.push(format!("{at}: no {required}"));
        }
    }
    for (name, value) in fields {
        let described = schema["properties"].get(name).or(schema.get("additionalProperties"));
        match described {
            Some(schema) => deviations(api, schema, value, &format!("{at}.{name}"), found),
            None => found.push(format!("{at}.{name} is not described")),
        }
    }
}

#[test]
fn answers_are_what_the_description_says() {
    let dir = tempfile::tempdir().unwrap();
    let (manager, address) = open(serving(dir.path()));
    let api: Value = serde_json::from_str(OPENAPI).unwrap();
    assert_eq!(json(address, "/openapi.json"), api);
    engine::serve(&manager, &chain(1, 3));
    manager.admin().evict(Tier::Device, 1);
    let info = RequestInfo { request: Some(RequestId(5)), ..RequestInfo::default() };
    drop(manager.lease_for(info, &chain(2, 3)));
    let asked = [
        ("/readyz", String::new(), 200),
        ("/v1/state", String::new(), 200),
        ("/v1/lookup", format!("?chain={}", query(&chain(1, 3))), 200),
        ("/v1/lookup", "?chain=zz".to_owned(), 400),
        ("/v1/why", format!("?chain={}", query(&chain(1, 3))), 200),
        ("/v1/why", format!("?chain={}", query(&chain(3, 3))), 200),
        ("/v1/why", "?request=5".to_owned(), 200),
        ("/v1/why", "?request=6".to_owned(), 404),
    ];
    for (path, query, expected) in asked {
        let (status, body) = get(address, &format!("{path}{query}"));
        assert_eq!(status, expected, "{path}{query}: {body}");
        let described = &api["paths"][path]["get"]["responses"][status.to_string()];
        let schema = &described["content"]["application/json"]["schema"];
        let mut found = Vec::new();
        deviations(&api, schema, &serde_json::from_str(&body).unwrap(), path, &mut found);
        assert!(found.is_empty(), "{found:#?}");
    }
}

/// A worker that others read at.
fn worker(peer: &str) -> (Blocks, SocketAddr) {
    let mut settings = engine::without_device(4096, 16);
    (settings.metrics.enabled, settings.metrics.port) = (true, 0);
    engine::add_peers(&mut settings, peer);
    let blocks = Blocks::open(settings, engine::model(engine::fingerprint("1"))).unwrap();
    let address = blocks.manager().admin().serving_at().expect("it serves");
    (blocks, address)
}

#[test]
fn peers_show_what_is_open_and_what_requests_took() {
    let (there, holder_page) = worker("");
    let wanted = chain(0, 6);
    let fill = |at: usize, slot: &mut [u8]| {
        slot.fill(at as u8);
        Ok::<_, Error>(())
    };
    there.put(&wanted[..4], fill).unwrap();
    let address = engine::address(there.manager());
    let (here, page) = worker(&address);
    let (peer, peers) = (engine::peer_name(&address), here.manager().peers().unwrap());
    let info = RequestInfo { request: Some(RequestId(5)), ..RequestInfo::default() };
    let state = |at: SocketAddr| json(at, "/v1/state")["peers"]["peers"][0].take();
    let why = || json(page, "/v1/why?request=5");
    let idle = state(page);
    assert_eq!((idle["name"].as_str(), idle["address"].as_str()), (Some(&*peer), Some(&*address)));
    assert_eq!((&idle["links"], &idle["fault"]), (&serde_json::json!({}), &Value::Null));

    let lease = peers.lease(&peer, &wanted, info).wait().unwrap();
    let leased = state(page);
    assert_eq!(leased["links"], serde_json::json!({"shared_memory": 1}));
    assert_eq!(leased["leased_in_blocks"], 4);
    let reader = state(holder_page);
    assert_eq!((&reader["readers"], &reader["leased_out_blocks"]), (&1.into(), &4.into()));
    assert_eq!(reader["name"], peers.name());
    assert_eq!(peers.pull(lease).wait().unwrap().copied, 4);
    assert_eq!(state(page)["leased_in_blocks"], 0);
    let taken = serde_json::json!({"peer": peer, "way": "shared_memory", "leased_blocks": 4,
        "copied_blocks": 4, "why": "the peer has no more"});
    let told = why();
    assert_eq!((&told["from_peer"], &told["blocks"]), (&taken, &6.into()));
    // What was here when it asked the peer.
    assert_eq!(told["next"]["position"], 0);

    drop(there);
    let refused = peers.lease(&peer, &wanted, info).wait().unwrap_err().to_string();
    let fault = state(page)["fault"]["why"].take();
    assert!(refused.contains(fault.as_str().unwrap()), "{fault} is not in: {refused}");
    assert_eq!((&why()["from_peer"]["way"], &why()["from_peer"]["why"]), (&Value::Null, &fault));
    let api: Value = serde_json::from_str(OPENAPI).unwrap();
    let mut found = Vec::new();
    for (name, answer) in [("State", json(page, "/v1/state")), ("Why", why())] {
        deviations(&api, &api["components"]["schemas"][name], &answer, name, &mut found);
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// What a metric says of a series, by what stands between its braces.
fn series(page: &str, name: &str) -> u64 {
    let line =
        page.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
        .unwrap_or_else(|| panic!("no {name} in {page}"))
}

#[test]
fn named_tenants_are_shown_and_the_others_together() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = serving(dir.path());
    settings.disk.write_budget = Some(WriteBudget::DriveWritesPerDay(0.5));
    settings.tenant_weights = [(9, 1.0)].into();
    settings.tenant_quotas = [(7, Capacity::Blocks(2))].into();
    let (manager, address) = open(settings);
    for (tenant, number) in
        [(Some(7), 1), (Some(9), 2), (Some(7), 1), (Some(4_000_000), 3), (None, 4)]
    {
        engine::serve_for(&manager, info_of(tenant), &chain(number, 3));
    }
    let page = || get(address, "/metrics").1;
    let seen = page();
    let of_tenant = |name: &str, tenant: &str| {
        series(&seen, &format!("kvbm_tenant_{name}{{tenant=\"{tenant}\"}}"))
    };
    let asked = ["7", "9", "other"].map(|tenant| of_tenant("requested_tokens_total", tenant));
    assert_eq!(asked, [96, 48, 96]);
    assert_eq!(["7", "9", "other"].map(|tenant| of_tenant("hit_tokens_total", tenant)), [48, 0, 0]);
    assert_eq!(of_tenant("quota_blocks", "7"), 2);
    assert!(!seen.contains("\"4000000\""), "a request makes no series: {seen}");
    let in_tier = |page: &str, name: &str, tenant: &str| -> u64 {
        series(page, &format!("kvbm_tenant_{name}{{tenant=\"{tenant}\",tier=\"device\"}}"))
    };
    // 12 blocks came to 8 slots.
    let held: u64 = ["7", "9", "other"].iter().map(|tenant| in_tier(&seen, "blocks", tenant)).sum();
    assert_eq!(held, series(&seen, "kvbm_slots{state=\"resident\",tier=\"device\"}"));
    let evicted = |page: &str| -> Vec<u64> {
        ["7", "9", "other"].iter().map(|tenant| in_tier(page, "evicted_blocks", tenant)).collect()
    };
    assert_eq!(
        evicted(&seen).iter().sum::<u64>(),
        series(&seen, "kvbm_evicted_blocks{tier=\"device\"}")
    );
    manager.admin().evict(Tier::Device, 8);
    assert_eq!(evicted(&page()), [3, 3, 6]);
    // 16 blocks of 4 KiB, half of them a day.
    assert_eq!(series(&seen, "kvbm_disk_write_budget_bytes"), 32_768);
}
