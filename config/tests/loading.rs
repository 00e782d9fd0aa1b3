//! Settings as an operator meets them: from files and variables, to settings or a message.

use std::io::Write as _;
use std::path::PathBuf;

use kvbm_settings::{
    Argument, Capacity, EvictionKind, Loaded, Loader, Origin, PeerSettings, Settings, SettingsError,
};
use proptest::prelude::*;
use tempfile::NamedTempFile;

fn environment(variables: &[(&str, &str)]) -> Loader {
    Loader::new()
        .environment(variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())))
}

fn load(variables: &[(&str, &str)]) -> Result<Loaded, SettingsError> {
    environment(variables).load()
}

fn settings(variables: &[(&str, &str)]) -> Settings {
    load(variables).expect("valid variables").settings
}

fn file(text: &str) -> NamedTempFile {
    let mut file = NamedTempFile::new().expect("a temporary file");
    file.write_all(text.as_bytes()).expect("it is written");
    file
}

/// What loading the file says, with the file called FILE.
fn file_error(text: &str) -> String {
    let file = file(text);
    let error = Loader::new().file(file.path()).load().expect_err(text);
    error.to_string().replace(&file.path().display().to_string(), "FILE")
}

fn row(loaded: &Loaded, key: &str) -> (String, String) {
    let row = loaded.rows().into_iter().find(|row| row.key == key).expect(key);
    (row.value, row.origin.to_string())
}

const BLOCK: (&str, &str) = ("DYN_KVBM_BLOCK_BYTES", "64KiB");

proptest! {
    #[test]
    fn no_variable_and_no_file_panics(name in "DYN_KVBM_[A-Z_]{0,20}", value in any::<String>(), text in any::<String>()) {
        let _ = load(&[(&name, &value)]);
        let _ = Loader::new().file(file(&text).path()).load();
    }

    #[test]
    fn each_source_overrides_the_one_before(
        file_ms in proptest::option::of(1_u64..1000), env_ms in proptest::option::of(1_u64..1000),
        cli_ms in proptest::option::of(1_u64..1000),
    ) {
        let file = file(&file_ms.map_or_else(String::new, |ms| format!("flush.interval_ms = {ms}")));
        let variables = env_ms.map(|ms| ("DYN_KVBM_FLUSH_INTERVAL_MS".to_owned(), ms.to_string()));
        let mut loader = Loader::new().file(file.path()).environment(variables);
        if let Some(ms) = cli_ms {
            loader = loader.set("flush.interval_ms", move |settings| settings.flush.interval_ms = ms);
        }
        let loaded = loader.load().expect("all are valid");
        let expected = cli_ms.or(env_ms).or(file_ms).unwrap_or(Settings::default().flush.interval_ms);
        prop_assert_eq!(loaded.settings.flush.interval_ms, expected);
        let origin = match (cli_ms, env_ms, file_ms) {
            (Some(_), _, _) => Origin::CommandLine,
            (_, Some(_), _) => Origin::Variable("DYN_KVBM_FLUSH_INTERVAL_MS".to_owned()),
            (_, _, Some(_)) => Origin::File { path: file.path().to_owned(), line: 1 },
            _ => Origin::Default,
        };
        prop_assert_eq!(row(&loaded, "flush.interval_ms").1, origin.to_string());
    }
}

#[test]
fn nothing_set_is_the_defaults() {
    let loaded =
        load(&[("PATH", "/bin"), ("DYN_LOG", "debug")]).expect("others' variables are left alone");
    assert_eq!(loaded.settings, Settings::default());
    assert!(loaded.rows().iter().all(|row| row.origin == Origin::Default));
    assert!(loaded.accepted.is_empty());
}

type Read = fn(&Settings) -> bool;

