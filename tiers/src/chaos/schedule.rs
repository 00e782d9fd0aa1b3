//! When what goes wrong: written by hand, or drawn from a seed.

use std::fmt;
use std::iter::Peekable;
use std::str::FromStr;
use std::time::Duration;

use crate::copy::{Route, Tier};

/// What misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Medium {
    /// Copies between the device and host memory.
    Memory,
    /// The disk tier.
    Disk,
    /// One of the disk tier's directories, counted from 0.
    Directory(u8),
    /// The object tier.
    Object,
    /// The clock of policies and flush ages.
    Clock,
}

/// Down the hierarchy or up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Up: the lower tier is read.
    Read,
    /// Down: the lower tier is written.
    Write,
}

/// How it misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// EIO, for an operation or for a while.
    Io,
    /// ENOSPC.
    NoSpace,
    /// EMFILE.
    TooManyFiles,
    /// Operations begin [`Kind::DELAY`] later.
    Delay,
    /// Fewer bytes than a block move, or an answer ends early, and that is noticed.
    Short,
    /// The end of a block does not arrive, and the medium says that it did.
    Torn,
    /// A read brings a flipped bit; a write that is reported as done was lost. The medium notices
    /// neither.
    Corrupt,
    /// Operations hang until the episode is over, and then are executed.
    Hang,
    /// Operations never complete.
    Never,
    /// The service answers 500.
    Http500,
    /// The service answers 503.
    Http503,
    /// The service answers 403.
    Http403,
    /// The clock jumps forward by the episode's length.
    Jump,
    /// The clock jumps back by the episode's length.
    Back,
}

impl Kind {
    /// How much later a delayed operation begins.
    pub const DELAY: Duration = Duration::from_millis(20);

    /// Its name in scripts and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Io => "eio",
            Self::NoSpace => "enospc",
            Self::TooManyFiles => "emfile",
            Self::Delay => "delay",
            Self::Short => "short",
            Self::Torn => "torn",
            Self::Corrupt => "corrupt",
            Self::Hang => "hang",
            Self::Never => "never",
            Self::Http500 => "500",
            Self::Http503 => "503",
            Self::Http403 => "403",
            Self::Jump => "jump",
            Self::Back => "back",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Medium {
    /// All media; of directories the first three.
    pub const ALL: [Self; 7] = [
        Self::Memory,
        Self::Disk,
        Self::Directory(0),
        Self::Directory(1),
        Self::Directory(2),
        Self::Object,
        Self::Clock,
    ];

    /// Its name in scripts.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::Directory(0) => "disk0",
            Self::Directory(1) => "disk1",
            Self::Directory(_) => "disk2",
            Self::Object => "object",
            Self::Clock => "clock",
        }
    }

    /// How it can misbehave. Copies within memory are not verified, so nothing is corrupted there.
    /// A store's client gives up its requests, so none of them lasts for ever.
    pub const fn kinds(self) -> &'static [Kind] {
        match self {
            Self::Memory => &[Kind::Io, Kind::Delay, Kind::Short, Kind::Hang, Kind::Never],
            Self::Disk | Self::Directory(_) => &[
                Kind::Io,
                Kind::NoSpace,
                Kind::TooManyFiles,
                Kind::Delay,
                Kind::Short,
                Kind::Torn,
                Kind::Corrupt,
                Kind::Hang,
                Kind::Never,
            ],
            Self::Object => &[
                Kind::Http500,
                Kind::Http503,
                Kind::Http403,
                Kind::NoSpace,
                Kind::Delay,
                Kind::Short,
                Kind::Corrupt,
                Kind::Hang,
            ],
            Self::Clock => &[Kind::Jump, Kind::Back],
        }
    }

    /// The medium of a route is that of its lower tier.
    pub(super) fn of(route: Route) -> Self {
        match route.lower() {
            Tier::Device | Tier::Host => Self::Memory,
            Tier::Disk => Self::Disk,
            Tier::Object => Self::Object,
        }
    }
}

