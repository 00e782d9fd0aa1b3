//! What copies wait for before they touch an engine's slots.

use kvbm::Fence;
use pyo3::prelude::*;

use crate::errors::classes;

/// An event of CUDA's that the engine recorded behind its work: an argument `ready` or `after`.
pub(crate) struct Behind(pub(crate) Fence);

impl FromPyObject<'_, '_> for Behind {
    type Error = PyErr;

    fn extract(event: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let handle = event.getattr("cuda_event").and_then(|handle| handle.extract::<u64>());
        let handle = handle.map_err(|_| {
            let message =
                "a fence is an event with `cuda_event`, such as torch.cuda.Event, or None";
            classes::InvalidError::new_err(message)
        })?;
        if handle == 0 {
            return Err(classes::InvalidError::new_err(
                "the event was not recorded: record it behind the work",
            ));
        }
        // SAFETY: the manager's docstring asks for an event of the memory's GPU, recorded outside
        // of captures and not again; it lives as long as its Python object.
        #[allow(unsafe_code)]
        let fence = unsafe { Fence::event_kept_by(handle, event.to_owned().unbind()) };
        Ok(Self(fence))
    }
}
