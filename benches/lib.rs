//! Criterion benches live in the files beside this one.
