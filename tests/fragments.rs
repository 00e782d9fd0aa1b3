//! The Rust of the pages, which a test compares with them (`cli/tests/cli/docs`): what they show
//! compiles. What runs is in the examples of the crates, and in `examples/llama`.
#![expect(dead_code, unused_variables, reason = "it is compiled, not run")]

use std::sync::Arc;
use std::time::Duration;

use kvbm::blocking::Blocks;
use kvbm::{
    BlockHash, CacheGroup, ChainHasher, ChainNames, EngineMemory, Fence, Fingerprint,
    FollowRequest, GroupKind, GroupSlots, Hashing, HostFence, KvLayout, Lease, Manager, Options,
    Peers, Rank, RankGroup, RankOptions, Ranks, RequestId, RequestInfo, Rope, SaveRequest, SlotId,
};
use kvbm_settings::{Capacity, Settings};
use kvbm_tiers::{DeviceRegion, Part, SegmentMap, Space};

type Tried<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// README.md
async fn readme(settings: Settings, chain: Vec<BlockHash>, output_tokens: u32) -> Tried {
    let manager = Manager::open(settings, Options::default()).await?;
    let request = RequestInfo { request: Some(RequestId(7)), ..RequestInfo::default() };
    let lease = manager.lease_for(request, &chain);
    let loaded = manager.load(lease).await?;
    let mut fresh = manager.allocate(&chain, loaded.lease)?;
    for position in fresh.blocks() {
        fresh.fill(position, |bytes| bytes.fill(0));
    }
    let done = fresh.publish()?.await?;
    let saved = manager.save(done.lease).await?;
    manager.finished(RequestId(7), output_tokens);
    Ok(())
}

/// docs/embedding.md
fn embedding((prompt_tokens, request): (Vec<u32>, RequestId), generated_tokens: u32) -> Tried {
    let mut settings = Settings { block_bytes: Some(65_536), ..Settings::default() };
    settings.host.capacity = Some(Capacity::Bytes(8 << 30));
    settings.disk.capacity = Some(Capacity::Bytes(100 << 30));
    let blocks = Blocks::open(settings, Options { block_tokens: 16, ..Options::default() })?;

    let hasher = ChainHasher::new(16, b"llama-3-8b, bf16, layout 1, chunks of 64")?;
    let chain = hasher.chain(&prompt_tokens);

    blocks.manager().finished(request, generated_tokens);

    let drained = blocks.manager().drain(Duration::from_secs(10));
    let closing = blocks.manager().close(Duration::from_secs(10));
    Ok(())
}

/// docs/peers.md
async fn peers(manager: Manager, chain: Vec<BlockHash>, slots: Vec<SlotId>) -> Tried {
    let peers = manager.peers().expect("peers.enabled is set");
    let lease = peers.lease("127.0.0.1/6890", &chain, RequestInfo::default()).await?;
    println!("{} blocks are only there", lease.only_there());
    let pulled = peers.pull(lease).await?;
    // They are in the host tier now. `fault` says why some are missing, if some are.
    println!("{} came, {:?}", pulled.copied, pulled.fault);
    let loaded = manager.load(pulled.lease).await?;

    let lease = peers.lease("127.0.0.1/6890", &chain, RequestInfo::default()).await?;
    let named = [GroupSlots::full(0, &slots[..lease.blocks()])];
    let loaded = manager.load_into(lease, &named, &Fence::Done).await?;

    let patience = Duration::from_secs(5);
    let asked = FollowRequest { patience, ..FollowRequest::new("127.0.0.1/6890", &chain) };
    let pulled = peers.follow(asked.clone()).await?;
    let named = [GroupSlots::full(0, &slots)];
    let loaded = manager.follow_into(asked, &named, &Fence::Done).await?;
    Ok(())
}

/// docs/peers.md
fn layers(manager: &Manager, chain: &[BlockHash], slots: &[SlotId], layers: u16) -> Tried {
    let named = [GroupSlots::full(0, slots)];
    let mut saving = manager.save_in_layers(&SaveRequest::of(chain, &named))?;
    for _layer in 0..layers {
        // The engine computes the layer of all blocks, and then:
        saving.layer_is_ready()?;
    }
    let kept = saving.finish()?;
    Ok(())
}

/// docs/peers.md
async fn other_blocks(peers: &Peers, prompt: Vec<u32>) -> Tried {
    fn hashes_of(prompt: &[u32], tokens: usize) -> Vec<BlockHash> {
        ChainHasher::new(tokens, b"").expect("more than none").chain(prompt)
    }
    // As both workers hash: here blocks of 64 tokens, there of 32.
    let [chain, hashes] = [64, 32].map(|tokens| hashes_of(&prompt, tokens));
    let names = ChainNames::from(&chain).in_blocks_of(32, hashes);
    let lease = peers.lease("127.0.0.1/6890", names, RequestInfo::default()).await?;
    let pulled = peers.pull(lease).await?;
    Ok(())
}

/// docs/embedding.md
async fn names(settings: Settings) -> Tried {
    let fingerprint = Fingerprint {
        model: "meta-llama/Llama-3.1-8B".into(),
        weights: "0e9e39f249a16976918f6564b8830bc894c89659".into(),
        dtype: "bf16".into(),
        scales: Vec::new(), // of FP8: one for each layer's keys, and one for its values
        layouts: vec![KvLayout {
            layers: 32,
            order: "kv,token,head,element".into(),
            shape: vec![2, 16, 8, 128],
            strides: vec![32_768, 2_048, 256, 2],
        }],
        ranks: Ranks { tensor_world: 2, tensor_rank: 0, ..Ranks::default() },
        block_tokens: 16,
        rope: Rope { theta: 500_000.0, dimensions: 128, scaling: "llama3 factor=8".into() },
        engine: "mine".into(),
        engine_version: "1.4.0".into(),
        hashing: Hashing { algorithm: "blake3".into(), seed: b"0".to_vec() },
        epoch: 0,
    };
    let options = Options { fingerprint: Some(fingerprint), ..Options::default() };
    let manager = Manager::open(settings, options).await?;
    Ok(())
}

