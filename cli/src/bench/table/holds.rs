//! How long the table's lock is held, at most, by what engines and background work do in a full
//! hierarchy.

use std::time::Duration;

use kvbm::{
    BlockHash, Hints, Lease, Manager, RequestId, RequestInfo, Tier, Transfer, Transferred,
    longest_hold,
};
use kvbm_cli::measuring::chains::{LONG, Prompts, Random, SHORT};
use kvbm_cli::measuring::subject::{OurManager, device_and_host_of};
use kvbm_settings::{AdmissionKind, Capacity, EvictionKind, Settings, WriteBudget};
use kvbm_tiers::chaos::{Chaos, Direction, Episode, Kind, Medium, Schedule};
use serde::Serialize;

use crate::output::CommandFailure;

/// Prompts of a phase.
const PROMPTS: u64 = 12;
/// The longest that background work has something to do.
const PATIENCE: Duration = Duration::from_secs(5);
/// Blocks of an hour that the rule lets through to disk, as a part of the host's. What is asked
/// about beyond is refused.
const WRITABLE: u64 = 4;
/// The bad block is to have more descendants than one step of a quarantine drops.
const DESCENDANTS: usize = 1_024;
/// Prompts push others out of the host at most this many times until one of these is long enough.
const ROUNDS: usize = 4;
/// Brings most of what a host has.
const TENANT: u32 = 7;
/// A request is over after this many milliseconds.
const TURN_MS: u64 = 10_000;

/// The longest hold of each kind of work, in microseconds of the holder's CPU time.
#[derive(Debug, Serialize)]
pub(crate) struct Holds {
    #[serde(flatten)]
    above_disk: AboveDisk,
    #[serde(flatten)]
    last_tier: LastTier,
    /// More comes than the host has room for while the disk below takes nothing; then it takes all.
    outage: f64,
}

/// Where a disk lies below the host.
#[derive(Debug, Serialize)]
struct AboveDisk {
    /// Prompts of 8,192 blocks are leased, allocated, published and saved, and end.
    prompt: f64,
    /// They are leased and loaded again.
    load: f64,
    /// As many come and are not saved: the index grows.
    growth: f64,
    /// The host is full: what leaves it goes to disk ahead of time.
    headroom: f64,
    /// Policies learn from what was seen.
    upkeep: f64,
    /// A block on disk cannot be read: those that follow it go too. `None`: of no prompt enough was
    /// on disk only.
    quarantine: Option<f64>,
    /// Everything is asked about, most of it refused.
    drain: f64,
}

/// Where the host is the last tier.
#[derive(Debug, Serialize)]
struct LastTier {
    /// Prompts of 8,192 blocks come to a host that is full: its policy weighs them.
    admission: f64,
    /// A quarter of the host is evicted in one call.
    evict: f64,
    /// A tenant is forgotten that brought nearly all that the host has, in thousands of prompts.
    forget: f64,
    /// The manager closes while prompts of 8,192 blocks are on their way.
    close: f64,
}

impl Holds {
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let Self { above_disk, last_tier, outage } = self;
        let all = [
            ("prompt of 8,192 blocks", Some(above_disk.prompt)),
            ("load of 8,192 blocks", Some(above_disk.load)),
            ("growth of the index", Some(above_disk.growth)),
            ("headroom", Some(above_disk.headroom)),
            ("upkeep", Some(above_disk.upkeep)),
            ("quarantine", above_disk.quarantine),
            ("drain", Some(above_disk.drain)),
            ("admission to a full last tier", Some(last_tier.admission)),
            ("evict", Some(last_tier.evict)),
            ("forget", Some(last_tier.forget)),
            ("close", Some(last_tier.close)),
            ("outage of the disk", Some(*outage)),
        ];
        all.into_iter().filter_map(|(what, us)| Some((what, us?)))
    }

    pub(crate) fn longest(&self) -> f64 {
        self.named().map(|(_, us)| us).fold(0.0, f64::max)
    }
}

/// Fills hierarchies whose hosts hold `blocks` blocks and measures each kind of work in turn. Last
/// comes what writes most to disk: the machine is busy with that for a while after.
pub(crate) fn measure(blocks: usize, eviction: EvictionKind) -> Result<Holds, CommandFailure> {
    Ok(Holds {
        above_disk: above_disk(blocks, eviction)?,
        last_tier: last_tier(blocks, eviction),
        outage: outage(blocks, eviction)?,
    })
}

