//! Blocks that lie encrypted in a host tier: the holder's, the reader's, or both. They travel as they
//! lie, with the wrapped keys of their tenants beside them; the reader opens them, and seals them
//! with its own. So do slices of ranks, each of which has keys of its own: they come beside its
//! slices, since its leader has none.

use std::sync::Arc;

use kvbm_tiers::sealed::{ArrivingBlock, HostSeal, KeyId, OtherSeal};
use kvbm_tiers::{CopyError, Owner};
use tokio::task::spawn_blocking;

use super::link::PeerFault;
use super::protocol::{MAX_KEYS, NamedKey};
use crate::api::filling::FillingSlots;
use crate::names::hash::Chain;

pub(super) const NOT_CONVERTED: &str =
    "blocks of another form are not converted where they lie encrypted";

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
/// `renamed`: the bits in which their names differ there.
pub(super) fn unwrapped(
    ours: Option<&HostSeal>,
    keys: &[NamedKey],
    renamed: u128,
) -> Result<(OtherSeal, usize), PeerFault> {
    let other = ours.ok_or_else(no_keys)?.of_other(renamed);
    for key in keys.iter().take(MAX_KEYS) {
        let Err(why) = other.take(&key.record()) else { continue };
        match u32::from_le_bytes(key.first) as usize {
            0 => return Err(PeerFault::NoKey(why)),
            openable => return Ok((other, openable)),
        }
    }
    Ok((other, usize::MAX))
}

fn no_keys() -> PeerFault {
    let why = "this worker has no keys: give it those of the holder by encryption.key_file \
               (DYN_KVBM_ENCRYPTION_KEY_FILE)";
    PeerFault::NoKey(why.to_owned())
}

/// What a rank opens slices with that come sealed, for as long as its leader's order lasts, and what
/// slices are sealed with here.
#[derive(Default)]
pub(super) struct SliceSeals {
    ours: Option<Arc<HostSeal>>,
    /// The bits in which names of blocks differ there.
    renamed: u128,
    /// Has the keys that came.
    other: Option<OtherSeal>,
    /// Why one of these is of no use here: nor is what comes behind it.
    unusable: Option<CopyError>,
}

impl SliceSeals {
    /// `None`: this rank has no keys.
    pub(super) fn new(ours: Option<Arc<HostSeal>>, renamed: u128) -> Self {
        Self { ours, renamed, ..Self::default() }
    }

    /// What slices lie sealed with here. `None`: they lie in the clear.
    pub(super) fn own(&self) -> Option<&Arc<HostSeal>> {
        self.ours.as_ref().filter(|ours| ours.is_of_memory())
    }

    /// What opens a slice, beside which this key came if it is the first that needs it.
    pub(super) fn opening(
        &mut self,
        key: Option<&NamedKey>,
    ) -> Result<(&HostSeal, &OtherSeal), CopyError> {
        if let Some(why) = &self.unusable {
            return Err(why.clone());
        }
        if let Err(why) = self.learn(key) {
            return Err(self.unusable.insert(CopyError::refused(why.to_string())).clone());
        }
        let both = self.ours.as_deref().zip(self.other.as_ref());
        both.ok_or_else(|| CopyError::refused(no_keys().to_string()))
    }

    fn learn(&mut self, key: Option<&NamedKey>) -> Result<(), PeerFault> {
        let ours = self.ours.as_ref().ok_or_else(no_keys)?;
        let other = self.other.get_or_insert_with(|| ours.of_other(self.renamed));
        key.map_or(Ok(()), |key| other.take(&key.record()).map_err(PeerFault::NoKey))
    }
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
