//! How long one call holds the table: `drop_forgotten` (a step of `Manager::forget`) and `evict` (`Manager::evict`).
struct Instant(u64);
#[allow(unsafe_code)]
fn cpu() -> u64 {
    unsafe extern "C" {
        fn clock_gettime(id: i32, t: *mut [i64; 2]) -> i32;
    }
    let mut t = [0i64; 2];
    unsafe { clock_gettime(3, &mut t) };
    t[0] as u64 * 1_000_000_000 + t[1] as u64
}
impl Instant {
    fn now() -> Self {
        Self(cpu())
    }
    fn elapsed(&self) -> std::time::Duration {
        std::time::Duration::from_nanos(cpu() - self.0)
    }
}

use kvbm::table::{Table, TierSpec};
use kvbm::{BlockHash, Chain, Hints, RequestInfo, Tier};
use kvbm_policies::EvictionKind;
use kvbm_tiers::FramePool;

const fn spread(n: u128) -> u128 {
    n.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835)
}

fn table(slots: u32) -> Table {
    Table::new([TierSpec {
        pool: FramePool::new(Tier::Host, slots),
        policy: EvictionKind::Lru.build(slots),
        flush_to: None,
        admission: None,
    }])
}

fn save(table: &mut Table, hashes: &[BlockHash], info: RequestInfo) {
    let reserved = table.reserve(Tier::Host, Chain::from(hashes), info);
    let mut effects = table.fill(reserved.transfer, 0, reserved.frames);
    while effects.has_more {
        effects = table.publish_more();
    }
    table.end_plan(reserved.transfer, None);
    let _ = table.take_effects();
}

#[test]
fn lock_holds() {
    let info = RequestInfo { hints: Hints { tenant: Some(7), ..Hints::default() }, ..RequestInfo::default() };
    for (prompts, blocks) in [(2_000_u128, 250_u128), (500, 250), (2_000, 1)] {
        let mut held = table(600_000);
        let chain = |n: u128| -> Vec<BlockHash> {
            (0..blocks).map(|i| BlockHash::from_u128(spread(n * 1_000 + i + 1))).collect()
        };
        // Their first turns, one block each; then the others.
        (0..prompts).for_each(|n| save(&mut held, &chain(n)[..1], info));
        (0..prompts).for_each(|n| save(&mut held, &chain(n), info));
        held.begin_forgetting(7);
        let (mut longest, mut calls, mut next) = (0.0_f64, 0, Some(0));
        let before = held.len();
        while let Some(from) = next {
            let began = Instant::now();
            next = held.drop_forgotten(7, from, &mut kvbm::table::Budget::of_a_hold()).1;
            longest = longest.max(began.elapsed().as_secs_f64());
            calls += 1;
            while held.drop_more() {}
            let _ = held.take_effects();
        }
        println!(
            "forget: a tenant of {prompts} prompts of {blocks} blocks ({before} records): {calls} steps, the longest holds the table {:.1} ms",
            longest * 1e3
        );
    }
    let mut held = table(500_000);
    let all: Vec<BlockHash> = (1..=500_000_u128).map(|n| BlockHash::from_u128(spread(n))).collect();
    all.chunks(50).for_each(|chain| save(&mut held, chain, RequestInfo::default()));
    let mut longest = 0.0_f64;
    let mut n = 0;
    let mut steps = 0;
    loop {
        let began = Instant::now();
        let mut hold = kvbm::table::Budget::of_a_hold();
        n += held.evict_some(Tier::Host, 500_000 - n, &mut hold);
        longest = longest.max(began.elapsed().as_secs_f64());
        steps += 1;
        if n == 500_000 || !hold.is_spent() {
            break;
        }
    }
    println!("evict: {n} blocks in {steps} holds, longest {:.2} ms", longest * 1e3);
}

