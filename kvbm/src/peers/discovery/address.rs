//! What is known of a peer, and the list of all.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;

use crate::error::{Error, Result};

/// Most peers that are known.
pub(super) const MAX_PEERS: usize = 4096;
/// Longest name of a peer, and of a namespace, in bytes.
pub(super) const MAX_NAME: usize = 128;
/// Longest name of a host (RFC 1035), and more than an address of IPv6 takes.
const MAX_HOST: usize = 253;
/// How much of a text from outside is repeated in a message, in characters.
const MAX_QUOTED: usize = 160;

/// A worker by name, and where it answers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerAddress {
    name: String,
    address: String,
}

impl PeerAddress {
    /// A peer's `name` is its own, of all workers and ranks: 1 to 128 letters, digits, `-`, `_`,
    /// `.` and `/`. Its `address` is a `host:port`; IPv6 is in brackets.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): one of the two is not that.
    pub fn new(name: impl Into<String>, address: impl Into<String>) -> Result<Self> {
        let (name, address) = (name.into(), address.into());
        if !is_address(&address) {
            let message = format!(
                "{} is no address of a peer; one is host:port, such as node-1:6890 or [fd00::1]:6890",
                quoted(&address)
            );
            return Err(Error::invalid(message));
        }
        if !is_name(&name, "/") {
            let message = format!(
                "{} names no peer; a name has 1 to {MAX_NAME} letters, digits, '-', '_', '.' and '/'",
                quoted(&name)
            );
            return Err(Error::invalid(message));
        }
        Ok(Self { name, address })
    }

    /// A peer of which nothing but the address is known. No host has two `_` in a row, which stand
    /// for the colons of IPv6.
    pub(in crate::peers) fn named_by_address(address: &str) -> Result<Self> {
        let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
        let host = host.trim_start_matches('[').trim_end_matches(']').replace(':', "_");
        Self::new(format!("{host}/{port}"), address)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its `host:port`.
    pub fn address(&self) -> &str {
        &self.address
    }
}

/// Whether `text` is a name of letters, digits, `-`, `_`, `.` and what is `also` allowed.
pub(super) fn is_name(text: &str, also: &str) -> bool {
    (1..=MAX_NAME).contains(&text.len())
        && text.chars().all(|letter| {
            letter.is_ascii_alphanumeric() || "-_.".contains(letter) || also.contains(letter)
        })
}

fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let digits = port.bytes().all(|digit| digit.is_ascii_digit());
    is_host(host) && digits && port.parse::<u16>().is_ok_and(|port| port > 0)
}

fn is_host(text: &str) -> bool {
    if let Some(inner) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
        return inner.parse::<Ipv6Addr>().is_ok();
    }
    let is_of_host = |letter: u8| letter.is_ascii_alphanumeric() || b"-_.".contains(&letter);
    (1..=MAX_HOST).contains(&text.len()) && text.bytes().all(is_of_host)
}

/// A text from outside, as a message may repeat it: one line, of bounded length.
pub(super) fn quoted(text: &str) -> String {
    let shown: String = text.chars().take(MAX_QUOTED).flat_map(char::escape_debug).collect();
    let more = if text.chars().nth(MAX_QUOTED).is_some() { "…" } else { "" };
    format!("\"{shown}{more}\"")
}

/// The peers that are known, in the order of their names: 4,096 at most.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerList {
    addresses: BTreeMap<String, String>,
}

impl PeerList {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.addresses.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.addresses.is_empty()
    }

    /// The address of a peer.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.addresses.get(name).map(String::as_str)
    }

    /// Names and addresses.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.addresses.iter().map(|(name, address)| (name.as_str(), address.as_str()))
    }

    /// Adds a peer, or moves it. False: the list is full.
    pub(in crate::peers) fn insert(&mut self, peer: PeerAddress) -> bool {
        let has_room = self.len() < MAX_PEERS || self.addresses.contains_key(&peer.name);
        if has_room {
            self.addresses.insert(peer.name, peer.address);
        }
        has_room
    }

    pub(super) fn remove(&mut self, name: &str) {
        self.addresses.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(name: &str, address: &str) -> Result<PeerAddress> {
        PeerAddress::new(name, address)
    }

    #[test]
    fn names_have_few_characters() {
        for name in ["a", "pod-7.prefill/0", "A_b", &"n".repeat(MAX_NAME)] {
            assert!(peer(name, "host:1").is_ok(), "{name}");
        }
        for name in ["", "a b", "a:b", "é", "a\n", &"n".repeat(MAX_NAME + 1)] {
            assert!(peer(name, "host:1").is_err(), "{name}");
        }
    }

    #[test]
    fn addresses_have_a_host_and_a_port() {
        for address in ["10.0.0.1:1", "node-1.cluster.local:65535", "my_host:80", "[::1]:6890"] {
            assert!(peer("a", address).is_ok(), "{address}");
        }
        for address in [
            "",
            ":",
            "host",
            "host:",
            ":1",
            "host:0",
            "host:65536",
            "host:+1",
            "host:1:2",
            "::1:80",
            "[::1]",
            "[host]:1",
            "http://host:1",
            "us er:1",
            "host:1\n",
            "user@host:1",
            &format!("{}:1", "h".repeat(MAX_HOST + 1)),
        ] {
            assert!(peer("a", address).is_err(), "{address}");
        }
    }

    #[test]
    fn a_message_repeats_little_of_what_came() {
        let error = peer(&"\n\u{1b}[31m".repeat(1_000), "host:1").unwrap_err().to_string();
        assert!(error.len() < 1_500 && !error.contains(['\n', '\u{1b}']), "{error}");
    }

    #[test]
    fn a_full_list_moves_peers_and_takes_no_more() {
        let mut list = PeerList::default();
        for place in 0..MAX_PEERS {
            assert!(list.insert(peer(&format!("peer/{place}"), "host:1").unwrap()));
        }
        assert!(!list.insert(peer("other", "host:1").unwrap()));
        assert!(list.insert(peer("peer/7", "host:2").unwrap()));
        assert_eq!((list.get("peer/7"), list.len()), (Some("host:2"), MAX_PEERS));
        list.remove("peer/7");
        assert!(list.insert(peer("other", "host:1").unwrap()));
    }
}
