//! The format of a segment object: blocks back to back, then a footer that describes them.
//!
//! ```text
//! 0                                                        end
//! ├─────────┬─────────┬───┬───────────┬─────────┬───┬─────────┤
//! │ block 0 │ block 1 │ … │ block n-1 │ entry 0 │ … │ trailer │
//! ├─────────┴─────────┴───┴───────────┼─────────┴───┴─────────┤
//! │ payload                           │ footer                │
//!
//! entry, 40 bytes                      trailer, 24 bytes
//!   0  hash      u128                    0  footer_bytes  u64, entries and trailer
//!  16  offset    u64, from the start     8  version       u32, 1
//!  24  length    u64, bytes             12  crc32c        u32, of the footer's bytes before it
//!  32  crc32c    u32, of the block      16  magic         8 bytes, "KVBMSEG1"
//!  36  group     u8
//!  37  zero      3 bytes
//! ```
//!
//! Integers are little-endian. crc32c is the Castagnoli polynomial (RFC 3720). The trailer comes last, so
//! that a reader who knows only an object's name finds everything from its end.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::{BufMut, Bytes, BytesMut};

use crate::checksum::checksum;
use crate::clock;
use crate::copy::BlockKey;

/// The last bytes of every segment.
pub const MAGIC: [u8; 8] = *b"KVBMSEG1";
/// The version of the format that is written here, the only one that is read.
pub const VERSION: u32 = 1;
/// Bytes of one entry of the footer.
pub const ENTRY_BYTES: usize = 40;
/// Bytes of the footer's fixed end.
pub const TRAILER_BYTES: usize = 24;

/// What the trailer's checksum does not cover: itself and the magic number after it.
const UNCHECKED_BYTES: usize = 12;

/// Where a block lies in its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Which block.
    pub block: BlockKey,
    /// First byte, from the segment's start.
    pub offset: u64,
    /// Bytes of the block.
    pub length: u64,
    /// Checksum of the block.
    pub crc32c: u32,
}

/// Why bytes are not the end of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The footer starts before the bytes given. Read so many from the segment's end.
    #[error("the footer takes the last {needed} bytes of the segment")]
    Incomplete {
        /// Bytes of the footer.
        needed: u64,
    },
    /// The magic number is missing.
    #[error("not a segment of KV blocks, or one that was cut short")]
    NotASegment,
    /// Written by another version.
    #[error("segment format {version}; this version reads {VERSION}")]
    Version {
        /// Which.
        version: u32,
    },
    /// A checksum or a range does not hold.
    #[error("the footer is corrupt")]
    Corrupt,
}

/// Bytes of the footer of a segment with so many blocks.
pub(super) const fn footer_bytes(blocks: usize) -> usize {
    blocks * ENTRY_BYTES + TRAILER_BYTES
}

/// The footer of a segment with these blocks.
pub fn encode_footer(entries: &[Entry]) -> Bytes {
    let footer_bytes = footer_bytes(entries.len());
    let mut out = BytesMut::with_capacity(footer_bytes);
    for entry in entries {
        out.put_u128_le(entry.block.hash);
        out.put_u64_le(entry.offset);
        out.put_u64_le(entry.length);
        out.put_u32_le(entry.crc32c);
        out.put_u8(entry.block.group);
        out.put_bytes(0, 3);
    }
    out.put_u64_le(footer_bytes as u64);
    out.put_u32_le(VERSION);
    out.put_u32_le(checksum(&out));
    out.put_slice(&MAGIC);
    out.freeze()
}

/// The entries of a segment of `object_bytes` bytes, of which `tail` is the end.
///
/// # Errors
/// See [`FormatError`]. Whatever the bytes, no entry returned reaches outside the payload.
pub fn decode_footer(tail: &[u8], object_bytes: u64) -> Result<Vec<Entry>, FormatError> {
    let trailer = tail.last_chunk::<TRAILER_BYTES>().ok_or(FormatError::NotASegment)?;
    let footer_bytes = u64_at(trailer, 0);
    let version = u32_at(trailer, 8);
    if trailer[16..] != MAGIC {
        return Err(FormatError::NotASegment);
    }
    if version != VERSION {
        return Err(FormatError::Version { version });
    }
    let payload_bytes = object_bytes.checked_sub(footer_bytes).ok_or(FormatError::Corrupt)?;
    if footer_bytes > tail.len() as u64 {
        return Err(FormatError::Incomplete { needed: footer_bytes });
    }
    let footer = &tail[tail.len() - footer_bytes as usize..];
    let checked = footer.len().checked_sub(UNCHECKED_BYTES).ok_or(FormatError::Corrupt)?;
    if checksum(&footer[..checked]) != u32_at(trailer, 12) {
        return Err(FormatError::Corrupt);
    }
    let entries = footer.len().checked_sub(TRAILER_BYTES).ok_or(FormatError::Corrupt)?;
    let (entries, rest) = footer[..entries].as_chunks::<ENTRY_BYTES>();
    if !rest.is_empty() {
        return Err(FormatError::Corrupt);
    }
    entries.iter().map(|entry| decode_entry(entry, payload_bytes)).collect()
}

