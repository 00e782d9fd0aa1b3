//! What a sealed block looks like, and how it is made.
//!
//! ```text
//! 0                  block_bytes                                              block_bytes + 56
//! ├──────────────────┬──────────┬────────┬─────────┬──────────┬────────┬────────┤
//! │ block            │ crc32c 4 │ tag 16 │ magic 4 │ key id 4 │ salt 16│nonce 12│
//! ├──────────────────┴──────────┼────────┼─────────┴──────────┴────────┴────────┤
//! │ encrypted                   │        │ in the clear, authenticated          │
//! ```
//!
//! AES-256-GCM, with a key of each block's own: HKDF-SHA-256 of the main key and the salt. The tag also covers who the
//! block is and where it belongs (`identity`), so that a block cannot stand in for another, here or elsewhere.
//!
//! **No nonce is used twice with a key.** GCM fails badly where that happens, and counters start again when a machine is
//! cloned or a file is lost. So nothing is counted: the system's generator gives 28 fresh bytes to every block that is
//! sealed, 16 for its key and 12 for its nonce. That two of 2^64 blocks under one main key (at a million a second: 600,000
//! years) draw the same has a probability below 2^-96. Nor is there a limit to what one main key may seal, since each
//! derived key seals one block.

use std::ops::Range;
use std::sync::Arc;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

use super::keys::KeyRing;
use crate::copy::{BlockKey, CopyError, CopyErrorKind, Tier};

/// What a sealed block has beyond the block.
pub const SEAL_BYTES: usize = CRC_BYTES + TAG_BYTES + HEADER_BYTES;

const CRC_BYTES: usize = 4;
const TAG_BYTES: usize = 16;
const SALT_BYTES: usize = 16;
/// Magic number, key id, salt, nonce.
const HEADER_BYTES: usize = 4 + 4 + SALT_BYTES + NONCE_LEN;
/// Sealed, in the first version.
const MAGIC: [u8; 4] = *b"KVS1";

/// Seals and opens the blocks of one tier and namespace.
#[derive(Debug)]
pub struct Cipher {
    keys: Arc<KeyRing>,
    random: SystemRandom,
    block_bytes: usize,
    /// What all blocks here have in common.
    place: Vec<u8>,
}

impl Cipher {
    /// For blocks of `block_bytes` bytes in a tier. What is sealed in one namespace opens in no other.
    pub fn new(keys: Arc<KeyRing>, tier: Tier, namespace: &str, block_bytes: usize) -> Self {
        let mut place = (block_bytes as u64).to_le_bytes().to_vec();
        place.push(tier.index() as u8);
        place.extend_from_slice(namespace.as_bytes());
        Self { keys, random: SystemRandom::new(), block_bytes, place }
    }

    /// Bytes of one block.
    pub const fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Seals the block at the start of `room`, which is `SEAL_BYTES` longer, along with its checksum.
    pub(super) fn seal(&self, block: BlockKey, crc: u32, room: &mut [u8]) -> Result<(), CopyError> {
        let Parts { secret, tag, header } = self.parts();
        debug_assert_eq!(room.len(), header.end, "a sealed block's room");
        let number = self.keys.current();
        let fresh = &mut [0; SALT_BYTES + NONCE_LEN];
        self.random.fill(fresh).map_err(|_| no_random_bytes())?;
        room[header.clone()][..4].copy_from_slice(&MAGIC);
        room[header.clone()][4..8].copy_from_slice(&number.to_le_bytes());
        room[header.clone()][8..].copy_from_slice(fresh);
        room[secret.clone()][self.block_bytes..].copy_from_slice(&crc.to_le_bytes());
        let (key, nonce) = self.key(&room[header.clone()])?;
        let identity = self.identity(block, &room[header]);
        let sealed = key.seal_in_place_separate_tag(nonce, Aad::from(identity), &mut room[secret]);
        let sealed = sealed.map_err(|_| too_long())?;
        room[tag].copy_from_slice(sealed.as_ref());
        Ok(())
    }

