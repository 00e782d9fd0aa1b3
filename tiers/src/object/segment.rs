//! The format of a segment object: blocks back to back, then a footer that describes them.
//!
//! ```text
//! 0                                                        end
//! ├─────────┬─────────┬───┬───────────┬─────────┬───┬─────────┤
//! │ block 0 │ block 1 │ … │ block n-1 │ entry 0 │ … │ trailer │
//! ├─────────┴─────────┴───┴───────────┼─────────┴───┴─────────┤
//! │ payload                           │ footer                │
//!
//! entry, 56 bytes                      trailer, 56 bytes
//!   0  hash       u128                   0  fingerprint   u128 ┐
//!  16  parent     u128                  16  epoch         u64  │ provenance
//!  32  offset     u64, from the start   24  forgotten     u64  ┘
//!  40  length     u64, bytes            32  footer_bytes  u64, entries and trailer
//!  48  crc32c     u32, of the block     40  version       u32, 2
//!  52  group      u8                    44  crc32c        u32, of the footer's bytes before it
//!  53  has_parent u8, 0 or 1            48  magic         8 bytes, "KVBMSEG1"
//!  54  zero       2 bytes
//! ```
//!
//! The last 24 bytes are the same in all versions, so that one which is not known can be named.
//!
//! Where blocks are encrypted, the footer is of version 3: an entry has 8 bytes more, its tenant,
//! and the trailer 40 more before these 24, the number of a main key and a code that cannot be made
//! without it.
//!
//! Integers are little-endian. crc32c is the Castagnoli polynomial (RFC 3720). The trailer comes
//! last, so that a reader who knows only an object's name finds everything from its end.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};

use crate::checksum::checksum;
use crate::copy::BlockKey;
use crate::fields::{u32_at, u64_at, u128_at};
use crate::sealed::{KeyRing, MacKey};

/// The last bytes of every segment.
pub const MAGIC: [u8; 8] = *b"KVBMSEG1";
/// The version of the format that is written and read here where blocks are not encrypted.
pub const VERSION: u32 = 2;
/// Where they are.
pub const SEALED_VERSION: u32 = 3;
/// Bytes of one entry of the footer.
pub const ENTRY_BYTES: usize = 56;
/// Bytes of the footer's fixed end.
pub const TRAILER_BYTES: usize = 56;
const MAC_BYTES: usize = 32;
/// What the sealed version has more: in an entry, and in the trailer behind the provenance.
const SEALED_ENTRY_BYTES: usize = ENTRY_BYTES + 8;
const SEALED_TRAILER_BYTES: usize = TRAILER_BYTES + 8 + MAC_BYTES;
/// What footers' codes are made with, and nothing else.
const PURPOSE: &[u8] = b"kvbm footer v3";
/// Of these, bytes that all versions have.
pub const TAIL_BYTES: usize = 24;

/// What the trailer's checksum does not cover: itself and the magic number after it.
const UNCHECKED_BYTES: usize = 12;

/// Whose blocks a segment holds: those of one fingerprint, by the names that they had at that time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Provenance {
    /// Digest of the fingerprint; 0: nothing tells the blocks' models apart, and no one else may
    /// read them.
    pub fingerprint: u128,
    /// Epoch of its names.
    pub epoch: u64,
    /// How often everything was forgotten within the epoch.
    pub forgotten: u64,
}

/// What a segment says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footer {
    /// Whose blocks they are.
    pub provenance: Provenance,
    /// The blocks, in the order of their places.
    pub entries: Vec<SegmentEntry>,
}

/// Where a block lies in its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentEntry {
    /// Which block.
    pub block: BlockKey,
    /// Hash of the block before it in its chain; `None`: it is the first.
    pub parent: Option<u128>,
    /// First byte, from the segment's start.
    pub offset: u64,
    /// Bytes of the block.
    pub length: u64,
    /// Checksum of the block.
    pub crc32c: u32,
    /// Whose it is. Only a footer that is authenticated says so.
    pub tenant: Option<u32>,
}

/// What authenticates the footers of a namespace.
#[derive(Clone, Debug)]
pub struct FooterKeys {
    ring: Arc<KeyRing>,
    namespace: String,
}

impl FooterKeys {
    /// Under main keys: the current one signs, all verify.
    pub fn new(ring: Arc<KeyRing>, namespace: &str) -> Self {
        Self { ring, namespace: namespace.to_owned() }
    }

