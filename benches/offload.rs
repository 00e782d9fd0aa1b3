//! What it costs a router to decide where a prompt is computed.
//!
//! `cargo bench -p kvbm-bench --bench offload`

use std::hint::black_box;

use criterion::Criterion;
use kvbm_policies::offload::{PrefillCosts, Prompt, QueueDepths};
use kvbm_policies::should_offload_prefill;

fn main() {
    let prompt = Prompt { tokens: 8_000, held_here: 1_024, held_there: 2_048 };
    let queues = QueueDepths { tokens_here: 4_000, tokens_there: 9_000, decoding_here: 12 };
    let costs =
        PrefillCosts { token_here: 1e-4, token_there: 1e-4, token_moved: 1e-5, hand_over: 0.01 };
    Criterion::default().bench_function("should_offload_prefill", |bencher| {
        bencher.iter(|| {
            should_offload_prefill(black_box(prompt), black_box(queues), black_box(costs))
        });
    });
}
