//! A reader's connection to a holder: it asks for a lease, and takes the blocks that it names.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::greeting::Credentials;
use super::holder::MAX_GREETING;
use super::probes::{gap_behind, lengths};
use super::protocol::{
    BrokenLink, LeaseAnswer, LeaseEnd, LeaseRequest, MAX_BLOCKS, Probe, ReadEnd, ReadRequest,
    ToHolder, ToReader, receive, send,
};
use crate::api::filling::FillingSlots;
use crate::names::hash::BlockHash;

/// A peer that does not take a connection within this time is away.
const MAX_CONNECT: Duration = Duration::from_secs(3);
/// What a request for blocks asks for.
const READ_BYTES: usize = 4 << 20;
/// Requests for blocks that are on their way: one, while the blocks of another arrive.
const READS: usize = 2;

/// What a connection runs over.
pub(super) trait PeerStream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> PeerStream for S {}

/// A connection to a holder that has let us in.
pub(super) struct PeerLink(Box<dyn PeerStream>);

/// What a reader wants of a chain.
pub(super) struct Wanted<'a> {
    pub(super) chain: &'a [BlockHash],
    /// Leading blocks that it has.
    pub(super) before: usize,
    pub(super) epoch: u64,
    pub(super) tenant: Option<u32>,
    /// A holder that has not answered by then is taken for gone.
    pub(super) limit: Duration,
}

/// What a lease names: the blocks behind the first `before`, by their checksums. It lasts for `ttl`
/// from each request for blocks on.
pub(super) struct NamedBlocks {
    pub(super) before: usize,
    pub(super) checksums: Vec<u32>,
    pub(super) ttl: Duration,
}

/// Why a peer gave less than it should.
#[derive(Debug, thiserror::Error)]
pub(super) enum PeerFault {
    #[error(transparent)]
    Link(#[from] BrokenLink),
    #[error("a block is not what its checksum says")]
    Wrong,
    #[error("{0}")]
    Ended(LeaseEnd),
}

impl From<std::io::Error> for PeerFault {
    fn from(error: std::io::Error) -> Self {
        Self::Link(error.into())
    }
}

impl PeerLink {
    pub(super) async fn connect(
        address: &str,
        credentials: &Credentials,
    ) -> Result<Self, BrokenLink> {
        let connected = timeout(MAX_CONNECT, TcpStream::connect(address)).await;
        let stream = connected.map_err(|_| BrokenLink::Late)??;
        stream.set_nodelay(true)?;
        Self::over(Box::new(stream), credentials).await
    }

    pub(super) async fn over(
        mut stream: Box<dyn PeerStream>,
        credentials: &Credentials,
    ) -> Result<Self, BrokenLink> {
        let greeted = timeout(MAX_GREETING, credentials.greet(&mut stream)).await;
        greeted.map_err(|_| BrokenLink::Late)??;
        Ok(Self(stream))
    }

    /// Leases what is there: two messages if that is all that is wanted or nothing, else four.
    pub(super) async fn lease(&mut self, wanted: &Wanted<'_>) -> Result<NamedBlocks, PeerFault> {
        let most = wanted.chain.len().min(MAX_BLOCKS as usize);
        let asked = lengths(wanted.before, most);
        let answer = match self.ask(wanted, &asked, false).await? {
            ToReader::Between(found) => {
                let found = found as usize;
                let most = gap_behind(found, &asked).filter(|_| asked.contains(&found));
                let most = most.ok_or(BrokenLink::Unexpected("it found what nobody asked for"))?;
                // The found one again, in case no more is there.
                let mut between = lengths(found, most);
                between[0] = found;
                self.ask(wanted, &between, true).await?
            }
            answer => answer,
        };
        match answer {
            ToReader::Leased(answer) => named(wanted, &answer),
            ToReader::Ended(why) => Err(PeerFault::Ended(why)),
            _ => Err(BrokenLink::Unexpected("no answer to a request for a lease").into()),
        }
    }

