//! The one table of settings: key, variables, type, limits, meaning. Parser, `kvbm config` and the
//! reference read it.

use std::ops::RangeInclusive;

use crate::field::{SettingField, UNLIMITED};
use crate::settings::{MAX_BLOCK_BYTES, MAX_TIER_BLOCKS};
use crate::value::NONE;
use crate::value::{
    InvalidValue, TEXTS, parse_boolean, parse_size, parse_text, parse_whole, whole_numbers,
};

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
    /// Whether anything in the system follows it yet.
    pub(crate) in_use: bool,
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

/// A variable of our own.
const fn own(name: &'static str, form: ValueForm) -> EnvVariable {
    EnvVariable { name, form, upstream: None }
}

/// A variable of the system that users come from, with what we do differently.
const fn upstream(name: &'static str, form: ValueForm, difference: &'static str) -> EnvVariable {
    EnvVariable { name, form, upstream: Some(difference) }
}

const SAME: &str = "";
const STRICT: &str = "No number is an error, not 0.";
const FALSE_IS_FALSE: &str = "`false` means off; upstream reads any value as on.";

/// Every setting, in the order in which it is shown.
pub(crate) static KEYS: &[SettingKey] = &[
    SettingKey {
        path: "block_bytes",
        field: SettingField::BytesIfSet(|s| &mut s.block_bytes, 1..=MAX_BLOCK_BYTES),
        variables: &[own("DYN_KVBM_BLOCK_BYTES", ValueForm::Plain)],
        doc: "Bytes of one KV block, all layers together. Needed by every tier; an engine states its own.",
        in_use: true,
    },
    SettingKey {
        path: "eviction",
        field: SettingField::Choice(|s| &mut s.eviction),
        variables: &[own("DYN_KVBM_EVICTION", ValueForm::Plain)],
        doc: "Which block leaves a full tier. `hazard`: the leaf with the fewest expected hits for the time that it would be \
              held, learned from the traffic (docs/policies.md); `lru`: the leaf used least recently; `fifo`: the leaf that came first; \
              `turn`: as `lru`, with grace for late turns of a conversation and for frequent use; others as known by these names.",
        in_use: true,
    },
    SettingKey {
        path: "fair_tenants",
        field: SettingField::Flag(|s| &mut s.fair_tenants),
        variables: &[own("DYN_KVBM_FAIR_TENANTS", ValueForm::Plain)],
        doc: "Evict from the tenant that holds the most of a tier, its blocks of low priority first, and within these in \
              the order of the policy. Engines say whose a request is (`Hints::tenant`, `Hints::priority`).",
        in_use: true,
    },
    SettingKey {
        path: "tenant_weights",
        field: SettingField::TenantWeights(|s| &mut s.tenant_weights),
        variables: &[own("DYN_KVBM_TENANT_WEIGHTS", ValueForm::Plain)],
        doc: "How large a tenant's share of each tier is compared to others'; 1 for those not named. Implies \
              `fair_tenants`.",
        in_use: true,
    },
    SettingKey {
        path: "tenant_quotas",
        field: SettingField::TenantQuotas(|s| &mut s.tenant_quotas),
        variables: &[own("DYN_KVBM_TENANT_QUOTAS", ValueForm::Plain)],
        doc: "How much of each tier a tenant may hold before it gives way to others that are within theirs, whatever the \
              shares. It may use what no other wants. Implies `fair_tenants`.",
        in_use: true,
    },
    SettingKey {
        path: "device.capacity",
        field: SettingField::Capacity(|s| &mut s.device.capacity),
        variables: &[
            own("DYN_KVBM_DEVICE_CACHE_GB", ValueForm::Gigabytes),
            own("DYN_KVBM_DEVICE_CACHE_OVERRIDE_NUM_BLOCKS", ValueForm::Override),
        ],
        doc: "Size of the device tier.",
        in_use: true,
    },
    SettingKey {
        path: "device.backend",
        field: SettingField::Choice(|s| &mut s.device.backend),
        variables: &[own("DYN_KVBM_DEVICE_BACKEND", ValueForm::Plain)],
        doc: "Whose memory it is: `cuda`: a GPU's; `emulated`: the host's; `auto`: a GPU's where there is one.",
        in_use: true,
    },
    SettingKey {
        path: "device.ordinal",
        field: SettingField::Count(|s| &mut s.device.ordinal, 0..=1023),
        variables: &[own("DYN_KVBM_DEVICE_ORDINAL", ValueForm::Plain)],
        doc: "Which GPU, as `CUDA_VISIBLE_DEVICES` numbers them.",
        in_use: true,
    },
    SettingKey {
        path: "host.capacity",
        field: SettingField::Capacity(|s| &mut s.host.capacity),
        variables: &[
            upstream("DYN_KVBM_CPU_CACHE_GB", ValueForm::Gigabytes, STRICT),
            upstream("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", ValueForm::Override, STRICT),
        ],
        doc: "Size of the host tier.",
        in_use: true,
    },
    SettingKey {
        path: "host.huge_pages",
        field: SettingField::Flag(|s| &mut s.host.huge_pages),
        variables: &[own("DYN_KVBM_HOST_CACHE_HUGE_PAGES", ValueForm::Plain)],
        doc: "Back the host tier with huge pages where the system allows.",
        in_use: true,
    },
    SettingKey {
        path: "host.staging_blocks",
        field: SettingField::Count(|s| &mut s.host.staging_blocks, 1..=1 << 20),
        variables: &[own("DYN_KVBM_HOST_CACHE_STAGING_BLOCKS", ValueForm::Plain)],
        doc: "Blocks of DRAM beside the tier, through which blocks pass that have no place in it.",
        in_use: true,
    },
    SettingKey {
        path: "host.persist",
        field: SettingField::Directory(|s| &mut s.host.persist),
        variables: &[own("DYN_KVBM_CPU_CACHE_PERSIST", ValueForm::Plain)],
        doc: "A directory on tmpfs or hugetlbfs, such as `/dev/shm/kvbm`, for the host tier: it survives any end of the \
              process, and the next one serves from it (docs/persistent-dram.md). Blocks are found again under the same \
              fingerprint, and are encrypted if `encryption` has keys. `none`: private memory.",
        in_use: true,
    },
    SettingKey {
        path: "host.persist_index",
        field: SettingField::Directory(|s| &mut s.host.persist_index),
        variables: &[own("DYN_KVBM_CPU_CACHE_PERSIST_INDEX", ValueForm::Plain)],
        doc: "Where the index of `host.persist` lies; `none`: beside the blocks. Hugetlbfs cannot hold it: name a \
              directory on tmpfs.",
        in_use: true,
    },
    SettingKey {
        path: "disk.capacity",
        field: SettingField::Capacity(|s| &mut s.disk.capacity),
        variables: &[
            upstream("DYN_KVBM_DISK_CACHE_GB", ValueForm::Gigabytes, STRICT),
            upstream("DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS", ValueForm::Override, STRICT),
        ],
        doc: "Size of the disk tier, over all its directories.",
        in_use: true,
    },
    SettingKey {
        path: "disk.dirs",
        field: SettingField::Directories(|s| &mut s.disk.dirs),
        variables: &[upstream(
            "DYN_KVBM_DISK_CACHE_DIR",
            ValueForm::Plain,
            "May name several directories.",
        )],
        doc: "Directories of the disk tier, each with its share of the slots; a chain lies in one of them while it has room.",
        in_use: true,
    },
    SettingKey {
        path: "disk.o_direct",
        field: SettingField::Flag(|s| &mut s.disk.o_direct),
        variables: &[upstream(
            "DYN_KVBM_DISK_DISABLE_O_DIRECT",
            ValueForm::Negated,
            FALSE_IS_FALSE,
        )],
        doc: "Bypass the page cache. The variable has the opposite sense: on means buffered.",
        in_use: true,
    },
    SettingKey {
        path: "disk.zerofill_fallback",
        field: SettingField::Flag(|s| &mut s.disk.zerofill_fallback),
        variables: &[upstream(
            "DYN_KVBM_DISK_ZEROFILL_FALLBACK",
            ValueForm::Plain,
            "On by default. `false` means off; upstream reads any value as on.",
        )],
        doc: "Write zeroes where the file system cannot reserve space.",
        in_use: true,
    },
    SettingKey {
        path: "disk.backend",
        field: SettingField::Choice(|s| &mut s.disk.backend),
        variables: &[own("DYN_KVBM_DISK_BACKEND", ValueForm::Plain)],
        doc: "What moves the bytes: `uring`, a pool of `threads`, `auto`: the first of these that works here; `gds`: cuFile; `nixl`: its plugin POSIX, which must be on.",
        in_use: true,
    },
    SettingKey {
        path: "disk.queue_depth",
        field: SettingField::Count(|s| &mut s.disk.queue_depth, 1..=4096),
        variables: &[own("DYN_KVBM_DISK_QUEUE_DEPTH", ValueForm::Plain)],
        doc: "Operations in flight; with NIXL, each way. With `threads` or `gds`, also by `auto`, the number of threads, 256 at \
              most.",
        in_use: true,
    },
    SettingKey {
        path: "disk.keep",
        field: SettingField::Flag(|s| &mut s.disk.keep),
        variables: &[own("DYN_KVBM_DISK_KEEP", ValueForm::Plain)],
        doc: "Leave the files in place at shutdown; the next start finds their blocks again \
              if the engine gives a fingerprint.",
        in_use: true,
    },
    SettingKey {
        path: "disk.admission",
        field: SettingField::Choice(|s| &mut s.disk.admission),
        variables: &[own("DYN_KVBM_DISK_ADMISSION", ValueForm::Plain)],
        doc: "Which blocks of the host tier are written to disk, and when. `write_through`: all, soon; `write_back`: \
              all, when they are about to leave the host; `selective`: of these, what is likely enough to return; \
              `auto`: the one of these that serves best on a sample of the blocks (docs/policies.md). Except with \
              `write_through`, a sixteenth of the host tier (4,096 slots at most) is kept free, and a save that finds \
              less room is cut short. The object tier is fed from disk.",
        in_use: true,
    },
    SettingKey {
        path: "disk.write_budget",
        field: SettingField::Budget(|s| &mut s.disk.write_budget),
        variables: &[own("DYN_KVBM_DISK_WRITE_BUDGET", ValueForm::Plain)],
        doc: "How much is written to the disk tier in a day at most, the blocks likeliest to return first. `0`: nothing. \
              Each start of the process brings an hour's share; prefetches from objects do not count.",
        in_use: true,
    },
    SettingKey {
        path: "object.url",
        field: SettingField::Url(|s| &mut s.object.url, &["file", "s3", "memory"]),
        variables: &[
            upstream(
                "DYN_KVBM_OBJECT_BUCKET",
                ValueForm::Bucket,
                "Short for `s3://BUCKET`; shared by all workers.",
            ),
            own("DYN_KVBM_OBJECT_URL", ValueForm::Plain),
            upstream(
                "DYN_KVBM_OBJECT_ENABLED",
                ValueForm::Switch,
                "Not needed: a bucket or URL is enough. Off removes the tier; on without a bucket or URL is an error.",
            ),
        ],
        doc: "Where the object tier lives.",
        in_use: true,
    },
    SettingKey {
        path: "object.capacity",
        field: SettingField::Limit(|s| &mut s.object.capacity),
        variables: &[
            own("DYN_KVBM_OBJECT_CACHE_GB", ValueForm::Gigabytes),
            upstream(
                "DYN_KVBM_OBJECT_NUM_BLOCKS",
                ValueForm::Blocks,
                "No number is an error, not 0. `0` means no object tier.",
            ),
        ],
        doc: "Size of the object tier. `0`: no object tier, even with a URL (with a warning).",
        in_use: true,
    },
    SettingKey {
        path: "object.endpoint",
        field: SettingField::Url(|s| &mut s.object.endpoint, &["http", "https"]),
        variables: &[upstream("DYN_KVBM_OBJECT_ENDPOINT", ValueForm::Plain, SAME)],
        doc: "S3 endpoint, when it is not AWS.",
        in_use: true,
    },
    SettingKey {
        path: "object.region",
        field: SettingField::Text(|s| &mut s.object.region),
        variables: &[upstream("DYN_KVBM_OBJECT_REGION", ValueForm::Plain, SAME)],
        doc: "S3 region.",
        in_use: true,
    },
    SettingKey {
        path: "object.access_key",
        field: SettingField::Secret(|s| &mut s.object.access_key),
        variables: &[upstream("DYN_KVBM_OBJECT_ACCESS_KEY", ValueForm::Plain, SAME)],
        doc: "S3 access key; goes with the secret key. Shown as `(set)` only.",
        in_use: true,
    },
    SettingKey {
        path: "object.secret_key",
        field: SettingField::Secret(|s| &mut s.object.secret_key),
        variables: &[upstream("DYN_KVBM_OBJECT_SECRET_KEY", ValueForm::Plain, SAME)],
        doc: "S3 secret key. Shown as `(set)` only.",
        in_use: true,
    },
    SettingKey {
        path: "object.backend",
        field: SettingField::Choice(|s| &mut s.object.backend),
        variables: &[own("DYN_KVBM_OBJECT_BACKEND", ValueForm::Plain)],
        doc: "What moves the bytes: a client of our own, or NIXL's plugin OBJ, which must be on and keeps no object.",
        in_use: true,
    },
    SettingKey {
        path: "object.segment_bytes",
        field: SettingField::Bytes(|s| &mut s.object.segment_bytes, 4 * KIB..=256 * MIB),
        variables: &[own("DYN_KVBM_OBJECT_SEGMENT_BYTES", ValueForm::Plain)],
        doc: "Largest segment object; blocks that are flushed together share one. A request must end within 15 s.",
        in_use: true,
    },
    SettingKey {
        path: "object.concurrency",
        field: SettingField::Count(|s| &mut s.object.concurrency, 1..=256),
        variables: &[own("DYN_KVBM_OBJECT_CONCURRENCY", ValueForm::Plain)],
        doc: "Requests in flight; with NIXL, each way.",
        in_use: true,
    },
    SettingKey {
        path: "object.put_budget",
        field: SettingField::Count(|s| &mut s.object.put_budget, 0..=1_000_000_000),
        variables: &[own("DYN_KVBM_OBJECT_PUT_BUDGET", ValueForm::Plain)],
        doc: "Requests that write or list objects in each `object.budget_period_ms`; 0: any number. Spent, nothing is \
              flushed to objects until it refills.",
        in_use: true,
    },
    SettingKey {
        path: "object.get_budget",
        field: SettingField::Count(|s| &mut s.object.get_budget, 0..=1_000_000_000),
        variables: &[own("DYN_KVBM_OBJECT_GET_BUDGET", ValueForm::Plain)],
        doc: "The same for requests that read objects. Spent, blocks that only the object tier has are misses.",
        in_use: true,
    },
    SettingKey {
        path: "object.byte_budget",
        field: SettingField::Limit(|s| &mut s.object.byte_budget),
        variables: &[own("DYN_KVBM_OBJECT_BYTE_BUDGET", ValueForm::Plain)],
        doc: "Bytes of objects sent and received in each `object.budget_period_ms`. Spent, both stop.",
        in_use: true,
    },
    SettingKey {
        path: "object.budget_period_ms",
        field: SettingField::Millis(|s| &mut s.object.budget_period_ms, 1_000..=31 * DAY_MS),
        variables: &[own("DYN_KVBM_OBJECT_BUDGET_PERIOD_MS", ValueForm::Plain)],
        doc: "The period of the object tier's budgets.",
        in_use: true,
    },
    SettingKey {
        path: "object.keep",
        field: SettingField::Flag(|s| &mut s.object.keep),
        variables: &[own("DYN_KVBM_OBJECT_KEEP", ValueForm::Plain)],
        doc: "Leave the objects in place at shutdown. With a fingerprint later processes find them; others find them \
              while this one runs.",
        in_use: true,
    },
    SettingKey {
        path: "object.renewal_ms",
        field: SettingField::Millis(|s| &mut s.object.renewal_ms, 50..=3_600_000),
        variables: &[own("DYN_KVBM_OBJECT_RENEWAL_MS", ValueForm::Plain)],
        doc: "How often a worker records in the store which objects it uses. After ten times as long without it the worker \
              is taken for gone.",
        in_use: true,
    },
    SettingKey {
        path: "object.discover_ms",
        field: SettingField::Millis(|s| &mut s.object.discover_ms, 50..=3_600_000),
        variables: &[own("DYN_KVBM_OBJECT_DISCOVER_MS", ValueForm::Plain)],
        doc: "How often a worker looks for new objects of others with the same fingerprint: a listing, and a request for \
              each of at most 256 objects.",
        in_use: true,
    },
    SettingKey {
        path: "object.collect_after_ms",
        field: SettingField::Millis(|s| &mut s.object.collect_after_ms, 0..=40 * DAY_MS),
        variables: &[own("DYN_KVBM_OBJECT_COLLECT_AFTER_MS", ValueForm::Plain)],
        doc: "Objects of the same fingerprint that no worker uses are deleted at this age, and after at least ten renewals.",
        in_use: true,
    },
    SettingKey {
        path: "object.collect_above",
        field: SettingField::Limit(|s| &mut s.object.collect_above),
        variables: &[own("DYN_KVBM_OBJECT_COLLECT_ABOVE", ValueForm::Plain)],
        doc: "Size of all objects of a fingerprint above which unused ones are deleted sooner, oldest first, but not before \
              ten renewals.",
        in_use: true,
    },
    SettingKey {
        path: "object.older_epoch",
        field: SettingField::Choice(|s| &mut s.object.older_epoch),
        variables: &[own("DYN_KVBM_OBJECT_OLDER_EPOCH", ValueForm::Plain)],
        doc: "What if the store is in a later epoch than the fingerprint of a process that starts: its weights were \
              exchanged since. `refuse`: the start fails; `follow`: it goes on in the store's, for engines that count no \
              epochs; `keep`: it goes on in its own, with weights that were there before. Python's engines that name no \
              epoch follow.",
        in_use: true,
    },
    SettingKey {
        path: "encryption.key_file",
        field: SettingField::Text(|s| &mut s.encryption.key_file),
        variables: &[own("DYN_KVBM_ENCRYPTION_KEY_FILE", ValueForm::Plain)],
        doc: "A file of keys, one `number:key` on each line, the one to encrypt with first; only its owner may read it. A key \
              is 32 random bytes, in hexadecimal or base64.",
        in_use: true,
    },
    SettingKey {
        path: "encryption.key",
        field: SettingField::Secret(|s| &mut s.encryption.key),
        variables: &[own("DYN_KVBM_ENCRYPTION_KEY", ValueForm::Plain)],
        doc: "The same keys themselves, separated by commas. Shown as `(set)` only.",
        in_use: true,
    },
    SettingKey {
        path: "transfer.max_concurrent",
        field: SettingField::Count(|s| &mut s.transfer.max_concurrent, 1..=1024),
        variables: &[upstream("DYN_KVBM_MAX_CONCURRENT_TRANSFERS", ValueForm::Plain, SAME)],
        doc: "Batches in flight per route.",
        in_use: true,
    },
    SettingKey {
        path: "transfer.max_batch",
        field: SettingField::Count(|s| &mut s.transfer.max_batch, 1..=65_536),
        variables: &[
            upstream(
                "DYN_KVBM_TRANSFER_BATCH_SIZE",
                ValueForm::Plain,
                "Another name of `DYN_KVBM_MAX_TRANSFER_BATCH_SIZE`, which wins.",
            ),
            upstream("DYN_KVBM_MAX_TRANSFER_BATCH_SIZE", ValueForm::Plain, SAME),
        ],
        doc: "Blocks in one batch. To and from the object tier: of one segment.",
        in_use: true,
    },
    SettingKey {
        path: "transfer.timeout_ms",
        field: SettingField::Millis(|s| &mut s.transfer.timeout_ms, 100..=HOUR_MS),
        variables: &[own("DYN_KVBM_TRANSFER_TIMEOUT_MS", ValueForm::Plain)],
        doc: "How long a medium may complete nothing before its copies fail as overdue; 30 s at least for the object tier, \
              whose client gives up within 20 s.",
        in_use: true,
    },
    SettingKey {
        path: "transfer.queue_blocks",
        field: SettingField::Count(|s| &mut s.transfer.queue_blocks, 1..=1 << 22),
        variables: &[own("DYN_KVBM_TRANSFER_QUEUE_BLOCKS", ValueForm::Plain)],
        doc: "Blocks that may wait per route; beyond it a save is refused as full.",
        in_use: true,
    },
    SettingKey {
        path: "transfer.copy_threads",
        field: SettingField::Count(|s| &mut s.transfer.copy_threads, 1..=256),
        variables: &[own("DYN_KVBM_TRANSFER_COPY_THREADS", ValueForm::Plain)],
        doc: "Threads that copy between memory tiers.",
        in_use: true,
    },
    SettingKey {
        path: "transfer.scrub_mib_per_second",
        field: SettingField::Count(|s| &mut s.transfer.scrub_mib_per_second, 0..=100_000),
        variables: &[own("DYN_KVBM_SCRUB_MIB_PER_SECOND", ValueForm::Plain)],
        doc: "MiB a second of the disk tier and of a persistent host tier that are verified while the disk is idle. `0`: none.",
        in_use: true,
    },
    SettingKey {
        path: "transfer.prefill_tokens_per_second",
        field: SettingField::Count(|s| &mut s.transfer.prefill_tokens_per_second, 0..=100_000_000),
        variables: &[own("DYN_KVBM_PREFILL_TOKENS_PER_SECOND", ValueForm::Plain)],
        doc: "Prompt tokens that the engine computes in a second. A load ends where the tiers, by their measured pace, are \
              slower. `0`: unknown; everything is loaded.",
        in_use: true,
    },
    SettingKey {
        path: "transfer.shadow_share",
        field: SettingField::Share(|s| &mut s.transfer.shadow_share),
        variables: &[own("DYN_KVBM_SHADOW_SHARE", ValueForm::Plain)],
        doc: "Share of the hits below the device that an engine is asked to compute again and compare (docs/reliability.md).",
        in_use: true,
    },
    SettingKey {
        path: "flush.interval_ms",
        field: SettingField::Millis(|s| &mut s.flush.interval_ms, 1..=DAY_MS),
        variables: &[own("DYN_KVBM_FLUSH_INTERVAL_MS", ValueForm::Plain)],
        doc: "A block is copied to the tier below at the latest this long after it became resident.",
        in_use: true,
    },
    SettingKey {
        path: "flush.dirty_watermark",
        field: SettingField::Share(|s| &mut s.flush.dirty_watermark),
        variables: &[own("DYN_KVBM_FLUSH_DIRTY_WATERMARK", ValueForm::Plain)],
        doc: "Share of a tier that may wait to be flushed before flushing starts at once.",
        in_use: true,
    },
    SettingKey {
        path: "hybrid.checkpoint_blocks",
        field: SettingField::Count(|s| &mut s.hybrid.checkpoint_blocks, 1..=1 << 20),
        variables: &[own("DYN_KVBM_HYBRID_CHECKPOINT_BLOCKS", ValueForm::Plain)],
        doc: "Blocks from one checkpoint of sliding windows and states to the next. Fewer cost more memory, more let a \
              match end earlier. Blocks that were kept with another number are not found.",
        in_use: true,
    },
    SettingKey {
        path: "metrics.enabled",
        field: SettingField::Flag(|s| &mut s.metrics.enabled),
        variables: &[upstream("DYN_KVBM_METRICS", ValueForm::Plain, SAME)],
        doc: "Serve `/metrics`, the state and the live page: docs/observe.md.",
        in_use: true,
    },
    SettingKey {
        path: "metrics.host",
        field: SettingField::Address(|s| &mut s.metrics.host),
        variables: &[own("DYN_KVBM_METRICS_HOST", ValueForm::Plain)],
        doc: "Address to bind. `0.0.0.0` opens it to the network, as upstream does; addresses that other machines reach \
              need `metrics.token_file` or `metrics.token`.",
        in_use: true,
    },
    SettingKey {
        path: "metrics.port",
        field: SettingField::Port(|s| &mut s.metrics.port),
        variables: &[upstream(
            "DYN_KVBM_METRICS_PORT",
            ValueForm::Plain,
            "Bound to this machine alone unless `DYN_KVBM_METRICS_HOST` says otherwise.",
        )],
        doc: "Port to bind; 0: any free one.",
        in_use: true,
    },
    SettingKey {
        path: "metrics.allowed_hosts",
        field: SettingField::Hosts(|s| &mut s.metrics.allowed_hosts),
        variables: &[own("DYN_KVBM_METRICS_ALLOWED_HOSTS", ValueForm::Plain)],
        doc: "Further names by which requests may address it (`Host`), for a proxy on this machine. An IP address and `localhost` \
              always do; at `127.0.0.1` and `::1`, and wherever names are listed, other names are refused: docs/observe.md.",
        in_use: true,
    },
    SettingKey {
        path: "metrics.token_file",
        field: SettingField::Text(|s| &mut s.metrics.token_file),
        variables: &[own("DYN_KVBM_METRICS_TOKEN_FILE", ValueForm::Plain)],
        doc: "A file whose only line is the token of readers (`Authorization: Bearer …`), of 16 bytes or more.",
        in_use: true,
    },
    SettingKey {
        path: "metrics.token",
        field: SettingField::Secret(|s| &mut s.metrics.token),
        variables: &[own("DYN_KVBM_METRICS_TOKEN", ValueForm::Plain)],
        doc: "The same token itself. Shown as `(set)` only.",
        in_use: true,
    },
    SettingKey {
        path: "traces.enabled",
        field: SettingField::Flag(|s| &mut s.traces.enabled),
        variables: &[own("DYN_KVBM_TRACES", ValueForm::Plain)],
        doc: "Send spans of look-ups and transfers to an OpenTelemetry collector: docs/observe.md. Needs the feature `otel`.",
        in_use: true,
    },
    SettingKey {
        path: "traces.endpoint",
        field: SettingField::Url(|s| &mut s.traces.endpoint, &["http", "https"]),
        variables: &[own("DYN_KVBM_TRACES_ENDPOINT", ValueForm::Plain)],
        doc: "The collector, by OTLP over HTTP; `/v1/traces` is appended. `none`: what `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or \
              `OTEL_EXPORTER_OTLP_ENDPOINT` says, else port 4318 of this machine.",
        in_use: true,
    },
    SettingKey {
        path: "traces.nvtx",
        field: SettingField::Flag(|s| &mut s.traces.nvtx),
        variables: &[own("DYN_KVBM_TRACES_NVTX", ValueForm::Plain)],
        doc: "Mark transfers and copies on the timeline of a profiler such as Nsight Systems. Needs NVIDIA's NVTX and the \
              feature `nvtx`.",
        in_use: true,
    },
    SettingKey {
        path: "nixl.backends",
        field: SettingField::Toggles(|s| &mut s.nixl.backends),
        variables: &[upstream(
            "DYN_KVBM_NIXL_BACKEND_",
            ValueForm::Plain,
            "Names may hold `_`, so GDS_MT can be set.",
        )],
        doc: "Plugins of NIXL by name, on or off. None named: UCX alone, if NIXL is installed; all off: none. POSIX serves \
              `disk.backend`, OBJ `object.backend`; the start and `kvbm doctor` report unused ones.",
        in_use: true,
    },
    SettingKey {
        path: "nixl.library",
        field: SettingField::Text(|s| &mut s.nixl.library),
        variables: &[own("DYN_KVBM_NIXL_LIBRARY", ValueForm::Plain)],
        doc: "`libnixl_capi.so`. Unset: that of the Python packages, else one that the system's loader finds.",
        in_use: true,
    },
    // Behind the others of its section: whatever they do not take is a parameter.
    SettingKey {
        path: "nixl",
        field: SettingField::Parameters(|s| &mut s.nixl.parameters),
        variables: &[own("DYN_KVBM_NIXL_PARAM_", ValueForm::Plain)],
        doc: "Parameters of a plugin, as its documentation names them: `[nixl.posix] use_uring = true`, or `DYN_KVBM_NIXL_PARAM_POSIX__USE_URING=true`. A name in capitals alone is one in small letters. No credentials.",
        in_use: true,
    },
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

    /// In the words of the reference.
    pub(crate) fn valid(&self) -> String {
        match &self.takes {
            ValueTakes::Flag => "toggle".to_owned(),
            ValueTakes::Whole(range) => whole_numbers(range),
            ValueTakes::Text => TEXTS.to_owned(),
        }
    }
}