/// A tensor as an engine may describe it.
struct Tensor {
    address: usize,
    bytes_from_slot_to_slot: usize,
    bytes_of_a_piece: usize,
}

/// docs/engine-memory.md
async fn adopt(
    (tensors, owner): (Vec<Tensor>, Arc<Vec<u8>>),
    (slots, layers): (u32, u16),
    (settings, options): (Settings, Options),
) -> Tried {
    // One piece of every slot's block per tensor: keys, then values, of the first layer, of the
    // second, and so on.
    let parts = tensors.iter().map(|t| Part {
        base: t.address,
        stride: t.bytes_from_slot_to_slot,
        bytes: t.bytes_of_a_piece,
    });
    let map = SegmentMap::new(slots, &parts.collect::<Vec<_>>())?;
    // SAFETY: the tensors live as long as `owner`, and no code touches a slot while a copy that
    // names it is under way.
    let region = unsafe { DeviceRegion::adopt(map, Space::Host, owner) };
    let engine = Some(EngineMemory::new(region, layers)?);
    let manager = Manager::open(settings, Options { engine, ..options }).await?;
    Ok(())
}

/// docs/engine-memory.md
fn move_blocks(
    (manager, request): (Manager, RequestInfo),
    (chain, first, slots): (Vec<BlockHash>, usize, Vec<SlotId>),
    (layers, limit, written): (u16, Duration, HostFence),
) -> Tried {
    let named = [GroupSlots::full(first, &slots)];
    let ready = Fence::Host(written.clone());
    let save = SaveRequest { info: request, ready, ..SaveRequest::of(&chain, &named) };
    let save = manager.save_from(&save);

    let lease = manager.lease_for(request, &chain);
    let named = [GroupSlots::full(0, &slots[..lease.usable()])];
    let mut load = manager.load_into(lease, &named, &Fence::Done);
    for layer in 0..layers {
        if !load.wait_layers(layer + 1, limit) {
            break;
        }
    }
    let loaded = load.wait_for(limit).expect("it ends")?;
    Ok(())
}

/// docs/engine-memory.md
async fn memory_in_ranks(
    (slots, layers, region): (u32, u16, DeviceRegion),
    (settings, options): (Settings, Options),
    (group, rank_options): (RankGroup, RankOptions),
    (lease, named, limit): (Lease, [GroupSlots<'_>; 1], Duration),
) -> Tried {
    let engine = Some(EngineMemory::in_ranks(slots, layers)?);
    let leader = Options { ranks: Some(group), engine, ..options };
    let manager = Manager::open(settings.clone(), leader).await?;

    let engine = Some(EngineMemory::new(region, layers)?);
    let rank = Rank::join(&settings, RankOptions { engine, ..rank_options })?;

    let (load, transfer) = manager.load_in_ranks(lease, &named)?;
    let slice = rank.slice_of(load);
    for layer in 0..load.layers.get() {
        if !slice.wait_layers(layer + 1, limit) {
            break;
        }
    }
    let arrived = slice.wait(limit).expect("it ends");
    Ok(())
}

/// docs/ranks.md
async fn ranks(settings: Settings, fingerprint: Option<Fingerprint>) -> Tried {
    let group = RankGroup { dir: "/run/kvbm".into(), world: 4, limit: Duration::from_mins(1) };

    let options = RankOptions { fingerprint, ..RankOptions::new(group.clone(), 2) };
    let rank = Rank::join(&settings, options)?;
    rank.wait()?;

    let manager =
        Manager::open(settings, Options { ranks: Some(group), ..Options::default() }).await?;
    Ok(())
}

/// docs/engine-memory.md
async fn hybrid(
    (settings, options): (Settings, Options),
    (full_attention, sliding, states): (EngineMemory, EngineMemory, EngineMemory),
    (info, chain, is_end): (RequestInfo, Vec<BlockHash>, bool),
    (computed, full_slots): (usize, Vec<SlotId>),
    (window_start, sliding_slots, state): (usize, Vec<SlotId>, SlotId),
    slots_for: impl Fn(u8, std::ops::Range<usize>) -> &'static [SlotId],
) -> Tried {
    let groups = vec![
        CacheGroup {
            name: "sliding".into(),
            kind: GroupKind::Window { blocks: 64 },
            memory: sliding,
            share: None,
        },
        CacheGroup { name: "mamba".into(), kind: GroupKind::State, memory: states, share: None },
    ];
    let engine = Some(full_attention);
    let manager = Manager::open(settings, Options { engine, groups, ..options }).await?;

    let slots = [
        GroupSlots { group: 0, first: computed, slots: &full_slots },
        GroupSlots { group: 1, first: window_start, slots: &sliding_slots },
        GroupSlots { group: 2, first: chain.len() - 1, slots: &[state] },
    ];
    let save = SaveRequest { info, is_end, ..SaveRequest::of(&chain, &slots) };
    let saved = manager.save_from(&save).wait()?;

    let lease = manager.lease_for(info, &chain);
    let blocks = lease.usable();
    let slots: Vec<_> = (0..=2)
        .map(|group| (group, lease.wanted(group).expect("a group")))
        .map(|(group, wanted)| GroupSlots {
            group,
            first: wanted.start,
            slots: slots_for(group, wanted),
        })
        .collect();
    let loaded = manager.load_into(lease, &slots, &Fence::Done).wait()?;
    Ok(())
}