    pub(super) fn of(&self, segment: u128) -> FooterKey<'_> {
        FooterKey { keys: self, segment }
    }
}

/// The same for one segment: a footer of another's is none.
#[derive(Clone, Copy, Debug)]
pub(super) struct FooterKey<'a> {
    keys: &'a FooterKeys,
    segment: u128,
}

impl FooterKey<'_> {
    fn key(&self, number: u32) -> Option<MacKey> {
        self.keys.ring.mac_key(number, PURPOSE)
    }

    /// What a code covers beside the footer: parts of fixed lengths around the namespace.
    fn name(&self) -> Vec<u8> {
        [&self.segment.to_le_bytes(), self.keys.namespace.as_bytes()].concat()
    }
}

/// Why bytes are not the end of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The footer starts before the bytes given. Read `needed` bytes from the segment's end.
    #[error("the footer takes the last {needed} bytes of the segment")]
    Incomplete {
        /// Bytes of the footer.
        needed: u64,
    },
    /// The magic number is missing.
    #[error("not a segment of KV blocks, or one that was cut short")]
    NotASegment,
    /// Written by another version.
    #[error(
        "segment format {version}; read here are {VERSION}, and {SEALED_VERSION} where blocks are encrypted"
    )]
    Version {
        /// Which.
        version: u32,
    },
    /// Authenticated with a main key that is not given.
    #[error("the footer is authenticated with main key {number}, which is not given")]
    NoKey {
        /// Its number.
        number: u32,
    },
    /// Written, changed or moved by someone without the key.
    #[error("the footer was not written with its key for this segment")]
    NotAuthentic,
    /// A checksum or a range does not hold.
    #[error("the footer is corrupt")]
    Corrupt,
}

/// Bytes of the footer of a segment with `blocks` blocks.
pub(super) const fn footer_bytes(blocks: usize, is_sealed: bool) -> usize {
    let (entry, trailer) = sizes(is_sealed);
    blocks * entry + trailer
}

const fn sizes(is_sealed: bool) -> (usize, usize) {
    if is_sealed {
        (SEALED_ENTRY_BYTES, SEALED_TRAILER_BYTES)
    } else {
        (ENTRY_BYTES, TRAILER_BYTES)
    }
}

/// The footer of a segment with these blocks.
pub fn encode_footer(provenance: &Provenance, entries: &[SegmentEntry]) -> Bytes {
    encode(provenance, entries, None)
}

/// The same, authenticated where there is a key for the segment.
pub(super) fn encode(
    provenance: &Provenance,
    entries: &[SegmentEntry],
    key: Option<FooterKey<'_>>,
) -> Bytes {
    let footer_bytes = footer_bytes(entries.len(), key.is_some());
    let mut out = BytesMut::with_capacity(footer_bytes);
    for entry in entries {
        out.put_u128_le(entry.block.hash);
        out.put_u128_le(entry.parent.unwrap_or_default());
        out.put_u64_le(entry.offset);
        out.put_u64_le(entry.length);
        out.put_u32_le(entry.crc32c);
        out.put_u8(entry.block.group);
        out.put_u8(entry.parent.is_some().into());
        let tenant = entry.tenant.filter(|_| key.is_some());
        out.put_u8(tenant.is_some().into());
        out.put_u8(0);
        if key.is_some() {
            out.put_u32_le(tenant.unwrap_or_default());
            out.put_u32_le(0);
        }
    }
    out.put_u128_le(provenance.fingerprint);
    out.put_u64_le(provenance.epoch);
    out.put_u64_le(provenance.forgotten);
    if let Some(key) = key {
        let number = key.keys.ring.current();
        out.put_u32_le(number);
        out.put_u32_le(0);
        // The current key is always given.
        match key.key(number) {
            Some(mac) => out.put_slice(mac.sign(&[&key.name(), &out]).as_ref()),
            None => out.put_bytes(0, MAC_BYTES),
        }
    }
    out.put_u64_le(footer_bytes as u64);
    out.put_u32_le(if key.is_some() { SEALED_VERSION } else { VERSION });
    out.put_u32_le(checksum(&out));
    out.put_slice(&MAGIC);
    out.freeze()
}

/// What a segment of `object_bytes` bytes, of which `tail` is the end, says of itself.
///
/// # Errors
/// See [`FormatError`]. Whatever the bytes, no entry returned reaches outside the payload.
pub fn decode_footer(tail: &[u8], object_bytes: u64) -> Result<Footer, FormatError> {
    decode(tail, object_bytes, None)
}

