//! Workers whose blocks are not alike, and of which one is made of the other: they have more or fewer
//! tokens, axes in another order, or numbers of another type. Every byte is checked.
//! `tests/peers.sh` has more cases.

use std::io::stdin;
use std::path::Path;

use half::{bf16, f16};
use kvbm::blocking::Blocks;
use kvbm::{
    BlockHash, ChainHasher, ChainNames, Error, Fingerprint, KvLayout, Options, RequestInfo, Tier,
};
use kvbm_settings::{PeerNixl, Settings};
use kvbm_tests::engine::{self, peer_name};
use kvbm_tests::process::{Process, role, say};
use kvbm_tests::rig::{has_nixl, metric, wait_until};
use prometheus::Registry;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const SLOTS: u64 = 96;
/// Longer than any prompt that is asked for.
const TOKENS: usize = 400;
const LIMIT: std::time::Duration = std::time::Duration::from_mins(1);

/// What a worker's blocks are.
#[derive(Clone, Copy, Debug)]
struct Form {
    tokens: usize,
    order: &'static str,
    dtype: &'static str,
    /// By layer, keys and values, and head of FP8.
    scales: &'static [f32],
}

/// Of each head; or, the first of them, of each layer's keys and values.
const SCALES: [f32; 12] =
    [0.5, 0.017, 3.0, 1e-9, 1.0, 0.25, 1e9, 0.374_999, 0.031_25, 2.0, 1e20, 0.7];

/// How many there are of everything but tokens and bytes of a number.
const EXTENTS: [(&str, usize); 4] = [("layer", 3), ("kv", 2), ("head", 2), ("channel", 4)];
const TOKEN_NUMBERS: usize = 3 * 2 * 2 * 4;

const NHD: &str = "kv,token,head,channel,byte";
const HND: &str = "kv,head,token,channel,byte";
/// Layers innermost but for rows, and keys as columns.
const MIXED: &str = "head,kv(channel,token|token,channel),layer,byte";

const fn form(tokens: usize, order: &'static str) -> Form {
    Form { tokens, order, dtype: "bf16", scales: &[] }
}

const fn of_type(dtype: &'static str, of: Form) -> Form {
    Form { dtype, ..of }
}

/// Of FP8 with that many scales.
fn fp8(scales: usize, of: Form) -> Form {
    Form { dtype: "fp8_e4m3", scales: &SCALES[..scales], ..of }
}

const FORMS: [Form; 9] = [
    form(16, NHD),
    form(32, NHD),
    form(64, NHD),
    form(16, HND),
    form(32, HND),
    form(64, HND),
    form(16, MIXED),
    form(32, MIXED),
    form(64, MIXED),
];

