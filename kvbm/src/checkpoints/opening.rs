//! Opening a manager with several cache groups: each gets its part of every tier.

use kvbm_policies::{CheckpointGrid, checkpoints};
use kvbm_settings::{Capacity, Settings};

use super::group::GroupTable;
use super::{CheckpointGroups, FULL, invalid, metrics};
use crate::engine_memory::EngineMemory;
use crate::error::Result;
use crate::fingerprint::digest;
use crate::manager::Manager;
use crate::options::Options;
use crate::ranks::{Rank, RankGroup, RankOptions};
use crate::serve::Listener;
use crate::traces;

/// Layers of a hybrid model that do not keep every block.
#[derive(Clone, Debug)]
pub struct CacheGroup {
    /// Names it in metrics: letters, digits and `_`, and not `full`.
    pub name: String,
    /// What it keeps.
    pub kind: GroupKind,
    /// The engine's memory of these layers, in blocks of their own size.
    pub memory: EngineMemory,
    /// Its share of the bytes of every tier, above 0; all shares together leave some to full attention. `None`: as much as
    /// its checkpoints take of a long prompt.
    pub share: Option<f64>,
}

/// What a cache group keeps of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// The last so many blocks: as many as a window touches, the one that is being filled not counted.
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
    /// [`open_with`](Self::open_with), for a hybrid model: `memory` is of the layers that keep every block, and each of
    /// `groups` of others. [`save_hybrid`](Self::save_hybrid), [`lease_hybrid`](Self::lease_hybrid) and
    /// [`load_hybrid`](Self::load_hybrid) are about all of them; what else there is, about full attention, but for
    /// [`reset`](Self::reset), [`drain`](Self::drain), [`close`](Self::close), [`audit`](Self::audit) and sums of
    /// copies, which are about all.
    ///
    /// Sizes of tiers in the settings are for all groups together where they are in bytes. Where they are in blocks, these
    /// are of full attention, and the others get theirs beside it.
    ///
    /// ```no_run
    /// # use std::ops::Range;
    /// # use kvbm::*;
    /// # async fn example(
    /// #     (settings, full): (kvbm_settings::Settings, EngineMemory), (sliding, states): (EngineMemory, EngineMemory),
    /// #     (info, chain): (RequestInfo, &[BlockHash]), (blocks, window): (&[SlotId], &[SlotId]), state: SlotId,
    /// #     slots_for: impl Fn(u8, Range<usize>) -> Vec<SlotId>,
    /// # ) -> Result<()> {
    /// let groups = vec![
    ///     CacheGroup { name: "sliding".into(), kind: GroupKind::Window { blocks: 64 }, memory: sliding, share: None },
    ///     CacheGroup { name: "mamba".into(), kind: GroupKind::State, memory: states, share: None },
    /// ];
    /// let manager = Manager::open_hybrid(settings, Options::default(), full, groups).await?;
    ///
    /// // A prompt has been computed: all its blocks, what is left of the window, the state at the end.
    /// let slots = [
    ///     GroupSlots { group: 0, first: 0, slots: blocks },
    ///     GroupSlots { group: 1, first: chain.len() - window.len(), slots: window },
    ///     GroupSlots { group: 2, first: chain.len() - 1, slots: &[state] },
    /// ];
    /// let save = HybridSave { info, chain, slots: &slots, is_end: true, ready: Fence::Done };
    /// let saved = manager.save_hybrid(&save).await?;
    ///
    /// // Another one begins with it.
    /// let lease = manager.lease_hybrid(info, chain);
    /// let known = lease.blocks();
    /// let wanted = [0, 1, 2].map(|group| lease.wanted(group).expect("a group"));
    /// let slots = [0, 1, 2].map(|group| slots_for(group, wanted[usize::from(group)].clone()));
    /// let slots = [0, 1, 2].map(|group| GroupSlots { group: group as u8, first: wanted[group].start, slots: &slots[group] });
    /// let loaded = manager.load_hybrid(lease, &slots, &Fence::Done).await?;
    /// let compute_from = if loaded.is_whole { known } else { 0 };
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`open_with`](Self::open_with) for each group. [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) too: names
    /// of groups are not told apart, a window has no block, or shares leave nothing.
    pub async fn open_hybrid(
        settings: Settings,
        options: Options,
        memory: EngineMemory,
        groups: Vec<CacheGroup>,
    ) -> Result<Self> {
        traces::check(&settings.traces)?;
        let listener = Listener::bind(&settings)?;
        let grid = CheckpointGrid::new(settings.hybrid.checkpoint_blocks);
        let GroupOpenings { full, others } = GroupOpenings::new(&settings, &memory, groups)?;
        let mut registries = vec![metrics::registry("full")?];
        let options_of = |number, registry| Options {
            registry,
            clock: options.clock.clone(),
            block_tokens: options.block_tokens,
            fingerprint: options.fingerprint.clone(),
            ranks: options.ranks.as_ref().map(|ranks| ranks_of(number, ranks)),
            // As events: of full attention, whose blocks a request is known by.
            on_durable: options.on_durable.clone().filter(|_| number == FULL),
            chaos: options.chaos.clone(),
        };
        let full = Self::assemble(full, &options_of(FULL, registries[0].clone()), Some(memory), "").await?;
        let mut opened = Vec::with_capacity(others.len());
        for GroupOpening { number, group, settings, suffix } in others {
            let registry = metrics::registry(&group.name)?;
            let options = options_of(number, registry.clone());
            let manager = Self::assemble(settings, &options, Some(group.memory), &suffix).await?;
            registries.push(registry);
            opened.push(GroupTable { number, window: group.kind.window() as usize, manager });
        }
        metrics::export(&options.registry, registries)?;
        let checkpoints = CheckpointGroups::new(grid, opened);
        join_epochs(&full, &checkpoints)?;
        full.with_checkpoints(checkpoints).serve(listener, &options)
    }
}

