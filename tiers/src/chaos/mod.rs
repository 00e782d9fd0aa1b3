//! Faults on purpose: media that fail, lie, hang and come back, as a seed or a script says.
//!
//! | module | holds |
//! |---|---|
//! | `schedule` | which medium misbehaves when, how and for how long: [`Episode`], [`Schedule`] |
//! | `backend` | [`ChaosBackend`]: executes faults around any backend |
//! | `store` | the same around the client of an object store |
//! | `late` | operations that hang until later |
//!
//! Everything here keeps a backend's promises: an operation is completed once, after the last
//! access to its slots, or never and then nothing touches them. It stands *inside*
//! [`Verified`](crate::Verified), which has to notice what is spoilt here.

mod backend;
mod late;
mod schedule;
mod store;

pub use backend::{ChaosBackend, Effect, Faults};
pub use schedule::{ClockJump, Direction, Episode, EpisodeError, Kind, Medium, Schedule};

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

pub(crate) use self::late::LateTimer;
use self::store::ChaosStore;
use crate::backend::Backend;
use crate::clock;
use crate::copy::{CopyOp, SlotRef, Tier};
use crate::error::SetupError;
use crate::media_layer::MediaLayer;
use crate::memory::{CpuMemories, Memory};
use crate::object::Store;

/// All that goes wrong in one run: follows a [`Schedule`] from [`start`](Self::start) until
/// [`heal`](Self::heal), and counts what it did. Clones are handles to the same one.
#[derive(Clone, Debug)]
pub struct Chaos(Arc<ChaosState>);

#[derive(Debug)]
struct ChaosState {
    run: Mutex<ChaosRun>,
    /// Of the disk tier: slot `i` lies in directory `i` modulo this number.
    directories: AtomicU32,
    late: LateTimer,
}

#[derive(Debug)]
struct ChaosRun {
    schedule: Schedule,
    phase: ChaosPhase,
    active: Vec<ActiveEpisode>,
    jumps: Vec<ClockJump>,
    injected: BTreeMap<Kind, u64>,
    /// Operations that nothing happens to.
    spared: u64,
}

#[derive(Clone, Copy, Debug)]
enum ChaosPhase {
    Waiting,
    Since(Instant),
    Healed,
}

/// An episode under way.
#[derive(Debug)]
struct ActiveEpisode {
    episode: Episode,
    until: Instant,
    /// Operations that it may still hit.
    left: u64,
}

/// What an operation meets.
#[derive(Clone, Copy, Debug)]
struct EpisodeHit {
    kind: Kind,
    /// When the episode ends.
    until: Instant,
}

impl Chaos {
    /// Nothing happens before [`start`](Self::start).
    pub fn new(schedule: Schedule) -> Self {
        let run = ChaosRun {
            schedule,
            phase: ChaosPhase::Waiting,
            active: Vec::new(),
            jumps: Vec::new(),
            injected: BTreeMap::new(),
            spared: 0,
        };
        Self(Arc::new(ChaosState {
            run: Mutex::new(run),
            directories: AtomicU32::new(1),
            late: LateTimer::default(),
        }))
    }

    /// A handle to this, for the options of a manager or a rank.
    pub fn layer(&self) -> Arc<dyn MediaLayer> {
        Arc::new(self.clone())
    }

    /// The directory that a slot lies in, if it is the disk tier's.
    fn directory_of(&self, slot: SlotRef) -> Option<u32> {
        (slot.tier == Tier::Disk).then(|| slot.slot.0 % self.0.directories.load(Ordering::Relaxed))
    }

    /// The schedule's time begins.
    pub fn start(&self) {
        self.0.run.lock().phase = ChaosPhase::Since(clock::now());
    }

    /// Spares the next `operations` operations that an episode would hit: a test that spares one
    /// more each time has every one of them fail in turn.
    pub fn spare(&self, operations: u64) {
        self.0.run.lock().spared = operations;
    }

    /// All media are well from here on. What hangs goes on; what never completes still does not.
    pub fn heal(&self) {
        {
            let mut run = self.0.run.lock();
            run.phase = ChaosPhase::Healed;
            run.active.clear();
        }
        self.0.late.release();
    }

    /// Operations hit so far and jumps of the clock, by kind of fault.
    pub fn injected(&self) -> BTreeMap<Kind, u64> {
        self.0.run.lock().injected.clone()
    }

    /// Jumps of the clock that came due since the last call. The owner of the clock makes it jump.
    pub fn clock_jumps(&self) -> Vec<ClockJump> {
        let mut run = self.0.run.lock();
        run.advance(clock::now());
        std::mem::take(&mut run.jumps)
    }

    /// What the next operation on `medium` meets, counted.
    fn hit(&self, medium: Medium, direction: Direction) -> Option<EpisodeHit> {
        self.0.run.lock().hit(medium, direction, clock::now())
    }

    /// What a copy meets, counted.
    fn hit_copy(&self, op: &CopyOp) -> Option<EpisodeHit> {
        let (medium, direction) = (Medium::of(op.route()), Direction::of(op.route()));
        let dir = [op.from, op.to].into_iter().find_map(|slot| self.directory_of(slot));
        let of_directory = dir.and_then(|dir| self.hit(Medium::Directory(dir as u8), direction));
        of_directory.or_else(|| self.hit(medium, direction))
    }

