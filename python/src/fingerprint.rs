//! Fingerprints, from dictionaries.

use kvbm::{Fingerprint, Hashing, KvLayout, Ranks, Rope};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::classes;

/// What the bytes of blocks depend on besides tokens, by the names of the fields of
/// `kvbm::Fingerprint`: those of nested structures behind a dot. What is not given is the default;
/// a name that does not exist is an error.
pub(crate) fn fingerprint(values: &Bound<'_, PyDict>) -> PyResult<Fingerprint> {
    let mut made = Fingerprint { ranks: Ranks::default(), ..Fingerprint::default() };
    let (Hashing { algorithm, seed }, Rope { theta, dimensions, scaling }) =
        (&mut made.hashing, &mut made.rope);
    for (name, value) in values {
        match name.extract::<&str>()? {
            "model" => made.model = value.extract()?,
            "weights" => made.weights = value.extract()?,
            "dtype" => made.dtype = value.extract()?,
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
            unknown => {
                let message =
                    format!("a fingerprint has no {unknown:?}; valid: {}", NAMES.join(", "));
                return Err(classes::InvalidError::new_err(message));
            }
        }
    }
    Ok(made)
}

const NAMES: [&str; 17] = [
    "model",
    "weights",
    "dtype",
    "layouts",
    "tensor_world",
    "tensor_rank",
    "pipeline_world",
    "pipeline_rank",
    "block_tokens",
    "rope_theta",
    "rope_dimensions",
    "rope_scaling",
    "engine",
    "engine_version",
    "hash_algorithm",
    "hash_seed",
    "epoch",
];

/// Of each cache group layers, order, shape and strides in bytes.
fn layouts(groups: &Bound<'_, PyAny>) -> PyResult<Vec<KvLayout>> {
    let groups: Vec<(u32, String, Vec<u64>, Vec<u64>)> = groups.extract()?;
    Ok(groups
        .into_iter()
        .map(|(layers, order, shape, strides)| KvLayout { layers, order, shape, strides })
        .collect())
}
