//! What must hold of the settings as a whole.

use kvbm_policies::AdmissionKind;

use crate::error::{Origin, SettingsError};
use crate::registry::KEYS;
use crate::settings::{
    DiskBackend, MAX_DISK_THREADS, MAX_TIER_BLOCKS, ObjectBackend, PeerNixl, Settings,
};
use crate::value::{Capacity, InvalidValue, format_size};

/// A token of fewer bytes is soon guessed.
pub const MIN_TOKEN_BYTES: usize = 16;

impl Settings {
    /// Checks every value and what holds between them. [`Loader::load`](crate::Loader::load) has
    /// done so already.
    ///
    /// # Errors
    /// [`SettingsError::Invalid`] for the first value that is out of its range, for a tier without
    /// a block size, a size that holds less than one block or more than [`MAX_TIER_BLOCKS`], one
    /// half of a pair of S3 keys, and whatever else no manager can be opened with on any machine.
    pub fn validate(&self) -> Result<(), SettingsError> {
        self.check(|_| Origin::Program)
    }

    /// [`Settings::validate`], naming the origin of what is wrong.
    pub(crate) fn check(&self, origin: impl Fn(&str) -> Origin) -> Result<(), SettingsError> {
        let violation = self
            .check_values()
            // Values first: what follows computes with them.
            .and_then(|()| self.check_sizes())
            .and_then(|()| self.check_disk())
            .and_then(|()| self.check_keys())
            .and_then(|()| self.check_encryption())
            .and_then(|()| self.check_metrics())
            .and_then(|()| self.check_peers())
            .and_then(|()| self.check_nixl());
        violation.map_err(|(path, problem)| SettingsError::Invalid {
            key: path.to_owned(),
            value: self.shown(path),
            origin: origin(path),
            problem,
        })
    }

    /// Each value would be accepted if it were written down.
    fn check_values(&self) -> Result<(), Violation> {
        let scratch = &mut Settings::default();
        for key in KEYS {
            for raw in key.field.values(self) {
                // As if read from a file: settings that an engine fills in by hand get no rules of
                // their own.
                key.field.assign(scratch, &raw).map_err(|problem| (key.path, problem))?;
            }
        }
        Ok(())
    }

    fn check_sizes(&self) -> Result<(), Violation> {
        let tiers = [
            ("device.capacity", self.device.capacity),
            ("host.capacity", self.host.capacity),
            ("disk.capacity", self.disk.capacity),
            ("object.capacity", self.object.capacity.filter(|_| self.object.place().is_some())),
        ];
        for (path, capacity) in tiers {
            if let Some(capacity) = capacity {
                self.check_capacity(capacity).map_err(|problem| (path, problem))?;
            }
        }
        self.check_staging()?;
        self.check_persistence()?;
        if self.object.place().is_some() { self.check_segments() } else { Ok(()) }
    }

    fn check_capacity(&self, capacity: Capacity) -> Result<(), InvalidValue> {
        let block_bytes = self.block_bytes.ok_or_else(no_block_size)?;
        let blocks = capacity.blocks(block_bytes);
        match blocks {
            0 => {
                let valid = format!(
                    "1 to {MAX_TIER_BLOCKS} blocks of {} (block_bytes)",
                    format_size(block_bytes)
                );
                Err(InvalidValue::new("holds less than one block", valid))
            }
            blocks if blocks <= u64::from(MAX_TIER_BLOCKS) => Ok(()),
            blocks => {
                let valid = format!("at most {MAX_TIER_BLOCKS}, or larger blocks (block_bytes)");
                Err(InvalidValue::new(format!("a tier of {blocks} blocks is too large"), valid))
            }
        }
    }

    /// Staging blocks lie in the same region as the host tier.
    fn check_staging(&self) -> Result<(), Violation> {
        let has_lower = self.disk.capacity.is_some() || self.object.place().is_some();
        let (Some(capacity), true) = (self.host.capacity, has_lower) else { return Ok(()) };
        let blocks = capacity.blocks(self.block_bytes.unwrap_or_default());
        let staging = u64::from(self.host.staging_blocks);
        if blocks + staging <= u64::from(MAX_TIER_BLOCKS) {
            return Ok(());
        }
        let reason = format!("a tier of {blocks} blocks and {staging} staging blocks is too large");
        let valid = format!(
            "at most {MAX_TIER_BLOCKS} together with host.staging_blocks, or larger blocks"
        );
        Err(("host.capacity", InvalidValue::new(reason, valid)))
    }

