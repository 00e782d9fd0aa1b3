//! Blocks that come from the host tier of another worker, where they lie sealed there, here, or in
//! both.
//!
//! They travel as they lie, so a holder opens nothing: it sends the wrapped keys of their tenants
//! beside them. A reader with the same main keys unwraps these for as long as it has the lease, and
//! opens each block in memory of its own. Into its slots goes what is sealed again, with a key of
//! its own: so what is forgotten here, or there, is forgotten no less for having travelled.

use std::sync::Arc;

use super::format::{Cipher, SEAL_BYTES, key_of, no_key};
use super::keys::KeyRing;
use super::tenants::{KeyId, RECORD_BYTES, TenantKeys, WrappedKey};
use crate::checksum::SummedCopy;
use crate::copy::{BlockKey, CopyError, CopyErrorKind, Owner, Tier};

/// What a worker with main keys does with blocks that travel to its host tier, or from it.
#[derive(Debug)]
pub struct HostSeal {
    ring: Arc<KeyRing>,
    namespace: String,
    block_bytes: usize,
    /// `None`: blocks lie in the clear in the host tier.
    own: Option<(Arc<TenantKeys>, Cipher)>,
}

/// Opens blocks as they lie in another worker's host tier.
#[derive(Debug)]
pub struct OtherSeal {
    keys: Arc<TenantKeys>,
    cipher: Cipher,
    renamed: u128,
}

/// A block that has arrived.
#[derive(Clone, Copy, Debug)]
pub struct ArrivingBlock {
    /// What it is called here.
    pub name: BlockKey,
    /// Whose it will be here.
    pub owner: Option<Owner>,
    /// The checksum of it as it arrived.
    pub crc: u32,
}

impl HostSeal {
    /// Of blocks of `block_bytes` bytes in the clear. `own`: the keys of the host tier, if blocks
    /// lie sealed there.
    pub fn new(
        ring: Arc<KeyRing>,
        namespace: &str,
        block_bytes: usize,
        own: Option<Arc<TenantKeys>>,
    ) -> Self {
        let cipher = |keys| Cipher::new(keys, Tier::Host, namespace, block_bytes);
        let own = own.map(|keys| (Arc::clone(&keys), cipher(keys)));
        Self { ring, namespace: namespace.to_owned(), block_bytes, own }
    }

    /// What wrapped keys of the host tier are bound to, in a namespace.
    pub fn keys_namespace(namespace: &str) -> String {
        format!("{namespace}-host")
    }

    /// Whether blocks lie sealed in the host tier.
    pub const fn is_of_memory(&self) -> bool {
        self.own.is_some()
    }

    /// Bytes of a block in the clear.
    pub const fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// The name of the key that a block in the host tier is sealed with; `None`: it is not sealed.
    pub fn key_of(sealed: &[u8]) -> Option<KeyId> {
        key_of(sealed)
    }

    /// A key of the host tier, for a worker that is sent what it sealed. May ask the store of keys.
    ///
    /// # Errors
    /// It is gone, its tenant was forgotten, or the store could not be asked.
    pub fn wrapped(&self, id: KeyId) -> Result<WrappedKey, CopyError> {
        let (keys, _) = self.own.as_ref().ok_or_else(not_sealed)?;
        keys.wrapped(id).map_err(no_key)
    }

    /// For blocks of another worker, whose hashes differ there in the bits that are set in `renamed`.
    /// It has no key yet.
    pub fn of_other(&self, renamed: u128) -> OtherSeal {
        let namespace = Self::keys_namespace(&self.namespace);
        let keys = Arc::new(TenantKeys::in_memory(Arc::clone(&self.ring), &namespace));
        let cipher = Cipher::new(Arc::clone(&keys), Tier::Host, &self.namespace, self.block_bytes);
        OtherSeal { keys, cipher, renamed }
    }

    /// Sees to it that blocks of `owner` can be sealed without a wait. May ask the store of keys.
    ///
    /// # Errors
    /// The tenant was forgotten, or there is no key to be had.
    pub fn prepare(&self, owner: Option<Owner>) -> Result<(), CopyError> {
        let Some((keys, _)) = &self.own else { return Ok(()) };
        keys.to_seal(owner).map(drop).map_err(no_key)
    }

    /// Bytes of a block as it arrives.
    pub const fn arriving_bytes(&self, other: Option<&OtherSeal>) -> usize {
        self.block_bytes + if other.is_some() { SEAL_BYTES } else { 0 }
    }

