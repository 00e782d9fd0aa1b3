//! Keeps this worker's entry, under a lease.

use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::gateway::{EtcdFailure, Gateway};
use super::http::Transport;
use super::messages::{
    Base64, Done, GrantRequest, Int64, LeaseMessage, PeerValue, PutRequest, RangeAnswer,
    RangeRequest,
};
use super::retry::Retry;
use crate::error::Result;
use crate::peers::discovery::address::PeerAddress;

/// How long a worker that stops waits for etcd.
const MAX_FAREWELL: Duration = Duration::from_secs(2);
/// Longest time to live that etcd may set.
const MAX_TTL: i64 = 24 * 60 * 60;

pub(super) struct Announcer<T> {
    gateway: Gateway<T>,
    own: PeerAddress,
    key: Base64,
    ttl: Duration,
    lease: Option<Lease>,
    /// The entry was there once.
    was_announced: bool,
    is_displaced: bool,
    retry: Retry,
}

/// A lease that was granted.
#[derive(Clone, Copy, Debug)]
struct Lease {
    id: Int64,
    ttl: Duration,
}

impl Lease {
    /// etcd may have chosen another time than was asked for.
    fn new(message: &LeaseMessage) -> Self {
        let ttl = Duration::from_secs(message.ttl.0.clamp(1, MAX_TTL).unsigned_abs());
        Self { id: message.id, ttl }
    }
}

impl<T: Transport> Announcer<T> {
    /// Announces `own` by a key that begins with `prefix`.
    pub(super) fn new(gateway: Gateway<T>, prefix: &str, own: &PeerAddress, ttl: Duration) -> Self {
        Self {
            gateway,
            own: own.clone(),
            key: format!("{prefix}{}", own.name()).as_str().into(),
            ttl,
            lease: None,
            was_announced: false,
            is_displaced: false,
            retry: Retry::new("peers may not see this worker in etcd"),
        }
    }

    /// Announces it until the sender of `stopped` is gone, then takes that back.
    pub(super) async fn run(mut self, stopped: oneshot::Receiver<()>) {
        tokio::select! {
            never = self.keep() => match never {},
            _ = stopped => {}
        }
        if timeout(MAX_FAREWELL, self.withdraw()).await != Ok(true) {
            tracing::info!(
                "etcd did not take this worker off its list, and will by the lease's end"
            );
        }
    }

    async fn keep(&mut self) -> Infallible {
        loop {
            match self.renew().await {
                Ok(lease) => {
                    self.retry.worked();
                    sleep(lease.ttl / 3).await;
                }
                Err(failure) => {
                    self.gateway.turn();
                    self.retry.failed(&failure).await;
                }
            }
        }
    }

    /// Has the entry be there, under a lease that lives.
    async fn renew(&mut self) -> Result<Lease, EtcdFailure> {
        let kept = match self.lease {
            Some(lease) => self.keep_alive(lease).await?.then_some(lease),
            None => None,
        };
        let lease = match kept {
            Some(lease) => lease,
            None => self.grant().await?,
        };
        let holder = self.holder().await?;
        let is_displaced = self.was_announced && holder.is_some_and(|holder| holder != lease.id);
        self.tell(is_displaced);
        // A worker that starts takes the place of the one that it was before.
        if !is_displaced && holder != Some(lease.id) {
            self.put(lease).await?;
        }
        self.was_announced = true;
        Ok(lease)
    }

    async fn grant(&mut self) -> Result<Lease, EtcdFailure> {
        self.lease = None;
        let ttl = Int64(self.ttl.as_secs_f64().ceil() as i64);
        let granted: LeaseMessage =
            self.gateway.ask("/v3/lease/grant", &GrantRequest { ttl }).await?;
        // A key under lease 0 would stay for ever.
        if granted.id == Int64::default() {
            return Err(EtcdFailure::Failed("etcd granted a lease without a name".to_owned()));
        }
        Ok(*self.lease.insert(Lease::new(&granted)))
    }

    /// False: the lease ended. etcd says so by leaving out how long it lives.
    async fn keep_alive(&mut self, lease: Lease) -> Result<bool, EtcdFailure> {
        let request = LeaseMessage { id: lease.id, ttl: Int64::default() };
        let kept: LeaseMessage = self.gateway.ask_first("/v3/lease/keepalive", &request).await?;
        Ok(kept.ttl > Int64::default())
    }

    /// Which lease the entry hangs on; `None`: there is no entry, since it was new or somebody
    /// deleted it.
    async fn holder(&mut self) -> Result<Option<Int64>, EtcdFailure> {
        let request = RangeRequest { key: self.key.clone(), keys_only: true, ..Default::default() };
        let found: RangeAnswer = self.gateway.ask("/v3/kv/range", &request).await?;
        Ok(found.kvs.first().map(|entry| entry.lease))
    }

    async fn put(&mut self, lease: Lease) -> Result<(), EtcdFailure> {
        let value = PeerValue { address: self.own.address().to_owned() };
        let value = serde_json::to_string(&value)
            .map_err(|error| EtcdFailure::Failed(error.to_string()))?;
        let request =
            PutRequest { key: self.key.clone(), value: value.as_str().into(), lease: lease.id };
        let Done {} = self.gateway.ask("/v3/kv/put", &request).await?;
        tracing::info!("announced in etcd as {}, at {}", self.own.name(), self.own.address());
        Ok(())
    }

    /// Says once that another worker uses the name: peers see that one.
    fn tell(&mut self, is_displaced: bool) {
        if is_displaced && !self.is_displaced {
            tracing::warn!(
                "another worker announces itself in etcd as {}: peers do not see this one until that one is gone; \
                 each needs a name of its own",
                self.own.name()
            );
        }
        self.is_displaced = is_displaced;
    }

    /// Ends the lease, and the entry with it. False: no member of etcd did that.
    async fn withdraw(&mut self) -> bool {
        let Some(lease) = self.lease else { return true };
        let request = LeaseMessage { id: lease.id, ttl: Int64::default() };
        for _ in 0..self.gateway.members() {
            if self.gateway.ask::<Done>("/v3/lease/revoke", &request).await.is_ok() {
                return true;
            }
            self.gateway.turn();
        }
        false
    }
}