impl Direction {
    pub(super) fn of(route: Route) -> Self {
        if route.to > route.from { Self::Write } else { Self::Read }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// One medium misbehaves in one way for a while.
///
/// As text: `MEDIUM[.read|.write]:KIND@START+LENGTH[ xN]`, times in `ms`, `s`, `m` or `h`; `xN`:
/// the first N operations only. `disk:hang@100s+20s` is a disk that hangs for 20 s;
/// `disk.write:eio@5s+1s x1` fails once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Episode {
    /// What misbehaves.
    pub medium: Medium,
    /// `None`: both ways.
    pub direction: Option<Direction>,
    /// How.
    pub kind: Kind,
    /// From when on, counted from the start of the run.
    pub start: Duration,
    /// For how long; for a jump of the clock how far.
    pub length: Duration,
    /// Most operations that it hits; `None`: all.
    pub operations: Option<u64>,
}

impl Episode {
    pub(super) const fn clock_jump(&self) -> Option<ClockJump> {
        match self.kind {
            Kind::Jump => Some(ClockJump::Forward(self.length)),
            Kind::Back => Some(ClockJump::Back(self.length)),
            _ => None,
        }
    }
}

impl fmt::Display for Episode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, length) = (self.start.as_millis(), self.length.as_millis());
        f.write_str(self.medium.name())?;
        if let Some(direction) = self.direction {
            write!(f, ".{}", direction.name())?;
        }
        write!(f, ":{}@{start}ms+{length}ms", self.kind)?;
        self.operations.map_or(Ok(()), |operations| write!(f, " x{operations}"))
    }
}

/// A text that is no [`Episode`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct EpisodeError(String);

impl FromStr for Episode {
    type Err = EpisodeError;

    fn from_str(text: &str) -> Result<Self, EpisodeError> {
        let (what, when) = halves(text, '@')?;
        let (place, kind) = halves(what, ':')?;
        let (medium, direction) = parse_place(place)?;
        let kind = named(kind, medium.kinds(), Kind::name)?;
        let (start, rest) = halves(when, '+')?;
        let (length, operations) = match rest.split_once('x') {
            Some((length, count)) => (length, Some(parse_count(count)?)),
            None => (rest, None),
        };
        let (start, length) = (parse_time(start)?, parse_time(length)?);
        Ok(Self { medium, direction, kind, start, length, operations })
    }
}

fn halves(text: &str, mark: char) -> Result<(&str, &str), EpisodeError> {
    text.split_once(mark).ok_or_else(|| {
        let form = "write MEDIUM[.read|.write]:KIND@START+LENGTH[ xN], such as disk:hang@100s+20s";
        EpisodeError(format!("'{mark}' is missing in '{text}': {form}"))
    })
}

fn parse_place(text: &str) -> Result<(Medium, Option<Direction>), EpisodeError> {
    let (medium, direction) = match text.split_once('.') {
        Some((medium, direction)) => (medium, Some(direction)),
        None => (text, None),
    };
    let medium = named(medium, &Medium::ALL, Medium::name)?;
    let directions = [Direction::Read, Direction::Write];
    let direction = direction.map(|text| named(text, &directions, Direction::name));
    Ok((medium, direction.transpose()?))
}

fn named<T: Copy>(
    text: &str,
    valid: &[T],
    name: impl Fn(T) -> &'static str + Copy,
) -> Result<T, EpisodeError> {
    valid.iter().copied().find(|&value| name(value) == text.trim()).ok_or_else(|| {
        let names: Vec<_> = valid.iter().copied().map(name).collect();
        EpisodeError(format!("'{text}' is none of {}", names.join(", ")))
    })
}

fn parse_count(text: &str) -> Result<u64, EpisodeError> {
    let count = text.trim().parse().ok().filter(|&count| count > 0);
    count.ok_or_else(|| {
        EpisodeError(format!("'x{text}' is no number of operations: write x1 or more"))
    })
}

