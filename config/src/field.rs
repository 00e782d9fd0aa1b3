//! A typed accessor per setting: one place that parses it, shows it and knows its limits.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use kvbm_policies::{AdmissionKind, EvictionKind};

use crate::nixl::{parameter_name, plugin_name};
use crate::settings::{
    DeviceBackend, DiskBackend, ObjectBackend, OlderEpoch, PeerNixl, SECRET_SET, Settings,
    URL_HIDDEN, may_hold_credentials, shown_parameter, shown_url,
};
use crate::value::{
    BOOLEANS, BUDGETS, CAPACITIES, Capacity, DIRECTORIES, DIRECTORY, HOSTS, InvalidValue, LIMITS,
    NONE, SIZES, TENANT_QUOTAS, TENANT_WEIGHTS, TEXTS, WriteBudget, format_size, parse_boolean,
    parse_directories, parse_directory, parse_hosts, parse_quotas, parse_share, parse_size,
    parse_text, parse_weights, parse_whole, split_directories, text_by_tenant, whole_numbers,
};

/// How a limit is written that is not set.
pub(crate) const UNLIMITED: &str = "unlimited";

/// A value before it is parsed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RawValue {
    /// A scalar.
    One(String),
    /// A TOML array.
    Many(Vec<String>),
    /// The value of one member of a family.
    Member { name: String, value: String },
}

impl RawValue {
    /// The value as text. May hold a secret: show [`SettingField::shown`] instead.
    fn text(&self) -> String {
        match self {
            Self::One(text) | Self::Member { value: text, .. } => text.clone(),
            Self::Many(texts) => texts.join(", "),
        }
    }
}

/// Where a setting lives in [`Settings`]. One accessor serves reading and writing: reading goes
/// through a copy.
type At<T> = fn(&mut Settings) -> &mut T;

/// A setting's place and type.
pub(crate) enum SettingField {
    Flag(At<bool>),
    Count(At<u32>, RangeInclusive<u32>),
    Millis(At<u64>, RangeInclusive<u64>),
    Bytes(At<u64>, RangeInclusive<u64>),
    BytesIfSet(At<Option<u64>>, RangeInclusive<u64>),
    /// Of a tier that is there if it has one.
    Capacity(At<Option<Capacity>>),
    /// Of a tier that something else brings into being: unlimited unless it is set.
    Limit(At<Option<Capacity>>),
    Budget(At<Option<WriteBudget>>),
    Share(At<f64>),
    Port(At<u16>),
    Address(At<IpAddr>),
    /// A URL of one of these schemes.
    Url(At<Option<String>>, &'static [&'static str]),
    Text(At<Option<String>>),
    Secret(At<Option<String>>),
    Directory(At<Option<PathBuf>>),
    Directories(At<Vec<PathBuf>>),
    /// Names of hosts.
    Hosts(At<Vec<String>>),
    /// By tenant.
    TenantWeights(At<BTreeMap<u32, f64>>),
    /// By tenant.
    TenantQuotas(At<BTreeMap<u32, Capacity>>),
    Choice(fn(&mut Settings) -> &mut dyn NamedChoice),
    /// A family: `path.NAME` is on or off.
    Toggles(At<BTreeMap<String, bool>>),
    /// A family of families: `path.plugin.name` is a text.
    Parameters(At<BTreeMap<String, BTreeMap<String, String>>>),
}

impl SettingField {
    /// Parses `raw` into its place.
    pub(crate) fn assign(
        &self,
        settings: &mut Settings,
        raw: &RawValue,
    ) -> Result<(), InvalidValue> {
        match (self, raw) {
            (Self::Toggles(at), RawValue::Member { name, value }) => {
                at(settings).insert(plugin_name(name)?, parse_boolean(value)?);
                Ok(())
            }
            (Self::Parameters(at), RawValue::Member { name, value }) => {
                let (plugin, name) = parameter_name(name)?;
                at(settings).entry(plugin).or_default().insert(name, parse_parameter(value)?);
                Ok(())
            }
            (Self::Directories(at), RawValue::One(text)) => {
                put(at(settings), parse_directories(&split_directories(text)))
            }
            (Self::Directories(at), RawValue::Many(names)) => {
                put(at(settings), parse_directories(names))
            }
            (Self::Hosts(at), RawValue::Many(names)) => {
                put(at(settings), parse_hosts(names.iter().map(String::as_str)))
            }
            (_, RawValue::One(text)) => self.assign_text(settings, text),
            _ => Err(InvalidValue::new("not a single value", self.valid())),
        }
    }

