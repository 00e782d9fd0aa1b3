//! Workers with ranks that read each other, whether their blocks are alike or not: each rank brings its
//! slices from the ranks that have its heads, every byte checked in each, while processes are killed,
//! frozen, or give their slots to other blocks.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::time::Instant;

use kvbm::{BlockHash, ChainNames, NewEpoch, RequestInfo, Tier};
use kvbm_settings::{Capacity, PeerNixl, Settings};
use kvbm_tests::engine::{self, address, peer_name};
use kvbm_tests::fleet::{self, Fleet, HeadForm, LIMIT, Served, be_a_started_rank_of, group_of};
use kvbm_tests::process::Process;
use kvbm_tests::rig::{chain, has_nixl, metric, number_of, wait_until};
use kvbm_tiers::numbers::{HalfType, halves_to_halves};
use kvbm_tiers::ranks::HeadShare;
use serde_json::json;
use tempfile::TempDir;

const TTL_MS: u64 = 2_000;
/// Blocks of the longest prompt that is timed.
const MEASURED_BLOCKS: usize = 512;
/// Ranks of most workers here.
const WORLD: u16 = 2;

fn of_peer(dir: &Path) -> Settings {
    let mut settings = fleet::settings(dir);
    let bytes = form_of(dir).block_bytes() as u64;
    settings.block_bytes = Some(bytes / u64::from(group_of(dir).world));
    engine::add_peers(&mut settings, "");
    settings.peers.convert_types = true;
    settings.peers.secret = Some("the secret of these tests".to_owned());
    // A first contact by NIXL takes a while, which is not what is measured.
    let is_measured = named(dir).starts_with("large");
    if is_measured {
        for tier in [
            &mut settings.device.capacity,
            &mut settings.host.capacity,
            &mut settings.disk.capacity,
        ] {
            *tier = Some(Capacity::Blocks(2 * MEASURED_BLOCKS as u64));
        }
    }
    let way = Way::of(dir);
    settings.peers.shared_memory = matches!(way, Way::Memory);
    settings.peers.nixl = way.nixl();
    settings.peers.lease_ttl_ms = if is_measured { 5 * TTL_MS } else { TTL_MS };
    settings.peers.lease_share = 1.0;
    settings
}

/// The directory says what blocks are, and how slices come: `reader-32hnd.fp16-tcp-2`.
fn form_of(dir: &Path) -> HeadForm {
    let form = named(dir).split('-').nth(1).unwrap();
    let at = form.find(char::is_alphabetic).unwrap();
    let (order, dtype) = form[at..].split_once('.').unwrap();
    let order = ORDERS.into_iter().find(|(name, _)| *name == order).unwrap().1;
    let form = order.of_tokens(form[..at].parse().unwrap());
    if dtype == "bf16" { form.of_bf16() } else { form }
}

const ORDERS: [(&str, HeadForm); 3] =
    [("nhd", HeadForm::NHD), ("hnd", HeadForm::HND), ("layers", HeadForm::LAYERS_INSIDE)];

fn named(dir: &Path) -> &str {
    dir.file_name().and_then(|name| name.to_str()).unwrap()
}

/// How slices come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Tcp,
    Nixl,
    NixlOrTcp,
    Memory,
}

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Nixl => "nixl",
            Self::NixlOrTcp => "auto",
            Self::Memory => "memory",
        }
    }

    fn of(dir: &Path) -> Self {
        let name = named(dir).split('-').nth(2).unwrap();
        let all = [Self::Tcp, Self::Nixl, Self::NixlOrTcp, Self::Memory];
        all.into_iter().find(|way| way.name() == name).unwrap()
    }

    const fn nixl(self) -> PeerNixl {
        match self {
            Self::Tcp | Self::Memory => PeerNixl::Off,
            Self::Nixl => PeerNixl::Required,
            Self::NixlOrTcp => PeerNixl::Auto,
        }
    }
}

/// Not a test: the process of a rank, when another test starts it.
#[test]
fn process() {
    be_a_started_rank_of(of_peer, form_of);
}

fn open(home: &Path, name: &str, world: u16, reads_at: &str) -> Fleet {
    open_by(Way::Tcp, home, name, world, reads_at)
}

