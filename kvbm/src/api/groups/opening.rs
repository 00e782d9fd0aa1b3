//! Opening a manager with several cache groups: each gets its part of every tier.

use std::collections::HashMap;

use kvbm_policies::{CheckpointGrid, checkpoints};
use kvbm_settings::{Capacity, Settings};
use prometheus::Registry;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;

use super::{CheckpointGroups, FULL, GroupTable};
use crate::api::engine_memory::EngineMemory;
use crate::api::manager::{Manager, Options};
use crate::api::rank::{Rank, RankGroup, RankOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::names::fingerprint::digest;

/// Layers of a hybrid model that do not keep every block.
#[derive(Clone, Debug)]
pub struct CacheGroup {
    /// Names it in metrics: letters, digits and `_`, and not `full`.
    pub name: String,
    /// What it keeps.
    pub kind: GroupKind,
    /// The engine's memory of these layers, in blocks of their own size.
    pub memory: EngineMemory,
    /// Its share of the bytes of every tier, above 0; all shares together leave some to full
    /// attention. `None`: the share that its checkpoints take of a long prompt.
    pub share: Option<f64>,
}

/// What a cache group keeps of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// The last blocks: as many as a window touches, not counting the one that is being filled.
    Window {
        /// How many, at least 1.
        blocks: u32,
    },
    /// A state (Mamba, linear attention), in one slot.
    State,
}

impl GroupKind {
    const fn window(self) -> u32 {
        match self {
            Self::Window { blocks } => blocks,
            Self::State => 1,
        }
    }
}

/// Groups are numbered in 8 bits, that of full attention included.
const MAX_GROUPS: usize = 255;

impl Manager {
    /// Opens the tiers of each cache group, for a hybrid model.
    pub(crate) async fn open_groups(settings: Settings, options: &Options) -> Result<Self> {
        let Some(memory) = &options.engine else {
            let message = "cache groups are an engine's: say Options::engine as well";
            return Err(Error::invalid(message));
        };
        let grid = CheckpointGrid::new(settings.hybrid.checkpoint_blocks);
        let GroupOpenings { full, others } =
            GroupOpenings::new(&settings, memory, options.groups.clone())?;
        let mut registries = vec![registry("full")?];
        let options_of = |number, registry, engine: &EngineMemory| Options {
            registry,
            engine: Some(engine.clone()),
            groups: Vec::new(),
            clock: options.clock.clone(),
            block_tokens: options.block_tokens,
            fingerprint: options.fingerprint.clone(),
            ranks: options.ranks.as_ref().map(|ranks| ranks_of(number, ranks)),
            // As with events: only of full attention, whose blocks name a request.
            on_durable: options.on_durable.clone().filter(|_| number == FULL),
            media_layer: options.media_layer.clone(),
        };
        let of_full = options_of(FULL, registries[0].clone(), memory);
        let full = Self::assemble(full, &of_full, "").await?;
        let mut opened = Vec::with_capacity(others.len());
        for GroupOpening { number, group, settings, suffix } in others {
            let registry = registry(&group.name)?;
            let options = options_of(number, registry.clone(), &group.memory);
            let manager = Self::assemble(settings, &options, &suffix).await?;
            registries.push(registry);
            opened.push(GroupTable { number, window: group.kind.window() as usize, manager });
        }
        export(&options.registry, registries)?;
        let checkpoints = CheckpointGroups::new(grid, opened);
        join_epochs(&full, &checkpoints)?;
        Ok(full.with_checkpoints(checkpoints))
    }
}

impl Rank {
    /// Joins the leader of each cache group, for a hybrid model.
    pub(crate) fn join_groups(settings: &Settings, options: &RankOptions) -> Result<Self> {
        let Some(memory) = &options.engine else {
            let message = "cache groups are an engine's: say RankOptions::engine as well";
            return Err(Error::invalid(message));
        };
        let GroupOpenings { full, others } =
            GroupOpenings::new(settings, memory, options.groups.clone())?;
        let options_of = |number, engine: &EngineMemory| RankOptions {
            group: ranks_of(number, &options.group),
            rank: options.rank,
            engine: Some(engine.clone()),
            groups: Vec::new(),
            fingerprint: options.fingerprint.clone(),
            media_layer: options.media_layer.clone(),
        };
        // In the leader's order: it waits for all ranks of one group before it goes on to the next.
        let full = Self::join_as(&full, options_of(FULL, memory), "")?;
        let join = |GroupOpening { number, group, settings, suffix }: GroupOpening| {
            Self::join_as(&settings, options_of(number, &group.memory), &suffix)
        };
        let others = others.into_iter().map(join).collect::<Result<_>>()?;
        Ok(full.with_groups(others))
    }
}