    fn is_healed(&self) -> bool {
        matches!(self.0.run.lock().phase, ChaosPhase::Healed)
    }
}

impl MediaLayer for Chaos {
    fn set_directories(&self, directories: u32) {
        self.0.directories.store(directories.max(1), Ordering::Relaxed);
    }

    /// `inner`, hit by this chaos. Blocks that arrive in `memory` from below may be corrupted: they
    /// must be verified afterwards.
    fn around(
        &self,
        inner: Arc<dyn Backend>,
        memory: Arc<dyn Memory>,
    ) -> Result<Arc<dyn Backend>, SetupError> {
        let memories = CpuMemories::new(vec![memory])?;
        Ok(Arc::new(ChaosBackend::new(inner, memories, self.clone())))
    }

    /// `store`, whose requests are hit by this chaos.
    fn around_store(&self, store: Store) -> Store {
        store.map_client(|client| Arc::new(ChaosStore::new(client, self.clone())))
    }
}

impl ChaosRun {
    fn hit(&mut self, medium: Medium, direction: Direction, now: Instant) -> Option<EpisodeHit> {
        self.advance(now);
        let active = self.active.iter_mut().find(|active| active.meets(medium, direction))?;
        if self.spared > 0 {
            self.spared -= 1;
            return None;
        }
        active.left -= 1;
        let hit = EpisodeHit { kind: active.episode.kind, until: active.until };
        *self.injected.entry(hit.kind).or_default() += 1;
        Some(hit)
    }

    /// Begins and ends the episodes that are due.
    fn advance(&mut self, now: Instant) {
        let ChaosPhase::Since(start) = self.phase else { return };
        while let Some(episode) = self.schedule.next_before(now.duration_since(start)) {
            match episode.clock_jump() {
                Some(jump) => {
                    self.jumps.push(jump);
                    *self.injected.entry(episode.kind).or_default() += 1;
                }
                None => self.active.push(ActiveEpisode {
                    episode,
                    until: start + episode.start + episode.length,
                    left: episode.operations.unwrap_or(u64::MAX),
                }),
            }
        }
        self.active.retain(|active| active.left > 0 && active.until > now);
    }
}

impl ActiveEpisode {
    fn meets(&self, medium: Medium, direction: Direction) -> bool {
        self.left > 0
            && self.episode.medium == medium
            && self.episode.direction.is_none_or(|only| only == direction)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn run(script: &[&str]) -> (ChaosRun, Instant) {
        let schedule = Schedule::scripted(script.iter().map(|text| text.parse().unwrap()));
        let start = Instant::now();
        let run = ChaosRun {
            schedule,
            phase: ChaosPhase::Since(start),
            active: Vec::new(),
            jumps: Vec::new(),
            injected: BTreeMap::new(),
            spared: 0,
        };
        (run, start)
    }

    #[test]
    fn an_episode_hits_only_its_medium_in_its_time() {
        let (mut run, start) = run(&["disk.read:eio@10s+5s"]);
        let mut kind = |medium, direction, at_s| {
            run.hit(medium, direction, start + Duration::from_secs(at_s)).map(|hit| hit.kind)
        };
        assert_eq!(kind(Medium::Disk, Direction::Read, 9), None);
        assert_eq!(kind(Medium::Disk, Direction::Read, 10), Some(Kind::Io));
        assert_eq!(kind(Medium::Disk, Direction::Write, 11), None);
        assert_eq!(kind(Medium::Memory, Direction::Read, 11), None);
        assert_eq!(kind(Medium::Disk, Direction::Read, 14), Some(Kind::Io));
        assert_eq!(kind(Medium::Disk, Direction::Read, 15), None);
        assert_eq!(run.injected, BTreeMap::from([(Kind::Io, 2)]));
    }

    #[test]
    fn an_episode_hits_no_more_operations_than_it_may() {
        let (mut run, start) = run(&["disk:eio@0s+1s x2"]);
        let hits = (0..5).filter_map(|_| run.hit(Medium::Disk, Direction::Write, start)).count();
        assert_eq!(hits, 2);
    }

    #[test]
    fn operations_before_the_first_hit_are_the_spared_ones() {
        let chaos = Chaos::new(Schedule::scripted(["object:503@0s+1h x1".parse().unwrap()]));
        chaos.start();
        chaos.spare(2);
        let hits = [(); 4].map(|()| chaos.hit(Medium::Object, Direction::Read).is_some());
        assert_eq!(hits, [false, false, true, false]);
    }

    #[test]
    fn a_jump_of_the_clock_waits_for_who_asks_late() {
        let (mut run, start) = run(&["clock:jump@1s+3600s", "clock:back@2s+60s"]);
        run.advance(start + Duration::from_secs(100));
        let jumps =
            [ClockJump::Forward(Duration::from_hours(1)), ClockJump::Back(Duration::from_mins(1))];
        assert_eq!(run.jumps, jumps);
    }

    #[test]
    fn nothing_happens_before_the_start_and_after_the_healing() {
        let chaos = Chaos::new(Schedule::scripted(["disk:eio@0s+1h".parse().unwrap()]));
        let hit = || chaos.hit(Medium::Disk, Direction::Read).is_some();
        assert!(!hit());
        chaos.start();
        assert!(hit());
        chaos.heal();
        assert!(!hit());
    }
}
