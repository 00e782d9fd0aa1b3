//! What a sealed block looks like, and how it is made.
//!
//! ```text
//! 0                  block_bytes                                              block_bytes + 68
//! ├──────────────────┬──────────┬────────┬─────────┬───────────┬────────┬────────┤
//! │ block            │ crc32c 4 │ tag 16 │ magic 4 │ key id 16 │ salt 16│nonce 12│
//! ├──────────────────┴──────────┼────────┼─────────┴───────────┴────────┴────────┤
//! │ encrypted                   │        │ in the clear, authenticated           │
//! ```
//!
//! AES-256-GCM, with a key of each block's own: HKDF-SHA-256 of its tenant's key (`tenants`) and
//! the salt. The tag also covers who the block is and where it belongs (`identity`), so that a
//! block cannot stand in for another, here or elsewhere.
//!
//! **No nonce is used twice with a key.** GCM fails badly where that happens, and counters start
//! again when a machine is cloned or a file is lost. So nothing is counted: the system's generator
//! gives 28 fresh bytes to every block that is sealed, 16 for its key and 12 for its nonce. That
//! two of 2^64 blocks under one tenant's key (at a million a second: 600,000 years) draw the same
//! has a probability below 2^-96. Nor is there a limit to what one such key may seal, since each
//! derived key seals one block.

use std::ops::Range;
use std::sync::Arc;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use zeroize::Zeroizing;

use super::keys::SecretKey;
use super::tenants::{ID_BYTES, KeyId, NoKey, TenantKeys};
use crate::copy::{BlockKey, CopyError, CopyErrorKind, Owner, Tier};
use crate::fields::u32_at;

/// What a sealed block has beyond the block.
pub const SEAL_BYTES: usize = CRC_BYTES + TAG_BYTES + HEADER_BYTES;

const KEY_BYTES: usize = 32;
const CRC_BYTES: usize = 4;
const TAG_BYTES: usize = 16;
const SALT_BYTES: usize = 16;
/// Magic number, key id, salt, nonce.
const HEADER_BYTES: usize = SALT_AT + SALT_BYTES + NONCE_LEN;
const SALT_AT: usize = 4 + ID_BYTES;
/// Sealed, in the second version: the first had no keys of tenants.
const MAGIC: [u8; 4] = *b"KVS2";

/// Seals and opens the blocks of one tier and namespace.
#[derive(Debug)]
pub struct Cipher {
    keys: Arc<TenantKeys>,
    random: SystemRandom,
    block_bytes: usize,
    /// What all blocks here have in common.
    place: Vec<u8>,
}

impl Cipher {
    /// For blocks of `block_bytes` bytes in a tier. What is sealed in one namespace opens in no
    /// other.
    pub fn new(keys: Arc<TenantKeys>, tier: Tier, namespace: &str, block_bytes: usize) -> Self {
        let mut place = (block_bytes as u64).to_le_bytes().to_vec();
        place.push(tier.index() as u8);
        place.extend_from_slice(namespace.as_bytes());
        Self { keys, random: SystemRandom::new(), block_bytes, place }
    }

    /// Bytes of one block.
    pub const fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Seals a block along with its checksum into `room`, which is `SEAL_BYTES` longer: what is
    /// written there is never in the clear, and no copy of the block is made for it.
    pub(crate) fn seal(
        &self,
        block: BlockKey,
        owner: Option<Owner>,
        content: &[u8],
        crc: u32,
        room: &mut [u8],
    ) -> Result<(), CopyError> {
        let (id, secret) = self.keys.to_seal(owner).map_err(no_key)?;
        let fresh = &mut [0; SALT_BYTES + NONCE_LEN];
        self.random.fill(fresh).map_err(|_| no_random_bytes())?;
        let (hidden, rest) = room.split_at_mut(self.block_bytes);
        let (crc_and_tag, header) = rest.split_at_mut(CRC_BYTES + TAG_BYTES);
        header[..4].copy_from_slice(&MAGIC);
        header[4..SALT_AT].copy_from_slice(&id);
        header[SALT_AT..].copy_from_slice(fresh);
        let ((key, nonce), identity) = (block_key(&secret, header)?, self.identity(block, header));
        let crc = crc.to_le_bytes();
        key.seal_out_of_place_scatter(
            nonce,
            Aad::from(identity),
            content,
            hidden,
            &crc,
            crc_and_tag,
        )
        .map_err(|_| too_long())
    }

