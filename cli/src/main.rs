//! The `kvbm` command.
fn main() {}