/// A disk is away for a while: what that costs under the table's lock, when queues are thinned out and when it is back.
#[test]
fn disk_outage() {
    for slots in [50_000_u32, 500_000] {
        let spec = |tier, flush_to| TierSpec {
            pool: FramePool::new(tier, slots),
            policy: EvictionKind::Lru.build(slots),
            flush_to,
            admission: None,
        };
        let mut held = Table::new([spec(Tier::Host, Some(Tier::Disk)), spec(Tier::Disk, None)]);
        held.block_flushes(Tier::Host, true);
        let mut longest = [(0.0_f64, 0_u64); 2];
        let mut saved = 0_u64;
        let mut time = |began: Instant, saved: u64| {
            let took = (began.elapsed().as_secs_f64() * 1e3, saved);
            if took.0 > longest[0].0 {
                longest = [took, longest[0]];
            } else if took.0 > longest[1].0 {
                longest[1] = took;
            }
        };
        while saved < 7 * u64::from(slots) {
            let hashes: Vec<BlockHash> =
                (0..64).map(|i| BlockHash::from_u128(spread(u128::from(saved + i + 1)))).collect();
            let began = Instant::now();
            let reserved = held.reserve(Tier::Host, Chain::from(&hashes), RequestInfo::default());
            time(began, saved);
            let began = Instant::now();
            let mut effects = held.fill(reserved.transfer, 0, reserved.frames);
            time(began, saved);
            while effects.has_more {
                effects = held.publish_more();
            }
            held.end_plan(reserved.transfer, None);
            drop(held.take_effects());
            saved += 64;
        }
        let began = Instant::now();
        held.block_flushes(Tier::Host, false);
        let back = began.elapsed().as_secs_f64() * 1e3;
        println!(
            "a host tier of {slots} blocks, disk away: longest {longest:?} of {saved} blocks saved 64 at a time: {:.1} ms and {:.1} ms; the disk is back: \
             block_flushes(false) {back:.1} ms, dirty {}",
            longest[0].0,
            longest[1].0,
            held.dirty(Tier::Host)
        );
    }
}

/// A prompt comes to a full last tier whose policy weighs newcomers (`hazard`, the default): how long each step of its plan holds the table.
#[test]
fn admission_of_a_long_chain() {
    for slots in [50_000_u32, 500_000] {
        let mut held = Table::new([TierSpec {
            pool: FramePool::new(Tier::Host, slots),
            policy: EvictionKind::Hazard.build(slots),
            flush_to: None,
            admission: None,
        }]);
        let chain = |n: u128, blocks: u128| -> Vec<BlockHash> {
            (0..blocks).map(|i| BlockHash::from_u128(spread(n * 10_000 + i + 1))).collect()
        };
        let mut n = 0;
        let mut now = 0;
        while n < 2 * u128::from(slots) / 100 {
            n += 1;
            now += 10;
            held.advance_clock(now);
            save(&mut held, &chain(n, 100), RequestInfo::default());
            let mut work = Vec::new();
            while held.upkeep(&mut work) {}
            work.into_iter().for_each(|work| work());
        }
        let mut steps = Vec::new();
        for round in 0..20 {
            held.advance_clock(now + 1_000 * (round + 1));
            let hashes = chain(1_000_000 + u128::from(round), 8_192);
            let mut plan = held.plan_filling(Tier::Host, Chain::from(&hashes), RequestInfo::default());
            loop {
                let began = Instant::now();
                let is_over = held.extend(&mut plan);
                steps.push(began.elapsed().as_secs_f64() * 1e3);
                if is_over {
                    break;
                }
            }
            let reserved = held.reserved(&mut plan);
            let mut effects = held.fill(reserved.transfer, 0, reserved.frames);
            while effects.has_more {
                effects = held.publish_more();
            }
            held.end_plan(reserved.transfer, None);
            drop(held.take_effects());
        }
        steps.sort_by(f64::total_cmp);
        println!(
            "full last tier of {slots}, hazard, 20 prompts of 8,192 blocks: {} steps, median {:.3} ms, longest {:.2} ms",
            steps.len(),
            steps[steps.len() / 2],
            steps[steps.len() - 1]
        );
    }
}
