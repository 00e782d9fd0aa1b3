//! The settings themselves, with their defaults.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use kvbm_policies::{AdmissionKind, EvictionKind};
use serde::{Serialize, Serializer};

use crate::nixl::names_a_secret;
use crate::value::{Capacity, WriteBudget};

/// The most blocks that a tier can have, and the host tier together with its staging blocks: slots
/// are numbered in 30 bits. The crate that has the slots says the same, which `kvbm` asserts.
pub const MAX_TIER_BLOCKS: u32 = (1 << 30) - 8;

/// The largest block, in bytes. The largest number of them in a tier still fits into an address
/// space.
pub const MAX_BLOCK_BYTES: u64 = 1 << 30;

/// The most threads that a disk tier has. More serve no drive better, and each takes a stack.
pub const MAX_DISK_THREADS: u32 = 256;

/// Everything that an operator can choose. `Settings::default()` is a manager with no tier at all.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Settings {
    /// Bytes of one KV block, all layers together. Required by every tier (`None`: not chosen yet).
    pub block_bytes: Option<u64>,
    /// G1.
    pub device: DeviceSettings,
    /// G2.
    pub host: HostSettings,
    /// G3.
    pub disk: DiskSettings,
    /// G4.
    pub object: ObjectSettings,
    /// What is encrypted with that outlives the process.
    pub encryption: EncryptionSettings,
    /// How blocks move.
    pub transfer: TransferSettings,
    /// When blocks are copied down.
    pub flush: FlushSettings,
    /// Which block leaves a tier.
    pub eviction: EvictionKind,
    /// Share each tier fairly between tenants.
    pub fair_tenants: bool,
    /// By tenant: how large its share of each tier is, compared to others; 1 where it is not named.
    /// Where any is named, tiers are shared.
    pub tenant_weights: BTreeMap<u32, f64>,
    /// By tenant: beyond how much of each tier it gives way first. Where any is named, tiers are
    /// shared.
    pub tenant_quotas: BTreeMap<u32, Capacity>,
    /// Models whose layers do not all keep every block.
    pub hybrid: HybridSettings,
    /// What is exported.
    pub metrics: MetricsSettings,
    /// What is told a tracer.
    pub traces: TraceSettings,
    /// NVIDIA's transfer library.
    pub nixl: NixlSettings,
    /// Other workers that hold blocks.
    pub peers: PeerSettings,
}

impl Settings {
    /// For a part of what they are for, such as one of a model's cache groups: tiers and quotas get
    /// other sizes.
    pub fn rescale(&mut self, scale: impl Fn(Capacity) -> Capacity, share: f64) {
        let capacities =
            [&mut self.host.capacity, &mut self.disk.capacity, &mut self.object.capacity];
        for capacity in capacities.into_iter().flatten().chain(self.tenant_quotas.values_mut()) {
            *capacity = scale(*capacity);
        }
        // What is said in writes of the whole drive follows its size.
        if let Some(WriteBudget::BytesPerDay(bytes)) = &mut self.disk.write_budget {
            *bytes = (*bytes as f64 * share) as u64;
        }
    }
}

/// The device tier.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DeviceSettings {
    /// Size; `None`: no device tier of our own.
    pub capacity: Option<Capacity>,
    /// Whose memory it is.
    pub backend: DeviceBackend,
    /// Which GPU, as `CUDA_VISIBLE_DEVICES` numbers them.
    pub ordinal: u32,
}

/// Whose memory the device tier is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceBackend {
    /// A GPU's where there is one, else emulated.
    #[default]
    Auto,
    /// The host's: no GPU is used.
    Emulated,
    /// A GPU's; an error where there is none.
    Cuda,
}

impl DeviceBackend {
    /// Every choice.
    pub const ALL: &'static [Self] = &[Self::Auto, Self::Emulated, Self::Cuda];

    /// How the choice is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Emulated => "emulated",
            Self::Cuda => "cuda",
        }
    }
}