/// The same; with a key only what was written with it.
pub(super) fn decode(
    tail: &[u8],
    object_bytes: u64,
    key: Option<FooterKey<'_>>,
) -> Result<Footer, FormatError> {
    let end = tail.last_chunk::<TAIL_BYTES>().ok_or(FormatError::NotASegment)?;
    let (footer_bytes, version) = (u64_at(end, 0), u32_at(end, 8));
    if end[16..] != MAGIC {
        return Err(FormatError::NotASegment);
    }
    let expected = if key.is_some() { SEALED_VERSION } else { VERSION };
    if version != expected {
        return Err(FormatError::Version { version });
    }
    let payload_bytes = object_bytes.checked_sub(footer_bytes).ok_or(FormatError::Corrupt)?;
    if footer_bytes > tail.len() as u64 {
        return Err(FormatError::Incomplete { needed: footer_bytes });
    }
    let footer = &tail[tail.len() - footer_bytes as usize..];
    let (entry_bytes, trailer_bytes) = sizes(key.is_some());
    let entries_bytes = footer.len().checked_sub(trailer_bytes).ok_or(FormatError::Corrupt)?;
    if checksum(&footer[..footer.len() - UNCHECKED_BYTES]) != u32_at(end, 12) {
        return Err(FormatError::Corrupt);
    }
    key.map_or(Ok(()), |key| authenticate(footer, key))?;
    let (entries, trailer) = footer.split_at(entries_bytes);
    if !entries_bytes.is_multiple_of(entry_bytes) {
        return Err(FormatError::Corrupt);
    }
    let entries = entries.chunks_exact(entry_bytes);
    let entries =
        entries.map(|entry| decode_entry(entry, payload_bytes)).collect::<Result<_, _>>()?;
    let (epoch, forgotten) = (u64_at(trailer, 16), u64_at(trailer, 24));
    Ok(Footer {
        provenance: Provenance { fingerprint: u128_at(trailer, 0), epoch, forgotten },
        entries,
    })
}

/// The footer is at least as long as a sealed trailer.
fn authenticate(footer: &[u8], key: FooterKey<'_>) -> Result<(), FormatError> {
    let mac_at = footer.len() - TAIL_BYTES - MAC_BYTES;
    let (signed, code) = footer.split_at(mac_at);
    let number = u32_at(signed, mac_at - 8);
    let mac = key.key(number).ok_or(FormatError::NoKey { number })?;
    let is_sound = mac.is_of(&code[..MAC_BYTES], &[&key.name(), signed]);
    is_sound.then_some(()).ok_or(FormatError::NotAuthentic)
}

/// Of the length of its version.
fn decode_entry(bytes: &[u8], payload_bytes: u64) -> Result<SegmentEntry, FormatError> {
    let (hash, offset, length) = (u128_at(bytes, 0), u64_at(bytes, 32), u64_at(bytes, 40));
    let inside = offset.checked_add(length).is_some_and(|end| end <= payload_bytes);
    let parent = match (bytes[53], u128_at(bytes, 16)) {
        (0, 0) => None,
        (1, parent) => Some(parent),
        _ => return Err(FormatError::Corrupt),
    };
    let tenant = match (bytes[54], bytes.get(ENTRY_BYTES..SEALED_ENTRY_BYTES)) {
        (0, None | Some([0, 0, 0, 0, 0, 0, 0, 0])) => None,
        (1, Some(more)) if more[4..] == [0; 4] => Some(u32_at(more, 0)),
        _ => return Err(FormatError::Corrupt),
    };
    if !inside || bytes[55] != 0 {
        return Err(FormatError::Corrupt);
    }
    let block = BlockKey { hash, group: bytes[52] };
    Ok(SegmentEntry { block, parent, offset, length, crc32c: u32_at(bytes, 48), tenant })
}

/// Reads bytes as the authenticated end of an object whose length the first eight give, both as
/// they are and with a code and a trailer that fit: else no other fault would be reached. For
/// fuzzing: whatever they are, there is an answer.
///
/// # Panics
/// If something else is written than was read, or another signer's bytes are taken.
#[cfg(any(test, feature = "testing"))]
pub fn read_sealed_in_every_way(bytes: &[u8]) {
    let Some((object_bytes, tail)) = bytes.split_first_chunk() else { return };
    let object_bytes = u64::from_le_bytes(*object_bytes);
    let ring = KeyRing::parse(FUZZED_KEY).expect("it is a key");
    let keys = FooterKeys::new(Arc::new(ring), "fuzzed");
    read_sealed(tail, object_bytes, &keys);
    let fitting = with_fitting_trailer(tail, keys.of(FUZZED_SEGMENT));
    read_sealed(&fitting, object_bytes, &keys);
    let other = keys.of(FUZZED_SEGMENT + 1);
    assert!(
        decode(&fitting, object_bytes, Some(other)).is_err(),
        "another segment's footer is taken"
    );
}

