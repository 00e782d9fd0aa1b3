//! The one table of settings: key, variables, type, limits, meaning. Parser, `kvbm config` and the
//! reference read it.

use std::ops::RangeInclusive;

use crate::field::{SettingField, UNLIMITED};
use crate::settings::{MAX_BLOCK_BYTES, MAX_TIER_BLOCKS, PeerSettings};
use crate::value::NONE;
use crate::value::{InvalidValue, parse_boolean, parse_size, parse_text, parse_whole};

/// All variables start with this.
pub(crate) const PREFIX: &str = "DYN_KVBM_";
/// Names the settings file; it is no setting itself.
pub(crate) const CONFIG_VARIABLE: &str = "DYN_KVBM_CONFIG";

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 86_400_000;

/// One setting.
pub(crate) struct SettingKey {
    /// Where it stands in TOML; the part before the last dot is its section.
    pub(crate) path: &'static str,
    pub(crate) field: SettingField,
    /// In rising precedence: a later one wins.
    pub(crate) variables: &'static [EnvVariable],
    pub(crate) doc: &'static str,
}

impl SettingKey {
    /// The section, `""` for the top of the file.
    pub(crate) fn section(&self) -> &'static str {
        if matches!(self.field, SettingField::Parameters(_)) {
            return self.path;
        }
        self.path.rsplit_once('.').map_or("", |(section, _)| section)
    }

    pub(crate) fn is_family(&self) -> bool {
        matches!(self.field, SettingField::Toggles(_) | SettingField::Parameters(_))
    }
}

/// A variable that sets a key.
pub(crate) struct EnvVariable {
    /// The name; of a family, what the names start with.
    pub(crate) name: &'static str,
    pub(crate) form: ValueForm,
    /// Of the system that users come from: what we do differently.
    pub(crate) upstream: Option<&'static str>,
}

/// How a variable writes its key's value.
#[derive(Clone, Copy)]
pub(crate) enum ValueForm {
    /// As in TOML.
    Plain,
    /// A toggle with the opposite sense.
    Negated,
    /// A plain number counts decimal gigabytes.
    Gigabytes,
    /// Blocks; 0 leaves the size to the other variable.
    Override,
    /// Blocks; 0 is no tier.
    Blocks,
    /// The bucket of an `s3://` URL.
    Bucket,
    /// Off removes the value, on demands one.
    Switch,
}

/// What a variable says of its key.
#[derive(Debug, PartialEq)]
pub(crate) enum UpstreamMeaning {
    /// This is the value, written as in TOML.
    Value(String),
    /// Nothing.
    Silent,
    /// Some value is needed.
    Required,
}

impl ValueForm {
    pub(crate) fn interpret(self, text: &str) -> Result<UpstreamMeaning, InvalidValue> {
        Ok(match self {
            Self::Plain => UpstreamMeaning::Value(text.to_owned()),
            Self::Negated => UpstreamMeaning::Value((!parse_boolean(text)?).to_string()),
            Self::Gigabytes => UpstreamMeaning::Value(gigabytes(text)?),
            Self::Override if is_word(text, NONE) => UpstreamMeaning::Silent,
            Self::Override => match parse_blocks(text, OVERRIDES)? {
                0 => UpstreamMeaning::Silent,
                blocks => UpstreamMeaning::Value(format!("{blocks} blocks")),
            },
            Self::Blocks if is_word(text, NONE) || is_word(text, UNLIMITED) => {
                UpstreamMeaning::Value(text.to_owned())
            }
            Self::Blocks => {
                UpstreamMeaning::Value(format!("{} blocks", parse_blocks(text, COUNTS)?))
            }
            Self::Bucket if is_word(text, NONE) => UpstreamMeaning::Value(NONE.to_owned()),
            Self::Bucket => UpstreamMeaning::Value(format!("s3://{}", bucket(text)?)),
            Self::Switch if parse_boolean(text)? => UpstreamMeaning::Required,
            Self::Switch => UpstreamMeaning::Value(NONE.to_owned()),
        })
    }
}

const OVERRIDES: &str =
    "a number of blocks from 0 to 1073741816; 0 or none: the size is left to the other variable";
const COUNTS: &str = "a number of blocks from 0 to 1073741816, or unlimited; 0 or none: no tier";
const GIGABYTES: &str = "decimal gigabytes such as 20 or 1.5, or a size with a unit such as 64GiB; 0 or none: no \
                         tier; unlimited of the object tier";
const BUCKETS: &str = "the name of a bucket: letters, digits, `.`, `-`, `_`; or none";

fn is_word(text: &str, word: &str) -> bool {
    text.trim().eq_ignore_ascii_case(word)
}

fn parse_blocks(text: &str, valid: &str) -> Result<u64, InvalidValue> {
    parse_whole(text, &(0..=u64::from(MAX_TIER_BLOCKS))).map_err(|invalid| invalid.but_valid(valid))
}

fn gigabytes(text: &str) -> Result<String, InvalidValue> {
    let text = text.trim();
    if is_word(text, NONE) || is_word(text, UNLIMITED) {
        return Ok(text.to_owned());
    }
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let size = if plain { format!("{text}GB") } else { text.to_owned() };
    parse_size(&size).map(|_| size).map_err(|_| InvalidValue::new("not a size", GIGABYTES))
}

fn bucket(text: &str) -> Result<&str, InvalidValue> {
    let name = text.trim();
    if name.contains(['{', '}']) {
        return Err(InvalidValue::new("a template: all workers share one bucket here", BUCKETS));
    }
    let is_name = !name.is_empty()
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte));
    if is_name { Ok(name) } else { Err(InvalidValue::new("not a bucket", BUCKETS)) }
}

const fn key(
    path: &'static str,
    field: SettingField,
    variables: &'static [EnvVariable],
    doc: &'static str,
) -> SettingKey {
    SettingKey { path, field, variables, doc }
}

/// A variable of our own, written as in TOML.
const fn own(name: &'static str) -> EnvVariable {
    own_in(name, Plain)
}

const fn own_in(name: &'static str, form: ValueForm) -> EnvVariable {
    EnvVariable { name, form, upstream: None }
}

/// A variable of the system that users come from, with what we do differently.
const fn upstream(name: &'static str, difference: &'static str) -> EnvVariable {
    upstream_in(name, Plain, difference)
}

const fn upstream_in(name: &'static str, form: ValueForm, difference: &'static str) -> EnvVariable {
    EnvVariable { name, form, upstream: Some(difference) }
}

const SAME: &str = "";
const STRICT: &str = "No number is an error, not 0.";
const FALSE_IS_FALSE: &str = "`false` means off; upstream reads any value as on.";

use SettingField::{
    Address, Budget, Bytes, BytesIfSet, Capacity, Choice, Count, Directories, Directory, Flag,
    Hosts, Limit, Millis, Parameters, Port, Secret, Share, TenantQuotas, TenantWeights, Text,
    Toggles, Url,
};
use ValueForm::{Blocks, Bucket, Gigabytes, Negated, Override, Plain, Switch};