/// The host tier.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HostSettings {
    /// Size; `None`: no host tier.
    pub capacity: Option<Capacity>,
    /// Back it with huge pages where the system allows.
    pub huge_pages: bool,
    /// Blocks of DRAM beside the tier through which blocks bounce that have no place in it.
    pub staging_blocks: u32,
    /// A directory in memory where the tier survives the process; `None`: memory of the process's
    /// own.
    pub persist: Option<PathBuf>,
    /// Where its index lies; `None`: beside it.
    pub persist_index: Option<PathBuf>,
}

impl Default for HostSettings {
    fn default() -> Self {
        Self {
            capacity: None,
            huge_pages: true,
            staging_blocks: 64,
            persist: None,
            persist_index: None,
        }
    }
}

/// The disk tier.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiskSettings {
    /// Size over all directories; `None`: no disk tier.
    pub capacity: Option<Capacity>,
    /// Directories, each with its share of the slots.
    pub dirs: Vec<PathBuf>,
    /// Bypass the page cache.
    pub o_direct: bool,
    /// Write zeroes where the file system has no `fallocate`.
    pub zerofill_fallback: bool,
    /// Which backend moves the bytes.
    pub backend: DiskBackend,
    /// Operations in flight.
    pub queue_depth: u32,
    /// Leave the files in place at shutdown.
    pub keep: bool,
    /// Which blocks are written, and when.
    pub admission: AdmissionKind,
    /// How much is written at most; `None`: no limit.
    pub write_budget: Option<WriteBudget>,
}

impl Default for DiskSettings {
    fn default() -> Self {
        Self {
            capacity: None,
            dirs: vec![PathBuf::from("/tmp")],
            o_direct: true,
            zerofill_fallback: true,
            backend: DiskBackend::Auto,
            queue_depth: 32,
            keep: false,
            admission: AdmissionKind::WriteThrough,
            write_budget: None,
        }
    }
}

/// What moves blocks between host and disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskBackend {
    /// `io_uring` where the kernel allows it, else threads.
    #[default]
    Auto,
    /// `io_uring`; an error where it is refused.
    Uring,
    /// A pool of threads with `pread` and `pwrite`.
    Threads,
    /// Straight between disk and GPU, through cuFile.
    Gds,
    /// NIXL's POSIX plugin.
    Nixl,
}

impl DiskBackend {
    /// Every choice.
    pub const ALL: &'static [Self] =
        &[Self::Auto, Self::Uring, Self::Threads, Self::Gds, Self::Nixl];

    /// How the choice is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Uring => "uring",
            Self::Threads => "threads",
            Self::Gds => "gds",
            Self::Nixl => "nixl",
        }
    }
}

/// The object tier. Its keys are never logged and never serialised.
#[derive(Clone, PartialEq, Serialize)]
pub struct ObjectSettings {
    /// `file:///dir`, `s3://bucket/prefix` or `memory:///`; `None`: no object tier.
    #[serde(serialize_with = "without_credentials")]
    pub url: Option<String>,
    /// Blocks that it may hold; `None`: unlimited, as many as can be numbered. Zero: no object
    /// tier, whatever the URL.
    pub capacity: Option<Capacity>,
    /// S3 endpoint, when it is not AWS.
    #[serde(serialize_with = "without_credentials")]
    pub endpoint: Option<String>,
    /// S3 region.
    pub region: Option<String>,
    /// S3 access key.
    #[serde(skip)]
    pub access_key: Option<String>,
    /// S3 secret key.
    #[serde(skip)]
    pub secret_key: Option<String>,
    /// Which client moves the bytes.
    pub backend: ObjectBackend,
    /// Largest segment object, in bytes.
    pub segment_bytes: u64,
    /// Requests in flight.
    pub concurrency: u32,
    /// Requests that write or list, in a period; 0: any number.
    pub put_budget: u32,
    /// Requests that read, in a period; 0: any number.
    pub get_budget: u32,
    /// Bytes of objects sent and received in a period; `None`: any number.
    pub byte_budget: Option<Capacity>,
    /// The period, in milliseconds.
    pub budget_period_ms: u64,
    /// Leave the objects in place at shutdown.
    pub keep: bool,
    /// How often a worker says on which objects it relies, in milliseconds.
    pub renewal_ms: u64,
    /// How often a worker looks what others have stored since, in milliseconds.
    pub discover_ms: u64,
    /// Age at which objects on which no worker relies are deleted, in milliseconds.
    pub collect_after_ms: u64,
    /// Size of all objects above which these are deleted sooner; `None`: any.
    pub collect_above: Option<Capacity>,
    /// What if the store is in a later epoch than the process that starts.
    pub older_epoch: OlderEpoch,
}

