//! The object tier: shared with workers of the same fingerprint, whose blocks are resident from the
//! start.

use std::sync::{Arc, Weak};
use std::time::Duration;

use kvbm_settings::{Capacity, ObjectSettings, OlderEpoch as OlderEpochSetting};
use kvbm_tiers::object::segment::{FooterKeys, Provenance};
use kvbm_tiers::object::{
    Budgets, Discovered, Discovery, EpochStanding, FoundBlock, OPERATION_LIMIT, ObjectBackend,
    ObjectOptions, OlderEpoch, Sharing, TakeIn,
};
use kvbm_tiers::sealed::{KeyRing, TenantKeys};
use kvbm_tiers::{SlotId, Tier, TierEpoch, clock};
use prometheus::Registry;

use super::NamespaceNames;
use crate::durable::RecoveryReport;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::register_object_traffic;
use crate::scheduler::Core;
use crate::table::Table;

/// An object tier, and what was in it before.
pub(super) struct ObjectTier {
    backend: Arc<ObjectBackend>,
    /// `None`: it is not shared.
    found: Option<Discovered>,
    /// The keys of its blocks, if they are encrypted.
    tenants: Option<Arc<TenantKeys>>,
    took: Duration,
}

/// What a shared store must still be told, while its tier is open.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedStore(Weak<ObjectBackend>);

/// `block_bytes` are those of a block as it is stored, `kept_epoch` what is kept beside the store
/// says.
pub(super) fn options(
    object: &ObjectSettings,
    namespace: &NamespaceNames,
    ring: Option<&Arc<KeyRing>>,
    segment_blocks: usize,
    block_bytes: usize,
    kept_epoch: u64,
) -> ObjectOptions {
    let bytes =
        |capacity: Capacity| capacity.blocks(block_bytes as u64).saturating_mul(block_bytes as u64);
    let keys = ring.map(|ring| FooterKeys::new(Arc::clone(ring), &namespace.name));
    let sharing = namespace.identity.filter(|_| namespace.shares_objects).map(|identity| Sharing {
        provenance: Provenance {
            fingerprint: identity.digest,
            epoch: identity.epoch.max(kept_epoch),
            forgotten: 0,
        },
        older_epoch: match object.older_epoch {
            OlderEpochSetting::Refuse => OlderEpoch::Refuse,
            OlderEpochSetting::Follow => OlderEpoch::Follow,
            OlderEpochSetting::Keep => OlderEpoch::Keep,
        },
        renewal: Duration::from_millis(object.renewal_ms),
        look: Duration::from_millis(object.discover_ms),
        collect_after: Duration::from_millis(object.collect_after_ms),
        collect_above: object.collect_above.map(bytes),
    });
    ObjectOptions {
        namespace: namespace.name.clone(),
        // As many blocks as are sent together, sealed or not.
        segment_bytes: (segment_blocks * block_bytes) as u64,
        concurrency: object.concurrency,
        operation_limit: OPERATION_LIMIT,
        budgets: budgets(object, bytes),
        keep: object.keep,
        keys,
        sharing,
    }
}

fn budgets(object: &ObjectSettings, bytes: impl Fn(Capacity) -> u64) -> Budgets {
    let limit = |requests: u32| (requests > 0).then_some(u64::from(requests));
    Budgets {
        puts: limit(object.put_budget),
        gets: limit(object.get_budget),
        bytes: object.byte_budget.map(bytes),
        period: Duration::from_millis(object.budget_period_ms),
    }
}

impl ObjectTier {
    /// Looks what is there, for a tier of `slots` slots.
    ///
    /// # Errors
    /// `Invalid`: the store is in a later epoch than this process, and the settings do not say what
    /// to do.
    pub(super) fn find(
        backend: Arc<ObjectBackend>,
        slots: u32,
        is_shared: bool,
        tenants: Option<Arc<TenantKeys>>,
    ) -> Result<Self> {
        let began = clock::now();
        let found = is_shared.then(|| backend.discover(slots));
        if let Some(Discovered { standing: EpochStanding::Behind(latest), epoch, .. }) = found {
            return Err(older_epoch(epoch, latest));
        }
        Ok(Self { backend, found, tenants, took: began.elapsed() })
    }

    pub(super) fn export(&self, registry: &Registry) -> Result<()> {
        register_object_traffic(registry, self.backend.traffic())
    }

    pub(super) fn store(&self) -> SharedStore {
        SharedStore(Arc::downgrade(&self.backend))
    }

