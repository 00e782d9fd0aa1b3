//! NIXL, NVIDIA's transfer library, loaded at run time through its C interface.
//!
//! ```text
//! Library ── Agent ─┬─ BackendHandle ── Registration ── SegmentList ─┬─ Request
//!                   └─ Peer ─────────────────────────── SegmentList ─┘
//! ```
//!
//! Everything holds what lies to its left: requests are released before lists, lists before
//! registrations, those before agents, and what is registered (memory, files) outlives its
//! registration. The library itself is never unloaded. Nothing is linked: where NIXL is not
//! installed, [`Library::load`] says so.
//!
//! | plugin | moves between | backend |
//! |---|---|---|
//! | `POSIX` | host memory and slot files | [`NixlBackend::disk`] |
//! | `OBJ` | host memory and objects | [`NixlBackend::objects`] |
//! | `UCX` | memory of two agents | none: [`peer`] |
//!
//! # Trust
//! The library prints its errors and reports only that there was one. It does not say which segment
//! of a request failed; [`NixlBackend`] tries the blocks of a failed request again one by one. It
//! cannot abort a transfer: a [`NixlRequest`] that is dropped in flight stays, with all that it
//! touches, for the rest of the process; only the destruction of its agent ends it ([`peer`]). Where an error leaves open whether anything still moves,
//! so does ours ([`TimedOut`](crate::CopyErrorKind::TimedOut)).

#![expect(unsafe_code, reason = "a C library")]

mod agent;
mod arguments;
mod backend;
mod library;
mod mover;
pub mod peer;
#[cfg(any(test, feature = "baselines"))]
pub mod raw;
mod registration;
mod request;
mod sys;
#[cfg(test)]
mod tests;

pub use agent::{Agent, BackendHandle, RemotePeer};
pub use backend::{NixlBackend, NixlObjectOptions, object_parameters};
pub use library::{Library, REMEDY, check_plugin_directory, find, installed_plugins};
pub use registration::{RegisteredRange, Registration};
pub use request::{Direction, ListedSegments, NixlRequest, SegmentList};
