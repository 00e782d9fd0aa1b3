//! Where KV blocks live and how they move: the physical half of the KV block manager.
//!
//! A *region* is a tier's storage, cut into slots of one block each. A [`Backend`] moves blocks
//! between slots of two regions. Nothing here knows what a block means: which block lies in which
//! slot, who may evict it and when it is visible is the business of the `kvbm` crate, which keeps
//! the slots of a [`CopyOp`] from its submission until its completion.
//!
//! | region | slots lie in | reached by |
//! |---|---|---|
//! | [`DramRegion`] | memory: the host tier, which may outlive the process, or an emulated device | [`MemcpyBackend`] |
//! | [`PeerMemory`] | the host tier of another process of this host, to be read | itself, [`EngineCopies`] |
//! | [`DeviceRegion`] | a GPU's memory, or an engine's own tensors, in pieces | `cuda::CudaBackend`, [`MemcpyBackend`] |
//! | [`DiskRegion`] | slot files, one per directory | [`UringBackend`], [`ThreadsBackend`], `cuda::GdsBackend`, `nixl::NixlBackend` |
//! | [`object`] | segments in an object store | its own backend, `nixl::NixlBackend` |
//!
//! [`Verified`] around a backend checksums what leaves memory and verifies what returns; the host
//! tier remembers checksums from the moment that a block arrives. [`VerifiedOnce`] verifies what an
//! earlier process left in memory. [`FramePool`] mints a [`Frame`], the sole slot handle, for each
//! slot; its holder may read and write the slot's memory. [`layers`] has slots written part by part.
//! [`transform`] rearranges blocks between the layouts of engines. [`sealed`] encrypts what lies
//! below memory.
//!
//! [`index`] remembers in a file what lies in the slots of a tier that outlives its process.
//!
//! [`ranks`] has copies done by other processes, each with regions of its own.
//!
//! A [`MediaLayer`] may stand around any backend and any object store. With the feature `chaos`
//! there is one, in the module of that name, that makes media fail on purpose; with `baselines`
//! there is `raw`, what all this is measured against; with `testing`, the module of that name
//! offers doubles of all this and the suite that a new backend must pass.
//!
//! Most `unsafe` code of the workspace is here. The rest is in the Python package (memory, tensors
//! and fences of engines), a bench, tests and examples of the pages. The compiler refuses it in every
//! module but those that say what for, and their children: `grep -r 'expect(unsafe_code'` lists them.

#![deny(unsafe_code, unsafe_op_in_unsafe_fn)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod backend;
mod batch;
#[cfg(any(test, feature = "chaos"))]
pub mod chaos;
pub mod checksum;
pub mod clock;
pub mod copy;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod disk;
pub mod dram;
pub mod error;
mod fields;
mod files;
mod fork;
pub mod frame;
pub mod geometry;
pub mod huge;
pub mod index;
mod layer_count;
pub mod layers;
mod media_layer;
pub mod memcpy;
pub mod memory;
#[cfg(feature = "nixl")]
pub mod nixl;
pub mod numa;
pub mod numbers;
#[cfg(feature = "nvtx")]
pub mod nvtx;
pub mod object;
pub mod peers;
pub mod ranks;
#[cfg(any(test, feature = "baselines"))]
pub mod raw;
pub mod sealed;
mod stream;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod transform;
pub mod verified_once;
mod verifiers;
pub mod verify;

pub use backend::{Backend, Fence, Fences, HostFence, Layers, Mark};
pub use checksum::Checksums;
pub use copy::{
    BlockKey, Completion, CopyError, CopyErrorKind, CopyOp, Done, Owner, Route, SlotId, SlotRef,
    Tier,
};
pub use disk::{DiskOptions, DiskRegion, ThreadsBackend, UringBackend, is_of_directory};
pub use dram::{DramOptions, DramRegion, Mount, MountKind, PersistOptions};
pub use error::{Failure, SetupError, SetupErrorKind};
pub use files::{open_secret, privacy_problem};
pub use frame::{Frame, FramePool, Loan};
pub use geometry::{Geometry, Part, Piece, Segment, SegmentMap};
pub use huge::{Ahead, HugeVec, mapped_bytes};
pub use index::{
    IndexChange, IndexEntry, IndexOptions, KeptIndex, Recovered, TierEpoch, TierIndex,
};
pub use layer_count::LayerCount;
pub use layers::{LayerWriter, LayeredSlots};
pub use media_layer::MediaLayer;
pub use memcpy::MemcpyBackend;
pub use memory::{DeviceRegion, Memory, Space};
pub use peers::{
    EngineCopies, OneSided, PeerMemory, ReadDone, SharedMemory, SlotRead, SlotReads, StraightBlock,
    TierPlace, UnmetReader, receive_memory, send_memory,
};
pub use sealed::Sealed;
pub use transform::{Layout, Transform};
pub use verified_once::VerifiedOnce;
pub use verify::Verified;