/// Every setting, in the order in which it is shown.
pub(crate) static KEYS: &[SettingKey] = &[
    key(
        "block_bytes",
        BytesIfSet(|s| &mut s.block_bytes, 1..=MAX_BLOCK_BYTES),
        &[own("DYN_KVBM_BLOCK_BYTES")],
        "Bytes of one KV block, all layers together. Needed by every tier; an engine states its own.",
    ),
    key(
        "eviction",
        Choice(|s| &mut s.eviction),
        &[own("DYN_KVBM_EVICTION")],
        "Which block leaves a full tier. `hazard`: the leaf with the fewest expected hits, learned from the traffic \
         (docs/policies.md); `turn`: as `lru`, with grace for late turns of a conversation and for frequent use; others \
         as known by these names.",
    ),
    key(
        "fair_tenants",
        Flag(|s| &mut s.fair_tenants),
        &[own("DYN_KVBM_FAIR_TENANTS")],
        "Evict from the tenant that holds the most of a tier, its blocks of low priority first, and within these in \
         the order of the policy. Engines say whose a request is (`Hints::tenant`, `Hints::priority`).",
    ),
    key(
        "tenant_weights",
        TenantWeights(|s| &mut s.tenant_weights),
        &[own("DYN_KVBM_TENANT_WEIGHTS")],
        "How large a tenant's share of each tier is compared to others'; 1 for those not named. Implies \
         `fair_tenants`.",
    ),
    key(
        "tenant_quotas",
        TenantQuotas(|s| &mut s.tenant_quotas),
        &[own("DYN_KVBM_TENANT_QUOTAS")],
        "How much of each tier a tenant may hold before it gives way to others that are within theirs, whatever the \
         shares. It may use what no other wants. Implies `fair_tenants`.",
    ),
    key(
        "device.capacity",
        Capacity(|s| &mut s.device.capacity),
        &[
            own_in("DYN_KVBM_DEVICE_CACHE_GB", Gigabytes),
            own_in("DYN_KVBM_DEVICE_CACHE_OVERRIDE_NUM_BLOCKS", Override),
        ],
        "Size of the device tier.",
    ),
    key(
        "device.backend",
        Choice(|s| &mut s.device.backend),
        &[own("DYN_KVBM_DEVICE_BACKEND")],
        "Whose memory it is: `cuda`: a GPU's; `emulated`: the host's; `auto`: a GPU's where there is one.",
    ),
    key(
        "device.ordinal",
        Count(|s| &mut s.device.ordinal, 0..=1023),
        &[own("DYN_KVBM_DEVICE_ORDINAL")],
        "Which GPU, as `CUDA_VISIBLE_DEVICES` numbers them.",
    ),
    key(
        "host.capacity",
        Capacity(|s| &mut s.host.capacity),
        &[
            upstream_in("DYN_KVBM_CPU_CACHE_GB", Gigabytes, STRICT),
            upstream_in("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", Override, STRICT),
        ],
        "Size of the host tier.",
    ),
    key(
        "host.huge_pages",
        Flag(|s| &mut s.host.huge_pages),
        &[own("DYN_KVBM_HOST_CACHE_HUGE_PAGES")],
        "Back the host tier with huge pages where the system allows.",
    ),
    key(
        "host.staging_blocks",
        Count(|s| &mut s.host.staging_blocks, 1..=1 << 20),
        &[own("DYN_KVBM_HOST_CACHE_STAGING_BLOCKS")],
        "Blocks of DRAM beside the tier, through which blocks pass that have no place in it.",
    ),
    key(
        "host.persist",
        Directory(|s| &mut s.host.persist),
        &[own("DYN_KVBM_CPU_CACHE_PERSIST")],
        "A directory on tmpfs or hugetlbfs, such as `/dev/shm/kvbm`, for the host tier: it survives any end of the \
         process, and the next one serves from it (docs/persistent-dram.md). `none`: private memory.",
    ),
    key(
        "host.persist_index",
        Directory(|s| &mut s.host.persist_index),
        &[own("DYN_KVBM_CPU_CACHE_PERSIST_INDEX")],
        "Where the index of `host.persist` lies; `none`: beside the blocks. Hugetlbfs cannot hold it: name a \
         directory on tmpfs.",
    ),
    key(
        "disk.capacity",
        Capacity(|s| &mut s.disk.capacity),
        &[
            upstream_in("DYN_KVBM_DISK_CACHE_GB", Gigabytes, STRICT),
            upstream_in("DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS", Override, STRICT),
        ],
        "Size of the disk tier, over all its directories.",
    ),
    key(
        "disk.dirs",
        Directories(|s| &mut s.disk.dirs),
        &[upstream("DYN_KVBM_DISK_CACHE_DIR", "May name several directories.")],
        "Directories of the disk tier, each with its share of the slots; a chain lies in one of them while it has room.",
    ),
    key(
        "disk.o_direct",
        Flag(|s| &mut s.disk.o_direct),
        &[upstream_in("DYN_KVBM_DISK_DISABLE_O_DIRECT", Negated, FALSE_IS_FALSE)],
        "Bypass the page cache. The variable has the opposite sense: on means buffered.",
    ),
    key(
        "disk.zerofill_fallback",
        Flag(|s| &mut s.disk.zerofill_fallback),
        &[upstream(
            "DYN_KVBM_DISK_ZEROFILL_FALLBACK",
            "On by default. `false` means off; upstream reads any value as on.",
        )],
        "Write zeroes where the file system cannot reserve space.",
    ),
    key(
        "disk.backend",
        Choice(|s| &mut s.disk.backend),
        &[own("DYN_KVBM_DISK_BACKEND")],
        "What moves the bytes: `uring`, a pool of `threads`, `auto`: the first of these that works here; `gds`: \
         cuFile; `nixl`: its plugin POSIX, which must be on.",
    ),
    key(
        "disk.queue_depth",
        Count(|s| &mut s.disk.queue_depth, 1..=4096),
        &[own("DYN_KVBM_DISK_QUEUE_DEPTH")],
        "Operations in flight; with NIXL, each way. With `threads` or `gds`, also by `auto`, the number of threads, 256 at \
         most.",
    ),
    key(
        "disk.keep",
        Flag(|s| &mut s.disk.keep),
        &[own("DYN_KVBM_DISK_KEEP")],
        "Leave the files in place at shutdown; the next start finds their blocks again \
         if the engine gives a fingerprint.",
    ),
    key(
        "disk.admission",
        Choice(|s| &mut s.disk.admission),
        &[own("DYN_KVBM_DISK_ADMISSION")],
        "Which blocks of the host tier are written to disk, and when. `write_through`: all, soon; `write_back`: \
         all, when they are about to leave the host; `selective`: of these, what is likely enough to return; \
         `auto`: the one of these that serves best on a sample of the blocks (docs/policies.md). Except with \
         `write_through`, a sixteenth of the host tier (4,096 slots at most) is kept free, and a save that finds \
         less room is cut short. The object tier is fed from disk.",
    ),
    key(
        "disk.write_budget",
        Budget(|s| &mut s.disk.write_budget),
        &[own("DYN_KVBM_DISK_WRITE_BUDGET")],
        "How much is written to the disk tier in a day at most, the blocks likeliest to return first. `0`: nothing. \
         Each start of the process brings an hour's share; prefetches from objects do not count.",
    ),
    key(
        "object.url",
        Url(|s| &mut s.object.url, &["file", "s3", "memory"]),
        &[
            upstream_in(
                "DYN_KVBM_OBJECT_BUCKET",
                Bucket,
                "Short for `s3://BUCKET`; shared by all workers.",
            ),
            own("DYN_KVBM_OBJECT_URL"),
            upstream_in(
                "DYN_KVBM_OBJECT_ENABLED",
                Switch,
                "Not needed: a bucket or URL is enough. Off removes the tier; on without a bucket or URL is an error.",
            ),
        ],
        "Where the object tier lives.",
    ),
    key(
        "object.capacity",
        Limit(|s| &mut s.object.capacity),
        &[
            own_in("DYN_KVBM_OBJECT_CACHE_GB", Gigabytes),
            upstream_in(
                "DYN_KVBM_OBJECT_NUM_BLOCKS",
                Blocks,
                "No number is an error, not 0. `0` means no object tier.",
            ),
        ],
        "Size of the object tier. `0`: no object tier, even with a URL (with a warning).",
    ),
    key(
        "object.endpoint",
        Url(|s| &mut s.object.endpoint, &["http", "https"]),
        &[upstream("DYN_KVBM_OBJECT_ENDPOINT", SAME)],
        "S3 endpoint, when it is not AWS.",
    ),
    key(
        "object.region",
        Text(|s| &mut s.object.region),
        &[upstream("DYN_KVBM_OBJECT_REGION", SAME)],
        "S3 region.",
    ),
    key(
        "object.access_key",
        Secret(|s| &mut s.object.access_key),
        &[upstream("DYN_KVBM_OBJECT_ACCESS_KEY", SAME)],
        "S3 access key; goes with the secret key.",
    ),
    key(
        "object.secret_key",
        Secret(|s| &mut s.object.secret_key),
        &[upstream("DYN_KVBM_OBJECT_SECRET_KEY", SAME)],
        "S3 secret key.",
    ),
    key(
        "object.backend",
        Choice(|s| &mut s.object.backend),
        &[own("DYN_KVBM_OBJECT_BACKEND")],
        "What moves the bytes: a client of our own, or NIXL's plugin OBJ, which must be on and keeps no object.",
    ),
    key(
        "object.segment_bytes",
        Bytes(|s| &mut s.object.segment_bytes, 4 * KIB..=256 * MIB),
        &[own("DYN_KVBM_OBJECT_SEGMENT_BYTES")],
        "Largest segment object; blocks that are flushed together share one. A request must end within 15 s.",
    ),
    key(
        "object.concurrency",
        Count(|s| &mut s.object.concurrency, 1..=256),
        &[own("DYN_KVBM_OBJECT_CONCURRENCY")],
        "Requests in flight; with NIXL, each way.",
    ),
    key(
        "object.put_budget",
        Count(|s| &mut s.object.put_budget, 0..=1_000_000_000),
        &[own("DYN_KVBM_OBJECT_PUT_BUDGET")],
        "Requests that write or list objects in each `object.budget_period_ms`; 0: any number. Spent, nothing is \
         flushed to objects until it refills.",
    ),
    key(
        "object.get_budget",
        Count(|s| &mut s.object.get_budget, 0..=1_000_000_000),
        &[own("DYN_KVBM_OBJECT_GET_BUDGET")],
        "The same for requests that read objects. Spent, blocks that only the object tier has are misses.",
    ),
    key(
        "object.byte_budget",
        Limit(|s| &mut s.object.byte_budget),
        &[own("DYN_KVBM_OBJECT_BYTE_BUDGET")],
        "Bytes of objects sent and received in each `object.budget_period_ms`. Spent, both stop.",
    ),
    key(
        "object.budget_period_ms",
        Millis(|s| &mut s.object.budget_period_ms, 1_000..=31 * DAY_MS),
        &[own("DYN_KVBM_OBJECT_BUDGET_PERIOD_MS")],
        "The period of the object tier's budgets.",
    ),
    key(
        "object.keep",
        Flag(|s| &mut s.object.keep),
        &[own("DYN_KVBM_OBJECT_KEEP")],
        "Leave the objects in place at shutdown. With a fingerprint later processes find them; others find them \
         while this one runs.",
    ),
    key(
        "object.renewal_ms",
        Millis(|s| &mut s.object.renewal_ms, 50..=3_600_000),
        &[own("DYN_KVBM_OBJECT_RENEWAL_MS")],
        "How often a worker records in the store which objects it uses. After ten times as long without it the worker \
         is taken for gone.",
    ),
    key(
        "object.discover_ms",
        Millis(|s| &mut s.object.discover_ms, 50..=3_600_000),
        &[own("DYN_KVBM_OBJECT_DISCOVER_MS")],
        "How often a worker looks for new objects of others with the same fingerprint: a listing, and a request for \
         each of at most 256 objects.",
    ),
    key(
        "object.collect_after_ms",
        Millis(|s| &mut s.object.collect_after_ms, 0..=40 * DAY_MS),
        &[own("DYN_KVBM_OBJECT_COLLECT_AFTER_MS")],
        "Objects of the same fingerprint that no worker uses are deleted at this age, and after at least ten renewals.",
    ),
    key(
        "object.collect_above",
        Limit(|s| &mut s.object.collect_above),
        &[own("DYN_KVBM_OBJECT_COLLECT_ABOVE")],
        "Size of all objects of a fingerprint above which unused ones are deleted sooner, oldest first, but not before \
         ten renewals.",
    ),
    key(
        "object.older_epoch",
        Choice(|s| &mut s.object.older_epoch),
        &[own("DYN_KVBM_OBJECT_OLDER_EPOCH")],
        "What if the store is in a later epoch than the fingerprint of a process that starts: its weights were \
         exchanged since. `refuse`: the start fails; `follow`: it goes on in the store's, for engines that count no \
         epochs; `keep`: it goes on in its own, with weights that were there before. Python's engines that name no \
         epoch follow.",
    ),
    key(
        "encryption.key_file",
        Text(|s| &mut s.encryption.key_file),
        &[own("DYN_KVBM_ENCRYPTION_KEY_FILE")],
        "A file of keys, one `number:key` on each line, the one to encrypt with first; only its owner may read it. A key \
         is 32 random bytes, in hexadecimal or base64.",
    ),
    key(
        "encryption.key",
        Secret(|s| &mut s.encryption.key),
        &[own("DYN_KVBM_ENCRYPTION_KEY")],
        "The same keys themselves, separated by commas.",
    ),
    key(
        "transfer.max_concurrent",
        Count(|s| &mut s.transfer.max_concurrent, 1..=1024),
        &[upstream("DYN_KVBM_MAX_CONCURRENT_TRANSFERS", SAME)],
        "Batches in flight per route.",
    ),
    key(
        "transfer.max_batch",
        Count(|s| &mut s.transfer.max_batch, 1..=65_536),
        &[
            upstream(
                "DYN_KVBM_TRANSFER_BATCH_SIZE",
                "Another name of `DYN_KVBM_MAX_TRANSFER_BATCH_SIZE`, which wins.",
            ),
            upstream("DYN_KVBM_MAX_TRANSFER_BATCH_SIZE", SAME),
        ],
        "Blocks in one batch. To and from the object tier: of one segment.",
    ),
    key(
        "transfer.timeout_ms",
        Millis(|s| &mut s.transfer.timeout_ms, 100..=HOUR_MS),
        &[own("DYN_KVBM_TRANSFER_TIMEOUT_MS")],
        "How long a medium may complete nothing before its copies fail as overdue; 30 s at least for the object tier, \
         whose client gives up within 20 s.",
    ),
    key(
        "transfer.queue_blocks",
        Count(|s| &mut s.transfer.queue_blocks, 1..=1 << 22),
        &[own("DYN_KVBM_TRANSFER_QUEUE_BLOCKS")],
        "Blocks that may wait per route; beyond it a save is refused as full.",
    ),
    key(
        "transfer.copy_threads",
        Count(|s| &mut s.transfer.copy_threads, 1..=256),
        &[own("DYN_KVBM_TRANSFER_COPY_THREADS")],
        "Threads that copy between memory tiers.",
    ),
    key(
        "transfer.scrub_mib_per_second",
        Count(|s| &mut s.transfer.scrub_mib_per_second, 0..=100_000),
        &[own("DYN_KVBM_SCRUB_MIB_PER_SECOND")],
        "MiB a second of the disk tier and of a persistent host tier that are verified while the disk is idle. `0`: \
         none.",
    ),
    key(
        "transfer.prefill_tokens_per_second",
        Count(|s| &mut s.transfer.prefill_tokens_per_second, 0..=100_000_000),
        &[own("DYN_KVBM_PREFILL_TOKENS_PER_SECOND")],
        "Prompt tokens that the engine computes in a second. A load ends where the tiers, by their measured pace, are \
         slower. `0`: unknown; everything is loaded.",
    ),
    key(
        "transfer.shadow_share",
        Share(|s| &mut s.transfer.shadow_share),
        &[own("DYN_KVBM_SHADOW_SHARE")],
        "Share of the prompts with hits below the device of which an engine is asked to compute these again, and compare \
         (docs/reliability.md).",
    ),
    key(
        "flush.interval_ms",
        Millis(|s| &mut s.flush.interval_ms, 1..=DAY_MS),
        &[own("DYN_KVBM_FLUSH_INTERVAL_MS")],
        "A block is copied to the tier below at the latest this long after it became resident.",
    ),
    key(
        "flush.dirty_watermark",
        Share(|s| &mut s.flush.dirty_watermark),
        &[own("DYN_KVBM_FLUSH_DIRTY_WATERMARK")],
        "Share of a tier that may wait to be flushed before flushing starts at once.",
    ),
    key(
        "hybrid.checkpoint_blocks",
        Count(|s| &mut s.hybrid.checkpoint_blocks, 1..=1 << 20),
        &[own("DYN_KVBM_HYBRID_CHECKPOINT_BLOCKS")],
        "Blocks from one checkpoint of sliding windows and states to the next. Fewer cost more memory, more let a \
         match end earlier. Blocks that were kept with another number are not found.",
    ),
    key(
        "metrics.enabled",
        Flag(|s| &mut s.metrics.enabled),
        &[upstream("DYN_KVBM_METRICS", SAME)],
        "Serve `/metrics`, the state and the live page: docs/observe.md.",
    ),
    key(
        "metrics.host",
        Address(|s| &mut s.metrics.host),
        &[own("DYN_KVBM_METRICS_HOST")],
        "Address to bind. Addresses that other machines reach need `metrics.token_file` or `metrics.token`.",
    ),
    key(
        "metrics.port",
        Port(|s| &mut s.metrics.port),
        &[upstream(
            "DYN_KVBM_METRICS_PORT",
            "Bound to this machine alone unless `DYN_KVBM_METRICS_HOST` says otherwise.",
        )],
        "Port to bind; 0: any free one.",
    ),
    key(
        "metrics.allowed_hosts",
        Hosts(|s| &mut s.metrics.allowed_hosts),
        &[own("DYN_KVBM_METRICS_ALLOWED_HOSTS")],
        "Further names by which requests may address it (`Host`), for a proxy on this machine: docs/observe.md.",
    ),
    key(
        "metrics.token_file",
        Text(|s| &mut s.metrics.token_file),
        &[own("DYN_KVBM_METRICS_TOKEN_FILE")],
        "A file whose only line is the token of readers (`Authorization: Bearer …`), of 16 bytes or more.",
    ),
    key(
        "metrics.token",
        Secret(|s| &mut s.metrics.token),
        &[own("DYN_KVBM_METRICS_TOKEN")],
        "The same token itself.",
    ),
    key(
        "traces.enabled",
        Flag(|s| &mut s.traces.enabled),
        &[own("DYN_KVBM_TRACES")],
        "Send spans of look-ups and transfers to an OpenTelemetry collector: docs/observe.md. Needs the feature `otel`.",
    ),
    key(
        "traces.endpoint",
        Url(|s| &mut s.traces.endpoint, &["http", "https"]),
        &[own("DYN_KVBM_TRACES_ENDPOINT")],
        "The collector, by OTLP over HTTP; `/v1/traces` is appended. `none`: what `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or \
         `OTEL_EXPORTER_OTLP_ENDPOINT` says, else port 4318 of this machine.",
    ),
    key(
        "traces.nvtx",
        Flag(|s| &mut s.traces.nvtx),
        &[own("DYN_KVBM_TRACES_NVTX")],
        "Mark transfers and copies on the timeline of a profiler such as Nsight Systems. Needs NVIDIA's NVTX and the \
         feature `nvtx`.",
    ),
    key(
        "peers.enabled",
        Flag(|s| &mut s.peers.enabled),
        &[own("DYN_KVBM_PEERS")],
        "Give blocks of the host tier to other workers of the same model, and read theirs: docs/peers.md.",
    ),
    key(
        "peers.host",
        Address(|s| &mut s.peers.host),
        &[own("DYN_KVBM_PEERS_HOST")],
        "Address to bind. Addresses that other machines reach need `peers.secret_file` or `peers.secret`, or the three of \
         `peers.tls_certificate`.",
    ),
    key(
        "peers.port",
        Port(|s| &mut s.peers.port),
        &[own("DYN_KVBM_PEERS_PORT")],
        "Port to bind; 0: any free one. A rank binds this port + 1 + its number.",
    ),
    key(
        "peers.name",
        Text(|s| &mut s.peers.name),
        &[own("DYN_KVBM_PEERS_NAME")],
        "This worker's own name among all: letters, digits, `-`, `_`, `.`, `/`. Its address if none is chosen.",
    ),
    key(
        "peers.address",
        Text(|s| &mut s.peers.address),
        &[own("DYN_KVBM_PEERS_ADDRESS")],
        "Where other workers reach this one, as `host:port`, if that is not where it is bound.",
    ),
    key(
        "peers.addresses",
        Text(|s| &mut s.peers.addresses),
        &[own("DYN_KVBM_PEERS_ADDRESSES")],
        "The other workers, as `host:port`, with commas between.",
    ),
    key(
        "peers.file",
        Text(|s| &mut s.peers.file),
        &[own("DYN_KVBM_PEERS_FILE")],
        "A JSON file that lists the other workers, read again when it changes: docs/peers.md.",
    ),
    key(
        "peers.etcd",
        Text(|s| &mut s.peers.etcd),
        &[own("DYN_KVBM_PEERS_ETCD")],
        "URLs of etcd, with commas between: workers announce themselves there, and learn of others. If no list is \
         named: `ETCD_ENDPOINTS`.",
    ),
    key(
        "peers.etcd_user",
        Text(|s| &mut s.peers.etcd_user),
        &[own("DYN_KVBM_PEERS_ETCD_USER")],
        "The user of etcd, if it asks for one. It reads and writes keys that begin with `kvbm/<namespace>/peers/`.",
    ),
    key(
        "peers.etcd_password_file",
        Text(|s| &mut s.peers.etcd_password_file),
        &[own("DYN_KVBM_PEERS_ETCD_PASSWORD_FILE")],
        "A file whose only line is that user's password, which no other user may read.",
    ),
    key(
        "peers.namespace",
        Text(|s| &mut s.peers.namespace),
        &[own("DYN_KVBM_PEERS_NAMESPACE")],
        "Workers in etcd see those of their own namespace: letters, digits, `-`, `_`, `.`. If none is \
         chosen: `DYN_NAMESPACE`, else `default`.",
    ),
    key(
        "peers.secret_file",
        Text(|s| &mut s.peers.secret_file),
        &[own("DYN_KVBM_PEERS_SECRET_FILE")],
        "A file whose only line is the secret that all these workers know, of 16 bytes or more.",
    ),
    key(
        "peers.secret",
        Secret(|s| &mut s.peers.secret),
        &[own("DYN_KVBM_PEERS_SECRET")],
        "The same secret itself.",
    ),
    key(
        "peers.tls_certificate",
        Text(|s| &mut s.peers.tls_certificate),
        &[own("DYN_KVBM_PEERS_TLS_CERTIFICATE")],
        "A file of this worker's certificate (PEM). With `peers.tls_key` and `peers.tls_ca` connections between \
         workers are TLS, and both sides show a certificate: docs/peers.md.",
    ),
    key(
        "peers.tls_key",
        Text(|s| &mut s.peers.tls_key),
        &[own("DYN_KVBM_PEERS_TLS_KEY")],
        "A file of the certificate's private key (PEM), which no other user may read.",
    ),
    key(
        "peers.tls_ca",
        Text(|s| &mut s.peers.tls_ca),
        &[own("DYN_KVBM_PEERS_TLS_CA")],
        "A file of the certificate of the CA that signs those of all these workers (PEM).",
    ),
    key(
        "peers.lease_ttl_ms",
        Millis(|s| &mut s.peers.lease_ttl_ms, 100..=HOUR_MS),
        &[own("DYN_KVBM_PEERS_LEASE_TTL_MS")],
        "How long blocks stay leased to a worker that does not read them; and how long this one waits for a peer.",
    ),
    key(
        "peers.lease_share",
        Share(|s| &mut s.peers.lease_share),
        &[own("DYN_KVBM_PEERS_LEASE_SHARE")],
        "The share of the host tier that may be leased to other workers at a time.",
    ),
    key(
        "peers.shared_memory",
        Flag(|s| &mut s.peers.shared_memory),
        &[own("DYN_KVBM_PEERS_SHARED_MEMORY")],
        "Let workers of the same host and user map the host tier for reading, and map theirs, in place of TCP. Not with \
         `host.persist`.",
    ),
    key(
        "peers.convert_types",
        Flag(|s| &mut s.peers.convert_types),
        &[own("DYN_KVBM_PEERS_CONVERT_TYPES")],
        "Read the blocks of workers whose numbers are of another type, and convert them: between bfloat16, float16 and FP8 \
         (e4m3). They are rounded.",
    ),
    key(
        "peers.nixl",
        Choice(|s| &mut s.peers.nixl),
        &[own("DYN_KVBM_PEERS_NIXL")],
        "Read other workers' host tiers by NIXL's plugin UCX where they cannot be mapped: `auto`: where both sides have it, \
         a way for it, and no certificates, else TCP; `required`: never TCP, and a start without the plugin is refused.",
    ),
    key(
        "nixl.backends",
        Toggles(|s| &mut s.nixl.backends),
        &[upstream("DYN_KVBM_NIXL_BACKEND_", "Names may hold `_`, so GDS_MT can be set.")],
        "Plugins of NIXL by name, on or off. None named: UCX alone, if NIXL is installed; all off: none. POSIX serves \
         `disk.backend`, OBJ `object.backend`; the start and `kvbm doctor` report unused ones.",
    ),
    key(
        "nixl.library",
        Text(|s| &mut s.nixl.library),
        &[own("DYN_KVBM_NIXL_LIBRARY")],
        "`libnixl_capi.so`. Unset: that of the Python packages, else one that the system's loader finds.",
    ),
    // Behind the others of its section: whatever they do not take is a parameter.
    key(
        "nixl",
        Parameters(|s| &mut s.nixl.parameters),
        &[own("DYN_KVBM_NIXL_PARAM_")],
        "Parameters of a plugin, as its documentation names them: `[nixl.posix] use_uring = true`, or \
         `DYN_KVBM_NIXL_PARAM_POSIX__USE_URING=true`. A name in capitals alone is one in small letters. No \
         credentials.",
    ),
];

