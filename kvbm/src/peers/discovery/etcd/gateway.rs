//! Asks etcd: its members in turn, as a user, within limits.

use std::mem;
use std::time::Duration;

use reqwest::Url;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

use super::http::{Answer, Call, Transport};
use super::messages::{AuthenticateAnswer, AuthenticateRequest, StreamLine, error_text};
use crate::error::{Error, Result};
use crate::peers::discovery::address::quoted;
use crate::peers::discovery::{EtcdSource, EtcdUser};

/// Longest answer, and longest line of one that has many, in bytes.
const MAX_ANSWER: usize = 1 << 20;
/// Longest time for an answer to come whole, and for one that has many lines to begin.
const MAX_PATIENCE: Duration = Duration::from_secs(5);

/// Why etcd was asked in vain. Its text names the member, and no secret.
#[derive(Debug, thiserror::Error)]
pub(super) enum EtcdFailure {
    /// The rest was not read.
    #[error("etcd answers more than 1 MiB")]
    TooLarge,
    #[error("{0}")]
    Failed(String),
}

/// One member of etcd, or the next if that one fails.
pub(super) struct Gateway<T> {
    transport: T,
    members: Vec<String>,
    turn: usize,
    user: Option<EtcdUser>,
    token: Option<String>,
    patience: Duration,
}

impl<T: Transport> Gateway<T> {
    pub(super) fn new(source: &EtcdSource, transport: T) -> Result<Self> {
        let members = source.endpoints.iter().enumerate().map(|(place, text)| member(place, text));
        let members = members.collect::<Result<Vec<_>>>()?;
        if members.is_empty() {
            return Err(Error::invalid(
                "peers in etcd need an endpoint, such as http://127.0.0.1:2379",
            ));
        }
        // Two members can be asked while a lease lives that was renewed after a third of its life.
        let patience = MAX_PATIENCE.min(source.ttl / 3);
        let user = source.user.clone();
        Ok(Self { transport, members, turn: 0, user, token: None, patience })
    }

    pub(super) fn members(&self) -> usize {
        self.members.len()
    }

    /// Asks the next member from now on, and proves anew who asks.
    pub(super) fn turn(&mut self) {
        self.turn = (self.turn + 1) % self.members.len();
        self.token = None;
    }

    /// Asks for one answer.
    pub(super) async fn ask<R: DeserializeOwned>(
        &mut self,
        path: &str,
        request: &(impl Serialize + Sync),
    ) -> Result<R, EtcdFailure> {
        let body = body(request)?;
        let asked =
            timeout(self.patience, async { self.post(path, body).await?.whole().await }).await;
        asked.unwrap_or_else(|_| Err(self.is_late()))
    }

    /// Asks for an answer of many lines.
    pub(super) async fn listen(
        &mut self,
        path: &str,
        request: &(impl Serialize + Sync),
    ) -> Result<Incoming<T::Answer>, EtcdFailure> {
        let body = body(request)?;
        let asked = timeout(self.patience, self.post(path, body)).await;
        asked.unwrap_or_else(|_| Err(self.is_late()))
    }

    /// Asks for many lines, and takes the first.
    pub(super) async fn ask_first<R: DeserializeOwned>(
        &mut self,
        path: &str,
        request: &(impl Serialize + Sync),
    ) -> Result<R, EtcdFailure> {
        let patience = self.patience;
        self.listen(path, request).await?.next(patience).await
    }

    async fn post(&mut self, path: &str, body: String) -> Result<Incoming<T::Answer>, EtcdFailure> {
        self.authenticate().await?;
        self.send(path, body).await?.accepted().await
    }

    /// A token is worth something for some minutes, so each failure ends it.
    async fn authenticate(&mut self) -> Result<(), EtcdFailure> {
        let Some(EtcdUser { name, password }) = self.user.as_ref().filter(|_| self.token.is_none())
        else {
            return Ok(());
        };
        let body = body(&AuthenticateRequest { name, password })?;
        let answer = self.send("/v3/auth/authenticate", body).await?;
        let status = answer.answer.status();
        if status != OK {
            // Its words are not repeated: they could be ours.
            let what = format!(
                "does not take {} for a user (status {status}): check name and password, and that authentication is enabled",
                quoted(name)
            );
            return Err(self.failed(&what));
        }
        let answer: AuthenticateAnswer = answer.whole().await?;
        self.token = Some(answer.token);
        Ok(())
    }

    async fn send(&self, path: &str, body: String) -> Result<Incoming<T::Answer>, EtcdFailure> {
        let (url, token) = (format!("{}{path}", self.member()), self.token.clone());
        let call = Call { url, token: token.as_deref(), body };
        let sent = self.transport.post(call).await;
        let answer = sent.map_err(|what| self.failed(&format!("does not answer: {what}")))?;
        let member = self.member().to_owned();
        Ok(Incoming { member, token, answer, bytes: Vec::new(), searched: 0 })
    }

