//! How a worker learns of others, and announces itself.
//!
//! | module | holds |
//! |---|---|
//! | `address` | what is known of a peer, and the list of all |
//! | `complaint` | what is wrong with entries: each is said once |
//! | `file` | a list in a file, which is read again when it changes |
//! | `etcd` | a list in etcd, where each worker announces itself |
//!
//! A task keeps the list, and no request waits for it: readers take what is known now. Whatever
//! comes from outside is bounded and checked. A bad entry is left out, and costs no other. A source that
//! is away changes nothing: the list stays as it was.

mod address;
mod complaint;
mod etcd;
mod file;

use std::fmt;
use std::future::pending;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvbm_settings::PeerSettings;
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::error::Result;
use crate::secret::{read_password, read_private, read_text};

pub use self::address::{PeerAddress, PeerList};

/// Where a worker learns of its peers.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum PeerSource {
    /// The `host:port` of each peer. A peer's name is its address, with `/` for the last colon.
    Static(Vec<String>),
    /// A JSON file, which is looked at once a second: `[{"name": "node-1/0", "address":
    /// "10.0.0.1:6890"}]`. It is best replaced by a rename. A file that cannot be read changes
    /// nothing.
    File(PathBuf),
    /// etcd, where each worker announces itself.
    Etcd(EtcdSource),
}

/// The etcd that workers announce themselves in.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EtcdSource {
    /// URLs of its members, such as `http://10.0.0.1:2379`, which are tried in turn.
    pub endpoints: Vec<String>,
    /// Workers see those of their own namespace: letters, digits, `-`, `_` and `.`, at most 128.
    pub namespace: String,
    /// A worker that is not heard of for this long is taken off the list: 2 seconds to an hour.
    pub ttl: Duration,
    /// Who asks, if etcd wants to know: a user with the right to read and write keys that begin
    /// with `kvbm/<namespace>/peers/`.
    pub user: Option<EtcdUser>,
    /// Behind `https`; `None`: the system's certificates count, and none is shown.
    pub tls: Option<EtcdTls>,
}

impl EtcdSource {
    /// The time to live that workers have if nothing else is said.
    pub const TTL: Duration = Duration::from_secs(10);

    /// An etcd that anyone may ask.
    pub fn new(endpoints: Vec<String>, namespace: impl Into<String>) -> Self {
        Self { endpoints, namespace: namespace.into(), ttl: Self::TTL, user: None, tls: None }
    }
}

/// A user of etcd. The password is never shown.
#[derive(Clone)]
pub struct EtcdUser {
    /// The user's name.
    pub name: String,
    /// The user's password.
    pub password: String,
}

impl EtcdUser {
    fn of(settings: &PeerSettings) -> Result<Option<Self>> {
        let PeerSettings { etcd_user, etcd_password_file, .. } = settings;
        let Some((name, file)) = etcd_user.clone().zip(etcd_password_file.as_ref()) else {
            return Ok(None);
        };
        Ok(Some(Self { name, password: read_password(file, "peers.etcd_password_file")? }))
    }
}

impl fmt::Debug for EtcdUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdUser").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Certificates, in PEM. The key is never shown.
#[derive(Clone)]
pub struct EtcdTls {
    /// That of a CA which may sign etcd's, beside those of the system.
    pub ca: String,
    /// Our certificate and its private key, for an etcd that asks for one.
    pub identity: String,
}

impl EtcdTls {
    /// What other workers are shown is what etcd is shown.
    fn of(settings: &PeerSettings) -> Result<Option<Self>> {
        let PeerSettings { tls_certificate, tls_key, tls_ca, .. } = settings;
        let (Some(certificate), Some(key), Some(ca)) = (tls_certificate, tls_key, tls_ca) else {
            return Ok(None);
        };
        let key = read_private(key, "peers.tls_key")?;
        let certificate = read_text(certificate, "peers.tls_certificate")?;
        let ca = read_text(ca, "peers.tls_ca")?;
        Ok(Some(Self { ca, identity: [certificate, key].join("\n") }))
    }
}

impl fmt::Debug for EtcdTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdTls").field("ca", &self.ca).finish_non_exhaustive()
    }
}

impl PeerSource {
    /// The list that the settings name.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable): a file of what etcd is shown cannot
    /// be read. [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): others can read it, or it is
    /// something else.
    pub(super) fn of(settings: &PeerSettings) -> Result<Self> {
        let list = |text: &String| text.split(',').map(|part| part.trim().to_owned()).collect();
        let PeerSettings { addresses, file, etcd, namespace, .. } = settings;
        match (file, etcd) {
            (Some(file), _) => Ok(Self::File(file.into())),
            (None, Some(endpoints)) => {
                let namespace = namespace.as_deref().unwrap_or("default");
                let source = EtcdSource::new(list(endpoints), namespace);
                let (user, tls) = (EtcdUser::of(settings)?, EtcdTls::of(settings)?);
                Ok(Self::Etcd(EtcdSource { user, tls, ..source }))
            }
            (None, None) => Ok(Self::Static(addresses.as_ref().map(list).unwrap_or_default())),
        }
    }