/// A variable of upstream's that is checked and otherwise ignored, so that deployments with it
/// start.
pub(crate) struct IgnoredVariable {
    pub(crate) name: &'static str,
    pub(crate) takes: ValueTakes,
    pub(crate) doc: &'static str,
}

/// What an ignored variable takes.
pub(crate) enum ValueTakes {
    Flag,
    Whole(RangeInclusive<u64>),
    Text,
}

impl IgnoredVariable {
    pub(crate) fn check(&self, text: &str) -> Result<(), InvalidValue> {
        match &self.takes {
            ValueTakes::Flag => parse_boolean(text).map(drop),
            ValueTakes::Whole(range) => parse_whole(text, range).map(drop),
            ValueTakes::Text => parse_text(text).map(drop),
        }
    }
}

const fn ignored(name: &'static str, takes: ValueTakes, doc: &'static str) -> IgnoredVariable {
    IgnoredVariable { name, takes, doc }
}

/// Upstream's variables that nothing here follows yet.
pub(crate) static IGNORED: &[IgnoredVariable] = &[
    ignored(
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER",
        ValueTakes::Flag,
        "`disk.admission` (`DYN_KVBM_DISK_ADMISSION`) says which blocks go to disk.",
    ),
    ignored(
        "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY",
        ValueTakes::Whole(0..=100),
        "Priority (`Hints::priority`) orders what leaves a tier first, with `fair_tenants`; it keeps no block out.",
    ),
    ignored(
        "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS",
        ValueTakes::Whole(0..=u64::MAX),
        "There are no workers to wait for.",
    ),
    ignored("DYN_KVBM_LEADER_ZMQ_HOST", ValueTakes::Text, "There are no workers to reach."),
    ignored(
        "DYN_KVBM_LEADER_ZMQ_PUB_PORT",
        ValueTakes::Whole(0..=65_535),
        "There are no workers to reach.",
    ),
    ignored(
        "DYN_KVBM_LEADER_ZMQ_ACK_PORT",
        ValueTakes::Whole(0..=65_535),
        "There are no workers to reach.",
    ),
    ignored(
        "DYN_KVBM_CACHE_STATS_MAX_REQUESTS",
        ValueTakes::Whole(0..=u64::MAX),
        "Hits are counted in metrics.",
    ),
    ignored(
        "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS",
        ValueTakes::Whole(0..=u64::MAX),
        "Hits are counted in metrics.",
    ),
    ignored(
        "DYN_KVBM_OBJECT_WRITE_THROUGH",
        ValueTakes::Flag,
        "Blocks reach the object tier by flushing.",
    ),
    ignored("DYN_KVBM_ENABLE_RECORD", ValueTakes::Flag, "Nothing is recorded."),
];