#[test]
fn every_toggle_means_what_it_says() {
    let toggles: [(&str, Read); 8] = [
        ("DYN_KVBM_HOST_CACHE_HUGE_PAGES", |s| s.host.huge_pages),
        ("DYN_KVBM_DISK_DISABLE_O_DIRECT", |s| !s.disk.o_direct),
        ("DYN_KVBM_DISK_ZEROFILL_FALLBACK", |s| s.disk.zerofill_fallback),
        ("DYN_KVBM_DISK_KEEP", |s| s.disk.keep),
        ("DYN_KVBM_OBJECT_KEEP", |s| s.object.keep),
        ("DYN_KVBM_METRICS", |s| s.metrics.enabled),
        ("DYN_KVBM_NIXL_BACKEND_GDS_MT", |s| s.nixl.backends["GDS_MT"]),
        ("DYN_KVBM_NIXL_BACKEND_ucx", |s| s.nixl.backends["UCX"]),
    ];
    for (variable, read) in toggles {
        for on in ["true", "1", "on", "yes", " TRUE ", "On"] {
            assert!(read(&settings(&[(variable, on)])), "{variable}={on}");
        }
        for off in ["false", "0", "off", "no", " FALSE ", "Off"] {
            assert!(!read(&settings(&[(variable, off)])), "{variable}={off}");
        }
        for neither in ["", " ", "2", "maybe", "truefalse"] {
            let message = load(&[(variable, neither)]).expect_err(variable).to_string();
            assert!(
                message.contains(variable)
                    && message.contains("true, 1, on, yes, false, 0, off, no"),
                "{message}"
            );
        }
    }
}

