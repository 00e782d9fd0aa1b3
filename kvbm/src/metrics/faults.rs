//! Recent faults, for operators: each kind once for each place, with its count.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use kvbm_tiers::{CopyErrorKind, Route, Tier, clock};

use crate::sync::Mutex;

/// Faults that are remembered, each a kind in a place; the oldest goes first.
const MAX_FAULTS: usize = 32;

/// What went wrong, where, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: FaultKind,
    pub(crate) place: FaultPlace,
    pub(crate) count: u64,
    /// The last time.
    pub(crate) at: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultKind {
    /// A copy failed.
    Copy(CopyErrorKind),
    /// Bytes had changed, found while nothing was copied.
    Checksum,
    /// The engine computed something else.
    Shadow,
    /// A tier's index could not be written.
    Index,
    /// A directory is left alone.
    Directory,
    /// Background work panicked.
    Panic,
}

impl FaultKind {
    /// A closed set of names.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Copy(kind) => match kind {
                CopyErrorKind::Io => "copy_io",
                CopyErrorKind::Corrupt => "copy_corrupt",
                CopyErrorKind::NoSpace => "copy_no_space",
                CopyErrorKind::Unavailable => "copy_unavailable",
                CopyErrorKind::TimedOut => "copy_timed_out",
                CopyErrorKind::OverBudget => "copy_over_budget",
                _ => "copy_refused",
            },
            Self::Checksum => "checksum",
            Self::Shadow => "shadow_wrong",
            Self::Index => "index_write",
            Self::Directory => "directory",
            Self::Panic => "background_panic",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultPlace {
    Route(Route),
    Tier(Tier),
    Directory(usize),
    Process,
}

impl FaultPlace {
    pub(crate) fn name(self) -> String {
        match self {
            Self::Route(Route { from, to }) => format!("{from}>{to}"),
            Self::Tier(tier) => tier.to_string(),
            Self::Directory(dir) => format!("disk.dirs[{dir}]"),
            Self::Process => "process".to_owned(),
        }
    }
}

/// Remembers them.
#[derive(Clone, Debug, Default)]
pub(super) struct FaultLog(Arc<Mutex<VecDeque<Fault>>>);

impl FaultLog {
    pub(super) fn note(&self, kind: FaultKind, place: FaultPlace) {
        let mut faults = self.0.lock();
        let known = faults.iter().position(|fault| (fault.kind, fault.place) == (kind, place));
        let before = known.and_then(|at| faults.remove(at)).map_or(0, |fault| fault.count);
        if faults.len() == MAX_FAULTS {
            faults.pop_front();
        }
        faults.push_back(Fault { kind, place, count: before + 1, at: clock::now() });
    }

    /// Latest first.
    pub(super) fn latest(&self) -> Vec<Fault> {
        self.0.lock().iter().rev().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_of_one_fault_does_not_displace_the_others() {
        let log = FaultLog::default();
        log.note(FaultKind::Index, FaultPlace::Tier(Tier::Host));
        (0..1_000).for_each(|_| {
            log.note(FaultKind::Copy(CopyErrorKind::Io), FaultPlace::Tier(Tier::Disk));
        });
        let found: Vec<_> =
            log.latest().iter().map(|fault| (fault.kind.name(), fault.count)).collect();
        assert_eq!(found, [("copy_io", 1_000), ("index_write", 1)]);
    }

    #[test]
    fn it_is_bounded() {
        let log = FaultLog::default();
        (0..100).for_each(|dir| log.note(FaultKind::Directory, FaultPlace::Directory(dir)));
        let latest = log.latest();
        assert_eq!(
            (latest.len(), latest[0].place.name()),
            (MAX_FAULTS, "disk.dirs[99]".to_owned())
        );
    }
}