fn parse_time(text: &str) -> Result<Duration, EpisodeError> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let milliseconds = match unit {
        "ms" => Some(1),
        "s" => Some(1_000),
        "m" => Some(60_000),
        "h" => Some(3_600_000),
        _ => None,
    };
    let time = number.parse::<u32>().ok().zip(milliseconds);
    let time = time.map(|(number, unit)| Duration::from_millis(u64::from(number) * unit));
    time.ok_or_else(|| EpisodeError(format!("'{text}' is no time: write 500ms, 20s, 5m or 1h")))
}

/// Episodes in the order of their starts.
pub struct Schedule(Vec<Peekable<Box<dyn Iterator<Item = Episode> + Send>>>);

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Schedule").field(&self.0.len()).finish()
    }
}

impl Schedule {
    /// These episodes, given in any order.
    pub fn scripted(episodes: impl IntoIterator<Item = Episode>) -> Self {
        let mut episodes: Vec<_> = episodes.into_iter().collect();
        episodes.sort_by_key(|episode| episode.start);
        Self::of(episodes.into_iter())
    }

    /// Episodes of these media without end, the same ones for the same seed.
    ///
    /// # Panics
    /// If there is no medium.
    pub fn seeded(seed: u64, media: &[Medium]) -> Self {
        assert!(!media.is_empty(), "no medium to misbehave");
        let rng = fastrand::Rng::with_seed(seed);
        Self::of(DrawnEpisodes { rng, media: media.to_vec(), at: Duration::ZERO, never: MAX_NEVER })
    }

    fn of(episodes: impl Iterator<Item = Episode> + Send + 'static) -> Self {
        let episodes: Box<dyn Iterator<Item = Episode> + Send> = Box::new(episodes);
        Self(vec![episodes.peekable()])
    }

    /// Both of them.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// Takes out the next episode that has begun `elapsed` after the start.
    pub(super) fn next_before(&mut self, elapsed: Duration) -> Option<Episode> {
        self.0.iter_mut().find_map(|source| source.next_if(|episode| episode.start <= elapsed))
    }
}

/// Copies that never complete in one run: each costs a slot until the process ends, and the tiers
/// of a test are small.
const MAX_NEVER: u32 = 3;

/// Draws episodes. Several at a time are common: a new one begins every 165 ms on average and lasts
/// up to a second.
struct DrawnEpisodes {
    rng: fastrand::Rng,
    media: Vec<Medium>,
    /// Start of the last one.
    at: Duration,
    /// Copies that may still be drawn never to complete.
    never: u32,
}

impl Iterator for DrawnEpisodes {
    type Item = Episode;

    fn next(&mut self) -> Option<Episode> {
        self.at += Duration::from_millis(self.rng.u64(30..300));
        let medium = self.media[self.rng.usize(..self.media.len())];
        let kinds = medium.kinds();
        let kind = kinds[self.rng.usize(..kinds.len())];
        let kind = self.allowed(kind);
        let direction = [None, Some(Direction::Read), Some(Direction::Write)][self.rng.usize(..3)];
        let direction = match (medium, kind) {
            (Medium::Clock, _) => None,
            // On its way up a block may bounce: the copy then holds a slot that differs from run to
            // run.
            (Medium::Memory, Kind::Never) => Some(Direction::Write),
            _ => direction,
        };
        let (length, operations) = self.extent(kind);
        Some(Episode { medium, direction, kind, start: self.at, length, operations })
    }
}

impl DrawnEpisodes {
    fn allowed(&mut self, kind: Kind) -> Kind {
        match kind {
            Kind::Never if self.never == 0 => Kind::Delay,
            Kind::Never => {
                self.never -= 1;
                kind
            }
            other => other,
        }
    }

