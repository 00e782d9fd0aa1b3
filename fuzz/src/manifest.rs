//! Manifests of workers that share a bucket.

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::object::manifest::{MAGIC, Manifest, VERSION};

/// Reads a manifest, as it is and with a beginning and an end that fit: else nothing with a wrong
/// checksum would ever be looked at further.
pub fn manifest(bytes: &[u8]) {
    read(bytes);
    read(&sealed(bytes));
}

fn read(bytes: &[u8]) {
    let Ok(manifest) = Manifest::decode(bytes) else { return };
    assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
}

fn sealed(middle: &[u8]) -> Vec<u8> {
    let mut manifest = [MAGIC.as_slice(), &VERSION.to_le_bytes(), middle].concat();
    manifest.extend(checksum(&manifest).to_le_bytes());
    manifest
}