impl Default for ObjectSettings {
    fn default() -> Self {
        Self {
            url: None,
            capacity: None,
            endpoint: None,
            region: None,
            access_key: None,
            secret_key: None,
            backend: ObjectBackend::Native,
            segment_bytes: 32 << 20,
            concurrency: 8,
            put_budget: 0,
            get_budget: 0,
            byte_budget: None,
            budget_period_ms: 3_600_000,
            keep: false,
            renewal_ms: 60_000,
            discover_ms: 30_000,
            collect_after_ms: 7 * 24 * 3_600_000,
            collect_above: None,
            older_epoch: OlderEpoch::Refuse,
        }
    }
}

impl ObjectSettings {
    /// Where the tier lives; `None`: there is no object tier.
    pub fn place(&self) -> Option<&str> {
        self.url.as_deref().filter(|_| !self.has_no_room())
    }

    /// Whether the tier was given a size of nothing.
    pub(crate) fn has_no_room(&self) -> bool {
        self.capacity.is_some_and(Capacity::is_zero)
    }
}

impl fmt::Debug for ObjectSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectSettings")
            .field("url", &self.url.as_deref().map(shown_url))
            .field("capacity", &self.capacity)
            .field("endpoint", &self.endpoint.as_deref().map(shown_url))
            .field("region", &self.region)
            .field("access_key", &self.access_key.as_ref().map(|_| SECRET_SET))
            .field("secret_key", &self.secret_key.as_ref().map(|_| SECRET_SET))
            .field("backend", &self.backend)
            .field("segment_bytes", &self.segment_bytes)
            .field("concurrency", &self.concurrency)
            .field("put_budget", &self.put_budget)
            .field("get_budget", &self.get_budget)
            .field("byte_budget", &self.byte_budget)
            .field("budget_period_ms", &self.budget_period_ms)
            .field("keep", &self.keep)
            .field("renewal_ms", &self.renewal_ms)
            .field("discover_ms", &self.discover_ms)
            .field("collect_after_ms", &self.collect_after_ms)
            .field("collect_above", &self.collect_above)
            .field("older_epoch", &self.older_epoch)
            .finish()
    }
}

/// Encryption of the disk and object tiers: there is none unless there are keys. They are never
/// logged and never serialised.
#[derive(Clone, Default, PartialEq, Serialize)]
pub struct EncryptionSettings {
    /// Keys, the current one first.
    #[serde(skip)]
    pub key: Option<String>,
    /// A file of keys.
    pub key_file: Option<String>,
}

impl EncryptionSettings {
    /// Whether what outlives the process is encrypted.
    pub const fn is_on(&self) -> bool {
        self.key.is_some() || self.key_file.is_some()
    }
}

impl fmt::Debug for EncryptionSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EncryptionSettings")
            .field("key", &self.key.as_ref().map(|_| SECRET_SET))
            .field("key_file", &self.key_file)
            .finish()
    }
}

/// What moves blocks between host and objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ObjectBackend {
    /// A client of our own; blocks that belong together share an object.
    #[default]
    Native,
    /// NIXL's OBJ plugin; every slot is an object.
    Nixl,
}

impl ObjectBackend {
    /// Every choice.
    pub const ALL: &'static [Self] = &[Self::Native, Self::Nixl];

    /// How the choice is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Nixl => "nixl",
        }
    }
}

/// What becomes of a process that starts in an older epoch than its object store is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OlderEpoch {
    /// The start fails.
    #[default]
    Refuse,
    /// It goes on in the store's.
    Follow,
    /// It goes on in its own.
    Keep,
}

impl OlderEpoch {
    /// Every choice.
    pub const ALL: &'static [Self] = &[Self::Refuse, Self::Follow, Self::Keep];

    /// How the choice is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::Follow => "follow",
            Self::Keep => "keep",
        }
    }
}