    fn member(&self) -> &str {
        &self.members[self.turn]
    }

    fn is_late(&self) -> EtcdFailure {
        self.failed(&format!("does not answer within {:?}", self.patience))
    }

    fn failed(&self, what: &str) -> EtcdFailure {
        EtcdFailure::Failed(format!("{} {what}", self.member()))
    }
}

const OK: u16 = 200;

fn body(request: &impl Serialize) -> Result<String, EtcdFailure> {
    serde_json::to_string(request).map_err(|error| EtcdFailure::Failed(error.to_string()))
}

/// The URL of a member, without a slash at its end. The message does not repeat it: it may hold a
/// password.
fn member(place: usize, text: &str) -> Result<String> {
    let is_plain = |url: &Url| {
        let has_user = !url.username().is_empty() || url.password().is_some();
        let has_more = url.path() != "/" || url.query().is_some() || url.fragment().is_some();
        matches!(url.scheme(), "http" | "https") && !has_user && !has_more
    };
    let url = Url::parse(text).ok().filter(is_plain).ok_or_else(|| {
        Error::invalid(format!(
            "endpoint {} of etcd is none; one is the URL of a member, such as http://127.0.0.1:2379, without user, \
             path and query",
            place + 1
        ))
    })?;
    Ok(url.origin().ascii_serialization())
}

/// An answer as it comes.
pub(super) struct Incoming<A> {
    member: String,
    token: Option<String>,
    answer: A,
    /// What was read and is not taken yet.
    bytes: Vec<u8>,
    /// How many of these have no end of a line.
    searched: usize,
}

impl<A: Answer> Incoming<A> {
    /// The next line, if it comes within `patience`.
    pub(super) async fn next<R: DeserializeOwned>(
        &mut self,
        patience: Duration,
    ) -> Result<R, EtcdFailure> {
        let read = timeout(patience, self.line()).await;
        let line =
            read.unwrap_or_else(|_| Err(self.failed(&format!("says nothing for {patience:?}"))))?;
        match self.parsed(&line)? {
            StreamLine { result: Some(result), error: None } => Ok(result),
            StreamLine { error, .. } => {
                Err(self.refused(error_text(&error.unwrap_or_default()).unwrap_or("nothing")))
            }
        }
    }

    async fn line(&mut self) -> Result<Vec<u8>, EtcdFailure> {
        loop {
            let unsearched = &self.bytes[self.searched..];
            if let Some(length) = unsearched.iter().position(|&byte| byte == b'\n') {
                let rest = self.bytes.split_off(self.searched + length + 1);
                self.searched = 0;
                return Ok(mem::replace(&mut self.bytes, rest));
            }
            self.searched = self.bytes.len();
            if !self.read_on().await? {
                return self.last_line();
            }
        }
    }

    /// What came after the last end of a line.
    fn last_line(&mut self) -> Result<Vec<u8>, EtcdFailure> {
        self.searched = 0;
        let line = mem::take(&mut self.bytes);
        if line.is_empty() { Err(self.failed("ends its answer")) } else { Ok(line) }
    }

    async fn whole<R: DeserializeOwned>(mut self) -> Result<R, EtcdFailure> {
        while self.read_on().await? {}
        self.parsed(&self.bytes)
    }

    /// It, unless it says what is wrong.
    async fn accepted(mut self) -> Result<Self, EtcdFailure> {
        let status = self.answer.status();
        if status == OK {
            return Ok(self);
        }
        while self.read_on().await? {}
        let said: Value = serde_json::from_slice(&self.bytes).unwrap_or_default();
        let status = format!("status {status}");
        Err(self.refused(error_text(&said).unwrap_or(&status)))
    }

    /// False: there is no more.
    async fn read_on(&mut self) -> Result<bool, EtcdFailure> {
        let piece = self.answer.piece().await;
        let Some(piece) =
            piece.map_err(|what| self.failed(&format!("breaks off its answer: {what}")))?
        else {
            return Ok(false);
        };
        if self.bytes.len() + piece.len() > MAX_ANSWER {
            return Err(EtcdFailure::TooLarge);
        }
        self.bytes.extend(piece);
        Ok(true)
    }

    /// The message has no part of the answer, which may repeat what we sent.
    fn parsed<R: DeserializeOwned>(&self, json: &[u8]) -> Result<R, EtcdFailure> {
        serde_json::from_slice(json).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            let what = format!("answers otherwise than etcd would (line {line}, column {column})");
            self.failed(&what)
        })
    }

    fn refused(&self, said: &str) -> EtcdFailure {
        let said = match self.token.as_deref() {
            Some(token) => quoted(&said.replace(token, "(token)")),
            None => quoted(said),
        };
        self.failed(&format!("refuses: {said}"))
    }

    fn failed(&self, what: &str) -> EtcdFailure {
        EtcdFailure::Failed(format!("{} {what}", self.member))
    }
}