    /// That of the blocks that were found.
    pub(super) fn epoch(&self) -> Option<TierEpoch> {
        Some(TierEpoch { epoch: self.found.as_ref()?.epoch, forgotten: 0 })
    }

    /// Makes resident what was found, if the epoch is still the present one; `None`: nothing was
    /// looked for.
    pub(super) fn restore(mut self, table: &mut Table) -> Option<RecoveryReport> {
        let mut found = self.found.take()?;
        let TierEpoch { epoch, forgotten } = table.naming().epoch;
        let all = found.blocks.len();
        // Blocks of a tenant whose key was destroyed cannot be read.
        self.tenants.iter().for_each(|keys| keys.retain_readable(&mut found.blocks));
        let mut report = RecoveryReport {
            tier: Tier::Object,
            blocks: 0,
            dropped: 0,
            past: 0,
            disagreed: 0,
            damaged: found.unread,
            torn_bytes: 0,
            took_us: self.took.as_micros() as u64,
        };
        if (found.epoch, 0) == (epoch, forgotten) {
            report.blocks = table.restore(Tier::Object, &found.blocks).blocks;
            report.dropped = all - report.blocks;
        } else {
            if let Err(error) = self.store().begin_epoch(epoch, forgotten) {
                tracing::warn!(%error, "the object tier waits until its store knows of the epoch");
            }
            report.past = all;
        }
        tracing::info!(?report, segments = found.segments, "found blocks in the object store");
        Some(report)
    }
}

fn older_epoch(own: u64, latest: u64) -> Error {
    let message = format!(
        "the object store is in epoch {latest}, and this process would start in epoch {own}: its weights may be those of \
         before. If they are those of epoch {latest}, say so in Fingerprint::epoch; else say with object.older_epoch \
         (DYN_KVBM_OBJECT_OLDER_EPOCH) whether to follow the store, or to keep the older epoch"
    );
    Error::invalid(message)
}

/// Takes in what other workers store while this one lives.
struct TakeInto(Weak<Core>);

impl TakeIn for TakeInto {
    fn take_in(
        &self,
        provenance: Provenance,
        found: &[FoundBlock],
        stand_for: &mut dyn FnMut(usize, SlotId),
    ) -> Vec<Discovery> {
        let Provenance { epoch, forgotten, .. } = provenance;
        let epoch = TierEpoch { epoch, forgotten };
        let core = self.0.upgrade().filter(|core| !core.is_closed());
        core.map_or_else(
            || vec![Discovery::Waits; found.len()],
            |core| core.take_in(epoch, found, stand_for),
        )
    }

    fn follow(&self, epoch: u64) -> bool {
        let core = self.0.upgrade().filter(|core| !core.is_closed());
        core.is_some_and(|core| core.reset(epoch).is_ok())
    }
}

impl SharedStore {
    /// From here on `core` takes in blocks that others store.
    pub(super) fn keep_looking(&self, core: &Arc<Core>) {
        if let Some(backend) = self.0.upgrade() {
            backend.keep_looking(Arc::new(TakeInto(Arc::downgrade(core))));
        }
    }

    /// Why the store is not used now, if it is not.
    pub(crate) fn is_not_used(&self) -> Option<String> {
        match self.0.upgrade()?.epoch_standing() {
            EpochStanding::Current(_) => None,
            EpochStanding::Unknown => Some(
                "it is not used: which epochs have begun there could not be read, and is asked again"
                    .to_owned(),
            ),
            EpochStanding::Behind(latest) => {
                Some(format!("it is not used: it is in epoch {latest}, and this process in an earlier one"))
            }
        }
    }

    /// A tenant was forgotten for the `life`-th time: its stored blocks are apart from those that
    /// it brings from here on.
    pub(crate) fn forget_tenant(&self, tenant: u32, life: u32) {
        if let Some(backend) = self.0.upgrade() {
            backend.forget_tenant(tenant, life);
        }
    }

    /// Tells processes that start later that an epoch has begun.
    ///
    /// # Errors
    /// `Unavailable`: the store does not take it. It is retried in the background.
    pub(crate) fn begin_epoch(&self, epoch: u64, forgotten: u64) -> Result<()> {
        let Some(backend) = self.0.upgrade() else { return Ok(()) };
        backend.begin_epoch(epoch, forgotten).map_err(|error| {
            let message = format!("later processes may find blocks of the past: {error}");
            Error::caused(ErrorKind::Unavailable, message, error)
        })
    }
}
