//! The bytes of an index: docs/disk-format.md describes them one by one.

use crc_fast::{CrcAlgorithm, Digest};
use ring::hmac;

use super::TierEpoch;
use crate::copy::{BlockKey, SlotId, Tier};
use crate::fields::{u32_at, u64_at, u128_at};
use crate::sealed::{KeyRing, MacKey};

const MAGIC: [u8; 8] = *b"KVBMindx";
/// A change of the format counts these up: the version that any process can write, and the one that
/// takes a main key.
pub(super) const VERSION: u32 = 1;
pub(super) const SEALED_VERSION: u32 = 2;
/// A header lies in the file twice, in different pages: it has what no entry can replace.
pub(super) const HEADER_BYTES: usize = 4096;
pub(super) const ENTRIES_AT: u64 = 2 * HEADER_BYTES as u64;
pub(super) const ENTRY_BYTES: usize = 64;
/// Longest namespace, in bytes.
pub(super) const MAX_NAMESPACE: usize = 200;

const NAMESPACE_AT: usize = 80;
const CRC_AT: usize = 12;
const ENTRY_CRC_AT: usize = 60;
/// In the sealed version.
const KEY_AT: usize = NAMESPACE_AT + MAX_NAMESPACE;
const MAC_AT: usize = KEY_AT + 8;
const MAC_BYTES: usize = 32;
const TENANT_AT: usize = 48;
const ENTRY_MAC_AT: usize = 52;
/// What an index's codes are made with, and nothing else.
const PURPOSE: &[u8] = b"kvbm index v2";

const STORED: u8 = 1;
const REMOVED: u8 = 2;
const HAS_PARENT: u8 = 1;
const HAS_TENANT: u8 = 1;

/// What holds for all entries of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IndexHeader {
    /// Drawn anew for each file: entries of another one do not pass.
    pub(super) file: u64,
    pub(super) epoch: TierEpoch,
    pub(super) block_bytes: u64,
    pub(super) identity: u128,
    pub(super) slots: u32,
    pub(super) parts: u32,
    pub(super) tier: Tier,
    pub(super) namespace: String,
    /// What authenticates the header and the entries; `None`: nothing does.
    pub(super) key: Option<MacKey>,
}

/// The key of an index under a main key; `None`: that is not given.
pub(super) fn mac_key(ring: &KeyRing, number: u32) -> Option<MacKey> {
    ring.mac_key(number, PURPOSE)
}

/// Why bytes are no header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoHeader {
    /// Something else.
    Foreign,
    /// One of another version.
    Version(u32),
    /// One that has changed, or whose writer has not the key.
    Damaged,
    /// One that is authenticated with a main key that is not given.
    NoKey(u32),
}

