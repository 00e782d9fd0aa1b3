//! What a rank gives to those of other workers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kvbm_tiers::checksum::checksum;
use kvbm_tiers::ranks::{HeadLayout, HeadShare, RankSlots};
use kvbm_tiers::sealed::{HostSeal, KeyId};
use kvbm_tiers::{OneSided, SlotRef};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::yield_now;
use tokio::time::timeout;

use crate::peers::greeting::Credentials;
use crate::peers::holder::{MAX_GREETING, MAX_IDLE, Requests, welcome};
use crate::peers::protocol::{BrokenLink, MAX_SLICES, SlotLife, ToHolder, ToReader, decode, send};
use crate::peers::sealed::{self, NOT_CONVERTED};
use crate::peers::{Serves, nixl, shares, stream};

/// Gives out slices.
pub(super) struct SliceHolder {
    pub(super) slots: RankSlots,
    /// What slices lie sealed with; `None`: they lie in the clear.
    pub(super) sealed: Option<Arc<HostSeal>>,
    pub(super) nixl: Option<Arc<dyn OneSided>>,
    pub(super) credentials: Arc<Credentials>,
    /// A reader that takes nothing for so long is gone.
    pub(super) limit: Duration,
}

impl Serves for SliceHolder {
    async fn serve(&self, stream: TcpStream, greeted: impl FnOnce() + Send) {
        let welcomed = async {
            let stream = stream::accept(stream, self.credentials.proofs.tls.as_ref()).await?;
            welcome(stream, &self.credentials).await
        };
        let (member, link) = match timeout(MAX_GREETING, welcomed).await {
            Ok(Ok((Some(member), link))) => (member, link),
            Ok(Ok((None, _))) | Err(_) => return,
            Ok(Err(why)) => {
                return tracing::warn!(%why, "a rank of another worker that connected is not let in");
            }
        };
        greeted();
        self.answer(&member.name, link).await;
    }
}

impl SliceHolder {
    /// Answers a rank of another worker, until it is gone.
    pub(super) async fn answer(
        &self,
        reader: &str,
        mut link: Requests<impl AsyncRead + AsyncWrite + Unpin + Send>,
    ) {
        let copy = |life, slice: &mut Vec<u8>| self.slots.copy(life, slice);
        let heads = shares::heads_of(&self.credentials.member);
        while let Ok(Some(Ok(frame))) = timeout(MAX_IDLE, link.next()).await {
            let given = match decode(&frame) {
                Ok(ToHolder::Slices(_, lives) | ToHolder::SliceSums(lives))
                    if lives.len() > MAX_SLICES =>
                {
                    Err(BrokenLink::Unexpected("more slices than may be asked for at once"))
                }
                Ok(ToHolder::Slices(share, _))
                    if self.sealed.is_some() && share != HeadShare::WHOLE =>
                {
                    let refused = ToReader::Refused(NOT_CONVERTED.to_owned());
                    let told = say(link.get_mut(), &refused, self.limit).await;
                    told.and(Err(BrokenLink::Unexpected(NOT_CONVERTED)))
                }
                Ok(ToHolder::Slices(share, lives)) => {
                    let copy =
                        |life, slice: &mut Vec<u8>| cut(copy(life, slice)?, share, heads, slice);
                    let sealed = self.sealed.as_ref();
                    give(link.get_mut(), &lives, copy, sealed, self.limit).await
                }
                Ok(ToHolder::Nixl(0, asked)) => {
                    let answer = nixl::answer(self.nixl.as_ref(), &asked).await;
                    say(link.get_mut(), &answer, self.limit).await
                }
                Ok(ToHolder::SliceSums(lives)) => {
                    let sums = ToReader::SliceSums(self.sums(&lives).await);
                    say(link.get_mut(), &sums, self.limit).await
                }
                Ok(_) => Err(BrokenLink::Unexpected("a rank gives slices, and nothing else")),
                Err(why) => Err(why),
            };
            if let Err(why) = given {
                return tracing::debug!(reader, %why, "a rank of another worker is gone");
            }
        }
    }

    async fn sums(&self, lives: &[SlotLife]) -> Vec<Option<[u8; 4]>> {
        let (mut scratch, mut sums) = (Vec::new(), Vec::with_capacity(lives.len()));
        for life in lives {
            sums.push(self.slots.sum(life.get(), &mut scratch).map(u32::to_le_bytes));
            // It may have read a whole slice: others have their turn.
            yield_now().await;
        }
        sums
    }
}

/// Leaves of a slice the share of its heads that is wanted, and returns the checksum of that; `crc`
/// is the whole slice's. `None`: heads do not lie so that there were such a share.
pub(super) fn cut(
    crc: u32,
    share: HeadShare,
    heads: Option<HeadLayout>,
    slice: &mut Vec<u8>,
) -> Option<u32> {
    if share == HeadShare::WHOLE {
        return Some(crc);
    }
    heads?.cut(share, slice)?;
    Some(checksum(slice))
}

pub(super) async fn say(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &ToReader,
    limit: Duration,
) -> Result<(), BrokenLink> {
    timeout(limit, send(stream, message)).await.unwrap_or(Err(BrokenLink::Late))
}

/// Sends slices, each with its checksum, and says which of them are not there. `copy` reads one,
/// which lies `sealed` if there is something that seals.
pub(super) async fn give(
    stream: &mut (impl AsyncWrite + Unpin),
    lives: &[SlotLife],
    copy: impl Fn(SlotRef, &mut Vec<u8>) -> Option<u32>,
    sealed: Option<&Arc<HostSeal>>,
    limit: Duration,
) -> Result<(), BrokenLink> {
    let mut slice = Vec::new();
    let mut keys = sealed.map(|seal| SentKeys { seal, is_sent: HashMap::new() });
    for (place, life) in lives.iter().enumerate() {
        let head = match (copy(life.get(), &mut slice), &mut keys) {
            (Some(crc), Some(keys)) => keys.head(place, crc, &slice, limit).await,
            (crc, _) => crc.map(|crc| ToReader::Slice(Some(crc.to_le_bytes()))),
        };
        let sent = async {
            send(stream, head.as_ref().unwrap_or(&ToReader::Slice(None))).await?;
            if head.is_some() {
                stream.write_all(&slice).await?;
            }
            Ok(())
        };
        timeout(limit, sent).await.unwrap_or(Err(BrokenLink::Late))?;
    }
    Ok(stream.flush().await?)
}

/// The keys of a request's slices.
struct SentKeys<'a> {
    seal: &'a Arc<HostSeal>,
    /// Whether the reader has it, or it cannot be had.
    is_sent: HashMap<KeyId, bool>,
}

impl SentKeys<'_> {
    /// What goes before a slice that lies sealed. `None`: its key cannot be had.
    async fn head(
        &mut self,
        place: usize,
        crc: u32,
        slice: &[u8],
        limit: Duration,
    ) -> Option<ToReader> {
        let id = HostSeal::key_of(slice)?;
        let key = match self.is_sent.get(&id) {
            Some(true) => None,
            Some(false) => return None,
            None => {
                let named = timeout(limit, sealed::named_keys(self.seal, &[(place, id)])).await;
                let key = named.unwrap_or_default().pop();
                self.is_sent.insert(id, key.is_some());
                Some(key?)
            }
        };
        Some(ToReader::SealedSlice(crc.to_le_bytes(), key))
    }
}
