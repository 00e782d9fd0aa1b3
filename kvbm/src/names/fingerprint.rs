//! What the bytes of a block depend on besides its tokens.

use std::fmt;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// All that the bytes of a block depend on besides its tokens: blocks of one fingerprint are
/// useless to another.
///
/// An engine fills it in, always with the same words for the same thing, and leaves unknown fields
/// at the default. Two fingerprints that differ in any field have different
/// [digests](Self::digest), so they share neither block names nor files nor objects.
///
/// **No secrets.** The fields are written beside the blocks and may be logged. A secret salt (a
/// tenant's) belongs in the hashes, as that of a [`ChainHasher`](crate::ChainHasher).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Name of the model, such as `meta-llama/Llama-3.1-8B`. Not empty.
    pub model: String,
    /// Which weights these are: a revision, or a digest of the files. Adapters that are merged into
    /// them count.
    pub weights: String,
    /// Type of the numbers in the cache: `bf16`, `fp8_e4m3`.
    pub dtype: String,
    /// What each number of `fp8_e4m3` is multiplied by: a scale for the keys of each layer and one for
    /// its values, or for each head of these, in this order: layers, keys before values, heads. There
    /// are as many as the one layout has layers, times its axes `kv` and `head`, where it has them, and
    /// 2,048 at most. Empty: not told, and such blocks are not converted for
    /// [`Peers`](crate::Peers) of another type.
    pub scales: Vec<f32>,
    /// How a block lies in memory, by cache group: that of group 0 first.
    pub layouts: Vec<KvLayout>,
    /// The part of the model that this process has.
    pub ranks: Ranks,
    /// Tokens in a block: those of [`Options::block_tokens`](crate::Options::block_tokens).
    pub block_tokens: u64,
    /// How positions are encoded in the keys.
    pub rope: Rope,
    /// Name of the engine, such as `vllm`.
    pub engine: String,
    /// Its version.
    pub engine_version: String,
    /// How blocks are hashed.
    pub hashing: Hashing,
    /// Counts other changes that make old blocks worthless. This is a manager's first epoch;
    /// [`Manager::reset`] begins others.
    ///
    /// [`Manager::reset`]: crate::Manager::reset
    pub epoch: u64,
}

/// How the KV tensors of one cache group lie in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayout {
    /// Layers of the group in this process.
    pub layers: u32,
    /// What the dimensions of a layer's block are, outermost first, such as
    /// `kv,token,head,element`. Where keys and values have theirs in different orders, both behind
    /// `kv`: `head,kv(channel,token|token,channel),element`. [Peers](crate::Peers) whose blocks have
    /// other numbers of tokens, or are otherwise ordered, go by these names.
    pub order: String,
    /// How long each of them is: as many numbers as there are strides.
    pub shape: Vec<u64>,
    /// Bytes from one to the next along each of them.
    pub strides: Vec<u64>,
}

/// Which part of a model a process has. Each rank is below its world, and a world is at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ranks {
    /// Processes that share each layer.
    pub tensor_world: u32,
    /// Which of them this is.
    pub tensor_rank: u32,
    /// Stages, each with some of the layers.
    pub pipeline_world: u32,
    /// Which of them this is.
    pub pipeline_rank: u32,
}

impl Default for Ranks {
    /// The only one.
    fn default() -> Self {
        Self { tensor_world: 1, tensor_rank: 0, pipeline_world: 1, pipeline_rank: 0 }
    }
}

/// Rotary position embedding (Su et al., "`RoFormer`", 2021), if the cached keys are rotated.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Base of the angles, such as 500,000; 0 where there is none.
    pub theta: f64,
    /// Dimensions of a head that are rotated.
    pub dimensions: u32,
    /// How positions of long contexts are scaled, with all parameters, such as `yarn factor=4`.
    pub scaling: String,
}

/// How blocks are hashed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hashing {
    /// The algorithm, such as `sha256_cbor` or `blake3`.
    pub algorithm: String,
    /// What the first block of every chain is hashed with.
    pub seed: Vec<u8>,
}

