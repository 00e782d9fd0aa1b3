//! First contact: both sides prove that they know the secret, and say what their blocks are.
//!
//! The secret itself is never sent. It says who may connect. What goes over the connection afterwards
//! is hidden and signed by TLS alone, where there is that (docs/security.md).

use std::fmt;

use ring::hmac::{self, HMAC_SHA256};
use ring::rand::{SecureRandom, SystemRandom};
use tokio::io::{AsyncRead, AsyncWrite};

use super::conversion::Conversion;
use super::numbers::NumberTypes;
use super::protocol::{
    BrokenLink, Challenge, Hello, Join, Member, Nonce, Proof, ToHolder, ToReader, receive, send,
};
use super::shares::{heads_of, of_all_ranks, share_heads};
use super::tls::{PeerTls, explained};
use crate::error::{Error, Result};
use crate::names::fingerprint::Fingerprint;

/// What workers know that may read each other's blocks.
pub(super) struct PeerSecret(hmac::Key);

impl fmt::Debug for PeerSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerSecret")
    }
}

/// What a worker proves by that others may read its blocks, and it theirs.
#[derive(Debug, Default)]
pub(super) struct PeerProofs {
    pub(super) secret: Option<PeerSecret>,
    pub(super) tls: Option<PeerTls>,
}

impl PeerProofs {
    pub(super) const fn are_none(&self) -> bool {
        self.secret.is_none() && self.tls.is_none()
    }
}

/// Who proves that it knows the secret: a proof of one side is none of the other.
#[derive(Clone, Copy)]
enum Side {
    Holder,
    Reader,
}

impl PeerSecret {
    pub(super) fn new(secret: &str) -> Self {
        Self(hmac::Key::new(HMAC_SHA256, secret.as_bytes()))
    }

    fn proof(&self, said: &Said<'_>) -> Proof {
        let mut proof = [0; 32];
        proof.copy_from_slice(hmac::sign(&self.0, &said.bytes()).as_ref());
        proof
    }

    fn is_proved(&self, said: &Said<'_>, proof: &Proof) -> bool {
        hmac::verify(&self.0, &said.bytes(), proof).is_ok()
    }
}

/// What a proof is of: one of a side, a greeting or a member is none of another.
struct Said<'a> {
    side: Side,
    reader: &'a Nonce,
    holder: &'a Nonce,
    /// Who the reader says that it is; `None`: it only looks, or is the holder.
    member: Option<&'a Member>,
}

impl Said<'_> {
    fn bytes(&self) -> Vec<u8> {
        let side: &[u8] = match self.side {
            Side::Holder => b"kvbm peers 1 holder",
            Side::Reader => b"kvbm peers 1 reader",
        };
        let member = postcard::to_allocvec(&self.member).expect("memory takes any member");
        [side, self.reader, self.holder, &member].concat()
    }
}

/// # Errors
/// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable): the system has no random bytes.
pub(super) fn random<const BYTES: usize>() -> Result<[u8; BYTES]> {
    let mut random = [0; BYTES];
    SystemRandom::new()
        .fill(&mut random)
        .map_err(|_| Error::unavailable("the system gives no random bytes"))?;
    Ok(random)
}

/// Has a holder prove that it knows the secret; returns the proof that we do, as this member.
async fn meet(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    secret: Option<&PeerSecret>,
    member: Option<&Member>,
) -> Result<Option<Proof>, BrokenLink> {
    let ours: Nonce = random().map_err(|error| BrokenLink::Refused(error.to_string()))?;
    send(stream, &ToHolder::Hello(Hello::new(ours))).await?;
    // The first that is heard of a holder that refused our certificate.
    let theirs = match receive(stream).await.map_err(explained)? {
        ToReader::Challenge(challenge) => challenge,
        ToReader::Refused(why) => return Err(BrokenLink::refused(&why)),
        _ => return Err(BrokenLink::Unexpected("an answer before a challenge")),
    };
    let said = |side, member| Said { side, reader: &ours, holder: &theirs.nonce, member };
    let is_known = |secret: &PeerSecret| {
        let proof = theirs.proof.as_ref();
        proof.is_some_and(|proof| secret.is_proved(&said(Side::Holder, None), proof))
    };
    if !secret.is_none_or(is_known) {
        return Err(BrokenLink::OtherSecret);
    }
    Ok(secret.map(|secret| secret.proof(&said(Side::Reader, member))))
}

async fn welcomed(stream: &mut (impl AsyncRead + Unpin)) -> Result<Member, BrokenLink> {
    match receive(stream).await? {
        ToReader::Welcome(member) => Ok(*member),
        ToReader::Refused(why) => Err(BrokenLink::refused(&why)),
        _ => Err(BrokenLink::Unexpected("an answer before a welcome")),
    }
}

/// Has a holder say who it is, whatever our own blocks are.
pub(super) async fn look(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    secret: Option<&PeerSecret>,
) -> Result<Member, BrokenLink> {
    let proof = meet(stream, secret, None).await?;
    send(stream, &ToHolder::Look(proof)).await?;
    welcomed(stream).await
}

