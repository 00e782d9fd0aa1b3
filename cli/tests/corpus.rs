//! What fuzzing starts from and what it found is replayed, and variants of it: `fuzz/src/lib.rs`
//! says what must hold.

use std::fs;
use std::path::{Path, PathBuf};

use kvbm_fuzz::TARGETS;

/// Variants of each file. `tests/fuzz.sh` looks further.
const VARIANTS: u64 = 300;

#[test]
fn every_target_has_files_to_start_from_and_a_fuzzer() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
    for (name, _) in TARGETS {
        assert!(!files(name).is_empty(), "nothing in fuzz/corpus/{name}");
        let target = fuzz.join("targets").join(name).with_extension("rs");
        let text = fs::read_to_string(target).unwrap();
        assert!(text.contains(&format!("kvbm_fuzz::{name}(bytes)")), "{text}");
    }
    let listed = |dir: &str| fs::read_dir(fuzz.join(dir)).unwrap().count();
    assert_eq!((listed("targets"), listed("corpus")), (TARGETS.len(), TARGETS.len()));
}

#[test]
fn no_bytes_in_or_near_the_corpus_make_readers_panic() {
    for (name, read) in TARGETS {
        for path in files(name) {
            let bytes = fs::read(&path).unwrap();
            read(&bytes);
            for seed in 0..VARIANTS {
                let variant = variant(&bytes, seed);
                let outcome = std::panic::catch_unwind(|| read(&variant));
                assert!(outcome.is_ok(), "variant {seed} of {}: {variant:?}", path.display());
            }
        }
    }
}

fn files(name: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(name);
    let entries = fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// Some bytes changed, cut out or said twice.
fn variant(bytes: &[u8], seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = bytes.to_vec();
    for _ in 0..random.usize(1..4) {
        let at = random.usize(..=bytes.len());
        let end = (at + random.usize(..9)).min(bytes.len());
        match random.u8(..5) {
            0 => drop(bytes.drain(at..end)),
            1 => bytes.truncate(at),
            2 => bytes.extend_from_within(at..end),
            3 => bytes[at..end].fill(random.u8(..)),
            _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << random.u8(..8)),
        }
    }
    bytes
}
