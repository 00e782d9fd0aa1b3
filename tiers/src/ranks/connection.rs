//! A stream between a leader and a rank, on which neither sender nor receiver waits.

#![expect(unsafe_code, reason = "a call of the C library")]

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};

use super::protocol::{MalformedFrame, first_message, framed_bytes};

/// Bytes that wait for a peer that does not read. What a scheduler has under way is far less.
const MAX_OUTBOX: usize = 16 << 20;
/// Bytes read at a time: some thirty batches' reports.
const READ_BYTES: usize = 64 << 10;

/// The sending side, and who is at the other end.
#[derive(Debug)]
pub(super) struct RankConnection {
    stream: UnixStream,
    /// What the stream would not take yet.
    outbox: Mutex<Vec<u8>>,
    peer: RankPeer,
}

/// The process at the other end.
#[derive(Debug)]
pub(super) struct RankPeer {
    /// 0: of another PID namespace.
    pub(super) pid: i32,
    /// Becomes readable when the process ends. The end of the stream does not say that: engines
    /// fork, and a child that outlives its parent keeps the stream open. `None`: the kernel does
    /// not tell, and the stream must do.
    life: Option<OwnedFd>,
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendResult {
    /// The stream has it, or is broken, which its reader learns.
    Entirely,
    /// Some of it waits until the stream [can take it](RankConnection::flush).
    Partly,
    /// Nothing of it: too much waits already.
    Refused,
}

impl RankConnection {
    /// Fails if the peer is a process of another user.
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let peer = RankPeer::of(&stream)?;
        Ok(Self { stream, outbox: Mutex::default(), peer })
    }

    pub(super) const fn peer(&self) -> &RankPeer {
        &self.peer
    }

    pub(super) fn send(&self, frame: &[u8]) -> SendResult {
        match self.put_off(frame) {
            SendResult::Refused => SendResult::Refused,
            _ => self.flush(),
        }
    }

    /// [`send`](Self::send), with the next [`flush`](Self::flush).
    pub(super) fn put_off(&self, frame: &[u8]) -> SendResult {
        let mut outbox = self.outbox.lock();
        if outbox.len() + frame.len() > MAX_OUTBOX {
            return SendResult::Refused;
        }
        outbox.extend_from_slice(frame);
        SendResult::Partly
    }

    /// Sends what waits, as far as the stream takes it.
    pub(super) fn flush(&self) -> SendResult {
        let mut outbox = self.outbox.lock();
        let sent = write_some(&self.stream, &outbox);
        outbox.drain(..sent);
        if outbox.is_empty() { SendResult::Entirely } else { SendResult::Partly }
    }

    /// The peer reads the end of the stream, and may go on sending.
    pub(super) fn say_no_more(&self) {
        // Of a stream that is broken both ends know.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Something to read, and nothing else.
    pub(super) fn watch_words(&self) -> PollFd<'_> {
        PollFd::new(&self.stream, PollFlags::IN)
    }

    /// Whether nothing waits until the stream can take it.
    pub(super) fn is_flushed(&self) -> bool {
        self.outbox.lock().is_empty()
    }

    /// What to wait for: something to read, if that `is_listened_to`; room for what waits; and the
    /// peer's end.
    pub(super) fn watch<'a>(&'a self, is_listened_to: bool, fds: &mut Vec<PollFd<'a>>) {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, is_listened_to);
        flags.set(PollFlags::OUT, !self.is_flushed());
        fds.push(PollFd::new(&self.stream, flags));
        // Every connection has two places in the list.
        match &self.peer.life {
            Some(life) => fds.push(PollFd::new(life, PollFlags::IN)),
            None => fds.push(PollFd::new(&self.stream, PollFlags::empty())),
        }
    }
}

/// What a wait found out about a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ConnectionReady {
    pub(super) is_readable: bool,
    pub(super) is_writable: bool,
    /// The process at the other end has ended.
    pub(super) is_dead: bool,
}

impl ConnectionReady {
    /// Of the two places that [`RankConnection::watch`] filled.
    pub(super) fn of(fds: &[PollFd<'_>]) -> Self {
        let (stream, life) = (fds[0].revents(), fds[1].revents());
        Self {
            is_readable: stream.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR),
            is_writable: stream.contains(PollFlags::OUT),
            is_dead: life.contains(PollFlags::IN),
        }
    }
}

/// All of it, unless the stream is full. Of a broken stream nothing is left to send.
fn write_some(mut stream: &UnixStream, bytes: &[u8]) -> usize {
    let mut sent = 0;
    while sent < bytes.len() {
        match stream.write(&bytes[sent..]) {
            Ok(count) => sent += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return sent,
            Err(_) => return bytes.len(),
        }
    }
    sent
}

/// The receiving side, of one thread.
#[derive(Debug)]
pub(super) struct FrameInbox {
    /// Not only what was read: it is not cleared for each read.
    bytes: Vec<u8>,
    /// Which of it was read, and not taken yet.
    unread: Range<usize>,
    limit: usize,
}

/// Why nothing more will come.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionEnd {
    #[error("it closed the connection")]
    Closed,
    #[error("its process ended")]
    Died,
    #[error("the connection failed: {0}")]
    Failed(io::Error),
    #[error(transparent)]
    Malformed(#[from] MalformedFrame),
}

impl FrameInbox {
    /// Takes messages of up to `limit` bytes.
    pub(super) const fn new(limit: usize) -> Self {
        Self { bytes: Vec::new(), unread: 0..0, limit }
    }

