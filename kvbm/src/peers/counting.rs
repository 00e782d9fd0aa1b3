//! How leases end and why connections are refused, as they are counted.

use super::link::PeerFault;
use super::protocol::{BrokenLink, LeaseEnd, ReadEnd};
use crate::metrics::{PeerLeaseEnd, PeerRefusal};

impl From<&PeerFault> for PeerLeaseEnd {
    fn from(fault: &PeerFault) -> Self {
        match fault {
            fault if fault.is_wrong() => Self::Wrong,
            PeerFault::Ended(why) => (*why).into(),
            PeerFault::Link(BrokenLink::Late) => Self::Late,
            PeerFault::Link(_) | PeerFault::Nixl(_) | PeerFault::Ranks(_) => Self::Gone,
            // Not for the peer's sake.
            _ => Self::GivenUp,
        }
    }
}

impl From<ReadEnd> for PeerLeaseEnd {
    fn from(end: ReadEnd) -> Self {
        match end {
            ReadEnd::Whole => Self::Whole,
            ReadEnd::GivenUp => Self::GivenUp,
            ReadEnd::Wrong => Self::Wrong,
        }
    }
}

impl From<LeaseEnd> for PeerLeaseEnd {
    fn from(end: LeaseEnd) -> Self {
        match end {
            LeaseEnd::Expired => Self::Expired,
            LeaseEnd::Busy => Self::Busy,
            LeaseEnd::Void | LeaseEnd::OtherEpoch | LeaseEnd::RankAway | LeaseEnd::Unfinished => {
                Self::Void
            }
        }
    }
}

impl From<&BrokenLink> for PeerRefusal {
    fn from(why: &BrokenLink) -> Self {
        match why {
            BrokenLink::OtherSecret => Self::Secret,
            BrokenLink::Tls(_) => Self::Tls,
            BrokenLink::OtherBlocks(_) => Self::Blocks,
            BrokenLink::Itself => Self::Itself,
            BrokenLink::OtherVersion(_) => Self::Version,
            _ => Self::Unreadable,
        }
    }
}
