//! A TOML file as a list of `path = value`, each with its line.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use toml::de::{DeTable, DeValue};

use crate::error::SettingsError;
use crate::field::RawValue;
use crate::registry::KEYS;

/// One `key = value` of the file.
pub(crate) struct FileEntry {
    /// Dotted path from the top.
    pub(crate) path: String,
    pub(crate) raw: RawValue,
    /// Line of the key, from 1.
    pub(crate) line: usize,
}

/// Of a settings file, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// All entries of the file at `path`.
pub(crate) fn read(path: &Path) -> Result<Vec<FileEntry>, SettingsError> {
    let text =
        read_text(path).map_err(|source| SettingsError::Read { path: path.to_owned(), source })?;
    entries(path, &text)
}

/// All entries of `text`, which errors call `name`.
pub(crate) fn entries(name: &Path, text: &str) -> Result<Vec<FileEntry>, SettingsError> {
    // The parser's own display quotes the line, which may hold a secret: only its message goes on.
    parse(text).map_err(|error| SettingsError::Syntax {
        path: name.to_owned(),
        line: line_of(text, error.span().map_or(0, |span| span.start)),
        message: error.message().to_owned(),
    })
}

/// Whatever was named by mistake, a device or a trace, does not fill the memory.
fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            "larger than 1 MiB: is it a settings file?",
        ));
    }
    Ok(text)
}

fn parse(text: &str) -> Result<Vec<FileEntry>, toml::de::Error> {
    let document = DeTable::parse(text)?;
    let mut entries = Vec::new();
    flatten(text, "", document.get_ref(), &mut entries);
    Ok(entries)
}

fn flatten(text: &str, above: &str, table: &DeTable<'_>, entries: &mut Vec<FileEntry>) {
    for (name, value) in table {
        let path = join(above, name.get_ref());
        match value.get_ref() {
            DeValue::Table(inner) if is_section(&path) || !inner.is_empty() => {
                flatten(text, &path, inner, entries);
            }
            other => {
                entries.push(FileEntry {
                    path,
                    raw: raw(other),
                    line: line_of(text, name.span().start),
                });
            }
        }
    }
}

/// A quoted name that holds a dot is no path: it keeps its quotes, and so is unknown.
fn join(above: &str, name: &str) -> String {
    let name = if name.contains('.') { format!("{name:?}") } else { name.to_owned() };
    if above.is_empty() { name } else { format!("{above}.{name}") }
}

fn is_section(path: &str) -> bool {
    let below = |key: &str| key.strip_prefix(path).is_some_and(|rest| rest.starts_with('.'));
    KEYS.iter().any(|key| below(key.path) || (key.is_family() && key.path == path))
}

/// What no setting takes (an empty table, an array in an array) becomes an empty array, which none
/// takes either.
fn raw(value: &DeValue<'_>) -> RawValue {
    match value {
        DeValue::Array(values) => {
            let texts: Option<Vec<_>> =
                values.iter().map(|value| scalar(value.get_ref())).collect();
            RawValue::Many(texts.unwrap_or_default())
        }
        other => scalar(other).map_or_else(|| RawValue::Many(Vec::new()), RawValue::One),
    }
}

fn scalar(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.clone().into_owned()),
        DeValue::Integer(integer) => {
            let decimal = u64::from_str_radix(integer.as_str(), integer.radix());
            Some(decimal.map_or_else(|_| integer.to_string(), |number| number.to_string()))
        }
        DeValue::Float(float) => Some(float.as_str().to_owned()),
        DeValue::Boolean(on) => Some(on.to_string()),
        DeValue::Datetime(when) => Some(when.to_string()),
        DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

fn line_of(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|&byte| byte == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in any::<String>()) {
            let _ = parse(&text);
        }
    }

    #[test]
    fn entries_know_their_path_and_line() {
        let text = "block_bytes = 0x1_0000\n\n[host]\nhuge_pages = false\n[disk]\ndirs = [\"/a:b\", '/c']\n";
        let entries = parse(text).expect("valid TOML");
        let found: Vec<_> = entries
            .iter()
            .map(|entry| (entry.path.as_str(), entry.raw.clone(), entry.line))
            .collect();
        let one = |text: &str| RawValue::One(text.to_owned());
        let dirs = RawValue::Many(vec!["/a:b".to_owned(), "/c".to_owned()]);
        let expected = [
            ("block_bytes", one("65536"), 1),
            ("disk.dirs", dirs, 6),
            ("host.huge_pages", one("false"), 4),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn what_is_no_section_is_an_entry() {
        for text in [
            "[hots]\n",
            "[hots]\ncapacity = 1\n",
            "[host.capacity]\nx = 1\n",
            "\"host.capacity\" = 1\n",
        ] {
            let entries = parse(text).expect("valid TOML");
            assert_eq!(entries.len(), 1, "{text}");
        }
    }
}