fn open_by(way: Way, home: &Path, name: &str, world: u16, reads_at: &str) -> Fleet {
    open_as((HeadForm::NHD, world), way, home, name, reads_at)
}

fn open_as(
    (form, world): (HeadForm, u16),
    way: Way,
    home: &Path,
    name: &str,
    reads_at: &str,
) -> Fleet {
    let (order, _) = ORDERS.into_iter().find(|(_, known)| known.order == form.order).unwrap();
    let HeadForm { tokens, dtype, .. } = form;
    let dir = home.join(format!("{name}-{tokens}{order}.{dtype}-{}-{world}", way.name()));
    let mut settings = of_peer(&dir);
    settings.peers.addresses = Some(reads_at.to_owned()).filter(|list| !list.is_empty());
    let group = group_of(&dir);
    let fingerprint = form.fingerprint(group.world);
    Fleet::open(module_path!(), &dir, settings, group, Some(fingerprint))
}

struct Pair {
    there: Fleet,
    here: Fleet,
    peer: String,
    _home: TempDir,
}

impl Pair {
    fn open(way: Way) -> Self {
        Self::of(way, WORLD, WORLD)
    }

    /// Workers by their number of ranks.
    fn of(way: Way, holder: u16, reader: u16) -> Self {
        let home = tempfile::tempdir().unwrap();
        let there = open_by(way, home.path(), "holder", holder, "");
        let address = address(&there.manager);
        let here = open_by(way, home.path(), "reader", reader, &address);
        Self { there, here, peer: peer_name(&address), _home: home }
    }

    /// How many blocks of a chain come, and why not more.
    fn read(&self, chain: &[BlockHash]) -> (usize, Option<String>) {
        self.read_after(chain, || ())
    }

    /// `happens` while it is leased.
    fn read_after(&self, chain: &[BlockHash], happens: impl FnOnce()) -> (usize, Option<String>) {
        let peers = self.here.manager.peers().unwrap();
        let leased = peers.lease(&self.peer, chain, RequestInfo::default()).wait();
        happens();
        match leased.and_then(|lease| peers.pull(lease).wait()) {
            Ok(pulled) => (pulled.copied, pulled.fault),
            Err(error) => (0, Some(error.to_string())),
        }
    }

    /// Computes a chain there, reads it, and uses it here.
    fn heals(&mut self, n: u32) {
        let chain = chain(n, 6);
        self.there.assert_heals(&chain);
        wait_until(LIMIT, "it does not come again", || self.read(&chain).0 == chain.len());
        let served = Served { hit: 6, saved: 6, ..Served::default() };
        assert_eq!(self.here.serve(&chain), served);
        self.there.assert_sound();
        self.here.assert_sound();
        await_room(&self.there);
    }

    fn end(self) {
        self.here.end();
        self.there.end();
    }
}

#[test]
fn each_rank_gets_its_slices_of_the_other_worker() {
    each_rank_gets_its_slices(Way::Tcp);
}

#[test]
fn each_rank_gets_its_slices_by_nixl() {
    if has_nixl() {
        each_rank_gets_its_slices(Way::Nixl);
    }
}

#[test]
fn each_rank_copies_its_slices_out_of_a_neighbours_memory() {
    each_rank_gets_its_slices(Way::Memory);
}

fn each_rank_gets_its_slices(way: Way) {
    let mut pair = Pair::open(way);
    for n in 1..4 {
        assert_eq!(pair.there.serve(&chain(n, 6)).saved, 6);
        assert_eq!(pair.read(&chain(n, 6)), (6, None));
        let served = Served { hit: 6, saved: 6, ..Served::default() };
        assert_eq!(pair.here.serve(&chain(n, 6)), served);
    }
    // Its own and its neighbour's.
    let mapped = if way == Way::Memory { 2 } else { 0 };
    for rank in pair.here.ranks.iter().flatten() {
        assert_eq!(regions_mapped(rank), mapped);
    }
    // Onto the device at once.
    assert_eq!(pair.there.serve(&chain(9, 6)).saved, 6);
    let peers = pair.here.manager.peers().unwrap();
    let lease = peers.lease(&pair.peer, chain(9, 6), RequestInfo::default()).wait().unwrap();
    assert_eq!(fleet::answer(pair.here.manager.load(lease)).blocks, 6);
    assert_eq!(pair.here.serve(&chain(9, 6)).wrong, 0);
    // What is here need not come.
    assert_eq!(pair.read(&chain(9, 6)), (0, None));
    pair.heals(10);
    pair.end();
}

