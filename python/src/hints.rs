//! What an engine knows of a request besides its tokens.

use kvbm::{RequestId, RequestInfo};
use pyo3::prelude::*;

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

/// A request of this number that `hints` describes.
pub(crate) fn request_info(request: Option<u64>, hints: Option<&Hints>) -> RequestInfo {
    RequestInfo {
        request: request.map(RequestId),
        hints: hints.map(|hints| hints.0).unwrap_or_default(),
        ..RequestInfo::default()
    }
}