    /// How long, and how many operations. What loses blocks hits few: a run that only recomputes
    /// tests nothing.
    fn extent(&mut self, kind: Kind) -> (Duration, Option<u64>) {
        let (millis, operations) = match kind {
            Kind::Never => (1_000..1_001, Some(1..2)),
            Kind::Torn | Kind::Corrupt => (200..1_000, Some(1..5)),
            Kind::Io | Kind::Short if self.rng.bool() => (200..1_000, Some(1..2)),
            Kind::Hang => (50..1_000, None),
            Kind::Jump | Kind::Back => (1_000..3_600_000, None),
            _ => (20..500, None),
        };
        (
            Duration::from_millis(self.rng.u64(millis)),
            operations.map(|operations| self.rng.u64(operations)),
        )
    }
}

/// A leap of the wall clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockJump {
    /// So far into the future.
    Forward(Duration),
    /// So far into the past.
    Back(Duration),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DAY: Duration = Duration::from_hours(24);

    fn drawn(seed: u64, count: usize) -> Vec<Episode> {
        let mut schedule = Schedule::seeded(seed, &Medium::ALL);
        std::iter::from_fn(|| schedule.next_before(DAY)).take(count).collect()
    }

    proptest! {
        #[test]
        fn a_seed_draws_the_same_episodes_every_time(seed in any::<u64>()) {
            prop_assert_eq!(drawn(seed, 50), drawn(seed, 50));
            prop_assert_ne!(drawn(seed, 50), drawn(seed ^ 1, 50));
        }

        #[test]
        fn an_episode_is_read_as_it_was_written(seed in any::<u64>()) {
            for episode in drawn(seed, 50) {
                prop_assert_eq!(episode.to_string().parse::<Episode>().unwrap(), episode);
            }
        }
    }

    #[test]
    fn every_kind_of_fault_is_drawn_sooner_or_later() {
        let drawn = drawn(7, 2_000);
        for &kind in Medium::ALL.into_iter().flat_map(Medium::kinds) {
            assert!(drawn.iter().any(|episode| episode.kind == kind), "{kind}");
        }
        let never = drawn.iter().filter(|episode| episode.kind == Kind::Never);
        let operations: u64 = never.map(|episode| episode.operations.unwrap()).sum();
        assert_eq!(operations, u64::from(MAX_NEVER));
    }

    #[test]
    fn a_script_is_played_in_the_order_of_time() {
        let script = ["disk:eio@5s+1s", "disk:hang@1s+1s", "clock:jump@9s+1h"];
        let script = script.map(|text| text.parse::<Episode>().unwrap());
        let mut schedule = Schedule::scripted(script)
            .and(Schedule::scripted(["disk:short@2s+1s".parse().unwrap()]));
        let mut starts = |elapsed_s| {
            std::iter::from_fn(|| schedule.next_before(Duration::from_secs(elapsed_s)))
                .map(|episode| episode.start.as_secs())
                .collect::<Vec<_>>()
        };
        assert_eq!(starts(4), [1, 2]);
        assert_eq!(starts(8), [5]);
        assert_eq!(starts(8), [0_u64; 0]);
    }

    #[test]
    fn a_script_with_a_mistake_is_told_what_is_valid() {
        for (text, remedy) in [
            ("disk:hang", "disk:hang@100s+20s"),
            ("floppy:hang@1s+1s", "memory, disk, disk0, disk1, disk2, object, clock"),
            ("disk.up:hang@1s+1s", "read, write"),
            ("memory:corrupt@1s+1s", "eio, delay, short, hang, never"),
            ("object:never@1s+1s", "500, 503, 403"),
            ("disk:hang@1+1s", "500ms, 20s, 5m or 1h"),
            ("disk:hang@1s+99999999999s", "500ms, 20s, 5m or 1h"),
            ("disk:eio@1s+1s x0", "x1 or more"),
        ] {
            let error = text.parse::<Episode>().unwrap_err().to_string();
            assert!(error.contains(remedy), "{text}: {error}");
        }
    }
}
