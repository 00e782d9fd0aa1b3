//! What keys say of peers: the list as pages of it are read, and as it changes.

use std::fmt::Display;

use super::messages::{
    Base64, Event, EventKind, Int64, KeyValue, PeerValue, RangeAnswer, RangeRequest,
};
use crate::peers::discovery::address::{MAX_PEERS, PeerAddress, PeerList, quoted};

/// How many keys are asked for at once. If all are as long as they may be, they fill half of the
/// longest answer.
const PAGE: Int64 = Int64(256);
/// By how much fewer if those are too much. An entry that is far too long costs a few answers, and
/// an etcd that answers too much whatever it is asked costs no more.
const CUT: i64 = 16;
/// Longest value of a key, in bytes.
const MAX_VALUE: usize = 1 << 10;

/// Reads a list page by page, all as of one revision.
#[derive(Debug)]
pub(super) struct Pages {
    prefix: String,
    /// What to ask next, unless they are complete.
    pub(super) request: RangeRequest,
    pub(super) are_complete: bool,
    pub(super) list: PeerList,
    pub(super) complaints: Vec<String>,
    entries: usize,
}

impl Pages {
    pub(super) fn new(prefix: &str) -> Self {
        let request = RangeRequest {
            key: prefix.into(),
            range_end: range_end(prefix),
            limit: PAGE,
            ..RangeRequest::default()
        };
        Self {
            prefix: prefix.to_owned(),
            request,
            are_complete: false,
            list: PeerList::default(),
            complaints: Vec::new(),
            entries: 0,
        }
    }

    /// Takes the answer to the request.
    pub(super) fn take(&mut self, page: &RangeAnswer) {
        if self.request.revision == Int64::default() {
            self.request.revision = page.header.revision;
        }
        for entry in &page.kvs {
            let taken = if self.request.keys_only {
                left_out(&self.prefix, entry, &"its value is far too long")
            } else {
                add(&mut self.list, &self.prefix, entry)
            };
            self.complaints.extend(taken.err());
        }
        self.entries += page.kvs.len();
        self.go_on(page);
    }

    fn go_on(&mut self, page: &RangeAnswer) {
        let Some(last) = page.kvs.last().filter(|_| page.more) else {
            self.are_complete = true;
            return;
        };
        if self.entries >= MAX_PEERS {
            self.complaints.push(too_many());
            self.are_complete = true;
        }
        self.request.key = last.key.clone();
        self.request.key.0.push(0);
        (self.request.limit, self.request.keys_only) = (PAGE, false);
    }

    /// The answer was too large: asks for less, at last for the key alone of an entry. False: that
    /// is not possible.
    pub(super) fn shrink(&mut self) -> bool {
        let could = !self.request.keys_only;
        match self.request.limit.0 {
            1 => self.request.keys_only = true,
            limit => self.request.limit = Int64((limit / CUT).max(1)),
        }
        could
    }
}

/// The end of the keys that begin with `prefix`.
pub(super) fn range_end(prefix: &str) -> Base64 {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    Base64(end)
}

/// A change of the list, or what is wrong with it. A peer whose entry became bad is none any more.
pub(super) fn change(list: &mut PeerList, prefix: &str, event: &Event) -> Result<(), String> {
    let name = peer_name(prefix, &event.kv)?;
    list.remove(&name);
    match event.kind {
        EventKind::Put => add(list, prefix, &event.kv),
        EventKind::Delete => Ok(()),
    }
}

fn add(list: &mut PeerList, prefix: &str, entry: &KeyValue) -> Result<(), String> {
    if entry.value.0.len() > MAX_VALUE {
        return left_out(prefix, entry, &"its value has more than 1 KiB");
    }
    let Ok(PeerValue { address }) = serde_json::from_slice(&entry.value.0) else {
        return left_out(prefix, entry, &"its value is not {\"address\": \"host:port\"}");
    };
    match PeerAddress::new(peer_name(prefix, entry)?, address) {
        Ok(peer) => list.insert(peer).then_some(()).ok_or_else(too_many),
        Err(error) => left_out(prefix, entry, &error),
    }
}

fn left_out(prefix: &str, entry: &KeyValue, why: &dyn Display) -> Result<(), String> {
    Err(format!("{} is left out: {why}", quoted(&peer_name(prefix, entry)?)))
}

