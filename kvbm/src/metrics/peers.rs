//! What goes between workers.

use std::time::Duration;

use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec};

use super::MetricsBuilder;
use crate::error::Result;

/// How a lease at a peer ended: label values of `kvbm_peer_leases_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerLeaseEnd {
    /// Everything that was wanted arrived.
    Whole,
    /// Its reader did not need it any more.
    GivenUp,
    /// Its time was over.
    Expired,
    /// A reset, a forgotten tenant or a damaged block ended it.
    Void,
    /// A block was not what its checksum says.
    Wrong,
    /// The other side broke off.
    Gone,
    /// The holder had leased as much as it may.
    Busy,
}

impl PeerLeaseEnd {
    const ALL: [Self; 7] = [
        Self::Whole,
        Self::GivenUp,
        Self::Expired,
        Self::Void,
        Self::Wrong,
        Self::Gone,
        Self::Busy,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::GivenUp => "given_up",
            Self::Expired => "expired",
            Self::Void => "void",
            Self::Wrong => "wrong",
            Self::Gone => "gone",
            Self::Busy => "busy",
        }
    }
}

/// How blocks come from a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerWay {
    /// Over the connection.
    Tcp,
    /// By a copy from a neighbour's memory, of which the neighbour does not hear.
    SharedMemory,
}

impl PeerWay {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::SharedMemory => "shared_memory",
        }
    }
}

const IN: &str = "received";
const OUT: &str = "sent";

/// Bounds of the histogram, in seconds: 1 ms to 33 s.
const PULL_BOUNDS: [f64; 16] = [
    0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096,
    8.192, 16.384, 32.768,
];

/// Counters of what goes between workers: `received` from others, `sent` to others.
#[derive(Clone, Debug)]
pub(crate) struct PeerMetrics {
    block_bytes: u64,
    leases: IntCounterVec,
    blocks: IntCounterVec,
    bytes: IntCounterVec,
    pull_seconds: Histogram,
    refused: IntCounter,
}

impl PeerMetrics {
    pub(super) fn new(b: &MetricsBuilder<'_>, block_bytes: u64) -> Result<Self> {
        let way = ["direction", "way"];
        let seconds = HistogramOpts::new(
            "kvbm_peer_pull_seconds",
            "Time from the first request for blocks to the arrival of the last.",
        );
        Ok(Self {
            block_bytes,
            leases: b.counters(
                "kvbm_peer_leases_total",
                "Leases that ended, at peers (`received`) and to peers (`sent`), by how.",
                &["direction", "end"],
            )?,
            blocks: b.counters(
                "kvbm_peer_blocks_total",
                "Blocks that came from peers (`received`) and went to peers (`sent`).",
                &way,
            )?,
            bytes: b.counters(
                "kvbm_peer_bytes_total",
                "Bytes that came from peers (`received`) and went to peers (`sent`).",
                &way,
            )?,
            pull_seconds: b.register(Histogram::with_opts(seconds.buckets(PULL_BOUNDS.into())))?,
            refused: b.counter(
                "kvbm_peer_refused_total",
                "Workers that connected and were not let in.",
            )?,
        })
    }

    /// From here on they are shown: a panel shows something before the first, and the first is an
    /// increase.
    pub(crate) fn count_from_zero(&self) {
        for direction in [IN, OUT] {
            PeerLeaseEnd::ALL.iter().for_each(|end| {
                self.leases.with_label_values(&[direction, end.name()]);
            });
            self.moved(direction, PeerWay::Tcp, 0);
        }
    }

    fn moved(&self, direction: &str, way: PeerWay, blocks: u64) {
        let way = [direction, way.name()];
        self.blocks.with_label_values(&way).inc_by(blocks);
        self.bytes.with_label_values(&way).inc_by(blocks * self.block_bytes);
    }

    /// A pull ended: the blocks that it brought, and the time that it took.
    pub(crate) fn pulled(&self, way: PeerWay, blocks: u64, took: Duration) {
        self.moved(IN, way, blocks);
        self.pull_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn sent(&self, blocks: u64) {
        self.moved(OUT, PeerWay::Tcp, blocks);
    }

    /// A lease at a peer that was asked for.
    pub(crate) fn lease_in(&self) -> CountedLease {
        CountedLease { leases: self.leases.clone(), direction: IN, end: PeerLeaseEnd::GivenUp }
    }

    /// A lease that a peer asked for.
    pub(crate) fn lease_out(&self) -> CountedLease {
        CountedLease { leases: self.leases.clone(), direction: OUT, end: PeerLeaseEnd::Gone }
    }

    pub(crate) fn refused(&self) {
        self.refused.inc();
    }
}

/// A lease, which is counted when it ends.
#[derive(Debug)]
pub(crate) struct CountedLease {
    leases: IntCounterVec,
    direction: &'static str,
    /// How it would end now.
    pub(crate) end: PeerLeaseEnd,
}

impl Drop for CountedLease {
    fn drop(&mut self) {
        self.leases.with_label_values(&[self.direction, self.end.name()]).inc();
    }
}