/// Who we are, to others.
#[derive(Debug)]
pub(super) struct Credentials {
    pub(super) member: Member,
    pub(super) proofs: PeerProofs,
    /// What it reads may have numbers of another type, which are converted.
    pub(super) converts_types: bool,
}

impl Credentials {
    /// Introduces us to a holder; returns who it is.
    pub(super) async fn greet(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    ) -> Result<Member, BrokenLink> {
        let proof = meet(stream, self.proofs.secret.as_ref(), Some(&self.member)).await?;
        send(stream, &ToHolder::Join(Box::new(Join { proof, member: self.member.clone() })))
            .await?;
        let member = welcomed(stream).await?;
        self.check(&member, self.converts_types).map(|()| member)
    }

    /// The answer to a reader's first message.
    pub(super) fn challenge(&self, reader: &Nonce, holder: Nonce) -> Challenge {
        let said = Said { side: Side::Holder, reader, holder: &holder, member: None };
        let proof = self.proofs.secret.as_ref().map(|secret| secret.proof(&said));
        Challenge { nonce: holder, proof }
    }

    /// Whether a reader knows the secret, and whether its blocks are ours, unless it only looks: an
    /// error says why it is not let in.
    pub(super) fn admit(
        &self,
        [reader, holder]: [&Nonce; 2],
        proof: Option<&Proof>,
        member: Option<&Member>,
    ) -> Result<(), BrokenLink> {
        let said = Said { side: Side::Reader, reader, holder, member };
        let is_known =
            |secret: &PeerSecret| proof.is_some_and(|proof| secret.is_proved(&said, proof));
        if !self.proofs.secret.as_ref().is_none_or(is_known) {
            return Err(BrokenLink::OtherSecret);
        }
        // Whether it converts what it reads here is its own business.
        member.map_or(Ok(()), |member| self.check(member, true))
    }

    /// Whether another's blocks are what ours are, or one is made of the other.
    fn check(&self, theirs: &Member, converts_types: bool) -> Result<(), BrokenLink> {
        let ours = &self.member;
        if ours.incarnation == theirs.incarnation {
            return Err(BrokenLink::Itself);
        }
        match difference(ours, theirs, converts_types) {
            None => Ok(()),
            Some(what) => Err(BrokenLink::OtherBlocks(what)),
        }
    }
}

/// The first thing that differs, with both values. Heads may be split over another number of ranks,
/// if one number divides the other; and blocks may be such that one is made of the other.
pub(super) fn difference(ours: &Member, theirs: &Member, converts_types: bool) -> Option<String> {
    if ours.ranks != theirs.ranks && divides(ours, theirs) {
        let all = difference(&of_all_ranks(ours)?, &of_all_ranks(theirs)?, converts_types);
        let can_be =
            !Conversion::is_needed(ours, theirs) || Conversion::between(ours, theirs).is_some();
        return all.or_else(|| (!can_be).then(|| unshared(ours, theirs)));
    }
    let conversion = Conversion::between(ours, theirs);
    if let Some(made) = conversion.filter(|made| converts_types || !made.changes_types()) {
        return difference(ours, &converted(theirs, ours, made.changes_types()), false);
    }
    let both = [ours, theirs];
    let rank = |member: &Member| member.rank.map_or("none".to_owned(), |rank| rank.to_string());
    let of_process = [
        ("the number of ranks", both.map(|member| member.ranks.to_string())),
        ("the rank", both.map(rank)),
        ("the list of cache groups", both.map(|member| member.groups.clone())),
    ];
    let differs = of_process.into_iter().find(|(_, [a, b])| a != b);
    let differs = differs.or_else(|| ours.fingerprint.difference(&theirs.fingerprint));
    // It follows from others, most often.
    let bytes = both.map(|member| member.block_bytes.to_string());
    let other_bytes = (bytes[0] != bytes[1]).then_some(("block_bytes", bytes));
    let (what, [a, b]) = differs.or(other_bytes)?;
    let hint = if what == "dtype" { scales_missing(both) } else { String::new() };
    Some(format!("{what} is {a:?} at {}, {b:?} at {}{hint}", ours.name, theirs.name))
}

/// Whole blocks convert, and shares of their heads do not.
fn unshared(ours: &Member, theirs: &Member) -> String {
    let both = [ours, theirs].map(|member| &member.fingerprint);
    let order =
        |of: &Fingerprint| of.layouts.first().map_or_else(String::new, |of| of.order.clone());
    let has_other_types = NumberTypes::between(&both[1].dtype, &both[0].dtype).is_some();
    let (what, [a, b]) = if has_other_types {
        ("dtype", both.map(|of| of.dtype.clone()))
    } else {
        ("the order of axes", both.map(order))
    };
    format!(
        "{what} is {a:?} at {}, {b:?} at {}, and shares of heads cannot be converted",
        ours.name, theirs.name
    )
}

