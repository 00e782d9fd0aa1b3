//! Host tiers that other processes read.
//!
//! Between two processes of one host the reader maps the holder's.
//! The holder alone writes its slots, and may do so while a reader copies. So what arrives is
//! summed, and is right if the sum is that of the block that the reader wants. A reader can go on
//! when the holder dies; the memory is free when the last reader has unmapped it.
//!
//! Neither process can harm the other: the kernel keeps a reader from writing, and a holder from
//! taking away what a reader has mapped. But checksums come from the holder: what it gives is only
//! as true as the holder.
//!
//! | file | has |
//! |---|---|
//! | `shared_memory.rs` | what a reader is given, and checks before it maps |
//! | `handover.rs` | the message that carries it from process to process |
//! | `peer_memory.rs` | the mapping, and copies from it |
//! | `engine_copies.rs` | copies from it straight to an engine, on a CPU or a GPU |
//! | `one_sided.rs` | what a library offers that reads other hosts' memory, such as NIXL |

mod engine_copies;
mod handover;
mod one_sided;
mod peer_memory;
mod shared_memory;

pub use engine_copies::{EngineCopies, StraightBlock};
pub use handover::{receive_memory, send_memory};
pub use one_sided::{OneSided, ReadDone, SlotRead, SlotReads, TierPlace, UnmetReader};
pub use peer_memory::PeerMemory;
pub use shared_memory::SharedMemory;

use crate::error::{SetupError, SetupErrorKind};

fn untrusted(why: impl std::fmt::Display) -> SetupError {
    SetupError::new(SetupErrorKind::Untrusted, format!("the memory of a peer: {why}"))
}

#[cfg(test)]
mod tests;
