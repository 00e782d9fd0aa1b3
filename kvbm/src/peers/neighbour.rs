//! Workers of one host: a reader maps the holder's host tier, and copies from there.
//!
//! The holder listens on an abstract socket: its name ends with the process, and readers of another
//! host or network namespace do not find it. A process of the same user that connects is given the
//! memory, for reading alone.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvbm_tiers::{PeerMemory, SharedMemory, receive_memory, send_memory};
use rustix::process::geteuid;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

use super::protocol::Member;

/// A neighbour hands its memory over within this time.
const MAX_HANDOVER: Duration = Duration::from_secs(3);
/// The pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

fn name(incarnation: u64) -> String {
    format!("\0kvbm-peers-{incarnation:016x}")
}

/// Where the neighbours of this worker ask for its memory.
pub(super) fn listen(incarnation: u64) -> io::Result<UnixListener> {
    UnixListener::bind(name(incarnation))
}

/// Hands the memory to each process of this user that asks.
pub(super) async fn hand_out(listener: UnixListener, memory: SharedMemory) {
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

/// The memory of neighbours, by incarnation, as long as connections use it.
#[derive(Default)]
pub(super) struct Neighbours(Mutex<HashMap<u64, Weak<PeerMemory>>>);

impl Neighbours {
    /// The memory of a holder. `None`: it is no neighbour, or shares none.
    pub(super) async fn memory_of(&self, holder: &Member) -> Option<Arc<PeerMemory>> {
        // Held meanwhile: two connections do not map it twice.
        let mut known = self.0.lock().await;
        known.retain(|_, memory| memory.strong_count() > 0);
        if let Some(memory) = known.get(&holder.incarnation).and_then(Weak::upgrade) {
            return Some(memory);
        }
        let memory = Arc::new(map(holder).await?);
        known.insert(holder.incarnation, Arc::downgrade(&memory));
        Some(memory)
    }
}

async fn map(holder: &Member) -> Option<PeerMemory> {
    let stream = UnixStream::connect(name(holder.incarnation)).await.ok()?;
    if !is_of_this_user(&stream) {
        return None;
    }
    let mapped = spawn_blocking(move || {
        let stream = blocking(stream).map_err(|error| error.to_string())?;
        let shared = receive_memory(&stream).map_err(|error| error.to_string())?;
        PeerMemory::map(&shared).map_err(|error| error.to_string())
    });
    match mapped.await.ok()? {
        Ok(memory) if memory.geometry().block_bytes() as u64 == holder.block_bytes => Some(memory),
        Ok(_) => None,
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
