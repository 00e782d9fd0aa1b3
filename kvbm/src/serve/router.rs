//! The endpoints.

use std::sync::Arc;

use axum::extract::{Query, Request, State as Shared};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use axum::{Json, Router};
use kvbm_policies::RequestId;
use prometheus::{Registry, TextEncoder};
use serde::{Deserialize, Serialize};

use super::access::{BearerToken, KnownHosts};
use crate::names::hash::{BlockHash, Chain};
use crate::observe::requests::MAX_REQUESTS;
use crate::observe::state::{Found, ObservedState, Why};

/// What is shown.
#[derive(Clone, Debug)]
pub(super) struct PageView {
    pub(super) observed: Arc<ObservedState>,
    pub(super) registry: Registry,
}

/// All endpoints. If there is a token, those that tell nothing about requests answer without it: a
/// browser cannot show it when it opens the page, and a health probe has none.
pub(super) fn router(
    view: PageView,
    token: Option<BearerToken>,
    hosts: Option<KnownHosts>,
) -> Router {
    let mut guarded = guarded().into_iter().fold(Router::new(), add);
    if let Some(token) = token {
        guarded = guarded.route_layer(middleware::from_fn_with_state(token, only_with_token));
    }
    let mut all = open().into_iter().fold(guarded, add).with_state(view);
    if let Some(hosts) = hosts {
        all = all.layer(middleware::from_fn_with_state(hosts, only_by_known_names));
    }
    all.layer(middleware::map_response(harden))
}

type EndpointFn = (&'static str, MethodRouter<PageView>);

fn add(router: Router<PageView>, (path, method): EndpointFn) -> Router<PageView> {
    router.route(path, method)
}

fn guarded() -> [EndpointFn; 4] {
    [
        ("/metrics", get(metrics)),
        ("/v1/state", get(state)),
        ("/v1/lookup", get(lookup)),
        ("/v1/why", get(why)),
    ]
}

fn open() -> [EndpointFn; 7] {
    [
        ("/healthz", get(async || "ok")),
        ("/readyz", get(readiness)),
        ("/openapi.json", get(async || asset("application/json", OPENAPI))),
        ("/", get(async || asset("text/html; charset=utf-8", include_str!("page/index.html")))),
        (
            "/page.js",
            get(async || asset("text/javascript; charset=utf-8", include_str!("page/page.js"))),
        ),
        (
            "/page.css",
            get(async || asset("text/css; charset=utf-8", include_str!("page/page.css"))),
        ),
        ("/tiers.css", get(async || asset("text/css; charset=utf-8", TIER_COLORS))),
    ]
}

/// CSS that gives each tier its colour, light and dark, in a variable of the tier's name: `--host`.
pub const TIER_COLORS: &str = include_str!("page/tiers.css");

const OPENAPI: &str = include_str!("openapi.json");

async fn only_with_token(
    Shared(token): Shared<BearerToken>,
    headers: HeaderMap,
    request: Request,
    next: Next,
) -> Response {
    let shown =
        headers.get(header::AUTHORIZATION).is_some_and(|value| token.is_shown(value.as_bytes()));
    if shown {
        return next.run(request).await;
    }
    let refused =
        RefusedRequest::new(StatusCode::UNAUTHORIZED, "show the token: Authorization: Bearer …");
    ([(header::WWW_AUTHENTICATE, "Bearer")], refused).into_response()
}

async fn only_by_known_names(
    Shared(hosts): Shared<KnownHosts>,
    request: Request,
    next: Next,
) -> Response {
    if hosts.are_named_by(request.uri(), request.headers()) {
        return next.run(request).await;
    }
    let error = "this is no name of the server: ask for localhost or an IP address, or list the name in \
                 metrics.allowed_hosts (DYN_KVBM_METRICS_ALLOWED_HOSTS)";
    RefusedRequest::new(StatusCode::MISDIRECTED_REQUEST, error).into_response()
}

/// Browsers and proxies keep nothing, and no site embeds it; a page loads only what is here.
async fn harden(mut response: Response) -> Response {
    let headers = [
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; \
             form-action 'none'; frame-ancestors 'none'",
        ),
    ];
    response
        .headers_mut()
        .extend(headers.map(|(name, value)| (name, HeaderValue::from_static(value))));
    response
}

fn asset(kind: &'static str, text: &'static str) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, kind)], text)
}

/// An error answer.
#[derive(Debug)]
struct RefusedRequest {
    status: StatusCode,
    error: String,
}

impl RefusedRequest {
    fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self { status, error: error.into() }
    }

    fn bad(error: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, error)
    }

    fn gone() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the block manager is closed")
    }
}

impl IntoResponse for RefusedRequest {
    fn into_response(self) -> Response {
        #[derive(Serialize)]
        struct HttpBody {
            error: String,
        }
        (self.status, Json(HttpBody { error: self.error })).into_response()
    }
}

type HttpAnswer<T> = Result<T, RefusedRequest>;

async fn metrics(Shared(view): Shared<PageView>) -> HttpAnswer<impl IntoResponse> {
    let text = TextEncoder::new().encode_to_string(&view.registry.gather());
    let text = text.map_err(|error| {
        RefusedRequest::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    })?;
    Ok(([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text))
}

async fn readiness(Shared(view): Shared<PageView>) -> impl IntoResponse {
    let readiness = view.observed.readiness();
    let status = if readiness.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(readiness))
}

