//! Figures over real traces, which are not part of the repository: the hit rates of the hazard
//! policy, and how far estimates from samples are off.

mod traces;

use kvbm_policies::{
    BLOCK_TOKENS, EvictionKind, MissRatio, Policy, Request, Sample, TraceThinning, Workload,
};
use traces::load;

/// The floor in per cent by capacity in blocks: what a published policy of this kind reached, less
/// 0.3 points.
const CONVERSATION: [(u32, f64); 6] = [
    (1_000, 7.90),
    (3_000, 13.77),
    (5_000, 17.76),
    (10_000, 24.73),
    (20_000, 31.37),
    (30_000, 34.24),
];
const AGENTIC: [(u32, f64); 4] = [(1_000, 36.66), (5_000, 77.65), (10_000, 91.50), (20_000, 95.00)];

#[test]
fn conversations_hit_as_often_as_published() {
    check("conversation.jsonl.gz", &CONVERSATION);
}

#[test]
fn agents_hit_as_often_as_published() {
    check("agentic.jsonl.gz", &AGENTIC);
}

fn check(trace: &str, floors: &[(u32, f64)]) {
    let Some(workload) = load(trace).map(|requests| requests.iter().collect::<Workload>()) else {
        return;
    };
    // Without optimisation one figure takes as long as all do with it.
    let floors = if cfg!(debug_assertions) { &floors[1..2] } else { floors };
    for &(capacity, floor) in floors {
        let percent =
            |kind| Policy::Online(kind).simulate(&workload, capacity).token_hit_rate() * 100.0;
        let (hazard, lru) = (percent(EvictionKind::Hazard), percent(EvictionKind::Lru));
        eprintln!("{trace} at {capacity}: hazard {hazard:.2} %, lru {lru:.2} %");
        assert!(hazard >= floor, "{trace} at {capacity}: {hazard:.2} % is below {floor}");
        assert!(
            hazard >= lru - 0.1,
            "{trace} at {capacity}: {hazard:.2} % is below lru, {lru:.2} %"
        );
    }
}

/// In points: what the policies of a tier that has just begun may differ by.
const YOUNG_LOSS: f64 = 0.2;

#[test]
fn young_hazard_hits_as_often_as_lru() {
    for trace in ["conversation.jsonl.gz", "agentic.jsonl.gz"] {
        let Some(requests) = load(trace) else { return };
        for first in [100, 200, 400, 600] {
            let workload: Workload = requests.iter().take(first).collect();
            for capacity in [100, 300, 1_000] {
                let [hazard, lru] = [EvictionKind::Hazard, EvictionKind::Lru]
                    .map(|kind| 100.0 * rate(kind, &workload, capacity));
                eprintln!(
                    "{trace}, first {first} at {capacity}: hazard {hazard:.2} %, lru {lru:.2} %"
                );
                assert!(
                    hazard >= lru - YOUNG_LOSS,
                    "{trace}, first {first} at {capacity}: {hazard:.2} %, {lru:.2} %"
                );
            }
        }
    }
}

const CAPACITIES: [u32; 8] = [1_000, 3_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000];

#[test]
fn a_curve_is_off_by_little() {
    for (trace, limits) in [("conversation.jsonl.gz", (0.5, 1.5)), ("agentic.jsonl.gz", (0.3, 1.5))]
    {
        let Some(requests) = load(trace) else { return };
        let workload: Workload = requests.iter().collect();
        let lru = CAPACITIES.map(|capacity| rate(EvictionKind::Lru, &workload, capacity));
        for horizon in [100_000, 200_000, 400_000] {
            let curves: Vec<_> = (0..8).map(|salt| curve(&requests, horizon, salt << 40)).collect();
            let estimates = curves
                .iter()
                .map(|curve| CAPACITIES.map(|capacity| curve.token_hit_rate(capacity)));
            check_errors(
                &format!("{trace}, curve up to {horizon} blocks"),
                &lru,
                estimates,
                limits,
            );
        }
    }
}

#[test]
fn a_miniature_is_off_by_little() {
    for trace in ["conversation.jsonl.gz", "agentic.jsonl.gz"] {
        let Some(requests) = load(trace) else { return };
        let workload: Workload = requests.iter().collect();
        for kind in [EvictionKind::Lru, EvictionKind::Hazard] {
            // Without optimisation hazard takes too long for all of them.
            let capacities = if cfg!(debug_assertions) { &CAPACITIES[1..2] } else { &CAPACITIES };
            let exact: Vec<_> =
                capacities.iter().map(|&capacity| rate(kind, &workload, capacity)).collect();
            for stride in [5, 20] {
                let mut thinning = TraceThinning::new(Sample::one_in(stride));
                requests.iter().for_each(|request| thinning.push(request));
                let small = thinning.finish();
                let estimate =
                    |&capacity| small.simulate(Policy::Online(kind), capacity).token_hit_rate();
                let estimates = std::iter::once(capacities.iter().map(estimate));
                check_errors(
                    &format!("{trace}, {kind}, one block in {stride}"),
                    &exact,
                    estimates,
                    (1.0, 2.0),
                );
            }
        }
    }
}

fn rate(kind: EvictionKind, workload: &Workload, capacity: u32) -> f64 {
    Policy::Online(kind).simulate(workload, capacity).token_hit_rate()
}

/// Another salt takes another sample.
fn curve(requests: &[Request], horizon: u32, salt: u64) -> MissRatio {
    let mut curve = MissRatio::new(horizon, BLOCK_TOKENS);
    for request in requests {
        let path = request.full_blocks();
        curve.observe(path.len(), |at| path[at] ^ salt, request.input_length);
    }
    curve
}

/// `limits` are those of the mean and of the largest absolute error, in points.
fn check_errors(
    what: &str,
    exact: &[f64],
    estimates: impl Iterator<Item = impl IntoIterator<Item = f64>>,
    limits: (f64, f64),
) {
    let errors = estimates
        .flat_map(|rates| rates.into_iter().zip(exact).map(|(rate, exact)| (rate - exact).abs()));
    let errors: Vec<_> = errors.map(|error| error * 100.0).collect();
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    let largest = errors.iter().copied().fold(0.0, f64::max);
    eprintln!("{what}: off by {mean:.2} points on average, {largest:.2} at most");
    assert!(mean < limits.0 && largest < limits.1, "{what}: {mean:.2}, {largest:.2}");
}