impl IndexHeader {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&MAGIC);
        let version = if self.key.is_some() { SEALED_VERSION } else { VERSION };
        put(&version.to_le_bytes());
        // The checksum, which counts as zero in its own sum.
        put(&[0; 4]);
        put(&self.file.to_le_bytes());
        put(&self.epoch.epoch.to_le_bytes());
        put(&self.epoch.forgotten.to_le_bytes());
        put(&self.block_bytes.to_le_bytes());
        put(&self.identity.to_le_bytes());
        put(&self.slots.to_le_bytes());
        put(&[0; 4]);
        put(&self.parts.to_le_bytes());
        put(&[self.tier.index() as u8, self.namespace.len() as u8, 0, 0]);
        put(self.namespace.as_bytes());
        if let Some(key) = &self.key {
            bytes[KEY_AT..KEY_AT + 4].copy_from_slice(&key.number().to_le_bytes());
            let mac = key.sign(&[&bytes]);
            bytes[MAC_AT..MAC_AT + MAC_BYTES].copy_from_slice(mac.as_ref());
        }
        let crc = crc32c(&[&bytes]);
        bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(super) fn decode(
        bytes: &[u8; HEADER_BYTES],
        ring: Option<&KeyRing>,
    ) -> Result<Self, NoHeader> {
        if !bytes.starts_with(&MAGIC) {
            return Err(NoHeader::Foreign);
        }
        let version = u32_at(bytes, 8);
        if version != VERSION && version != SEALED_VERSION {
            return Err(NoHeader::Version(version));
        }
        let mut summed = *bytes;
        summed[CRC_AT..CRC_AT + 4].fill(0);
        if crc32c(&[&summed]) != u32_at(bytes, CRC_AT) {
            return Err(NoHeader::Damaged);
        }
        let key =
            if version == SEALED_VERSION { Some(Self::authenticate(&summed, ring)?) } else { None };
        let name = usize::from(bytes[77]).min(MAX_NAMESPACE);
        let namespace = str::from_utf8(&bytes[NAMESPACE_AT..NAMESPACE_AT + name]);
        Ok(Self {
            file: u64_at(bytes, 16),
            epoch: TierEpoch { epoch: u64_at(bytes, 24), forgotten: u64_at(bytes, 32) },
            block_bytes: u64_at(bytes, 40),
            identity: u128_at(bytes, 48),
            slots: u32_at(bytes, 64),
            parts: u32_at(bytes, 72),
            tier: *Tier::ALL.get(usize::from(bytes[76])).ok_or(NoHeader::Damaged)?,
            namespace: namespace.map_err(|_| NoHeader::Damaged)?.to_owned(),
            key,
        })
    }

    /// `bytes` without their checksum.
    fn authenticate(
        bytes: &[u8; HEADER_BYTES],
        ring: Option<&KeyRing>,
    ) -> Result<MacKey, NoHeader> {
        let number = u32_at(bytes, KEY_AT);
        let key = ring.and_then(|ring| mac_key(ring, number)).ok_or(NoHeader::NoKey(number))?;
        let mut signed = *bytes;
        signed[MAC_AT..MAC_AT + MAC_BYTES].fill(0);
        let is_sound = key.is_of(&bytes[MAC_AT..MAC_AT + MAC_BYTES], &[&signed]);
        is_sound.then_some(key).ok_or(NoHeader::Damaged)
    }
}

/// A block in a slot, by the names that the table gives blocks (see
/// [`TierIndex`](super::TierIndex)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    /// Where it lies.
    pub slot: SlotId,
    /// In which of the slot's lives, as the process counted that stored it.
    pub generation: u32,
    /// Which block.
    pub block: BlockKey,
    /// The hash of the block before it, of the same group; `None` for the first block of a chain.
    pub parent: Option<u128>,
    /// crc32c of its bytes.
    pub checksum: u32,
    /// Whose it is. Only an index that is authenticated says so.
    pub tenant: Option<u32>,
}

/// What happened to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexChange {
    /// It has a block, in place of any that it had.
    Stored(IndexEntry),
    /// It has none any more.
    Removed(SlotId),
}

impl IndexChange {
    /// The slot.
    pub const fn slot(&self) -> SlotId {
        match self {
            Self::Stored(entry) => entry.slot,
            Self::Removed(slot) => *slot,
        }
    }

