//! Markdown files of the repository, and what tests want to know of them.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

/// The repository.
pub(super) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace")
}

/// A Markdown file.
pub(super) struct Page {
    /// Where it is, from the root.
    pub(super) path: PathBuf,
    pub(super) text: String,
}

/// A fenced block.
pub(super) struct Block {
    /// `docs/page.md:12`.
    pub(super) at: String,
    pub(super) language: String,
    /// What stands behind the language.
    pub(super) rule: String,
    pub(super) text: String,
}

/// All that people read: the files at the root, and what lies below `docs` and `python`.
pub(super) fn pages() -> Vec<Page> {
    let mut paths = Vec::new();
    for name in ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "python/README.md"] {
        paths.push(PathBuf::from(name));
    }
    find(Path::new("docs"), &mut paths);
    paths.sort();
    paths.into_iter().map(Page::read).collect()
}

fn find(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root().join(dir)).expect("a folder of pages") {
        let path = dir.join(entry.expect("an entry").file_name());
        if root().join(&path).is_dir() {
            find(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            into.push(path);
        }
    }
}

impl Page {
    pub(super) fn read(path: PathBuf) -> Self {
        let text = fs::read_to_string(root().join(&path));
        Self { text: text.unwrap_or_else(|error| panic!("{}: {error}", path.display())), path }
    }

    fn line(&self, offset: usize) -> usize {
        self.text[..offset].matches('\n').count() + 1
    }

    fn events(&self) -> impl Iterator<Item = (Event<'_>, std::ops::Range<usize>)> {
        Parser::new_ext(&self.text, Options::ENABLE_TABLES).into_offset_iter()
    }

    /// Its fenced blocks. What is indented is a formula or the like.
    pub(super) fn blocks(&self) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        let mut inside = false;
        for (event, range) in self.events() {
            match event {
                Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(info))) => {
                    let (language, rule) = info.split_once(' ').unwrap_or((&info, ""));
                    let at = format!("{}:{}", self.path.display(), self.line(range.start));
                    let (language, rule) = (language.to_owned(), rule.trim().to_owned());
                    blocks.push(Block { at, language, rule, text: String::new() });
                    inside = true;
                }
                Event::End(TagEnd::CodeBlock) => inside = false,
                Event::Text(text) if inside => {
                    blocks.last_mut().expect("a block").text.push_str(&text);
                }
                _ => {}
            }
        }
        blocks
    }

    /// Where its links and pictures point to, each with its line.
    pub(super) fn links(&self) -> Vec<(usize, String)> {
        let target = |(event, range): (Event<'_>, std::ops::Range<usize>)| match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                Some((self.line(range.start), dest_url.to_string()))
            }
            _ => None,
        };
        self.events().filter_map(target).collect()
    }

    /// The anchors of its headings, as mdBook and GitHub make them.
    pub(super) fn anchors(&self) -> BTreeSet<String> {
        let mut anchors = BTreeSet::new();
        let mut seen = HashMap::<String, usize>::new();
        let mut heading: Option<String> = None;
        for (event, _) in self.events() {
            match event {
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::Text(text) | Event::Code(text) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&text);
                    }
                }
                Event::End(TagEnd::Heading(_)) => {
                    let anchor = anchor(&heading.take().expect("it began"));
                    let before = seen.entry(anchor.clone()).or_default();
                    anchors.insert(if *before == 0 {
                        anchor
                    } else {
                        format!("{anchor}-{before}")
                    });
                    *before += 1;
                }
                _ => {}
            }
        }
        anchors
    }
}

fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter_map(|letter| match letter {
        ' ' => Some('-'),
        '-' | '_' => Some(letter),
        _ => letter.is_alphanumeric().then_some(letter),
    });
    kept.flat_map(char::to_lowercase).collect()
}

#[test]
fn headings_have_the_anchors_of_github() {
    assert_eq!(anchor("What outlives the process"), "what-outlives-the-process");
    assert_eq!(anchor("`hazard`"), "hazard");
    assert_eq!(anchor("Chunks, and equal answers"), "chunks-and-equal-answers");
}
