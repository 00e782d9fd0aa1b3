//! The manager under criterion: match and cycle at 65,536 and a million blocks, with the default
//! policy.
//!
//! `cargo bench -p kvbm-bench --bench table`

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvbm_cli::measuring::chains::{Prompts, Random, SHORT};
use kvbm_cli::measuring::rounds::{FullTier, Picks};
use kvbm_cli::measuring::subject::{OurManager, Subject, device_of};
use kvbm_settings::EvictionKind;

const SIZES: [usize; 2] = [65_536, 1_000_000];

fn matches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("match");
    for blocks in SIZES {
        let prompts = Prompts::new(blocks);
        let ours = OurManager::holding(&prompts, EvictionKind::default());
        for (len, prompts) in
            [(65_536, &prompts.longest), (8192, &prompts.long), (288, &prompts.medium)]
        {
            let mut picks = Picks::new(prompts.len());
            group.bench_function(BenchmarkId::new(len.to_string(), blocks), |bencher| {
                let arrive = || prompts[picks.pick()].hashes.clone();
                bencher.iter_batched(
                    arrive,
                    |chain| ours.match_prompt(&chain),
                    BatchSize::PerIteration,
                );
            });
        }
    }
}

fn cycle(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("cycle");
    group.throughput(Throughput::Elements(SHORT as u64));
    for blocks in SIZES {
        let tier =
            FullTier::new(OurManager::open(device_of(blocks, EvictionKind::default())), blocks);
        let mut random = Random::new(6);
        group.bench_function(BenchmarkId::from_parameter(blocks), |bencher| {
            let publish = |chain: Vec<_>| tier.subject().publish(&chain, 0);
            bencher.iter_batched(|| random.chain(SHORT), publish, BatchSize::SmallInput);
        });
    }
}

criterion_group! {
    name = table;
    config = Criterion::default().sample_size(50).measurement_time(std::time::Duration::from_secs(3));
    targets = matches, cycle
}
criterion_main!(table);