    /// Keeps a list of peers on `runtime`, which needs time and I/O enabled. The list contains this
    /// worker too, if it is announced.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): an address, an endpoint, the namespace or
    /// the time to live is none. A source that is away is no error.
    pub fn watch(&self, runtime: &Handle) -> Result<PeerWatch> {
        let (list, peers) = watch::channel(Arc::default());
        let task = match self {
            Self::Static(addresses) => {
                list.send_replace(Arc::new(fixed(addresses)?));
                runtime.spawn(async move {
                    let _kept = list;
                    pending::<()>().await;
                })
            }
            Self::File(path) => runtime.spawn(file::watch(path.clone(), list)),
            Self::Etcd(source) => runtime.spawn(etcd::watch(source, list)?),
        };
        Ok(PeerWatch { peers, task })
    }

    /// Announces `own` to the others on `runtime`, until the announcement is dropped. `None`: the
    /// others learn of this worker from the list that they were given.
    ///
    /// # Errors
    /// As those of [`watch`](Self::watch).
    pub fn announce(
        &self,
        own: &PeerAddress,
        runtime: &Handle,
    ) -> Result<Option<PeerAnnouncement>> {
        let Self::Etcd(source) = self else { return Ok(None) };
        let (stop, stopped) = oneshot::channel();
        let task = runtime.spawn(etcd::announce(source, own, stopped)?);
        Ok(Some(PeerAnnouncement { stop, task }))
    }
}

fn fixed(addresses: &[String]) -> Result<PeerList> {
    let mut list = PeerList::default();
    for address in addresses {
        list.insert(PeerAddress::named_by_address(address)?);
    }
    Ok(list)
}

/// Shows a list that was read; one that says the same wakes no reader.
fn publish(list: &watch::Sender<Arc<PeerList>>, read: PeerList) {
    list.send_if_modified(|known| {
        let is_new = **known != read;
        if is_new {
            *known = Arc::new(read);
        }
        is_new
    });
}

/// Keeps a list of peers until it is dropped.
#[derive(Debug)]
pub struct PeerWatch {
    peers: watch::Receiver<Arc<PeerList>>,
    task: JoinHandle<()>,
}

impl PeerWatch {
    /// The list as it is known, and as it changes. It is empty until the source answered.
    pub fn peers(&self) -> watch::Receiver<Arc<PeerList>> {
        self.peers.clone()
    }
}

impl Drop for PeerWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Announces a worker until it is dropped. Then the task takes the announcement back, and ends.
#[derive(Debug)]
pub struct PeerAnnouncement {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl PeerAnnouncement {
    /// Takes the announcement back, and waits for that: two seconds at most. If etcd does not
    /// answer by then, the announcement ends with its time to live.
    pub async fn withdraw(self) {
        let Self { stop, task } = self;
        drop(stop);
        // A task that panicked, or whose runtime ended, has nothing to wait for.
        let _ = task.await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[tokio::test]
    async fn a_fixed_list_comes_whole_and_ends_with_its_watch() {
        let source = PeerSource::Static(vec!["node-1:80".into(), "[fd00::1]:81".into()]);
        let watch = source.watch(&Handle::current()).unwrap();
        let mut peers = watch.peers();
        let list = Arc::clone(&peers.borrow_and_update());
        assert_eq!(
            list.iter().collect::<Vec<_>>(),
            [("fd00__1/81", "[fd00::1]:81"), ("node-1/80", "node-1:80")]
        );
        assert!(!peers.has_changed().unwrap());
        drop(watch);
        assert!(peers.changed().await.is_err());
    }

    #[tokio::test]
    async fn a_fixed_address_that_is_none_is_an_error() {
        let error =
            PeerSource::Static(vec!["node-1".into()]).watch(&Handle::current()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("node-1"), "{error}");
    }

    #[test]
    fn settings_name_a_list_and_what_etcd_is_shown() {
        let of = |settings| format!("{:?}", PeerSource::of(&settings).unwrap());
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(of(PeerSettings::default()), "Static([])");
        let listed = PeerSettings { addresses: text("a:1, b:2"), ..PeerSettings::default() };
        assert_eq!(of(listed), r#"Static(["a:1", "b:2"])"#);
        let password = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(password.path(), "s3cret\n").unwrap();
        let etcd = PeerSettings {
            etcd: text("http://a:2379, http://b:2379"),
            etcd_user: text("kvbm"),
            etcd_password_file: text(password.path().to_str().unwrap()),
            ..PeerSettings::default()
        };
        let PeerSource::Etcd(source) = PeerSource::of(&etcd).unwrap() else { panic!("{etcd:?}") };
        let user = source.user.unwrap();
        assert_eq!((user.name.as_str(), user.password.as_str()), ("kvbm", "s3cret"));
        assert_eq!((source.endpoints.len(), source.namespace.as_str()), (2, "default"));
    }

    #[tokio::test]
    async fn lists_that_are_given_announce_nobody() {
        let own = PeerAddress::new("worker/0", "node-1:80").unwrap();
        for source in [PeerSource::Static(vec![]), PeerSource::File("peers.json".into())] {
            assert!(source.announce(&own, &Handle::current()).unwrap().is_none());
        }
    }
}