/// Where the ranks of a group meet: each group has a leader of its own, in one process.
fn ranks_of(number: u8, ranks: &RankGroup) -> RankGroup {
    let dir = if number == FULL { ranks.dir.clone() } else { ranks.dir.join(format!("g{number}")) };
    RankGroup { dir, ..ranks.clone() }
}

/// What each group is opened with.
struct GroupOpenings {
    full: Settings,
    others: Vec<GroupOpening>,
}

struct GroupOpening {
    number: u8,
    group: CacheGroup,
    settings: Settings,
    /// Keeps its files and objects apart from others', and from checkpoints made by another rule.
    suffix: String,
}

impl GroupOpenings {
    fn new(settings: &Settings, memory: &EngineMemory, groups: Vec<CacheGroup>) -> Result<Self> {
        check(&groups)?;
        let parts = GroupParts::new(settings, memory, &groups)?;
        let every = settings.hybrid.checkpoint_blocks;
        let opening = |(number, group): (u8, CacheGroup)| {
            // By its name as well: equal groups may come in another order, and blocks know their
            // group by its number.
            let name = digest(group.name.as_bytes()) as u64;
            let suffix = format!("-g{number}w{}n{every}-{name:016x}", group.kind.window());
            GroupOpening { number, settings: parts.of_group(number, settings), suffix, group }
        };
        Ok(Self { full: parts.of_full(settings), others: (1..).zip(groups).map(opening).collect() })
    }
}

/// Bytes of the longest description.
const MAX_DESCRIPTION: usize = 1_024;

/// Says of cache groups what two workers must have alike to read each other's checkpoints; nothing
/// of a plain model. Of many groups it is a digest.
pub(crate) fn described(groups: &[CacheGroup], settings: &Settings) -> String {
    let group = |group: &CacheGroup| {
        let CacheGroup { name, kind, memory, share: _ } = group;
        let bytes = memory.block_bytes().unwrap_or_default();
        match kind {
            GroupKind::Window { blocks } => format!("{name}: window of {blocks}, {bytes} bytes"),
            GroupKind::State => format!("{name}: state, {bytes} bytes"),
        }
    };
    if groups.is_empty() {
        return String::new();
    }
    let every = format!("a checkpoint every {} blocks", settings.hybrid.checkpoint_blocks);
    let all: Vec<_> = groups.iter().map(group).chain([every]).collect();
    let said = all.join("; ");
    if said.len() > MAX_DESCRIPTION {
        return format!("{} groups, {:032x}", groups.len(), digest(said.as_bytes()));
    }
    said
}

fn check(groups: &[CacheGroup]) -> Result<()> {
    if groups.len() >= MAX_GROUPS {
        return Err(Error::invalid(format!(
            "{} cache groups are too many: at most {}",
            groups.len(),
            MAX_GROUPS - 1
        )));
    }
    for (place, CacheGroup { name, kind, .. }) in groups.iter().enumerate() {
        let is_word =
            |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        let is_taken = name == "full" || groups[..place].iter().any(|other| other.name == *name);
        if name.is_empty() || !is_word(name) || is_taken {
            let message = "choose letters, digits and _, each name once, and not full";
            return Err(Error::invalid(format!("{name:?} cannot name a cache group: {message}")));
        }
        if kind.window() == 0 {
            return Err(Error::invalid(format!(
                "the window of cache group {name} has no block: say at least 1"
            )));
        }
    }
    Ok(())
}

