//! Which ranks are there, checked when the registry is read.

use kvbm_tiers::ranks::RankRegistry;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntGaugeVec, Opts};

/// One gauge for each rank. Shows the last state after the leader is gone.
pub(crate) struct RankGauges {
    roll_call: RankRegistry,
    up: IntGaugeVec,
}

impl RankGauges {
    pub(crate) fn new(roll_call: RankRegistry) -> prometheus::Result<Self> {
        let up = IntGaugeVec::new(
            Opts::new("kvbm_rank_up", "1 for a rank that is there, 0 for one that is away."),
            &["rank"],
        )?;
        Ok(Self { roll_call, up })
    }
}

impl Collector for RankGauges {
    fn desc(&self) -> Vec<&Desc> {
        self.up.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        for (rank, is_there) in self.roll_call.present().into_iter().flatten().enumerate() {
            self.up.with_label_values(&[&rank.to_string()]).set(i64::from(is_there));
        }
        self.up.collect()
    }
}