/// How many shareable host tiers a process has mapped.
fn regions_mapped(rank: &Process) -> usize {
    let maps = fs::read_to_string(format!("/proc/{}/maps", rank.id())).unwrap();
    let files = maps.lines().filter(|map| map.contains("/memfd:"));
    // Of one file, with its number.
    files.filter_map(|map| map.split_whitespace().nth(4)).collect::<HashSet<_>>().len()
}

#[test]
fn a_reset_at_either_worker_leaves_nothing_wrong() {
    a_reset_leaves_nothing_wrong(Way::Tcp);
}

#[test]
fn a_reset_leaves_nothing_wrong_by_nixl() {
    if has_nixl() {
        a_reset_leaves_nothing_wrong(Way::Nixl);
    }
}

#[test]
fn a_reset_leaves_nothing_wrong_in_memory() {
    a_reset_leaves_nothing_wrong(Way::Memory);
}

fn a_reset_leaves_nothing_wrong(way: Way) {
    let mut pair = Pair::open(way);
    let weights = |number| NewEpoch::of_weights(number, "new");
    assert_eq!(pair.there.serve(&chain(1, 6)).saved, 6);
    // What was leased is what it was, or does not come.
    let (copied, why) = pair.read_after(&chain(1, 6), || {
        pair.there.manager.reset(weights(1)).unwrap();
    });
    assert_eq!((copied == 6, why.is_some()), (why.is_none(), copied < 6), "{copied} {why:?}");
    assert_eq!(pair.here.serve(&chain(1, 6)).wrong, 0);
    let why = pair.read(&chain(2, 6)).1.expect("it has other weights");
    assert!(why.contains("different epochs"), "{why}");
    pair.here.manager.reset(weights(1)).unwrap();
    pair.heals(10);
    let read = pair.read_after(&chain(1, 6), || pair.here.manager.reset(weights(2)).unwrap());
    assert_eq!(read.0, 0, "{:?}", read.1);
    pair.there.manager.reset(weights(2)).unwrap();
    pair.heals(11);
    pair.end();
}

#[test]
fn killed_ranks_cost_misses_and_then_it_heals() {
    killed_ranks_cost_misses(Way::Tcp);
}

#[test]
fn killed_ranks_cost_misses_by_nixl() {
    if has_nixl() {
        killed_ranks_cost_misses(Way::Nixl);
    }
}

#[test]
fn killed_neighbours_cost_misses_and_then_it_heals() {
    killed_ranks_cost_misses(Way::Memory);
}

fn killed_ranks_cost_misses(way: Way) {
    let mut pair = Pair::open(way);
    for (n, rank) in [(1, 0), (2, 1)] {
        // The holder's, between the lease and the pull.
        assert_eq!(pair.there.serve(&chain(n, 6)).saved, 6);
        let peers = pair.here.manager.peers().unwrap();
        let lease = peers.lease(&pair.peer, chain(n, 6), RequestInfo::default()).wait().unwrap();
        pair.there.kill(rank);
        let pulled = peers.pull(lease).wait().unwrap();
        assert_eq!(pulled.copied, 0);
        assert!(pulled.fault.is_some());
        drop(pulled);
        wait_until(LIMIT, "no one says that it is away", || {
            pair.read(&chain(n, 6)).1.is_some_and(|why| why.contains("a rank of it is away"))
                || pair.there.manager.matches(&chain(n, 6)).longest() == 0
        });
        pair.there.restart(rank as u16);
        pair.heals(10 + n);
        // The reader's.
        let peers = pair.here.manager.peers().unwrap();
        assert_eq!(pair.there.serve(&chain(20 + n, 6)).saved, 6);
        let lease =
            peers.lease(&pair.peer, chain(20 + n, 6), RequestInfo::default()).wait().unwrap();
        pair.here.kill(rank);
        match pair.here.manager.peers().unwrap().pull(lease).wait() {
            Ok(pulled) => assert_eq!(pulled.copied, 0),
            Err(error) => assert_eq!(error.kind(), kvbm::ErrorKind::Stale, "{error}"),
        }
        pair.here.restart(rank as u16);
        pair.heals(30 + n);
    }
    pair.end();
}