/// A variable of Dynamo's that a setting follows where nothing else says it.
pub(crate) struct FallbackVariable {
    pub(crate) name: &'static str,
    pub(crate) path: &'static str,
    pub(crate) applies: fn(&PeerSettings) -> bool,
}

/// In this order: a namespace counts where there is an etcd.
pub(crate) static FALLBACKS: &[FallbackVariable] = &[
    FallbackVariable {
        name: "ETCD_ENDPOINTS",
        path: "peers.etcd",
        applies: |peers| peers.enabled && peers.lists().next().is_none(),
    },
    FallbackVariable {
        name: "DYN_NAMESPACE",
        path: "peers.namespace",
        applies: |peers| peers.enabled && peers.etcd.is_some() && peers.namespace.is_none(),
    },
];

/// A name of others that nothing here follows, and what takes its place.
pub(crate) struct ForeignName {
    pub(crate) name: &'static str,
    pub(crate) instead: &'static str,
}

const fn foreign(name: &'static str, instead: &'static str) -> ForeignName {
    ForeignName { name, instead }
}

/// Variables that say how peers are reached. Other programs may want them: they are told of.
pub(crate) static FOREIGN_VARIABLES: &[ForeignName] = &[
    foreign("ETCD_AUTH_USERNAME", "peers.etcd_user (DYN_KVBM_PEERS_ETCD_USER)"),
    foreign("ETCD_AUTH_PASSWORD", "peers.etcd_password_file (DYN_KVBM_PEERS_ETCD_PASSWORD_FILE)"),
    foreign("ETCD_AUTH_CA", "peers.tls_ca (DYN_KVBM_PEERS_TLS_CA)"),
    foreign("ETCD_AUTH_CLIENT_CERT", "peers.tls_certificate (DYN_KVBM_PEERS_TLS_CERTIFICATE)"),
    foreign("ETCD_AUTH_CLIENT_KEY", "peers.tls_key (DYN_KVBM_PEERS_TLS_KEY)"),
    foreign(
        "NIXL_NUM_TRANSPORT_THREADS",
        "nixl.ucx.num_workers (DYN_KVBM_NIXL_PARAM_UCX__NUM_WORKERS)",
    ),
];

