//! How metrics are made, and brought up to date when the registry is read.

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use crate::error::{Error, ErrorKind, Result};
use crate::sync::Mutex;

/// Metrics that a registry takes together.
#[derive(Default)]
pub(super) struct MetricsBuilder(Vec<Box<dyn Collector>>);

impl MetricsBuilder {
    pub(super) fn keep<C: Collector + Clone + 'static>(
        &mut self,
        made: prometheus::Result<C>,
    ) -> Result<C> {
        let metric = made.map_err(refused)?;
        // A clone shares its values, so the registry shows what we count.
        self.0.push(Box::new(metric.clone()));
        Ok(metric)
    }

    pub(super) fn counter(&mut self, name: &str, help: &str) -> Result<IntCounter> {
        self.keep(IntCounter::new(name, help))
    }

    pub(super) fn counters(
        &mut self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Result<IntCounterVec> {
        self.keep(IntCounterVec::new(Opts::new(name, help), labels))
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str) -> Result<IntGauge> {
        self.keep(IntGauge::new(name, help))
    }

    pub(super) fn gauges(
        &mut self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Result<IntGaugeVec> {
        self.keep(IntGaugeVec::new(Opts::new(name, help), labels))
    }

    /// Gauges from 0 to 1.
    pub(super) fn shares(&mut self, name: &str, help: &str, labels: &[&str]) -> Result<GaugeVec> {
        self.keep(GaugeVec::new(Opts::new(name, help), labels))
    }

    /// `refresh` comes before each reading, for one reader at a time.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if the registry has one of the names already.
    pub(super) fn register(
        self,
        registry: &Registry,
        refresh: impl Fn() + Send + Sync + 'static,
    ) -> Result<()> {
        let refreshed = Refreshed { metrics: self.0, turn: Mutex::new(()), refresh };
        registry.register(Box::new(refreshed)).map_err(refused)
    }
}

fn refused(error: prometheus::Error) -> Error {
    Error::caused(ErrorKind::Invalid, "the metrics registry refused a metric", error)
}

/// The registry's view of them.
struct Refreshed<F> {
    metrics: Vec<Box<dyn Collector>>,
    // Two scrapes at once would add the same events twice.
    turn: Mutex<()>,
    refresh: F,
}

impl<F: Fn() + Send + Sync> Collector for Refreshed<F> {
    fn desc(&self) -> Vec<&Desc> {
        self.metrics.iter().flat_map(|metric| metric.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let _turn = self.turn.lock();
        (self.refresh)();
        self.metrics.iter().flat_map(|metric| metric.collect()).collect()
    }
}
