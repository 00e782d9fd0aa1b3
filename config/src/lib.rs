//! Settings of the KV block manager: plain data with one default each, read from TOML and
//! `DYN_KVBM_*`.
//!
//! [`Settings`] are data, components are objects: nothing here opens a file of the cache or knows a
//! backend.
//!
//! | module | what it holds |
//! |---|---|
//! | [`settings`] | the data and their defaults |
//! | [`value`] | sizes, capacities, budgets, toggles: what they are and how they are written |
//! | `field` | a typed accessor per setting: parse, show, limits |
//! | `registry` | the one table of keys and variables, which everything below reads |
//! | `nixl` | how plugins of NIXL and their parameters are named |
//! | `file` | a TOML file as lines of `key = value` |
//! | `error` | what can be wrong, and where a value came from |
//! | [`loader`] | defaults < file < environment < arguments < command line, and where each value came from |
//! | `validate` | what must hold between settings |
//! | [`mod@reference`] | the generated `docs/configuration.md` |
//!
//! ```
//! use kvbm_settings::{Capacity, Loader};
//!
//! let variables = [("DYN_KVBM_CPU_CACHE_GB", "1.5"), ("DYN_KVBM_BLOCK_BYTES", "64KiB")];
//! let loaded = Loader::new().environment(variables.map(|(name, value)| (name.into(), value.into()))).load()?;
//! assert_eq!(loaded.settings.host.capacity, Some(Capacity::Bytes(1_500_000_000)));
//! # Ok::<(), kvbm_settings::SettingsError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod error;
mod field;
mod file;
pub mod loader;
mod nixl;
pub mod reference;
mod registry;
pub mod settings;
mod validate;
pub mod value;

pub use error::{Origin, SettingsError};
pub use kvbm_policies::{AdmissionKind, EvictionKind};
pub use loader::{Accepted, Argument, Loaded, Loader, Row};
pub use nixl::NIXL_PLUGINS;
pub use reference::reference_markdown;
pub use settings::{
    DeviceBackend, DeviceSettings, DiskBackend, DiskSettings, EncryptionSettings, FlushSettings,
    HostSettings, HybridSettings, MAX_BLOCK_BYTES, MAX_DISK_THREADS, MAX_TIER_BLOCKS,
    MetricsSettings, NixlSettings, ObjectBackend, ObjectSettings, OlderEpoch, PeerNixl,
    PeerSettings, Settings, TraceSettings, TransferSettings,
};
pub use validate::MIN_TOKEN_BYTES;
pub use value::{Capacity, InvalidValue, WriteBudget, format_size, parse_size};