/// Keys that articles name, and that NIXL and Dynamo never had.
pub(crate) static NEVER_WERE: &[ForeignName] = &[
    foreign("kv_transfer.backend", "nixl.backends.<NAME> (DYN_KVBM_NIXL_BACKEND_<NAME>)"),
    foreign("kv_transfer.metadata_server", "peers.etcd (DYN_KVBM_PEERS_ETCD)"),
    foreign("kv_transfer.rdma_device", "the variable UCX_NET_DEVICES"),
    foreign(
        "kv_transfer.transport_threads",
        "nixl.ucx.num_workers (DYN_KVBM_NIXL_PARAM_UCX__NUM_WORKERS)",
    ),
    foreign("kv_transfer_timeout_ms", "peers.lease_ttl_ms (DYN_KVBM_PEERS_LEASE_TTL_MS)"),
    foreign("nixl_nvme_flush_interval_ms", "flush.interval_ms (DYN_KVBM_FLUSH_INTERVAL_MS)"),
];

/// Whether a variable is looked at: all with the prefix, and some of others.
pub(crate) fn is_read(variable: &str) -> bool {
    variable.starts_with(PREFIX)
        || FALLBACKS.iter().any(|fallback| fallback.name == variable)
        || FOREIGN_VARIABLES.iter().any(|foreign| foreign.name == variable)
}