/// What stands in for a secret wherever settings are shown.
pub(crate) const SECRET_SET: &str = "(set)";

/// What stands in for a URL that may hold credentials.
pub(crate) const URL_HIDDEN: &str = "(hidden: it may hold credentials)";

/// Whether a text that is or should be a URL may carry a user, a password or a signed query,
/// well-formed or not: without its `@` the secret must not be in a log either. Local paths hold
/// none.
pub(crate) fn may_hold_credentials(text: &str) -> bool {
    if text.starts_with("file:///") {
        return false;
    }
    let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let host = if is_web(scheme) { without_port(authority) } else { authority };
    !scheme.bytes().chain(host.bytes()).all(is_plain) || path.contains(['@', '?', '#', ':'])
}

/// Whether the scheme is one whose URLs have ports.
fn is_web(scheme: &str) -> bool {
    matches!(scheme, "http" | "https")
}

/// The host of `host:port`, without the brackets of an IPv6 address; all of it where no port
/// follows.
fn without_port(authority: &str) -> &str {
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if port.parse::<u16>().is_ok() => host,
        _ => authority,
    };
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    if address.is_some_and(|address| address.parse::<Ipv6Addr>().is_ok()) { "" } else { host }
}

/// The URL as it may be shown.
pub(crate) fn shown_url(url: &str) -> &str {
    if may_hold_credentials(url) { URL_HIDDEN } else { url }
}

/// The value of a plugin's parameter as it may be shown: its name may tell that it is a secret, and
/// it may be a URL.
pub(crate) fn shown_parameter<'v>(name: &str, value: &'v str) -> &'v str {
    match value {
        _ if names_a_secret(name) => SECRET_SET,
        url if url.contains("://") => shown_url(url),
        value => value,
    }
}

#[expect(clippy::ref_option, reason = "the shape that serde asks for")]
fn without_credentials<S: Serializer>(
    url: &Option<String>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    url.as_deref().map(shown_url).serialize(serializer)
}

/// How blocks move.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TransferSettings {
    /// Batches in flight per route.
    pub max_concurrent: u32,
    /// Blocks in one batch.
    pub max_batch: u32,
    /// How many milliseconds a medium may complete nothing before the copies that it works on fail
    /// as overdue.
    pub timeout_ms: u64,
    /// Blocks that may wait per route; beyond it a save is refused as `Full`.
    pub queue_blocks: u32,
    /// Threads that copy between memory tiers.
    pub copy_threads: u32,
    /// Prompt tokens that the engine computes in a second; 0: not known.
    pub prefill_tokens_per_second: u32,
    /// MiB a second of idle blocks that are verified, of each tier that outlives the process.
    pub scrub_mib_per_second: u32,
    /// Share of prompts with hits (0–1) of which the engine is asked to compute these again.
    pub shadow_share: f64,
}

impl Default for TransferSettings {
    fn default() -> Self {
        Self {
            max_concurrent: 4,
            max_batch: 16,
            timeout_ms: 5_000,
            queue_blocks: 16_384,
            copy_threads: 2,
            prefill_tokens_per_second: 0,
            scrub_mib_per_second: 8,
            shadow_share: 0.0,
        }
    }
}

/// When blocks are copied to the tier below.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FlushSettings {
    /// The most time from when a block becomes resident until it is copied down.
    pub interval_ms: u64,
    /// Share of a tier (0–1) that may wait to be flushed before flushing starts at once.
    pub dirty_watermark: f64,
}

impl Default for FlushSettings {
    fn default() -> Self {
        Self { interval_ms: 1_000, dirty_watermark: 0.1 }
    }
}

/// Models whose layers do not all keep every block: those with sliding windows, or a state.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HybridSettings {
    /// Blocks from one checkpoint of windows and states to the next.
    pub checkpoint_blocks: u32,
}

impl Default for HybridSettings {
    fn default() -> Self {
        Self { checkpoint_blocks: 16 }
    }
}