    /// Opens what was sealed as this block, in place, and returns the block's checksum. What is in
    /// `room` after an error means nothing.
    pub(crate) fn open(&self, block: BlockKey, room: &mut [u8]) -> Result<u32, CopyError> {
        let SealedParts { hidden, tag, header } = self.parts();
        let header = room.get(header).filter(|header| header.starts_with(&MAGIC));
        let header = header.ok_or_else(|| corrupt("it was never sealed".to_owned()))?;
        let secret = self.secret_of(header)?;
        let ((key, nonce), identity) = (block_key(&secret, header)?, self.identity(block, header));
        let tag: [u8; TAG_BYTES] = std::array::from_fn(|byte| room[tag.start + byte]);
        let opened =
            key.open_in_place_separate_tag(nonce, Aad::from(identity), &tag, &mut room[hidden]);
        let opened = opened
            .map_err(|_| corrupt("its seal is broken, or was made with another key".to_owned()))?;
        Ok(u32_at(opened, self.block_bytes))
    }

    fn parts(&self) -> SealedParts {
        let hidden = self.block_bytes + CRC_BYTES;
        let tag = hidden + TAG_BYTES;
        SealedParts { hidden: 0..hidden, tag: hidden..tag, header: tag..tag + HEADER_BYTES }
    }

    /// Whether a block can be sealed without asking the store of keys.
    pub(super) fn can_seal(&self, owner: Option<Owner>) -> bool {
        self.keys.can_seal(owner)
    }

    /// Whether a block can be opened, or is none, without asking the store of keys.
    pub(super) fn can_open(&self, room: &[u8]) -> bool {
        let header = room.get(self.parts().header).filter(|header| header.starts_with(&MAGIC));
        header.is_none_or(|header| self.keys.can_open(id_of(header)))
    }

    /// The tenant's key that a block was sealed with.
    fn secret_of(&self, header: &[u8]) -> Result<Arc<SecretKey>, CopyError> {
        self.keys.to_open(id_of(header)).map_err(no_key)
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

/// The block's own key, and the nonce of its only use.
fn block_key(secret: &SecretKey, header: &[u8]) -> Result<(LessSafeKey, Nonce), CopyError> {
    let (salt, nonce) = header[SALT_AT..].split_at(SALT_BYTES);
    let (info, mut key) = ([salt], Zeroizing::new([0; KEY_BYTES]));
    let derived = secret.get().expand(&info, &ring::aead::AES_256_GCM);
    derived.and_then(|derived| derived.fill(&mut *key)).map_err(|_| too_long())?;
    let key = UnboundKey::new(&AES_256_GCM, &*key).map_err(|_| too_long())?;
    let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| too_long())?;
    Ok((LessSafeKey::new(key), nonce))
}

/// Where the parts of a sealed block lie.
struct SealedParts {
    hidden: Range<usize>,
    tag: Range<usize>,
    header: Range<usize>,
}

/// The name of the key that a block of any size is sealed with; `None`: it is not sealed.
pub(super) fn key_of(sealed: &[u8]) -> Option<KeyId> {
    let header = &sealed[sealed.len().checked_sub(HEADER_BYTES)?..];
    header.starts_with(&MAGIC).then(|| id_of(header))
}

fn corrupt(why: String) -> CopyError {
    CopyError::new(CopyErrorKind::Corrupt, why)
}

/// The name of the key.
fn id_of(header: &[u8]) -> KeyId {
    std::array::from_fn(|byte| header[4 + byte])
}

pub(super) fn no_key(why: NoKey) -> CopyError {
    match why {
        // Not the medium's fault, so its breaker must not open.
        NoKey::Forgotten => CopyError::refused("its tenant was forgotten meanwhile"),
        NoKey::Gone => corrupt(
            "the key of its tenant was destroyed, or is under a main key that is not given here"
                .to_owned(),
        ),
        // The block stays: a store of keys that is away may be back.
        NoKey::Failed(error) => CopyError::caused(
            CopyErrorKind::Unavailable,
            format!("the key of its tenant cannot be had: {error}"),
            error,
        ),
    }
}

fn no_random_bytes() -> CopyError {
    CopyError::new(
        CopyErrorKind::Unavailable,
        "the system gives no random bytes to seal a block with",
    )
}

/// GCM ends at 64 GiB, and blocks long before.
fn too_long() -> CopyError {
    CopyError::refused("a block that is too long for AES-GCM")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::KeyRing;
    use super::*;
    use crate::testing::main_key;

    const BLOCK: BlockKey = BlockKey { hash: 7, group: 1 };

    fn keys(text: &str) -> Arc<TenantKeys> {
        Arc::new(TenantKeys::in_memory(Arc::new(KeyRing::parse(text).unwrap()), "test"))
    }

    fn cipher(keys: &Arc<TenantKeys>, tier: Tier, namespace: &str, block_bytes: usize) -> Cipher {
        Cipher::new(Arc::clone(keys), tier, namespace, block_bytes)
    }

    fn sealed(cipher: &Cipher, content: &[u8]) -> Vec<u8> {
        let mut room = vec![0; content.len() + SEAL_BYTES];
        cipher.seal(BLOCK, None, content, 99, &mut room).unwrap();
        room
    }

    fn mixed(number: u32) -> Arc<TenantKeys> {
        keys(&main_key(number, "0123456789abcdef"))
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
            let keys = mixed(3);
            if is_magic {
                let header = 64 + CRC_BYTES + TAG_BYTES;
                room[header..header + 4].copy_from_slice(&MAGIC);
                room[header + 4..header + SALT_AT].copy_from_slice(&keys.to_seal(None).unwrap().0);
            }
            let cipher = cipher(&keys, Tier::Disk, "here", 64);
            prop_assert_eq!(cipher.open(BLOCK, &mut room).unwrap_err().kind(), CopyErrorKind::Corrupt);
        }
    }