    /// As the `position`-th entry of the file with this header.
    pub(super) fn encode(&self, header: &IndexHeader, position: u64) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[4..8].copy_from_slice(&self.slot().0.to_le_bytes());
        match self {
            Self::Stored(entry) => {
                bytes[..3].copy_from_slice(&[
                    STORED,
                    entry.block.group,
                    u8::from(entry.parent.is_some()),
                ]);
                bytes[8..12].copy_from_slice(&entry.generation.to_le_bytes());
                bytes[12..16].copy_from_slice(&entry.checksum.to_le_bytes());
                bytes[16..32].copy_from_slice(&entry.block.hash.to_le_bytes());
                bytes[32..48].copy_from_slice(&entry.parent.unwrap_or_default().to_le_bytes());
            }
            Self::Removed(_) => bytes[0] = REMOVED,
        }
        if let Some(key) = &header.key {
            if let Self::Stored(IndexEntry { tenant: Some(tenant), .. }) = self {
                bytes[3] = HAS_TENANT;
                bytes[TENANT_AT..ENTRY_MAC_AT].copy_from_slice(&tenant.to_le_bytes());
            }
            let mac = entry_mac(key, &bytes, header.file, position);
            bytes[ENTRY_MAC_AT..].copy_from_slice(&mac.as_ref()[..ENTRY_BYTES - ENTRY_MAC_AT]);
            return bytes;
        }
        let crc = entry_crc(&bytes, header.file, position);
        bytes[ENTRY_CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// `None`: the bytes are not what was written there.
    pub(super) fn decode(
        bytes: &[u8; ENTRY_BYTES],
        header: &IndexHeader,
        position: u64,
    ) -> Option<Self> {
        let is_sound = match &header.key {
            Some(key) => is_code(
                &bytes[ENTRY_MAC_AT..],
                entry_mac(key, bytes, header.file, position).as_ref(),
            ),
            None => entry_crc(bytes, header.file, position) == u32_at(bytes, ENTRY_CRC_AT),
        };
        if !is_sound {
            return None;
        }
        let has_tenant = header.key.is_some() && bytes[3] & HAS_TENANT != 0;
        let slot = Some(SlotId(u32_at(bytes, 4))).filter(|slot| slot.0 < header.slots)?;
        match bytes[0] {
            STORED => Some(Self::Stored(IndexEntry {
                slot,
                generation: u32_at(bytes, 8),
                block: BlockKey { hash: u128_at(bytes, 16), group: bytes[1] },
                parent: (bytes[2] & HAS_PARENT != 0).then(|| u128_at(bytes, 32)),
                checksum: u32_at(bytes, 12),
                tenant: has_tenant.then(|| u32_at(bytes, TENANT_AT)),
            })),
            REMOVED => Some(Self::Removed(slot)),
            _ => None,
        }
    }
}

/// Reads the beginning of an index and an entry behind it, both as they are and with checksums that
/// fit: else no other fault would be reached. For fuzzing: whatever they are, each way answers.
///
/// # Panics
/// If writing again what was understood, and reading that, gives something else.
#[cfg(any(test, feature = "testing"))]
pub fn read_in_every_way(bytes: &[u8]) {
    let (mut page, mut entry) = ([0; HEADER_BYTES], [0; ENTRY_BYTES]);
    let split = bytes.len().min(HEADER_BYTES);
    page[..split].copy_from_slice(&bytes[..split]);
    let rest = &bytes[split..bytes.len().min(split + ENTRY_BYTES)];
    entry[..rest.len()].copy_from_slice(rest);
    read_header_and_entry(&page, &entry);
    page[..MAGIC.len()].copy_from_slice(&MAGIC);
    page[8..CRC_AT].copy_from_slice(&VERSION.to_le_bytes());
    page[CRC_AT..CRC_AT + 4].fill(0);
    let crc = crc32c(&[&page]);
    page[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    let crc = entry_crc(&entry, u64_at(&page, 16), 0);
    entry[ENTRY_CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    read_header_and_entry(&page, &entry);
}

#[cfg(any(test, feature = "testing"))]
fn read_header_and_entry(page: &[u8; HEADER_BYTES], entry: &[u8; ENTRY_BYTES]) {
    let Ok(header) = IndexHeader::decode(page, None) else { return };
    assert_eq!(IndexHeader::decode(&header.encode(), None).as_ref(), Ok(&header));
    if let Some(change) = IndexChange::decode(entry, &header, 0) {
        assert!(change.slot().0 < header.slots);
        assert_eq!(IndexChange::decode(&change.encode(&header, 0), &header, 0), Some(change));
        assert_eq!(IndexChange::decode(entry, &header, 1), None, "an entry of another place");
    }
}

/// [`entry_crc`], for those who have the key.
fn entry_mac(key: &MacKey, bytes: &[u8; ENTRY_BYTES], file: u64, position: u64) -> hmac::Tag {
    key.sign(&[&file.to_le_bytes(), &position.to_le_bytes(), &bytes[..ENTRY_MAC_AT]])
}

/// Whether a code begins so, in the same time wherever it differs.
fn is_code(beginning: &[u8], code: &[u8]) -> bool {
    beginning.iter().zip(code).fold(0, |differs, (one, other)| differs | (one ^ other)) == 0
}

/// Binds an entry to its file and its place there: what an older file left behind, or what lies
/// elsewhere, does not pass.
fn entry_crc(bytes: &[u8; ENTRY_BYTES], file: u64, position: u64) -> u32 {
    crc32c(&[&file.to_le_bytes(), &position.to_le_bytes(), &bytes[..ENTRY_CRC_AT]])
}

fn crc32c(parts: &[&[u8]]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize() as u32
}