    fn assign_text(&self, settings: &mut Settings, text: &str) -> Result<(), InvalidValue> {
        match self {
            Self::Flag(at) => put(at(settings), parse_boolean(text)),
            Self::Count(at, range) => {
                let range = u64::from(*range.start())..=u64::from(*range.end());
                put(at(settings), parse_whole(text, &range).map(|count| count as u32))
            }
            Self::Millis(at, range) => put(at(settings), parse_whole(text, range)),
            Self::Bytes(at, range) => put(at(settings), parse_size_in(text, range)),
            Self::BytesIfSet(at, range) => {
                put(at(settings), if_set(text, |text| parse_size_in(text, range)))
            }
            Self::Capacity(at) => put(at(settings), if_set(text, str::parse).map(some_room)),
            Self::Limit(at) => put(at(settings), parse_limit(text)),
            Self::Budget(at) => put(at(settings), if_set(text, str::parse)),
            Self::Share(at) => put(at(settings), parse_share(text)),
            Self::Port(at) => {
                put(at(settings), parse_whole(text, &(0..=65_535)).map(|port| port as u16))
            }
            Self::Address(at) => {
                let address = IpAddr::from_str(text.trim());
                put(
                    at(settings),
                    address.map_err(|_| InvalidValue::new("not an IP address", self.valid())),
                )
            }
            Self::Url(at, schemes) => {
                put(at(settings), if_set(text, |text| parse_url(text, schemes)))
            }
            Self::Text(at) | Self::Secret(at) => put(at(settings), if_set(text, parse_text)),
            Self::Directory(at) => put(at(settings), if_set(text, parse_directory)),
            Self::Hosts(at) => put(
                at(settings),
                if_set(text, |text| parse_hosts(text.split(','))).map(Option::unwrap_or_default),
            ),
            Self::TenantWeights(at) => put(at(settings), parse_weights(text)),
            Self::TenantQuotas(at) => put(at(settings), parse_quotas(text)),
            Self::Choice(at) => at(settings).choose(text.trim()),
            Self::Directories(_) | Self::Toggles(_) | Self::Parameters(_) => {
                Err(InvalidValue::new("not a single value", self.valid()))
            }
        }
    }

    /// The value as [`SettingField::assign`] takes it: nothing when unset, one per member of a
    /// family.
    pub(crate) fn values(&self, settings: &Settings) -> Vec<RawValue> {
        // An accessor borrows for writing, since one serves both ways.
        let settings = &mut settings.clone();
        let text = match self {
            Self::Flag(at) => Some(at(settings).to_string()),
            Self::Count(at, _) => Some(at(settings).to_string()),
            Self::Millis(at, _) => Some(at(settings).to_string()),
            Self::Bytes(at, _) => Some(format_size(*at(settings))),
            Self::BytesIfSet(at, _) => at(settings).map(format_size),
            Self::Capacity(at) => at(settings).map(|capacity| capacity.to_string()),
            Self::Limit(at) => Some(limit_text(*at(settings))),
            Self::Budget(at) => at(settings).map(|budget| budget.to_string()),
            Self::Share(at) => Some(at(settings).to_string()),
            Self::Port(at) => Some(at(settings).to_string()),
            Self::Address(at) => Some(at(settings).to_string()),
            Self::Url(at, _) | Self::Text(at) | Self::Secret(at) => at(settings).clone(),
            Self::Directory(at) => at(settings).as_ref().map(|path| path.display().to_string()),
            Self::TenantWeights(at) => text_by_tenant(at(settings)),
            Self::TenantQuotas(at) => text_by_tenant(at(settings)),
            Self::Choice(at) => Some(at(settings).name().to_owned()),
            Self::Directories(at) => {
                return vec![RawValue::Many(
                    at(settings).iter().map(|path| path.display().to_string()).collect(),
                )];
            }
            Self::Hosts(at) => match at(settings) {
                hosts if hosts.is_empty() => None,
                hosts => return vec![RawValue::Many(hosts.clone())],
            },
            Self::Toggles(at) => {
                return at(settings).iter().map(|(name, on)| member(name, *on)).collect();
            }
            Self::Parameters(at) => {
                return at(settings)
                    .iter()
                    .flat_map(|(plugin, of)| parameters(plugin, of))
                    .collect();
            }
        };
        text.map(RawValue::One).into_iter().collect()
    }

    /// `raw` as it may be shown.
    pub(crate) fn shown(&self, raw: &RawValue) -> String {
        match self {
            Self::Secret(_) => SECRET_SET.to_owned(),
            Self::Url(..) => match raw {
                RawValue::One(url) => shown_url(url).to_owned(),
                // No setting takes several.
                RawValue::Many(_) | RawValue::Member { .. } => URL_HIDDEN.to_owned(),
            },
            Self::Parameters(_) => shown_member(raw),
            _ => raw.text(),
        }
    }

