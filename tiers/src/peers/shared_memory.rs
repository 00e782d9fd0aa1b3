//! What a reader is given, and checks before it maps.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use rustix::fs::{SealFlags, fcntl_get_seals};

use super::untrusted;
use crate::error::SetupError;
use crate::geometry::Geometry;

/// The host tier of a process as others can map it: slots that lie one after the other from the
/// start of a file without a name. Its descriptor is open for reading only. While there is one of
/// these, in any process, the memory is taken.
#[derive(Clone, Debug)]
pub struct SharedMemory {
    file: Arc<File>,
    geometry: Geometry,
}

impl SharedMemory {
    /// With these no process can make the file shorter, cut holes into it, or map it for writing.
    pub(crate) const SEALS: SealFlags =
        SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

    pub(crate) fn new(file: File, geometry: Geometry) -> Self {
        Self { file: Arc::new(file), geometry }
    }

    /// How it is cut into slots.
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// That reading it is safe, whatever the process that made it does. Seals come first: what they
    /// forbid cannot happen after the other looks.
    pub(super) fn check(&self) -> Result<(), SetupError> {
        // Files that cannot be sealed have no seals to ask for.
        let seals = fcntl_get_seals(&*self.file).unwrap_or(SealFlags::empty());
        if !seals.contains(Self::SEALS) {
            return Err(untrusted(format!(
                "its file has the seals {seals:?}, and without {:?} the peer could cut it off, \
                 which kills its readers",
                Self::SEALS.difference(seals)
            )));
        }
        let found = self.file.metadata().map_err(untrusted)?;
        let (wanted, pages) = (self.geometry.bytes() as u64, found.blocks().saturating_mul(512));
        if found.len() < wanted {
            return Err(untrusted(format!(
                "its file has {} bytes, and {} slots of {} bytes take {wanted}",
                found.len(),
                self.geometry.slots(),
                self.geometry.stride()
            )));
        }
        if pages < wanted {
            return Err(untrusted(format!(
                "its file has memory for {pages} of {wanted} bytes, and the rest would be the reader's"
            )));
        }
        Ok(())
    }
}