impl Form {
    /// Its axes, outermost first, of keys or of values, each with its length.
    fn axes(&self, kv: usize) -> Vec<(&'static str, usize)> {
        let choose = |part: &'static str| part.split('|').nth(kv).unwrap_or(part);
        let axes = self.order.split(['(', ')']).flat_map(|part| choose(part).split(','));
        let axes = axes.filter(|name| !name.is_empty());
        let extent = |name: &'static str| {
            let known = EXTENTS.iter().find(|(known, _)| *known == name);
            let of_form = if name == "byte" { self.number_bytes() } else { self.tokens };
            (name, known.map_or(of_form, |(_, extent)| *extent))
        };
        let layers = (!self.order.contains("layer")).then_some("layer");
        layers.into_iter().chain(axes).map(extent).collect()
    }

    fn number_bytes(&self) -> usize {
        if self.dtype == "fp8_e4m3" { 1 } else { 2 }
    }

    fn block_bytes(&self) -> usize {
        self.tokens * TOKEN_NUMBERS * self.number_bytes()
    }

    fn fingerprint(&self) -> Fingerprint {
        let mut shape: Vec<_> = self.axes(0).into_iter().map(|(_, extent)| extent as u64).collect();
        if !self.order.contains("layer") {
            shape.remove(0);
        }
        let inside = |axis: usize| shape[axis + 1..].iter().product();
        let strides = (0..shape.len()).map(inside).collect();
        let layout = KvLayout { layers: 3, order: self.order.to_owned(), shape, strides };
        Fingerprint {
            model: "tests".to_owned(),
            weights: "1".to_owned(),
            dtype: self.dtype.to_owned(),
            scales: self.scales.to_vec(),
            layouts: vec![layout],
            block_tokens: self.tokens as u64,
            ..Fingerprint::default()
        }
    }

    fn chain(&self, prompt: &Prompt) -> Vec<BlockHash> {
        ChainHasher::new(self.tokens, b"").unwrap().chain(&prompt.0)
    }

    /// What the model computes, as `computed` has it in the type there: its numbers by the tokens up
    /// to theirs.
    fn block(&self, prompt: &Prompt, at: usize, computed: &Self) -> Vec<u8> {
        let mut block = vec![0; self.block_bytes()];
        for token in 0..self.tokens {
            for n in 0..TOKEN_NUMBERS {
                let [layer, kv, head, channel] = [n / 16, n / 8 % 2, n / 4 % 2, n % 4];
                let address = self.axes(kv).into_iter().fold(0, |address, (name, extent)| {
                    let digit = match name {
                        "layer" => layer,
                        "kv" => kv,
                        "head" => head,
                        "channel" => channel,
                        "token" => token,
                        _ => 0,
                    };
                    address * extent + digit
                });
                let number = prompt.number(at * self.tokens + token, n);
                let bytes = self.own(number, n, computed).to_le_bytes();
                let taken = self.number_bytes();
                block[address..address + taken].copy_from_slice(&bytes[..taken]);
            }
        }
        block
    }

    /// The scale of a token's number `n`.
    fn scale(&self, n: usize) -> f32 {
        if self.scales.len() == SCALES.len() { self.scales[n / 4] } else { self.scales[n / 8] }
    }

    /// What the bits of a token's number `n` mean.
    fn meant(&self, bits: u16, n: usize) -> f32 {
        match self.dtype {
            "fp16" => f16::from_bits(bits).to_f32(),
            "bf16" => bf16::from_bits(bits).to_f32(),
            _ => meant_by_fp8(bits as u8) * self.scale(n),
        }
    }

    /// The bits of a number as it is here, if it was computed in another type.
    fn own(&self, bits: u16, n: usize, computed: &Self) -> u16 {
        if self.dtype == computed.dtype {
            return bits;
        }
        let exact = computed.meant(bits, n);
        let limited = |largest: f32| exact.clamp(-largest, largest);
        match self.dtype {
            "fp16" if exact.is_finite() => f16::from_f32(limited(65_504.0)).to_bits(),
            "fp16" => f16::from_f32(exact).to_bits(),
            "bf16" => bf16::from_f32(exact).to_bits(),
            _ => nearest_fp8(exact / self.scale(n)).into(),
        }
    }

    /// Whether two blocks are the same, but for which NaN a number is.
    fn are_alike(&self, ours: &[u8], others: &[u8]) -> bool {
        let infinity = match self.dtype {
            "fp16" => f16::INFINITY.to_bits(),
            "bf16" => bf16::INFINITY.to_bits(),
            _ => return ours == others,
        };
        let is_alike = |(a, b): (&[u8; 2], &[u8; 2])| {
            let [a, b] = [a, b].map(|bytes| u16::from_le_bytes(*bytes));
            let are_nan = [a, b].iter().all(|bits| bits & 0x7FFF > infinity);
            a == b || are_nan && a >> 15 == b >> 15
        };
        ours.len() == others.len()
            && ours.as_chunks().0.iter().zip(others.as_chunks().0).all(is_alike)
    }

    /// Whether a number computed there is too large for the type here.
    fn is_too_large(&self, bits: u16, n: usize, computed: &Self) -> bool {
        let exact = computed.meant(bits, n);
        match self.dtype {
            // What is nearer to the largest than to what would be the next is not.
            "fp16" => exact.is_finite() && exact.abs() >= 65_520.0,
            "fp8_e4m3" => (exact / self.scale(n)).abs() > 464.0,
            _ => false,
        }
    }
}