    /// The name of a member of a family below the family's path, whatever its source.
    pub(crate) fn member(&self, name: &str) -> String {
        match self {
            Self::Parameters(_) => parameter_name(name)
                .map_or_else(|_| name.to_owned(), |(plugin, name)| parameter_path(&plugin, &name)),
            _ => name.to_ascii_uppercase(),
        }
    }

    /// What it takes, in words.
    pub(crate) fn valid(&self) -> String {
        match self {
            Self::Flag(_) | Self::Toggles(_) => BOOLEANS.to_owned(),
            Self::Count(_, range) => {
                whole_numbers(&(u64::from(*range.start())..=u64::from(*range.end())))
            }
            Self::Millis(_, range) => format!("{}, in milliseconds", whole_numbers(range)),
            Self::Bytes(_, range) | Self::BytesIfSet(_, range) => sizes(range),
            Self::Capacity(_) => CAPACITIES.to_owned(),
            Self::Limit(_) => LIMITS.to_owned(),
            Self::Budget(_) => BUDGETS.to_owned(),
            Self::Share(_) => "a number from 0 to 1".to_owned(),
            Self::TenantWeights(_) => TENANT_WEIGHTS.to_owned(),
            Self::TenantQuotas(_) => TENANT_QUOTAS.to_owned(),
            Self::Port(_) => whole_numbers(&(0..=65_535)),
            Self::Address(_) => "an IPv4 or IPv6 address".to_owned(),
            Self::Url(_, schemes) => urls(schemes),
            Self::Text(_) | Self::Secret(_) | Self::Parameters(_) => TEXTS.to_owned(),
            Self::Directory(_) => DIRECTORY.to_owned(),
            Self::Directories(_) => DIRECTORIES.to_owned(),
            Self::Hosts(_) => HOSTS.to_owned(),
            Self::Choice(at) => at(&mut Settings::default()).names().join(", "),
        }
    }
}

fn put<T>(place: &mut T, parsed: Result<T, InvalidValue>) -> Result<(), InvalidValue> {
    *place = parsed?;
    Ok(())
}

fn if_set<T>(
    text: &str,
    parse: impl FnOnce(&str) -> Result<T, InvalidValue>,
) -> Result<Option<T>, InvalidValue> {
    if text.trim().eq_ignore_ascii_case(NONE) { Ok(None) } else { parse(text).map(Some) }
}

/// `None`: unlimited; a capacity of nothing: no tier.
fn parse_limit(text: &str) -> Result<Option<Capacity>, InvalidValue> {
    if text.trim().eq_ignore_ascii_case(UNLIMITED) {
        return Ok(None);
    }
    let capacity =
        if_set(text, str::parse).map_err(|invalid: InvalidValue| invalid.but_valid(LIMITS))?;
    Ok(Some(some_room(capacity).unwrap_or(Capacity::Blocks(0))))
}

fn limit_text(limit: Option<Capacity>) -> String {
    match limit {
        None => UNLIMITED.to_owned(),
        Some(capacity) if capacity.is_zero() => NONE.to_owned(),
        Some(capacity) => capacity.to_string(),
    }
}

/// A capacity of nothing is no tier.
fn some_room(capacity: Option<Capacity>) -> Option<Capacity> {
    capacity.filter(|capacity| !capacity.is_zero())
}

fn member(name: &str, on: bool) -> RawValue {
    RawValue::Member { name: name.to_owned(), value: on.to_string() }
}

fn parameters(plugin: &str, values: &BTreeMap<String, String>) -> Vec<RawValue> {
    let parameter = |(name, value): (&String, &String)| RawValue::Member {
        name: parameter_path(plugin, name),
        value: value.clone(),
    };
    values.iter().map(parameter).collect()
}

/// The value of a plugin's parameter as it may be shown.
fn shown_member(raw: &RawValue) -> String {
    match raw {
        RawValue::Member { name, value } => shown_parameter(name, value).to_owned(),
        other => other.text(),
    }
}

fn parse_parameter(value: &str) -> Result<String, InvalidValue> {
    let value = parse_text(value)?;
    if value.contains("://") && may_hold_credentials(&value) {
        return Err(InvalidValue::new(
            "a user, password or query has no place here",
            "any text without credentials",
        ));
    }
    Ok(value)
}

fn parameter_path(plugin: &str, name: &str) -> String {
    format!("{}.{name}", plugin.to_ascii_lowercase())
}

