//! Encryption of what outlives the process: keys by the settings, and layers around a backend.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvbm_settings::{HostSettings, Settings};
use kvbm_tiers::object::{OPERATION_LIMIT, Store};
use kvbm_tiers::ranks::Leader;
use kvbm_tiers::sealed::{
    Cipher, HostSeal, KeyFiles, KeyRing, KeyStore, KeysInMemory, SEAL_BYTES, Scratch,
    ScratchOptions, TenantKeys,
};
use kvbm_tiers::{Backend, DramRegion, Frame, Memory, Route, Sealed, Tier, Verified};

use super::durable::PATIENCE;
use super::{OpenedRegions, setup};
use crate::error::{Error, ErrorKind, Result};

/// Sealed blocks on their way in each direction: the fastest drives need less, and a segment for
/// the object tier not much more.
const SCRATCH_BYTES: usize = 64 << 20;

/// The main keys that the settings give; `None`: nothing is encrypted.
///
/// # Errors
/// They cannot be read, or are no keys.
pub fn main_keys(settings: &Settings) -> Result<Option<Arc<KeyRing>>> {
    let encryption = &settings.encryption;
    let keys = match (&encryption.key_file, &encryption.key) {
        (Some(file), _) => KeyRing::from_file(Path::new(file)),
        (None, Some(keys)) => KeyRing::parse(keys),
        (None, None) => return Ok(None),
    };
    keys.map(Arc::new).map(Some).map_err(setup)
}

/// The memory that a lower tier's backend reads and writes, and the layer between that and the
/// host's.
pub(super) struct MemoryEnd {
    pub(super) memory: Arc<dyn Memory>,
    seal: Option<TierSeal>,
    host: HostEnd,
}

/// The memory that a backend sees in place of the host's, and the layer between the two if blocks
/// lie sealed in the host's.
pub(super) struct HostEnd {
    pub(super) memory: Arc<dyn Memory>,
    seal: Option<TierSeal>,
}

struct TierSeal {
    scratch: Scratch,
    cipher: Cipher,
    run_blocks: usize,
}

impl MemoryEnd {
    pub(super) const fn is_sealed(&self) -> bool {
        self.seal.is_some()
    }
}

impl HostEnd {
    /// A region in which blocks of this end lie unsealed, and a slot of it, while nothing has been
    /// copied yet; `None`: the host's is such a region.
    pub(super) fn borrow_slot(&self) -> Option<(Arc<DramRegion>, Frame)> {
        self.seal.as_ref()?.scratch.borrow_slot()
    }

    pub(super) fn return_slot(&self, frame: Frame) {
        if let Some(seal) = &self.seal {
            seal.scratch.return_slot(frame);
        }
    }
}

impl OpenedRegions {
    /// For a lower tier whose backend gets up to `run_blocks` blocks together.
    pub(super) fn memory_end(
        &mut self,
        tier: Tier,
        run_blocks: usize,
        kept: KeyPlace<'_>,
        settings: &Settings,
    ) -> Result<MemoryEnd> {
        let host = self.host_end(run_blocks, settings)?;
        let Some(ring) = self.keys.clone() else {
            return Ok(MemoryEnd { memory: Arc::clone(&host.memory), seal: None, host });
        };
        let namespace = &self.namespace.name;
        let keys = Arc::new(TenantKeys::new(ring, namespace, kept.open(namespace)?));
        self.tenant_keys.push((tier, Arc::clone(&keys)));
        let block_bytes = host.memory.block_bytes();
        let blocks = scratch_blocks(run_blocks, block_bytes, settings);
        let huge_pages = settings.host.huge_pages;
        let scratch =
            Scratch::open(ScratchOptions { block_bytes, blocks, huge_pages }).map_err(setup)?;
        let cipher = Cipher::new(keys, tier, &self.namespace.name, block_bytes);
        let memory = scratch.memory();
        Ok(MemoryEnd { memory, seal: Some(TierSeal { scratch, cipher, run_blocks }), host })
    }

    /// For a backend that gets up to `run_blocks` blocks together.
    pub(super) fn host_end(&self, run_blocks: usize, settings: &Settings) -> Result<HostEnd> {
        let memory = self.memory()?;
        let Some(keys) = self.keys_of(Tier::Host) else {
            return Ok(HostEnd { memory, seal: None });
        };
        let block_bytes = memory.block_bytes() - SEAL_BYTES;
        let blocks = scratch_blocks(run_blocks, block_bytes, settings);
        let options = ScratchOptions { block_bytes, blocks, huge_pages: settings.host.huge_pages };
        let scratch = Scratch::in_the_clear(options).map_err(setup)?;
        let cipher = Cipher::new(keys, Tier::Host, &self.namespace.name, block_bytes);
        let memory = scratch.memory();
        Ok(HostEnd { memory, seal: Some(TierSeal { scratch, cipher, run_blocks }) })
    }

