//! What the engine says with kvbm is what it says without, bit for bit, and it computes less.

use std::time::Duration;

use candle_core::Tensor;
use candle_transformers::models::llama2_c::{Cache, Config};
use kvbm::{RequestInfo, Tier};
use kvbm_example_llama::engine::{Answer, CHUNK_TOKENS, Engine};
use kvbm_example_llama::model::Model;
use kvbm_example_llama::prefix_cache::{BLOCK_TOKENS, PrefixCache};
use kvbm_settings::{Capacity, Settings};

const GENERATED: usize = 16;
const SHARED: usize = 3 * CHUNK_TOKENS;

fn tiny() -> Model {
    let config = Config {
        dim: 64,
        hidden_dim: 128,
        n_layers: 3,
        n_heads: 4,
        n_kv_heads: 2,
        vocab_size: 256,
        seq_len: 512,
        norm_eps: 1e-5,
    };
    Model::random(config, 7).unwrap()
}

fn engine(change: impl FnOnce(&mut Settings)) -> Engine {
    let model = tiny();
    let mut settings = Settings::default();
    settings.host.capacity = Some(Capacity::Blocks(256));
    change(&mut settings);
    let prefixes = PrefixCache::open(model.config(), "tiny, seed 7", settings).unwrap();
    Engine::new(&model, Some(prefixes)).unwrap()
}

/// `tokens` tokens, of which the leading [`SHARED`] are the same for all `number`s.
fn prompt(number: u32, tokens: usize) -> Vec<u32> {
    let token =
        |at: usize| ((at * at + 3 * at) as u32 + if at < SHARED { 0 } else { number }) % 251;
    (0..tokens).map(token).collect()
}

fn cold(prompt: &[u32]) -> Answer {
    Engine::new(&tiny(), None).unwrap().answer(prompt, GENERATED).unwrap()
}

#[track_caller]
fn assert_same(a: &Answer, b: &Answer) {
    assert_eq!((a.tokens.len(), a.logits.len()), (GENERATED, GENERATED));
    assert_eq!(a.tokens, b.tokens);
    assert_eq!(bits(&a.logits.concat()), bits(&b.logits.concat()));
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

fn kv_bits(cache: &Cache) -> Vec<Vec<u32>> {
    let flat = |tensor: &Tensor| bits(&tensor.flatten_all().unwrap().to_vec1().unwrap());
    cache.kvs.iter().flatten().flat_map(|(k, v)| [flat(k), flat(v)]).collect()
}

#[test]
fn a_loaded_beginning_is_as_good_as_the_engines_own() {
    let engine = engine(|_| {});
    let first = engine.answer(&prompt(1, 230), GENERATED).unwrap();
    assert_eq!((first.loaded, first.saved), (0, SHARED));
    assert_same(&first, &cold(&prompt(1, 230)));

    // The engine's own cache of the beginning, and what it goes on to say with another end.
    let second = prompt(2, 260);
    let mut own = engine.empty_cache();
    engine.prefill(&second[..SHARED], 0, &mut own).unwrap();
    let mut loaded = engine.empty_cache();
    let prefixes = engine.prefixes().unwrap();
    let tokens = prefixes
        .load(RequestInfo::default(), &prefixes.chain(&second), second.len(), &mut loaded.kvs)
        .unwrap();
    assert_eq!((tokens, kv_bits(&loaded)), (SHARED, kv_bits(&own)));
    let next = engine.prefill(&second, SHARED, &mut own).unwrap();
    let (own_tokens, own_logits) =
        engine.generate(next, second.len(), GENERATED, &mut own).unwrap();

    let answer = engine.answer(&second, GENERATED).unwrap();
    assert_eq!(answer.loaded, SHARED, "only the rest is computed");
    assert_eq!(
        (&answer.tokens, bits(&answer.logits.concat())),
        (&own_tokens, bits(&own_logits.concat()))
    );
    assert_same(&answer, &cold(&second));
}

#[test]
fn a_known_prompt_is_computed_from_its_last_chunk() {
    let engine = engine(|_| {});
    for tokens in [1, 15, CHUNK_TOKENS, CHUNK_TOKENS + 1, 4 * CHUNK_TOKENS, 4 * CHUNK_TOKENS + 17] {
        let prompt = prompt(tokens as u32, tokens);
        engine.answer(&prompt, GENERATED).unwrap();
        let again = engine.answer(&prompt, GENERATED).unwrap();
        assert_eq!(again.loaded, (tokens - 1) / CHUNK_TOKENS * CHUNK_TOKENS, "of {tokens}");
        assert_same(&again, &cold(&prompt));
    }
    assert!(engine.answer(&[], 1).is_err());
}

#[test]
fn a_beginning_that_went_to_disk_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(|settings| {
        settings.disk.capacity = Some(Capacity::Blocks(256));
        settings.disk.dirs = vec![dir.path().join("slots")];
    });
    engine.answer(&prompt(1, 300), 1).unwrap();
    let manager = engine.prefixes().unwrap().blocks().manager();
    assert!(manager.drain(Duration::from_secs(20)).is_complete());
    manager.admin().evict(Tier::Host, usize::MAX);
    assert_eq!(manager.admin().counts(Tier::Host).resident, 0);
    let answer = engine.answer(&prompt(2, 300), GENERATED).unwrap();
    assert_eq!(answer.loaded, SHARED);
    assert_same(&answer, &cold(&prompt(2, 300)));
    assert!(manager.close(Duration::from_secs(20)).is_complete());
    assert!(engine.answer(&prompt(2, 300), 1).is_err(), "a manager that is closed says so");
}

/// Ten blocks are two chunks and a half.
#[test]
fn half_a_chunk_is_computed_anew() {
    let engine = engine(|settings| settings.host.capacity = Some(Capacity::Blocks(10)));
    let first = engine.answer(&prompt(1, 300), GENERATED).unwrap();
    assert_eq!(first.saved, 10 * BLOCK_TOKENS);
    let again = engine.answer(&prompt(1, 300), GENERATED).unwrap();
    assert_eq!(again.loaded, 2 * CHUNK_TOKENS);
    assert_same(&again, &first);
}

/// A model that says the same whatever it has read would pass all of the above.
#[test]
fn the_beginning_of_a_prompt_matters() {
    let engine = engine(|_| {});
    let mut other = prompt(1, 300);
    let answer = engine.answer(&other, GENERATED).unwrap();
    other[0] += 1;
    let changed = engine.answer(&other, GENERATED).unwrap();
    assert_eq!(changed.loaded, 0);
    assert!(answer.logits[0] != changed.logits[0]);
    let mut cache = engine.empty_cache();
    engine.prefill(&other, 0, &mut cache).unwrap();
    let zero = |part: &Vec<u32>| part.iter().filter(|&&number| number == 0).count();
    assert!(kv_bits(&cache).iter().all(|part| zero(part) < part.len() / 100), "K or V is empty");
}
