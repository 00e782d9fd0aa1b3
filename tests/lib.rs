//! Tests of behaviour across crates: each file beside this one is one test target.
