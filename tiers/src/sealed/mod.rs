//! Encryption of what lies below memory: blocks are sealed on their way out and opened on their way
//! back.
//!
//! [`Sealed`] stands around any backend that moves blocks between memory and one other tier. That
//! backend never sees the memory: it is opened on a [`Scratch`] of its own, and moves sealed blocks
//! between that and its medium.
//!
//! ```text
//! memory ──    seal    ──► scratch ── inner backend ──► medium
//!        ◄── open, copy ──         ◄──              ──
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `keys` | main keys by number, from a file or a variable |
//! | `tenants`, `key_files` | random keys of tenants, wrapped by these; where they are kept, and how they are destroyed |
//! | `format` | what a sealed block looks like, and how it is made |
//! | `scratch` | slots for sealed blocks on their way, and who waits for one |
//! | `backend` | the way of a block |
//! | `travel` | the way of a block from the host tier of another worker |
//!
//! Checksums are kept *inside*, of sealed blocks: `Sealed(Verified(backend))`. So what an index or
//! a segment's footer says of a block is true of the bytes beside it and tells nothing of what is
//! in them, and scrubbing, compacting or repairing a medium needs no key. The checksum of the block
//! itself, which memory remembers from its arrival, travels within the seal: a bit that flips in
//! memory is noticed when the block comes back, encrypted or not.

mod backend;
mod format;
mod key_files;
mod keys;
mod scratch;
mod tenants;
#[cfg(test)]
mod tests;
mod travel;

pub use backend::Sealed;
pub use format::{Cipher, SEAL_BYTES};
pub use key_files::KeyFiles;
pub use keys::KeyRing;
pub(crate) use keys::MacKey;
pub use scratch::{Scratch, ScratchOptions};
pub use tenants::{FoundKey, KeyId, KeyStore, KeysInMemory, RECORD_BYTES, TenantKeys, WrappedKey};
pub(crate) use tenants::{TENANT_BYTES, id_prefix, tenant_prefix};
pub use travel::{ArrivingBlock, HostSeal, OtherSeal};
