//! Baselines: what the media do on their own, without scheduler, table or checksums.
//!
//! They move every block of a working set once, over the same kinds of memory and files as the
//! backends, and say how long that took. Behind the feature `baselines`: a program that embeds the
//! crate has no use for them. A manager cannot be faster for long; how close it gets is its
//! efficiency.

#![expect(unsafe_code, reason = "copies by hand, to be measured against")]

mod copy;
#[cfg(feature = "cuda")]
mod gpu;
mod ring;

pub use copy::RawCopy;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use gpu::BUSY;
#[cfg(feature = "cuda")]
pub use gpu::RawGpu;
pub use ring::RawRing;
