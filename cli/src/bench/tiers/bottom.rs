//! What is timed.

use clap::ValueEnum;
use kvbm::Tier;

/// The lower end of the route that is timed.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Bottom {
    Host,
    Disk,
    Object,
    #[cfg(feature = "nixl")]
    Nixl,
}

impl Bottom {
    pub(super) const fn tier(self) -> Tier {
        match self {
            Self::Host => Tier::Host,
            Self::Disk => Tier::Disk,
            #[cfg(feature = "nixl")]
            Self::Nixl => Tier::Disk,
            Self::Object => Tier::Object,
        }
    }
}
