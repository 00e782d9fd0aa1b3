//! What must hold of every format that is read, whatever the bytes: each function here takes bytes
//! that anybody may have written, and panics if their reader does, or if what it understood is not
//! read again from what we write.
//!
//! | target | reads |
//! |---|---|
//! | [`trace`] | request traces, plain and compressed |
//! | [`settings`] | TOML files and variables |
//! | [`segment_footer`] | the end of a segment object |
//! | [`sealed_footer`] | the same, authenticated |
//! | [`main_keys`] | main keys, as an operator writes them |
//! | [`wrapped_key`], [`key_file`] | keys of tenants, wrapped, and the files that they lie in |
//! | [`manifest`] | which segments a worker relies on |
//! | [`tier_index`] | the index of a tier that outlives its process |
//! | [`rank_frame`] | what a leader and its ranks say to each other |
//! | [`peer_frame`] | what two workers say to each other |
//! | [`rank_debts`] | what ranks have yet to forget |
//!
//! `tests/fuzz.sh` has libFuzzer look for bytes of which it does not hold. The files in `corpus`
//! are what it starts from; `cli/tests/corpus.rs` replays them, and variants of them, with all
//! other tests.

mod keys;
mod manifest;
mod segment;
mod settings;
mod trace;

pub use keys::{key_file, main_keys, wrapped_key};
pub use kvbm::read_peer_frame as peer_frame;
pub use kvbm_tiers::index::read_in_every_way as tier_index;
pub use kvbm_tiers::object::segment::read_sealed_in_every_way as sealed_footer;
pub use kvbm_tiers::ranks::{read_debts as rank_debts, read_in_every_way as rank_frame};
pub use manifest::manifest;
pub use segment::segment_footer;
pub use settings::settings;
pub use trace::trace;

/// All of them, by the names of their targets and of the directories in `corpus`.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("key_file", key_file),
    ("main_keys", main_keys),
    ("manifest", manifest),
    ("peer_frame", peer_frame),
    ("rank_debts", rank_debts),
    ("rank_frame", rank_frame),
    ("sealed_footer", sealed_footer),
    ("segment_footer", segment_footer),
    ("settings", settings),
    ("tier_index", tier_index),
    ("trace", trace),
    ("wrapped_key", wrapped_key),
];
