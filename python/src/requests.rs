//! The numbers of requests that engines name by text.

use kvbm::RequestId;
use pyo3::prelude::*;

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