fn parse_size_in(text: &str, range: &RangeInclusive<u64>) -> Result<u64, InvalidValue> {
    let bytes = parse_size(text)?;
    if range.contains(&bytes) {
        Ok(bytes)
    } else {
        Err(InvalidValue::new("out of range", sizes(range)))
    }
}

fn sizes(range: &RangeInclusive<u64>) -> String {
    format!("{SIZES}, {}", size_range(range))
}

pub(crate) fn size_range(range: &RangeInclusive<u64>) -> String {
    format!("from {} to {}", format_size(*range.start()), format_size(*range.end()))
}

fn parse_url(text: &str, schemes: &[&str]) -> Result<String, InvalidValue> {
    let text = parse_text(text)?;
    let invalid = |reason: &str| InvalidValue::new(reason, urls(schemes));
    let (scheme, rest) = text.split_once("://").ok_or_else(|| invalid("not a URL"))?;
    match scheme {
        _ if !schemes.contains(&scheme) => Err(invalid("not a scheme that is known here")),
        "memory" if !rest.is_empty() && rest != "/" => Err(invalid("`memory:///` takes no path")),
        "file" if !rest.starts_with('/') => Err(invalid("`file://` takes an absolute path")),
        "s3" | "http" | "https" if rest.is_empty() || rest.starts_with('/') => {
            Err(invalid("nothing after `://`"))
        }
        "file" if rest.contains(['?', '#']) => {
            Err(invalid("the store takes no `?` and no `#` in a path"))
        }
        _ if may_hold_credentials(&text) => Err(invalid(
            "a user, password, query or colon has no place in the URL, but for a port of http",
        )),
        _ => Ok(text),
    }
}

fn urls(schemes: &[&str]) -> String {
    let example = |scheme: &&str| match *scheme {
        "file" => "`file:///directory`".to_owned(),
        "s3" => "`s3://bucket/prefix`".to_owned(),
        "memory" => "`memory:///`".to_owned(),
        web => format!("`{web}://host:port`"),
    };
    schemes.iter().map(example).collect::<Vec<_>>().join(", ")
}

/// A setting that is one of a few names.
pub(crate) trait NamedChoice {
    fn names(&self) -> Vec<&'static str>;
    fn name(&self) -> &'static str;
    /// By name, in any case.
    fn choose(&mut self, name: &str) -> Result<(), InvalidValue>;
}

macro_rules! choice {
    ($($kind:ty),*) => {$(
        impl NamedChoice for $kind {
            fn names(&self) -> Vec<&'static str> {
                Self::ALL.iter().map(|choice| choice.name()).collect()
            }

            fn name(&self) -> &'static str {
                (*self).name()
            }

            fn choose(&mut self, name: &str) -> Result<(), InvalidValue> {
                let known =
                    Self::ALL.iter().copied().find(|choice| choice.name().eq_ignore_ascii_case(name));
                let unknown = || InvalidValue::new("not a known name", self.names().join(", "));
                *self = known.ok_or_else(unknown)?;
                Ok(())
            }
        }
    )*};
}