/// What is exported, and to whom. The token is never logged and never serialised.
#[derive(Clone, PartialEq, Serialize)]
pub struct MetricsSettings {
    /// Serve `/metrics`, the state and the live page.
    pub enabled: bool,
    /// Address to bind.
    pub host: IpAddr,
    /// Port to bind.
    pub port: u16,
    /// Further names by which requests may address it.
    pub allowed_hosts: Vec<String>,
    /// A file of the token that readers show. One is needed where others than this machine can
    /// reach the address.
    pub token_file: Option<String>,
    /// The token itself.
    #[serde(skip)]
    pub token: Option<String>,
}

impl Default for MetricsSettings {
    fn default() -> Self {
        let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Self {
            enabled: false,
            host,
            port: 6880,
            allowed_hosts: Vec::new(),
            token_file: None,
            token: None,
        }
    }
}

impl fmt::Debug for MetricsSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MetricsSettings")
            .field("enabled", &self.enabled)
            .field("host", &self.host)
            .field("port", &self.port)
            .field("allowed_hosts", &self.allowed_hosts)
            .field("token_file", &self.token_file)
            .field("token", &self.token.as_ref().map(|_| SECRET_SET))
            .finish()
    }
}

/// What is told a tracer: an OpenTelemetry collector.
#[derive(Clone, Default, PartialEq, Eq, Serialize)]
pub struct TraceSettings {
    /// Send spans.
    pub enabled: bool,
    /// The collector's OTLP/HTTP endpoint; `None`: what `OTEL_EXPORTER_OTLP_…` say, else this
    /// machine's port 4318.
    #[serde(serialize_with = "without_credentials")]
    pub endpoint: Option<String>,
    /// Mark transfers on the timeline of a profiler, by NVTX.
    pub nvtx: bool,
}

impl fmt::Debug for TraceSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceSettings")
            .field("enabled", &self.enabled)
            .field("endpoint", &self.endpoint.as_deref().map(shown_url))
            .field("nvtx", &self.nvtx)
            .finish()
    }
}

/// Other workers that hold blocks.
#[derive(Clone, PartialEq, Serialize)]
pub struct PeerSettings {
    /// Give blocks to other workers, and read theirs.
    pub enabled: bool,
    /// Address to bind.
    pub host: IpAddr,
    /// Port to bind.
    pub port: u16,
    /// This worker's own name among all; `None`: its address.
    pub name: Option<String>,
    /// Where others reach it, `host:port`; `None`: where it is bound.
    pub address: Option<String>,
    /// `host:port` of others, with commas between.
    pub addresses: Option<String>,
    /// A file that lists them.
    pub file: Option<String>,
    /// URLs of etcd, with commas between.
    pub etcd: Option<String>,
    /// The user of etcd, if it asks for one.
    pub etcd_user: Option<String>,
    /// A file of its password.
    pub etcd_password_file: Option<String>,
    /// Workers in etcd see those of their own namespace; `None`: `default`.
    pub namespace: Option<String>,
    /// A file of the secret that all workers know. It or certificates are needed where others than
    /// this machine can reach the address.
    pub secret_file: Option<String>,
    /// The secret itself.
    #[serde(skip)]
    pub secret: Option<String>,
    /// A file of this worker's certificate (PEM), and of those between it and the CA. With it goes
    /// `tls_key` and `tls_ca`: then connections between workers are TLS.
    pub tls_certificate: Option<String>,
    /// A file of the certificate's private key (PEM).
    pub tls_key: Option<String>,
    /// A file of the CA's certificate (PEM), which signs those of all workers.
    pub tls_ca: Option<String>,
    /// How long a lease lasts without a read.
    pub lease_ttl_ms: u64,
    /// The share of the host tier that may be leased to others.
    pub lease_share: f64,
    /// Let workers of the same host and user map the host tier for reading.
    pub shared_memory: bool,
    /// Read blocks whose numbers have another type, and convert them.
    pub convert_types: bool,
    /// Whether blocks move by NIXL where there is no such memory.
    pub nixl: PeerNixl,
}

/// Whether blocks of peers move by NIXL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerNixl {
    /// Where both sides have it, and RDMA or shared memory.
    #[default]
    Auto,
    /// Never.
    Off,
    /// An error where this worker has none, and a miss where a peer has none.
    Required,
}

impl PeerNixl {
    /// Every choice.
    pub const ALL: &'static [Self] = &[Self::Auto, Self::Off, Self::Required];

