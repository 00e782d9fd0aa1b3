//! Requests that have not ended, in a simulation or a replay: a trace says when each began and how
//! much it generated, and the latter must not be known before the end.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::seam::{Ended, RequestId};

/// From a request's arrival to its first token, in milliseconds.
// These two are those of the published figures, so that ours compare with them.
pub const FIRST_TOKEN_MS: u64 = 500;
/// From one generated token to the next, in milliseconds.
pub const TOKEN_MS: u64 = 20;

/// The requests that have not ended, by the time when they will: [`FIRST_TOKEN_MS`] after their
/// arrival and [`TOKEN_MS`] for each generated token later.
#[derive(Debug, Default)]
pub struct Running(BinaryHeap<Reverse<(u64, RequestId, u32)>>);

impl Running {
    /// `request` arrives at `now_ms` and will generate `output_tokens`.
    pub fn start(&mut self, request: RequestId, now_ms: u64, output_tokens: u32) {
        let end_ms = now_ms
            .saturating_add(FIRST_TOKEN_MS)
            .saturating_add(TOKEN_MS * u64::from(output_tokens));
        self.0.push(Reverse((end_ms, request, output_tokens)));
    }

    /// The next request that has ended by `now_ms`, each once, in the order of their ends.
    pub fn next_ended(&mut self, now_ms: u64) -> Option<Ended> {
        self.0.peek().filter(|&&Reverse((end_ms, ..))| end_ms <= now_ms)?;
        let Reverse((at_ms, request, output_tokens)) = self.0.pop()?;
        Some(Ended { request, output_tokens, will_not_return: false, at_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_end_in_order_and_not_before_their_ends() {
        let mut running = Running::default();
        running.start(RequestId(1), 0, 100);
        running.start(RequestId(2), 10, 1);
        assert_eq!(running.next_ended(529), None);
        let ended = |request, output_tokens, at_ms| {
            Some(Ended {
                request: RequestId(request),
                output_tokens,
                will_not_return: false,
                at_ms,
            })
        };
        assert_eq!(running.next_ended(2_500), ended(2, 1, 530));
        assert_eq!(running.next_ended(2_500), ended(1, 100, 2_500));
        assert_eq!(running.next_ended(u64::MAX), None);
    }
}
