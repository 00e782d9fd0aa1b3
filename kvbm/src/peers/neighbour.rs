//! Workers of one host: a reader maps the holder's host tier, and copies from there.
//!
//! The holder listens on an abstract socket: its name ends with the process, and readers of another
//! host or network namespace do not find it. A process of the same user that connects is given the
//! memory, for reading alone.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvbm_tiers::{DramRegion, PeerMemory, SharedMemory, receive_memory, send_memory};
use rustix::process::geteuid;
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;

use super::protocol::Member;
use crate::sync::Mutex;

/// A neighbour hands its memory over within this time.
const MAX_HANDOVER: Duration = Duration::from_secs(3);
/// The pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where neighbours ask a worker, or one of its ranks, for the memory of a cache group's host tier.
fn name(incarnation: u64, group: u8) -> String {
    match group {
        0 => format!("\0kvbm-peers-{incarnation:016x}"),
        _ => format!("\0kvbm-peers-{incarnation:016x}-{group}"),
    }
}

/// Lets neighbours map a host tier, if its memory can be shared.
pub(super) fn share(
    memory: &DramRegion,
    incarnation: u64,
    group: u8,
    handle: &Handle,
) -> io::Result<()> {
    if let Some(memory) = memory.shareable().cloned() {
        let _entered = handle.enter();
        let listener = UnixListener::bind(name(incarnation, group))?;
        handle.spawn(hand_out(listener, memory));
    }
    Ok(())
}

/// Hands the memory to each process of this user that asks.
async fn hand_out(listener: UnixListener, memory: SharedMemory) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) if is_of_this_user(&stream) => {
                let memory = memory.clone();
                // Some bytes, which a new connection has room for.
                spawn_blocking(move || send_memory(&blocking(stream)?, &memory));
            }
            Ok(_) => tracing::warn!("a process of another user asks for the host tier"),
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

fn is_of_this_user(stream: &UnixStream) -> bool {
    stream.peer_cred().is_ok_and(|peer| peer.uid() == geteuid().as_raw())
}

fn blocking(stream: UnixStream) -> io::Result<std::os::unix::net::UnixStream> {
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(MAX_HANDOVER))?;
    stream.set_write_timeout(Some(MAX_HANDOVER))?;
    Ok(stream)
}

/// The memory of neighbours, as long as connections use it.
pub(super) struct Neighbours {
    group: u8,
    /// By incarnation.
    known: Mutex<HashMap<u64, Arc<KnownMemory>>>,
}

/// Locked while the memory is being mapped, so that two connections do not map it twice.
type KnownMemory = tokio::sync::Mutex<Weak<PeerMemory>>;

impl Neighbours {
    /// Of host tiers of a cache group.
    pub(super) fn new(group: u8) -> Self {
        Self { group, known: Mutex::default() }
    }

    /// The memory of a holder, which has blocks of `block_bytes` there. `None`: it is no neighbour, or
    /// shares none.
    pub(super) async fn memory_of(
        &self,
        holder: &Member,
        block_bytes: u64,
    ) -> Option<Arc<PeerMemory>> {
        let known = self.known(holder.incarnation);
        let mut known = known.lock().await;
        if let Some(memory) = known.upgrade() {
            return Some(memory);
        }
        let memory = map(holder, self.group).await?;
        if memory.geometry().block_bytes() as u64 != block_bytes {
            return None;
        }
        let memory = Arc::new(memory);
        *known = Arc::downgrade(&memory);
        Some(memory)
    }

    fn known(&self, incarnation: u64) -> Arc<KnownMemory> {
        let mut known = self.known.lock();
        // Others may be about to map one.
        let is_of_use = |memory: &Arc<KnownMemory>| {
            Arc::strong_count(memory) > 1
                || memory.try_lock().is_ok_and(|memory| memory.strong_count() > 0)
        };
        known.retain(|_, memory| is_of_use(memory));
        Arc::clone(known.entry(incarnation).or_default())
    }
}

async fn map(holder: &Member, group: u8) -> Option<PeerMemory> {
    let stream = UnixStream::connect(name(holder.incarnation, group)).await.ok()?;
    if !is_of_this_user(&stream) {
        return None;
    }
    let mapped = spawn_blocking(move || {
        let stream = blocking(stream).map_err(|error| error.to_string())?;
        let shared = receive_memory(&stream).map_err(|error| error.to_string())?;
        PeerMemory::map(&shared).map_err(|error| error.to_string())
    });
    match mapped.await.ok()? {
        Ok(memory) => Some(memory),
        Err(error) => {
            tracing::warn!(
                holder = holder.name,
                error,
                "its memory is not mapped: blocks come by TCP"
            );
            None
        }
    }
}
