//! A list of peers in a file: a JSON array of `{"name", "address"}`.
//!
//! The file is looked at once a second, and read when it changed. The crate `notify` would tell
//! sooner, but nothing else here needs it, and it is blind on network file systems.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use super::address::{MAX_PEERS, PeerAddress, PeerList, quoted};
use super::complaint::Complaints;
use super::publish;

const PERIOD: Duration = Duration::from_secs(1);
const MAX_BYTES: u64 = 1 << 20;

/// Keeps `list` as the file at `path` says.
pub(super) async fn watch(path: PathBuf, list: watch::Sender<Arc<PeerList>>) {
    let (source, mut complaints) = (path.display().to_string(), Complaints::default());
    let mut file = WatchedFile::new(path);
    loop {
        let looking = spawn_blocking(move || {
            let news = file.look();
            (file, news)
        });
        // An error means that the runtime ends.
        let Ok((looked_at, news)) = looking.await else { return };
        file = looked_at;
        match news {
            Some(Ok(contents)) => {
                complaints.replace(&source, contents.complaints);
                publish(&list, contents.list);
            }
            Some(Err(complaint)) => complaints.replace(&source, [complaint]),
            None => {}
        }
        sleep(PERIOD).await;
    }
}

/// A file, and what it was like when it was read.
#[derive(Debug)]
struct WatchedFile {
    path: PathBuf,
    stamp: Option<Stamp>,
    /// It is read again even if its stamp stays.
    must_read_again: bool,
}

impl WatchedFile {
    const fn new(path: PathBuf) -> Self {
        Self { path, stamp: None, must_read_again: true }
    }

    /// What the file says, or why it cannot be told. `None`: what it said before.
    fn look(&mut self) -> Option<Result<FileContents, String>> {
        let file = fs::metadata(&self.path).ok().filter(Metadata::is_file);
        let stamp = file.as_ref().map(Stamp::of);
        let has_changed = stamp != self.stamp;
        if !has_changed && !self.must_read_again {
            return None;
        }
        self.stamp = stamp;
        let read = read(&self.path).map_err(|error| error.to_string());
        let contents = read.and_then(|bytes| parsed(&bytes));
        // A write within the same tick of the file system's clock leaves the stamp as it is.
        self.must_read_again = has_changed || contents.is_err();
        Some(contents)
    }
}

/// Changes when a file is written or replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    inode: (u64, u64),
    size: u64,
    written: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(file: &Metadata) -> Self {
        Self {
            inode: (file.dev(), file.ino()),
            size: file.size(),
            written: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        }
    }
}

/// All bytes of the file, unless they are more than a list may have.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    // To open a pipe would wait for its writer.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("this is no regular file; the list stays as it was"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::Error::other("more than 1 MiB; the list stays as it was"));
    }
    Ok(bytes)
}

/// What a file says.
#[derive(Debug, Default)]
struct FileContents {
    list: PeerList,
    complaints: Vec<String>,
}

#[derive(Deserialize)]
struct Entry {
    name: String,
    address: String,
}

/// Takes the good entries, and says what is wrong with the others.
fn parsed(bytes: &[u8]) -> Result<FileContents, String> {
    let entries: Vec<Value> = serde_json::from_slice(bytes).map_err(|error| {
        format!("this is no JSON array of peers ({error}); the list stays as it was")
    })?;
    let mut contents = FileContents::default();
    if entries.len() > MAX_PEERS {
        contents.complaints.push(format!("peers after the first {MAX_PEERS} are left out"));
    }
    for (place, entry) in entries.into_iter().take(MAX_PEERS).enumerate() {
        if let Err(complaint) = take(&mut contents.list, entry) {
            contents.complaints.push(format!("entry {} is left out: {complaint}", place + 1));
        }
    }
    Ok(contents)
}

