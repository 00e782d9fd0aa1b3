//! cuFile, NVIDIA's library for transfers between files and GPUs, found at run time.
//!
//! The functions are looked up here and not through `cudarc`, whose types they have: it looks for
//! `libcufile.so`, while packages ship `libcufile.so.0`; and a result that is no value of its
//! enumerations would be undefined.

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cudarc::cufile::sys::{CUfileDescr_t, CUfileDrvProps_t, CUfileFileHandleType, CUfileHandle_t};
use libloading::Library;
use rustix::fs::{AtFlags, CWD, FlockOperation};
use rustix::io::Errno;

use super::medium::{StorageMedium, reached};
use super::probe::{missing, probe};
use crate::clock;
use crate::files::unlink;

/// How cuFile is started.
#[derive(Clone, Debug)]
pub struct CuFileOptions {
    /// The kernel's list of modules: versions of cuFile hang where it cannot be read.
    pub modules: PathBuf,
    /// How long the start may take.
    pub timeout: Duration,
    /// Where the kernel describes the drives that slot files lie on.
    pub sysfs: PathBuf,
}

impl Default for CuFileOptions {
    fn default() -> Self {
        let (modules, sysfs) = ("/proc/modules".into(), "/sys".into());
        Self { modules, timeout: Duration::from_secs(10), sysfs }
    }
}

/// What cuFile could do here, whatever files it is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CuFileReport {
    /// The media that the driver reaches directly; slot files elsewhere are read in compatibility
    /// mode.
    pub reached: Vec<&'static str>,
    /// Bytes of device memory that it pins at most.
    pub max_pinned: u64,
}

impl fmt::Display for CuFileReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.reached.join(", ") {
            "" => f.write_str("compatibility mode: no direct path, see gdscheck -p")?,
            reached => write!(f, "direct from {reached}")?,
        }
        write!(f, "; pins at most {} MiB of device memory ({PIN_SETTING})", self.max_pinned >> 20)
    }
}

/// What limits it.
pub(super) const PIN_SETTING: &str = "properties.max_device_pinned_mem_size_kb in cufile.json";

const NAMES: [&str; 3] = ["libcufile.so.0", "libcufile.so", "/usr/local/cuda/lib64/libcufile.so.0"];
const GET_LIBRARY: &str = "install libcufile (apt install libcufile-12-8, or pip install nvidia-cufile-cu12 and name its directory in LD_LIBRARY_PATH)";
const GET_MODULES: &str = "mount /proc so that /proc/modules can be read";
const GET_STARTED: &str = "see cufile.log in the working directory, and gdscheck -p";

/// What every function but reads and writes answers.
#[derive(Clone, Copy)]
#[repr(C)]
struct Status {
    file: c_int,
    driver: c_int,
}

impl Status {
    fn result(self) -> Result<(), String> {
        match self {
            Self { file: 0, .. } => Ok(()),
            Self { file, driver: 0 } => Err(format!("cuFile error {file}")),
            Self { file, driver } => Err(format!("cuFile error {file}, CUDA error {driver}")),
        }
    }
}

type TransferFn =
    unsafe extern "C" fn(CUfileHandle_t, *mut c_void, usize, libc::off_t, libc::off_t) -> isize;

/// The library, started.
pub(super) struct CuFile {
    register_file: unsafe extern "C" fn(*mut CUfileHandle_t, *mut CUfileDescr_t) -> Status,
    deregister_file: unsafe extern "C" fn(CUfileHandle_t),
    register_buffer: unsafe extern "C" fn(*const c_void, usize, c_int) -> Status,
    deregister_buffer: unsafe extern "C" fn(*const c_void) -> Status,
    read: TransferFn,
    write: TransferFn,
    /// A bit for each medium that it reaches directly.
    status: c_uint,
    max_pinned: u64,
    /// Keeps the code.
    _library: Library,
}

/// What cuFile could do here; else what is missing, and how to get it. Never hangs for longer than
/// the options say.
pub fn probe_cufile(options: &CuFileOptions) -> Result<CuFileReport, String> {
    let cufile = CuFile::open(options)?;
    Ok(CuFileReport { reached: reached(cufile.status), max_pinned: cufile.max_pinned })
}

impl CuFile {
    /// Starts the library, once in a process.
    pub(super) fn open(options: &CuFileOptions) -> Result<Arc<Self>, String> {
        static OPENED: OnceLock<Result<Arc<CuFile>, String>> = OnceLock::new();
        probe().driver?;
        if let Err(error) = std::fs::read(&options.modules) {
            return missing(&format!("{}: {error}", options.modules.display()), GET_MODULES);
        }
        OPENED.get_or_init(|| Self::start(options.timeout)).clone()
    }