/// Scales that a fingerprint has at most: it is sent to peers.
pub(crate) const MAX_SCALES: usize = 2_048;
/// What a scale may be: numbers times it are finite in binary32.
pub(crate) const SCALES: RangeInclusive<f32> = 1e-30..=1e30;

/// Comes first in every encoding. Another order or meaning of the fields needs another version.
const VERSION: &[u8] = b"kvbm fingerprint 1";

impl Fingerprint {
    /// Digest of 128 bits (BLAKE3 over a canonical encoding that includes a version).
    pub fn digest(&self) -> u128 {
        digest(&self.encoded(self.epoch))
    }

    /// The digest in another epoch.
    pub(crate) fn digest_in(&self, epoch: u64) -> u128 {
        digest(&self.encoded(epoch))
    }

    /// Every field in turn, with its length if that may vary: different fields never make the same
    /// bytes.
    fn encoded(&self, epoch: u64) -> Vec<u8> {
        // Named one by one, so that a new field cannot be forgotten here.
        #[rustfmt::skip]
        let Self { model, weights, dtype, scales, layouts, ranks, block_tokens, rope, engine, engine_version, hashing, epoch: _ } =
            self;
        let Hashing { algorithm, seed } = hashing;
        let mut encoding = FingerprintEncoding::default();
        encoding.bytes(VERSION);
        [model, weights, dtype].into_iter().for_each(|text| encoding.bytes(text.as_bytes()));
        encoding.number(layouts.len() as u64);
        layouts.iter().for_each(|layout| layout.encode(&mut encoding));
        ranks.encode(&mut encoding);
        encoding.number(*block_tokens);
        rope.encode(&mut encoding);
        [engine, engine_version, algorithm]
            .into_iter()
            .for_each(|text| encoding.bytes(text.as_bytes()));
        encoding.bytes(seed);
        encoding.number(epoch);
        // Without any it is what it was before there were scales.
        if !scales.is_empty() {
            encoding
                .numbers(&scales.iter().map(|scale| scale.to_bits().into()).collect::<Vec<_>>());
        }
        encoding.0
    }

    /// The first field that differs from another fingerprint's, and both values; epochs begin and
    /// end, and are not looked at.
    pub(crate) fn difference(&self, other: &Self) -> Option<(&'static str, [String; 2])> {
        // Named one by one, as above.
        let [ours, theirs] = [self, other].map(|fingerprint| {
            #[rustfmt::skip]
            let Self { model, weights, dtype, scales: _, layouts, ranks, block_tokens, rope, engine, engine_version, hashing, epoch: _ } =
                fingerprint;
            [
                ("model", model.clone()),
                ("weights", weights.clone()),
                ("dtype", dtype.clone()),
                // Layouts follow from it.
                ("block_tokens", block_tokens.to_string()),
                ("layouts", format!("{layouts:?}")),
                ("ranks", format!("{ranks:?}")),
                ("rope", format!("{rope:?}")),
                ("engine", engine.clone()),
                ("engine_version", engine_version.clone()),
                ("hashing", format!("{hashing:?}")),
            ]
        });
        let differs = ours.into_iter().zip(theirs).find(|(ours, theirs)| ours != theirs);
        let differs = differs.map(|((field, ours), (_, theirs))| (field, [ours, theirs]));
        // There may be many: the first one that differs is named.
        differs.or_else(|| Some(("scales", scale_difference([&self.scales, &other.scales])?)))
    }

    /// Whether there are as many scales as layers, keys and values, and perhaps heads ask for.
    fn takes_scales(&self) -> bool {
        let [layout] = &self.layouts[..] else { return false };
        let [layers, kv, heads] = ["layer", "kv", "head"].map(|name| layout.extent(name));
        let each = layers.saturating_mul(kv);
        [each, each.saturating_mul(heads)].contains(&(self.scales.len() as u64))
    }

