//! How blocks and requests are named, and what an engine knows of a request besides: chains of
//! block hashes, kept on this side so that a request's hashes cross once, fingerprints, numbers and
//! hints.

use kvbm::{
    BlockHash, ChainNames, Fingerprint, Hashing, KvLayout, Ranks, RequestId, RequestInfo, Rope,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::{classes, of_manager};

/// The hashes of a prompt's full blocks, root first: each commits to all tokens before its block's
/// end. It grows as the request does.
///
/// Args: hashes: an engine's own chained hashes, of at least 16 bytes each. salt: what the blocks
/// depend on besides, and the hashes do not have: with another salt they are other blocks.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug, Default)]
pub(crate) struct Chain {
    pub(crate) hashes: Vec<BlockHash>,
    salt: Vec<u8>,
}

#[pymethods]
impl Chain {
    #[new]
    #[pyo3(signature = (hashes=None, *, salt=Vec::new()))]
    fn new(hashes: Option<&Bound<'_, PyAny>>, salt: Vec<u8>) -> PyResult<Self> {
        let mut chain = Self { hashes: Vec::new(), salt };
        if let Some(hashes) = hashes {
            chain.extend(hashes)?;
        }
        Ok(chain)
    }

    /// Adds the hashes of the blocks that follow. All of them, or none if one is too short.
    fn extend(&mut self, hashes: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut more = Vec::new();
        for hash in hashes.try_iter()? {
            let hash = hash?;
            more.push(
                self.name(hash.cast::<PyBytes>()?.as_bytes())
                    .map_err(|error| of_manager(&error))?,
            );
        }
        self.hashes.append(&mut more);
        Ok(())
    }

    /// By which names `Events` tell of its blocks, from position `first` on.
    fn names(&self, first: usize) -> Vec<u128> {
        self.hashes.iter().skip(first).map(|hash| hash.get()).collect()
    }

    fn __len__(&self) -> usize {
        self.hashes.len()
    }
}

impl Chain {
    fn name(&self, hash: &[u8]) -> Result<BlockHash, kvbm::Error> {
        let own = BlockHash::from_engine(hash)?;
        if self.salt.is_empty() {
            Ok(own)
        } else {
            BlockHash::from_engine(&[&self.salt, hash].concat())
        }
    }
}

/// Does what stands behind a name; one that does not exist is an error, which lists them.
macro_rules! by_name {
    ($name:expr; $($known:literal => $set:expr,)*) => {
        match $name {
            $($known => $set,)*
            unknown => {
                let names = [$($known),*].join(", ");
                let message = format!("a fingerprint has no {unknown:?}; valid: {names}");
                return Err(classes::InvalidError::new_err(message));
            }
        }
    };
}

/// What the bytes of blocks depend on besides tokens, by the names of the fields of
/// `kvbm::Fingerprint`: those of nested structures behind a dot. What is not given is the default,
/// tokens of a block those that the caller was told otherwise; a name that does not exist is an
/// error.
pub(crate) fn fingerprint(values: &Bound<'_, PyDict>, block_tokens: u64) -> PyResult<Fingerprint> {
    let mut made = Fingerprint { ranks: Ranks::default(), block_tokens, ..Fingerprint::default() };
    let (Hashing { algorithm, seed }, Rope { theta, dimensions, scaling }) =
        (&mut made.hashing, &mut made.rope);
    for (name, value) in values {
        by_name!(name.extract::<&str>()?;
            "model" => made.model = value.extract()?,
            "weights" => made.weights = value.extract()?,
            "dtype" => made.dtype = value.extract()?,
            "scales" => made.scales = value.extract()?,
            "layouts" => made.layouts = layouts(&value)?,
            "tensor_world" => made.ranks.tensor_world = value.extract()?,
            "tensor_rank" => made.ranks.tensor_rank = value.extract()?,
            "pipeline_world" => made.ranks.pipeline_world = value.extract()?,
            "pipeline_rank" => made.ranks.pipeline_rank = value.extract()?,
            "block_tokens" => made.block_tokens = value.extract()?,
            "rope_theta" => *theta = value.extract()?,
            "rope_dimensions" => *dimensions = value.extract()?,
            "rope_scaling" => *scaling = value.extract()?,
            "engine" => made.engine = value.extract()?,
            "engine_version" => made.engine_version = value.extract()?,
            "hash_algorithm" => *algorithm = value.extract()?,
            "hash_seed" => *seed = value.extract()?,
            "epoch" => made.epoch = value.extract()?,
        );
    }
    Ok(made)
}

/// Of each cache group layers, order, shape and strides in bytes.
fn layouts(groups: &Bound<'_, PyAny>) -> PyResult<Vec<KvLayout>> {
    let groups: Vec<(u32, String, Vec<u64>, Vec<u64>)> = groups.extract()?;
    Ok(groups
        .into_iter()
        .map(|(layers, order, shape, strides)| KvLayout { layers, order, shape, strides })
        .collect())
}

/// The number of a request of this name: `kvbm why --request NAME` finds what was given with it.
///
/// A whole number is itself, other text a hash of it.
#[pyfunction]
pub(crate) fn request_number(name: &str) -> u64 {
    RequestId::named(name).0
}

/// Two numbers for a request of vLLM: that of the id which its client has, and that of the id by
/// which vLLM tells it from all others that live. The first is worth having where no other request
/// that lives has it.
#[pyfunction]
pub(crate) fn vllm_request_numbers(request_id: &str) -> (u64, u64) {
    (request_number(external_id(request_id)), request_number(request_id))
}

/// Without the random digits that vLLM appends to what its client has, since a client may name two
/// requests alike.
fn external_id(request_id: &str) -> &str {
    const DIGITS: usize = 8;
    match request_id.rsplit_once('-') {
        Some((external, random)) if random.len() == DIGITS && is_hexadecimal(random) => external,
        _ => request_id,
    }
}

fn is_hexadecimal(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// What is known of a request besides its tokens: policies go by it.
///
/// Args: tenant: the tenant it belongs to. priority: how much its blocks matter beside others of
/// the same tenant, from 0 to 100; 50 is usual. expected_output_tokens: how many tokens it is
/// expected to generate. will_not_return: no request will continue it: what only it uses may leave
/// first.
#[pyclass(module = "kvbm_rs", frozen, eq)]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Hints(kvbm::Hints);

#[pymethods]
impl Hints {
    #[new]
    #[pyo3(signature = (*, tenant=None, priority=None, expected_output_tokens=None, will_not_return=false))]
    const fn new(
        tenant: Option<u32>,
        priority: Option<u8>,
        expected_output_tokens: Option<u32>,
        will_not_return: bool,
    ) -> Self {
        Self(kvbm::Hints { expected_output_tokens, will_not_return, tenant, priority })
    }
}

/// The chain of the same tokens in blocks of another number of tokens: an argument `there`.
pub(crate) struct OtherChain {
    block_tokens: u64,
    hashes: Vec<BlockHash>,
}

impl FromPyObject<'_, '_> for OtherChain {
    type Error = PyErr;

    fn extract(there: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let (block_tokens, chain): (u64, PyRef<'_, Chain>) = there.extract()?;
        Ok(Self { block_tokens, hashes: chain.hashes.clone() })
    }
}

/// The names of a chain's first `most` blocks, and what they are called where blocks have another
/// number of tokens.
pub(crate) fn names(chain: &Chain, most: Option<usize>, there: Option<OtherChain>) -> ChainNames {
    let most = chain.hashes.len().min(most.unwrap_or(usize::MAX));
    let names = ChainNames::from(&chain.hashes[..most]);
    match there {
        Some(OtherChain { block_tokens, hashes }) => names.in_blocks_of(block_tokens, hashes),
        None => names,
    }
}

/// A request of this number that `hints` describes.
pub(crate) fn request_info(request: Option<u64>, hints: Option<&Hints>) -> RequestInfo {
    RequestInfo {
        request: request.map(RequestId),
        hints: hints.map(|hints| hints.0).unwrap_or_default(),
        ..RequestInfo::default()
    }
}