/// The key at `path`, or the family that it belongs to with the member's name.
pub(crate) fn by_path(path: &str) -> Option<(&'static SettingKey, Option<&str>)> {
    if let Some(key) = KEYS.iter().find(|key| key.path == path && !key.is_family()) {
        return Some((key, None));
    }
    let member = |key: &'static SettingKey| {
        let name = path.strip_prefix(key.path)?.strip_prefix('.')?;
        let fits = !matches!(key.field, SettingField::Parameters(_)) || name.contains('.');
        fits.then_some((key, Some(name)))
    };
    KEYS.iter().filter(|key| key.is_family()).find_map(member)
}

/// The family that the variable belongs to, with the member's name.
pub(crate) fn family_of(variable: &str) -> Option<(&'static SettingKey, &str)> {
    let families = KEYS.iter().filter(|key| key.is_family());
    let member = |key: &'static SettingKey| {
        key.variables.iter().find_map(|prefix| Some((key, variable.strip_prefix(prefix.name)?)))
    };
    families.filter_map(member).find(|(_, name)| !name.is_empty())
}

/// Whether the variable is any that is known here. The name of a family alone is none: a member
/// must follow.
pub(crate) fn knows(variable: &str) -> bool {
    let is_family = KEYS
        .iter()
        .any(|key| key.is_family() && key.variables.iter().any(|prefix| prefix.name == variable));
    !is_family && (family_of(variable).is_some() || variable_names().any(|known| known == variable))
}