    /// Opens what was sealed as this block, in place, and returns the block's checksum. What is in `room` after an error
    /// means nothing.
    pub(super) fn open(&self, block: BlockKey, room: &mut [u8]) -> Result<u32, CopyError> {
        let Parts { secret, tag, header } = self.parts();
        let header = room.get(header).filter(|header| header.starts_with(&MAGIC));
        let header = header.ok_or_else(|| corrupt("it was never sealed".to_owned()))?;
        let ((key, nonce), identity) = (self.key(header)?, self.identity(block, header));
        let tag: [u8; TAG_BYTES] = std::array::from_fn(|byte| room[tag.start + byte]);
        let opened = key.open_in_place_separate_tag(
            nonce,
            Aad::from(identity),
            Tag::from(tag),
            &mut room[secret],
            0..,
        );
        let opened =
            opened.map_err(|_| corrupt("its seal is broken, or was made with another key".to_owned()))?;
        Ok(u32::from_le_bytes(std::array::from_fn(|byte| opened[self.block_bytes + byte])))
    }

    fn parts(&self) -> Parts {
        let secret = self.block_bytes + CRC_BYTES;
        let tag = secret + TAG_BYTES;
        Parts { secret: 0..secret, tag: secret..tag, header: tag..tag + HEADER_BYTES }
    }

    /// The block's own key, and the nonce of its only use.
    fn key(&self, header: &[u8]) -> Result<(LessSafeKey, Nonce), CopyError> {
        let number = u32::from_le_bytes(std::array::from_fn(|byte| header[4 + byte]));
        let (salt, nonce) = header[8..].split_at(SALT_BYTES);
        let main = self.keys.get(number).ok_or_else(|| {
            corrupt(format!("it was sealed with key {number}, which is not among those of this process"))
        })?;
        let info = [salt];
        let derived = main.expand(&info, &AES_256_GCM).map_err(|_| too_long())?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| too_long())?;
        Ok((LessSafeKey::new(UnboundKey::from(derived)), nonce))
    }

    /// What the tag covers beside the block: each part is of a fixed length but the last.
    fn identity(&self, block: BlockKey, header: &[u8]) -> Vec<u8> {
        let mut identity = Vec::with_capacity(header.len() + 17 + self.place.len());
        identity.extend_from_slice(header);
        identity.extend_from_slice(&block.hash.to_le_bytes());
        identity.push(block.group);
        identity.extend_from_slice(&self.place);
        identity
    }
}

/// Where the parts of a sealed block lie.
struct Parts {
    secret: Range<usize>,
    tag: Range<usize>,
    header: Range<usize>,
}

fn corrupt(why: String) -> CopyError {
    CopyError::new(CopyErrorKind::Corrupt, why)
}

fn no_random_bytes() -> CopyError {
    CopyError::new(CopyErrorKind::Unavailable, "the system gives no random bytes to seal a block with")
}