/// What follows the prefix. It is checked where a peer is made of it.
fn peer_name(prefix: &str, entry: &KeyValue) -> Result<String, String> {
    let key = String::from_utf8_lossy(&entry.key.0);
    let name = key.strip_prefix(prefix);
    name.map(str::to_owned).ok_or_else(|| format!("{} is no key of a peer", quoted(&key)))
}

fn too_many() -> String {
    format!("there are more than {MAX_PEERS} entries: some are left out")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::discovery::etcd::messages::Header;

    const PREFIX: &str = "kvbm/prod/peers/";

    fn entry(name: &str, value: &str) -> KeyValue {
        let key = Base64::from(format!("{PREFIX}{name}").as_str());
        KeyValue { key, value: value.into(), lease: Int64(7) }
    }

    fn good(name: &str) -> KeyValue {
        entry(name, r#"{"address": "node:80"}"#)
    }

    fn page(kvs: Vec<KeyValue>, more: bool) -> RangeAnswer {
        RangeAnswer { header: Header { revision: Int64(40) }, kvs, more }
    }

    fn names(list: &PeerList) -> Vec<&str> {
        list.iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn pages_continue_after_the_last_key_at_the_first_revision() {
        let mut pages = Pages::new(PREFIX);
        assert_eq!(pages.request.range_end, "kvbm/prod/peers0".into());
        pages.take(&page(vec![good("a"), good("b")], true));
        assert_eq!(pages.request.key, "kvbm/prod/peers/b\0".into());
        assert_eq!((pages.request.revision, pages.are_complete), (Int64(40), false));
        let last =
            RangeAnswer { header: Header { revision: Int64(99) }, ..page(vec![good("c")], false) };
        pages.take(&last);
        assert_eq!((pages.request.revision, pages.are_complete), (Int64(40), true));
        assert_eq!(names(&pages.list), ["a", "b", "c"]);
    }

    #[test]
    fn an_entry_far_too_long_is_named_and_skipped() {
        let mut pages = Pages::new(PREFIX);
        for _ in 0..2 {
            assert!(pages.shrink() && !pages.request.keys_only);
        }
        assert_eq!(pages.request.limit, Int64(1));
        assert!(pages.shrink() && pages.request.keys_only);
        assert!(!pages.shrink());
        pages.take(&page(vec![entry("long", "")], true));
        assert_eq!((pages.request.limit, pages.request.keys_only), (PAGE, false));
        pages.take(&page(vec![good("short")], false));
        assert_eq!(names(&pages.list), ["short"]);
        assert!(
            pages.complaints.concat().contains("\"long\" is left out"),
            "{:?}",
            pages.complaints
        );
    }

    #[test]
    fn no_answer_keeps_a_reader_for_ever() {
        let mut pages = Pages::new(PREFIX);
        pages.take(&page(vec![], true));
        assert!(pages.are_complete);
        let mut pages = Pages::new(PREFIX);
        for _ in 0..MAX_PEERS {
            assert!(!pages.are_complete);
            pages.take(&page(vec![good("same")], true));
        }
        assert!(pages.are_complete);
    }

    #[test]
    fn a_bad_entry_is_named_and_replaces_the_good_one() {
        let mut list = PeerList::default();
        let mut put =
            |entry: KeyValue| change(&mut list, PREFIX, &Event { kind: EventKind::Put, kv: entry });
        let long = format!(r#"{{"address": "node:80", "note": "{}"}}"#, "x".repeat(MAX_VALUE));
        for (name, value) in [
            ("empty", ""),
            ("list", "[]"),
            ("other", r#"{"host": "node"}"#),
            ("no-port", r#"{"address": "node"}"#),
            ("a space", r#"{"address": "node:80"}"#),
            ("long", &long),
        ] {
            put(good(name)).ok();
            let complaint = put(entry(name, value)).unwrap_err();
            assert!(complaint.contains(name), "{complaint}");
        }
        put(good("good")).unwrap();
        let foreign = KeyValue { key: "kvbm/other".into(), ..good("") };
        assert!(put(foreign).unwrap_err().contains("kvbm/other"));
        assert_eq!(names(&list), ["good"]);
        change(&mut list, PREFIX, &Event { kind: EventKind::Delete, kv: entry("good", "") })
            .unwrap();
        assert!(list.is_empty());
    }
}
