//! What of CUDA there is on this machine.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::sync::Mutex;

use cudarc::driver::{result, sys};

/// The oldest CUDA that the driver must serve: the version of the embedded kernels.
pub const MIN_DRIVER: Version = Version(12_010);

/// A version of CUDA, as the driver counts them: 12080 is 12.8.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(c_int);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What was found; else what is missing, and how to get it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The driver and its devices, of which there is at least one.
    pub driver: Result<Driver, String>,
    /// The run-time compiler. Without it the embedded kernels serve.
    pub nvrtc: Result<(), String>,
}

/// A driver that serves us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// The newest CUDA that it knows.
    pub version: Version,
    /// In the order of their ordinals.
    pub devices: Vec<Device>,
    /// Whether it takes many copies in one call.
    pub(crate) copies_batches: bool,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The product.
    pub name: String,
    /// Bytes of memory.
    pub memory: usize,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Where it is on the PCI bus: domain, bus and device.
    pub pci: (i32, i32, i32),
}

const GET_DRIVER: &str =
    "install NVIDIA's driver; in a container, pass the GPU through (--gpus all)";
const GET_NEWER_DRIVER: &str = "update NVIDIA's driver to 530 or later";
const GET_DEVICE: &str = "check nvidia-smi, CUDA_VISIBLE_DEVICES and /dev/nvidia*";
const GET_NVRTC: &str = "pip install nvidia-cuda-nvrtc-cu12 and name its directory in LD_LIBRARY_PATH, or do without: kernels are built in";

/// Every symbol that this crate reaches the driver through, apart from optional ones.
const SYMBOLS: &[&CStr] = &[
    c"cuCtxPopCurrent_v2",
    c"cuCtxPushCurrent_v2",
    c"cuDeviceGet",
    c"cuDeviceGetAttribute",
    c"cuDeviceGetCount",
    c"cuDeviceGetName",
    c"cuDevicePrimaryCtxRelease_v2",
    c"cuDevicePrimaryCtxRetain",
    c"cuDeviceTotalMem_v2",
    c"cuDriverGetVersion",
    c"cuEventCreate",
    c"cuEventDestroy_v2",
    c"cuEventQuery",
    c"cuEventRecord",
    c"cuGetErrorName",
    c"cuGetErrorString",
    c"cuInit",
    c"cuLaunchKernel",
    c"cuMemAlloc_v2",
    c"cuMemFreeHost",
    c"cuMemFree_v2",
    c"cuMemHostAlloc",
    c"cuMemHostGetDevicePointer_v2",
    c"cuMemHostRegister_v2",
    c"cuMemHostUnregister",
    c"cuMemcpyAsync",
    c"cuMemsetD8Async",
    c"cuModuleGetFunction",
    c"cuModuleLoadData",
    c"cuModuleUnload",
    c"cuStreamCreate",
    c"cuStreamDestroy_v2",
    c"cuStreamIsCapturing",
    c"cuStreamSynchronize",
    c"cuStreamWaitEvent",
    c"cuThreadExchangeStreamCaptureMode",
];

/// Looks for driver, devices and compiler. Never panics; takes a second on the first call where
/// there is a GPU, since it starts the driver.
pub fn probe() -> Probe {
    Probe { driver: driver(), nvrtc: nvrtc() }
}

/// Why something is not there, and how to get it.
pub(super) fn missing<T>(why: &str, remedy: &str) -> Result<T, String> {
    Err(format!("{why}; {remedy}"))
}

fn driver() -> Result<Driver, String> {
    // `cuInit` from several threads at once is allowed, but each would load and unload the library
    // first.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock();
    // SAFETY: loads the library, which may run its initialisers, as any use of CUDA does.
    if !unsafe { sys::is_culib_present() } {
        return missing("libcuda.so.1 is not on this machine", GET_DRIVER);
    }
    if let Some(symbol) = SYMBOLS.iter().find(|symbol| !has_symbol(symbol)) {
        let why = format!("libcuda.so lacks {}", symbol.to_string_lossy());
        return missing(&why, GET_NEWER_DRIVER);
    }
    let mut version = 0;
    // SAFETY: the symbol exists, and the pointer is valid for the call.
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
    match asked.map(|()| Version(version)) {
        Err(error) => {
            missing(&format!("the driver does not tell its version: {error}"), GET_DRIVER)
        }
        Ok(version) if version < MIN_DRIVER => {
            let why = format!("the driver serves CUDA {version}, {MIN_DRIVER} is needed");
            missing(&why, GET_NEWER_DRIVER)
        }
        Ok(version) => devices(version),
    }
}

/// The library is there.
fn has_symbol(name: &CStr) -> bool {
    // SAFETY: the symbol is looked up, not used.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.to_bytes_with_nul()) }.is_ok()
}

fn devices(version: Version) -> Result<Driver, String> {
    let found = result::init().and_then(|()| result::device::get_count());
    let devices = found.and_then(|count| (0..count).map(device).collect::<Result<Vec<_>, _>>());
    match devices {
        Err(error) => missing(&format!("the driver does not start: {error}"), GET_DEVICE),
        Ok(devices) if devices.is_empty() => missing("the driver knows no GPU", GET_DEVICE),
        Ok(devices) => {
            let copies_batches = has_symbol(c"cuMemcpyBatchAsync");
            Ok(Driver { version, devices, copies_batches })
        }
    }
}

fn device(ordinal: c_int) -> Result<Device, result::DriverError> {
    use sys::CUdevice_attribute as Attribute;
    let device = result::device::get(ordinal)?;
    // SAFETY: a device that the driver just named.
    let attribute = |which: Attribute| unsafe { result::device::get_attribute(device, which) };
    Ok(Device {
        name: result::device::get_name(device)?,
        // SAFETY: as above.
        memory: unsafe { result::device::total_mem(device) }?,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        pci: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
        ),
    })
}

impl Device {
    /// Bytes of its memory that other devices can address (its BAR1), which direct transfers go
    /// through; `None`: the kernel does not say.
    pub fn window_bytes(&self) -> Option<u64> {
        let resources = std::fs::read_to_string(self.sysfs("resource")).ok()?;
        let mut words = resources.lines().nth(1)?.split_whitespace().map(|word| {
            let digits = word.strip_prefix("0x")?;
            u64::from_str_radix(digits, 16).ok()
        });
        let (start, end) = (words.next()??, words.next()??);
        (end > start).then(|| end - start + 1)
    }

    /// The NUMA node that it is attached to; `None`: the kernel does not say.
    pub fn numa_node(&self) -> Option<u32> {
        std::fs::read_to_string(self.sysfs("numa_node")).ok()?.trim().parse().ok()
    }

    /// What the kernel says about it.
    fn sysfs(&self, what: &str) -> String {
        let (domain, bus, device) = self.pci;
        format!("/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/{what}")
    }
}

fn nvrtc() -> Result<(), String> {
    // SAFETY: loads the library, which may run its initialisers.
    if unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        Ok(())
    } else {
        missing("libnvrtc.so is not on this machine", GET_NVRTC)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!(
            (Version(12_010).to_string(), Version(13_000).to_string()),
            ("12.1".into(), "13.0".into())
        );
    }

    #[test]
    fn looking_is_safe_from_many_threads_at_once() {
        let probes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(probe)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        assert!(probes.windows(2).all(|pair| pair[0] == pair[1]));
        if let Err(why) = &probes[0].driver {
            assert!(why.contains("; "), "{why}");
            crate::testing::skip("cuda", why);
        }
    }
}
