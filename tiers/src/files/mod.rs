//! Files that one process at a time has open, and that outlive it: slot files, memory that is kept,
//! indexes, keys, debts and locks of ranks.
//!
//! Others may write the directory (the default of the disk tier is `/tmp`), so nothing that lies
//! there is trusted: what is kept is made under a name that did not exist, and what is found must
//! be ours and closed to others. Sockets, which cannot be opened so, lie in a directory that is
//! ours.
//!
//! | file | has |
//! |---|---|
//! | `kept.rs` | finding a file or making it, so that a start that is killed leaves nothing that looks complete |
//! | `ours.rs` | opening what is there without trusting it, and directories that only we write |
//! | `lock.rs` | one opener at a time, and how long a start waits for the last one |
//! | `space.rs` | giving a file its size, with the space behind it |
//! | `site.rs` | what went wrong, and which setting to change |

mod kept;
mod lock;
mod ours;
mod site;
mod space;

pub(crate) use kept::{
    KeptFile, LockedFile, create_locked, make_dir, open_kept, partial, remove_abandoned, replace,
    sync_dir,
};
pub(crate) use lock::{LockWait, lock};
pub(crate) use ours::{is_at, is_private_dir, make_private_dir, open_ours, unlink};
pub(crate) use site::{OwnDirectory, SettingNames, checked_namespace};
pub(crate) use space::{check_size, check_space, fill, resize};