    /// Seals blocks that outlive the process in memory, if there are keys. These lie beside the
    /// index.
    pub(super) fn seal_host(&mut self, settings: &HostSettings) -> Result<()> {
        let (Some(ring), Some(dir)) = (self.keys.clone(), &settings.persist) else { return Ok(()) };
        let namespace = HostSeal::keys_namespace(&self.namespace.name);
        let dirs = std::slice::from_ref(settings.persist_index.as_ref().unwrap_or(dir));
        let kept = KeyPlace::in_files(dirs, self.namespace.identity.is_some());
        let keys = TenantKeys::new(ring, &namespace, kept.open(&namespace)?);
        self.tenant_keys.push((Tier::Host, Arc::new(keys)));
        Ok(())
    }

    /// For blocks of other workers. `None`: there are no keys.
    pub(super) fn host_seal(&self, settings: &Settings) -> Option<Arc<HostSeal>> {
        let ring = self.keys.clone()?;
        let block_bytes = settings.block_bytes.unwrap_or_default() as usize;
        let own = self.keys_of(Tier::Host);
        Some(Arc::new(HostSeal::new(ring, &self.namespace.name, block_bytes, own)))
    }

    /// Joins tiers by a backend of `end`, which is sealed if the host tier is.
    pub(super) fn connect_host(
        &mut self,
        backend: impl Backend + 'static,
        end: HostEnd,
    ) -> Result<()> {
        match end.seal {
            Some(TierSeal { scratch, cipher, run_blocks }) => {
                let sealed =
                    Sealed::of_memory(backend, self.memory()?, scratch, cipher, run_blocks)
                        .map_err(setup)?;
                self.connect(sealed)
            }
            None => self.connect(backend),
        }
    }

    /// Joins the tiers by a backend of `end`, which is sealed if the tier is.
    pub(super) fn connect_sealed(
        &mut self,
        verified: Verified<impl Backend + 'static>,
        end: MemoryEnd,
    ) -> Result<()> {
        match end.seal {
            Some(TierSeal { scratch, cipher, run_blocks }) => {
                // An arriving block has a tag, which is stronger than its checksum: reading it
                // twice would tell nothing more.
                let inner = verified.of_departures();
                let memory = Arc::clone(&end.host.memory);
                let sealed =
                    Sealed::new(inner, memory, scratch, cipher, run_blocks).map_err(setup)?;
                self.connect_host(sealed, end.host)
            }
            None => self.connect_host(verified, end.host),
        }
    }

    /// DRAM that the lower tiers read from and write to.
    fn memory(&self) -> Result<Arc<dyn Memory>> {
        let host = self.host.clone().ok_or_else(|| {
            Error::invalid("a disk or object tier needs DRAM: set host.staging_blocks above 0")
        })?;
        Ok(host)
    }

    /// The name of a backend in reports.
    pub(super) fn told_sealed(&self, route: Route, backend: &str) -> String {
        let is_sealed_memory = route.touches(Tier::Host) && self.keys_of(Tier::Host).is_some();
        match &self.keys {
            Some(keys) if route.lower() >= Tier::Disk || is_sealed_memory => {
                format!("{backend}, encrypted with key {}", keys.current())
            }
            _ => backend.to_owned(),
        }
    }
}

