//! `kvbm bench`: what this machine does with the block table and the tiers.

#[cfg(feature = "nixl")]
pub(crate) mod nixl;
pub(crate) mod observe;
pub(crate) mod table;
pub(crate) mod tiers;
pub(crate) mod transfer;

use clap::Subcommand;
use kvbm_tiers::SetupError;

use crate::GlobalOptions;
use crate::output::{CommandFailure, with_causes};

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Time the block table: match, cycle, memory, the longest hold of its lock
    Table(table::TableArgs),
    /// Time the tiers through the manager, against memcpy, a raw ring and the raw object client
    Tiers(tiers::TiersArgs),
    /// Time saves and loads with and without metrics and spans
    Observe(observe::ObserveArgs),
    /// Time blocks from another process, by each way, against memcpy
    Transfer(transfer::TransferArgs),
    /// Time NIXL between two processes, and what our layer above it costs
    #[cfg(feature = "nixl")]
    Nixl(nixl::NixlArgs),
}

impl Bench {
    pub(crate) fn run(&self, global: &GlobalOptions) -> Result<(), CommandFailure> {
        let settings = global.load(|loader| loader)?.settings;
        match self {
            Self::Table(args) => global.show(&table::run(args)?, table::TableReport::to_text),
            Self::Tiers(args) => global.show(&tiers::run(args)?, tiers::TiersReport::to_text),
            Self::Observe(args) => {
                global.show(&observe::run(args)?, observe::ObserveReport::to_text)
            }
            Self::Transfer(args) => {
                let Some(report) = transfer::run(args, &settings.peers)? else { return Ok(()) };
                global.show(&report, transfer::TransferReport::to_text)
            }
            #[cfg(feature = "nixl")]
            Self::Nixl(args) => {
                let Some(report) = nixl::run(args)? else { return Ok(()) };
                global.show(&report, nixl::NixlReport::to_text)
            }
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the shape that map_err asks for")]
fn setup(error: SetupError) -> CommandFailure {
    CommandFailure::unusable(with_causes(&error))
}

fn failed(error: impl std::error::Error) -> CommandFailure {
    CommandFailure::unexpected(with_causes(&error))
}