fn above_disk(blocks: usize, eviction: EvictionKind) -> Result<AboveDisk, CommandFailure> {
    let place = temporary_directory()?;
    let mut settings = device_and_host_of(blocks, eviction);
    below_the_host(&mut settings, blocks);
    settings.disk.dirs = vec![place.path().to_owned()];
    let chaos =
        Chaos::new(Schedule::scripted([episode(Medium::Disk, Direction::Read, Kind::Io, Some(1))]));
    let mut mix = Mix::new(OurManager::open_with(settings, Some(&chaos)), blocks);
    mix.fill(blocks);
    let prompts = mix.new_prompts();
    Ok(AboveDisk {
        prompt: micros(|| mix.serve(&prompts)),
        load: micros(|| mix.load(&prompts)),
        growth: micros(|| mix.publish_only()),
        headroom: micros(|| mix.overfill()),
        upkeep: micros(|| mix.let_time_pass()),
        quarantine: mix.quarantine(&chaos),
        drain: micros(|| mix.drain()),
    })
}

fn last_tier(blocks: usize, eviction: EvictionKind) -> LastTier {
    let hang = episode(Medium::Memory, Direction::Write, Kind::Hang, None);
    let chaos = Chaos::new(Schedule::scripted([hang]));
    let settings = device_and_host_of(blocks, eviction);
    let mut mix = Mix::new(OurManager::open_with(settings, Some(&chaos)), blocks);
    mix.fill_by_tenant(blocks);
    let prompts = mix.new_prompts();
    let of = |mix: &Mix, work: &dyn Fn(&Manager)| micros(|| work(mix.ours.manager()));
    LastTier {
        admission: micros(|| mix.serve(&prompts)),
        evict: of(&mix, &|manager| _ = manager.admin().evict(Tier::Host, blocks / 4)),
        forget: of(&mix, &|manager| manager.forget(TENANT).expect("nothing outlives the process")),
        close: mix.close(&chaos),
    }
}

/// The longest hold while the disk below a host takes nothing, and when it does again.
fn outage(blocks: usize, eviction: EvictionKind) -> Result<f64, CommandFailure> {
    let place = temporary_directory()?;
    let mut settings = device_and_host_of(blocks, eviction);
    settings.disk.capacity = Some(Capacity::Blocks((blocks / 4).max(1) as u64));
    settings.disk.o_direct = false;
    settings.disk.dirs = vec![place.path().to_owned()];
    let chaos =
        Chaos::new(Schedule::scripted([episode(Medium::Disk, Direction::Write, Kind::Io, None)]));
    let mut mix = Mix::new(OurManager::open_with(settings, Some(&chaos)), blocks);
    chaos.start();
    Ok(micros(|| {
        mix.save_short(blocks / SHORT * 5 / 4);
        chaos.heal();
        mix.let_time_pass();
        mix.drain();
    }))
}

fn temporary_directory() -> Result<tempfile::TempDir, CommandFailure> {
    tempfile::tempdir().map_err(|error| CommandFailure::unusable(error.to_string()))
}

/// A disk to which only goes what leaves the host, and little of it.
fn below_the_host(settings: &mut Settings, blocks: usize) {
    let disk = (blocks / 4).max(1) as u64;
    settings.disk.capacity = Some(Capacity::Blocks(disk));
    settings.disk.o_direct = false;
    settings.disk.admission = AdmissionKind::WriteBack;
    let an_hour = blocks as u64 / WRITABLE * settings.block_bytes.unwrap_or_default();
    settings.disk.write_budget = Some(WriteBudget::BytesPerDay(24 * an_hour));
}

/// From the start on.
const fn episode(
    medium: Medium,
    direction: Direction,
    kind: Kind,
    operations: Option<u64>,
) -> Episode {
    let (start, length) = (Duration::ZERO, Duration::from_hours(1));
    Episode { medium, direction: Some(direction), kind, start, length, operations }
}

fn micros(work: impl FnOnce()) -> f64 {
    longest_hold(work).1.as_secs_f64() * 1e6
}

/// A full hierarchy, and what goes on in it.
struct Mix {
    ours: OurManager,
    random: Random,
    /// Blocks of a prompt: fewer where the hierarchy is small.
    prompt_blocks: usize,
    requests: u64,
    /// What may lie on disk by now.
    saved: Vec<Vec<BlockHash>>,
}

impl Mix {
    fn new(ours: OurManager, blocks: usize) -> Self {
        let prompt_blocks = LONG.min(blocks / 8 / PROMPTS as usize);
        Self { ours, random: Random::new(9), prompt_blocks, requests: 0, saved: Vec::new() }
    }

    /// Leaves an eighth of the host for the first prompts.
    fn fill(&mut self, blocks: usize) {
        let prompts = Prompts::new(blocks * 7 / 8);
        self.ours.save_all(&prompts);
        let long = prompts.longest.iter().chain(&prompts.long);
        self.saved.extend(long.map(|prompt| prompt.hashes[..prompt.saved].to_vec()));
    }

