//! What is wrong with entries of a source: each is said once.

use std::collections::BTreeSet;

use super::address::MAX_PEERS;

/// What was said. What is no longer wrong is forgotten, so that it is said when it comes back.
#[derive(Debug, Default)]
pub(super) struct Complaints(BTreeSet<String>);

impl Complaints {
    /// Takes what is wrong with a source that was read whole. Warns of what was not said before.
    pub(super) fn replace(&mut self, source: &str, current: impl IntoIterator<Item = String>) {
        let current = current.into_iter().take(MAX_PEERS).collect();
        self.replaced(current).iter().for_each(|complaint| warn(source, complaint));
    }

    /// Takes what is wrong with a part of a source, and warns of it if that was not said before.
    pub(super) fn add(&mut self, source: &str, complaint: String) {
        if self.0.contains(&complaint) {
            return;
        }
        warn(source, &complaint);
        if self.0.len() < MAX_PEERS {
            self.0.insert(complaint);
        }
    }

    /// What was not there before.
    fn replaced(&mut self, current: BTreeSet<String>) -> Vec<String> {
        let new = current.difference(&self.0).cloned().collect();
        self.0 = current;
        new
    }
}

fn warn(source: &str, complaint: &str) {
    tracing::warn!("peers in {source}: {complaint}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_said_once_until_it_was_mended() {
        let mut complaints = Complaints::default();
        let mut said = |current: &[&str]| {
            complaints.replaced(current.iter().map(ToString::to_string).collect())
        };
        assert_eq!(said(&["a", "b"]), ["a", "b"]);
        assert_eq!(said(&["a", "b", "c"]), ["c"]);
        assert!(said(&["a"]).is_empty());
        assert_eq!(said(&["a", "b"]), ["b"]);
    }
}