#[cfg(any(test, feature = "testing"))]
const FUZZED_KEY: &str = "1:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
#[cfg(any(test, feature = "testing"))]
const FUZZED_SEGMENT: u128 = 7;

#[cfg(any(test, feature = "testing"))]
fn read_sealed(tail: &[u8], object_bytes: u64, keys: &FooterKeys) {
    let key = Some(keys.of(FUZZED_SEGMENT));
    let Ok(Footer { provenance, entries }) = decode(tail, object_bytes, key) else { return };
    let footer = encode(&provenance, &entries, key);
    assert!(tail.ends_with(&footer), "another footer is written than was read");
    let payload_bytes = object_bytes - footer.len() as u64;
    assert!(entries.iter().all(|entry| entry.offset + entry.length <= payload_bytes));
}

#[cfg(any(test, feature = "testing"))]
fn with_fitting_trailer(beginning: &[u8], key: FooterKey<'_>) -> Vec<u8> {
    let mut footer = beginning.to_vec();
    footer.extend([1_u32.to_le_bytes(), [0; 4]].concat());
    let mac = key.key(1).expect("it is given").sign(&[&key.name(), &footer]);
    footer.extend(mac.as_ref());
    footer.extend(((footer.len() + TAIL_BYTES) as u64).to_le_bytes());
    footer.extend(SEALED_VERSION.to_le_bytes());
    footer.extend(checksum(&footer).to_le_bytes());
    footer.extend(MAGIC);
    footer
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type BlockEntry = (u128, Option<u128>, u8, u32);

    const PROVENANCE: Provenance = Provenance { fingerprint: 3 << 100, epoch: 5, forgotten: 2 };

    fn entries(blocks: &[BlockEntry], length: u64) -> Vec<SegmentEntry> {
        let entry = |(i, &(hash, parent, group, crc32c)): (usize, &BlockEntry)| SegmentEntry {
            block: BlockKey { hash, group },
            parent,
            offset: i as u64 * length,
            length,
            crc32c,
            tenant: None,
        };
        blocks.iter().enumerate().map(entry).collect()
    }

    proptest! {
        #[test]
        fn footers_come_back(blocks: Vec<BlockEntry>, length in 0..1u64 << 40, before: Vec<u8>) {
            let entries = entries(&blocks, length);
            let footer = encode_footer(&PROVENANCE, &entries);
            let object_bytes = blocks.len() as u64 * length + footer.len() as u64;
            let tail = [&before[..], &footer].concat();
            let decoded = Footer { provenance: PROVENANCE, entries };
            prop_assert_eq!(decode_footer(&tail, object_bytes), Ok(decoded));
        }

        #[test]
        fn any_flipped_bit_is_noticed(blocks: Vec<BlockEntry>, bit: prop::sample::Index) {
            let mut footer = encode_footer(&PROVENANCE, &entries(&blocks, 64)).to_vec();
            let bit = bit.index(footer.len() * 8);
            footer[bit / 8] ^= 1 << (bit % 8);
            let object_bytes = blocks.len() as u64 * 64 + footer.len() as u64;
            prop_assert!(decode_footer(&footer, object_bytes).is_err());
        }

        #[test]
        fn arbitrary_bytes_are_errors(tail: Vec<u8>, object_bytes: u64) {
            prop_assert!(decode_footer(&tail, object_bytes).is_err());
        }

        /// A footer of nonsense whose checksum holds: written by a faulty program, not by a faulty
        /// disk.
        #[test]
        fn no_entry_reaches_outside(mut tail: Vec<u8>, object_bytes in 0u64..1 << 12) {
            tail.extend((tail.len() as u64 + TRAILER_BYTES as u64).to_le_bytes());
            tail.extend(VERSION.to_le_bytes());
            tail.extend(checksum(&tail).to_le_bytes());
            tail.extend(MAGIC);
            for entry in decode_footer(&tail, object_bytes).into_iter().flat_map(|footer| footer.entries) {
                prop_assert!(entry.offset + entry.length <= object_bytes - tail.len() as u64);
            }
        }

        #[test]
        fn a_cut_footer_is_an_error(blocks: Vec<BlockEntry>, cut: prop::sample::Index) {
            let footer = encode_footer(&PROVENANCE, &entries(&blocks, 64));
            let cut = &footer[..cut.index(footer.len())];
            prop_assert!(decode_footer(cut, 1 << 40).is_err());
        }
    }

    #[test]
    fn a_short_tail_says_how_much_to_read() {
        let footer = encode_footer(&PROVENANCE, &entries(&[(1, None, 0, 2); 9], 64));
        let needed = footer.len() as u64;
        let tail = &footer[footer.len() - TRAILER_BYTES..];
        assert_eq!(decode_footer(tail, 9 * 64 + needed), Err(FormatError::Incomplete { needed }));
    }

    #[test]
    fn other_versions_are_named_and_not_read() {
        for version in [1, 3] {
            let mut footer = encode_footer(&PROVENANCE, &entries(&[(1, None, 0, 2)], 64)).to_vec();
            let at = footer.len() - 16;
            footer[at] = version;
            let refused = Err(FormatError::Version { version: version.into() });
            assert_eq!(decode_footer(&footer, 64 + footer.len() as u64), refused);
        }
    }

    fn keys(text: &str, namespace: &str) -> FooterKeys {
        let digits = |digits: &str| digits.repeat(4);
        let text = text
            .replace('A', &digits("0123456789abcdef"))
            .replace('B', &digits("fedcba9876543210"));
        FooterKeys::new(Arc::new(KeyRing::parse(&text).unwrap()), namespace)
    }

    fn of_tenants(blocks: u32) -> Vec<SegmentEntry> {
        let mut entries = entries(&vec![(1, None, 0, 2); blocks as usize], 64);
        (0..)
            .zip(&mut entries)
            .for_each(|(n, entry)| entry.tenant = (n > 0).then_some(u32::MAX - n));
        entries
    }

    #[test]
    fn an_authenticated_footer_comes_back_with_its_key() {
        let entries = of_tenants(3);
        let ours = keys("1:A", "here");
        let footer = encode(&PROVENANCE, &entries, Some(ours.of(7)));
        assert_eq!(footer.len(), footer_bytes(3, true));
        let object_bytes = 3 * 64 + footer.len() as u64;
        let read =
            |keys: &FooterKeys, segment| decode(&footer, object_bytes, Some(keys.of(segment)));
        let whole = Footer { provenance: PROVENANCE, entries };
        assert_eq!(read(&ours, 7).as_ref(), Ok(&whole));
        assert_eq!(read(&keys("2:B,1:A", "here"), 7).as_ref(), Ok(&whole));
        assert_eq!(read(&keys("2:B", "here"), 7), Err(FormatError::NoKey { number: 1 }));
        for (keys, segment) in [(keys("1:B", "here"), 7), (keys("1:A", "there"), 7), (ours, 8)] {
            assert_eq!(read(&keys, segment), Err(FormatError::NotAuthentic));
        }
        let version = Err(FormatError::Version { version: SEALED_VERSION });
        assert_eq!(decode_footer(&footer, object_bytes), version);
    }

    #[test]
    fn whoever_has_no_key_can_change_nothing_in_a_footer() {
        let ours = keys("1:A", "here");
        let footer = encode(&PROVENANCE, &of_tenants(2), Some(ours.of(7)));
        let object_bytes = 2 * 64 + footer.len() as u64;
        let crc_at = footer.len() - UNCHECKED_BYTES;
        for bit in 0..8 * (footer.len() - TAIL_BYTES) {
            let mut forged = footer.to_vec();
            forged[bit / 8] ^= 1 << (bit % 8);
            let crc = checksum(&forged[..crc_at]);
            forged[crc_at..crc_at + 4].copy_from_slice(&crc.to_le_bytes());
            let read = decode(&forged, object_bytes, Some(ours.of(7)));
            let refused =
                matches!(read, Err(FormatError::NotAuthentic | FormatError::NoKey { .. }));
            assert!(refused, "bit {bit}: {read:?}");
        }
        // Nor put one there that asks for no key.
        let plain = encode_footer(&PROVENANCE, &entries(&[(1, None, 0, 2)], 64));
        let read = decode(&plain, 64 + plain.len() as u64, Some(ours.of(7)));
        assert_eq!(read, Err(FormatError::Version { version: VERSION }));
    }
}
