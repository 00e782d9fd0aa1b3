//! Whether a segment is what its footer says.

use std::collections::VecDeque;

use bytes::Bytes;
use object_store::{ObjectMeta, ObjectStoreExt};
use tokio::time::{Instant, timeout};

use super::super::discover::{FooterError, TAIL, fetch_footer};
use super::super::open::Store;
use super::super::segment::{Footer, FooterKey, FormatError, SEALED_VERSION, SegmentEntry};
use super::{OPERATION_LIMIT, Problem};
use crate::checksum::RunningChecksum;

/// Bytes that are fetched with one request.
const PIECE: u64 = 4 << 20;

/// What a segment holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ObjectContent {
    Blocks {
        blocks: u64,
        wrong: u64,
        /// The footer was verified with a key.
        is_authentic: bool,
    },
    /// Blocks do not lie as writers lay them.
    Crooked,
    Format(FormatError),
    /// It was deleted meanwhile.
    Gone,
    Unread(String),
}

impl ObjectContent {
    /// Reads all of a segment, `PIECE` bytes at a time; an authenticated one if its key is there.
    pub(super) async fn read(
        store: &Store,
        meta: &ObjectMeta,
        key: Option<FooterKey<'_>>,
        on_read: &(dyn Fn(u64) + Sync),
    ) -> Self {
        let (entries, is_authentic) = match read_footer(store, meta, key).await {
            Ok((footer, is_authentic)) => (footer.entries, is_authentic),
            Err(error) => {
                on_read(meta.size);
                return Self::of(error);
            }
        };
        let payload: u64 = entries.iter().map(|entry| entry.length).sum();
        let Some(mut check) = BlockCheck::new(entries) else { return Self::Crooked };
        let mut at = 0;
        while at < payload {
            let end = (at + PIECE).min(payload);
            match piece(store, meta, at..end).await {
                Ok(piece) => check.take(&piece),
                Err(error) => return Self::of(error),
            }
            on_read(end - at);
            at = end;
        }
        on_read(meta.size.saturating_sub(payload));
        Self::Blocks { blocks: check.blocks, wrong: check.wrong, is_authentic }
    }

    fn of(error: FooterError) -> Self {
        match error {
            FooterError::Gone => Self::Gone,
            FooterError::Store(error) => Self::Unread(error.to_string()),
            FooterError::Format(error) => Self::Format(error),
        }
    }

    /// How many, and how many of them have changed.
    pub(super) const fn blocks(&self) -> (u64, u64) {
        match self {
            Self::Blocks { blocks, wrong, .. } => (*blocks, *wrong),
            _ => (0, 0),
        }
    }

    /// What is wrong with it.
    pub(super) fn problem(&self) -> Option<(Problem, String)> {
        match self {
            Self::Blocks { wrong: 0, .. } | Self::Gone => None,
            Self::Blocks { wrong, blocks, .. } => {
                Some((Problem::Damaged, format!("{wrong} of {blocks} blocks have changed")))
            }
            Self::Crooked => {
                Some((Problem::Damaged, "its blocks do not lie side by side".to_owned()))
            }
            // Another's, as far as can be told without the key.
            Self::Format(error @ (FormatError::Version { .. } | FormatError::NoKey { .. })) => {
                Some((Problem::Foreign, error.to_string()))
            }
            Self::Format(error @ (FormatError::NotASegment | FormatError::Incomplete { .. })) => {
                Some((Problem::Torn, error.to_string()))
            }
            Self::Format(error) => Some((Problem::Damaged, error.to_string())),
            Self::Unread(why) => Some((Problem::Unread, why.clone())),
        }
    }
}

/// The footer, and whether it was verified with the key: only one that asks for a key is.
async fn read_footer(
    store: &Store,
    meta: &ObjectMeta,
    key: Option<FooterKey<'_>>,
) -> Result<(Footer, bool), FooterError> {
    let deadline = Instant::now() + OPERATION_LIMIT;
    match fetch_footer(store, meta, TAIL, None, deadline).await {
        Err(FooterError::Format(FormatError::Version { version: SEALED_VERSION }))
            if key.is_some() =>
        {
            Ok((fetch_footer(store, meta, TAIL, key, deadline).await?, true))
        }
        footer => Ok((footer?, false)),
    }
}

async fn piece(
    store: &Store,
    meta: &ObjectMeta,
    range: std::ops::Range<u64>,
) -> Result<Bytes, FooterError> {
    match timeout(OPERATION_LIMIT, store.client.get_range(&meta.location, range)).await {
        Ok(Ok(piece)) => Ok(piece),
        Ok(Err(error)) => Err(FooterError::of(store, &error)),
        Err(elapsed) => Err(FooterError::Store(elapsed.into())),
    }
}

/// Compares blocks with their checksums as their bytes come.
struct BlockCheck {
    left: VecDeque<SegmentEntry>,
    /// Of the first one that is left.
    taken: u64,
    sum: RunningChecksum,
    blocks: u64,
    wrong: u64,
}

impl BlockCheck {
    /// `None`: the blocks do not lie one behind another.
    fn new(entries: Vec<SegmentEntry>) -> Option<Self> {
        let mut end = 0;
        for entry in &entries {
            if entry.offset != end || entry.length == 0 {
                return None;
            }
            end += entry.length;
        }
        let blocks = entries.len() as u64;
        Some(Self { left: entries.into(), taken: 0, sum: RunningChecksum::new(), blocks, wrong: 0 })
    }

    fn take(&mut self, mut bytes: &[u8]) {
        while let Some(entry) = self.left.front().copied().filter(|_| !bytes.is_empty()) {
            let (part, rest) =
                bytes.split_at(bytes.len().min((entry.length - self.taken) as usize));
            self.sum.add(part);
            self.taken += part.len() as u64;
            bytes = rest;
            if self.taken == entry.length {
                let sum = std::mem::take(&mut self.sum);
                self.wrong += u64::from(sum.value() != entry.crc32c);
                self.taken = 0;
                self.left.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::checksum;
    use crate::copy::BlockKey;

    fn entry(at: u64, bytes: &[u8]) -> SegmentEntry {
        let block = BlockKey { hash: at.into(), group: 0 };
        SegmentEntry {
            block,
            parent: None,
            offset: at,
            length: bytes.len() as u64,
            crc32c: checksum(bytes),
            tenant: None,
        }
    }

    #[test]
    fn blocks_are_compared_however_their_bytes_come() {
        let payload: Vec<u8> = (0..100).collect();
        let mut entries =
            vec![entry(0, &payload[..30]), entry(30, &payload[30..31]), entry(31, &payload[31..])];
        entries[2].crc32c ^= 1;
        for size in [1, 7, 30, 100] {
            let mut check = BlockCheck::new(entries.clone()).unwrap();
            payload.chunks(size).for_each(|piece| check.take(piece));
            assert_eq!((check.blocks, check.wrong, check.left.len()), (3, 1, 0), "{size}");
        }
        assert!(BlockCheck::new(vec![entry(1, &payload)]).is_none());
    }
}
