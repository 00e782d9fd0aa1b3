//! `kvbm forget`: keys of a tenant are destroyed wherever the settings say that tiers are.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvbm_tiers::object::{Store, StoreOptions};
use kvbm_tiers::sealed::{KeyFiles, KeyStore, RECORD_BYTES, WrappedKey};

use crate::{Place, assert_fails, json, text};

fn key(tenant: u32, id: u8) -> WrappedKey {
    let mut bytes = [0; RECORD_BYTES];
    bytes[..4].copy_from_slice(b"KVK1");
    let numbered = u64::from(tenant) + 1;
    bytes[8..16].copy_from_slice(&numbered.to_le_bytes());
    bytes[16..21].copy_from_slice(&numbered.to_be_bytes()[3..]);
    bytes[31] = id;
    WrappedKey::parse(bytes).expect("a wrapped key")
}

fn files(dir: &Path) -> KeyFiles {
    fs::create_dir_all(dir).expect("a directory");
    KeyFiles::open(&[PathBuf::from(dir)], "v2-sealed64-x", Duration::from_secs(3))
        .expect("files of keys")
}

fn store(url: &str) -> Store {
    Store::open(url, &StoreOptions::default()).expect("a store")
}

fn tenants(keys: &impl KeyStore) -> Vec<Option<u32>> {
    let keys = keys.of_tenants(&[Some(7), Some(8)]);
    keys.into_iter().flat_map(|keys| keys.expect("keys")).map(|key| key.tenant()).collect()
}

#[test]
fn a_tenant_has_no_keys_any_more_and_others_have() {
    let place = Place::new();
    let (dir, url) = (place.path("disk"), place.url("objects"));
    let disk = files(&dir);
    [key(7, 1), key(8, 2), key(7, 3)].iter().for_each(|key| disk.add(key).expect("it is kept"));
    drop(disk);
    let objects = store(&url);
    [key(7, 4), key(8, 5)]
        .iter()
        .for_each(|key| objects.keys("v2-sealed64-y").add(key).expect("it is kept"));
    let dir = dir.to_str().expect("UTF-8");
    let args = ["forget", "--tenant", "7", "--disk-dir", dir, "--object-url", &url, "--json"];
    let report = json(&place.run(&args));
    assert_eq!(report["keys_destroyed"], 3, "{report}");
    assert_eq!(tenants(&files(Path::new(dir))), [Some(8)]);
    assert_eq!(tenants(&objects.keys("v2-sealed64-y")), [Some(8)]);
    assert_eq!(json(&place.run(&args))["keys_destroyed"], 0, "there are none any more");
}

#[test]
fn while_an_engine_works_it_is_refused() {
    let place = Place::new();
    let dir = place.path("disk");
    let open = files(&dir);
    open.add(&key(7, 1)).expect("it is kept");
    let args = ["forget", "--tenant", "7", "--disk-dir", dir.to_str().expect("UTF-8")];
    assert_fails(&place.run(&args), 2, &["in use"]);
    assert_eq!(tenants(&open), [Some(7)]);
}

#[test]
fn what_is_not_encrypted_is_named() {
    let place = Place::new();
    let dir = place.path("disk");
    fs::create_dir(&dir).expect("a directory");
    fs::write(dir.join("kvbm-v1-block64-x-0of1.blocks"), b"somebody's").expect("a file");
    let output =
        place.run(&["forget", "--tenant", "7", "--disk-dir", dir.to_str().expect("UTF-8")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("kvbm-v1-block64-x-0of1.blocks is not encrypted"));
}