    /// Something persists, and its index has a place only if it does.
    fn check_persistence(&self) -> Result<(), Violation> {
        let host = &self.host;
        if host.persist.is_some() && host.capacity.is_none() {
            let problem = InvalidValue::new("there is no host tier", "set host.capacity, or none");
            return Err(("host.persist", problem));
        }
        if host.persist_index.is_some() && host.persist.is_none() {
            let problem = InvalidValue::new("nothing persists", "set host.persist too, or none");
            return Err(("host.persist_index", problem));
        }
        Ok(())
    }

    fn check_disk(&self) -> Result<(), Violation> {
        let disk = &self.disk;
        let has_threads = matches!(disk.backend, DiskBackend::Threads | DiskBackend::Gds);
        if has_threads && disk.queue_depth > MAX_DISK_THREADS {
            let backend = disk.backend.name();
            let valid = format!(
                "1 to {MAX_DISK_THREADS} where disk.backend is {backend}, or another disk.backend"
            );
            return Err((
                "disk.queue_depth",
                InvalidValue::new("this would start too many threads", valid),
            ));
        }
        let is_ruled = disk.admission != AdmissionKind::WriteThrough || disk.write_budget.is_some();
        if is_ruled && disk.capacity.is_some() && self.host.capacity.is_none() {
            let path =
                if disk.write_budget.is_some() { "disk.write_budget" } else { "disk.admission" };
            let reason = "disk.admission and disk.write_budget choose among the blocks of the host tier, and there is none";
            return Err((
                path,
                InvalidValue::new(reason, "set host.capacity, or leave both at their defaults"),
            ));
        }
        Ok(())
    }

    fn check_segments(&self) -> Result<(), Violation> {
        let block_bytes = self.block_bytes.ok_or_else(|| ("object.url", no_block_size()))?;
        if self.object.segment_bytes >= block_bytes {
            return Ok(());
        }
        let valid = format!("at least {} (block_bytes)", format_size(block_bytes));
        Err(("object.segment_bytes", InvalidValue::new("holds less than one block", valid)))
    }

    fn check_keys(&self) -> Result<(), Violation> {
        let alone = || {
            InvalidValue::new(
                "one half of a pair",
                "object.access_key and object.secret_key, or neither",
            )
        };
        match (&self.object.access_key, &self.object.secret_key) {
            (Some(_), None) => Err(("object.access_key", alone())),
            (None, Some(_)) => Err(("object.secret_key", alone())),
            _ => Ok(()),
        }
    }

    fn check_encryption(&self) -> Result<(), Violation> {
        let encryption = &self.encryption;
        if encryption.key.is_some() && encryption.key_file.is_some() {
            let problem = InvalidValue::new(
                "there are two places of keys",
                "one of encryption.key and encryption.key_file",
            );
            return Err(("encryption.key", problem));
        }
        if encryption.is_on() && self.disk.backend == DiskBackend::Gds {
            let reason = "blocks that go straight between disk and GPU are not encrypted";
            let valid =
                "auto, uring, threads or nixl, or neither encryption.key_file nor encryption.key";
            return Err(("disk.backend", InvalidValue::new(reason, valid)));
        }
        Ok(())
    }

    /// Others than this machine show a token.
    fn check_metrics(&self) -> Result<(), Violation> {
        let metrics = &self.metrics;
        SharedSecret {
            given: metrics.token.as_ref(),
            file: metrics.token_file.as_ref(),
            is_open: metrics.enabled && !metrics.host.is_loopback(),
            paths: ["metrics.token", "metrics.token_file", "metrics.host"],
            word: "token",
            risk: "others could read what the cache does",
            valid: "127.0.0.1 or ::1, or a token: set metrics.token_file (DYN_KVBM_METRICS_TOKEN_FILE) too",
        }
        .check()
    }

