//! Who may read: what readers of other machines show, the names by which the server may be
//! addressed, and how many may connect, and for how long.

use std::collections::VecDeque;
use std::iter::chain;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Uri, header};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use kvbm_settings::MetricsSettings;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, yield_now};
use tokio::time::{sleep, timeout};

use crate::error::Result;
use crate::secret::read_secret;

/// The hash of a token: the process does not hold the token itself, and a comparison takes the same
/// time for any wrong one.
#[derive(Clone, Debug)]
pub(super) struct BearerToken(blake3::Hash);

impl BearerToken {
    /// `None`: everyone who reaches the address may read.
    pub(super) fn of(settings: &MetricsSettings) -> Result<Option<Self>> {
        let file = settings.token_file.as_ref();
        let file = file.map(|path| read_secret(path, "metrics.token_file")).transpose()?;
        let token = file.as_ref().or(settings.token.as_ref());
        Ok(token.map(|token| Self(blake3::hash(token.as_bytes()))))
    }

    /// Whether the value of a header `Authorization` shows it.
    pub(super) fn is_shown(&self, authorization: &[u8]) -> bool {
        let shown = authorization.split_at_checked(SCHEME.len());
        shown.is_some_and(|(scheme, token)| {
            scheme.eq_ignore_ascii_case(SCHEME) && blake3::hash(token.trim_ascii()) == self.0
        })
    }
}

const SCHEME: &[u8] = b"Bearer ";

/// The names that requests may carry in `Host`.
///
/// If a web page's own name is made to lead here (DNS rebinding), its browser takes us for the same
/// origin, and lets it read our answers. Its requests carry that name: neither an IP address nor a
/// name that means this machine everywhere.
#[derive(Clone, Debug)]
pub(super) struct KnownHosts(Arc<[String]>);

impl KnownHosts {
    /// `None`: every name is allowed. Other machines know this one by names that we do not, and
    /// show a token, which a foreign page lacks.
    pub(super) fn of(settings: &MetricsSettings) -> Option<Self> {
        let names = &settings.allowed_hosts;
        (settings.host.is_loopback() || !names.is_empty()).then(|| Self(names.clone().into()))
    }

    /// Whether a request is addressed to us. One without a name comes from no browser.
    pub(super) fn are_named_by(&self, uri: &Uri, headers: &HeaderMap) -> bool {
        let named = headers
            .get_all(header::HOST)
            .iter()
            .map(|value| Authority::try_from(value.as_bytes()).ok());
        let asked = uri.authority().cloned().map(Some);
        chain(named, asked)
            .all(|authority| authority.is_some_and(|authority| self.contains(authority.host())))
    }

    fn contains(&self, host: &str) -> bool {
        let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        if let Some(address) = bracketed {
            return address.parse::<Ipv6Addr>().is_ok();
        }
        let name = host.strip_suffix('.').unwrap_or(host);
        let is_name = |known: &str| known.eq_ignore_ascii_case(name);
        host.parse::<IpAddr>().is_ok()
            || is_name("localhost")
            || self.0.iter().any(|known| is_name(known))
    }
}

/// Most files of the process that it takes. A page takes one, a scraper another.
const MAX_CONNECTIONS: usize = 64;
/// A request's first line and its headers: the longest chain that fits has 1,900 blocks.
const MAX_HEAD: usize = 80 << 10;
/// From one answer, or the beginning, to the end of the next request's head.
const MAX_HEAD_TIME: Duration = Duration::from_secs(10);
/// How long a stopping server waits for answers.
const MAX_FAREWELL: Duration = Duration::from_secs(1);
/// How long to wait when the process has too many files open for a socket.
const PAUSE: Duration = Duration::from_millis(100);

/// Answers until the sender of `stopped` is gone.
///
/// If all places are taken, a new connection gets that of the oldest one. So connections that are
/// held, with half a request, an unread answer or no request at all, keep no one out: a probe sends
/// its request as soon as it is connected, and is answered before that many others have come.
pub(super) async fn serve(socket: TcpListener, app: Router, mut stopped: oneshot::Receiver<()>) {
    let (connections, mut places) = (GracefulShutdown::new(), Places::default());
    loop {
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            _ = &mut stopped => break,
        };
        let Ok((stream, _)) = accepted else {
            sleep(PAUSE).await;
            continue;
        };
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(MAX_HEAD_TIME)
            .max_buf_size(MAX_HEAD)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(app.clone()));
        let connection = connections.watch(connection);
        // A client that goes away is no event.
        let task = tokio::spawn(async move { _ = connection.await });
        places.give(task.abort_handle());
        // Answer its request before the next one comes, or a crowd would displace it first.
        yield_now().await;
    }
    drop(socket);
    let _ = timeout(MAX_FAREWELL, connections.shutdown()).await;
}