    /// On a thread of its own, which is left behind if it does not come back.
    fn start(timeout: Duration) -> Result<Arc<Self>, String> {
        let (send, receive) = mpsc::channel();
        let start = move || send.send(Self::load());
        if let Err(error) = clock::spawn("kvbm-cufile", start) {
            return missing(&format!("no thread: {error}"), "raise the limit on processes");
        }
        match receive.recv_timeout(timeout) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) => {
                missing(&format!("cuFileDriverOpen did not end in {timeout:?}"), GET_STARTED)
            }
            Err(RecvTimeoutError::Disconnected) => missing("cuFile panicked", GET_STARTED),
        }
    }

    fn load() -> Result<Arc<Self>, String> {
        // SAFETY: loads the library, which may run its initialisers.
        let libraries = NAMES.into_iter().map(|name| unsafe { Library::new(name) });
        let Some(library) = libraries.flatten().next() else {
            return missing("libcufile.so.0 is not on this machine", GET_LIBRARY);
        };
        // SAFETY: the library is cuFile.
        match unsafe { Self::of(library) } {
            Ok(cufile) => Ok(Arc::new(cufile)),
            Err(why) => missing(&why, GET_STARTED),
        }
    }

    /// Looks the functions up and starts the driver behind them.
    ///
    /// # Safety
    /// The library is cuFile: its symbols have the types that NVIDIA documents.
    unsafe fn of(library: Library) -> Result<Self, String> {
        let no_symbol = |error: libloading::Error| format!("libcufile lacks a symbol: {error}");
        // SAFETY: as the caller promises.
        let open =
            unsafe { library.get::<unsafe extern "C" fn() -> Status>(b"cuFileDriverOpen\0") };
        // SAFETY: as the caller promises.
        let properties = unsafe {
            library.get::<unsafe extern "C" fn(*mut CUfileDrvProps_t) -> Status>(
                b"cuFileDriverGetProperties\0",
            )
        };
        let (open, properties) = (*open.map_err(no_symbol)?, *properties.map_err(no_symbol)?);
        // SAFETY: as the caller promises.
        let mut cufile = unsafe {
            Self {
                register_file: *library.get(b"cuFileHandleRegister\0").map_err(no_symbol)?,
                deregister_file: *library.get(b"cuFileHandleDeregister\0").map_err(no_symbol)?,
                register_buffer: *library.get(b"cuFileBufRegister\0").map_err(no_symbol)?,
                deregister_buffer: *library.get(b"cuFileBufDeregister\0").map_err(no_symbol)?,
                read: *library.get(b"cuFileRead\0").map_err(no_symbol)?,
                write: *library.get(b"cuFileWrite\0").map_err(no_symbol)?,
                status: 0,
                max_pinned: 0,
                _library: library,
            }
        };
        // SAFETY: it has no arguments.
        unsafe { open() }.result().map_err(|error| format!("cuFileDriverOpen: {error}"))?;
        let mut found = std::mem::MaybeUninit::<[CUfileDrvProps_t; 2]>::zeroed();
        // SAFETY: there is room for the properties, and as much again for what later versions may
        // add.
        unsafe { properties(found.as_mut_ptr().cast()) }
            .result()
            .map_err(|error| format!("cuFileDriverGetProperties: {error}"))?;
        // SAFETY: numbers, of which every pattern is one.
        let [properties, _] = unsafe { found.assume_init() };
        cufile.status = properties.nvfs.dstatusflags;
        cufile.max_pinned = u64::from(properties.max_device_pinned_mem_size) << 10;
        Ok(cufile)
    }

    pub(super) const fn max_pinned(&self) -> u64 {
        self.max_pinned
    }

    /// Whether there is a direct path to a file; else why not.
    pub(super) fn reaches(&self, file: &File, options: &CuFileOptions) -> Result<(), String> {
        StorageMedium::of(file, &options.sysfs).is_direct(self.status)
    }
}

impl fmt::Debug for CuFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CuFile({:#x})", self.status)
    }
}

/// A file that cuFile reads and writes.
#[derive(Debug)]
pub(super) struct CuFileHandle {
    cufile: Arc<CuFile>,
    registered: CUfileHandle_t,
    /// What cuFile has of it; it stays open as long as the handle lives.
    _file: File,
}

// SAFETY: cuFile's functions may be called from any thread.
unsafe impl Send for CuFileHandle {}
// SAFETY: and from several at once.
unsafe impl Sync for CuFileHandle {}