#[test]
fn frozen_ranks_cost_one_lease_time_then_it_heals() {
    frozen_ranks_cost_one_lease_time(Way::Tcp);
}

#[test]
fn frozen_ranks_cost_one_lease_time_by_nixl() {
    if has_nixl() {
        frozen_ranks_cost_one_lease_time(Way::NixlOrTcp);
    }
}

#[test]
fn frozen_neighbours_cost_one_lease_time_then_it_heals() {
    frozen_ranks_cost_one_lease_time(Way::Memory);
}

fn frozen_ranks_cost_one_lease_time(way: Way) {
    let mut pair = Pair::open(way);
    assert_eq!(pair.there.serve(&chain(1, 6)).saved, 6);
    let (copied, why) = pair.read_after(&chain(1, 6), || second_rank(&pair.there).stop());
    assert_eq!(copied, 0, "{why:?}");
    second_rank(&pair.there).signal("CONT");
    pair.heals(2);
    let (copied, why) = pair.read_after(&chain(1, 6), || second_rank(&pair.here).stop());
    assert_eq!(copied, 0, "{why:?}");
    assert!(why.unwrap().contains("does not answer in time"));
    // When it goes on, its order names slots that have other blocks by then.
    await_room(&pair.there);
    for n in 11..17 {
        pair.there.empty(Tier::Host);
        assert_eq!(pair.there.serve(&chain(n, 6)).wrong, 0);
    }
    second_rank(&pair.here).signal("CONT");
    let counts = || pair.here.manager.admin().counts(Tier::Host);
    wait_until(LIMIT, "slots do not come back", || counts().lost == 0);
    assert_eq!(pair.here.manager.matches(&chain(1, 6)).longest(), 0);
    pair.heals(3);
    pair.end();
}

/// Leased blocks keep their slots until the release arrives. Blocks that are not on disk yet keep
/// theirs, too.
fn await_room(holder: &Fleet) {
    wait_until(LIMIT, "leases are left", || holder.manager.peers().unwrap().leased() == 0);
    let _ = holder.manager.drain(LIMIT);
}

fn second_rank(fleet: &Fleet) -> &Process {
    fleet.ranks[1].as_ref().unwrap()
}

/// Ways that need nothing to be installed.
const WAYS: [Way; 2] = [Way::Tcp, Way::Memory];

/// Each rank here gets its heads from the ranks there that have them.
fn crosses(holder: u16, reader: u16) {
    WAYS.into_iter().for_each(|way| crosses_by(way, holder, reader));
}

fn crosses_by_nixl(holder: u16, reader: u16) {
    if has_nixl() {
        crosses_by(Way::Nixl, holder, reader);
    }
}

fn crosses_by(way: Way, holder: u16, reader: u16) {
    let mut pair = Pair::of(way, holder, reader);
    // A first contact by NIXL may take longer than these leases.
    pair.heals(9);
    for n in 1..4 {
        assert_eq!(pair.there.serve(&chain(n, 6)).saved, 6);
        assert_eq!(pair.read(&chain(n, 6)), (6, None));
        let served = Served { hit: 6, saved: 6, ..Served::default() };
        assert_eq!(pair.here.serve(&chain(n, 6)), served);
        await_room(&pair.there);
    }
    // A rank that is gone after it was leased from is a miss in all.
    assert_eq!(pair.there.serve(&chain(4, 6)).saved, 6);
    let peers = pair.here.manager.peers().unwrap();
    let lease = peers.lease(&pair.peer, chain(4, 6), RequestInfo::default()).wait().unwrap();
    pair.there.kill(usize::from(holder) - 1);
    let pulled = peers.pull(lease).wait().unwrap();
    assert_eq!(pulled.copied, 0);
    assert!(pulled.fault.is_some());
    drop(pulled);
    wait_until(LIMIT, "no one says that it is away", || {
        pair.read(&chain(4, 6)).1.is_some_and(|why| why.contains("a rank of it is away"))
            || pair.there.manager.matches(&chain(4, 6)).longest() == 0
    });
    pair.there.restart(holder - 1);
    pair.heals(10);
    pair.end();
}

