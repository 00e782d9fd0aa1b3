//! Between two processes of one host: the host tier of one, which the other maps for reading.
//!
//! There is one copy of each block, and its holder alone writes it. A reader does not know when:
//! what arrives is summed, and is right if the sum is that of the block that the reader wants. The
//! holder's death takes nothing from a reader, and the memory comes back when the last of them has
//! unmapped it.
//!
//! Neither process trusts the other with its life or its bytes. The kernel keeps a reader from
//! writing, and a holder from taking away what a reader has mapped.
//!
//! | file | has |
//! |---|---|
//! | `shared_memory.rs` | what a reader is given, and checks before it maps |
//! | `handover.rs` | the message that carries it from process to process |
//! | `peer_memory.rs` | the mapping, and copies from it |

mod handover;
mod peer_memory;
mod shared_memory;

pub use handover::{receive_memory, send_memory};
pub use peer_memory::PeerMemory;
pub use shared_memory::SharedMemory;

use crate::error::{SetupError, SetupErrorKind};

fn untrusted(why: impl std::fmt::Display) -> SetupError {
    SetupError::new(SetupErrorKind::Untrusted, format!("the memory of a peer: {why}"))
}

#[cfg(test)]
mod tests;
