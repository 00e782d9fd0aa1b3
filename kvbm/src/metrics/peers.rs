//! What goes between workers.

use std::time::Duration;

use prometheus::{HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::builder::MetricsBuilder;
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
    /// The other side did not answer in time.
    Late,
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
    const ALL: [Self; 8] = [
        Self::Whole,
        Self::GivenUp,
        Self::Expired,
        Self::Late,
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
            Self::Late => "late",
            Self::Void => "void",
            Self::Wrong => "wrong",
            Self::Gone => "gone",
            Self::Busy => "busy",
        }
    }
}

/// Why a connection was turned away: label values of `kvbm_peer_refused_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerRefusal {
    /// It does not know the secret.
    Secret,
    /// Only one side speaks TLS, or its certificate is not of our CA.
    Tls,
    /// Its blocks are others.
    Blocks,
    /// It is this worker itself.
    Itself,
    /// It speaks another version of the protocol.
    Version,
    /// It is no worker, or what it says makes no sense.
    Unreadable,
    /// There are as many connections as there may be.
    Full,
}

impl PeerRefusal {
    const ALL: [Self; 7] = [
        Self::Secret,
        Self::Tls,
        Self::Blocks,
        Self::Itself,
        Self::Version,
        Self::Unreadable,
        Self::Full,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Secret => "secret",
            Self::Tls => "tls",
            Self::Blocks => "blocks",
            Self::Itself => "itself",
            Self::Version => "version",
            Self::Unreadable => "unreadable",
            Self::Full => "full",
        }
    }
}

/// How blocks come from a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PeerWay {
    /// Over the connection.
    Tcp,
    /// By a copy from a neighbour's memory, of which the neighbour does not hear.
    SharedMemory,
    /// By NIXL's reads, of which the holder does not hear either.
    Nixl,
    /// By ranks, each over its connection or by NIXL: the leader does not hear which.
    Ranks,
}

impl PeerWay {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::SharedMemory => "shared_memory",
            Self::Nixl => "nixl",
            Self::Ranks => "ranks",
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
    open: IntGaugeVec,
    cut: IntCounter,
    blocks: IntCounterVec,
    bytes: IntCounterVec,
    descriptors: IntCounter,
    saturated: IntCounter,
    pull_seconds: HistogramVec,
    refused: IntCounterVec,
}

impl PeerMetrics {
    pub(super) fn new(b: &mut MetricsBuilder, block_bytes: u64) -> Result<Self> {
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
            open: b.gauges(
                "kvbm_peer_open_leases",
                "Leases that there are, at peers (`received`) and to peers (`sent`).",
                &["direction"],
            )?,
            cut: b.counter(
                "kvbm_peer_leases_cut_total",
                "Leases to peers of fewer blocks than there are, for want of `peers.lease_share`.",
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
            descriptors: b.counter(
                "kvbm_peer_nixl_descriptors_total",
                "Pieces of memory that NIXL read at peers: neighbouring blocks are one.",
            )?,
            saturated: b.counter(
                "kvbm_peer_saturated_numbers_total",
                "Numbers of peers that were too large for their new type, and became the largest: see `peers.convert_types`.",
            )?,
            pull_seconds: b
                .keep(HistogramVec::new(seconds.buckets(PULL_BOUNDS.into()), &["way"]))?,
            refused: b.counters(
                "kvbm_peer_refused_total",
                "Workers that connected and were not let in.",
                &["reason"],
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
            self.open.with_label_values(&[direction]);
        }
        self.pull_seconds.with_label_values(&[PeerWay::Tcp.name()]);
        PeerRefusal::ALL.iter().for_each(|reason| {
            self.refused.with_label_values(&[reason.name()]);
        });
    }

    fn moved(&self, direction: &str, way: PeerWay, blocks: u64) {
        let way = [direction, way.name()];
        self.blocks.with_label_values(&way).inc_by(blocks);
        self.bytes.with_label_values(&way).inc_by(blocks * self.block_bytes);
    }

    /// Blocks came.
    pub(crate) fn received(&self, way: PeerWay, blocks: u64) {
        self.moved(IN, way, blocks);
    }

    /// NIXL read some, in this many pieces.
    pub(crate) fn read_by_nixl(&self, descriptors: u64) {
        self.descriptors.inc_by(descriptors);
    }

    /// A pull ended, after this time.
    pub(crate) fn pulled(&self, way: PeerWay, took: Duration) {
        self.pull_seconds.with_label_values(&[way.name()]).observe(took.as_secs_f64());
    }

    pub(crate) fn sent(&self, blocks: u64) {
        self.moved(OUT, PeerWay::Tcp, blocks);
    }

    /// A lease at a peer that was asked for.
    pub(crate) fn lease_in(&self) -> CountedLease {
        self.lease(IN, PeerLeaseEnd::GivenUp)
    }

    /// A lease that a peer asked for.
    pub(crate) fn lease_out(&self) -> CountedLease {
        self.lease(OUT, PeerLeaseEnd::Gone)
    }

    fn lease(&self, direction: &'static str, end: PeerLeaseEnd) -> CountedLease {
        let open = self.open.with_label_values(&[direction]);
        open.inc();
        CountedLease { leases: self.leases.clone(), open, direction, end }
    }

    /// Numbers that were too large for the type that they have here.
    pub(crate) fn saturated(&self, numbers: u64) {
        self.saturated.inc_by(numbers);
    }

    /// A lease to a peer is shorter than what is there.
    pub(crate) fn cut(&self) {
        self.cut.inc();
    }

    /// Blocks that came in a way, by its name.
    #[cfg(test)]
    pub(crate) fn received_by(&self, way: &str) -> u64 {
        self.blocks.with_label_values(&[IN, way]).get()
    }

    pub(crate) fn refused(&self, why: PeerRefusal) {
        self.refused.with_label_values(&[why.name()]).inc();
    }
}

/// A lease, which is counted when it ends.
#[derive(Debug)]
pub(crate) struct CountedLease {
    leases: IntCounterVec,
    open: IntGauge,
    direction: &'static str,
    /// How it would end now.
    pub(crate) end: PeerLeaseEnd,
}

impl Drop for CountedLease {
    fn drop(&mut self) {
        self.open.dec();
        self.leases.with_label_values(&[self.direction, self.end.name()]).inc();
    }
}
