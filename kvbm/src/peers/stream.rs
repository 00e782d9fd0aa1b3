//! What a connection between workers runs over: TCP, and TLS on it where there are certificates.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy, sink};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::greeting::PeerProofs;
use super::protocol::{BrokenLink, ToReader, send};
use super::tls::PeerTls;

/// What TLS begins with: a record of a handshake. No greeting of ours is that long.
const TLS_HANDSHAKE: u8 = 22;
/// How long the other side has to read why it is refused.
const LINGER: Duration = Duration::from_secs(1);

pub(super) const ONE_SIDED: &str = "one side speaks TLS and the other does not: give all workers peers.tls_certificate, \
                                    peers.tls_key and peers.tls_ca, or none";

/// What a connection runs over.
pub(super) trait PeerStream: AsyncRead + AsyncWrite + Unpin + Send + Sync {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send + Sync> PeerStream for S {}

/// Connects to a holder at `host:port`.
pub(super) async fn connect(
    address: &str,
    proofs: &PeerProofs,
) -> Result<Box<dyn PeerStream>, BrokenLink> {
    let stream = TcpStream::connect(address).await?;
    if proofs.are_none() && !stream.peer_addr()?.ip().is_loopback() {
        let why = "it is another machine, and nothing proves who we are: set peers.secret_file \
                   (DYN_KVBM_PEERS_SECRET_FILE) or peers.tls_certificate";
        return Err(BrokenLink::Unexpected(why));
    }
    stream.set_nodelay(true)?;
    match &proofs.tls {
        Some(tls) => Ok(Box::new(tls.connect(address, stream).await?)),
        None => Ok(Box::new(stream)),
    }
}

/// Takes a reader's connection, as far as it may be talked to.
pub(super) async fn accept(
    mut stream: TcpStream,
    tls: Option<&PeerTls>,
) -> Result<Box<dyn PeerStream>, BrokenLink> {
    let mut first = [0];
    if stream.peek(&mut first).await? == 0 {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    match (tls, first[0] == TLS_HANDSHAKE) {
        (Some(tls), true) => Ok(Box::new(tls.accept(stream).await?)),
        (None, false) => Ok(Box::new(stream)),
        _ => {
            // To a reader that speaks TLS it is no TLS, which tells it the same.
            let _ = send(&mut stream, &ToReader::Refused(ONE_SIDED.to_owned())).await;
            linger(stream).await;
            Err(BrokenLink::Tls(ONE_SIDED.to_owned()))
        }
    }
}

/// Lets the other side read what was sent last: closed at once, with bytes unread, the connection
/// would be reset.
pub(super) async fn linger(mut stream: TcpStream) {
    let read_on = async {
        stream.shutdown().await?;
        copy(&mut stream, &mut sink()).await
    };
    let _ = timeout(LINGER, read_on).await;
}