    /// Others than this machine know the secret or have a certificate, and there is one list of
    /// peers.
    fn check_peers(&self) -> Result<(), Violation> {
        let peers = &self.peers;
        check_whole(
            "TLS takes",
            [
                ("peers.tls_certificate", &peers.tls_certificate),
                ("peers.tls_key", &peers.tls_key),
                ("peers.tls_ca", &peers.tls_ca),
            ],
        )?;
        check_whole(
            "a user of etcd takes",
            [
                ("peers.etcd_user", &peers.etcd_user),
                ("peers.etcd_password_file", &peers.etcd_password_file),
            ],
        )?;
        SharedSecret {
            given: peers.secret.as_ref(),
            file: peers.secret_file.as_ref(),
            is_open: peers.enabled && !peers.host.is_loopback() && peers.tls_ca.is_none(),
            paths: ["peers.secret", "peers.secret_file", "peers.host"],
            word: "secret",
            risk: "others could read the cache",
            valid: "127.0.0.1 or ::1, or a proof: set peers.secret_file (DYN_KVBM_PEERS_SECRET_FILE), or peers.tls_certificate, \
                    peers.tls_key and peers.tls_ca, too",
        }
        .check()?;
        if peers.lists().count() > 1 {
            let valid = "one of peers.addresses, peers.file and peers.etcd";
            return Err((
                "peers.addresses",
                InvalidValue::new("there are two lists of peers", valid),
            ));
        }
        if peers.enabled && self.host.capacity.is_none() {
            let valid = "false, or a host tier: set host.capacity (DYN_KVBM_CPU_CACHE_GB)";
            return Err((
                "peers.enabled",
                InvalidValue::new("peers read the host tier, and there is none", valid),
            ));
        }
        Ok(())
    }

    /// NIXL needs its plugin on, and a store that it reaches.
    fn check_nixl(&self) -> Result<(), Violation> {
        if self.peers.nixl == PeerNixl::Required && !self.nixl.is_enabled("UCX") {
            return Err(("peers.nixl", plugin_off("UCX")));
        }
        if self.disk.backend == DiskBackend::Nixl && !self.nixl.is_enabled("POSIX") {
            return Err(("disk.backend", plugin_off("POSIX")));
        }
        if self.object.backend != ObjectBackend::Nixl {
            return Ok(());
        }
        if !self.nixl.is_enabled("OBJ") {
            return Err(("object.backend", plugin_off("OBJ")));
        }
        if self.object.place().is_some_and(|url| !url.starts_with("s3://")) {
            let problem = InvalidValue::new(
                "NIXL reaches no other stores",
                "s3://bucket/prefix (object.url)",
            );
            return Err(("object.backend", problem));
        }
        if self.object.keep {
            let problem =
                InvalidValue::new("the objects could not be found again", "false (object.keep)");
            return Err(("object.backend", problem));
        }
        Ok(())
    }

    fn shown(&self, path: &str) -> String {
        let Some(key) = KEYS.iter().find(|key| key.path == path) else { return String::new() };
        key.field.values(self).iter().map(|raw| key.field.shown(raw)).collect::<Vec<_>>().join(", ")
    }
}

