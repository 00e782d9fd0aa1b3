//! What an engine talks to.
//!
//! | file | holds |
//! |---|---|
//! | `manager`, `options` | the manager, and how it is opened |
//! | `admin` | what operators ask and command |
//! | `lease`, `pinned` | the right to read a chain, and chains kept for a while |
//! | `transfer`, `layers` | the answer to come, and the layers that arrive before it |
//! | `allocation`, `device` | slots of the device tier that an engine fills, and their bytes |
//! | `engine_memory`, `engine_transfers`, `engine_results` | an engine's own memory at one end |
//! | `groups` | the cache groups of a hybrid model: windows and states beside full attention |
//! | `rank` | a manager whose bytes lie in other processes |
//! | `blocking` | get and put for engines that copy for themselves, on plain threads |
//! | `background` | the background thread |

pub(crate) mod admin;
pub(crate) mod allocation;
mod background;
pub mod blocking;
pub(crate) mod device;
pub(crate) mod engine_memory;
pub(crate) mod engine_results;
pub(crate) mod engine_transfers;
pub(crate) mod groups;
pub(crate) mod layers;
pub(crate) mod lease;
pub(crate) mod manager;
pub(crate) mod options;
pub(crate) mod pinned;
pub(crate) mod rank;
pub(crate) mod transfer;
