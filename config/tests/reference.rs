//! `docs/configuration.md` says what the code does.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use kvbm_settings::{Loader, reference_markdown};

#[test]
fn the_committed_reference_is_the_generated_one() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/configuration.md");
    if std::env::var_os("KVBM_BLESS").is_some() {
        fs::write(&page, reference_markdown()).expect("docs/ is writable");
    }
    let committed = fs::read_to_string(&page).unwrap_or_default();
    assert!(
        committed == reference_markdown(),
        "docs/configuration.md is out of date; write it anew with: KVBM_BLESS=1 cargo test -p kvbm-settings"
    );
}

#[test]
fn every_setting_is_in_the_reference() {
    let page = reference_markdown();
    for row in Loader::new().load().expect("the defaults are valid").rows() {
        assert!(page.contains(&format!("| `{}", row.key)), "{}", row.key);
    }
}

#[test]
fn the_example_in_the_reference_loads() {
    let page = reference_markdown();
    let (_, rest) = page.split_once("```toml run\n").expect("there is an example");
    let (example, _) = rest.split_once("```").expect("it ends");
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(example.as_bytes()).expect("it is written");
    Loader::new().file(file.path()).load().expect("the example is valid");
}