/// What keeps numbers of FP8 from being converted.
fn scales_missing([ours, theirs]: [&Member; 2]) -> String {
    let [to, from] = [ours, theirs].map(|member| &*member.fingerprint.dtype);
    let unscaled = match NumberTypes::between(from, to) {
        Some(NumberTypes::FromFp8(_)) => theirs,
        Some(NumberTypes::ToFp8(_)) => ours,
        _ => return String::new(),
    };
    if !unscaled.fingerprint.scales.is_empty() {
        return String::new();
    }
    format!("; {} gives no scales (Fingerprint::scales)", unscaled.name)
}

/// What a member would be if its blocks were `ours`, with numbers of its own type unless that changes.
fn converted(theirs: &Member, ours: &Member, changes_types: bool) -> Member {
    let mut member = Member { block_bytes: ours.block_bytes, ..theirs.clone() };
    let fingerprint = &mut member.fingerprint;
    if changes_types {
        fingerprint.dtype.clone_from(&ours.fingerprint.dtype);
        fingerprint.scales.clone_from(&ours.fingerprint.scales);
    }
    fingerprint.layouts.clone_from(&ours.fingerprint.layouts);
    fingerprint.block_tokens = ours.fingerprint.block_tokens;
    member
}

/// Whether ranks of the one have whole shares of those of the other, and both say where heads lie.
fn divides(ours: &Member, theirs: &Member) -> bool {
    let (few, many) = if ours.ranks < theirs.ranks { (ours, theirs) } else { (theirs, ours) };
    few.ranks > 0
        && many.ranks.is_multiple_of(few.ranks)
        && share_heads(ours, theirs)
        && of_all_ranks(many).is_some()
        && of_all_ranks(few).is_some()
        && heads_of(few).is_some_and(|heads| heads.has_shares(many.ranks / few.ranks))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::peers) fn member(name: &str, incarnation: u64) -> Member {
        let fingerprint = Fingerprint {
            model: "model".to_owned(),
            weights: "1".to_owned(),
            block_tokens: 16,
            ..Fingerprint::default()
        };
        let name = name.to_owned();
        Member {
            name,
            incarnation,
            block_bytes: 4096,
            fingerprint,
            ranks: 0,
            rank: None,
            groups: String::new(),
        }
    }

    fn credentials(member: Member, secret: Option<&str>) -> Credentials {
        let proofs = PeerProofs { secret: secret.map(PeerSecret::new), tls: None };
        Credentials { member, proofs, converts_types: false }
    }

    /// What each side says of the other.
    async fn meet(reader: &Credentials, holder: &Credentials) -> [Result<Member, BrokenLink>; 2] {
        let (here, there) = tokio::io::duplex(1 << 12);
        // A side that gives up closes its end.
        let greet = async move {
            let mut here = here;
            reader.greet(&mut here).await
        };
        let (told, heard) = tokio::join!(greet, crate::peers::holder::welcome(there, holder));
        [told, heard.map(|(member, _)| member.unwrap())]
    }

    #[tokio::test]
    async fn workers_of_one_secret_and_one_model_meet() {
        for secret in [None, Some("0123456789abcdef")] {
            let [a, b] = ["a", "b"].map(|name| {
                let incarnation = u64::from(name.as_bytes()[0]);
                credentials(member(name, incarnation), secret)
            });
            let [told, heard] = meet(&a, &b).await;
            assert_eq!((told.unwrap(), heard.unwrap()), (b.member, a.member));
        }
    }

    #[tokio::test]
    async fn both_sides_hear_why_they_do_not_meet() {
        let secret = Some("0123456789abcdef");
        let holder = credentials(member("b", 2), secret);
        let other = Fingerprint { dtype: "bf16".to_owned(), ..member("a", 1).fingerprint };
        for (reader, why) in [
            (credentials(member("a", 1), Some("another secret 1")), "do not know the same secret"),
            (credentials(member("a", 1), None), "do not know the same secret"),
            (credentials(member("a", 2), secret), "the same worker"),
            (credentials(Member { block_bytes: 8192, ..member("a", 1) }, secret), "block_bytes is"),
            (credentials(Member { ranks: 2, ..member("a", 1) }, secret), "number of ranks is"),
            (
                credentials(Member { groups: "state".to_owned(), ..member("a", 1) }, secret),
                "cache groups is",
            ),
            (credentials(Member { rank: Some(1), ..member("a", 1) }, secret), "the rank is"),
            (credentials(Member { fingerprint: other, ..member("a", 1) }, secret), "dtype is"),
        ] {
            for said in meet(&reader, &holder).await {
                let error = said.unwrap_err().to_string();
                let is_said = error.contains(why) || error.contains("broke");
                assert!(is_said, "{error}, not: {why}");
            }
        }
        let reader = credentials(member("a", 1), secret);
        assert!(meet(&reader, &holder).await.into_iter().all(|met| met.is_ok()), "then it heals");
    }
}
