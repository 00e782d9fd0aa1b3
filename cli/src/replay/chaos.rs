//! A replay while media misbehave: what goes wrong, and how that is told from what must not.

use std::collections::BTreeMap;
use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args;
use kvbm_settings::Settings;
use kvbm_tiers::chaos::{Chaos, Episode, Kind, Medium, Schedule};
use serde::Serialize;

use crate::engine::{RecoveryTally, SimulatedEngine};
use crate::output::CommandFailure;

/// What is to go wrong. It ends at the latest with the last request, so that the replay can see
/// whether everything works again.
#[derive(Clone, Debug, Args)]
pub(super) struct ChaosArgs {
    /// Let memory copies, the disk, the object store and the clock misbehave; the same seed draws
    /// the same faults
    #[arg(long, value_name = "SEED")]
    chaos: Option<u64>,
    /// Let one medium misbehave
    #[arg(
        long,
        value_name = "FAULT",
        help = "Let one medium misbehave: MEDIUM[.read|.write]:KIND@START+LENGTH[ xN], such as disk:hang@100s+20s"
    )]
    fault: Vec<Episode>,
}

/// The faults of a run, and the count of what must not happen.
#[derive(Debug)]
pub(super) struct ChaosTrouble {
    seed: Option<u64>,
    chaos: Chaos,
    panics: Arc<AtomicU64>,
}

impl ChaosArgs {
    /// `None`: all shall be well. From here on panics are counted.
    pub(super) fn trouble(&self, settings: &Settings) -> Option<ChaosTrouble> {
        let drawn = self.chaos.map(|seed| Schedule::seeded(seed, &media(settings)));
        let scripted =
            (!self.fault.is_empty()).then(|| Schedule::scripted(self.fault.iter().copied()));
        let schedule = match (drawn, scripted) {
            (Some(drawn), Some(scripted)) => drawn.and(scripted),
            (one, other) => one.or(other)?,
        };
        Some(ChaosTrouble { seed: self.chaos, chaos: Chaos::new(schedule), panics: count_panics() })
    }
}

fn media(settings: &Settings) -> Vec<Medium> {
    let tiers = [
        (settings.host.capacity.is_some(), Medium::Memory),
        (settings.disk.capacity.is_some(), Medium::Disk),
        (settings.object.url.is_some(), Medium::Object),
        (true, Medium::Clock),
    ];
    tiers.into_iter().filter_map(|(is_there, medium)| is_there.then_some(medium)).collect()
}

/// Counts them in all threads; each is still reported as before.
fn count_panics() -> Arc<AtomicU64> {
    let panics = Arc::new(AtomicU64::new(0));
    let (count, report) = (Arc::clone(&panics), panic::take_hook());
    panic::set_hook(Box::new(move |info| {
        count.fetch_add(1, Ordering::Relaxed);
        report(info);
    }));
    panics
}

impl ChaosTrouble {
    pub(super) fn chaos(&self) -> Chaos {
        self.chaos.clone()
    }

    /// Copies that were made never to complete.
    pub(super) fn never_completing(&self) -> u64 {
        self.chaos.injected().get(&Kind::Never).copied().unwrap_or_default()
    }

    /// Ends all faults and sees whether everything works again.
    pub(super) fn heal(&self, engine: &SimulatedEngine) -> Result<RecoveryTally, CommandFailure> {
        self.chaos.heal();
        engine.recover()
    }
}

/// What a replay with faults reports besides.
#[derive(Debug, Serialize)]
pub(super) struct ChaosReport {
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    /// Operations that were hit, by kind of fault.
    injected: BTreeMap<&'static str, u64>,
    /// Blocks that were handed out with a wrong byte.
    served_wrong: u64,
    /// Requests given up because an answer did not come in any reasonable time.
    hangs: u64,
    panics: u64,
    /// Copies that are overdue at the end: as many as were made never to complete.
    overdue: u64,
    /// From the end of the last fault until fresh blocks could be saved, flushed and loaded in
    /// every tier; nothing if that never was so.
    recovered_s: Option<f64>,
    /// Slots that are neither free nor hold a block, nor belong to an overdue copy.
    missing_slots: u64,
}

impl ChaosReport {
    pub(super) fn new(
        trouble: &ChaosTrouble,
        recovery: &RecoveryTally,
        mismatches: u64,
        hangs: u64,
        engine: &SimulatedEngine,
    ) -> Self {
        let injected = trouble.chaos.injected().into_iter();
        let (slots, staging) = (engine.slots(), engine.manager().admin().staging());
        Self {
            seed: trouble.seed,
            injected: injected.map(|(kind, count)| (kind.name(), count)).collect(),
            served_wrong: mismatches + recovery.mismatches,
            hangs: hangs + recovery.hangs,
            panics: trouble.panics.load(Ordering::Relaxed),
            overdue: engine.manager().admin().overdue(),
            recovered_s: recovery.after.map(|after| (after.as_secs_f64() * 1e3).round() / 1e3),
            missing_slots: slots.iter().map(|(_, counts)| u64::from(counts.filling)).sum::<u64>()
                + (staging.total - staging.idle - staging.lost) as u64,
        }
    }

    /// Everything that is not as it must be.
    pub(super) fn faults(&self) -> Vec<String> {
        let never = self.injected.get(Kind::Never.name()).copied().unwrap_or_default();
        let mut wrong = Vec::new();
        for (count, what) in [
            (self.served_wrong, "blocks with wrong bytes"),
            (self.hangs, "requests that hung"),
            (self.panics, "panics"),
            (self.missing_slots, "slots that are neither free nor hold a block"),
        ] {
            if count > 0 {
                wrong.push(format!("{count} {what}"));
            }
        }
        if self.overdue != never {
            wrong.push(format!("{} copies overdue where {never} never complete", self.overdue));
        }
        if self.recovered_s.is_none() {
            wrong.push("a tier that does not work again".to_owned());
        }
        wrong
    }

    /// For people.
    pub(super) fn summary(&self) -> String {
        let injected: Vec<_> =
            self.injected.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        let recovered = match self.recovered_s {
            Some(seconds) => format!("all tiers worked again {seconds:.1} s after the last"),
            None => "not all tiers work again".to_owned(),
        };
        format!(
            "faults: {}; {recovered}; {} wrong blocks, {} hung requests, {} panics, {} copies overdue.",
            injected.join(", "),
            self.served_wrong,
            self.hangs,
            self.panics,
            self.overdue,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn well() -> ChaosReport {
        ChaosReport {
            seed: Some(1),
            injected: BTreeMap::from([("never", 2), ("eio", 7)]),
            served_wrong: 0,
            hangs: 0,
            panics: 0,
            overdue: 2,
            recovered_s: Some(0.5),
            missing_slots: 0,
        }
    }

    #[test]
    fn a_replay_passes_only_if_nothing_is_wrong() {
        assert_eq!(well().faults(), [""; 0]);
        let wrong = [
            ChaosReport { served_wrong: 1, ..well() },
            ChaosReport { hangs: 1, ..well() },
            ChaosReport { panics: 1, ..well() },
            ChaosReport { missing_slots: 1, ..well() },
            ChaosReport { overdue: 1, ..well() },
            ChaosReport { overdue: 3, ..well() },
            ChaosReport { recovered_s: None, ..well() },
        ];
        wrong.iter().for_each(|report| assert_eq!(report.faults().len(), 1, "{report:?}"));
    }

    #[test]
    fn panics_of_other_threads_are_counted() {
        let panics = count_panics();
        std::thread::spawn(|| panic!("on purpose")).join().unwrap_err();
        assert!(panics.load(Ordering::Relaxed) >= 1);
    }
}
