//! A day in the life of a chat service, made up: sessions that share system prompts, and grow turn
//! by turn.

use std::collections::BTreeMap;

use kvbm_policies::{BLOCK_TOKENS, Request};

use crate::pattern::scramble;

const SESSIONS: u64 = 700;
/// Sessions begin within this time.
const SPAN_MS: u64 = HOUR_MS;
const HOUR_MS: u64 = 3_600_000;
/// Tokens of the system prompts; a session has one of them.
const SYSTEM_TOKENS: [u32; 4] =
    [6 * BLOCK_TOKENS, 9 * BLOCK_TOKENS, 14 * BLOCK_TOKENS, 20 * BLOCK_TOKENS];
/// By the numbers of their system prompts.
pub(super) const TENANTS: [u32; 4] = [0, 1, 2, 3];
/// Chats end when their history would not fit any more.
const CONTEXT_TOKENS: u32 = 160 * BLOCK_TOKENS;

/// All requests in the order of their arrival; the same ones every time.
pub(super) fn requests() -> Vec<Request> {
    let mut requests: Vec<_> = (0..SESSIONS).flat_map(session).collect();
    requests.sort_by_key(|request| request.timestamp_ms);
    requests
}

/// Other sessions after [these](requests), as many each hour, in the order of their arrival.
pub(super) fn without_end() -> impl Iterator<Item = Request> {
    let first_ms = requests().last().map_or(0, |last| last.timestamp_ms);
    let (mut pending, mut number) = (BTreeMap::new(), 0_u64);
    (1..).flat_map(move |hour| {
        let begun = (hour * SESSIONS..(hour + 1) * SESSIONS).flat_map(session);
        for mut request in begun {
            request.timestamp_ms += first_ms + (hour - 1) * SPAN_MS;
            // Two may come at the same millisecond.
            number += 1;
            pending.insert((request.timestamp_ms, number), request);
        }
        let later = pending.split_off(&(first_ms + hour * SPAN_MS, 0));
        std::mem::replace(&mut pending, later).into_values()
    })
}

fn session(number: u64) -> impl Iterator<Item = Request> {
    let mut dice = ChatDice(scramble(number));
    let system = dice.below(SYSTEM_TOKENS.len() as u64) as usize;
    let mut now_ms = dice.below(SPAN_MS);
    let mut tokens = SYSTEM_TOKENS[system];
    let turns = 2 + dice.below(14);
    let turns = (0..turns).map(move |_| {
        // A third of the first questions come with a document.
        let is_document = tokens == SYSTEM_TOKENS[system] && dice.below(3) == 0;
        let question =
            if is_document { dice.between(2_000, 20_000) } else { dice.between(20, 900) };
        let answer = dice.between(100, 1_800);
        let request = prompt(number, system, tokens + question as u32, answer as u32, now_ms);
        tokens = request.input_length + request.output_length;
        // Now and then the user goes away for long.
        let pause = if dice.below(7) == 0 { dice.between(HOUR_MS / 4, 2 * HOUR_MS) } else { 0 };
        now_ms += answer * 20 + dice.exponential(90_000.0) + pause;
        request
    });
    turns.take_while(|request| request.input_length < CONTEXT_TOKENS)
}

fn prompt(
    session: u64,
    system: usize,
    input_length: u32,
    output_length: u32,
    timestamp_ms: u64,
) -> Request {
    let shared = u64::from(SYSTEM_TOKENS[system] / BLOCK_TOKENS);
    let id = |block| {
        if block < shared { name(1, system as u64, block) } else { name(2, session, block) }
    };
    let hash_ids = (0..u64::from(input_length / BLOCK_TOKENS)).map(id).collect();
    Request { timestamp_ms, input_length, output_length, hash_ids }
}

/// Whose chat it is: each system prompt is of another service.
pub(super) fn tenant(request: &Request) -> Option<u32> {
    let first = *request.hash_ids.first()?;
    TENANTS.into_iter().find(|&tenant| name(1, u64::from(tenant), 0) == first)
}

fn name(kind: u64, owner: u64, block: u64) -> u64 {
    scramble(scramble(kind << 32 | owner).wrapping_add(block))
}

/// A small seeded generator.
struct ChatDice(u64);

impl ChatDice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        scramble(self.0)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.roll() % limit
    }

    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low)
    }

    fn exponential(&mut self, mean: f64) -> u64 {
        let uniform = (self.roll() >> 11) as f64 / (1_u64 << 53) as f64;
        (-(1.0 - uniform).ln() * mean) as u64
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_same_chat_comes_every_time_and_fills_every_tier() {
        let requests = requests();
        assert_eq!(requests, super::requests());
        assert!(requests.is_sorted_by_key(|request| request.timestamp_ms));
        let blocks: HashSet<_> = requests.iter().flat_map(|request| &request.hash_ids).collect();
        let tiers =
            super::super::DEVICE_BLOCKS + super::super::HOST_BLOCKS + super::super::DISK_BLOCKS;
        assert!(blocks.len() as u64 > tiers * 5 / 4, "{} blocks", blocks.len());
    }

    #[test]
    fn the_chats_that_go_on_are_others_and_in_order() {
        let first = requests();
        let more: Vec<_> = without_end().take(2 * first.len()).collect();
        assert!(more.is_sorted_by_key(|request| request.timestamp_ms));
        assert!(more[0].timestamp_ms >= first[first.len() - 1].timestamp_ms);
        let own = |requests: &[Request]| -> HashSet<u64> {
            requests.iter().filter_map(|request| request.hash_ids.last().copied()).collect()
        };
        assert!(
            own(&first).intersection(&own(&more)).count() < 5,
            "prompts of system tokens alone may recur"
        );
        assert_eq!(more.len(), 2 * first.len());
    }

    #[test]
    fn every_request_is_of_a_tenant() {
        let tenants: HashSet<_> =
            requests().iter().map(|request| tenant(request).unwrap()).collect();
        assert_eq!(tenants, TENANTS.into());
    }

    #[test]
    fn a_turn_continues_its_session() {
        let turns: Vec<_> = session(3).collect();
        assert!(turns.len() > 1);
        for (turn, next) in turns.iter().zip(&turns[1..]) {
            assert!(next.hash_ids.starts_with(turn.full_blocks()));
            assert!(next.timestamp_ms > turn.timestamp_ms);
        }
    }
}
