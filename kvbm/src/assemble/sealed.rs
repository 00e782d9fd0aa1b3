//! Encryption of the disk and object tiers: keys by the settings, and what is put around a backend.

use std::path::Path;
use std::sync::Arc;

use kvbm_settings::Settings;
use kvbm_tiers::sealed::{Cipher, KeyRing, Scratch, ScratchOptions};
use kvbm_tiers::{Backend, Memory, Route, Sealed, Tier, Verified};

use super::{Tiers, setup};
use crate::error::{Error, ErrorKind, Result};

/// Sealed blocks on their way in each direction: what is read meanwhile on the fastest drives takes less, and a segment
/// for the object tier not much more.
const SCRATCH_BYTES: usize = 64 << 20;

/// The keys that the settings give; `None`: nothing is encrypted.
pub(super) fn keys(settings: &Settings) -> Result<Option<Arc<KeyRing>>> {
    let encryption = &settings.encryption;
    let keys = match (&encryption.key_file, &encryption.key) {
        (Some(file), _) => KeyRing::from_file(Path::new(file)),
        (None, Some(keys)) => KeyRing::parse(keys),
        (None, None) => return Ok(None),
    };
    keys.map(Arc::new).map(Some).map_err(setup)
}

/// The memory that a lower tier's backend reads and writes, and what stands between that and the host's.
pub(super) struct MemoryEnd {
    pub(super) memory: Arc<dyn Memory>,
    seal: Option<Seal>,
}

struct Seal {
    parts: (Scratch, Cipher),
    run_blocks: usize,
}

impl MemoryEnd {
    pub(super) const fn is_sealed(&self) -> bool {
        self.seal.is_some()
    }
}

impl Tiers {
    /// For a lower tier whose backend gets up to `run_blocks` blocks together.
    pub(super) fn memory_end(&self, tier: Tier, run_blocks: usize, settings: &Settings) -> Result<MemoryEnd> {
        let memory = self.memory()?;
        let Some(keys) = self.keys.clone() else { return Ok(MemoryEnd { memory, seal: None }) };
        let block_bytes = memory.block_bytes();
        let blocks = scratch_blocks(run_blocks, block_bytes, settings);
        let huge_pages = settings.host.huge_pages;
        let scratch = Scratch::open(ScratchOptions { block_bytes, blocks, huge_pages }).map_err(setup)?;
        let cipher = Cipher::new(keys, tier, &self.namespace.name, block_bytes);
        let memory = scratch.memory();
        Ok(MemoryEnd { memory, seal: Some(Seal { parts: (scratch, cipher), run_blocks }) })
    }

    /// Joins the tiers by a backend of `end`, which is sealed where the tier is.
    pub(super) fn connect_sealed(
        &mut self,
        verified: Verified<impl Backend + 'static>,
        end: MemoryEnd,
    ) -> Result<()> {
        match end.seal {
            Some(Seal { parts, run_blocks }) => {
                // What arrives has a tag, which is stronger than its checksum: to read it twice would tell nothing more.
                let inner = verified.of_departures();
                let sealed = Sealed::new(inner, self.memory()?, parts, run_blocks).map_err(setup)?;
                self.connect(sealed)
            }
            None => self.connect(verified),
        }
    }

    /// DRAM that the lower tiers read from and write to.
    fn memory(&self) -> Result<Arc<dyn Memory>> {
        let host = self.host.clone().ok_or_else(|| {
            Error::new(
                ErrorKind::Invalid,
                "a disk or object tier needs DRAM: set host.staging_blocks above 0",
            )
        })?;
        Ok(host)
    }

    /// How a backend is called in reports.
    pub(super) fn told_sealed(&self, (from, to): Route, backend: &str) -> String {
        match &self.keys {
            Some(keys) if from.max(to) >= Tier::Disk => {
                format!("{backend}, encrypted with key {}", keys.current())
            }
            _ => backend.to_owned(),
        }
    }
}

/// Two runs at least, so that one is sealed while another is written; and no more than are ever sent at a time.
fn scratch_blocks(run_blocks: usize, block_bytes: usize, settings: &Settings) -> u32 {
    let transfer = &settings.transfer;
    let sent = run_blocks.max(transfer.max_batch as usize).saturating_mul(transfer.max_concurrent as usize);
    let blocks = (SCRATCH_BYTES / block_bytes).min(sent).max(2 * run_blocks);
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
