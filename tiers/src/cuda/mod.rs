//! NVIDIA GPUs: the device tier in their memory, and what moves blocks there.
//!
//! Everything of CUDA is found at run time. [`probe`] says what is there, what is missing and how
//! to get it; it is safe on any machine. Nothing else here may be reached but through
//! [`Gpu::open`], which probes first: the bindings panic where a library or a symbol is missing.
//!
//! | part | what it does |
//! |---|---|
//! | [`Gpu`] | a GPU's context; allocates or adopts device regions |
//! | [`CudaBackend`] | blocks between host and device: copy engines for rows and large pieces, a kernel for small ones |
//! | [`GdsBackend`] | blocks between disk and device, through cuFile |
//! | [`DeviceChecksum`] | checksums of blocks that never pass the CPU |
//! | [`DeviceWindow`] | single blocks, for those who look at their bytes |
//! | [`Rearranger`] | a [`Transform`](crate::Transform) on the GPU |

#![expect(unsafe_code, reason = "C libraries, and memory of a GPU")]

mod backend;
mod checksum;
mod crossing;
mod cufile;
pub(crate) mod driver;
mod gds;
pub(crate) mod kernels;
mod medium;
mod neighbour;
mod probe;
mod rows;
mod window;

pub use backend::CudaBackend;
pub use checksum::DeviceChecksum;
pub use cufile::{CuFileOptions, CuFileReport, probe_cufile};
pub use driver::Gpu;
pub use gds::GdsBackend;
pub use kernels::{Rearranger, SOURCE as KERNEL_SOURCE};
pub(crate) use neighbour::NeighbourCopies;
pub use probe::{Device, Driver, MIN_DRIVER, Probe, probe};
pub use window::DeviceWindow;
