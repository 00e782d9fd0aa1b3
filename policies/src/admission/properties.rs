//! What holds for every rule of [`AdmissionKind::ALL`], and within a budget.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use super::{
    Admission, AdmissionKind, Budget, Budgeted, Candidates, TierPair, TierShape, Trigger, WriteBack,
};
use crate::eviction::EvictionKind;
use crate::reuse::ReuseModel;
use crate::seam::{Access, Ended, Forest, Upkeep};
use crate::simulation::hierarchy::{Hierarchy, Level};
use crate::simulation::workload::{BLOCK_TOKENS, Request, Workload};

const DEVICE: u32 = 6;
const HOST: u32 = 12;

const EDGE: TierPair = TierPair {
    upper: TierShape { capacity: DEVICE, eviction: EvictionKind::Lru },
    lower: TierShape { capacity: HOST, eviction: EvictionKind::Lru },
};

/// One question and its answer.
type Decision = (Candidates, Trigger, u64, u32);

/// Writes down what another rule decides, and checks it.
#[derive(Debug)]
struct Witness {
    inner: Box<dyn Admission>,
    seen: Arc<Mutex<Vec<Decision>>>,
}

impl Admission for Witness {
    fn touch(&mut self, access: &Access, forest: &dyn Forest) {
        self.inner.touch(access, forest);
    }

    fn needs_reuse(&self) -> bool {
        self.inner.needs_reuse()
    }

    fn finished(&mut self, ended: &Ended) {
        self.inner.finished(ended);
    }

    fn upkeep(&mut self, work: &mut Vec<Upkeep>) {
        self.inner.upkeep(work);
    }

    fn admit(
        &mut self,
        candidates: Candidates,
        trigger: Trigger,
        now_ms: u64,
        forest: &dyn Forest,
        reuse: &ReuseModel,
    ) -> u32 {
        let admitted = self.inner.admit(candidates, trigger, now_ms, forest, reuse);
        assert!(admitted <= candidates.blocks);
        self.seen.lock().unwrap().push((candidates, trigger, now_ms, admitted));
        admitted
    }

    fn refund(&mut self, blocks: u32) {
        self.inner.refund(blocks);
    }
}

/// Hours of requests over few blocks, whose gaps are long enough for blocks to be given up.
fn requests() -> impl Strategy<Value = Vec<Request>> {
    let path = prop::collection::vec(1_u64..4, 1..6);
    prop::collection::vec((path, 0_u64..200_000, 0_u32..2_000), 0..120).prop_map(|requests| {
        let mut now_ms = 0;
        let request = |(path, gap_ms, output_length): (Vec<u64>, u64, u32)| {
            now_ms += gap_ms;
            let chained = path.iter().scan(0, |chain, step| {
                *chain = *chain * 4 + step;
                Some(*chain)
            });
            let input_length = path.len() as u32 * BLOCK_TOKENS;
            Request {
                timestamp_ms: now_ms,
                input_length,
                output_length,
                hash_ids: chained.collect(),
            }
        };
        requests.into_iter().map(request).collect()
    })
}

/// Each rule as it is, and with a budget of a few blocks an hour.
fn rule() -> impl Strategy<Value = (AdmissionKind, Option<Budget>)> {
    let budget = prop::option::of((0_u64..500).prop_map(|bytes_per_day| Budget { bytes_per_day }));
    (prop::sample::select(&AdmissionKind::ALL), budget)
}

fn decisions(requests: &[Request], kind: AdmissionKind, budget: Option<Budget>) -> Vec<Decision> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let inner = match budget {
        Some(budget) => Box::new(Budgeted::new(kind.build(&EDGE), budget, 1)),
        None => kind.build(&EDGE),
    };
    let witness = Witness { inner, seen: Arc::clone(&seen) };
    let level = |capacity, admission| Level {
        capacity,
        eviction: EvictionKind::Lru.build(capacity),
        admission,
    };
    let levels = vec![level(DEVICE, Box::new(WriteBack)), level(HOST, Box::new(witness))];
    Hierarchy::of_levels(levels).simulate(&requests.iter().collect::<Workload>());
    std::mem::take(&mut *seen.lock().unwrap())
}

proptest! {
    #[test]
    fn the_same_history_gives_the_same_decisions(requests in requests(), rule in rule()) {
        prop_assert_eq!(decisions(&requests, rule.0, rule.1), decisions(&requests, rule.0, rule.1));
    }

    #[test]
    fn the_future_changes_no_decision(requests in requests(), rule in rule(), cut in 0_usize..120) {
        let all = decisions(&requests, rule.0, rule.1);
        let before = decisions(&requests[..cut.min(requests.len())], rule.0, rule.1);
        prop_assert_eq!(&all[..before.len()], before);
    }

    #[test]
    fn a_budget_is_kept(requests in requests(), kind in prop::sample::select(&AdmissionKind::ALL), bytes_per_day in 0_u64..500) {
        let all = decisions(&requests, kind, Some(Budget { bytes_per_day }));
        for (first, &(.., begin_ms, _)) in all.iter().enumerate() {
            let day = all[first..].iter().take_while(|(.., at_ms, _)| at_ms - begin_ms < 86_400_000);
            prop_assert!(day.map(|&(.., blocks)| u64::from(blocks)).sum::<u64>() <= bytes_per_day);
        }
    }
}

/// Chains that come back at once, and long ones that never do.
#[test]
fn what_never_returns_is_refused_in_the_end() {
    let request = |at: u64, chain: u64, blocks: u64| Request {
        timestamp_ms: at,
        input_length: blocks as u32 * BLOCK_TOKENS,
        output_length: 10,
        hash_ids: (0..blocks).map(|block| chain << 8 | block).collect(),
    };
    let mut requests = Vec::new();
    for turn in 0..2_000 {
        let now_ms = turn * 5_000;
        requests.push(request(now_ms, 2 * turn, 40));
        requests
            .extend((0..4).map(|at| request(now_ms + at * 1_200, 2 * (turn / 4 * 4 + at) + 1, 2)));
    }
    let all = decisions(&requests, AdmissionKind::Selective, None);
    let refused = |part: &[Decision]| {
        part.iter().filter(|(_, trigger, _, n)| *trigger == Trigger::Leaving && *n == 0).count()
    };
    let from = |now_ms| all.partition_point(|&(_, _, at_ms, _)| at_ms < now_ms);
    let (early, late) = (&all[..from(1_800_000)], &all[from(3_600_000)..]);
    assert!(refused(late) * 5 > late.len(), "{} of {}", refused(late), late.len());
    assert_eq!(refused(early), 0, "nothing can be given up before it has had the time to return");
}
