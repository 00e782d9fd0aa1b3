//! Blocks that lie encrypted in a host tier: the holder's, the reader's, or both. They travel as they
//! lie, with the wrapped keys of their tenants beside them; the reader opens them, and seals them
//! with its own.

use std::sync::Arc;

use kvbm_tiers::sealed::{ArrivingBlock, HostSeal, KeyId, OtherSeal};
use kvbm_tiers::{CopyError, Owner};
use tokio::task::spawn_blocking;

use super::link::PeerFault;
use super::protocol::{MAX_KEYS, NamedKey};
use crate::api::filling::FillingSlots;
use crate::names::hash::Chain;

/// The keys of successive blocks, each with the place of the first block that needs it.
pub(super) fn first_uses(keys: impl Iterator<Item = KeyId>) -> Vec<(usize, KeyId)> {
    let mut uses: Vec<(usize, KeyId)> = Vec::new();
    for (at, key) in keys.enumerate() {
        if uses.iter().all(|(_, used)| *used != key) {
            uses.push((at, key));
        }
    }
    uses
}

/// These keys as a reader needs them, up to the first that cannot be had.
pub(super) async fn named_keys(seal: &Arc<HostSeal>, uses: &[(usize, KeyId)]) -> Vec<NamedKey> {
    let (seal, uses) = (Arc::clone(seal), uses[..uses.len().min(MAX_KEYS)].to_vec());
    // The store of keys may be asked.
    let named = move || {
        let named = uses.iter().map_while(|&(first, id)| {
            let unknown = |error| tracing::warn!(%error, "an encrypted block is not leased");
            let wrapped = seal.wrapped(id).map_err(unknown).ok()?;
            Some(NamedKey::new(first as u32, wrapped.bytes()))
        });
        named.collect()
    };
    spawn_blocking(named).await.unwrap_or_default()
}

/// Sees to it that blocks of `owner` can be sealed here without a wait.
pub(super) async fn prepare(seal: &Arc<HostSeal>, owner: Option<Owner>) -> Result<(), CopyError> {
    let seal = Arc::clone(seal);
    let prepared = spawn_blocking(move || seal.prepare(owner)).await;
    prepared.unwrap_or_else(|_| Err(CopyError::refused("the manager is closed")))
}

/// Unwraps what a holder sent. Returns what opens the blocks that it named, and how many of them.
pub(super) fn unwrapped(
    ours: Option<&HostSeal>,
    keys: &[NamedKey],
) -> Result<(OtherSeal, usize), PeerFault> {
    let ours = ours.ok_or_else(|| {
        let why = "this worker has no keys: give it those of the holder by encryption.key_file \
                   (DYN_KVBM_ENCRYPTION_KEY_FILE)";
        PeerFault::NoKey(why.to_owned())
    })?;
    let other = ours.of_other();
    for key in keys.iter().take(MAX_KEYS) {
        let Err(why) = other.take(&key.record()) else { continue };
        match u32::from_le_bytes(key.first) as usize {
            0 => return Err(PeerFault::NoKey(why)),
            openable => return Ok((other, openable)),
        }
    }
    Ok((other, usize::MAX))
}

/// How blocks that arrive become blocks of the host tier here.
pub(super) struct Intake<'a> {
    pub(super) seal: &'a HostSeal,
    /// `None`: they come in the clear.
    pub(super) other: Option<&'a OtherSeal>,
    /// The chain with the names that its blocks have now.
    pub(super) chain: Chain<'a>,
    pub(super) owner: Option<Owner>,
}

impl Intake<'_> {
    /// Bytes of a block as it arrives.
    pub(super) fn arriving_bytes(&self) -> usize {
        self.seal.arriving_bytes(self.other)
    }

    /// Brings a block that arrived with this checksum into the next slot, if its seal is right.
    pub(super) fn take_in(
        &self,
        filling: &mut FillingSlots<'_>,
        crc: u32,
        arrived: &mut [u8],
    ) -> Result<(), PeerFault> {
        let name = self.chain.key(filling.kept());
        let block = ArrivingBlock { name, owner: self.owner, crc };
        let slot = filling.next().ok_or(PeerFault::Wrong)?;
        self.seal.take_in(self.other, block, arrived, slot)?;
        // Of what lies there: an index may tell it to anybody.
        filling.written();
        Ok(())
    }
}