fn variable_names() -> impl Iterator<Item = &'static str> {
    let of_keys = KEYS.iter().flat_map(|key| key.variables.iter().map(|variable| variable.name));
    of_keys.chain(IGNORED.iter().map(|ignored| ignored.name)).chain([CONFIG_VARIABLE])
}

/// The known variable most like `name`.
pub(crate) fn nearest_variable(name: &str) -> &'static str {
    // All share the prefix: what follows it tells them apart.
    let tail = |name: &str| name.strip_prefix(PREFIX).unwrap_or(name).to_owned();
    nearest(variable_names(), |known| likeness(&tail(name), &tail(known)))
}

/// The known key most like `path`, or the first key of the section most like it.
pub(crate) fn nearest_path(path: &str) -> &'static str {
    let section =
        |known: &str| known.rsplit_once('.').map_or(0.0, |(section, _)| likeness(path, section));
    nearest(KEYS.iter().map(|key| key.path), |known| likeness(path, known).max(section(known)))
}

/// The other variables of the section that `variable` belongs to.
pub(crate) fn variables_beside(variable: &str) -> Vec<&'static str> {
    let has = |key: &&SettingKey| key.variables.iter().any(|known| known.name == variable);
    let section = KEYS.iter().find(has).map(SettingKey::section);
    let of_section = KEYS.iter().filter(|key| Some(key.section()) == section);
    let names = of_section.flat_map(|key| key.variables.iter().map(|known| known.name));
    names.filter(|&name| name != variable).collect()
}

/// The other keys of the section that the key at `path` belongs to.
pub(crate) fn paths_beside(path: &str) -> Vec<&'static str> {
    let section = KEYS.iter().find(|key| key.path == path).map(SettingKey::section);
    let of_section = KEYS.iter().filter(|key| Some(key.section()) == section);
    of_section.map(|key| key.path).filter(|&known| known != path).collect()
}

fn likeness(name: &str, known: &str) -> f64 {
    strsim::normalized_damerau_levenshtein(name, known)
}

