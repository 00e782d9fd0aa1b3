//! What may stand between the layers that verify and the media.

use std::fmt;
use std::sync::Arc;

use crate::backend::Backend;
use crate::error::SetupError;
use crate::memory::Memory;
use crate::object::Store;

/// Is wrapped around the media when tiers are opened: it sees each operation, and may change what
/// becomes of it. The layers above have to notice what it spoils. The module `chaos` has one.
///
/// It is around every backend but those of GPUDirect Storage, which verify by themselves, and of
/// objects without NIXL: there it is around the requests.
pub trait MediaLayer: Send + Sync + fmt::Debug {
    /// Says how many directories the disk tier has.
    fn set_directories(&self, directories: u32);

    /// `inner` with this around it. Blocks come up into `memory`.
    ///
    /// # Errors
    /// Of kind [`Invalid`](crate::SetupErrorKind::Invalid) if the two do not fit together.
    fn around(
        &self,
        inner: Arc<dyn Backend>,
        memory: Arc<dyn Memory>,
    ) -> Result<Arc<dyn Backend>, SetupError>;

    /// `store` with this around its requests.
    fn around_store(&self, store: Store) -> Store;
}