    #[test]
    fn a_block_stands_in_for_no_other() {
        let keys = mixed(3);
        let ours = cipher(&keys, Tier::Disk, "here", 64);
        let room = sealed(&ours, &[5; 64]);
        let opens = |cipher: &Cipher, block| cipher.open(block, &mut room.clone()).is_ok();
        assert!(opens(&ours, BLOCK));
        assert!(
            !opens(&ours, BlockKey { hash: 8, ..BLOCK })
                && !opens(&ours, BlockKey { group: 0, ..BLOCK })
        );
        assert!(!opens(&cipher(&keys, Tier::Object, "here", 64), BLOCK));
        assert!(!opens(&cipher(&keys, Tier::Disk, "there", 64), BLOCK));
        assert!(!opens(&cipher(&keys, Tier::Disk, "here", 63), BLOCK));
    }

    #[test]
    fn a_block_opens_with_its_tenants_key_alone() {
        let keys = mixed(3);
        let ours = cipher(&keys, Tier::Disk, "here", 64);
        let owner = |tenant| Some(Owner { tenant, life: 0 });
        let sealed_for = |owner| {
            let mut room = vec![0; 64 + SEAL_BYTES];
            ours.seal(BLOCK, owner, &[5; 64], 99, &mut room).unwrap();
            room
        };
        let rooms = [None, owner(7), owner(8)].map(sealed_for);
        let opens = |room: &Vec<u8>| ours.open(BLOCK, &mut room.clone());
        assert!(rooms.iter().all(|room| opens(room).is_ok()));
        // Another's key under its name.
        let mut swapped = rooms[1].clone();
        let id = 64 + CRC_BYTES + TAG_BYTES + 4;
        swapped[id..id + ID_BYTES].copy_from_slice(&rooms[2][id..id + ID_BYTES]);
        assert_eq!(opens(&swapped).unwrap_err().kind(), CopyErrorKind::Corrupt);
        keys.forget(7, 1).unwrap();
        assert_eq!(opens(&rooms[1]).unwrap_err().kind(), CopyErrorKind::Corrupt);
        assert!(opens(&rooms[0]).is_ok() && opens(&rooms[2]).is_ok());
        let late = ours.seal(BLOCK, owner(7), &[5; 64], 99, &mut [0; 64 + SEAL_BYTES]);
        assert_eq!(late.unwrap_err().kind(), CopyErrorKind::Refused);
    }

    #[test]
    fn the_same_block_never_looks_the_same() {
        let cipher = cipher(&mixed(3), Tier::Disk, "here", 64);
        let rooms: std::collections::HashSet<_> =
            (0..1000).map(|_| sealed(&cipher, &[5; 64])).collect();
        assert_eq!(rooms.len(), 1000);
        assert!(rooms.iter().all(|room| room.windows(8).all(|bytes| bytes != [5; 8])));
    }

    /// The format is read by later versions: a tenant's key, salt and nonce as they lie in the
    /// header. Opened by another library than it is sealed by.
    #[test]
    fn the_key_of_a_block_is_hkdf_sha256() {
        use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
        let keys = mixed(3);
        let room = sealed(&cipher(&keys, Tier::Disk, "here", 64), &[5; 64]);
        let header = &room[64 + 4 + 16..];
        let secret = keys.to_open(id_of(header)).unwrap();
        let info = [&header[20..36]];
        let key =
            LessSafeKey::new(UnboundKey::from(secret.get().expand(&info, &AES_256_GCM).unwrap()));
        let identity =
            [header, &7_u128.to_le_bytes(), &[1], &64_u64.to_le_bytes(), &[2], b"here".as_slice()]
                .concat();
        let nonce = Nonce::try_assume_unique_for_key(&header[36..]).unwrap();
        let mut secret = room[..64 + 4 + 16].to_vec();
        assert_eq!(
            key.open_in_place(nonce, Aad::from(identity), &mut secret).unwrap()[..64],
            [5; 64]
        );
    }
}
