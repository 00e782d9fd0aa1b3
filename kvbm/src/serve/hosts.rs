//! The names by which the server may be addressed.

use std::iter::chain;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use axum::http::uri::Authority;
use axum::http::{HeaderMap, Uri, header};
use kvbm_settings::MetricsSettings;

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

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

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