    /// Brings a block that is what its checksum says into `slot`, as it is to lie there. `arrived`
    /// is opened in place. What is in `slot` after an error means nothing, and is never in the clear
    /// where blocks lie sealed.
    ///
    /// # Errors
    /// `Corrupt`: it is not the block that it should be. Others: it cannot be sealed here.
    ///
    /// # Panics
    /// If `arrived` has not its [bytes](Self::arriving_bytes), or `slot` not those of a block here.
    pub fn take_in(
        &self,
        other: Option<&OtherSeal>,
        block: ArrivingBlock,
        arrived: &mut [u8],
        slot: &mut [u8],
    ) -> Result<(), CopyError> {
        // A seal holds the checksum that the block had when it was sealed.
        let crc = match other {
            Some(other) => other.cipher.open(other.name_of(block.name), arrived)?,
            None => block.crc,
        };
        let content = &arrived[..self.block_bytes];
        let Some((_, cipher)) = &self.own else {
            let mut copy = SummedCopy::new();
            copy.piece(content, slot);
            let is_sound = copy.finish() == crc;
            return if is_sound {
                Ok(())
            } else {
                Err(CopyError::new(CopyErrorKind::Corrupt, "it had changed before it was sealed"))
            };
        };
        if !cipher.can_seal(block.owner) {
            return Err(CopyError::refused("its tenant was forgotten meanwhile"));
        }
        cipher.seal(block.name, block.owner, content, crc, slot)
    }
}

impl OtherSeal {
    /// Learns a key that the other worker sent.
    ///
    /// # Errors
    /// Why it is of no use here.
    pub fn take(&self, record: &[u8; RECORD_BYTES]) -> Result<(), String> {
        self.keys.take(record)
    }

    /// What a block is called there.
    const fn name_of(&self, here: BlockKey) -> BlockKey {
        BlockKey { hash: here.hash ^ self.renamed, ..here }
    }
}

