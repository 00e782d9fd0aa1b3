//! Settings of the KV block manager: plain data with one default each, read from TOML and `DYN_KVBM_*`.
//!
//! [`Settings`] are data, components are objects: nothing here opens a file of the cache or knows a backend.

pub mod settings;

pub use settings::{
    Capacity, DeviceSettings, DiskBackend, DiskSettings, EvictionPolicy, FlushSettings, HostSettings, MetricsSettings,
    ObjectSettings, Settings, TransferSettings,
};
