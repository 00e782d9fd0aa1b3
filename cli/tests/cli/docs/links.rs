//! What pages point to is there.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use super::markdown::{Page, pages, root};

/// Without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                assert!(normal.pop(), "{} is outside of the repository", path.display());
            }
            Component::CurDir => {}
            other => normal.push(other),
        }
    }
    normal
}

fn is_elsewhere(link: &str) -> bool {
    ["http://", "https://", "mailto:"].iter().any(|scheme| link.starts_with(scheme))
}

/// What is wrong with a link, if anything.
fn trouble(page: &Page, link: &str) -> Option<String> {
    let (file, anchor) =
        link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
    let target = match file {
        "" => page.path.clone(),
        file => normal(&page.path.parent().expect("a file").join(file)),
    };
    if !root().join(&target).exists() {
        return Some(format!("{} is not there", target.display()));
    }
    // mdBook copies what lies in docs.
    if page.path.starts_with("docs") && !target.starts_with("docs") {
        return Some(format!("{} is not in the book", target.display()));
    }
    let anchor = anchor?;
    let has = Page::read(target.clone()).anchors().contains(anchor);
    (!has).then(|| format!("{} has no heading #{anchor}", target.display()))
}

#[test]
fn every_link_leads_somewhere() {
    let mut wrong = Vec::new();
    for page in pages() {
        for (line, link) in page.links() {
            if let Some(trouble) = (!is_elsewhere(&link)).then(|| trouble(&page, &link)).flatten() {
                wrong.push(format!("{}:{line}: {trouble}", page.path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_link_that_leads_nowhere_is_seen() {
    let page = Page::read("docs/architecture.md".into());
    assert_eq!(trouble(&page, "#states"), None);
    assert_eq!(trouble(&page, "alerts/rules.yml"), None);
    assert!(trouble(&page, "../README.md").is_some());
    assert!(trouble(&page, "#nowhere").is_some());
    assert!(trouble(&page, "nowhere.md").is_some());
    assert!(trouble(&page, "reliability.md#nowhere").is_some());
}

#[test]
fn the_book_has_every_page() {
    let summary = Page::read("docs/SUMMARY.md".into());
    let listed: Vec<PathBuf> =
        summary.links().iter().map(|(_, link)| normal(&Path::new("docs").join(link))).collect();
    let in_book: BTreeSet<&PathBuf> = listed.iter().collect();
    assert_eq!(in_book.len(), listed.len(), "a page is in docs/SUMMARY.md twice");
    let all = pages();
    let of_book = all.iter().map(|page| &page.path).filter(|path| path.starts_with("docs"));
    let missing: Vec<_> =
        of_book.filter(|path| **path != summary.path && !in_book.contains(path)).collect();
    assert!(missing.is_empty(), "docs/SUMMARY.md lacks {missing:?}");
}
