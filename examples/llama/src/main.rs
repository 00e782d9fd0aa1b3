//! Runs a prompt, and then others that begin like it; prints one JSON object with what that saved.

use std::time::Duration;

use anyhow::{Result, ensure};
use kvbm_example_llama::engine::{Answer, Engine};
use kvbm_example_llama::model::{self, Model};
use kvbm_example_llama::prefix_cache::PrefixCache;
use kvbm_settings::{Capacity, Settings};
use serde_json::json;

const PROMPT_TOKENS: usize = 1024;
const SHARED_TOKENS: [usize; 3] = [512, 768, 960];
const GENERATED: usize = 8;
const ROUNDS: u64 = 3;
const SEED: u64 = 1;

fn main() -> Result<()> {
    let model = Model::random(model::small(), SEED)?;
    let rows = SHARED_TOKENS.map(|shared| measure(&model, shared));
    let rows = rows.into_iter().collect::<Result<Vec<_>>>()?;
    println!("{}", json!({ "prompt_tokens": PROMPT_TOKENS, "rounds": ROUNDS, "shared": rows }));
    Ok(())
}

/// Medians, in milliseconds, over prompts that share `shared` tokens with one that came before.
fn measure(model: &Model, shared: usize) -> Result<serde_json::Value> {
    let mut settings = Settings::default();
    settings.host.capacity = Some(Capacity::Bytes(256 << 20));
    let prefixes = PrefixCache::open(model.config(), "random weights, seed 1", settings)?;
    let (with, without) = (Engine::new(model, Some(prefixes))?, Engine::new(model, None)?);
    with.answer(&prompt(shared, 0), GENERATED)?;
    let (mut cold, mut warm, mut load, mut save) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        let prompt = prompt(shared, round);
        let (computed, loaded) =
            (without.answer(&prompt, GENERATED)?, with.answer(&prompt, GENERATED)?);
        ensure!(loaded.loaded == shared, "{} of {shared} tokens were loaded", loaded.loaded);
        ensure!(
            computed.tokens == loaded.tokens && computed.logits == loaded.logits,
            "another answer"
        );
        cold.push(computed.took.prefill);
        warm.push(first_token(&loaded));
        load.push(loaded.took.load);
        save.push(loaded.took.save);
    }
    let (cold, warm) = (median_ms(cold), median_ms(warm));
    Ok(json!({
        "shared_tokens": shared,
        "cold_ms": cold,
        "warm_ms": warm,
        "saved_ms": cold - warm,
        "load_ms": median_ms(load),
        "save_ms": median_ms(save),
    }))
}

/// Until the first token is known.
fn first_token(answer: &Answer) -> Duration {
    answer.took.load + answer.took.prefill
}

/// Tokens of which the leading `shared` are the same whatever the `number`.
fn prompt(shared: usize, number: u64) -> Vec<u32> {
    let vocabulary = model::small().vocab_size as u32;
    let tokens = |seed, count| {
        let mut random = fastrand::Rng::with_seed(seed);
        std::iter::repeat_with(move || random.u32(..vocabulary)).take(count)
    };
    tokens(SEED, shared).chain(tokens(100 + number, PROMPT_TOKENS - shared)).collect()
}

fn median_ms(mut samples: Vec<Duration>) -> f64 {
    samples.sort();
    samples[samples.len() / 2].as_secs_f64() * 1e3
}