#[test]
fn one_rank_reads_at_two() {
    crosses(2, 1);
}

#[test]
fn two_ranks_read_at_one() {
    crosses(1, 2);
}

#[test]
fn two_ranks_read_at_four() {
    crosses(4, 2);
}

#[test]
fn four_ranks_read_at_two() {
    crosses(2, 4);
}

#[test]
fn one_rank_reads_at_two_by_nixl() {
    crosses_by_nixl(2, 1);
}

#[test]
fn two_ranks_read_at_one_by_nixl() {
    crosses_by_nixl(1, 2);
}

#[test]
fn two_ranks_read_at_four_by_nixl() {
    crosses_by_nixl(4, 2);
}

#[test]
fn four_ranks_read_at_two_by_nixl() {
    crosses_by_nixl(2, 4);
}

/// Workers whose blocks differ in more than the number of ranks: as many tokens of each prompt as the
/// holder computed come, in blocks of the reader's.
fn crosses_forms(forms: [(HeadForm, u16); 2]) {
    WAYS.into_iter().for_each(|way| crosses_forms_by(way, forms));
}

fn crosses_forms_by_nixl(forms: [(HeadForm, u16); 2]) {
    if has_nixl() {
        crosses_forms_by(Way::Nixl, forms);
    }
}

fn crosses_forms_by(way: Way, [there, here]: [(HeadForm, u16); 2]) {
    let home = tempfile::tempdir().unwrap();
    let mut holder = open_as(there, way, home.path(), "holder", "");
    let address = address(&holder.manager);
    let mut reader = open_as(here, way, home.path(), "reader", &address);
    let pull = |reader: &Fleet, n, tokens: usize| {
        let [names, ours] = [there.0, here.0].map(|form| chain(n, (tokens / form.tokens) as u32));
        let names = ChainNames::from(&ours).in_blocks_of(there.0.tokens as u64, names);
        let peers = reader.manager.peers().unwrap();
        let leased = peers.lease(&peer_name(&address), names, RequestInfo::default()).wait();
        let pulled = leased.and_then(|lease| peers.pull(lease).wait());
        pulled.map_or_else(|error| (0, Some(error.to_string())), |of| (of.copied, of.fault))
    };
    let compute = |holder: &mut Fleet, n, tokens: usize| {
        await_room(holder);
        let blocks = chain(n, (tokens / there.0.tokens) as u32);
        assert_eq!(holder.serve(&blocks).saved, blocks.len());
    };
    // A first contact by NIXL may take longer than these leases.
    compute(&mut holder, 9, 64);
    let all = 64 / here.0.tokens;
    wait_until(LIMIT, "it does not come", || {
        pull(&reader, 9, 64).0 == all || reader.manager.matches(&chain(9, 1)).longest() > 0
    });
    let mut random = fastrand::Rng::with_seed(7);
    for n in 1..4 {
        let tokens = 64 * random.usize(1..6);
        compute(&mut holder, n, tokens);
        let blocks = tokens / here.0.tokens;
        // Some of it is here already.
        let before = random.usize(0..blocks);
        let saved = if before > 0 { reader.serve(&chain(n, before as u32)).saved } else { 0 };
        assert_eq!(pull(&reader, n, tokens), (blocks - saved, None));
        let served = Served { hit: blocks, saved: blocks, ..Served::default() };
        assert_eq!(reader.serve(&chain(n, blocks as u32)), served);
    }
    // A rank that goes away after it was leased from is a miss in all, and then it heals.
    compute(&mut holder, 4, 256);
    holder.kill(0);
    assert_eq!(pull(&reader, 4, 256).0, 0);
    wait_until(LIMIT, "it is not away", || holder.manager.matches(&chain(4, 4)).longest() == 0);
    holder.restart(0);
    holder.assert_heals(&chain(5, (256 / there.0.tokens) as u32));
    let all = 256 / here.0.tokens;
    wait_until(LIMIT, "it does not come again", || pull(&reader, 5, 256).0 == all);
    assert_eq!(reader.serve(&chain(5, all as u32)).wrong, 0);
    [&holder, &reader].into_iter().for_each(Fleet::assert_sound);
    reader.end();
    holder.end();
}