fn decode_entry(bytes: &[u8; ENTRY_BYTES], payload_bytes: u64) -> Result<Entry, FormatError> {
    let (hash, offset, length) = (u128_at(bytes, 0), u64_at(bytes, 16), u64_at(bytes, 24));
    let inside = offset.checked_add(length).is_some_and(|end| end <= payload_bytes);
    if !inside || bytes[37..] != [0; 3] {
        return Err(FormatError::Corrupt);
    }
    let block = BlockKey { hash, group: bytes[36] };
    Ok(Entry { block, offset, length, crc32c: u32_at(bytes, 32) })
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

fn u128_at(bytes: &[u8], at: usize) -> u128 {
    u128::from_le_bytes(array_at(bytes, at))
}

/// The callers' offsets are constants within records of fixed size.
fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

/// Name of a segment: 48 bits of milliseconds since 1970, 48 random bits of the writer, 32 bits of its count.
/// Sorts by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SegmentName(u128);

impl SegmentName {
    /// The 128 bits.
    #[cfg(feature = "nixl")]
    pub(super) const fn bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for SegmentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}.kvseg", self.0)
    }
}

/// Gives each segment a name that no other writer uses.
#[derive(Debug)]
pub(super) struct SegmentNames {
    writer: u64,
    count: AtomicU32,
}

impl SegmentNames {
    pub(super) fn new() -> Self {
        // The hasher's keys are random: the standard library's only source of randomness.
        let random = RandomState::new().hash_one((std::process::id(), clock::since_1970()));
        Self { writer: random >> 16, count: AtomicU32::new(0) }
    }

    pub(super) fn next(&self) -> SegmentName {
        let millis = clock::since_1970().as_millis();
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        SegmentName(millis << 80 | u128::from(self.writer) << 32 | u128::from(count))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entries(blocks: &[(u128, u8, u32)], length: u64) -> Vec<Entry> {
        let entry = |(i, &(hash, group, crc32c)): (usize, &(u128, u8, u32))| Entry {
            block: BlockKey { hash, group },
            offset: i as u64 * length,
            length,
            crc32c,
        };
        blocks.iter().enumerate().map(entry).collect()
    }

    proptest! {
        #[test]
        fn footers_come_back(blocks: Vec<(u128, u8, u32)>, length in 0..1u64 << 40, before: Vec<u8>) {
            let entries = entries(&blocks, length);
            let footer = encode_footer(&entries);
            let object_bytes = blocks.len() as u64 * length + footer.len() as u64;
            let tail = [&before[..], &footer].concat();
            prop_assert_eq!(decode_footer(&tail, object_bytes), Ok(entries));
        }

        #[test]
        fn any_flipped_bit_is_noticed(blocks: Vec<(u128, u8, u32)>, bit: prop::sample::Index) {
            let mut footer = encode_footer(&entries(&blocks, 64)).to_vec();
            let bit = bit.index(footer.len() * 8);
            footer[bit / 8] ^= 1 << (bit % 8);
            let object_bytes = blocks.len() as u64 * 64 + footer.len() as u64;
            prop_assert!(decode_footer(&footer, object_bytes).is_err());
        }

        #[test]
        fn arbitrary_bytes_are_errors(tail: Vec<u8>, object_bytes: u64) {
            prop_assert!(decode_footer(&tail, object_bytes).is_err());
        }

        /// A footer of nonsense whose checksum holds: written by a faulty program, not by a faulty disk.
        #[test]
        fn no_entry_reaches_outside(mut tail: Vec<u8>, object_bytes in 0u64..1 << 12) {
            tail.extend((tail.len() as u64 + TRAILER_BYTES as u64).to_le_bytes());
            tail.extend(VERSION.to_le_bytes());
            tail.extend(checksum(&tail).to_le_bytes());
            tail.extend(MAGIC);
            for entry in decode_footer(&tail, object_bytes).unwrap_or_default() {
                prop_assert!(entry.offset + entry.length <= object_bytes - tail.len() as u64);
            }
        }

        #[test]
        fn a_cut_footer_is_an_error(blocks: Vec<(u128, u8, u32)>, cut: prop::sample::Index) {
            let footer = encode_footer(&entries(&blocks, 64));
            let cut = &footer[..cut.index(footer.len())];
            prop_assert!(decode_footer(cut, 1 << 40).is_err());
        }
    }

    #[test]
    fn a_short_tail_says_how_much_to_read() {
        let footer = encode_footer(&entries(&[(1, 0, 2); 9], 64));
        let needed = footer.len() as u64;
        let tail = &footer[footer.len() - TRAILER_BYTES..];
        assert_eq!(decode_footer(tail, 9 * 64 + needed), Err(FormatError::Incomplete { needed }));
    }

    #[test]
    fn names_differ_and_sort_by_age() {
        let names = SegmentNames::new();
        let some: Vec<_> = (0..1000).map(|_| names.next()).collect();
        assert!(some.is_sorted_by(|a, b| a < b), "{some:?}");
        assert_ne!(SegmentNames::new().writer, names.writer);
        assert_eq!(some[0].to_string().len(), "0123456789abcdef0123456789abcdef.kvseg".len());
    }
}