/// Upstream's variables that nothing here follows yet.
pub(crate) static IGNORED: &[IgnoredVariable] = &[
    IgnoredVariable {
        name: "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER",
        takes: ValueTakes::Flag,
        doc: "`disk.admission` (`DYN_KVBM_DISK_ADMISSION`) says which blocks go to disk.",
    },
    IgnoredVariable {
        name: "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY",
        takes: ValueTakes::Whole(0..=100),
        doc: "Priority (`Hints::priority`) orders what leaves a tier first, with `fair_tenants`; it keeps no block out.",
    },
    IgnoredVariable {
        name: "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS",
        takes: ValueTakes::Whole(0..=u64::MAX),
        doc: "There are no workers to wait for.",
    },
    IgnoredVariable {
        name: "DYN_KVBM_LEADER_ZMQ_HOST",
        takes: ValueTakes::Text,
        doc: "There are no workers to reach.",
    },
    IgnoredVariable {
        name: "DYN_KVBM_LEADER_ZMQ_PUB_PORT",
        takes: ValueTakes::Whole(0..=65_535),
        doc: "There are no workers to reach.",
    },
    IgnoredVariable {
        name: "DYN_KVBM_LEADER_ZMQ_ACK_PORT",
        takes: ValueTakes::Whole(0..=65_535),
        doc: "There are no workers to reach.",
    },
    IgnoredVariable {
        name: "DYN_KVBM_CACHE_STATS_MAX_REQUESTS",
        takes: ValueTakes::Whole(0..=u64::MAX),
        doc: "Hits are counted in metrics.",
    },
    IgnoredVariable {
        name: "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS",
        takes: ValueTakes::Whole(0..=u64::MAX),
        doc: "Hits are counted in metrics.",
    },
    IgnoredVariable {
        name: "DYN_KVBM_OBJECT_WRITE_THROUGH",
        takes: ValueTakes::Flag,
        doc: "Blocks reach the object tier by flushing.",
    },
    IgnoredVariable {
        name: "DYN_KVBM_ENABLE_RECORD",
        takes: ValueTakes::Flag,
        doc: "Nothing is recorded.",
    },
];

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