    /// Refuses impossible values.
    pub(crate) fn validate(&self, block_tokens: u64) -> Result<()> {
        let Ranks { tensor_world, tensor_rank, pipeline_world, pipeline_rank } = self.ranks;
        let problem = if self.model.is_empty() || self.weights.is_empty() {
            "a fingerprint names its model and its weights".to_owned()
        } else if self.block_tokens != block_tokens {
            let own = self.block_tokens;
            format!(
                "the fingerprint is of blocks of {own} tokens, and the options of {block_tokens}"
            )
        } else if tensor_rank >= tensor_world || pipeline_rank >= pipeline_world {
            format!("a rank of the fingerprint is not below its world: {:?}", self.ranks)
        } else if let Some(layout) =
            self.layouts.iter().find(|held| held.shape.len() != held.strides.len())
        {
            format!("a layout of the fingerprint needs a stride for each dimension: {layout:?}")
        } else if self.scales.len() > MAX_SCALES {
            format!("a fingerprint has {MAX_SCALES} scales at most, not {}", self.scales.len())
        } else if let Some(scale) = self.scales.iter().find(|scale| !SCALES.contains(scale)) {
            format!("a scale of a fingerprint is from {SCALES:?}, not {scale}")
        } else if !self.scales.is_empty() && !self.takes_scales() {
            format!(
                "{} scales are not one for the keys and one for the values of each layer or head, of one cache group: {:?}",
                self.scales.len(),
                self.layouts
            )
        } else {
            return Ok(());
        };
        Err(Error::invalid(problem))
    }
}

/// How two lists of scales differ, if they do.
fn scale_difference([ours, theirs]: [&[f32]; 2]) -> Option<[String; 2]> {
    let both = [ours, theirs];
    if ours.len() != theirs.len() {
        return Some(both.map(|scales| format!("{} of them", scales.len())));
    }
    let at = ours.iter().zip(theirs).position(|(a, b)| a.to_bits() != b.to_bits())?;
    Some(both.map(|scales| format!("{}, as number {at}", scales[at])))
}

impl fmt::Display for Fingerprint {
    /// The short form that names directories and objects: 16 hexadecimal digits in lower case, the
    /// same in every epoch. Names of blocks hold the whole digest, which tells apart epochs, and
    /// fingerprints with the same short form by chance.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.digest_in(0) as u64)
    }
}

/// The dimensions of a layer's block, outermost first.
pub(crate) struct AxisOrders<'a> {
    pub(crate) keys: Vec<&'a str>,
    pub(crate) values: Vec<&'a str>,
}

impl KvLayout {
    /// How long the axis of this name is; 1: there is none.
    fn extent(&self, name: &str) -> u64 {
        let orders = self.orders();
        let at = orders.keys.iter().position(|axis| *axis == name);
        let named = at.and_then(|at| self.shape.get(at).copied());
        named.unwrap_or(if name == "layer" { self.layers.into() } else { 1 })
    }

    /// What `order` says.
    pub(crate) fn orders(&self) -> AxisOrders<'_> {
        let both = || {
            let (before, rest) = self.order.split_once('(')?;
            let (inside, behind) = rest.split_once(')')?;
            let (keys, values) = inside.split_once('|')?;
            Some([[before, keys, behind], [before, values, behind]])
        };
        let [keys, values] = both().unwrap_or_else(|| [[&*self.order, "", ""]; 2]).map(|parts| {
            let names = parts.into_iter().flat_map(|part| part.split(',')).map(str::trim);
            names.filter(|name| !name.is_empty()).collect()
        });
        AxisOrders { keys, values }
    }

    fn encode(&self, encoding: &mut FingerprintEncoding) {
        let Self { layers, order, shape, strides } = self;
        encoding.number(u64::from(*layers));
        encoding.bytes(order.as_bytes());
        encoding.numbers(shape);
        encoding.numbers(strides);
    }
}

impl Ranks {
    fn encode(self, encoding: &mut FingerprintEncoding) {
        let Self { tensor_world, tensor_rank, pipeline_world, pipeline_rank } = self;
        [tensor_world, tensor_rank, pipeline_world, pipeline_rank]
            .into_iter()
            .for_each(|number| encoding.number(u64::from(number)));
    }
}