impl CuFileHandle {
    pub(super) fn new(cufile: &Arc<CuFile>, file: BorrowedFd<'_>) -> Result<Self, String> {
        // The name goes when cuFile has opened the file by it.
        let (file, _name) = open_plainly(file)
            .map_err(|error| format!("it cannot be opened by a name: {error}"))?;
        let mut description = CUfileDescr_t {
            type_: CUfileFileHandleType::CU_FILE_HANDLE_TYPE_OPAQUE_FD,
            handle: cudarc::cufile::sys::CUfileDescr_t__bindgen_ty_1 { fd: file.as_raw_fd() },
            fs_ops: std::ptr::null(),
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: both pointers are valid for the call.
        unsafe { (cufile.register_file)(&raw mut handle, &raw mut description) }.result()?;
        Ok(Self { cufile: Arc::clone(cufile), registered: handle, _file: file })
    }

    /// Reads from the file to device memory; returns the number of bytes.
    ///
    /// # Safety
    /// `bytes` bytes from `offset` behind `base` are device memory that nothing else uses. If
    /// `base` is not that of a registered buffer, `offset` is 0. The context is current.
    pub(super) unsafe fn read(
        &self,
        to: DevicePlace,
        bytes: usize,
        at: u64,
    ) -> Result<usize, String> {
        // SAFETY: as the caller promises.
        unsafe { self.transfer(self.cufile.read, to, bytes, at) }
    }

    /// Writes from device memory to the file; returns the number of bytes.
    ///
    /// # Safety
    /// As for [`read`](Self::read), but others may read the memory.
    pub(super) unsafe fn write(
        &self,
        from: DevicePlace,
        bytes: usize,
        at: u64,
    ) -> Result<usize, String> {
        // SAFETY: as the caller promises.
        unsafe { self.transfer(self.cufile.write, from, bytes, at) }
    }

    unsafe fn transfer(
        &self,
        transfer: TransferFn,
        place: DevicePlace,
        bytes: usize,
        at: u64,
    ) -> Result<usize, String> {
        let base = std::ptr::with_exposed_provenance_mut(place.base);
        // SAFETY: as the caller promises.
        let moved = unsafe {
            transfer(self.registered, base, bytes, at as libc::off_t, place.offset as libc::off_t)
        };
        match moved {
            0.. => Ok(moved as usize),
            -1 => Err(io::Error::last_os_error().to_string()),
            error => Err(format!("cuFile error {}", -error)),
        }
    }
}

impl Drop for CuFileHandle {
    fn drop(&mut self) {
        // SAFETY: registered once, deregistered once.
        unsafe { (self.cufile.deregister_file)(self.registered) };
    }
}

/// The same file, opened once more: cuFile refuses those that were opened without a name
/// (`O_TMPFILE`) or not through links (`O_NOFOLLOW`), as slot files are
/// (`CU_FILE_INVALID_FILE_OPEN_FLAG`, 5019). While it registers a file it opens it by its name, so
/// one that has none gets one for that time.
fn open_plainly(file: BorrowedFd<'_>) -> io::Result<(File, Option<PassingName>)> {
    let open = |path: &Path| {
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path)
    };
    let ours = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    if rustix::fs::fstat(file)?.st_nlink > 0 {
        return Ok((open(&ours)?, None));
    }
    // Others leave a file alone that is locked.
    rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)?;
    let name = PassingName::of(&ours)?;
    Ok((open(&name.0)?, Some(name)))
}

/// A name of a file that never had one, until this is dropped. The kernel lends one once. A process
/// that dies before leaves it to the next one, which removes what is called so and is not locked.
struct PassingName(PathBuf);

impl PassingName {
    fn of(file: &Path) -> io::Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        // The directory that it was opened in, and a number in place of a name.
        let place = fs::read_link(file)?;
        loop {
            // Processes in containers that share the directory may have the same number.
            let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
            let path = place.with_file_name(format!("kvbm-{process}-{count}.gds.partial"));
            match rustix::fs::linkat(CWD, file, CWD, &path, AtFlags::SYMLINK_FOLLOW) {
                Ok(()) => return Ok(Self(path)),
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for PassingName {
    fn drop(&mut self) {
        unlink(&self.0);
    }
}

/// Where bytes lie in device memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct DevicePlace {
    /// Address of a registered buffer, or of the bytes.
    pub(super) base: usize,
    /// From there to the bytes.
    pub(super) offset: usize,
}

/// Device memory that cuFile knows: it is reached without buffers between.
#[derive(Debug)]
pub(super) struct CuFileBuffer {
    cufile: Arc<CuFile>,
    base: usize,
}

impl CuFileBuffer {
    /// # Safety
    /// The bytes are device memory that stays allocated as long as the buffer lives.
    pub(super) unsafe fn new(
        cufile: &Arc<CuFile>,
        base: usize,
        bytes: usize,
    ) -> Result<Self, String> {
        let start = std::ptr::with_exposed_provenance(base);
        // SAFETY: as the caller promises.
        unsafe { (cufile.register_buffer)(start, bytes, 0) }.result()?;
        Ok(Self { cufile: Arc::clone(cufile), base })
    }
}

impl Drop for CuFileBuffer {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance(self.base);
        // SAFETY: registered once, deregistered once.
        if let Err(error) = unsafe { (self.cufile.deregister_buffer)(start) }.result() {
            tracing::debug!(error, "cuFile could not let go of a buffer");
        }
    }
}