choice!(
    AdmissionKind,
    DeviceBackend,
    DiskBackend,
    EvictionKind,
    ObjectBackend,
    OlderEpoch,
    PeerNixl
);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::registry::KEYS;

    use super::*;

    proptest! {
        #[test]
        fn no_field_panics_on_arbitrary_text(text in any::<String>(), name in any::<String>()) {
            for key in KEYS {
                let mut settings = Settings::default();
                let _ = key.field.assign(&mut settings, &RawValue::One(text.clone()));
                let _ = key.field.assign(&mut settings, &RawValue::Many(vec![text.clone()]));
                let _ = key.field.assign(&mut settings, &RawValue::Member { name: name.clone(), value: text.clone() });
            }
        }
    }

    /// What a field shows, it takes back, so `kvbm config` can be pasted into a file.
    #[test]
    fn every_default_round_trips() {
        for key in KEYS {
            let mut settings = Settings::default();
            for raw in key.field.values(&settings.clone()) {
                key.field
                    .assign(&mut settings, &raw)
                    .unwrap_or_else(|error| panic!("{}: {error}", key.path));
            }
            assert_eq!(settings, Settings::default(), "{}", key.path);
        }
    }

    #[test]
    fn zero_and_none_mean_no_tier() {
        let host = SettingField::Capacity(|settings| &mut settings.host.capacity);
        let object = SettingField::Limit(|settings| &mut settings.object.capacity);
        for text in ["0", "0GB", "0 blocks", "none", " None "] {
            let mut settings = Settings::default();
            settings.host.capacity = Some(Capacity::Blocks(1));
            host.assign(&mut settings, &RawValue::One(text.to_owned())).expect(text);
            object.assign(&mut settings, &RawValue::One(text.to_owned())).expect(text);
            assert_eq!(settings.host.capacity, None, "{text}");
            assert!(settings.object.capacity.is_some_and(Capacity::is_zero), "{text}");
        }
    }

    #[test]
    fn only_a_limit_can_be_unlimited() {
        let unlimited = RawValue::One(" Unlimited".to_owned());
        let mut settings = Settings::default();
        settings.object.capacity = Some(Capacity::Blocks(1));
        SettingField::Limit(|s| &mut s.object.capacity)
            .assign(&mut settings, &unlimited)
            .expect("a word for no limit");
        assert_eq!(settings.object.capacity, None);
        for key in KEYS.iter().filter(|key| matches!(key.field, SettingField::Capacity(_))) {
            let error = key.field.assign(&mut settings, &unlimited).expect_err(key.path);
            assert!(error.to_string().ends_with(CAPACITIES), "{error}");
        }
    }

    #[test]
    fn urls_name_a_known_place() {
        let schemes = ["file", "s3", "memory"];
        for url in [
            "file:///data/kv",
            "file:///a@b:c",
            "s3://bucket",
            "s3://bucket/prefix",
            "memory:///",
            "memory://",
        ] {
            assert!(parse_url(url, &schemes).is_ok(), "{url}");
        }
        let bad = [
            "",
            "bucket",
            "file://relative",
            "s3://",
            "s3:///prefix",
            "memory:///x",
            "gs://bucket",
            "S3://b",
            "s3://bucket:9000",
            "s3://bucket/a:b",
            "file:///a?b",
            "file:///a#b",
        ];
        for url in bad {
            assert!(parse_url(url, &schemes).is_err(), "{url}");
        }
        for url in [
            "http://host",
            "https://host:9000/",
            "http://127.0.0.1:9000",
            "http://[::1]:9000",
            "https://a-b.c_d/x",
        ] {
            assert!(parse_url(url, &["http", "https"]).is_ok(), "{url}");
        }
    }

    /// From any source, and however wrong.
    #[test]
    fn urls_with_credentials_are_neither_accepted_nor_shown() {
        let schemes = ["file", "s3", "memory", "http", "https"];
        for url in [
            "s3://key:secret@bucket",
            "s3://key:secret",
            "s3://secret@bucket",
            "s3://bucket/key:secret",
            "s3:///key:secret",
            "s3://key%3Asecret%40bucket",
            "s3://bucket?X-Signature=secret",
            "s3://bucket#secret",
            "s3:key:secret",
            "key:secret@bucket",
            "key:secret",
            "http://key:secret",
            "http://key:secret@host:9000",
            "https://host:9000:secret",
            "https://[::1]secret:9000",
            "file://key:secret@host/path",
            "memory://key:secret/",
            "gs://key:secret@bucket",
            " s3://key:secret",
        ] {
            let error = parse_url(url, &schemes).expect_err(url).to_string();
            assert!(!error.contains("secret"), "{error}");
            assert!(!shown_url(url).contains("secret"), "{url}");
        }
    }

    #[test]
    fn choices_are_serialised_by_the_name_that_selects_them() {
        #[derive(serde::Serialize)]
        struct TomlTable<T> {
            value: T,
        }
        for &backend in DiskBackend::ALL {
            let text = toml::to_string(&TomlTable { value: backend }).expect("a name is a string");
            assert_eq!(text, format!("value = \"{}\"\n", backend.name()));
        }
        for &backend in ObjectBackend::ALL {
            let text = toml::to_string(&TomlTable { value: backend }).expect("a name is a string");
            assert_eq!(text, format!("value = \"{}\"\n", backend.name()));
        }
        for &backend in DeviceBackend::ALL {
            let text = toml::to_string(&TomlTable { value: backend }).expect("a name is a string");
            assert_eq!(text, format!("value = \"{}\"\n", backend.name()));
        }
        for admission in AdmissionKind::ALL {
            let text =
                toml::to_string(&TomlTable { value: admission }).expect("a name is a string");
            assert_eq!(text, format!("value = \"{}\"\n", admission.name()));
        }
        for eviction in EvictionKind::ALL {
            let text = toml::to_string(&TomlTable { value: eviction }).expect("a name is a string");
            assert_eq!(text, format!("value = \"{}\"\n", eviction.name()));
            assert_eq!(eviction.name().to_uppercase().parse(), Ok(eviction));
        }
    }
}
