//! What etcd is asked, and what it answers: the messages of its gRPC interface in JSON.
//!
//! The gateway writes numbers of 64 bits as strings, and bytes in base64. It leaves out what is zero,
//! false or empty. Fields that are not known are ignored.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A number of 64 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub(super) struct Int64(pub(super) i64);

impl TryFrom<String> for Int64 {
    type Error = std::num::ParseIntError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse().map(Self)
    }
}

impl From<Int64> for String {
    fn from(number: Int64) -> Self {
        number.0.to_string()
    }
}

/// Bytes of a key or a value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub(super) struct Base64(pub(super) Vec<u8>);

impl From<&str> for Base64 {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl TryFrom<String> for Base64 {
    type Error = base64::DecodeError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        STANDARD.decode(text).map(Self)
    }
}

impl From<Base64> for String {
    fn from(bytes: Base64) -> Self {
        STANDARD.encode(bytes.0)
    }
}

/// `/v3/kv/range`: keys from `key` to before `range_end`, or `key` alone.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct RangeRequest {
    pub(super) key: Base64,
    pub(super) range_end: Base64,
    pub(super) limit: Int64,
    /// As of which revision; 0: the newest.
    pub(super) revision: Int64,
    pub(super) keys_only: bool,
}

#[derive(Debug, Deserialize)]
pub(super) struct RangeAnswer {
    pub(super) header: Header,
    #[serde(default)]
    pub(super) kvs: Vec<KeyValue>,
    /// There are more than `limit`.
    #[serde(default)]
    pub(super) more: bool,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Header {
    /// The newest revision there is.
    #[serde(default)]
    pub(super) revision: Int64,
}

#[derive(Debug, Deserialize)]
pub(super) struct KeyValue {
    pub(super) key: Base64,
    #[serde(default)]
    pub(super) value: Base64,
    /// Which lease keeps it.
    #[serde(default)]
    pub(super) lease: Int64,
}

/// `/v3/kv/put`.
#[derive(Debug, Serialize)]
pub(super) struct PutRequest {
    pub(super) key: Base64,
    pub(super) value: Base64,
    pub(super) lease: Int64,
}

/// `/v3/lease/grant`.
#[derive(Debug, Serialize)]
pub(super) struct GrantRequest {
    #[serde(rename = "TTL")]
    pub(super) ttl: Int64,
}

/// A lease, in requests and answers.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct LeaseMessage {
    #[serde(rename = "ID", default)]
    pub(super) id: Int64,
    /// In seconds. Of an answer to `/v3/lease/keepalive`: 0, the lease ended.
    #[serde(rename = "TTL", default, skip_serializing)]
    pub(super) ttl: Int64,
}

/// `/v3/watch`.
#[derive(Debug, Serialize)]
pub(super) struct WatchRequest {
    pub(super) create_request: WatchCreation,
}

#[derive(Debug, Serialize)]
pub(super) struct WatchCreation {
    pub(super) key: Base64,
    pub(super) range_end: Base64,
    /// The first revision that is told.
    pub(super) start_revision: Int64,
    /// Asks for a sign of life every ten minutes if nothing changes.
    pub(super) progress_notify: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WatchAnswer {
    pub(super) canceled: bool,
    pub(super) cancel_reason: String,
    /// Not 0: what was asked for is forgotten.
    pub(super) compact_revision: Int64,
    pub(super) events: Vec<Event>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Event {
    #[serde(rename = "type", default)]
    pub(super) kind: EventKind,
    pub(super) kv: KeyValue,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum EventKind {
    #[default]
    Put,
    Delete,
}

/// A line of an answer that has many.
#[derive(Debug, Deserialize)]
pub(super) struct StreamLine<T> {
    pub(super) result: Option<T>,
    pub(super) error: Option<Value>,
}

/// `/v3/auth/authenticate`. Without `Debug`: it has a password.
#[derive(Serialize)]
pub(super) struct AuthenticateRequest<'a> {
    pub(super) name: &'a str,
    pub(super) password: &'a str,
}

#[derive(Deserialize)]
pub(super) struct AuthenticateAnswer {
    pub(super) token: String,
}

/// An answer without anything to know.
#[derive(Debug, Deserialize)]
pub(super) struct Done {}

/// What etcd says of an error: the versions write it in three ways.
pub(super) fn error_text(answer: &Value) -> Option<&str> {
    let inner = &answer["error"];
    let places = [&inner["message"], &answer["message"], inner];
    places.into_iter().find_map(Value::as_str)
}

/// What an announced worker's key holds.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct PeerValue {
    pub(super) address: String,
}
