//! NVTX: ranges on the timeline of a profiler, such as Nsight Systems.
//!
//! NVIDIA's library is found at run time. It passes ranges on to a profiler that has started the
//! process (`NVTX_INJECTION64_PATH`), and does nothing where there is none.

#![expect(unsafe_code, reason = "a C library")]

use std::ffi::{CStr, c_char};
use std::fmt;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::{SetupError, SetupErrorKind};

/// That of CUDA 13, and what came before it. Where `PyTorch` has loaded one of them it is found by
/// its name.
const NAMES: [&str; 2] = ["libnvtx3interop.so.1", "libnvToolsExt.so.1"];

/// The library, once loaded there for the rest of the process.
pub struct Nvtx {
    start: unsafe extern "C" fn(*const c_char) -> u64,
    end: unsafe extern "C" fn(u64),
}

/// A range that is open. It may end on another thread than it started on.
#[derive(Debug)]
pub struct NvtxRange(u64);

impl fmt::Debug for Nvtx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvtx").finish_non_exhaustive()
    }
}

impl Nvtx {
    /// Loads the library.
    ///
    /// # Errors
    /// `Unavailable`: the loader does not find it. The message says how to get it.
    pub fn load() -> Result<Self, SetupError> {
        // Never unloaded: a profiler may run threads behind it.
        let flags = RTLD_NOW | RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: what the library does when it is loaded is up to the user who installed it; it is
        // never unloaded.
        let mut found =
            NAMES.into_iter().filter_map(|name| unsafe { Library::open(Some(name), flags) }.ok());
        let Some(library) = found.next() else {
            let message = format!(
                "NVTX is not on the loader's path ({}): pip install nvidia-nvtx-cu12 (or nvidia-nvtx), and name its \
                 directory nvidia/…/lib in LD_LIBRARY_PATH",
                NAMES.join(", ")
            );
            return Err(SetupError::unavailable(message));
        };
        let lacks = |error: libloading::Error| {
            SetupError::caused(
                SetupErrorKind::Unavailable,
                "the NVTX library lacks a function",
                error,
            )
        };
        // SAFETY: a library of this name has these functions with these types, as NVIDIA's
        // nvToolsExt.h declares them.
        let start = unsafe {
            library.get::<unsafe extern "C" fn(*const c_char) -> u64>(b"nvtxRangeStartA\0")
        };
        // SAFETY: as above.
        let end = unsafe { library.get::<unsafe extern "C" fn(u64)>(b"nvtxRangeEnd\0") };
        Ok(Self { start: *start.map_err(lacks)?, end: *end.map_err(lacks)? })
    }

    /// Opens a range of this name.
    pub fn start(&self, name: &CStr) -> NvtxRange {
        // SAFETY: the name ends with a NUL, and is copied.
        NvtxRange(unsafe { (self.start)(name.as_ptr()) })
    }

    /// Ends a range.
    #[expect(clippy::needless_pass_by_value, reason = "a range ends once")]
    pub fn end(&self, range: NvtxRange) {
        // SAFETY: the range is open: nothing else has its number, and the name of a range cannot be
        // made up.
        unsafe { (self.end)(range.0) }
    }
}