/// Catches up at a start, if the last reset did not reach all groups.
fn join_epochs(full: &Manager, checkpoints: &CheckpointGroups) -> Result<()> {
    let managers = || checkpoints.managers().chain([full]);
    let epoch_of = |manager: &Manager| manager.admin().epoch();
    let newest = managers().map(epoch_of).max().unwrap_or(0);
    managers()
        .filter(|manager| epoch_of(manager) < newest)
        .try_for_each(|manager| manager.reset(newest))
}

/// What each group gets, full attention first.
struct GroupParts {
    shares: Vec<f64>,
    block_bytes: Vec<u64>,
}

impl GroupParts {
    fn new(settings: &Settings, memory: &EngineMemory, groups: &[CacheGroup]) -> Result<Self> {
        let every = u64::from(settings.hybrid.checkpoint_blocks);
        let bytes_of_full = memory.block_bytes().or(settings.block_bytes);
        let others = groups.iter().map(|group| group.memory.block_bytes());
        let block_bytes: Option<Vec<u64>> = std::iter::once(bytes_of_full).chain(others).collect();
        let block_bytes = block_bytes.ok_or_else(|| {
            let message =
                "a cache group in ranks has blocks of a size: say it with EngineMemory::group_in_ranks";
            Error::invalid(message)
        })?;
        // From one checkpoint to the next, in bytes.
        let kept = groups.iter().map(|group| checkpoints::kept(group.kind.window().into(), every));
        let ways: Vec<f64> = std::iter::once(every)
            .chain(kept)
            .zip(&block_bytes)
            .map(|(kept, &bytes)| (kept * bytes) as f64)
            .collect();
        let given: Vec<Option<f64>> =
            std::iter::once(None).chain(groups.iter().map(|group| group.share)).collect();
        let left = 1.0 - given.iter().flatten().sum::<f64>();
        if given.iter().flatten().any(|&share| share.is_nan() || share <= 0.0) || left <= 0.0 {
            let message = "shares of cache groups are above 0, and leave some to full attention";
            return Err(Error::invalid(format!("{message}: {:?}", &given[1..])));
        }
        let of_rule: f64 =
            ways.iter().zip(&given).filter(|(_, given)| given.is_none()).map(|(way, _)| way).sum();
        let share = |(way, given): (&f64, &Option<f64>)| given.unwrap_or(left * way / of_rule);
        Ok(Self { shares: ways.iter().zip(&given).map(share).collect(), block_bytes })
    }

    fn of_full(&self, settings: &Settings) -> Settings {
        let mut own = settings.clone();
        let scale = |capacity| match capacity {
            Capacity::Bytes(bytes) => Capacity::Bytes(times(bytes, self.shares[0])),
            blocks @ Capacity::Blocks(_) => blocks,
        };
        own.rescale(scale, self.shares[0]);
        own
    }

    fn of_group(&self, number: u8, settings: &Settings) -> Settings {
        let (share, bytes_of_full) = (self.shares[usize::from(number)], self.block_bytes[0]);
        let scale = |capacity| match capacity {
            Capacity::Bytes(bytes) => Capacity::Bytes(times(bytes, share)),
            Capacity::Blocks(blocks) => {
                Capacity::Bytes(times(blocks.saturating_mul(bytes_of_full), share / self.shares[0]))
            }
        };
        let mut own = settings.clone();
        own.block_bytes = Some(self.block_bytes[usize::from(number)]);
        // A checkpoint is loaded whole, or not at all.
        own.transfer.prefill_tokens_per_second = 0;
        own.rescale(scale, share);
        own
    }
}

fn times(bytes: u64, factor: f64) -> u64 {
    (bytes as f64 * factor) as u64
}

/// What all groups of a manager count.
struct GroupMetrics {
    groups: Vec<Registry>,
    /// Stands for all metrics: a registry asks each collector for one that is its own.
    desc: Desc,
}

/// A registry for a group, which labels all its counts with the group's name.
fn registry(group: &str) -> Result<Registry> {
    let label = HashMap::from([("group".to_owned(), group.to_owned())]);
    Registry::new_custom(None, Some(label)).map_err(refused)
}

/// Shows what the groups count in `registry`.
fn export(registry: &Registry, groups: Vec<Registry>) -> Result<()> {
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