    /// Fills the host with short prompts of a tenant. First come their first blocks, so that these
    /// lie side by side in the table.
    fn fill_by_tenant(&mut self, blocks: usize) {
        let prompts: Vec<_> = (0..blocks / SHORT).map(|_| self.random.chain(SHORT)).collect();
        let hints = Hints { tenant: Some(TENANT), ..Hints::default() };
        for blocks in [1, SHORT] {
            for prompt in &prompts {
                self.ours
                    .save_for(RequestInfo { hints, ..RequestInfo::default() }, &prompt[..blocks]);
            }
        }
    }

    fn save_short(&mut self, prompts: usize) {
        for n in 0..prompts {
            self.ours.save(&self.random.chain(SHORT), None);
            if n % 1_024 == 0 {
                self.pass_time(TURN_MS);
            }
        }
    }

    fn drain(&self) {
        // That not all gets there is the point.
        let _ = self.ours.manager().drain(PATIENCE);
    }

    /// Closes the manager while copies to the host hang.
    fn close(&mut self, chaos: &Chaos) -> f64 {
        chaos.start();
        let manager = self.ours.manager();
        let on_their_way: Vec<_> = (0..PROMPTS / 2)
            .map(|_| {
                let prompt = self.random.chain(self.prompt_blocks);
                manager.save(self.ours.put_on_device(&prompt, RequestInfo::default()))
            })
            .collect();
        let us = micros(|| _ = manager.close(Duration::ZERO));
        chaos.heal();
        drop(on_their_way);
        us
    }

    fn new_prompts(&mut self) -> Vec<Vec<BlockHash>> {
        (0..PROMPTS).map(|_| self.random.chain(self.prompt_blocks)).collect()
    }

    fn serve(&mut self, prompts: &[Vec<BlockHash>]) {
        for prompt in prompts {
            self.requests += 1;
            let request = RequestId(self.requests);
            self.ours.save(prompt, Some(request));
            self.pass_time(TURN_MS);
            self.ours.manager().finished(request, 500);
        }
        self.saved.extend_from_slice(prompts);
    }

    fn load(&self, prompts: &[Vec<BlockHash>]) {
        let manager = self.ours.manager();
        for prompt in prompts {
            manager.admin().evict(Tier::Device, 256);
            self.wait(manager.load(manager.lease(prompt)));
        }
    }

    fn wait(&self, ticket: Transfer<Transferred>) -> Option<Lease> {
        self.ours.runtime().block_on(ticket).ok().map(|transferred| transferred.lease)
    }

    /// Prompts that stay on the device: the table knows more blocks than it set aside room for.
    fn publish_only(&mut self) {
        let device = self.ours.manager().admin().counts(Tier::Device).total as usize;
        for _ in 0..device / self.prompt_blocks.max(1) {
            let prompt = self.random.chain(self.prompt_blocks);
            drop(self.ours.put_on_device(&prompt, RequestInfo::default()));
        }
    }

    /// More than the host has room for.
    fn overfill(&mut self) {
        for _ in 0..4 {
            let prompts = self.new_prompts();
            self.serve(&prompts);
        }
        self.run_background();
    }

    fn let_time_pass(&self) {
        for _ in 0..8 {
            self.pass_time(TURN_MS);
            self.run_background();
        }
    }

    fn pass_time(&self, ms: u64) {
        let clock = self.ours.clock();
        clock.advance_to(kvbm::Clock::now_ms(clock.as_ref()) + ms);
        self.ours.manager().admin().tick();
    }

    /// Gives the background thread some rounds.
    fn run_background(&self) {
        for _ in 0..40 {
            self.ours.manager().admin().tick();
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Loads what lies on disk only, whose first block there cannot be read, and waits until what
    /// follows it is gone.
    fn quarantine(&mut self, chaos: &Chaos) -> Option<f64> {
        let prompt = self.long_on_disk_only()?;
        let manager = self.ours.manager();
        chaos.start();
        let us = micros(|| {
            drop(self.wait(manager.load(manager.lease(&prompt))));
            self.run_background();
        });
        chaos.heal();
        (manager.admin().stats(Tier::Disk).unreadable > 0).then_some(us)
    }

    /// A prompt of which many blocks lie on disk only. What goes there, and when, is for the
    /// policies to say.
    fn long_on_disk_only(&mut self) -> Option<Vec<BlockHash>> {
        for _ in 0..ROUNDS {
            let longest = self.saved.iter().max_by_key(|prompt| self.on_disk_only(prompt))?;
            if self.on_disk_only(longest) >= DESCENDANTS.min(self.prompt_blocks / 2) {
                return Some(longest.clone());
            }
            self.overfill();
        }
        None
    }

    fn on_disk_only(&self, prompt: &[BlockHash]) -> usize {
        let held = self.ours.manager().matches(prompt);
        held.blocks(Tier::Disk)
            .saturating_sub(held.blocks(Tier::Host).max(held.blocks(Tier::Device)))
    }
}
