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
//! | `kept.rs` | finding a file or making it, so that a start that is killed leaves nothing that looks complete; one opener at a time |
//! | `ours.rs` | opening what is there without trusting it, and directories that only we write |
//! | `private.rs` | what must hold of a file of secrets that a setting names |
//! | `site.rs` | what went wrong, and which setting to change; giving a file its size, with the space behind it |

mod kept;
mod ours;
mod private;
mod site;

pub(crate) use kept::{
    KeptFile, LockWait, LockedFile, create_locked, lock, make_dir, open_kept, partial,
    remove_abandoned, replace, sync_dir,
};
pub(crate) use ours::{is_at, is_private_dir, make_private_dir, open_ours, unlink};
pub use private::{open_secret, privacy_problem};
pub(crate) use site::{
    OwnDirectory, SettingNames, check_size, check_space, checked_namespace, fill, resize,
};