/// Where the keys of tenants are kept: with what they seal.
pub(super) enum KeyPlace<'a> {
    /// Only in memory: what they seal is lost with the process.
    Nowhere,
    Beside(&'a [PathBuf]),
    In(&'a Store),
}

impl<'a> KeyPlace<'a> {
    pub(super) const fn in_files(dirs: &'a [PathBuf], is_kept: bool) -> Self {
        if is_kept { Self::Beside(dirs) } else { Self::Nowhere }
    }

    fn open(self, namespace: &str) -> Result<Box<dyn KeyStore>> {
        Ok(match self {
            Self::Nowhere => Box::new(KeysInMemory),
            Self::Beside(dirs) => {
                Box::new(KeyFiles::open(dirs, namespace, PATIENCE).map_err(setup)?)
            }
            Self::In(store) => Box::new(store.keys(namespace)),
        })
    }
}

/// What forgetting a tenant needs.
#[derive(Debug)]
pub(crate) enum Tenants {
    /// Of each encrypted tier, the keys.
    Known(Vec<Arc<TenantKeys>>),
    /// A tier outlives the process without recording tenants.
    Untold,
    /// The ranks have the keys.
    Elsewhere(Weak<Leader>),
}

impl Tenants {
    /// Whether everything of a tenant can be found.
    ///
    /// # Errors
    /// `Invalid`: it cannot.
    pub(crate) fn check(&self) -> Result<()> {
        match self {
            // Ranks report their part when they are told.
            Self::Known(_) | Self::Elsewhere(_) => Ok(()),
            Self::Untold => Err(untold()),
        }
    }

    /// From here on no key of the tenant's earlier lives opens or seals anything here. It asks no
    /// other process.
    pub(crate) fn begin_forgetting(&self, tenant: u32, life: u32) {
        if let Self::Known(keys) = self {
            keys.iter().for_each(|keys| keys.begin_forgetting(tenant, life));
        }
    }

    /// Destroys these keys, after [`begin_forgetting`](Self::begin_forgetting).
    ///
    /// # Errors
    /// `Unavailable`: some may be left.
    pub(crate) fn destroy_keys(&self, tenant: u32, life: u32) -> Result<()> {
        let keys = match self {
            Self::Known(keys) => keys,
            Self::Elsewhere(leader) => return forget_in_ranks(leader, tenant, life),
            Self::Untold => return Err(untold()),
        };
        // All of them, even if one fails.
        keys.iter()
            .map(|keys| keys.destroy(tenant, life))
            .fold(Ok(()), std::io::Result::and)
            .map_err(|error| {
                let message = format!(
                    "not every key of tenant {tenant} could be destroyed: {error}; try again"
                );
                Error::caused(ErrorKind::Unavailable, message, error)
            })
    }
}

fn untold() -> Error {
    let message = "a tenant cannot be forgotten: what a tier keeps for the next process is not encrypted, and does not say \
         whose it is: set encryption.key_file (DYN_KVBM_ENCRYPTION_KEY_FILE), or forget everything (Manager::reset)";
    Error::invalid(message)
}

/// A rank answers after its store has deleted an object.
const RANKS_PATIENCE: Duration = OPERATION_LIMIT.saturating_add(Duration::from_secs(5));

fn forget_in_ranks(leader: &Weak<Leader>, tenant: u32, life: u32) -> Result<()> {
    let leader = leader.upgrade().ok_or_else(Error::closed)?;
    leader
        .forget(tenant, life, RANKS_PATIENCE)
        .map_err(|error| Error::caused(ErrorKind::Unavailable, error.to_string(), error))
}

impl OpenedRegions {
    pub(super) fn keys_of(&self, tier: Tier) -> Option<Arc<TenantKeys>> {
        self.tenant_keys.iter().find(|(of, _)| *of == tier).map(|(_, keys)| Arc::clone(keys))
    }

    pub(super) fn tenants(&self) -> Tenants {
        let keeps_in_the_clear = self.keys.is_none() && self.namespace.identity.is_some();
        let keeps = !self.kept.is_empty() || self.objects.is_some();
        if let Some(leader) = &self.leader {
            Tenants::Elsewhere(Arc::downgrade(leader))
        } else if keeps_in_the_clear && keeps {
            Tenants::Untold
        } else {
            Tenants::Known(self.tenant_keys.iter().map(|(_, keys)| Arc::clone(keys)).collect())
        }
    }
}

/// Blocks that a backend between the device and sealed memory gets together: a scheduler's batch,
/// if that leaves room for others.
pub(super) fn device_run(settings: &Settings) -> usize {
    let block_bytes = settings.block_bytes.unwrap_or_default().max(1);
    (SCRATCH_BYTES / 4 / block_bytes as usize).clamp(1, settings.transfer.max_batch as usize)
}

/// At least two runs, so that one is sealed while another is written; and no more than are ever
/// sent at a time.
fn scratch_blocks(run_blocks: usize, block_bytes: usize, settings: &Settings) -> u32 {
    let transfer = &settings.transfer;
    let sent = run_blocks
        .max(transfer.max_batch as usize)
        .saturating_mul(transfer.max_concurrent as usize);
    let blocks = (SCRATCH_BYTES / block_bytes).min(sent).max(2 * run_blocks);
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
