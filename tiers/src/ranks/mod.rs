//! Copies in other processes: one leader has them done by ranks, each in its own memory, files and
//! objects.
//!
//! A model that is spread over several GPUs (tensor parallelism) has a process for each, a *rank*,
//! which holds its slice of every block. One process, the *leader*, decides where blocks lie; each
//! rank has its slice of a block in the slot of that number.
//!
//! ```text
//!  leader                                        rank 0, 1, …
//!  scheduler ──batch──► Leader (a Backend)       Member
//!                        │ one message to each ───► reads it, checks slots and generations
//!                        │                          gives it to the Backend of its route
//!                        │ PendingBatch: who has    │ moves its slice: memory, disk, objects
//!                        │ yet to confirm what   ◄──┘ reports what ended, together
//!  scheduler ◄─reports──┘ when the last one did
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `protocol` | messages, and how they are read from bytes from an untrusted sender |
//! | `connection` | a stream on which neither side waits |
//! | `socket` | where leader and ranks meet |
//! | `pending` | batches under way, and which ranks have yet to confirm them |
//! | `leader` | the backend of the leader, and the thread that listens |
//! | `member` | a rank: it does what the leader says and reports |
//! | `slots` | what a rank's slots hold, what an earlier process left there, and who writes down what comes to them |
//! | `loads` | loads that an engine awaits layer by layer in each rank |
//! | `pull` | a rank's slots, for ranks of other workers |
//! | `shares` | which heads of whose slices a rank needs, if the other worker has more ranks or fewer |
//! | `forget` | which ranks have yet to destroy a tenant's keys |
//! | `recovery` | which blocks leader and ranks agree on, at the start of the leader |
//!
//! A copy has arrived when every rank says so; otherwise its result is the worst that any rank
//! reported.
//!
//! **A rank that is gone** (its process ended, or it closed the connection) has ended its copies:
//! their slots need not be waited for in it. What it had confirmed of batches under way no longer
//! counts, the other ranks' copies are waited for, and the copies end as
//! [`Unavailable`](crate::CopyErrorKind::Unavailable), as does what is asked for until it is there
//! again. Before any of that is reported, the leader's owner is told, and must forget all blocks:
//! what the rank held of each is lost.
//!
//! **A load in layers** has a name, which its copies carry: each rank copies its slice layer by
//! layer, and counts what has come. How the load ended is the leader's to say, when no rank touches
//! its slots any more.
//!
//! **A rank that hangs** is a medium that hangs: its copies do not end, and keep their slots. It is
//! not cut off, since it might go on writing to slots that others have by then.
//!
//! **A leader that is gone** ends its ranks' service: each waits for the copies that it has begun,
//! then says so.
//!
//! **What outlives the processes** is written down on both sides: by the leader which block lies
//! where, by each rank which block it stored in a slot, and in which of the slot's lives. A leader
//! that starts asks its ranks, and takes a block for resident that all of them have in the same
//! slot and life. A slot that a rank was not told to adopt holds nothing, so what is old, or
//! another's, is never given out; bytes are compared with the rank's checksum when they are read.

mod connection;
mod forget;
mod leader;
mod loads;
mod member;
mod pending;
mod protocol;
mod pull;
mod recovery;
mod shares;
mod slots;
mod socket;
#[cfg(test)]
mod tests;

pub use forget::{DestroyKeys, NotForgotten};
pub use leader::{Leader, LeaderOptions, RankRegistry};
pub use loads::{RankLoad, RankLoads, SliceLoad};
pub use member::{JoinOptions, LeaderGone, Member, Stopper};
pub use pending::MAX_RANKS;
pub use protocol::{MAX_OPS, Membership, VERSION};
pub use pull::{
    PeerSeat, PullFrom, PullOrder, PullSlots, PullSource, PulledBlock, PulledSlot, RankSlots,
};
#[cfg(any(test, feature = "testing"))]
pub use pull::{pulled_slot, pulled_slot_of, rank_slots};
pub use recovery::Disagreement;
pub use shares::{HeadLayout, HeadShare};
pub use slots::{KeptSlots, SlotJournal};
#[cfg(any(test, feature = "testing"))]
pub use {forget::read_debts, protocol::read_in_every_way};