    async fn ask(
        &mut self,
        wanted: &Wanted<'_>,
        lengths: &[usize],
        is_last: bool,
    ) -> Result<ToReader, BrokenLink> {
        let probe = |&blocks: &usize| Probe::new(blocks, wanted.chain[blocks - 1]);
        let request = LeaseRequest {
            epoch: wanted.epoch,
            tenant: wanted.tenant,
            held: wanted.before as u32,
            probes: lengths.iter().map(probe).collect(),
            is_last,
        };
        send(&mut self.0, &ToHolder::Lease(request)).await?;
        timeout(wanted.limit, receive(&mut self.0)).await.unwrap_or(Err(BrokenLink::Late))
    }

    /// Reads blocks into slots, as many as there are, and keeps those that are what their checksums
    /// say. Everything behind one that does not come is left.
    pub(super) async fn read(
        &mut self,
        named: &NamedBlocks,
        filling: &mut FillingSlots<'_>,
    ) -> Result<(), PeerFault> {
        let wanted = filling.kept()..filling.kept() + filling.left();
        let Some(bytes) = filling.next().map(|slot| slot.len()) else { return Ok(()) };
        let mut parts = parts(wanted, (READ_BYTES / bytes).max(1));
        let mut asked = VecDeque::new();
        loop {
            while asked.len() < READS
                && let Some(part) = parts.next()
            {
                let request = ReadRequest { first: part.start as u32, count: part.len() as u32 };
                // Counted from before it is asked for.
                asked.push_back((request, Instant::now() + named.ttl));
                send(&mut self.0, &ToHolder::Read(request)).await?;
            }
            let Some((request, until)) = asked.pop_front() else { return Ok(()) };
            let arrived = timeout_at(until, self.take(request, named, filling)).await;
            arrived.unwrap_or(Err(BrokenLink::Late.into()))?;
        }
    }

    /// Takes the blocks of one request.
    async fn take(
        &mut self,
        request: ReadRequest,
        named: &NamedBlocks,
        filling: &mut FillingSlots<'_>,
    ) -> Result<(), PeerFault> {
        match receive(&mut self.0).await? {
            ToReader::Blocks(blocks) if blocks == request => {}
            ToReader::Ended(why) => return Err(PeerFault::Ended(why)),
            _ => return Err(BrokenLink::Unexpected("other blocks than were asked for").into()),
        }
        for _ in 0..request.count {
            let expected = filling.kept().checked_sub(named.before);
            let expected = expected.and_then(|place| named.checksums.get(place)).copied();
            let Some(slot) = filling.next() else { break };
            self.0.read_exact(slot).await?;
            if expected.is_none() || filling.written() != expected {
                return Err(PeerFault::Wrong);
            }
            filling.keep();
        }
        Ok(())
    }

    /// The lease is not needed any more.
    pub(super) async fn release(&mut self, end: ReadEnd) -> Result<(), BrokenLink> {
        send(&mut self.0, &ToHolder::Release(end)).await
    }
}

/// What an answer names, if it is one to what was wanted.
fn named(wanted: &Wanted<'_>, answer: &LeaseAnswer) -> Result<NamedBlocks, PeerFault> {
    let (blocks, before) = (answer.blocks as usize, wanted.before);
    if answer.epoch != wanted.epoch {
        return Err(PeerFault::Ended(LeaseEnd::OtherEpoch));
    }
    if blocks > wanted.chain.len() || answer.checksums.len() != blocks.saturating_sub(before) {
        return Err(BrokenLink::Unexpected("a lease of other blocks than were asked for").into());
    }
    let checksums = answer.checksums.iter().map(|crc| u32::from_le_bytes(*crc)).collect();
    Ok(NamedBlocks { before, checksums, ttl: Duration::from_millis(answer.ttl_ms.into()) })
}

fn parts(of: Range<usize>, blocks: usize) -> impl Iterator<Item = Range<usize>> {
    of.clone().step_by(blocks).map(move |first| first..of.end.min(first + blocks))
}