impl Rope {
    fn encode(&self, encoding: &mut FingerprintEncoding) {
        let Self { theta, dimensions, scaling } = self;
        // Both zeroes count as one number.
        encoding.number((theta + 0.0).to_bits());
        encoding.number(u64::from(*dimensions));
        encoding.bytes(scaling.as_bytes());
    }
}

/// Numbers of 64 bits, little-endian, and texts behind their lengths.
#[derive(Default)]
struct FingerprintEncoding(Vec<u8>);

impl FingerprintEncoding {
    fn number(&mut self, number: u64) {
        self.0.extend(number.to_le_bytes());
    }

    fn numbers(&mut self, numbers: &[u64]) {
        self.number(numbers.len() as u64);
        numbers.iter().for_each(|&number| self.number(number));
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend(bytes);
    }
}

/// The first 128 bits of BLAKE3.
pub(crate) fn digest(bytes: &[u8]) -> u128 {
    let mut half = [0; 16];
    half.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
    u128::from_le_bytes(half)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;
    use crate::error::ErrorKind;

    fn word() -> impl Strategy<Value = String> {
        "[a-z0-9 ,=]{0,6}"
    }

    fn layout() -> impl Strategy<Value = KvLayout> {
        (0..100_u32, word(), vec((any::<u64>(), any::<u64>()), 0..4)).prop_map(
            |(layers, order, dimensions)| {
                let (shape, strides) = dimensions.into_iter().unzip();
                KvLayout { layers, order, shape, strides }
            },
        )
    }

    fn fingerprint() -> impl Strategy<Value = Fingerprint> {
        let words = (word(), word(), word(), word(), word(), word(), word());
        let numbers = (1..9_u32, any::<Index>(), 1..9_u32, any::<Index>(), 1..99_u64, any::<u64>());
        let rest = (vec(layout(), 0..3), any::<f64>(), any::<u32>(), vec(any::<u8>(), 0..4));
        (words, numbers, rest).prop_map(|(words, numbers, rest)| {
            let (model, weights, dtype, scaling, engine, engine_version, algorithm) = words;
            let scales = Vec::new();
            let (tensor_world, tensor, pipeline_world, pipeline, block_tokens, epoch) = numbers;
            let (layouts, theta, dimensions, seed) = rest;
            let tensor_rank = tensor.index(tensor_world as usize) as u32;
            let pipeline_rank = pipeline.index(pipeline_world as usize) as u32;
            let ranks = Ranks { tensor_world, tensor_rank, pipeline_world, pipeline_rank };
            let (rope, hashing) =
                (Rope { theta, dimensions, scaling }, Hashing { algorithm, seed });
            Fingerprint {
                model,
                weights,
                dtype,
                scales,
                layouts,
                ranks,
                block_tokens,
                rope,
                engine,
                engine_version,
                hashing,
                epoch,
            }
        })
    }

    type Change = fn(&mut Fingerprint);

    /// Ways to change one field and nothing else.
    const CHANGES: &[Change] = &[
        |of| of.model.push('x'),
        |of| of.weights.push('x'),
        |of| of.dtype.push('x'),
        |of| of.scales.push(1.0),
        |of| of.layouts.push(KvLayout::default()),
        |of| of.layouts.iter_mut().for_each(|layout| layout.layers ^= 1),
        |of| of.layouts.iter_mut().for_each(|layout| layout.order.push('x')),
        |of| of.layouts.iter_mut().for_each(|layout| layout.shape.push(0)),
        |of| of.layouts.iter_mut().for_each(|layout| layout.strides.push(0)),
        |of| {
            of.layouts
                .iter_mut()
                .flat_map(|layout| &mut layout.shape)
                .for_each(|length| *length ^= 1);
        },
        |of| {
            of.layouts
                .iter_mut()
                .flat_map(|layout| &mut layout.strides)
                .for_each(|stride| *stride ^= 1);
        },
        |of| of.ranks.tensor_world += 1,
        |of| of.ranks.tensor_rank += 1,
        |of| of.ranks.pipeline_world += 1,
        |of| of.ranks.pipeline_rank += 1,
        |of| of.block_tokens += 1,
        |of| of.rope.theta = f64::from_bits(of.rope.theta.to_bits() ^ 1),
        |of| of.rope.dimensions ^= 1,
        |of| of.rope.scaling.push('x'),
        |of| of.engine.push('x'),
        |of| of.engine_version.push('x'),
        |of| of.hashing.algorithm.push('x'),
        |of| of.hashing.seed.push(0),
        |of| of.epoch ^= 1,
    ];

    /// Letters move from one field to the next.
    const MOVES: &[Change] = &[
        |of| of.weights.extend(of.model.pop()),
        |of| of.dtype.extend(of.weights.pop()),
        |of| of.engine_version.extend(of.engine.pop()),
        |of| of.hashing.algorithm.extend(of.engine_version.pop()),
        |of| of.layouts.iter_mut().for_each(|layout| layout.strides.extend(layout.shape.pop())),
    ];

    proptest! {
        #[test]
        fn whatever_differs_makes_another_digest(one in fingerprint()) {
            prop_assert_eq!(one.digest(), one.clone().digest());
            for change in CHANGES.iter().chain(MOVES) {
                let mut other = one.clone();
                change(&mut other);
                // There may be no layout to change; NaN equals no number.
                let is_same = other == one || (one.rope.theta.is_nan() && format!("{other:?}") == format!("{one:?}"));
                prop_assert!(is_same || other.digest() != one.digest(), "{:?} {:?}", one, other);
                let same_but_for_the_epoch = Fingerprint { epoch: one.epoch, ..other.clone() } == one;
                if !is_same && !one.rope.theta.is_nan() {
                    prop_assert_eq!(other.to_string() == one.to_string(), same_but_for_the_epoch);
                }
            }
        }
    }

    /// A change of the encoding must change its version, or the blocks of a namespace are lost
    /// silently.
    #[test]
    fn the_encoding_stays_as_it_is() {
        let none = Fingerprint::default();
        assert_eq!(none.digest(), 0xba33_01a6_aa2d_27c0_19e5_bd59_f570_7bc3);
        assert_eq!(none.to_string(), "19e5bd59f5707bc3");
        assert_eq!(Fingerprint { epoch: 9, ..none.clone() }.to_string(), none.to_string());
        let minus = Rope { theta: -0.0, ..Rope::default() };
        assert_eq!(
            Fingerprint { rope: minus, ..none.clone() }.digest(),
            none.digest(),
            "one number"
        );
    }

    #[test]
    fn what_cannot_be_true_is_refused() {
        let good = Fingerprint {
            model: "m".into(),
            weights: "w".into(),
            block_tokens: 16,
            layouts: vec![KvLayout {
                shape: vec![2, 16],
                strides: vec![64, 4],
                ..KvLayout::default()
            }],
            ..Fingerprint::default()
        };
        good.validate(16).unwrap();
        for (order, scales) in
            [("kv,token", 6), ("layer,token", 2), ("kv,head", 6), ("kv,head", 96)]
        {
            let mut scaled = Fingerprint { scales: vec![0.5; scales], ..good.clone() };
            (scaled.layouts[0].layers, scaled.layouts[0].order) = (3, order.to_owned());
            scaled.validate(16).unwrap();
        }
        let bad: [(Change, &str); 8] = [
            (|of| of.scales = vec![1.0; 3], "3 scales are not one for"),
            (|of| of.scales = vec![0.0], "from 1e-30..=1e30, not 0"),
            (|of| of.scales = vec![1.0; 2_049], "2048 scales at most, not 2049"),
            (|of| of.model.clear(), "names its model"),
            (|of| of.weights.clear(), "names its model"),
            (|of| of.block_tokens = 32, "blocks of 32 tokens"),
            (|of| of.ranks.tensor_rank = 1, "not below its world"),
            (|of| of.layouts[0].strides.truncate(1), "a stride for each dimension"),
        ];
        for (spoil, words) in bad {
            let mut spoiled = good.clone();
            spoil(&mut spoiled);
            let error = spoiled.validate(16).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