#[test]
fn upstream_sizes_are_decimal_and_blocks_win() {
    let gigabytes = ("DYN_KVBM_CPU_CACHE_GB", "1.5");
    assert_eq!(settings(&[BLOCK, gigabytes]).host.capacity, Some(Capacity::Bytes(1_500_000_000)));
    let blocks = ("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "1000");
    assert_eq!(settings(&[BLOCK, blocks, gigabytes]).host.capacity, Some(Capacity::Blocks(1000)));
    let unset = ("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "0");
    assert_eq!(
        settings(&[BLOCK, unset, gigabytes]).host.capacity,
        Some(Capacity::Bytes(1_500_000_000))
    );
    assert_eq!(settings(&[("DYN_KVBM_DISK_CACHE_GB", "0")]).disk.capacity, None);
}

#[test]
fn the_environment_beats_the_file_however_it_states_sizes() {
    let file = file("block_bytes = 4096\nhost.capacity = \"5000 blocks\"\n");
    let loaded =
        environment(&[("DYN_KVBM_CPU_CACHE_GB", "1")]).file(file.path()).load().expect("valid");
    assert_eq!(loaded.settings.host.capacity, Some(Capacity::Bytes(1_000_000_000)));
    assert_eq!(
        row(&loaded, "host.capacity"),
        ("1GB".to_owned(), "DYN_KVBM_CPU_CACHE_GB".to_owned())
    );
    let off =
        environment(&[("DYN_KVBM_CPU_CACHE_GB", "0")]).file(file.path()).load().expect("valid");
    assert_eq!(row(&off, "host.capacity"), ("none".to_owned(), "DYN_KVBM_CPU_CACHE_GB".to_owned()));
}

#[test]
fn zero_is_no_tier_whichever_the_tier_and_the_variable() {
    type Is = fn(&Settings) -> bool;
    let tiers: [(&str, Is); 4] = [
        ("DYN_KVBM_DEVICE_CACHE_GB", |s| s.device.capacity.is_some()),
        ("DYN_KVBM_CPU_CACHE_GB", |s| s.host.capacity.is_some()),
        ("DYN_KVBM_DISK_CACHE_GB", |s| s.disk.capacity.is_some()),
        ("DYN_KVBM_OBJECT_CACHE_GB", |s| s.object.place().is_some()),
    ];
    let url = ("DYN_KVBM_OBJECT_URL", "memory:///");
    for (variable, is_there) in tiers {
        assert!(is_there(&settings(&[BLOCK, url, (variable, "1")])), "{variable}=1");
        for nothing in ["0", "0.0", "0GiB", "none", " NONE "] {
            assert!(
                !is_there(&settings(&[BLOCK, url, (variable, nothing)])),
                "{variable}={nothing}"
            );
        }
    }
    for nothing in ["0", "none"] {
        let blocks = ("DYN_KVBM_OBJECT_NUM_BLOCKS", nothing);
        assert_eq!(settings(&[BLOCK, url, blocks]).object.place(), None, "{nothing}");
    }
}

#[test]
fn an_object_tier_without_room_is_warned_of() {
    let variables = [("DYN_KVBM_OBJECT_URL", "memory:///"), ("DYN_KVBM_OBJECT_CACHE_GB", "0")];
    let loaded = load(&variables).expect("no tier needs no block size");
    let told: Vec<_> = loaded.accepted.iter().map(ToString::to_string).collect();
    let expected = "object.url = \"memory:///\" (DYN_KVBM_OBJECT_URL): no object tier, since object.capacity is 0 \
                    (DYN_KVBM_OBJECT_CACHE_GB)";
    assert_eq!(told, [expected]);
    assert_eq!(row(&loaded, "object.capacity").0, "none");
    let hidden = load(&[variables[1]]).expect("nothing to lose");
    assert!(hidden.accepted.is_empty());
}

#[test]
fn the_object_tier_is_unlimited_by_default_and_by_name() {
    let url = ("DYN_KVBM_OBJECT_URL", "memory:///");
    let loaded = load(&[BLOCK, url]).expect("valid");
    assert_eq!(row(&loaded, "object.capacity"), ("unlimited".to_owned(), "default".to_owned()));
    let file = file("object.capacity = '5 blocks'\n");
    for variable in ["DYN_KVBM_OBJECT_CACHE_GB", "DYN_KVBM_OBJECT_NUM_BLOCKS"] {
        let loaded = environment(&[BLOCK, url, (variable, "Unlimited")]).file(file.path()).load();
        let object = loaded.expect(variable).settings.object;
        assert!(object.capacity.is_none() && object.place().is_some(), "{variable}");
    }
    load(&[BLOCK, ("DYN_KVBM_CPU_CACHE_GB", "unlimited")]).expect_err("memory has an end");
}

#[test]
fn the_object_tier_is_a_bucket_or_url_or_off() {
    let bucket = ("DYN_KVBM_OBJECT_BUCKET", "kv-cache");
    let url = |variables: &[(&str, &str)]| settings(variables).object.url;
    assert_eq!(url(&[BLOCK, bucket]).as_deref(), Some("s3://kv-cache"));
    assert_eq!(
        url(&[BLOCK, bucket, ("DYN_KVBM_OBJECT_ENABLED", "1")]).as_deref(),
        Some("s3://kv-cache")
    );
    assert_eq!(url(&[BLOCK, bucket, ("DYN_KVBM_OBJECT_ENABLED", "false")]), None);
    let both = [BLOCK, bucket, ("DYN_KVBM_OBJECT_URL", "file:///data/kv")];
    assert_eq!(url(&both).as_deref(), Some("file:///data/kv"));

    let message = load(&[("DYN_KVBM_OBJECT_ENABLED", "1")]).expect_err("nowhere").to_string();
    assert!(
        message.contains("DYN_KVBM_OBJECT_BUCKET or DYN_KVBM_OBJECT_URL or object.url"),
        "{message}"
    );
    let on = environment(&[BLOCK, ("DYN_KVBM_OBJECT_ENABLED", "1")]);
    on.set("object.url", |s| s.object.url = Some("memory:///".to_owned()))
        .load()
        .expect("the command line says where");
}

#[test]
fn the_parameter_names_the_file_before_the_variable_does() {
    let (first, second) = (file("eviction = 'fifo'\n"), file("eviction = 'lru'\n"));
    let variable = [("DYN_KVBM_CONFIG", first.path().to_str().expect("UTF-8"))];
    assert_eq!(settings(&variable).eviction, EvictionKind::Fifo);
    let loaded = environment(&variable).file(second.path()).load().expect("valid");
    assert_eq!(loaded.settings.eviction, EvictionKind::Lru);
}

#[test]
fn a_program_brings_its_own_defaults() {
    let own = Settings { block_bytes: Some(4096), ..Settings::default() };
    let loaded = Loader::new().defaults(own.clone()).load().expect("valid");
    assert_eq!(row(&loaded, "block_bytes"), ("4KiB".to_owned(), "program".to_owned()));
    let overridden = environment(&[BLOCK]).defaults(own).load().expect("valid");
    assert_eq!(overridden.settings.block_bytes, Some(65_536));
}

#[test]
fn a_file_may_set_everything() {
    let text = "
        block_bytes = 65536
        eviction = 'FIFO'
        [host]
        capacity = '1.5 GiB'
        huge_pages = false
        [disk]
        capacity = '5000 blocks'
        dirs = ['/a:b', '/c']
        o_direct = 'no'
        [flush]
        dirty_watermark = 5e-1
        [metrics]
        host = '::1'
        port = 0
        [nixl.backends]
        ucx = true
        POSIX = 'off'
        [nixl.posix]
        use_uring = true
        ios_pool_size = 1024
    ";
    let file = file(text);
    let settings = Loader::new().file(file.path()).load().expect("valid").settings;
    assert_eq!(settings.host.capacity, Some(Capacity::Bytes(3 << 29)));
    assert_eq!(settings.disk.capacity, Some(Capacity::Blocks(5000)));
    assert_eq!(settings.disk.dirs, [PathBuf::from("/a:b"), PathBuf::from("/c")]);
    assert_eq!(settings.eviction, EvictionKind::Fifo);
    assert!(!settings.host.huge_pages && !settings.disk.o_direct);
    assert!((settings.flush.dirty_watermark - 0.5).abs() < f64::EPSILON);
    assert!(settings.metrics.host.is_ipv6());
    assert!(settings.nixl.backends["UCX"] && !settings.nixl.backends["POSIX"]);
    assert_eq!(settings.nixl.parameters["POSIX"]["use_uring"], "true");
    assert_eq!(settings.nixl.parameters["POSIX"]["ios_pool_size"], "1024");
}

#[test]
fn plugins_are_off_unless_named_but_for_ucx() {
    let enabled = |variables: &[(&str, &str)]| {
        let settings = settings(variables);
        settings.nixl.enabled().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(enabled(&[]), ["UCX"]);
    assert_eq!(enabled(&[("DYN_KVBM_NIXL_BACKEND_UCX", "off")]), [""; 0]);
    let both = [("DYN_KVBM_NIXL_BACKEND_GDS_MT", "yes"), ("DYN_KVBM_NIXL_BACKEND_posix", "1")];
    assert_eq!(enabled(&both), ["GDS_MT", "POSIX"]);
}

#[test]
fn unknown_plugins_are_refused_with_the_list_unless_installed() {
    for variable in ["DYN_KVBM_NIXL_BACKEND_NOSUCH", "DYN_KVBM_NIXL_PARAM_NOSUCH__KEY"] {
        let loader = || Loader::new().environment([(variable.to_owned(), "1".to_owned())]);
        let message = loader()
            .nixl_plugins(|_| vec!["OURS".to_owned()])
            .load()
            .expect_err(variable)
            .to_string();
        assert!(
            message.contains(variable) && message.contains("UCX, ") && message.ends_with("OURS"),
            "{message}"
        );
        loader().nixl_plugins(|_| vec!["NOSUCH".to_owned()]).load().expect("it is installed");
    }
}

#[test]
fn parameters_of_plugins_come_from_variables_too() {
    let variables = [
        ("DYN_KVBM_NIXL_PARAM_POSIX__USE_URING", "true"),
        ("DYN_KVBM_NIXL_PARAM_OBJ__crtMinLimit", "1048576"),
    ];
    let loaded = load(&variables).expect("both are valid");
    assert_eq!(loaded.settings.nixl.parameters["OBJ"]["crtMinLimit"], "1048576");
    assert_eq!(row(&loaded, "nixl.posix.use_uring").1, "DYN_KVBM_NIXL_PARAM_POSIX__USE_URING");
    for variable in
        ["DYN_KVBM_NIXL_PARAM_POSIX", "DYN_KVBM_NIXL_PARAM_", "DYN_KVBM_NIXL_PARAM_OBJ__SECRET_KEY"]
    {
        load(&[(variable, "hunter2")]).expect_err(variable);
    }
}

#[test]
fn errors_name_the_line_the_value_and_what_is_valid() {
    let message = file_error("\n[disk]\nqueue_depth = 0.5\n");
    assert_eq!(
        message,
        "disk.queue_depth = \"0.5\" (FILE:3): not a whole number; valid: a whole number from 1 to 4096"
    );
    let message = file_error("[hots]\ncapacity = 1\n");
    let listed = "the nearest valid one is host.capacity, and beside it host.huge_pages, host.staging_blocks, \
                  host.persist, host.persist_index";
    assert_eq!(message, format!("unknown setting hots.capacity (FILE:2); {listed}"));
    let message = file_error("[host]\ncapacty = 1\n");
    assert_eq!(message, format!("unknown setting host.capacty (FILE:2); {listed}"));
    assert!(file_error("a = 1\na = 2\n").starts_with("FILE:2: not valid TOML: "));
    assert!(
        file_error("host.capacity = '1GB'\n")
            .starts_with("host.capacity = \"1GB\" (FILE:1): a tier needs")
    );
    for text in
        ["host = 5", "disk.dirs = [['/a']]", "disk.dirs = []", "flush.interval_ms = [1]", "[hots]"]
    {
        file_error(text);
    }
}

#[test]
fn errors_name_the_variable_and_the_nearest_one() {
    let message = load(&[("DYN_KVBM_CPU_CACHE_GBS", "1")]).expect_err("unknown").to_string();
    let listed = "the nearest valid one is DYN_KVBM_CPU_CACHE_GB, and beside it DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS, ";
    assert!(message.contains(listed), "{message}");
    let message = load(&[("DYN_KVBM_DISK_CACHE_GB", "lots\n")]).expect_err("no number").to_string();
    assert!(
        message.starts_with(
            "disk.capacity = \"lots\\n\" (DYN_KVBM_DISK_CACHE_GB): not a size; valid: "
        ),
        "{message}"
    );
    let message = load(&[("DYN_KVBM_EVICTION", "clock")]).expect_err("unknown").to_string();
    assert!(message.contains("valid: hazard, lru, "), "{message}");
    let missing = Loader::new().file("/nonexistent/kvbm.toml").load().expect_err("no such file");
    assert!(matches!(missing, SettingsError::Read { .. }));
    let endless = Loader::new().file("/dev/zero").load().expect_err("no settings file").to_string();
    assert!(endless.contains("larger than 1 MiB"), "{endless}");
    let mistyped = Loader::new().set("host.size", |_| ()).load().expect_err("no such key");
    assert!(matches!(mistyped, SettingsError::Unknown { .. }));
}

#[test]
fn secrets_are_in_no_output() {
    const SECRET: &str = "hunter2";
    let keys = [
        ("DYN_KVBM_ENCRYPTION_KEY", SECRET),
        ("DYN_KVBM_OBJECT_ACCESS_KEY", SECRET),
        ("DYN_KVBM_OBJECT_SECRET_KEY", SECRET),
    ];
    assert!(!format!("{:?}", environment(&keys)).contains(SECRET));
    let loaded = load(&keys).expect("a pair");
    assert_eq!(loaded.settings.object.secret_key.as_deref(), Some(SECRET));
    assert_eq!(row(&loaded, "object.secret_key").0, "(set)");
    assert_eq!(row(&loaded, "encryption.key").0, "(set)");
    let rows: String =
        loaded.rows().iter().map(|row| toml::to_string(row).expect("rows serialise")).collect();
    let settings = toml::to_string(&loaded.settings).expect("settings serialise");
    for output in [format!("{loaded:?}"), rows, settings] {
        assert!(!output.contains(SECRET), "{output}");
    }

    let refused = [
        load(&[("DYN_KVBM_NIXL_PARAM_OBJ__SECRET_KEY", SECRET)]),
        load(&[("DYN_KVBM_NIXL_PARAM_OBJ__ENDPOINT_OVERRIDE", "http://id:hunter2@minio:9000")]),
        load(&keys[2..]),
        load(&[("DYN_KVBM_ENCRYPTION_KEY", SECRET), ("DYN_KVBM_ENCRYPTION_KEY_FILE", "/keys")]),
        load(&[("DYN_KVBM_OBJECT_SECRET_KEYS", SECRET)]),
        load(&[("DYN_KVBM_OBJECT_URL", "s3://id:hunter2@bucket")]),
        load(&[("DYN_KVBM_OBJECT_BUCKET", "id:hunter2@bucket")]),
        load(&[("DYN_KVBM_OBJECT_ENDPOINT", "http://id:hunter2@minio:9000")]),
    ];
    for result in refused {
        let error = result.expect_err("refused");
        assert!(!format!("{error} {error:?}").contains(SECRET), "{error}");
    }
    let files = [
        "object.secret_key = \"hunter2",
        "object.secret_key = ['hunter2']",
        "object.secret_key = hunter2",
    ];
    for text in files {
        assert!(!file_error(text).contains(SECRET), "{}", file_error(text));
    }
}

/// Well-formed or not, with or without the `@`.
const LEAKS: [&str; 6] = [
    "s3://id:hunter2@bucket",
    "s3://id:hunter2",
    "s3://bucket/id:hunter2",
    "http://id:hunter2",
    "file://id:hunter2@host/path",
    "id:hunter2",
];

#[test]
fn credentials_in_urls_are_refused_and_in_no_output() {
    let variables = [
        "DYN_KVBM_OBJECT_URL",
        "DYN_KVBM_OBJECT_ENDPOINT",
        "DYN_KVBM_OBJECT_BUCKET",
        "DYN_KVBM_OBJECT_ENABLED",
    ];
    for url in LEAKS {
        for variable in variables {
            let error = load(&[BLOCK, (variable, url)]).expect_err(url);
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{variable}: {error}");
        }
        for text in
            [format!("object.url = '{url}'"), format!("object.url = ['file:///x', '{url}']")]
        {
            assert!(!file_error(&text).contains("hunter2"), "{}", file_error(&text));
        }
    }
}

/// A program may put anything into the settings, and print them before it has them checked.
#[test]
fn credentials_in_unchecked_settings_are_shown_nowhere() {
    for url in LEAKS {
        let mut settings = Settings { block_bytes: Some(4096), ..Settings::default() };
        settings.object.url = Some(url.to_owned());
        settings.object.endpoint = Some(url.to_owned());
        let values = [("access_key", "hunter2"), ("endpoint_override", "http://id:hunter2@minio")];
        let values = values.map(|(name, value)| (name.to_owned(), value.to_owned()));
        settings.nixl.parameters.insert("OBJ".to_owned(), values.into());
        let refused = settings.validate().expect_err(url);
        let on_the_command_line = Loader::new()
            .set("object.url", move |s| s.object.url = Some(url.to_owned()))
            .load()
            .expect_err(url);
        let outputs = [
            format!("{settings:?}"),
            toml::to_string(&settings).expect("settings serialise"),
            format!("{refused} {refused:?}"),
            format!("{on_the_command_line} {on_the_command_line:?}"),
        ];
        for output in outputs {
            assert!(!output.contains("hunter2"), "{url}: {output}");
        }
    }
}

#[test]
fn upstream_variables_without_effect_are_checked_and_reported() {
    let variables = [
        ("DYN_KVBM_LEADER_ZMQ_HOST", "10.0.0.1"),
        ("DYN_KVBM_LEADER_ZMQ_PUB_PORT", "56001"),
        ("DYN_KVBM_CACHE_STATS_MAX_REQUESTS", "10"),
    ];
    let loaded = load(&variables).expect("all accepted");
    let told: Vec<_> = loaded.accepted.iter().map(ToString::to_string).collect();
    assert_eq!(told.len(), 3);
    assert_eq!(
        told[0],
        "DYN_KVBM_LEADER_ZMQ_HOST = \"10.0.0.1\" (DYN_KVBM_LEADER_ZMQ_HOST): accepted, no effect yet"
    );

    let wrong = [
        ("DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY", "101"),
        ("DYN_KVBM_LEADER_ZMQ_ACK_PORT", "70000"),
        ("DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER", "maybe"),
        ("DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS", "0.5"),
        ("DYN_KVBM_NIXL_BACKEND_", "1"),
        ("DYN_KVBM_NIXL_BACKEND_A-B", "1"),
    ];
    for (variable, value) in wrong {
        load(&[(variable, value)]).expect_err(variable);
    }
}

#[test]
fn dynamo_variables_count_where_no_setting_names_a_discovery() {
    let peers = |more: &[(&str, &str)]| {
        let dynamo = [("ETCD_ENDPOINTS", "http://etcd:2379"), ("DYN_NAMESPACE", "dynamo")];
        let host = [("DYN_KVBM_BLOCK_BYTES", "4096"), ("DYN_KVBM_CPU_CACHE_GB", "1")];
        load(&[&dynamo[..], &host, more].concat()).unwrap()
    };
    let found = |loaded: &Loaded| {
        let PeerSettings { etcd, namespace, .. } = &loaded.settings.peers;
        (etcd.clone(), namespace.clone())
    };
    let (etcd, namespace) = (Some("http://etcd:2379".to_owned()), Some("dynamo".to_owned()));
    assert_eq!(found(&peers(&[])), (None, None), "there are no peers");
    let on = ("DYN_KVBM_PEERS", "true");
    let loaded = peers(&[on]);
    assert_eq!(found(&loaded), (etcd.clone(), namespace));
    let origin = Origin::Variable("ETCD_ENDPOINTS".to_owned());
    assert_eq!(loaded.origins.get("peers.etcd"), Some(&origin));
    let ours = peers(&[on, ("DYN_KVBM_PEERS_NAMESPACE", "ours")]);
    assert_eq!(found(&ours), (etcd, Some("ours".to_owned())));
    let listed = peers(&[on, ("DYN_KVBM_PEERS_ADDRESSES", "a:1")]);
    assert_eq!(found(&listed), (None, None), "another list is named");
}

#[test]
fn foreign_names_are_told_which_setting_to_use() {
    let variables = [
        ("DYN_KVBM_PEERS", "true"),
        ("DYN_KVBM_BLOCK_BYTES", "4096"),
        ("DYN_KVBM_CPU_CACHE_GB", "1"),
        ("ETCD_AUTH_PASSWORD", "hunter2"),
        ("NIXL_NUM_TRANSPORT_THREADS", "4"),
    ];
    let told: Vec<_> = load(&variables).unwrap().accepted.iter().map(ToString::to_string).collect();
    assert!(
        told[0].contains("peers.etcd_password_file") && !told[0].contains("hunter2"),
        "{told:?}"
    );
    assert!(told[1].contains("nixl.ucx.num_workers"), "{told:?}");
    assert!(load(&variables[3..]).unwrap().accepted.is_empty(), "there are no peers");
    let error = file_error("[kv_transfer]\nmetadata_server = \"http://etcd:2379\"");
    assert!(error.contains("never had it; use peers.etcd") && error.contains(":2"), "{error}");
}

#[test]
fn a_text_replaces_a_file_and_arguments_prevail_over_variables() {
    let variables = [
        ("DYN_KVBM_CPU_CACHE_GB".into(), "2".into()),
        ("DYN_KVBM_BLOCK_BYTES".into(), "4096".into()),
    ];
    let arguments = [
        ("block_bytes", Argument::One("64KiB".into())),
        ("host.capacity", Argument::One("1.5GB".into())),
        ("disk.dirs", Argument::Many(vec!["/a".into(), "/b".into()])),
    ];
    let mut sources =
        Loader::new().environment(variables).text("block_bytes = 4096\n[disk]\nqueue_depth = 7\n");
    for (path, value) in arguments {
        sources = sources.argument(path, value);
    }
    let loaded = sources.load().unwrap();
    assert_eq!(loaded.settings.block_bytes, Some(64 << 10));
    assert_eq!(loaded.settings.host.capacity, Some(Capacity::Bytes(1_500_000_000)));
    assert_eq!(loaded.settings.disk.queue_depth, 7);
    assert_eq!(loaded.settings.disk.dirs.len(), 2);
    assert_eq!(row(&loaded, "disk.queue_depth").1, "<text>:3");
    assert_eq!(row(&loaded, "block_bytes").1, "argument");
}

#[test]
fn errors_name_the_argument_and_the_text() {
    let argument = |path: &str, text: &str| {
        let loaded = Loader::new().argument(path, Argument::One(text.into())).load();
        loaded.expect_err(path).to_string()
    };
    assert!(
        argument("disk.queue_depths", "1")
            .starts_with("unknown setting disk.queue_depths (argument); ")
    );
    assert!(argument("disk.queue_depth", "0").starts_with("disk.queue_depth = \"0\" (argument): "));
    let message = Loader::new().text("a = 1\na = 2\n").load().expect_err("twice").to_string();
    assert!(message.starts_with("<text>:2: not valid TOML: "), "{message}");
}