/// By the definition of e4m3.
fn meant_by_fp8(bits: u8) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 3 & 15), f32::from(bits & 7) / 8.0);
    let magnitude = match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction * 2.0_f32.powi(-6),
        _ => (1.0 + fraction) * 2.0_f32.powi(exponent - 7),
    };
    if bits >> 7 == 1 { -magnitude } else { magnitude }
}

/// Of all numbers the nearest, of two as near the even one.
fn nearest_fp8(exact: f32) -> u8 {
    let sign = u8::from(exact.is_sign_negative()) << 7;
    if exact.is_nan() {
        return 0x7F | sign;
    }
    let magnitude = f64::from(exact.abs().min(448.0));
    let distance = |bits: &u8| (f64::from(meant_by_fp8(*bits)) - magnitude).abs();
    let nearer = |a: &u8, b: &u8| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)));
    (0..0x7F).min_by(nearer).unwrap() | sign
}

/// Its tokens.
#[derive(Clone, Debug)]
struct Prompt(Vec<u32>);

impl Prompt {
    /// The first `shared` tokens are those of every prompt.
    fn new(seed: u64, length: usize, shared: usize) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let token = |at: usize| if at < shared { at as u32 } else { random.u32(..) };
        Self((0..length).map(token).collect())
    }

    /// The `n`-th number of this token.
    fn number(&self, token: usize, n: usize) -> u16 {
        let mix =
            |sum: u64, next: u64| (sum ^ next).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        let tokens = self.0[..=token].iter().fold(1, |sum, &token| mix(sum, token.into()));
        mix(tokens, n as u64) as u16
    }
}

struct Worker {
    form: Form,
    blocks: Blocks,
    registry: Registry,
}

impl Worker {
    fn open(form: Form, change: impl FnOnce(&mut Settings)) -> Self {
        let mut settings = engine::without_device(form.block_bytes() as u64, SLOTS);
        engine::add_peers(&mut settings, "");
        settings.peers.nixl = PeerNixl::Off;
        settings.peers.lease_share = 1.0;
        change(&mut settings);
        let registry = Registry::new();
        let options = Options {
            registry: registry.clone(),
            block_tokens: form.tokens as u64,
            fingerprint: Some(form.fingerprint()),
            ..Options::default()
        };
        Self { form, blocks: Blocks::open(settings, options).unwrap(), registry }
    }

    fn address(&self) -> String {
        engine::address(self.blocks.manager())
    }

    /// Computes the first blocks of a prompt.
    fn compute(&self, prompt: &Prompt, most: usize) -> usize {
        let chain = self.form.chain(prompt);
        let fill = |at: usize, slot: &mut [u8]| {
            slot.copy_from_slice(&self.form.block(prompt, at, &self.form));
            Ok::<_, Error>(())
        };
        self.blocks.put(&chain[..most.min(chain.len())], fill).unwrap()
    }

    /// How many leading blocks it has, each of which is what it would have computed, or was in
    /// another type.
    fn check(&self, prompt: &Prompt, computed: Form) -> usize {
        let check = |at: usize, block: &[u8]| {
            let expected = self.form.block(prompt, at, &computed);
            let are_alike = self.form.are_alike(block, &expected);
            assert!(are_alike, "a wrong block at {at} of {:?}", self.form);
            Ok::<_, Error>(())
        };
        self.blocks.get(&self.form.chain(prompt), check).unwrap()
    }