    pub(super) const fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Reads what has come, once: a peer that sends without end must not keep others waiting.
    pub(super) fn read(&mut self, connection: &RankConnection) -> Result<(), ConnectionEnd> {
        // Mostly nothing is left, and nothing moves.
        self.bytes.copy_within(self.unread.clone(), 0);
        self.unread = 0..self.unread.len();
        if self.bytes.len() < self.unread.end + READ_BYTES {
            self.bytes.resize(self.unread.end + READ_BYTES, 0);
        }
        match (&connection.stream).read(&mut self.bytes[self.unread.end..]) {
            Ok(0) => Err(ConnectionEnd::Closed),
            Ok(count) => {
                self.unread.end += count;
                Ok(())
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(ConnectionEnd::Failed(error)),
        }
    }

    /// Drops what was read.
    pub(super) fn clear(&mut self) {
        self.unread = 0..0;
    }

    /// The next message that is here entirely.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>, MalformedFrame> {
        let message = first_message(&self.bytes[self.unread.clone()], self.limit)?;
        self.unread.start += message.map_or(0, framed_bytes);
        Ok(message)
    }
}

impl RankPeer {
    fn of(stream: &UnixStream) -> io::Result<Self> {
        let (pid, uid) = credentials(stream)?;
        if uid != geteuid().as_raw() {
            let message = format!("process {pid} belongs to user {uid}");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        }
        let life = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Ok(Self { pid, life })
    }
}

/// Process and user at the other end, as they were when it connected or listened.
fn credentials(stream: &UnixStream) -> io::Result<(i32, u32)> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // Not through rustix: it has no value for the process 0, which a process of another PID
    // namespace is. SAFETY: the place is as large as it is said to be, and its own.
    let status = unsafe {
        let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
        libc::getsockopt(stream.as_raw_fd(), level, option, (&raw mut peer).cast(), &raw mut bytes)
    };
    if status == 0 { Ok((peer.pid, peer.uid)) } else { Err(io::Error::last_os_error()) }
}

/// Ends the wait of a thread that waits for connections.
#[derive(Debug)]
pub(super) struct ConnectionWaker(OwnedFd);

impl ConnectionWaker {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(super) fn wake(&self) {
        // Full means woken.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// The next wait is one.
    pub(super) fn rearm(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for ConnectionWaker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Becomes readable when a rare event happens. A wait for frequent events names this one place
/// beside them, since every place in a list costs each wait some 200 ns. The full list tells what
/// has happened.
#[derive(Debug)]
pub(super) struct SeldomLog(OwnedFd);

impl SeldomLog {
    pub(super) fn new(waker: &ConnectionWaker, listener: BorrowedFd<'_>) -> io::Result<Self> {
        let seldom = Self(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        seldom.add(waker.as_fd(), epoll::EventFlags::IN)?;
        seldom.add(listener, epoll::EventFlags::IN)?;
        Ok(seldom)
    }

    /// That the connection ends, or its peer.
    pub(super) fn watch(&self, connection: &RankConnection) -> io::Result<()> {
        // Its end is told whatever one asks for.
        self.add(connection.stream.as_fd(), epoll::EventFlags::empty())?;
        connection
            .peer
            .life
            .iter()
            .try_for_each(|life| self.add(life.as_fd(), epoll::EventFlags::IN))
    }

    /// To be called before the connection is dropped: a forked child may keep it open, and it would
    /// be told of for ever.
    pub(super) fn forget(&self, connection: &RankConnection) {
        let life = connection.peer.life.as_ref().map(AsFd::as_fd);
        for place in life.into_iter().chain([connection.stream.as_fd()]) {
            // What was never added is not there.
            let _ = epoll::delete(&self.0, place);
        }
    }

    fn add(&self, place: BorrowedFd<'_>, flags: epoll::EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.0, place, epoll::EventData::new_u64(0), flags)?)
    }
}

impl AsFd for SeldomLog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits for any of these, at most for `limit`.
pub(super) fn wait(fds: &mut [PollFd<'_>], limit: Option<Duration>) {
    // A poll that fails, of a signal or for want of memory, found nothing: the next one will.
    let limit = limit.map(|limit| Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: limit.subsec_nanos().into(),
    });
    if poll(fds, limit.as_ref()).is_err() {
        fds.iter_mut().for_each(PollFd::clear_revents);
    }
}

#[cfg(test)]
mod tests {
    use super::super::protocol::{MAX_MESSAGE, frame};
    use super::*;

    #[test]
    fn sends_to_a_deaf_peer_go_on_and_finally_fail() {
        let (near, far) = UnixStream::pair().unwrap();
        let (near, far) = (RankConnection::new(near).unwrap(), RankConnection::new(far).unwrap());
        let message = |number: u64| frame(&(number, vec![7_u8; 100 << 10]));
        let mut kept = 0;
        let mut outcomes = Vec::new();
        loop {
            let sent = near.send(&message(kept));
            if outcomes.last() != Some(&sent) {
                outcomes.push(sent);
            }
            if sent == SendResult::Refused {
                break;
            }
            kept += 1;
        }
        assert_eq!(outcomes, [SendResult::Entirely, SendResult::Partly, SendResult::Refused]);
        assert!(near.outbox.lock().len() <= MAX_OUTBOX);
        // It reads after all: nothing of what was taken is missing.
        let (mut inbox, mut read) = (FrameInbox::new(MAX_MESSAGE), 0);
        while read < kept {
            near.flush();
            inbox.read(&far).unwrap();
            while let Some(received) = inbox.next().unwrap() {
                assert_eq!(received, &message(read)[4..]);
                read += 1;
            }
        }
        assert_eq!(near.send(&message(0)), SendResult::Entirely);
        drop(near);
        inbox.read(&far).unwrap();
        while !matches!(inbox.read(&far), Err(ConnectionEnd::Closed)) {}
    }
}