async fn state(Shared(view): Shared<PageView>) -> HttpAnswer<impl IntoResponse> {
    view.observed.state().map(Json).ok_or_else(RefusedRequest::gone)
}

/// What is asked about.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ViewQuery {
    chain: Option<String>,
    request: Option<String>,
}

impl ViewQuery {
    fn chain(text: &str) -> HttpAnswer<Vec<BlockHash>> {
        text.split(',').map(|hash| parse_hash(hash.trim())).collect()
    }
}

type AskedFor = Result<Query<ViewQuery>, axum::extract::rejection::QueryRejection>;

fn asked(query: AskedFor) -> HttpAnswer<ViewQuery> {
    query.map(|Query(asked)| asked).map_err(|rejection| RefusedRequest::bad(rejection.body_text()))
}

/// How much of a chain each tier holds.
#[derive(Debug, Serialize)]
struct ChainQuery {
    /// Blocks of the chain.
    blocks: usize,
    found: Vec<Found>,
}

async fn lookup(Shared(view): Shared<PageView>, query: AskedFor) -> HttpAnswer<impl IntoResponse> {
    let ViewQuery { chain: Some(chain), request: None } = asked(query)? else {
        return Err(RefusedRequest::bad("give ?chain=HASH,HASH… and nothing else"));
    };
    let hashes = ViewQuery::chain(&chain)?;
    let Why { blocks, found, .. } =
        view.observed.why(Chain::from(&hashes)).ok_or_else(RefusedRequest::gone)?;
    Ok(Json(ChainQuery { blocks, found }))
}

async fn why(Shared(view): Shared<PageView>, query: AskedFor) -> HttpAnswer<impl IntoResponse> {
    match asked(query)? {
        ViewQuery { chain: Some(chain), request: None } => {
            let hashes = ViewQuery::chain(&chain)?;
            view.observed.why(Chain::from(&hashes)).map(Json).ok_or_else(RefusedRequest::gone)
        }
        ViewQuery { chain: None, request: Some(name) } if !name.is_empty() => {
            view.observed.why_of(RequestId::named(&name)).map(Json).ok_or_else(|| unknown(&name))
        }
        _ => Err(RefusedRequest::bad("give one of ?chain=HASH,HASH… and ?request=NAME")),
    }
}

fn unknown(request: &str) -> RefusedRequest {
    let error = format!(
        "request {} is not among the last {MAX_REQUESTS} that named themselves: ask by its chain",
        shortened(request, 100)
    );
    RefusedRequest::new(StatusCode::NOT_FOUND, error)
}

/// Thirty-two digits as printed here, or more: the bytes of an engine's own hash.
fn parse_hash(text: &str) -> HttpAnswer<BlockHash> {
    /// A SHA-512, the largest that engines use.
    const MAX_DIGITS: usize = 128;
    let wrong = || {
        let shown = shortened(text, 40);
        RefusedRequest::bad(format!(
            "\"{shown}\" is no block hash: 32 hexadecimal digits, or those of an engine's own hash"
        ))
    };
    if !text.is_ascii() || text.len() < 32 || text.len() > MAX_DIGITS {
        return Err(wrong());
    }
    if text.len() == 32 {
        return u128::from_str_radix(text, 16).map(BlockHash::from_u128).map_err(|_| wrong());
    }
    let bytes = hex::decode(text).map_err(|_| wrong())?;
    BlockHash::from_engine(&bytes).map_err(|_| wrong())
}

/// Shortens text that an answer repeats.
fn shortened(text: &str, max_chars: usize) -> String {
    text.chars().take(max_chars).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_description_has_exactly_the_endpoints() {
        let described: serde_json::Value = serde_json::from_str(OPENAPI).unwrap();
        let described: BTreeSet<&str> =
            described["paths"].as_object().unwrap().keys().map(String::as_str).collect();
        let (guarded, open) = (guarded(), open());
        let served: BTreeSet<&str> = guarded.iter().chain(&open).map(|(path, _)| *path).collect();
        assert_eq!(described, served);
    }

    #[test]
    fn one_sheet_gives_all_tiers_their_colours() {
        for tier in kvbm_tiers::Tier::ALL {
            let variable = format!("--{}:", tier.name());
            assert_eq!(TIER_COLORS.matches(&variable).count(), 1, "{variable}");
            assert!(!include_str!("page/page.css").contains(&variable), "{variable}");
        }
    }

    #[test]
    fn hashes_are_read_as_printed_and_as_engines_have_them() {
        let hash = BlockHash::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
        assert_eq!(parse_hash(&format!("{hash:?}")).unwrap(), hash);
        let of_vllm = [7_u8; 32];
        assert_eq!(
            parse_hash(&hex::encode(of_vllm)).unwrap(),
            BlockHash::from_engine(&of_vllm).unwrap()
        );
        for wrong in [
            "",
            "12",
            &"0".repeat(33),
            &"g".repeat(32),
            &"+".repeat(32),
            &"0".repeat(130),
            &"é".repeat(16),
        ] {
            parse_hash(wrong).unwrap_err();
        }
    }
}
