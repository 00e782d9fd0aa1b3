//! What a prompt's transfer adds to a prompt that is computed in steps, or in one step layer by layer,
//! each of which travels while the next one is computed.

use std::num::NonZeroU16;
use std::thread;
use std::time::{Duration, Instant};

use kvbm::blocking::Blocks;
use kvbm::{BlockHash, Error, FollowRequest, RequestInfo, Tier};
use kvbm_tests::engine::{self, peer_name};
use kvbm_tests::rig::chain;
use kvbm_tiers::layers::bytes_of_layer;
use kvbm_tiers::testing::{fill_pattern, has_pattern};
use serde_json::json;

use super::{LIMIT, by, from_toml, has_nixl, list, open, tell_figures};

const STEPS: u32 = 32;
const STEP_BLOCKS: u32 = 16;
const BLOCKS: u32 = STEPS * STEP_BLOCKS;
const BLOCK_BYTES: usize = 256 << 10;
const LAYERS: NonZeroU16 = NonZeroU16::new(32).unwrap();
const ROUNDS: u32 = 5;
/// A step, or a layer, is computed in this many times what its part of the transfer takes.
const PACE: f64 = 1.5;
const HOST: &str = "block_bytes = \"256KiB\"\nhost.capacity = \"160MiB\"\npeers.lease_share = 1.0";

struct Pair {
    there: Blocks,
    here: Blocks,
    peer: String,
    /// What is computed, so that saving it is a copy.
    computed: Vec<u8>,
}

impl Pair {
    fn open(way: &str) -> Self {
        let host = format!("{HOST}\n{}", by(way));
        let there = open(from_toml(&host), "1").unwrap();
        let address = engine::address(there.manager());
        let here = open(from_toml(&format!("{host}\n{}", list(&address))), "1").unwrap();
        let mut computed = vec![0; BLOCKS as usize * BLOCK_BYTES];
        computed
            .chunks_mut(BLOCK_BYTES)
            .enumerate()
            .for_each(|(at, block)| fill_pattern(at, block));
        Self { there, here, peer: peer_name(&address), computed }
    }

    /// Saves what is computed of a prompt.
    fn save(&self, prompt: &[BlockHash]) {
        let fill = |at: usize, slot: &mut [u8]| {
            slot.copy_from_slice(&self.computed[at * BLOCK_BYTES..][..BLOCK_BYTES]);
            Ok::<_, Error>(())
        };
        assert_eq!(self.there.put(prompt, fill).unwrap(), prompt.len());
    }

    /// Brings a prompt as it comes to be there; says when it was here.
    fn follow(&self, prompt: &[BlockHash]) -> Instant {
        let peers = self.here.manager().peers().unwrap();
        let asked = FollowRequest { patience: LIMIT, ..FollowRequest::new(&self.peer, prompt) };
        let pulled = peers.follow(asked).wait().unwrap();
        let end = Instant::now();
        assert_eq!((pulled.copied, pulled.fault), (prompt.len(), None));
        end
    }

    /// Every byte is right; then both are empty.
    fn check(&self, prompt: &[BlockHash]) {
        let check = |at: usize, block: &[u8]| {
            assert!(has_pattern(at, block), "a wrong block at {at}");
            Ok::<_, Error>(())
        };
        assert_eq!(self.here.get(prompt, check).unwrap(), prompt.len());
        for worker in [&self.there, &self.here] {
            worker.manager().admin().evict(Tier::Host, usize::MAX);
        }
    }

    /// What it takes from the end of a prompt that is computed in one step.
    fn whole(&self, n: u32) -> Duration {
        let (prompt, began) = (chain(n, BLOCKS), Instant::now());
        self.save(&prompt);
        let took = self.follow(&prompt) - began;
        self.check(&prompt);
        took
    }