/// GCM ends at 64 GiB, and blocks long before.
fn too_long() -> CopyError {
    CopyError::new(CopyErrorKind::Refused, "a block that is too long for AES-GCM")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCK: BlockKey = BlockKey { hash: 7, group: 1 };

    fn keys(text: &str) -> Arc<KeyRing> {
        Arc::new(KeyRing::parse(text).unwrap())
    }

    fn key(number: u32, digits: &str) -> String {
        format!("{number}:{}", digits.repeat(4))
    }

    fn cipher(keys: &str, tier: Tier, namespace: &str, block_bytes: usize) -> Cipher {
        Cipher::new(self::keys(keys), tier, namespace, block_bytes)
    }

    fn sealed(cipher: &Cipher, content: &[u8]) -> Vec<u8> {
        let mut room = content.to_vec();
        room.resize(content.len() + SEAL_BYTES, 0);
        cipher.seal(BLOCK, 99, &mut room).unwrap();
        room
    }

    fn mixed(number: u32) -> String {
        key(number, "0123456789abcdef")
    }

    proptest! {
        #[test]
        fn a_block_comes_back_and_any_flipped_bit_is_noticed(content in prop::collection::vec(any::<u8>(), 1..300), bit: prop::sample::Index) {
            let cipher = cipher(&mixed(3), Tier::Disk, "here", content.len());
            let mut room = sealed(&cipher, &content);
            let mut flipped = room.clone();
            let bit = bit.index(8 * flipped.len());
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(cipher.open(BLOCK, &mut flipped).unwrap_err().kind(), CopyErrorKind::Corrupt);
            prop_assert_eq!(cipher.open(BLOCK, &mut room).unwrap(), 99);
            prop_assert_eq!(&room[..content.len()], &content[..]);
        }

        #[test]
        fn arbitrary_bytes_are_no_block(mut room in prop::collection::vec(any::<u8>(), 64 + SEAL_BYTES), is_magic: bool) {
            if is_magic {
                let header = 64 + CRC_BYTES + TAG_BYTES;
                room[header..header + 4].copy_from_slice(&MAGIC);
                room[header + 4..header + 8].copy_from_slice(&3_u32.to_le_bytes());
            }
            let cipher = cipher(&mixed(3), Tier::Disk, "here", 64);
            prop_assert_eq!(cipher.open(BLOCK, &mut room).unwrap_err().kind(), CopyErrorKind::Corrupt);
        }
    }

    #[test]
    fn a_block_stands_in_for_no_other() {
        let ours = cipher(&mixed(3), Tier::Disk, "here", 64);
        let room = sealed(&ours, &[5; 64]);
        let opens = |cipher: &Cipher, block| cipher.open(block, &mut room.clone()).is_ok();
        assert!(opens(&ours, BLOCK));
        assert!(
            !opens(&ours, BlockKey { hash: 8, ..BLOCK }) && !opens(&ours, BlockKey { group: 0, ..BLOCK })
        );
        assert!(!opens(&cipher(&mixed(3), Tier::Object, "here", 64), BLOCK));
        assert!(!opens(&cipher(&mixed(3), Tier::Disk, "there", 64), BLOCK));
        assert!(!opens(&cipher(&mixed(3), Tier::Disk, "here", 63), BLOCK));
    }

    #[test]
    fn keys_are_told_apart_by_number_and_by_content() {
        let room = sealed(&cipher(&mixed(3), Tier::Disk, "here", 64), &[5; 64]);
        let open = |keys: &str| cipher(keys, Tier::Disk, "here", 64).open(BLOCK, &mut room.clone());
        let rotated = format!("{},{}", key(4, "fedcba9876543210"), mixed(3));
        assert_eq!(open(&rotated).unwrap(), 99);
        for others in [mixed(4), key(3, "fedcba9876543210")] {
            assert_eq!(open(&others).unwrap_err().kind(), CopyErrorKind::Corrupt, "{others}");
        }
    }

    #[test]
    fn the_same_block_never_looks_the_same() {
        let cipher = cipher(&mixed(3), Tier::Disk, "here", 64);
        let rooms: std::collections::HashSet<_> = (0..1000).map(|_| sealed(&cipher, &[5; 64])).collect();
        assert_eq!(rooms.len(), 1000);
        assert!(rooms.iter().all(|room| room.windows(8).all(|bytes| bytes != [5; 8])));
    }

    /// The format is read by later versions: key 0123…, salt and nonce as they lie in the header.
    #[test]
    fn the_key_of_a_block_is_hkdf_sha256() {
        let cipher = cipher(&mixed(3), Tier::Disk, "here", 64);
        let room = sealed(&cipher, &[5; 64]);
        let main = ring::hkdf::Salt::new(ring::hkdf::HKDF_SHA256, b"kvbm sealed block v1")
            .extract(&hex::decode("0123456789abcdef".repeat(4)).unwrap());
        let header = &room[64 + 4 + 16..];
        let info = [&header[8..24]];
        let key = LessSafeKey::new(UnboundKey::from(main.expand(&info, &AES_256_GCM).unwrap()));
        let identity =
            [header, &7_u128.to_le_bytes(), &[1], &64_u64.to_le_bytes(), &[2], b"here".as_slice()].concat();
        let nonce = Nonce::try_assume_unique_for_key(&header[24..]).unwrap();
        let mut secret = room[..64 + 4 + 16].to_vec();
        assert_eq!(key.open_in_place(nonce, Aad::from(identity), &mut secret).unwrap()[..64], [5; 64]);
    }
}
