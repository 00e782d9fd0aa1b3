//! Settings that pages speak of exist.

use std::collections::BTreeSet;

use super::markdown::{Page, pages};

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|letter: char| !(letter.is_alphanumeric() || "_.".contains(letter)))
        .map(|word| word.trim_matches('.'))
}

fn known() -> BTreeSet<String> {
    words(&Page::read("docs/configuration.md".into()).text).map(str::to_owned).collect()
}

/// Sections of the settings file. Plugins of NIXL have any keys, and `metrics.` is a page as well.
const SECTIONS: [&str; 8] =
    ["device.", "host.", "disk.", "object.", "transfer.", "flush.", "hybrid.", "encryption."];

fn is_setting(word: &str) -> bool {
    let is_key = |key: &str| {
        !key.is_empty() && key.chars().all(|letter| letter == '_' || letter.is_ascii_lowercase())
    };
    // Names of files.
    if [".md", ".rs", ".json", ".keys", ".leader"].iter().any(|suffix| word.ends_with(suffix)) {
        return false;
    }
    // A prefix such as `DYN_KVBM_` stands for all that begin so.
    let is_variable =
        word.starts_with("DYN_KVBM_") && !word.ends_with('_') && word != "DYN_KVBM_CONFIG";
    is_variable || SECTIONS.iter().any(|section| word.strip_prefix(section).is_some_and(is_key))
}

#[test]
fn settings_that_pages_speak_of_exist() {
    let known = known();
    let mut wrong = Vec::new();
    for page in pages() {
        // It speaks of what was.
        if page.path.ends_with("CHANGELOG.md") {
            continue;
        }
        let unknown: BTreeSet<_> =
            words(&page.text).filter(|word| is_setting(word) && !known.contains(*word)).collect();
        wrong.extend(unknown.into_iter().map(|word| format!("{}: {word}", page.path.display())));
    }
    assert!(wrong.is_empty(), "not in docs/configuration.md:\n{}", wrong.join("\n"));
}

#[test]
fn a_setting_that_is_not_there_is_seen() {
    for word in ["disk.capasity", "DYN_KVBM_NONSENSE"] {
        assert!(is_setting(word) && !known().contains(word), "{word}");
    }
    assert!(!is_setting("disk.rs.bak") && !is_setting("DYN_KVBM_") && !is_setting("vllm.md"));
}