#[test]
fn blocks_of_more_tokens_are_made_of_several_slices() {
    crosses_forms([(HeadForm::NHD, 2), (HeadForm::NHD.of_tokens(64), 2)]);
}

#[test]
fn a_slice_makes_blocks_of_fewer_tokens_in_fewer_ranks() {
    crosses_forms([(HeadForm::NHD.of_tokens(64), 2), (HeadForm::HND.of_tokens(32), 1)]);
}

#[test]
fn slices_of_another_order_come_in_more_ranks() {
    crosses_forms([(HeadForm::LAYERS_INSIDE, 2), (HeadForm::NHD, 4)]);
}

#[test]
fn one_rank_makes_its_blocks_of_four_ranks() {
    crosses_forms([(HeadForm::HND.of_tokens(32), 4), (HeadForm::LAYERS_INSIDE.of_tokens(64), 1)]);
}

#[test]
fn four_ranks_convert_the_numbers_of_two() {
    crosses_forms([(HeadForm::HND.of_tokens(32), 2), (HeadForm::NHD.of_bf16(), 4)]);
}

#[test]
fn numbers_too_large_for_ranks_are_counted() {
    let nixl = has_nixl().then_some(Way::Nixl);
    WAYS.into_iter().chain(nixl).for_each(numbers_too_large_are_counted);
}

fn numbers_too_large_are_counted(way: Way) {
    let home = tempfile::tempdir().unwrap();
    let (there, here) = (HeadForm::NHD.of_bf16(), HeadForm::NHD);
    let mut holder = open_as((there, 2), way, home.path(), "holder", "");
    let address = address(&holder.manager);
    let reader = open_as((here, 4), way, home.path(), "reader", &address);
    let (first, chain) = (chain(2, 1), chain(1, 6));
    assert_eq!((holder.serve(&first).saved, holder.serve(&chain).saved), (1, 6));
    let peers = reader.manager.peers().unwrap();
    let read = |chain: &[BlockHash]| {
        let leased = peers.lease(&peer_name(&address), chain, RequestInfo::default()).wait();
        leased.and_then(|lease| peers.pull(lease).wait()).map_or(0, |pulled| pulled.copied)
    };
    let counted = || metric(&reader.registry, "kvbm_peer_saturated_numbers_total", &[]);
    // A first contact by NIXL may take longer than these leases.
    wait_until(LIMIT, "it does not come", || read(&first) == 1);
    let before = counted();
    assert_eq!(read(&chain), 6);
    let too_large = |block: &BlockHash| {
        let mut whole = there.slice(HeadShare::WHOLE, number_of(*block));
        halves_to_halves(&mut whole, HalfType::Bf16) as u64
    };
    let expected: u64 = chain.iter().map(too_large).sum();
    let counted = counted() - before;
    assert!(expected > 0 && counted == expected, "{way:?}: {counted} of {expected}");
    reader.end();
    holder.end();
}

#[test]
fn several_slices_make_a_block_by_nixl() {
    crosses_forms_by_nixl([(HeadForm::NHD, 2), (HeadForm::NHD.of_tokens(64), 2)]);
}

#[test]
fn a_slice_makes_blocks_of_fewer_tokens_by_nixl() {
    crosses_forms_by_nixl([(HeadForm::NHD.of_tokens(64), 2), (HeadForm::HND.of_tokens(32), 1)]);
}

#[test]
fn slices_of_another_order_come_by_nixl() {
    crosses_forms_by_nixl([(HeadForm::LAYERS_INSIDE, 2), (HeadForm::NHD, 4)]);
}