fn take(list: &mut PeerList, entry: Value) -> Result<(), String> {
    let entry: Entry = serde_json::from_value(entry).map_err(|error| {
        format!("{}; an entry is {{\"name\", \"address\"}}", quoted(&error.to_string()))
    })?;
    if list.get(&entry.name).is_some() {
        return Err(format!("there is another {} before it", quoted(&entry.name)));
    }
    let peer = PeerAddress::new(entry.name, entry.address).map_err(|error| error.to_string())?;
    list.insert(peer);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use proptest::collection::vec;
    use proptest::prelude::any;
    use tempfile::TempDir;
    use tokio::runtime::Handle;

    use super::*;
    use crate::peers::discovery::{PeerSource, PeerWatch};

    /// A list in a file, and who watches it.
    struct Bench {
        dir: TempDir,
        watch: PeerWatch,
    }

    impl Bench {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let source = PeerSource::File(dir.path().join("peers.json"));
            Self { watch: source.watch(&Handle::current()).unwrap(), dir }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn replace(&self, text: &str) {
            fs::write(self.path("new"), text).unwrap();
            fs::rename(self.path("new"), self.path("peers.json")).unwrap();
        }

        fn overwrite(&self, text: &str) {
            fs::write(self.path("peers.json"), text).unwrap();
        }

        /// The list after the file was looked at a few times.
        async fn list(&self) -> Vec<(String, String)> {
            sleep(4 * PERIOD).await;
            let list = Arc::clone(&self.watch.peers().borrow());
            list.iter().map(|(name, address)| (name.to_owned(), address.to_owned())).collect()
        }
    }

    fn entries(peers: &[(&str, &str)]) -> String {
        let entries = peers
            .iter()
            .map(|(name, address)| format!(r#"{{"name": "{name}", "address": "{address}"}}"#));
        format!("[{}]", entries.collect::<Vec<_>>().join(", "))
    }

    fn owned(peers: &[(&str, &str)]) -> Vec<(String, String)> {
        peers.iter().map(|&(name, address)| (name.to_owned(), address.to_owned())).collect()
    }

    const ONE: [(&str, &str); 1] = [("a/0", "node-1:80")];
    const TWO: [(&str, &str); 2] = [("a/0", "node-1:80"), ("b/0", "node-2:80")];

    #[tokio::test(start_paused = true)]
    async fn a_file_that_comes_changes_and_goes_is_followed() {
        let bench = Bench::new();
        assert!(bench.list().await.is_empty());
        bench.replace(&entries(&TWO));
        assert_eq!(bench.list().await, owned(&TWO));
        bench.replace(&entries(&ONE));
        assert_eq!(bench.list().await, owned(&ONE));
        fs::remove_file(bench.path("peers.json")).unwrap();
        assert_eq!(bench.list().await, owned(&ONE));
        bench.overwrite("[]");
        assert!(bench.list().await.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_link_that_is_turned_is_followed() {
        use std::os::unix::fs::symlink;
        let bench = Bench::new();
        for (version, peers) in [("v1", &ONE[..]), ("v2", &TWO[..])] {
            fs::write(bench.path(version), entries(peers)).unwrap();
            symlink(version, bench.path("new")).unwrap();
            fs::rename(bench.path("new"), bench.path("peers.json")).unwrap();
            assert_eq!(bench.list().await, owned(peers));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_unreadable_file_changes_nothing_until_it_is_readable() {
        let bench = Bench::new();
        let whole = entries(&TWO);
        let large = format!("[{}]", " ".repeat(MAX_BYTES as usize));
        for broken in ["", &whole[..whole.len() / 2], "{}", "null", "\u{0}", &large] {
            bench.replace(&entries(&ONE));
            assert_eq!(bench.list().await, owned(&ONE));
            bench.overwrite(broken);
            assert_eq!(bench.list().await, owned(&ONE));
        }
        fs::remove_file(bench.path("peers.json")).unwrap();
        fs::create_dir(bench.path("peers.json")).unwrap();
        assert_eq!(bench.list().await, owned(&ONE));
        fs::remove_dir(bench.path("peers.json")).unwrap();
        bench.replace(&whole);
        assert_eq!(bench.list().await, owned(&TWO));
    }

    #[test]
    fn a_write_in_the_same_tick_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("peers.json");
        let mut file = WatchedFile::new(path.clone());
        fs::write(&path, entries(&ONE)).unwrap();
        assert_eq!(file.look().unwrap().unwrap().list.len(), 1);
        // As if the file had not changed since.
        assert!(file.look().is_some());
        assert!(file.look().is_none());
        fs::write(&path, "[").unwrap();
        assert!(file.look().unwrap().is_err());
        assert!(file.look().unwrap().is_err() && file.look().is_some(), "until it can be read");
    }

    #[test]
    fn a_bad_entry_is_named_and_costs_no_other() {
        let text = r#"[
            {"name": "a/0", "address": "node-1:80", "since": 7}, {"name": "b 0", "address": "node-2:80"},
            {"name": "c/0", "address": "node-3"}, {"name": "d/0"}, 7, {"name": "a/0", "address": "node-9:80"},
            {"name": "e/0", "address": "node-5:80"}]"#;
        let contents = parsed(text.as_bytes()).unwrap();
        assert_eq!(
            contents.list.iter().collect::<Vec<_>>(),
            [("a/0", "node-1:80"), ("e/0", "node-5:80")]
        );
        let complaints = contents.complaints.join("\n");
        assert_eq!(contents.complaints.len(), 5, "{complaints}");
        for part in
            ["entry 2", "b 0", "node-3", "entry 4", "`address`", "entry 5", "another \"a/0\""]
        {
            assert!(complaints.contains(part), "{part}: {complaints}");
        }
    }

    #[test]
    fn a_list_that_is_too_long_is_cut() {
        let mut text = String::from("[");
        for place in 0..=MAX_PEERS {
            let comma = if place > 0 { "," } else { "" };
            write!(text, r#"{comma}{{"name":"peer/{place}","address":"node:80"}}"#).unwrap();
        }
        let contents = parsed((text + "]").as_bytes()).unwrap();
        assert_eq!((contents.list.len(), contents.complaints.len()), (MAX_PEERS, 1));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_a_list_or_a_complaint(bytes in vec(any::<u8>(), 0..200)) {
            if let Ok(contents) = parsed(&bytes) {
                assert!(contents.list.is_empty());
            }
        }

        #[test]
        fn any_entry_is_taken_or_named(name in ".{0,140}", address in "[a-z0-9:.\\[\\]]{0,30}") {
            let text = serde_json::json!([{"name": name, "address": address}]).to_string();
            let contents = parsed(text.as_bytes()).unwrap();
            assert_eq!(contents.list.len() + contents.complaints.len(), 1);
        }
    }
}
