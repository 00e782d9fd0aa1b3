//! Namespaces: the names of blocks. A reset closes one and opens another.
//!
//! The key of a block is its hash and the namespace's salt, so a reset costs the same however much
//! the table holds: the names of earlier blocks match no request any more. They are
//! [forgotten](super::forgotten).

use kvbm_tiers::BlockKey;

use super::pins::Pins;
use super::tier::TierTable;
use super::{Effects, Table};
use crate::error::{Error, ErrorKind, Result};
use crate::names::fingerprint::{Fingerprint, digest};
use crate::names::hash::Chain;

/// Tells the namespaces of one table apart. Later ones have greater numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamespaceId(u64);

/// The present namespace.
#[derive(Debug, Default)]
pub(super) struct PresentNamespace {
    id: NamespaceId,
    fingerprint: Option<Fingerprint>,
    epoch: u64,
    /// How often everything was forgotten in the epoch.
    forgotten: u64,
    salt: u128,
}

/// What the names of blocks depend on, for an index that keeps them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Naming {
    /// The epoch, and how often everything was forgotten in it.
    pub epoch: (u64, u64),
    salt: u128,
}

impl Naming {
    /// The hash that the engine knows a block by.
    pub const fn hash_of(self, name: u128) -> u128 {
        name ^ self.salt
    }
}

impl PresentNamespace {
    fn of(fingerprint: Fingerprint) -> Self {
        let (epoch, salt) = (fingerprint.epoch, fingerprint.digest());
        Self { epoch, salt, fingerprint: Some(fingerprint), ..Self::default() }
    }

    /// The same in every process for the same fingerprint and epoch, unless everything was
    /// forgotten meanwhile.
    fn salt(&self) -> u128 {
        let base = match &self.fingerprint {
            Some(fingerprint) => fingerprint.digest_in(self.epoch),
            None => digest(&[b"kvbm epoch 1", &self.epoch.to_le_bytes()[..]].concat()),
        };
        match self.forgotten {
            0 => base,
            forgotten => {
                digest(&[base.to_le_bytes().as_slice(), &forgotten.to_le_bytes()].concat())
            }
        }
    }

    /// The hash that the engine knows a block by.
    pub(super) const fn hash_of(&self, key: BlockKey) -> u128 {
        key.hash ^ self.salt
    }

    fn change(&mut self, epoch: u64, forgotten: u64) {
        (self.epoch, self.forgotten) = (epoch, forgotten);
        self.id = NamespaceId(self.id.0 + 1);
        self.salt = self.salt();
    }
}

impl Table {
    /// Makes the names of its blocks depend on a fingerprint.
    #[must_use]
    pub fn with_fingerprint(self, fingerprint: Fingerprint) -> Self {
        Self { namespace: PresentNamespace::of(fingerprint), ..self }
    }

    /// Goes on where an earlier process was: in an epoch in which everything was forgotten
    /// `forgotten` times.
    #[must_use]
    pub fn resuming(mut self, (epoch, forgotten): (u64, u64)) -> Self {
        self.namespace.change(epoch, forgotten);
        self
    }

    /// The chain with the names that its blocks have now.
    #[must_use]
    pub const fn enter<'a>(&self, chain: Chain<'a>) -> Chain<'a> {
        chain.salted(self.namespace.salt)
    }

    /// The present namespace.
    pub const fn namespace(&self) -> NamespaceId {
        self.namespace.id
    }

    /// The present epoch.
    pub const fn epoch(&self) -> u64 {
        self.namespace.epoch
    }

    /// What the names of blocks depend on now.
    pub const fn naming(&self) -> Naming {
        let PresentNamespace { epoch, forgotten, salt, .. } = self.namespace;
        Naming { epoch: (epoch, forgotten), salt }
    }

    /// Whether a lease is of the present namespace.
    pub fn is_present(&self, pins: &Pins) -> bool {
        pins.namespace() == self.namespace.id
    }

    /// Begins another epoch: no present block is found again. Takes the same time however much the
    /// table holds. Transfers under way are discarded; [`end_next`](Self::end_next) ends them.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] unless `epoch` is greater than the present one.
    pub fn reset(&mut self, epoch: u64) -> Result<Effects> {
        if epoch <= self.namespace.epoch {
            let now = self.namespace.epoch;
            let message =
                format!("epoch {epoch} has been: the present one is {now}, give a greater one");
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        self.namespace.change(epoch, 0);
        self.reinstate_tiers();
        self.note_reset();
        Ok(self.forget_blocks())
    }

    /// [`reset`](Self::reset) within the epoch: this process does not find its present blocks
    /// again. The next one may find what outlives this, unless another block comes first: the
    /// blocks are still good, but where some of them lie is unknown here.
    pub fn forget_all(&mut self) -> Effects {
        self.namespace.change(self.namespace.epoch, self.namespace.forgotten + 1);
        self.note_reset_later();
        self.forget_blocks()
    }

    fn forget_blocks(&mut self) -> Effects {
        self.tell_cleared();
        let unflushed = self.tiers.iter_mut().flatten().map(TierTable::forget_all).collect();
        Effects { unflushed, ..self.take_effects() }
    }
}