impl Rank {
    /// [`join_with`](Self::join_with), for a hybrid model: the leader [opens](Manager::open_hybrid) with the same groups,
    /// whose memory is [in ranks](EngineMemory::group_in_ranks).
    ///
    /// # Errors
    /// Those of [`join_with`](Self::join_with) and of [`open_hybrid`](Manager::open_hybrid).
    pub fn join_hybrid(
        settings: &Settings,
        options: &RankOptions,
        memory: &EngineMemory,
        groups: Vec<CacheGroup>,
    ) -> Result<Self> {
        let GroupOpenings { full, others } = GroupOpenings::new(settings, memory, groups)?;
        let options_of = |number| RankOptions {
            group: ranks_of(number, &options.group),
            rank: options.rank,
            fingerprint: options.fingerprint.clone(),
            chaos: options.chaos.clone(),
        };
        // In the leader's order: it waits for all ranks of one group before it goes on to the next.
        let full = Self::join_as(&full, options_of(FULL), Some(memory), "")?;
        let join = |GroupOpening { number, group, settings, suffix }: GroupOpening| {
            Self::join_as(&settings, options_of(number), Some(&group.memory), &suffix)
        };
        let others = others.into_iter().map(join).collect::<Result<_>>()?;
        Ok(full.with_groups(others))
    }
}

/// Where the ranks of a group meet: each has a leader of its own, in one process.
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
    /// Keeps its files and objects apart from others', and from those of checkpoints that were made by another rule.
    suffix: String,
}

impl GroupOpenings {
    fn new(settings: &Settings, memory: &EngineMemory, groups: Vec<CacheGroup>) -> Result<Self> {
        check(&groups)?;
        let parts = GroupParts::new(settings, memory, &groups)?;
        let every = settings.hybrid.checkpoint_blocks;
        let opening = |(number, group): (u8, CacheGroup)| {
            // By its name as well: groups alike may come in another order, and blocks know their group by its number.
            let name = digest(group.name.as_bytes()) as u64;
            let suffix = format!("-g{number}w{}n{every}-{name:016x}", group.kind.window());
            GroupOpening { number, settings: parts.of_group(number, settings), suffix, group }
        };
        Ok(Self { full: parts.of_full(settings), others: (1..).zip(groups).map(opening).collect() })
    }
}

fn check(groups: &[CacheGroup]) -> Result<()> {
    if groups.len() >= MAX_GROUPS {
        return Err(invalid(format!(
            "{} cache groups are too many: at most {}",
            groups.len(),
            MAX_GROUPS - 1
        )));
    }
    for (place, CacheGroup { name, kind, .. }) in groups.iter().enumerate() {
        let is_word = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        let is_taken = name == "full" || groups[..place].iter().any(|other| other.name == *name);
        if name.is_empty() || !is_word(name) || is_taken {
            let message = "choose letters, digits and _, each name once, and not full";
            return Err(invalid(format!("{name:?} cannot name a cache group: {message}")));
        }
        if kind.window() == 0 {
            return Err(invalid(format!("the window of cache group {name} has no block: say at least 1")));
        }
    }
    Ok(())
}

/// A start may find that the last reset did not get to all groups: it is made up for.
fn join_epochs(full: &Manager, checkpoints: &CheckpointGroups) -> Result<()> {
    let newest = checkpoints.managers().map(Manager::epoch).fold(full.epoch(), u64::max);
    for manager in checkpoints.managers().chain([full]).filter(|manager| manager.epoch() < newest) {
        manager.reset(newest)?;
    }
    Ok(())
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
            invalid(message.to_owned())
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
            return Err(invalid(format!("{message}: {:?}", &given[1..])));
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
