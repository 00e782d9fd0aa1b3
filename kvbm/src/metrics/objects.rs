//! Requests to an object store: its client counts them, and is asked when the registry is read.

use std::sync::Arc;

use kvbm_tiers::object::{Expense, RequestKind, RequestOutcome, Traffic};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{GaugeVec, IntCounterVec, Opts};

use super::catch_up;
use crate::sync::Mutex;

/// Counters of one store's requests and bytes.
pub(crate) struct ObjectTraffic {
    traffic: Arc<Traffic>,
    requests: IntCounterVec,
    bytes: IntCounterVec,
    refusals: IntCounterVec,
    left: GaugeVec,
    // Held while the counters catch up: two scrapes at once would add the same requests twice.
    turn: Mutex<()>,
}

impl ObjectTraffic {
    pub(crate) fn new(traffic: Arc<Traffic>) -> prometheus::Result<Self> {
        let requests = Opts::new("kvbm_object_requests_total", "Requests to the object store.");
        let bytes = Opts::new(
            "kvbm_object_bytes_total",
            "Bytes of objects sent to the object store and asked of it.",
        );
        let refusals = Opts::new(
            "kvbm_object_budget_refusals_total",
            "Segments not stored and runs of blocks not read because a budget of the object tier was spent.",
        );
        let left = Opts::new(
            "kvbm_object_budget_left",
            "Share of a budget of the object tier that is left.",
        );
        Ok(Self {
            traffic,
            refusals: IntCounterVec::new(refusals, &["budget"])?,
            left: GaugeVec::new(left, &["budget"])?,
            requests: IntCounterVec::new(requests, &["request", "outcome"])?,
            bytes: IntCounterVec::new(bytes, &["direction"])?,
            turn: Mutex::new(()),
        })
    }
}

impl Collector for ObjectTraffic {
    fn desc(&self) -> Vec<&Desc> {
        let counters = self.requests.desc().into_iter().chain(self.bytes.desc());
        counters.chain(self.refusals.desc()).chain(self.left.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let _turn = self.turn.lock();
        for kind in RequestKind::ALL {
            for outcome in RequestOutcome::ALL {
                let now = self.traffic.requests(kind, outcome);
                if now > 0 {
                    catch_up(&self.requests.with_label_values(&[kind.name(), outcome.name()]), now);
                }
            }
        }
        catch_up(&self.bytes.with_label_values(&["sent"]), self.traffic.bytes_sent());
        catch_up(&self.bytes.with_label_values(&["received"]), self.traffic.bytes_received());
        for expense in Expense::ALL {
            // Without a limit there is nothing to watch.
            if let Some(left) = self.traffic.budget_left(expense) {
                catch_up(
                    &self.refusals.with_label_values(&[expense.name()]),
                    self.traffic.refused(expense),
                );
                self.left.with_label_values(&[expense.name()]).set(left);
            }
        }
        let counters = self.requests.collect().into_iter().chain(self.bytes.collect());
        counters.chain(self.refusals.collect()).chain(self.left.collect()).collect()
    }
}
