//! The format of a manifest: which segments a worker relies on.
//!
//! ```text
//!  0  magic        8 bytes, "KVBMMAN1"
//!  8  version      u32, 1
//! 12  renewal_ms   u32, how often the worker means to write it again
//! 16  count        u64, of the names
//! 24  names        u128 each
//!  …  crc32c       u32, of all bytes before it
//! ```
//!
//! Integers are little-endian.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};

use super::names::SegmentName;
use crate::checksum::checksum;
use crate::fields::{u32_at, u64_at};

/// The first bytes of every manifest.
pub const MAGIC: [u8; 8] = *b"KVBMMAN1";
/// The version of the format that is written here, the only one that is read.
pub const VERSION: u32 = 1;
const HEAD_BYTES: usize = 24;
const NAME_BYTES: usize = 16;
const CRC_BYTES: usize = 4;
/// Bytes of the longest manifest: a million segments. What is longer is not fetched.
pub(super) const MAX_BYTES: u64 = 16 << 20;

/// What a worker relies on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// How often it is written again. A worker that did not for [`LAPSES`] times as long is taken
    /// for gone.
    renewal: Duration,
    /// In order: 16 bytes each is all that a million of them take.
    names: Vec<SegmentName>,
}

/// Renewals that a worker may miss before it is taken for gone.
pub(super) const LAPSES: u32 = 10;

/// Why bytes are not a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// Written by another version.
    #[error("manifest format {version}; this version reads {VERSION}")]
    Version {
        /// Which.
        version: u32,
    },
    /// It is no manifest, or not all of one, or its bytes have changed.
    #[error("the manifest is corrupt")]
    Corrupt,
}

impl Manifest {
    pub(super) fn new(renewal: Duration, names: impl IntoIterator<Item = SegmentName>) -> Self {
        let mut names: Vec<_> = names.into_iter().collect();
        names.sort_unstable();
        names.dedup();
        Self { renewal, names }
    }

    /// How long after it was written the worker is taken for gone.
    pub(super) fn lapses_after(&self) -> Duration {
        self.renewal * LAPSES
    }

    /// The segments that it names.
    pub(super) fn names(&self) -> impl Iterator<Item = SegmentName> {
        self.names.iter().copied()
    }

    pub(super) fn holds(&self, name: SegmentName) -> bool {
        self.names.binary_search(&name).is_ok()
    }

    /// As it is written.
    pub fn encode(&self) -> Bytes {
        let mut out =
            BytesMut::with_capacity(HEAD_BYTES + self.names.len() * NAME_BYTES + CRC_BYTES);
        out.put_slice(&MAGIC);
        out.put_u32_le(VERSION);
        out.put_u32_le(u32::try_from(self.renewal.as_millis()).unwrap_or(u32::MAX));
        out.put_u64_le(self.names.len() as u64);
        self.names.iter().for_each(|name| out.put_u128_le(name.0));
        out.put_u32_le(checksum(&out));
        out.freeze()
    }

    /// The manifest that these bytes are.
    ///
    /// # Errors
    /// See [`ManifestError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        let (head, rest) = bytes.split_first_chunk::<HEAD_BYTES>().ok_or(ManifestError::Corrupt)?;
        let word = |at| u32_at(head, at);
        if head[..8] != MAGIC {
            return Err(ManifestError::Corrupt);
        }
        if word(8) != VERSION {
            return Err(ManifestError::Version { version: word(8) });
        }
        let (names, crc) = rest.split_last_chunk::<CRC_BYTES>().ok_or(ManifestError::Corrupt)?;
        let count = u64_at(head, 16);
        let (names, odd) = names.as_chunks::<NAME_BYTES>();
        let is_sound = checksum(&bytes[..bytes.len() - CRC_BYTES]) == u32::from_le_bytes(*crc);
        if !is_sound || !odd.is_empty() || count != names.len() as u64 {
            return Err(ManifestError::Corrupt);
        }
        let names = names.iter().map(|name| SegmentName(u128::from_le_bytes(*name)));
        Ok(Self::new(Duration::from_millis(word(12).into()), names))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn manifest(renewal_ms: u32, names: Vec<u128>) -> Manifest {
        Manifest::new(Duration::from_millis(renewal_ms.into()), names.into_iter().map(SegmentName))
    }

    proptest! {
        #[test]
        fn manifests_come_back(renewal_ms: u32, names: Vec<u128>) {
            let manifest = manifest(renewal_ms, names);
            prop_assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
        }

        #[test]
        fn any_flipped_bit_and_any_cut_is_noticed(names: Vec<u128>, at: prop::sample::Index) {
            let bytes = manifest(60_000, names).encode();
            prop_assert!(Manifest::decode(&bytes[..at.index(bytes.len())]).is_err());
            let (mut flipped, bit) = (bytes.to_vec(), at.index(bytes.len() * 8));
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Manifest::decode(&flipped).is_err());
        }

        #[test]
        fn arbitrary_bytes_are_errors(bytes: Vec<u8>) {
            prop_assert!(Manifest::decode(&bytes).is_err());
        }
    }

    #[test]
    fn other_versions_are_named_and_not_read() {
        let mut bytes = manifest(1, vec![2]).encode().to_vec();
        bytes[8] = 2;
        assert_eq!(Manifest::decode(&bytes), Err(ManifestError::Version { version: 2 }));
    }
}
