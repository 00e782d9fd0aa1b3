//! Metrics of several cache groups in one registry, told apart by the label `group`.

use std::collections::HashMap;

use prometheus::Registry;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;

use crate::error::{Error, ErrorKind, Result};

/// What all groups of a manager count.
pub(super) struct GroupMetrics {
    groups: Vec<Registry>,
    /// Stands for all metrics: a registry asks each collector for one that is its own.
    desc: Desc,
}

/// A registry for a group, which labels all its counts with the group's name.
pub(super) fn registry(group: &str) -> Result<Registry> {
    let label = HashMap::from([("group".to_owned(), group.to_owned())]);
    Registry::new_custom(None, Some(label)).map_err(refused)
}

/// Shows what the groups count in `registry`.
pub(super) fn export(registry: &Registry, groups: Vec<Registry>) -> Result<()> {
    let help = "The metrics of all cache groups.";
    let desc =
        Desc::new("kvbm_cache_groups".to_owned(), help.to_owned(), Vec::new(), HashMap::new());
    let metrics = GroupMetrics { groups, desc: desc.map_err(refused)? };
    registry.register(Box::new(metrics)).map_err(refused)
}

fn refused(error: prometheus::Error) -> Error {
    Error::caused(
        ErrorKind::Invalid,
        "the metrics registry refused the metrics of the cache groups",
        error,
    )
}

impl Collector for GroupMetrics {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.groups.iter().flat_map(Registry::gather).collect()
    }
}