/// The open connections, oldest first.
#[derive(Debug, Default)]
struct Places(VecDeque<AbortHandle>);

impl Places {
    fn give(&mut self, newest: AbortHandle) {
        self.0.retain(|connection| !connection.is_finished());
        if self.0.len() == MAX_CONNECTIONS
            && let Some(longest) = self.0.pop_front()
        {
            longest.abort();
        }
        self.0.push_back(newest);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use axum::http::HeaderValue;

    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_token_is_shown_unchanged_or_not_at_all() {
        let settings = MetricsSettings {
            token: Some("0123456789abcdef".into()),
            ..MetricsSettings::default()
        };
        let token = BearerToken::of(&settings).unwrap().unwrap();
        assert!(
            token.is_shown(b"Bearer 0123456789abcdef")
                && token.is_shown(b"bearer 0123456789abcdef")
        );
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "0123456789abcdef",
            "Bearer 0123456789abcde",
            "Basic 0123456789abcdef",
        ] {
            assert!(!token.is_shown(wrong.as_bytes()), "{wrong}");
        }
        assert!(!format!("{token:?}").contains("0123456789abcdef"));
    }

    #[test]
    fn a_file_has_one_line_of_some_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let open = |text: &str| {
            fs::write(&path, text).unwrap();
            let token_file = Some(path.display().to_string());
            BearerToken::of(&MetricsSettings { token_file, ..MetricsSettings::default() })
        };
        assert!(open("0123456789abcdef\n").unwrap().unwrap().is_shown(b"Bearer 0123456789abcdef"));
        for text in ["", "short", "0123456789abcdef\n0123456789abcdef\n"] {
            let error = open(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(text.is_empty() || !error.to_string().contains(text), "{error}");
        }
        fs::remove_file(&path).unwrap();
        let missing = MetricsSettings {
            token_file: Some(path.display().to_string()),
            ..MetricsSettings::default()
        };
        assert_eq!(BearerToken::of(&missing).unwrap_err().kind(), ErrorKind::Unavailable);
    }

    fn known(allowed: &[&str]) -> KnownHosts {
        let allowed_hosts = allowed.iter().map(ToString::to_string).collect();
        KnownHosts::of(&MetricsSettings { allowed_hosts, ..MetricsSettings::default() }).unwrap()
    }

    fn is_answered(hosts: &KnownHosts, uri: &str, named: &[&str]) -> bool {
        let named = named.iter().map(|name| (header::HOST, HeaderValue::from_str(name).unwrap()));
        let mut headers = HeaderMap::new();
        named.for_each(|(key, name)| _ = headers.append(key, name));
        hosts.are_named_by(&uri.parse().unwrap(), &headers)
    }

    #[test]
    fn addresses_localhost_and_listed_names_are_known() {
        let hosts = known(&["node-1"]);
        for name in [
            "127.0.0.1",
            "127.0.0.1:6880",
            "[::1]:6880",
            "10.1.2.3",
            "LocalHost:1",
            "localhost.",
            "Node-1:80",
        ] {
            assert!(is_answered(&hosts, "/", &[name]), "{name}");
        }
        for name in [
            "",
            "evil.example:6880",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "node-2",
            "[kvbm]",
            "é",
        ] {
            assert!(!is_answered(&hosts, "/", &[name]), "{name}");
        }
    }

    #[test]
    fn each_name_of_a_request_must_be_known() {
        let hosts = known(&[]);
        assert!(is_answered(&hosts, "/", &[]));
        assert!(is_answered(&hosts, "http://localhost/", &["localhost"]));
        assert!(!is_answered(&hosts, "http://evil.example/", &["localhost"]));
        assert!(!is_answered(&hosts, "/", &["localhost", "evil.example"]));
    }

    #[test]
    fn other_machines_use_their_own_names_unless_some_are_listed() {
        let open =
            MetricsSettings { host: "0.0.0.0".parse().unwrap(), ..MetricsSettings::default() };
        assert!(KnownHosts::of(&open).is_none());
        assert!(
            KnownHosts::of(&MetricsSettings { allowed_hosts: vec!["a".into()], ..open }).is_some()
        );
    }
}
