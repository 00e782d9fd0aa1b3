//! The threads that post reads and look for their ends.
//!
//! Between processes of one host a post *is* the copy, and over TCP it is the look for the end that
//! moves the bytes. So neither is done by a thread that others wait for.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use super::reader::{ReadOrder, SharedReader};
use crate::clock;
use crate::error::{SetupError, SetupErrorKind};

/// One may be in a post that takes milliseconds, while reads at others go on.
const THREADS: usize = 2;
/// How long a thread looks for ends without pause.
const SPIN: Duration = Duration::from_micros(20);
/// The longest pause between two looks.
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// A read, and the agent that is to do it.
pub(super) type Post = (Arc<SharedReader>, ReadOrder);

/// All peers share them. They end when no reader can post any more and all reads have ended.
pub(super) struct PostingThreads(Sender<Post>);

impl PostingThreads {
    pub(super) fn start() -> Result<Self, SetupError> {
        let (sender, posts) = crossbeam_channel::unbounded();
        for _ in 0..THREADS {
            let posts = posts.clone();
            clock::spawn("kvbm-nixl-read", move || serve(&posts)).map_err(|error| {
                let message = "cannot start a thread for NIXL: raise the limit on processes";
                SetupError::caused(SetupErrorKind::Unavailable, message, error)
            })?;
        }
        Ok(Self(sender))
    }

    pub(super) fn sender(&self) -> Sender<Post> {
        self.0.clone()
    }
}

fn serve(posts: &Receiver<Post>) {
    // Else the kernel adds 50 µs to every nap. Without that, all is well but slower.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    let mut busy: Vec<Arc<SharedReader>> = Vec::new();
    let mut stirred = clock::now();
    loop {
        let next = if busy.is_empty() {
            posts.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            posts.recv_timeout(nap(stirred))
        };
        match next {
            Ok((reader, order)) => {
                stirred = clock::now();
                if reader.post(order) && !busy.iter().any(|known| Arc::ptr_eq(known, &reader)) {
                    busy.push(reader);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) if busy.is_empty() => return,
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(nap(stirred)),
        }
        busy.retain(|reader| {
            let seen = reader.look();
            if seen.has_ended {
                stirred = clock::now();
            }
            seen.is_busy
        });
    }
}

/// A sixteenth of the time for which nothing happened: short reads are noticed soon, and long ones
/// cost few looks.
fn nap(stirred: Instant) -> Duration {
    let quiet = stirred.elapsed();
    if quiet < SPIN { Duration::ZERO } else { (quiet / 16).min(LONGEST_NAP) }
}
