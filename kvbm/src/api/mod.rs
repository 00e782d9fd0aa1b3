//! What an engine talks to.
//!
//! | file | holds |
//! |---|---|
//! | `manager` | the manager, and how it is opened |
//! | `admin` | what operators ask and command |
//! | `lease` | the right to read a chain, and chains kept for a while |
//! | `transfer` | the answer to come, and the layers that arrive before it |
//! | `allocation` | slots of the device tier that an engine fills, and their bytes |
//! | `engine_memory` | an engine's own memory at one end |
//! | `groups` | the cache groups of a hybrid model: windows and states beside full attention |
//! | `kv_transfer` | one call for a transfer with a callback |
//! | `rank` | a manager whose bytes lie in other processes |
//! | `filling` | slots of the host tier that a caller fills |
//! | `layers` | saves that go in layer by layer |
//! | `blocking` | get and put for engines that copy for themselves, on plain threads |
//! | `background` | the background thread |

pub(crate) mod admin;
pub(crate) mod allocation;
mod background;
pub mod blocking;
pub(crate) mod engine_memory;
pub(crate) mod filling;
pub(crate) mod groups;
pub(crate) mod kv_transfer;
pub(crate) mod layers;
pub(crate) mod lease;
pub(crate) mod manager;
pub(crate) mod rank;
pub(crate) mod transfer;
