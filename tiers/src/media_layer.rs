//! What may stand between the layers that verify and the media.

use std::fmt;
use std::sync::Arc;

use crate::backend::Backend;
use crate::error::SetupError;
use crate::memory::Memory;
use crate::object::Store;

/// Is wrapped around every medium when tiers are opened: it sees each operation, and may change
/// what becomes of it. The module `chaos` has one; the layers above have to notice what it
/// spoils.
pub trait MediaLayer: Send + Sync + fmt::Debug {
    /// Says how many directories the disk tier has.
    fn set_directories(&self, directories: u32);

    /// `inner` with this around it. Blocks come up into `memory`.
    ///
    /// # Errors
    /// [`SetupErrorKind::Invalid`](crate::SetupErrorKind) if the two do not fit together.
    fn around(
        &self,
        inner: Arc<dyn Backend>,
        memory: Arc<dyn Memory>,
    ) -> Result<Arc<dyn Backend>, SetupError>;

    /// `store` with this around its requests.
    fn around_store(&self, store: Store) -> Store;
}