fn not_sealed() -> CopyError {
    CopyError::refused("blocks lie in the clear in the host tier")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::key_ring;

    const BYTES: usize = 300;
    const NAME: BlockKey = BlockKey { hash: 7, group: 0 };
    const OTHER: BlockKey = BlockKey { hash: 8, group: 0 };
    const OWNER: Option<Owner> = Some(Owner { tenant: 5, life: 0 });

    fn worker(ring: &Arc<KeyRing>, is_sealed: bool) -> HostSeal {
        let keys = TenantKeys::in_memory(Arc::clone(ring), &HostSeal::keys_namespace("test"));
        HostSeal::new(Arc::clone(ring), "test", BYTES, is_sealed.then(|| Arc::new(keys)))
    }

    fn cipher(worker: &HostSeal) -> &Cipher {
        &worker.own.as_ref().unwrap().1
    }

    fn content() -> Vec<u8> {
        (0..BYTES).map(|byte| byte as u8).collect()
    }

    fn crc() -> u32 {
        crate::checksum::checksum(&content())
    }

    /// A block as it lies in the worker's host tier.
    fn lying(worker: &HostSeal) -> Vec<u8> {
        if !worker.is_of_memory() {
            return content();
        }
        let mut room = vec![0; BYTES + SEAL_BYTES];
        cipher(worker).seal(NAME, OWNER, &content(), crc(), &mut room).unwrap();
        room
    }

    /// What a reader is told of a block.
    fn told(reader: &HostSeal, holder: &HostSeal, block: &[u8]) -> Option<OtherSeal> {
        holder.is_of_memory().then(|| {
            let other = reader.of_other(0);
            let record = holder.wrapped(HostSeal::key_of(block).unwrap()).unwrap();
            other.take(record.bytes()).unwrap();
            other
        })
    }

    const fn arriving(crc: u32) -> ArrivingBlock {
        ArrivingBlock { name: NAME, owner: OWNER, crc }
    }

    #[test]
    fn a_block_comes_from_any_host_tier_to_any() {
        let ring = key_ring(3, "0123456789abcdef");
        for (is_sealed_there, is_sealed_here) in
            [(true, true), (true, false), (false, true), (false, false)]
        {
            let (there, here) = (worker(&ring, is_sealed_there), worker(&ring, is_sealed_here));
            let mut block = lying(&there);
            let other = told(&here, &there, &block);
            assert_eq!(block.len(), here.arriving_bytes(other.as_ref()));
            here.prepare(OWNER).unwrap();
            let mut slot = vec![0; BYTES + if is_sealed_here { SEAL_BYTES } else { 0 }];
            here.take_in(other.as_ref(), arriving(crc()), &mut block, &mut slot).unwrap();
            if is_sealed_here {
                assert!(slot.windows(8).all(|bytes| bytes != &content()[..8]));
                assert_eq!(cipher(&here).open(NAME, &mut slot).unwrap(), crc());
            }
            assert_eq!(slot[..BYTES], content());
        }
    }

    /// The checksum of what travelled says nothing of it: another's block under its name, or one
    /// whose name or key is another.
    #[test]
    fn what_is_another_block_is_not_taken_in() {
        let ring = key_ring(3, "0123456789abcdef");
        for is_sealed_here in [true, false] {
            let (there, here) = (worker(&ring, true), worker(&ring, is_sealed_here));
            here.prepare(OWNER).unwrap();
            let block = lying(&there);
            let other = told(&here, &there, &block);
            let taken = |block: &[u8], of: BlockKey, other: Option<&OtherSeal>| {
                let mut slot = vec![0; BYTES + if is_sealed_here { SEAL_BYTES } else { 0 }];
                let arriving = ArrivingBlock { name: of, ..arriving(0) };
                here.take_in(other, arriving, &mut block.to_vec(), &mut slot)
            };
            assert!(taken(&block, NAME, other.as_ref()).is_ok());
            let mut flipped = block.clone();
            flipped[BYTES / 2] ^= 1;
            let unknown = here.of_other(0);
            for wrong in [
                taken(&flipped, NAME, other.as_ref()),
                taken(&block, OTHER, other.as_ref()),
                taken(&block, NAME, Some(&unknown)),
            ] {
                assert_eq!(wrong.unwrap_err().kind(), CopyErrorKind::Corrupt);
            }
        }
    }

    /// Where everything was forgotten meanwhile, and in no other way.
    #[test]
    fn a_block_opens_under_the_name_that_it_has_there() {
        let ring = key_ring(3, "0123456789abcdef");
        let (there, here) = (worker(&ring, true), worker(&ring, false));
        let block = lying(&there);
        let record = *there.wrapped(HostSeal::key_of(&block).unwrap()).unwrap().bytes();
        let taken = |renamed: u128, name: BlockKey| {
            let other = here.of_other(renamed);
            other.take(&record).unwrap();
            let arriving = ArrivingBlock { name, ..arriving(0) };
            here.take_in(Some(&other), arriving, &mut block.clone(), &mut [0; BYTES])
        };
        let renamed = u128::MAX - 5;
        let name = BlockKey { hash: NAME.hash ^ renamed, ..NAME };
        assert!(taken(renamed, name).is_ok());
        for wrong in [taken(renamed, NAME), taken(0, name)] {
            assert_eq!(wrong.unwrap_err().kind(), CopyErrorKind::Corrupt);
        }
    }

    #[test]
    fn a_key_that_is_of_no_use_here_says_why() {
        let there = worker(&key_ring(3, "0123456789abcdef"), true);
        let block = lying(&there);
        let record = *there.wrapped(HostSeal::key_of(&block).unwrap()).unwrap().bytes();
        let said = |ring: Arc<KeyRing>, record: &[u8; RECORD_BYTES]| {
            worker(&ring, true).of_other(0).take(record).unwrap_err()
        };
        assert!(
            said(key_ring(4, "0123456789abcdef"), &record).starts_with("main key 3 is not given")
        );
        assert!(
            said(key_ring(3, "fedcba9876543210"), &record).starts_with("main key 3 is another")
        );
        let mut changed = record;
        changed[RECORD_BYTES - 20] ^= 1;
        assert!(said(key_ring(3, "0123456789abcdef"), &changed).contains("has changed"));
        assert_eq!(
            said(key_ring(3, "0123456789abcdef"), &[0; RECORD_BYTES]),
            "what was sent is no key"
        );
    }

    #[test]
    fn a_forgotten_tenants_key_is_not_given_and_seals_nothing() {
        let ring = key_ring(3, "0123456789abcdef");
        let (there, here) = (worker(&ring, true), worker(&ring, true));
        let mut block = lying(&there);
        let (other, id) = (told(&here, &there, &block), HostSeal::key_of(&block).unwrap());
        there.own.as_ref().unwrap().0.forget(5, 1).unwrap();
        assert_eq!(there.wrapped(id).unwrap_err().kind(), CopyErrorKind::Corrupt);
        // Here it was forgotten while blocks of its were on their way.
        here.prepare(OWNER).unwrap();
        here.own.as_ref().unwrap().0.forget(5, 1).unwrap();
        let slot = &mut [0; BYTES + SEAL_BYTES];
        let taken = here.take_in(other.as_ref(), arriving(crc()), &mut block, slot);
        assert_eq!(taken.unwrap_err().kind(), CopyErrorKind::Refused);
        assert_eq!(here.prepare(OWNER).unwrap_err().kind(), CopyErrorKind::Refused);
    }
}
