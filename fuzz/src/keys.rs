//! Keys: the main ones as an operator writes them, and those of tenants, wrapped, as they lie in
//! files.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::sealed::{
    FoundKey, KeyFiles, KeyId, KeyRing, KeyStore, RECORD_BYTES, TenantKeys, WrappedKey,
};
use kvbm_tiers::{BlockKey, IndexEntry, SlotId};

const MAIN_KEY: &str = "1:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const NAMESPACE: &str = "ns";
const TENANT: u32 = 7;

/// Reads a file of main keys.
pub fn main_keys(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match KeyRing::parse(text) {
        Ok(ring) => {
            assert!(ring.current() > 0 && ring.numbers().any(|number| number == ring.current()));
        }
        Err(error) => {
            assert!(error.to_string().contains("NUMBER:KEY"), "{error} says what to write")
        }
    }
}

/// Takes records as they come from a medium for keys of tenants.
pub fn wrapped_key(bytes: &[u8]) {
    let records = bytes.as_chunks::<RECORD_BYTES>().0;
    let wrapped: Vec<_> = records.iter().filter_map(|record| WrappedKey::parse(*record)).collect();
    let readable = readable(&wrapped);
    let named: BTreeSet<_> = wrapped.iter().map(WrappedKey::tenant).collect();
    assert!(readable.is_subset(&named), "a key that was not given");
    // Of one that is readable: a bit of another may be just what it lacks.
    let is_readable = |record: &&[u8; RECORD_BYTES]| {
        WrappedKey::parse(**record).is_some_and(|key| !self::readable(&[key]).is_empty())
    };
    let Some(first) = records.iter().find(is_readable) else { return };
    for byte in (4..RECORD_BYTES - 16).step_by(9) {
        let mut record = *first;
        record[byte] ^= 1;
        let changed = WrappedKey::parse(record).expect("its beginning is the same");
        assert!(self::readable(&[changed]).is_empty(), "byte {byte} is not covered");
    }
}

/// The tenants whose keys can be unwrapped.
fn readable(wrapped: &[WrappedKey]) -> BTreeSet<Option<u32>> {
    let ring = Arc::new(KeyRing::parse(MAIN_KEY).expect("a key"));
    let keys = TenantKeys::new(ring, NAMESPACE, Box::new(Given(wrapped.to_vec())));
    let entry = |tenant| IndexEntry {
        slot: SlotId(0),
        generation: 0,
        block: BlockKey { hash: 1, group: 0 },
        parent: None,
        checksum: 1,
        tenant,
    };
    let mut entries: Vec<_> = wrapped.iter().map(|key| entry(key.tenant())).collect();
    keys.retain_readable(&mut entries);
    entries.iter().map(|entry| entry.tenant).collect()
}

/// Keys that lie nowhere else.
#[derive(Debug)]
struct Given(Vec<WrappedKey>);

impl KeyStore for Given {
    fn find(&self, id: KeyId) -> io::Result<FoundKey> {
        Ok(FoundKey::Live(self.0.iter().filter(|key| key.id() == id).cloned().collect()))
    }

    fn of_tenants(&self, tenants: &[Option<u32>]) -> Vec<io::Result<Vec<WrappedKey>>> {
        let of = |tenant| self.0.iter().filter(|key| key.tenant() == tenant).cloned().collect();
        tenants.iter().map(|&tenant| Ok(of(tenant))).collect()
    }

    fn add(&self, _: &WrappedKey) -> io::Result<()> {
        Ok(())
    }

    fn destroy(&self, _: u32, _: &[KeyId]) -> io::Result<usize> {
        Ok(0)
    }
}

/// Opens a file of keys, as it is and with a header that fits; adds a key, and destroys a tenant's.
pub fn key_file(bytes: &[u8]) {
    open(bytes);
    let mut header = [0; RECORD_BYTES];
    header[..9].copy_from_slice(b"KVBMkeys\x01");
    open(&[&header, bytes].concat());
}

fn open(bytes: &[u8]) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join(format!("kvbm-{NAMESPACE}.keys"));
    let mut file =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).expect("a file");
    file.write_all(bytes).expect("room");
    let dirs = [dir.path().to_owned()];
    let Ok(files) = KeyFiles::open(&dirs, NAMESPACE, Duration::ZERO) else { return };
    let records = bytes.as_chunks::<RECORD_BYTES>().0;
    let named =
        records.iter().filter_map(|record| WrappedKey::parse(*record)).map(|key| key.tenant());
    let tenants: Vec<_> =
        named.chain([Some(TENANT)]).collect::<BTreeSet<_>>().into_iter().collect();
    let all = || -> Vec<_> {
        files
            .of_tenants(&tenants)
            .into_iter()
            .flat_map(|keys| keys.expect("they are in memory"))
            .collect()
    };
    let before = all();
    files.add(&wrapped(TENANT)).expect("room");
    let after = all();
    let (destroyed, others): (Vec<_>, Vec<_>) =
        after.iter().partition(|key| key.tenant() == Some(TENANT));
    files.destroy(TENANT, &[]).expect("it can be written");
    let left = all();
    assert!(left.iter().all(|key| key.tenant() != Some(TENANT)), "a destroyed key is there");
    // A name is one key's, and goes with it.
    let is_destroyed = |key: &WrappedKey| destroyed.iter().any(|other| other.id() == key.id());
    assert!(others.iter().all(|key| left.contains(key) || is_destroyed(key)), "a key is lost");
    assert!(after.len() <= before.len() + 1);
}

/// It opens nothing: only its place is looked at.
fn wrapped(tenant: u32) -> WrappedKey {
    let mut bytes = [0x5a; RECORD_BYTES];
    bytes[..4].copy_from_slice(b"KVK1");
    bytes[8..16].copy_from_slice(&(u64::from(tenant) + 1).to_le_bytes());
    WrappedKey::parse(bytes).expect("it begins as one")
}