    /// Brings a prompt; says how many of its blocks came, or why none is leased.
    fn read(&self, prompt: &Prompt, there: Form, address: &str) -> Result<usize, String> {
        let peers = self.blocks.manager().peers().unwrap();
        let (name, chain) = (peer_name(address), self.form.chain(prompt));
        let names = ChainNames::from(&chain);
        let names = names.in_blocks_of(there.tokens as u64, there.chain(prompt));
        let lease = peers.lease(&name, names, RequestInfo::default()).wait();
        let pulled = lease.and_then(|lease| {
            let leased = lease.only_there();
            peers.pull(lease).wait().map(|pulled| (leased, pulled))
        });
        match pulled {
            Ok((leased, pulled)) if pulled.fault.is_none() => {
                assert_eq!(pulled.copied, leased);
                Ok(pulled.copied)
            }
            Ok((_, pulled)) => Err(pulled.fault.unwrap()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// How many of its leading blocks are there.
    fn has(&self, prompt: &Prompt) -> usize {
        self.blocks.manager().matches(&self.form.chain(prompt)).longest()
    }

    fn is_whole(&self) {
        let manager = self.blocks.manager();
        wait_until(LIMIT, "leases are left", || manager.peers().unwrap().leased() == 0);
        let counts = manager.admin().counts(Tier::Host);
        assert_eq!((manager.admin().audit(), counts.filling, counts.lost), (vec![], 0, 0));
    }
}

#[derive(Clone, Debug)]
struct Case {
    there: usize,
    here: usize,
    seed: u64,
    length: usize,
    shared: usize,
    computed: usize,
    held: usize,
    evicted: usize,
}

/// `KVBM_PEER_CASES` says how many.
#[test]
fn random_chains_come_from_any_form_to_any_other() {
    let cases = std::env::var("KVBM_PEER_CASES").map_or(150, |cases| cases.parse().unwrap());
    let holders = FORMS.map(|form| Worker::open(form, |_| ()));
    let addresses = holders.each_ref().map(Worker::address);
    let mut number = 0;
    let readers = FORMS.map(|form| {
        number += 1;
        Worker::open(form, |settings| {
            settings.peers.addresses = Some(addresses.join(","));
            settings.peers.shared_memory = number % 2 == 0;
        })
    });
    let (forms, tokens) = (0..FORMS.len(), 0..TOKENS);
    let case =
        (
            forms.clone(),
            forms,
            any::<u64>(),
            tokens.clone(),
            0..200_usize,
            tokens.clone(),
            tokens,
            0..40_usize,
        )
            .prop_map(|(there, here, seed, length, shared, computed, held, evicted)| {
                Case { there, here, seed, length, shared, computed, held, evicted }
            });
    let mut runner =
        TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let ran = runner.run(&case, |case| {
        let (holder, reader) = (&holders[case.there], &readers[case.here]);
        let prompt = Prompt::new(case.seed, case.length, case.shared);
        let [there, here] = [holder.form, reader.form];
        reader.blocks.manager().admin().evict(Tier::Host, case.evicted);
        holder.compute(&prompt, case.computed / there.tokens);
        reader.compute(&prompt, case.held / here.tokens);
        let leased = (holder.has(&prompt) * there.tokens) / here.tokens;
        let held = reader.has(&prompt);
        let read = reader.read(&prompt, there, &addresses[case.there]);
        prop_assert_eq!(read, Ok(leased.saturating_sub(held)));
        prop_assert_eq!(reader.check(&prompt, there), leased.max(held));
        Ok(())
    });
    ran.unwrap();
    holders.iter().chain(&readers).for_each(Worker::is_whole);
}

/// Not a test: a worker that another test starts.
#[test]
fn process() {
    let Some((number, place)) = role() else { return };
    let form = FORMS[number.parse::<usize>().unwrap()];
    let place = place.to_str().unwrap().to_owned();
    let (way, addresses) = place.split_once(' ').unwrap();
    let worker = Worker::open(form, |settings| {
        settings.peers.shared_memory = way == "memory";
        if way == "nixl" {
            settings.peers.nixl = PeerNixl::Required;
        }
        settings.peers.addresses = Some(addresses.to_owned()).filter(|list| !list.is_empty());
    });
    say(&worker.address());
    for line in stdin().lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<usize>().unwrap();
        let prompt = Prompt::new(number(1) as u64, number(2), 48);
        match words[0] {
            "compute" => say(&worker.compute(&prompt, usize::MAX).to_string()),
            "check" => say(&worker.check(&prompt, form).to_string()),
            "read" => {
                say(&worker.read(&prompt, FORMS[number(3)], words[4]).unwrap_or(0).to_string());
            }
            _ => {
                worker.is_whole();
                say("sound");
            }
        }
    }
}

/// A holder of one form and a reader of another, one of which is killed and comes back.
fn reads(there: usize, here: usize, way: &str) {
    let start = |form: usize, addresses: &str| {
        let place = format!("{way} {addresses}");
        let mut process = Process::start(module_path!(), &form.to_string(), Path::new(&place));
        let address = process.hear();
        (process, address)
    };
    let (mut holder, mut address) = start(there, "");
    let (mut reader, _) = start(here, &address);
    let comes = |holder: &mut Process, reader: &mut Process, n: usize, address: &str| {
        let length = 300 + 7 * n;
        let blocks = length / FORMS[there].tokens * FORMS[there].tokens / FORMS[here].tokens;
        holder.ask(&format!("compute {n} {length}"));
        // Its first blocks may be there already: those that all prompts share.
        reader.ask(&format!("read {n} {length} {there} {address}"));
        assert_eq!(reader.ask(&format!("check {n} {length}")), blocks.to_string());
    };
    for n in 0..6 {
        comes(&mut holder, &mut reader, n, &address);
    }
    holder.kill();
    assert_eq!(reader.ask(&format!("read 9 300 {there} {address}")), "0");
    assert_eq!(reader.ask("check 9 300"), (48 / FORMS[here].tokens).to_string());
    (holder, address) = start(there, "");
    drop(reader);
    let (mut reader, _) = start(here, &address);
    for n in 6..9 {
        comes(&mut holder, &mut reader, n, &address);
    }
    for worker in [&mut holder, &mut reader] {
        assert_eq!(worker.ask("audit 0 0"), "sound");
    }
}

#[test]
fn a_neighbour_of_64_tokens_reads_one_of_32() {
    reads(1, 2, "memory");
}

#[test]
fn a_worker_of_32_tokens_reads_one_of_64() {
    reads(2, 1, "tcp");
}

#[test]
fn blocks_of_16_nhd_become_blocks_of_64_hnd() {
    reads(0, 5, "tcp");
}

#[test]
fn a_neighbour_of_other_order_reads_keys_in_columns() {
    reads(8, 3, "memory");
}

#[test]
fn blocks_of_64_come_by_nixl_from_one_of_16() {
    if has_nixl() {
        reads(0, 5, "nixl");
    }
}

#[test]
fn keys_in_columns_come_by_nixl_in_fewer_tokens() {
    if has_nixl() {
        reads(8, 1, "nixl");
    }
}

fn pair(there: Form, here: Form, change: impl FnOnce(&mut Settings)) -> (Worker, Worker) {
    reader_of(Worker::open(there, |_| ()), here, change)
}

/// Both with these settings.
fn pair_of(there: Form, here: Form, set: impl Fn(&mut Settings)) -> (Worker, Worker) {
    reader_of(Worker::open(there, &set), here, set)
}

fn reader_of(holder: Worker, here: Form, change: impl FnOnce(&mut Settings)) -> (Worker, Worker) {
    let address = holder.address();
    let reader = Worker::open(here, |settings| {
        settings.peers.addresses = Some(address);
        change(settings);
    });
    (holder, reader)
}

#[test]
fn what_cannot_be_converted_is_refused_with_both_names() {
    let other_axes = form(16, "kv,slot,head,channel,byte");
    let other_tokens = form(24, NHD);
    for (there, what, both) in [
        (other_axes, "layouts", ["slot", "token"]),
        (fp8(6, form(16, NHD)), "dtype", ["fp8_e4m3", "bf16"]),
        (other_tokens, "block_tokens", ["24", "16"]),
        (of_type("fp16", form(16, NHD)), "dtype", ["fp16", "bf16"]),
    ] {
        let (holder, reader) = pair(there, FORMS[0], |_| ());
        let prompt = Prompt::new(1, 200, 0);
        holder.compute(&prompt, usize::MAX);
        let why = reader.read(&prompt, there, &holder.address()).unwrap_err();
        assert!(why.contains(what) && both.iter().all(|one| why.contains(one)), "{why}");
        assert_eq!(reader.check(&prompt, there), 0);
    }
}

#[test]
fn a_lease_without_their_names_says_both_numbers() {
    let (holder, reader) = pair(FORMS[1], FORMS[2], |_| ());
    let (peers, prompt) = (reader.blocks.manager().peers().unwrap(), Prompt::new(1, 200, 0));
    holder.compute(&prompt, usize::MAX);
    let name = peer_name(&holder.address());
    let chain = reader.form.chain(&prompt);
    let why = peers.lease(&name, &chain, RequestInfo::default()).wait().unwrap_err().to_string();
    assert!(why.contains("its blocks have 32 tokens, and 64 here"), "{why}");
    assert_eq!(reader.read(&prompt, FORMS[1], &holder.address()), Ok(3), "then it heals");
}

#[test]
fn blocks_of_other_names_come_under_our_own() {
    let (holder, reader) = pair(FORMS[0], FORMS[0], |_| ());
    let (peers, prompt) = (reader.blocks.manager().peers().unwrap(), Prompt::new(1, 200, 0));
    holder.compute(&prompt, usize::MAX);
    let name = peer_name(&holder.address());
    let ours = ChainHasher::new(16, b"ours").unwrap().chain(&prompt.0);
    let names = ChainNames::from(&ours).in_blocks_of(16, holder.form.chain(&prompt));
    let lease = peers.lease(&name, names, RequestInfo::default()).wait().unwrap();
    assert_eq!(peers.pull(lease).wait().unwrap().copied, ours.len());
    assert_eq!((reader.has(&prompt), reader.blocks.manager().matches(&ours).longest()), (0, 12));
    let is_own = |at: usize, block: &[u8]| {
        assert!(block == reader.form.block(&prompt, at, &holder.form));
        Ok::<_, Error>(())
    };
    assert_eq!(reader.blocks.get(&ours, is_own).unwrap(), 12);
}

#[test]
fn fp8_without_scales_or_with_others_is_refused_and_said() {
    let [bare, scaled] = [fp8(0, form(16, NHD)), fp8(6, form(16, NHD))];
    let others = Form { scales: &SCALES[6..], ..scaled };
    let says_others = ["scales is", "0.5, as number 0", "1000000000, as number 0"];
    for (there, here, what) in [
        (bare, form(16, NHD), ["dtype is", "gives no scales", "127.0.0.1"]),
        (form(16, NHD), bare, ["dtype is", "gives no scales", "127.0.0.1"]),
        (bare, scaled, ["scales is", "0 of them", "6 of them"]),
        (scaled, others, says_others),
        (scaled, Form { tokens: 32, ..others }, says_others),
        (scaled, Form { order: HND, ..others }, says_others),
    ] {
        let (holder, reader) = pair(there, here, |settings| settings.peers.convert_types = true);
        let prompt = Prompt::new(1, 200, 0);
        holder.compute(&prompt, usize::MAX);
        let why = reader.read(&prompt, there, &holder.address()).unwrap_err();
        assert!(what.iter().all(|one| why.contains(one)), "{why}");
        assert_eq!(reader.has(&prompt), 0);
    }
}

#[test]
fn numbers_of_the_other_type_are_converted_when_asked() {
    let [brain, half] = ["bf16", "fp16"].map(|dtype| of_type(dtype, form(32, NHD)));
    let [by_layer, by_head] = [6, 12].map(|scales| fp8(scales, form(32, NHD)));
    let mut ways = vec![(16, "memory"), (64, "tcp")];
    ways.extend(has_nixl().then_some((64, "nixl")));
    let pairs = [
        (brain, half, true),
        (half, brain, false),
        (by_layer, brain, false),
        (by_head, half, true),
        (brain, by_head, true),
        (half, by_layer, true),
    ];
    for ((there, here, saturates), (tokens, way)) in
        pairs.iter().flat_map(|pair| ways.iter().map(move |how| (*pair, *how)))
    {
        let here = Form { tokens, order: HND, ..here };
        let set = |settings: &mut Settings| {
            settings.peers.convert_types = true;
            settings.peers.shared_memory = way == "memory";
            if way == "nixl" {
                settings.peers.nixl = PeerNixl::Required;
            }
        };
        let (holder, reader) = pair_of(there, here, set);
        let prompt = Prompt::new(3, 320, 0);
        holder.compute(&prompt, usize::MAX);
        assert_eq!(reader.read(&prompt, there, &holder.address()), Ok(320 / tokens));
        assert_eq!(reader.check(&prompt, there), 320 / tokens);
        let all = (0..320).flat_map(|token| (0..TOKEN_NUMBERS).map(move |n| (token, n)));
        let too_large =
            all.filter(|&(token, n)| here.is_too_large(prompt.number(token, n), n, &there));
        let too_large = too_large.count() as u64;
        assert_eq!(too_large > 0, saturates, "{there:?} {here:?}");
        let counted = metric(&reader.registry, "kvbm_peer_saturated_numbers_total", &[]);
        assert_eq!(counted, too_large, "{there:?} {here:?}");
        [&holder, &reader].into_iter().for_each(Worker::is_whole);
    }
}

/// `KVBM_PEER_CASES` says how many.
#[test]
fn numbers_of_the_other_type_come_from_any_form() {
    let cases = std::env::var("KVBM_PEER_CASES").map_or(60, |cases| cases.parse().unwrap());
    let forms = [
        of_type("bf16", form(16, NHD)),
        of_type("bf16", form(64, MIXED)),
        of_type("fp16", form(32, HND)),
        of_type("fp16", form(16, MIXED)),
        fp8(6, form(16, NHD)),
        fp8(6, form(64, HND)),
        fp8(6, form(32, MIXED)),
    ];
    let holders = forms.map(|form| Worker::open(form, |_| ()));
    let addresses = holders.each_ref().map(Worker::address);
    let readers = forms.map(|form| {
        Worker::open(form, |settings| {
            settings.peers.addresses = Some(addresses.join(","));
            settings.peers.convert_types = true;
            settings.peers.shared_memory = form.tokens == 16;
        })
    });
    let case = (0..forms.len(), 0..forms.len(), any::<u64>(), 0..TOKENS, 0..TOKENS);
    let mut runner =
        TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let ran = runner.run(&case, |(there, here, seed, length, computed)| {
        let (holder, reader) = (&holders[there], &readers[here]);
        let prompt = Prompt::new(seed, length, 0);
        holder.compute(&prompt, computed / holder.form.tokens);
        let leased = holder.has(&prompt) * holder.form.tokens / reader.form.tokens;
        let held = reader.has(&prompt);
        let read = reader.read(&prompt, holder.form, &addresses[there]);
        prop_assert_eq!(read, Ok(leased.saturating_sub(held)));
        prop_assert_eq!(reader.check(&prompt, holder.form), leased.max(held));
        Ok(())
    });
    ran.unwrap();
    holders.iter().chain(&readers).for_each(Worker::is_whole);
}