    /// The same from the end of the last step of one that is computed in many.
    fn tail(&self, n: u32, whole: Duration) -> Duration {
        let prompt = chain(n, BLOCKS);
        let step = whole.mul_f64(PACE / f64::from(STEPS));
        let (last, end) = thread::scope(|scope| {
            let computing = scope.spawn(|| {
                let mut computed = Instant::now();
                for until in 1..=STEPS {
                    computed += step;
                    thread::sleep(computed.saturating_duration_since(Instant::now()));
                    self.save(&prompt[..(until * STEP_BLOCKS) as usize]);
                }
                computed
            });
            let end = self.follow(&prompt);
            (computing.join().unwrap(), end)
        });
        self.check(&prompt);
        end.saturating_duration_since(last)
    }

    /// The same from the end of the last layer of one that is computed in one step.
    fn tail_of_layers(&self, n: u32, whole: Duration) -> Duration {
        let prompt = chain(n, BLOCKS);
        let pace = whole.mul_f64(PACE / f64::from(LAYERS.get()));
        let (last, end) = thread::scope(|scope| {
            let computing = scope.spawn(|| {
                let mut put =
                    self.there.put_in_layers(RequestInfo::default(), &prompt, LAYERS).unwrap();
                let mut computed = Instant::now();
                for layer in 0..LAYERS.get() {
                    computed += pace;
                    thread::sleep(computed.saturating_duration_since(Instant::now()));
                    let bytes = bytes_of_layer(BLOCK_BYTES, layer, LAYERS);
                    put.write(|at, part| {
                        part.copy_from_slice(
                            &self.computed[at * BLOCK_BYTES..][..BLOCK_BYTES][bytes.clone()],
                        );
                        Ok::<_, Error>(())
                    })
                    .unwrap();
                }
                assert_eq!(put.finish().unwrap(), prompt.len());
                computed
            });
            let end = self.follow(&prompt);
            (computing.join().unwrap(), end)
        });
        self.check(&prompt);
        end.saturating_duration_since(last)
    }

    /// What it takes to hear of a peer that it has nothing more.
    fn notification(&self, n: u32) -> Duration {
        let (peers, began) = (self.here.manager().peers().unwrap(), Instant::now());
        let lease = peers.lease(&self.peer, chain(n, 1), RequestInfo::default()).wait().unwrap();
        let took = began.elapsed();
        // So that the connection is kept.
        assert_eq!(peers.pull(lease).wait().unwrap().copied, 0);
        took
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// What is left after a tail, beside the whole transfer.
struct LeftOver {
    whole: Duration,
    tail: Duration,
    notification: Duration,
}

impl LeftOver {
    fn tell(&self, name: &str, way: &str, parts: u32) {
        let Self { whole, tail, notification } = *self;
        let left = tail.saturating_sub(notification).div_duration_f64(whole);
        let us = |time: Duration| time.as_micros() as u64;
        tell_figures(&json!({name: {
            "way": way,
            "parts": parts,
            "bytes": BLOCKS as usize * BLOCK_BYTES,
            "whole_us": us(whole),
            "left_us": us(tail),
            "notification_us": us(notification),
            "left_of_whole": (1e4 * left).round() / 1e4,
        }}));
    }
}

#[test]
#[ignore = "it measures: tests/peers.sh has it"]
fn what_is_left_behind_the_last_step_or_layer() {
    let is_here = |way: &&str| !way.starts_with("nixl") || has_nixl();
    for way in ["memory", "tcp", "nixl", "nixl over tcp"].into_iter().filter(is_here) {
        let pair = Pair::open(way);
        // First contact, and memory that is touched for the first time.
        pair.whole(0);
        let times = |of: &dyn Fn(u32) -> Duration| median((1..=ROUNDS).map(of).collect());
        let notification = times(&|n| pair.notification(1_000 + n));
        let whole = times(&|n| pair.whole(n));
        let tail = times(&|n| pair.tail(100 + n, whole));
        LeftOver { whole, tail, notification }.tell("steps", way, STEPS);
        let tail = times(&|n| pair.tail_of_layers(200 + n, whole));
        LeftOver { whole, tail, notification }.tell("layers", way, LAYERS.get().into());
    }
}