/// The key that is wrong, and how.
type Violation = (&'static str, InvalidValue);

/// What belongs together is set together: an error names the first that is missing.
fn check_whole<const KEYS: usize>(
    what: &str,
    keys: [(&'static str, &Option<String>); KEYS],
) -> Result<(), Violation> {
    let Some((given, _)) = keys.iter().find(|(_, value)| value.is_some()) else { return Ok(()) };
    let Some((missing, _)) = keys.iter().find(|(_, value)| value.is_none()) else { return Ok(()) };
    let problem = format!("not set, and {given} is");
    let valid =
        format!("set it too: {what} {}; or none of them", keys.map(|(key, _)| key).join(" and "));
    Err((missing, InvalidValue::new(problem, valid)))
}

fn plugin_off(plugin: &str) -> InvalidValue {
    let remedy = format!(
        "turn it on with nixl.backends.{plugin} (DYN_KVBM_NIXL_BACKEND_{plugin}=true) first"
    );
    InvalidValue::new(format!("the NIXL plugin {plugin} is off"), remedy)
}

fn no_block_size() -> InvalidValue {
    InvalidValue::new(
        "a tier needs to know how large a block is",
        "set block_bytes (DYN_KVBM_BLOCK_BYTES) too",
    )
}

/// What others show who reach an address: it is needed where other machines do.
struct SharedSecret<'a> {
    given: Option<&'a String>,
    file: Option<&'a String>,
    /// Other machines reach the address.
    is_open: bool,
    /// Of the secret itself, of its file, and of the address.
    paths: [&'static str; 3],
    word: &'static str,
    risk: &'static str,
    /// Which addresses are valid.
    valid: &'static str,
}

impl SharedSecret<'_> {
    fn check(&self) -> Result<(), Violation> {
        let [given, file, host] = self.paths;
        if self.given.is_some() && self.file.is_some() {
            let problem = format!("there are two places of the {}", self.word);
            return Err((given, InvalidValue::new(problem, format!("one of {given} and {file}"))));
        }
        if self.is_open && self.given.is_none() && self.file.is_none() {
            return Err((host, InvalidValue::new(self.risk, self.valid)));
        }
        if self.given.is_some_and(|secret| secret.len() < MIN_TOKEN_BYTES) {
            return Err((given, InvalidValue::new("it is short", "16 bytes or more")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    type Change = fn(&mut Settings);

    fn with(change: impl FnOnce(&mut Settings)) -> Result<(), SettingsError> {
        let mut settings = Settings { block_bytes: Some(65_536), ..Settings::default() };
        change(&mut settings);
        settings.validate()
    }

    /// That `result` is an error which names `key` and says `reason`.
    #[track_caller]
    fn assert_refused(result: Result<(), SettingsError>, key: &str, reason: &str) {
        let message = result.expect_err(key).to_string();
        assert!(message.starts_with(&format!("{key} = ")) && message.contains(reason), "{message}");
    }

    #[test]
    fn the_defaults_are_valid() {
        Settings::default().validate().expect("no tier, nothing to be wrong");
    }

    #[test]
    fn every_tier_needs_a_block_size() {
        let tiers: [(&str, Change); 4] = [
            ("device.capacity", |s| s.device.capacity = Some(Capacity::Blocks(1))),
            ("host.capacity", |s| s.host.capacity = Some(Capacity::Bytes(1 << 30))),
            ("disk.capacity", |s| s.disk.capacity = Some(Capacity::Blocks(1))),
            ("object.url", |s| s.object.url = Some("memory:///".to_owned())),
        ];
        for (key, choose) in tiers {
            with(choose).expect("sound with a block size");
            let result = with(|settings| {
                choose(settings);
                settings.block_bytes = None;
            });
            assert_refused(result, key, "DYN_KVBM_BLOCK_BYTES");
        }
    }

    #[test]
    fn tiers_hold_a_block_or_more_that_can_be_numbered() {
        let less = |capacity| with(|s| s.host.capacity = Some(capacity));
        assert_refused(less(Capacity::Bytes(65_535)), "host.capacity", "less than one block");
        assert_refused(less(Capacity::Blocks(0)), "host.capacity", "less than one block");
        let most = u64::from(MAX_TIER_BLOCKS);
        less(Capacity::Blocks(most)).expect("as many as can be numbered");
        assert_refused(
            less(Capacity::Blocks(most + 1)),
            "host.capacity",
            "a tier of 1073741817 blocks is too large",
        );
        assert_refused(less(Capacity::Bytes(u64::MAX)), "host.capacity", "too large");
    }

    #[test]
    fn the_host_tier_and_its_staging_blocks_are_numbered_together() {
        let with_staging = |staging, has_disk: bool| {
            with(|s| {
                s.host.capacity = Some(Capacity::Blocks(u64::from(MAX_TIER_BLOCKS) - 64));
                s.host.staging_blocks = staging;
                s.disk.capacity = has_disk.then_some(Capacity::Blocks(1));
            })
        };
        with_staging(64, true).expect("they fit");
        with_staging(65, false).expect("nothing is staged without a tier below");
        assert_refused(with_staging(65, true), "host.capacity", "host.staging_blocks");
    }

    #[test]
    fn what_persists_is_a_host_tier() {
        let with_places = |capacity, persist: Option<&str>, index: Option<&str>| {
            with(|s| {
                s.host.capacity = capacity;
                s.host.persist = persist.map(Into::into);
                s.host.persist_index = index.map(Into::into);
            })
        };
        let (some, shm) = (Some(Capacity::Blocks(1)), Some("/dev/shm/kvbm"));
        with_places(some, shm, None).expect("the index lies beside it");
        with_places(some, Some("/hugepages"), shm).expect("the index lies elsewhere");
        assert_refused(with_places(None, shm, None), "host.persist", "set host.capacity");
        assert_refused(with_places(some, None, shm), "host.persist_index", "set host.persist");
    }

    #[test]
    fn no_more_threads_start_than_serve_a_drive() {
        let with_depth = |backend, depth| {
            with(|s| {
                s.disk.backend = backend;
                s.disk.queue_depth = depth;
            })
        };
        for backend in [DiskBackend::Threads, DiskBackend::Gds] {
            with_depth(backend, 256).expect("as many as allowed");
            assert_refused(with_depth(backend, 257), "disk.queue_depth", "1 to 256");
        }
        with_depth(DiskBackend::Uring, 4096).expect("a ring is no thread");
    }

    #[test]
    fn rules_for_the_disk_need_a_host_tier() {
        let changes: [(&str, Change); 2] = [
            ("disk.admission", |s| s.disk.admission = AdmissionKind::Selective),
            ("disk.write_budget", |s| {
                s.disk.write_budget = Some(crate::WriteBudget::BytesPerDay(1));
            }),
        ];
        for (key, change) in changes {
            let result = with(|s| {
                s.disk.capacity = Some(Capacity::Blocks(1));
                change(s);
            });
            assert_refused(result, key, "set host.capacity");
        }
    }

    #[test]
    fn an_object_tier_without_room_needs_nothing() {
        let off = Settings {
            object: crate::ObjectSettings {
                url: Some("memory:///".to_owned()),
                capacity: Some(Capacity::Bytes(0)),
                ..crate::ObjectSettings::default()
            },
            ..Settings::default()
        };
        off.validate().expect("there is no tier that could need a block size");
        assert_eq!(off.object.place(), None);
    }

    #[test]
    fn a_segment_holds_a_block() {
        let result = with(|s| {
            s.object.url = Some("memory:///".to_owned());
            s.object.segment_bytes = 65_535;
        });
        assert_refused(result, "object.segment_bytes", "at least 64KiB");
    }

    #[test]
    fn values_are_held_to_their_ranges_whoever_set_them() {
        assert_refused(
            with(|s| s.flush.dirty_watermark = f64::NAN),
            "flush.dirty_watermark",
            "0 to 1",
        );
        assert_refused(with(|s| s.flush.dirty_watermark = 1.5), "flush.dirty_watermark", "0 to 1");
        assert_refused(with(|s| s.disk.dirs.clear()), "disk.dirs", "without a name");
        assert_refused(with(|s| s.disk.queue_depth = 0), "disk.queue_depth", "from 1");
        assert_refused(with(|s| s.block_bytes = Some(0)), "block_bytes", "from 1");
        assert_refused(
            with(|s| s.object.url = Some("gs://bucket".to_owned())),
            "object.url",
            "s3://",
        );
    }

    #[test]
    fn nixl_needs_its_plugin_and_a_store_that_it_reaches() {
        assert_refused(with(|s| s.disk.backend = DiskBackend::Nixl), "disk.backend", "POSIX=true");
        let without_ucx = with(|s| {
            s.peers.nixl = PeerNixl::Required;
            s.nixl.backends.insert("UCX".to_owned(), false);
        });
        assert_refused(without_ucx, "peers.nixl", "UCX=true");
        assert_refused(
            with(|s| s.object.backend = ObjectBackend::Nixl),
            "object.backend",
            "OBJ=true",
        );
        let on = |s: &mut Settings| {
            s.disk.backend = DiskBackend::Nixl;
            s.object.backend = ObjectBackend::Nixl;
            s.object.url = Some("s3://bucket".to_owned());
            s.nixl.backends = [("POSIX".to_owned(), true), ("OBJ".to_owned(), true)].into();
        };
        with(on).expect("sound");
        let files = |s: &mut Settings| s.object.url = Some("file:///objects".to_owned());
        for (change, reason) in
            [(files as Change, "s3://"), (|s| s.object.keep = true, "object.keep")]
        {
            let result = with(|s| {
                on(s);
                change(s);
            });
            assert_refused(result, "object.backend", reason);
        }
    }

    #[test]
    fn keys_come_in_pairs_and_stay_hidden() {
        let alone = with(|s| s.object.secret_key = Some("hunter2".to_owned()));
        assert!(!format!("{alone:?}").contains("hunter2"));
        assert_refused(alone, "object.secret_key", "\"(set)\"");
        assert_refused(
            with(|s| s.object.access_key = Some("hunter2".to_owned())),
            "object.access_key",
            "pair",
        );
        with(|s| {
            s.object.access_key = Some("id".to_owned());
            s.object.secret_key = Some("hunter2".to_owned());
        })
        .expect("a pair");
    }

    #[test]
    fn peers_have_all_of_what_belongs_together_or_none() {
        let tls: [(&str, Change); 3] = [
            ("peers.tls_certificate", |s| s.peers.tls_certificate = Some("a.pem".to_owned())),
            ("peers.tls_key", |s| s.peers.tls_key = Some("a.key".to_owned())),
            ("peers.tls_ca", |s| s.peers.tls_ca = Some("ca.pem".to_owned())),
        ];
        let user: [(&str, Change); 2] = [
            ("peers.etcd_user", |s| s.peers.etcd_user = Some("kvbm".to_owned())),
            ("peers.etcd_password_file", |s| s.peers.etcd_password_file = Some("p".to_owned())),
        ];
        for keys in [&tls[..], &user] {
            for (missing, _) in keys {
                let others = keys.iter().filter(|(name, _)| name != missing);
                let result = with(|s| others.for_each(|(_, set)| set(s)));
                assert_refused(result, missing, "or none of them");
            }
            with(|s| keys.iter().for_each(|(_, set)| set(s))).expect("all of them");
        }
    }

    #[test]
    fn peers_of_other_machines_need_a_secret_or_certificates() {
        let open = |s: &mut Settings| {
            s.host.capacity = Some(Capacity::Blocks(1));
            s.peers.enabled = true;
            s.peers.host = IpAddr::from([10, 0, 0, 1]);
        };
        assert_refused(with(open), "peers.host", "others could read the cache");
        let proofs: [Change; 2] = [
            |s| s.peers.secret_file = Some("secret".to_owned()),
            |s| {
                s.peers.tls_certificate = Some("a.pem".to_owned());
                s.peers.tls_key = Some("a.key".to_owned());
                s.peers.tls_ca = Some("ca.pem".to_owned());
            },
        ];
        for prove in proofs {
            with(|s| {
                open(s);
                prove(s);
            })
            .expect("it proves who asks");
        }
    }

    #[test]
    fn encryption_has_one_hidden_place_of_keys_and_no_bypass() {
        let both = with(|s| {
            s.encryption.key = Some("1:hunter2".to_owned());
            s.encryption.key_file = Some("/keys".to_owned());
        });
        assert!(!format!("{both:?}").contains("hunter2"));
        assert_refused(both, "encryption.key", "encryption.key_file");
        let gds: Change = |s| {
            s.encryption.key = Some("1:hunter2".to_owned());
            s.disk.backend = DiskBackend::Gds;
        };
        assert_refused(with(gds), "disk.backend", "not encrypted");
        let mut settings = Settings::default();
        settings.encryption.key = Some("1:hunter2".to_owned());
        settings.validate().expect("sound");
        assert!(!format!("{settings:?}").contains("hunter2"));
    }
}