/// The first of the likeliest.
fn nearest(
    known: impl Iterator<Item = &'static str>,
    likeness: impl Fn(&str) -> f64,
) -> &'static str {
    known
        .reduce(|best, next| if likeness(next) > likeness(best) { next } else { best })
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::field::RawValue;
    use crate::settings::Settings;
    use crate::value::{BOOLEANS, format_size};

    proptest! {
        #[test]
        fn no_variable_panics_on_arbitrary_text(text in any::<String>()) {
            for variable in KEYS.iter().flat_map(|key| key.variables) {
                let _ = variable.form.interpret(&text);
            }
            for ignored in IGNORED {
                let _ = ignored.check(&text);
            }
        }
    }

    fn texts<T: ToString>(values: impl IntoIterator<Item = T>) -> Vec<String> {
        values.into_iter().map(|value| value.to_string()).collect()
    }

    fn booleans() -> Vec<String> {
        texts(BOOLEANS.split(", "))
    }

    /// What the reference says that TOML may hold: for a range its ends, for a form its examples.
    fn documented(field: &SettingField) -> Vec<String> {
        match field {
            SettingField::Flag(_) | SettingField::Toggles(_) => booleans(),
            SettingField::Count(_, range) => texts([range.start(), range.end()]),
            SettingField::Millis(_, range) => texts([range.start(), range.end()]),
            SettingField::Bytes(_, range) => {
                texts([range.start(), range.end()].map(|&bytes| format_size(bytes)))
            }
            SettingField::BytesIfSet(_, range) => {
                texts([NONE, &format_size(*range.start()), &format_size(*range.end())])
            }
            SettingField::Capacity(_) => {
                texts(["65536", "64KiB", "1.5GB", "1.5 GiB", "5000 blocks", "0", NONE])
            }
            SettingField::Limit(_) => {
                texts(["65536", "1.5 GiB", "5000 blocks", "0", NONE, UNLIMITED])
            }
            SettingField::Budget(_) => texts(["500GB", "0.5dwpd", "1000dwpd", "0", NONE]),
            SettingField::Share(_) => texts(["0", "1", "0.5"]),
            SettingField::TenantWeights(_) => texts(["7=3, 9=0.5", "7=1000000", NONE]),
            SettingField::TenantQuotas(_) => texts(["7=64GiB, 9=5000 blocks", NONE]),
            SettingField::Port(_) => texts(["0", "65535"]),
            SettingField::Address(_) => texts(["127.0.0.1", "0.0.0.0", "::1"]),
            SettingField::Url(..) => texts(examples(&field.valid()).chain([NONE.to_owned()])),
            SettingField::Text(_) | SettingField::Secret(_) => texts(["any text", NONE]),
            SettingField::Parameters(_) => texts(["any text"]),
            SettingField::Directory(_) => texts(["/dev/shm/kvbm", NONE]),
            SettingField::Directories(_) => texts(["/a", "/a:/b", "/a, /b"]),
            SettingField::Hosts(_) => texts(["kvbm", "kvbm.example, node-1", NONE]),
            SettingField::Choice(_) => texts(field.valid().split(", ")),
        }
    }

    /// What stands between backquotes, with a port in the place of the word.
    fn examples(valid: &str) -> impl Iterator<Item = String> + '_ {
        valid.split('`').skip(1).step_by(2).map(|example| example.replace(":port", ":9000"))
    }

    fn documented_of_variable(key: &SettingKey, variable: &EnvVariable) -> Vec<String> {
        match variable.form {
            ValueForm::Plain => documented(&key.field),
            ValueForm::Negated | ValueForm::Switch => booleans(),
            ValueForm::Gigabytes if matches!(key.field, SettingField::Limit(_)) => {
                texts(["20", "1.5", "64GiB", "0", NONE, UNLIMITED])
            }
            ValueForm::Gigabytes => texts(["20", "1.5", "64GiB", "0", NONE]),
            ValueForm::Override => texts(["0", NONE, "1", "1073741816"]),
            ValueForm::Blocks => texts(["0", NONE, UNLIMITED, "1", "1073741816"]),
            ValueForm::Bucket => texts(["kv-cache", "a.b_c", NONE]),
        }
    }

    fn raw(key: &SettingKey, text: &str) -> RawValue {
        let value = text.to_owned();
        match key.field {
            SettingField::Toggles(_) => RawValue::Member { name: "UCX".to_owned(), value },
            SettingField::Parameters(_) => {
                RawValue::Member { name: "posix.use_uring".to_owned(), value }
            }
            _ => RawValue::One(value),
        }
    }

    /// That the key takes the text, keeps it as something that may be written, and so would take it
    /// again.
    #[track_caller]
    fn assert_taken(key: &SettingKey, name: &str, text: &str) {
        let mut settings = Settings::default();
        let told = |error: InvalidValue| panic!("{name} = {text}: {error}");
        key.field.assign(&mut settings, &raw(key, text)).unwrap_or_else(told);
        for shown in key.field.values(&settings) {
            key.field.assign(&mut settings, &shown).unwrap_or_else(told);
        }
    }

    #[test]
    fn every_documented_value_of_every_key_and_variable_is_taken() {
        for key in KEYS {
            documented(&key.field).iter().for_each(|text| assert_taken(key, key.path, text));
            for variable in key.variables {
                for text in documented_of_variable(key, variable) {
                    let meaning = variable.form.interpret(&text);
                    match meaning
                        .unwrap_or_else(|error| panic!("{} = {text}: {error}", variable.name))
                    {
                        UpstreamMeaning::Value(value) => assert_taken(key, variable.name, &value),
                        UpstreamMeaning::Silent | UpstreamMeaning::Required => {}
                    }
                }
            }
        }
        for ignored in IGNORED {
            let values = match &ignored.takes {
                ValueTakes::Flag => booleans(),
                ValueTakes::Whole(range) => texts([range.start(), range.end()]),
                ValueTakes::Text => texts(["any text"]),
            };
            values.iter().for_each(|text| ignored.check(text).expect(ignored.name));
        }
    }

    #[test]
    fn every_number_has_bounds_and_an_error_beyond_names_them() {
        for key in KEYS {
            let (least, most) = match &key.field {
                SettingField::Count(_, range) => {
                    (u64::from(*range.start()), u64::from(*range.end()))
                }
                SettingField::Millis(_, range)
                | SettingField::Bytes(_, range)
                | SettingField::BytesIfSet(_, range) => (*range.start(), *range.end()),
                _ => continue,
            };
            assert!(most < u64::from(u32::MAX), "{} has no bound", key.path);
            let beyond = [least.checked_sub(1), Some(most + 1), Some(u64::MAX)];
            for number in beyond.into_iter().flatten() {
                let refused =
                    key.field.assign(&mut Settings::default(), &raw(key, &number.to_string()));
                let error = refused.expect_err(key.path);
                assert!(
                    error.to_string().ends_with(&key.field.valid())
                        || error.to_string().contains(" from "),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn texts_and_lists_are_bounded() {
        let long = "x".repeat(4097);
        let many = (0..65).map(|dir| format!("/{dir}")).collect::<Vec<_>>().join(":");
        for key in KEYS {
            let text = match key.field {
                SettingField::Text(_)
                | SettingField::Secret(_)
                | SettingField::Parameters(_)
                | SettingField::Directory(_)
                | SettingField::Hosts(_) => &long,
                SettingField::Directories(_) => &many,
                _ => continue,
            };
            let refused = key.field.assign(&mut Settings::default(), &raw(key, text));
            assert!(
                refused.expect_err(key.path).to_string().ends_with(&key.field.valid()),
                "{}",
                key.path
            );
        }
    }

    #[test]
    fn names_are_unique_and_in_style() {
        let variables: Vec<_> = variable_names().collect();
        assert_eq!(variables.iter().collect::<BTreeSet<_>>().len(), variables.len());
        assert!(variables.iter().all(|name| name.starts_with(PREFIX)));
        assert_eq!(KEYS.iter().map(|key| key.path).collect::<BTreeSet<_>>().len(), KEYS.len());
        assert!(KEYS.iter().all(|key| !key.variables.is_empty() && key.doc.ends_with('.')));
    }

    #[test]
    fn families_have_members_and_no_value_of_their_own() {
        assert_eq!(family_of("DYN_KVBM_NIXL_BACKEND_GDS_MT").map(|(_, name)| name), Some("GDS_MT"));
        assert!(!knows("DYN_KVBM_NIXL_BACKEND_"));
        assert!(by_path("nixl.backends").is_none());
        assert_eq!(by_path("nixl.backends.UCX").and_then(|(_, member)| member), Some("UCX"));
        assert!(by_path("nixl.librari").is_none());
        assert_eq!(
            by_path("nixl.posix.use_uring").map(|(key, member)| (key.path, member)),
            Some(("nixl", Some("posix.use_uring")))
        );
    }

    #[test]
    fn the_nearest_name_is_the_one_that_was_meant() {
        let variables = [
            ("DYN_KVBM_CPU_CACHE_BG", "DYN_KVBM_CPU_CACHE_GB"),
            ("DYN_KVBM_EVICTON", "DYN_KVBM_EVICTION"),
            ("DYN_KVBM_DISK_DIR", "DYN_KVBM_DISK_CACHE_DIR"),
            ("DYN_KVBM_FLUSH_INTERVAL", "DYN_KVBM_FLUSH_INTERVAL_MS"),
            ("DYN_KVBM_CONFG", "DYN_KVBM_CONFIG"),
        ];
        for (written, meant) in variables {
            assert!(!knows(written));
            assert_eq!(nearest_variable(written), meant);
        }
        for (written, meant) in
            [("hots.capacity", "host.capacity"), ("disk.dir", "disk.dirs"), ("objct", "object.url")]
        {
            assert_eq!(nearest_path(written), meant);
        }
    }

    #[test]
    fn gigabytes_are_decimal_unless_a_unit_says_otherwise() {
        let cases = [
            ("20", "20GB"),
            (" 1.5 ", "1.5GB"),
            ("64GiB", "64GiB"),
            ("0", "0GB"),
            (" none", "none"),
        ];
        for (text, size) in cases {
            assert_eq!(
                ValueForm::Gigabytes.interpret(text),
                Ok(UpstreamMeaning::Value(size.to_owned()))
            );
        }
        for text in ["", "abc", "-1", "1e3", "1.5.2", "20G"] {
            assert!(ValueForm::Gigabytes.interpret(text).is_err(), "{text}");
        }
    }

    #[test]
    fn counts_of_blocks_end_where_slots_do() {
        let most = MAX_TIER_BLOCKS.to_string();
        assert!(OVERRIDES.contains(&most) && COUNTS.contains(&most));
        for form in [ValueForm::Override, ValueForm::Blocks] {
            let error = form.interpret(&(MAX_TIER_BLOCKS + 1).to_string()).unwrap_err().to_string();
            assert!(error.starts_with("out of range; ") && error.contains(&most), "{error}");
        }
    }

    #[test]
    fn buckets_have_plain_names() {
        assert_eq!(
            ValueForm::Bucket.interpret(" kv-cache "),
            Ok(UpstreamMeaning::Value("s3://kv-cache".to_owned()))
        );
        for text in ["", "kv-{worker_id}", "a/b", "key:secret@bucket"] {
            assert!(ValueForm::Bucket.interpret(text).is_err(), "{text}");
        }
    }
}