#[test]
fn an_indivisible_number_of_ranks_is_refused_and_named() {
    let home = tempfile::tempdir().unwrap();
    let mut there = open(home.path(), "holder", 2, "");
    let address = address(&there.manager);
    let here = open(home.path(), "reader", 3, &address);
    assert_eq!(there.serve(&chain(1, 6)).saved, 6);
    let peers = here.manager.peers().unwrap();
    let name = peer_name(&address);
    let error = peers.lease(&name, chain(1, 6), RequestInfo::default()).wait().unwrap_err();
    let said = error.to_string();
    assert!(said.contains("the number of ranks is \"2\"") && said.contains("\"3\""), "{said}");
    here.end();
    there.end();
}

/// Says what `tests/peers.sh` shows: how fast prompts of blocks of 128 KiB come, 64 KiB in each of two
/// ranks, between workers of each number of ranks, and from one of other blocks. Readers take turns.
#[test]
#[ignore = "it measures: tests/peers.sh has it"]
fn how_fast_heads_move() {
    let ways = WAYS.into_iter().chain(has_nixl().then_some(Way::Nixl));
    for (way, blocks) in ways.flat_map(|way| [64, MEASURED_BLOCKS].map(|blocks| (way, blocks))) {
        how_fast_heads_move_by(way, blocks);
    }
}

fn how_fast_heads_move_by(way: Way, blocks: usize) {
    const ROUNDS: usize = 15;
    let tokens = blocks * HeadForm::NHD.tokens;
    let home = tempfile::tempdir().unwrap();
    let other = HeadForm::HND.of_tokens(32);
    let holders = [(HeadForm::NHD, 2), (HeadForm::NHD, 4), (other, 2)];
    let blocks_of = |form: HeadForm| chain(1, (tokens / form.tokens) as u32);
    let mut holders = holders.map(|(form, world)| {
        let mut fleet = open_as((form, world), way, home.path(), "large holder", "");
        assert_eq!(fleet.serve(&blocks_of(form)).saved, tokens / form.tokens);
        (form, fleet)
    });
    let names = holders.each_ref().map(|(_, fleet)| address(&fleet.manager));
    let mut readers =
        [2, 4].map(|world| open_by(way, home.path(), "large reader", world, &names.join(",")));
    let mut seconds = [const { [const { Vec::new() }; 3] }; 2];
    for _ in 0..ROUNDS {
        for (reader, seconds) in readers.iter_mut().zip(&mut seconds) {
            for ((name, (form, _)), seconds) in names.iter().zip(&mut holders).zip(seconds) {
                assert!(reader.manager.drain(LIMIT).is_complete());
                [Tier::Host, Tier::Disk].into_iter().for_each(|tier| reader.empty(tier));
                let peers = reader.manager.peers().unwrap();
                let wanted = blocks_of(HeadForm::NHD);
                let chain = ChainNames::from(&wanted);
                let chain = chain.in_blocks_of(form.tokens as u64, blocks_of(*form));
                let began = Instant::now();
                let lease = peers.lease(&peer_name(name), chain, RequestInfo::default());
                let pulled = peers.pull(lease.wait().unwrap()).wait().unwrap();
                seconds.push(began.elapsed().as_secs_f64());
                assert_eq!((pulled.copied, pulled.fault), (wanted.len(), None));
            }
        }
    }
    let gb_s = seconds.map(|of| {
        of.map(|mut of| {
            of.sort_by(f64::total_cmp);
            blocks as f64 * fleet::BLOCK as f64 / of[ROUNDS / 2] / 1e9
        })
    });
    let round = |number: f64| (100.0 * number).round() / 100.0;
    let [[two, four_to_two, other_to_two], [two_to_four, four, other_to_four]] = gb_s;
    let heads = json!({
        "way": way.name(), "blocks": blocks,
        "2 to 2": round(two), "4 to 4": round(four),
        "4 to 2 of equal": round(four_to_two / two), "2 to 4 of equal": round(two_to_four / four),
        "2 of other blocks to 2": round(other_to_two / two),
        "2 of other blocks to 4": round(other_to_four / four),
    });
    println!("figures {}", json!({ "heads": heads }));
    let holders = holders.into_iter().map(|(_, fleet)| fleet);
    readers.into_iter().chain(holders).for_each(Fleet::end);
}
