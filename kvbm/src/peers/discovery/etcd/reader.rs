//! Keeps the list of peers: reads all of it, then follows what changes.
//!
//! There is one watch and no polling. Where the watch ends, for whatever reason, all is read again:
//! so a list is right again after an outage, a compaction, or a restart of an etcd that lost its
//! data.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::entries::{Pages, change, range_end};
use super::gateway::{EtcdFailure, Gateway};
use super::http::Transport;
use super::messages::{Event, Int64, WatchAnswer, WatchCreation, WatchRequest};
use super::retry::Retry;
use crate::peers::discovery::address::{PeerList, quoted};
use crate::peers::discovery::complaint::Complaints;
use crate::peers::discovery::publish;

/// etcd says something every ten minutes, so a member that hangs is left after this. One that lost
/// the others says so, and one whose machine vanished is noticed by TCP.
const MAX_SILENCE: Duration = Duration::from_mins(11);
/// What is read, in messages.
const SOURCE: &str = "etcd";

pub(super) struct Reader<T> {
    gateway: Gateway<T>,
    prefix: String,
    list: watch::Sender<Arc<PeerList>>,
    complaints: Complaints,
    retry: Retry,
}

impl<T: Transport> Reader<T> {
    /// Reads what keys that begin with `prefix` say of peers.
    pub(super) fn new(
        gateway: Gateway<T>,
        prefix: String,
        list: watch::Sender<Arc<PeerList>>,
    ) -> Self {
        let retry = Retry::new("peers in etcd are not followed, and the list stays as it was");
        Self { gateway, prefix, list, complaints: Complaints::default(), retry }
    }

    pub(super) async fn run(mut self) {
        loop {
            let Err(failure) = self.follow().await;
            self.gateway.turn();
            self.retry.failed(&failure).await;
        }
    }

    async fn follow(&mut self) -> Result<Infallible, EtcdFailure> {
        let revision = self.read().await?;
        let create_request = WatchCreation {
            key: self.prefix.as_str().into(),
            range_end: range_end(&self.prefix),
            start_revision: Int64(revision + 1),
            progress_notify: true,
        };
        let mut changes =
            self.gateway.listen("/v3/watch", &WatchRequest { create_request }).await?;
        self.retry.worked();
        loop {
            let answer: WatchAnswer = changes.next(MAX_SILENCE).await?;
            if answer.canceled {
                return Err(cancelled(&answer));
            }
            self.apply(&answer.events);
        }
    }

    /// Reads all peers, and tells as of which revision.
    async fn read(&mut self) -> Result<i64, EtcdFailure> {
        let mut pages = Pages::new(&self.prefix);
        while !pages.are_complete {
            match self.gateway.ask("/v3/kv/range", &pages.request).await {
                Ok(page) => pages.take(&page),
                Err(EtcdFailure::TooLarge) if pages.shrink() => {}
                Err(failure) => return Err(failure),
            }
        }
        self.complaints.replace(SOURCE, pages.complaints);
        publish(&self.list, pages.list);
        Ok(pages.request.revision.0)
    }

    fn apply(&mut self, events: &[Event]) {
        if events.is_empty() {
            return;
        }
        let Self { list, prefix, complaints, .. } = self;
        list.send_modify(|list| {
            // A copy is made only if a reader has the list just now.
            let list = Arc::make_mut(list);
            for event in events {
                if let Err(complaint) = change(list, prefix, event) {
                    complaints.add(SOURCE, complaint);
                }
            }
        });
    }
}

fn cancelled(answer: &WatchAnswer) -> EtcdFailure {
    let why = match (answer.compact_revision.0, answer.cancel_reason.as_str()) {
        (0, reason) => quoted(reason),
        (_, _) => "what changed meanwhile is compacted".to_owned(),
    };
    EtcdFailure::Failed(format!("etcd cancelled the watch: {why}"))
}