    /// How the choice is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::Required => "required",
        }
    }
}

impl PeerSettings {
    /// The port if none is chosen.
    pub const PORT: u16 = 6890;

    /// The lists of peers that are named.
    pub(crate) fn lists(&self) -> impl Iterator<Item = &String> {
        [&self.addresses, &self.file, &self.etcd].into_iter().flatten()
    }
}

impl Default for PeerSettings {
    fn default() -> Self {
        Self {
            enabled: false,
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: Self::PORT,
            name: None,
            address: None,
            addresses: None,
            file: None,
            etcd: None,
            etcd_user: None,
            etcd_password_file: None,
            namespace: None,
            secret_file: None,
            secret: None,
            tls_certificate: None,
            tls_key: None,
            tls_ca: None,
            lease_ttl_ms: 10_000,
            lease_share: 0.25,
            shared_memory: true,
            convert_types: false,
            nixl: PeerNixl::Auto,
        }
    }
}

impl fmt::Debug for PeerSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerSettings")
            .field("enabled", &self.enabled)
            .field("host", &self.host)
            .field("port", &self.port)
            .field("name", &self.name)
            .field("address", &self.address)
            .field("addresses", &self.addresses)
            .field("file", &self.file)
            .field("etcd", &self.etcd)
            .field("etcd_user", &self.etcd_user)
            .field("etcd_password_file", &self.etcd_password_file)
            .field("namespace", &self.namespace)
            .field("secret_file", &self.secret_file)
            .field("secret", &self.secret.as_ref().map(|_| SECRET_SET))
            .field("tls_certificate", &self.tls_certificate)
            .field("tls_key", &self.tls_key)
            .field("tls_ca", &self.tls_ca)
            .field("lease_ttl_ms", &self.lease_ttl_ms)
            .field("lease_share", &self.lease_share)
            .field("shared_memory", &self.shared_memory)
            .field("convert_types", &self.convert_types)
            .field("nixl", &self.nixl)
            .finish()
    }
}

/// NVIDIA's transfer library.
#[derive(Clone, Default, PartialEq, Eq, Serialize)]
pub struct NixlSettings {
    /// `libnixl_capi.so`; `None`: where Python packages and the system's loader have it.
    pub library: Option<String>,
    /// Plugins by name (upper case), on or off. None named: UCX alone; all named ones off: none.
    pub backends: BTreeMap<String, bool>,
    /// By plugin (upper case), then by name: what differs from the plugin's defaults.
    #[serde(serialize_with = "without_secrets")]
    pub parameters: BTreeMap<String, BTreeMap<String, String>>,
}

impl fmt::Debug for NixlSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlSettings")
            .field("library", &self.library)
            .field("backends", &self.backends)
            .field("parameters", &shown_parameters(&self.parameters))
            .finish()
    }
}

/// By plugin, then by name.
type Parameters<T> = BTreeMap<String, BTreeMap<String, T>>;

fn shown_parameters(all: &Parameters<String>) -> Parameters<&str> {
    all.iter().map(|(plugin, given)| (plugin.clone(), shown_values(given))).collect()
}

fn shown_values(given: &BTreeMap<String, String>) -> BTreeMap<String, &str> {
    given.iter().map(|(name, value)| (name.clone(), shown_parameter(name, value))).collect()
}

fn without_secrets<S: Serializer>(
    all: &Parameters<String>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    shown_parameters(all).serialize(serializer)
}

impl NixlSettings {
    /// The plugin that is used if none is named.
    pub const DEFAULT_PLUGIN: &'static str = "UCX";

    /// The plugins that are on.
    pub fn enabled(&self) -> Vec<&str> {
        if self.is_default() {
            return vec![Self::DEFAULT_PLUGIN];
        }
        self.backends.iter().filter(|(_, on)| **on).map(|(name, _)| name.as_str()).collect()
    }

    /// Whether this plugin is on.
    pub fn is_enabled(&self, plugin: &str) -> bool {
        self.enabled().contains(&plugin)
    }

    /// Whether no plugin is named: the default one may then be missing.
    pub fn is_default(&self) -> bool {
        self.backends.is_empty()
    }
}
