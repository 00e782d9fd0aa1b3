//! Settings from all their sources, each of which overrides the one before: defaults, file,
//! environment, arguments, command line.

use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::{Origin, SettingsError};
use crate::field::RawValue;
use crate::file::{self, FileEntry};
use crate::nixl;
use crate::registry::{
    self, CONFIG_VARIABLE, EnvVariable, FALLBACKS, FOREIGN_VARIABLES, IGNORED, KEYS, NEVER_WERE,
    PREFIX, SettingKey, UpstreamMeaning, is_read,
};
use crate::settings::{SECRET_SET, Settings};
use crate::value::{InvalidValue, NONE};

/// What errors call a text that came in place of a file.
const TEXT_NAME: &str = "<text>";

/// The value of an argument, each text as it would be written in TOML, without quotes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// A scalar.
    One(String),
    /// An array.
    Many(Vec<String>),
}

/// One override of the command line.
struct SettingOverride {
    key: &'static str,
    apply: Box<dyn FnOnce(&mut Settings)>,
}

/// Collects the sources, then [loads](Loader::load) them.
#[derive(Default)]
#[must_use]
pub struct Loader {
    defaults: Settings,
    file: Option<PathBuf>,
    /// In place of a file.
    text: Option<String>,
    environment: BTreeMap<String, String>,
    arguments: Vec<(String, Argument)>,
    overrides: Vec<SettingOverride>,
    /// Plugins of NIXL on this machine.
    installed: Option<Box<InstalledFile>>,
}

/// Lists plugins.
type InstalledFile = dyn FnOnce(Option<&str>) -> Vec<String>;

impl Loader {
    /// Defaults alone.
    pub fn new() -> Self {
        Self::default()
    }

    /// Defaults and the variables of this process.
    ///
    /// # Errors
    /// A `DYN_KVBM_*` variable that is not UTF-8.
    pub fn from_process() -> Result<Self, SettingsError> {
        let ours = std::env::vars_os().filter(|(name, _)| is_read(&name.to_string_lossy()));
        let texts =
            ours.filter_map(|(name, value)| match (name.into_string(), value.into_string()) {
                (Ok(name), Ok(value)) => Some(Ok((name, value))),
                // Somebody else's.
                (Ok(name), Err(_)) if !name.starts_with(PREFIX) => None,
                (Ok(name), Err(_)) => Some(Err(SettingsError::NotUnicode { name })),
                (Err(name), _) => Some(Err(SettingsError::NotUnicode {
                    name: name.to_string_lossy().into_owned(),
                })),
            });
        Ok(Self::new().environment(texts.collect::<Result<Vec<_>, _>>()?))
    }

    /// Starts from a program's own defaults instead of [`Settings::default`]: those of a command,
    /// or what an embedding engine knows, such as its block size. Everything else overrides them.
    pub fn defaults(mut self, defaults: Settings) -> Self {
        self.defaults = defaults;
        self
    }

    /// Reads this TOML file, whatever `DYN_KVBM_CONFIG` says.
    pub fn file(mut self, path: impl Into<PathBuf>) -> Self {
        self.file = Some(path.into());
        self
    }

    /// Takes this TOML text for the contents of the file.
    pub fn text(mut self, text: impl Into<String>) -> Self {
        self.text = Some(text.into());
        self
    }

    /// Adds environment variables. Those that do not start with `DYN_KVBM_` are left alone, but for
    /// some of Dynamo's.
    pub fn environment(mut self, variables: impl IntoIterator<Item = (String, String)>) -> Self {
        self.environment.extend(variables.into_iter().filter(|(name, _)| is_read(name)));
        self
    }

    /// Sets the setting with the TOML path `path` on behalf of the caller of the program that
    /// embeds kvbm.
    pub fn argument(mut self, path: impl Into<String>, value: Argument) -> Self {
        self.arguments.push((path.into(), value));
        self
    }

    /// Sets the setting with the TOML path `key` on behalf of the command line; the last call wins.
    pub fn set(mut self, key: &'static str, apply: impl FnOnce(&mut Settings) + 'static) -> Self {
        self.overrides.push(SettingOverride { key, apply: Box::new(apply) });
        self
    }

    /// Says which plugins of NIXL this machine has, beside [`NIXL_PLUGINS`](crate::NIXL_PLUGINS),
    /// given [`NixlSettings::library`](crate::NixlSettings::library). Asked only if the settings
    /// name another.
    pub fn nixl_plugins(
        mut self,
        installed: impl FnOnce(Option<&str>) -> Vec<String> + 'static,
    ) -> Self {
        self.installed = Some(Box::new(installed));
        self
    }

    /// Reads every source and checks the result.
    ///
    /// # Errors
    /// The first thing that is wrong: an unknown name, a value that is not valid, a file that
    /// cannot be read, settings that contradict each other.
    pub fn load(mut self) -> Result<Loaded, SettingsError> {
        let mut loading = LoadingFile::new(mem::take(&mut self.defaults));
        reject_unknown_variables(&self.environment)?;
        let named_by_variable = self.environment.get(CONFIG_VARIABLE).map(PathBuf::from);
        if let Some(text) = self.text.take() {
            let name = Path::new(TEXT_NAME);
            loading.add_entries(name, file::entries(name, &text)?)?;
        } else if let Some(path) = self.file.take().or(named_by_variable) {
            loading.add_entries(&path, file::read(&path)?)?;
        }
        loading.add_environment(&self.environment)?;
        loading.add_arguments(self.arguments)?;
        loading.add_overrides(self.overrides)?;
        loading.add_fallbacks(&self.environment)?;
        loading.check_plugins(self.installed)?;
        loading.finish()
    }
}

impl fmt::Debug for Loader {
    /// Names the sources; their values may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("file", &self.file)
            .field("environment", &self.environment.keys())
            .field("arguments", &self.arguments.iter().map(|(path, _)| path).collect::<Vec<_>>())
            .field("overrides", &self.overrides.iter().map(|chosen| chosen.key).collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

fn reject_unknown_variables(environment: &BTreeMap<String, String>) -> Result<(), SettingsError> {
    let mut ours = environment.keys().filter(|name| name.starts_with(PREFIX));
    match ours.find(|name| !registry::knows(name)) {
        Some(name) => Err(SettingsError::Unknown {
            name: name.clone(),
            origin: Origin::Variable(name.clone()),
            nearest: registry::nearest_variable(name),
            valid: registry::variables_beside(registry::nearest_variable(name)),
        }),
        None => Ok(()),
    }
}

/// The effective settings and where each came from.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The settings.
    pub settings: Settings,
    /// By TOML path; what is not here is a default.
    pub origins: BTreeMap<String, Origin>,
    /// What was given, is valid, and changes nothing: worth telling the operator once.
    pub accepted: Vec<Accepted>,
}

impl Loaded {
    /// Every setting in the order of the reference. Secrets appear as `(set)`.
    pub fn rows(&self) -> Vec<Row> {
        KEYS.iter().flat_map(|key| self.rows_of(key)).collect()
    }

    fn rows_of(&self, key: &SettingKey) -> Vec<Row> {
        let row = |(key, value): (String, String)| {
            let origin = self.origins.get(&key).cloned().unwrap_or_default();
            Row { key, value, origin }
        };
        self.settings.shown_values_of(key).into_iter().map(row).collect()
    }

    /// A place for objects that gets none, since their tier has no room.
    fn lost_object_tier(&self) -> Option<Accepted> {
        let object = &self.settings.object;
        if object.url.is_none() || !object.has_no_room() {
            return None;
        }
        let row = |key: &str| self.rows().into_iter().find(|row| row.key == key);
        let (url, capacity) = (row("object.url")?, row("object.capacity")?);
        let remark = format!("no object tier, since object.capacity is 0 ({})", capacity.origin);
        Some(Accepted { name: url.key, value: url.value, origin: url.origin, remark })
    }
}

impl Settings {
    /// Every setting as it may be shown, by its TOML path, in the order of the reference. Secrets
    /// appear as `(set)`.
    pub fn shown_values(&self) -> Vec<(String, String)> {
        KEYS.iter().flat_map(|key| self.shown_values_of(key)).collect()
    }

    fn shown_values_of(&self, key: &SettingKey) -> Vec<(String, String)> {
        let values = key.field.values(self);
        if values.is_empty() {
            return vec![(key.path.to_owned(), NONE.to_owned())];
        }
        values.iter().map(|raw| (full_path(key, raw), key.field.shown(raw))).collect()
    }
}

/// One effective setting, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// TOML path.
    pub key: String,
    /// The value as it is written in TOML, without quotes; `none` when unset, `(set)` for a secret.
    pub value: String,
    /// Where it came from.
    pub origin: Origin,
}

/// Something that was recognised and checked but has no effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Accepted {
    /// The setting's TOML path or, where it has none, its variable.
    pub name: String,
    /// Its value.
    pub value: String,
    /// Where it came from.
    pub origin: Origin,
    /// What that means.
    pub remark: String,
}

/// Of what nothing follows.
const NO_EFFECT: &str = "accepted, no effect yet";

impl fmt::Display for Accepted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = \"{}\" ({}): {}", self.name, self.value, self.origin, self.remark)
    }
}

/// The settings while sources are laid over each other.
struct LoadingFile {
    loaded: Loaded,
    /// Keys that a variable demands a value for, with that variable.
    required: Vec<(&'static SettingKey, &'static str)>,
}

impl LoadingFile {
    fn new(defaults: Settings) -> Self {
        let chosen = |key: &&SettingKey| {
            key.field.values(&defaults) != key.field.values(&Settings::default())
        };
        let origins = KEYS.iter().filter(chosen).flat_map(|key| {
            let values = key.field.values(&defaults);
            values.iter().map(|raw| (full_path(key, raw), Origin::Program)).collect::<Vec<_>>()
        });
        let origins = origins.collect();
        Self {
            loaded: Loaded { settings: defaults, origins, accepted: Vec::new() },
            required: Vec::new(),
        }
    }

    fn add_entries(&mut self, file: &Path, entries: Vec<FileEntry>) -> Result<(), SettingsError> {
        for entry in entries {
            let origin = Origin::File { path: file.to_owned(), line: entry.line };
            let (key, member) = known_key(&entry.path, &origin)?;
            self.assign(key, &as_member(member, entry.raw), origin)?;
        }
        Ok(())
    }

    fn add_environment(
        &mut self,
        environment: &BTreeMap<String, String>,
    ) -> Result<(), SettingsError> {
        // In the order of the table, not of the environment: where two variables mean one setting,
        // the later one of the table prevails, such as a number of blocks over gigabytes.
        for key in KEYS {
            for variable in key.variables {
                if let Some(text) = environment.get(variable.name) {
                    self.add_variable(key, variable, text)?;
                }
            }
        }
        for (name, text) in environment {
            if let Some((key, member)) = registry::family_of(name) {
                let raw = as_member(Some(member), RawValue::One(text.clone()));
                self.assign(key, &raw, Origin::Variable(name.clone()))?;
            }
        }
        self.check_ignored(environment)
    }

    fn add_variable(
        &mut self,
        key: &'static SettingKey,
        variable: &EnvVariable,
        text: &str,
    ) -> Result<(), SettingsError> {
        let origin = Origin::Variable(variable.name.to_owned());
        let given = RawValue::One(text.to_owned());
        let meaning = variable
            .form
            .interpret(text)
            .map_err(|problem| invalid(key, &given, &origin, problem))?;
        match meaning {
            UpstreamMeaning::Value(value) => self.assign(key, &RawValue::One(value), origin),
            UpstreamMeaning::Required => {
                self.required.push((key, variable.name));
                Ok(())
            }
            UpstreamMeaning::Silent => Ok(()),
        }
    }

    fn check_ignored(
        &mut self,
        environment: &BTreeMap<String, String>,
    ) -> Result<(), SettingsError> {
        for ignored in IGNORED {
            let Some(text) = environment.get(ignored.name) else { continue };
            let (name, value) = (ignored.name.to_owned(), printable(text));
            let origin = Origin::Variable(name.clone());
            if let Err(problem) = ignored.check(text) {
                return Err(SettingsError::Invalid { key: name, value, origin, problem });
            }
            self.loaded.accepted.push(Accepted {
                name,
                value,
                origin,
                remark: NO_EFFECT.to_owned(),
            });
        }
        Ok(())
    }

    fn add_arguments(&mut self, arguments: Vec<(String, Argument)>) -> Result<(), SettingsError> {
        for (path, value) in arguments {
            let (key, member) = known_key(&path, &Origin::Argument)?;
            let raw = match value {
                Argument::One(text) => RawValue::One(text),
                Argument::Many(texts) => RawValue::Many(texts),
            };
            self.assign(key, &as_member(member, raw), Origin::Argument)?;
        }
        Ok(())
    }

    fn add_overrides(&mut self, overrides: Vec<SettingOverride>) -> Result<(), SettingsError> {
        for SettingOverride { key, apply } in overrides {
            known_key(key, &Origin::CommandLine)?;
            apply(&mut self.loaded.settings);
            self.loaded.origins.insert(key.to_owned(), Origin::CommandLine);
        }
        Ok(())
    }

    /// What Dynamo is told counts where our own settings say nothing.
    fn add_fallbacks(
        &mut self,
        environment: &BTreeMap<String, String>,
    ) -> Result<(), SettingsError> {
        for fallback in FALLBACKS {
            let Some(text) = environment.get(fallback.name) else { continue };
            if (fallback.applies)(&self.loaded.settings.peers) {
                let origin = Origin::Variable(fallback.name.to_owned());
                let (key, _) = known_key(fallback.path, &origin)?;
                self.assign(key, &RawValue::One(text.clone()), origin)?;
            }
        }
        if !self.loaded.settings.peers.enabled {
            return Ok(());
        }
        let given = FOREIGN_VARIABLES.iter().filter(|name| environment.contains_key(name.name));
        self.loaded.accepted.extend(given.map(|foreign| Accepted {
            name: foreign.name.to_owned(),
            value: SECRET_SET.to_owned(),
            origin: Origin::Variable(foreign.name.to_owned()),
            remark: format!("kvbm does not read it; use {}", foreign.instead),
        }));
        Ok(())
    }

    fn assign(
        &mut self,
        key: &'static SettingKey,
        raw: &RawValue,
        origin: Origin,
    ) -> Result<(), SettingsError> {
        let assigned = key.field.assign(&mut self.loaded.settings, raw);
        assigned.map_err(|problem| invalid(key, raw, &origin, problem))?;
        self.loaded.origins.insert(full_path(key, raw), origin);
        Ok(())
    }

    fn finish(mut self) -> Result<Loaded, SettingsError> {
        // Only now: a later source may have given what a variable demands.
        self.check_required()?;
        let Loaded { settings, origins, .. } = &self.loaded;
        settings.check(|path| origins.get(path).cloned().unwrap_or_default())?;
        let lost = self.loaded.lost_object_tier();
        self.loaded.accepted.extend(lost);
        Ok(self.loaded)
    }

    /// The names of plugins are not a closed list: this machine is asked before one is refused.
    fn check_plugins(&self, installed: Option<Box<InstalledFile>>) -> Result<(), SettingsError> {
        // To ask is to look for the library and its plugins on disk: not where every name is known
        // anyway.
        if self.check_plugins_among(&[]).is_ok() {
            return Ok(());
        }
        let library = self.loaded.settings.nixl.library.as_deref();
        self.check_plugins_among(&installed.map_or_else(Vec::new, |list| list(library)))
    }

    fn check_plugins_among(&self, installed: &[String]) -> Result<(), SettingsError> {
        for Row { key, value, origin } in self.loaded.rows() {
            let known = nixl::plugin_of(&key)
                .map_or(Ok(()), |plugin| nixl::check_known(&plugin, installed));
            known.map_err(|problem| SettingsError::Invalid { key, value, origin, problem })?;
        }
        Ok(())
    }

    fn check_required(&self) -> Result<(), SettingsError> {
        let missing =
            |(key, _): &&(&SettingKey, &str)| key.field.values(&self.loaded.settings).is_empty();
        let Some((key, variable)) = self.required.iter().find(missing) else { return Ok(()) };
        let others = key.variables.iter().map(|other| other.name).filter(|other| other != variable);
        let remedy = format!(
            "{}, or turn {variable} off",
            others.chain([key.path]).collect::<Vec<_>>().join(" or ")
        );
        Err(SettingsError::Invalid {
            key: key.path.to_owned(),
            value: NONE.to_owned(),
            origin: Origin::Variable((*variable).to_owned()),
            problem: InvalidValue::new("turned on, but nothing says where", remedy),
        })
    }
}

fn known_key<'p>(
    path: &'p str,
    origin: &Origin,
) -> Result<(&'static SettingKey, Option<&'p str>), SettingsError> {
    registry::by_path(path).ok_or_else(|| {
        let (name, origin) = (path.to_owned(), origin.clone());
        if let Some(never) = NEVER_WERE.iter().find(|never| never.name == path) {
            return SettingsError::NeverWas { name, origin, instead: never.instead };
        }
        let nearest = registry::nearest_path(path);
        SettingsError::Unknown { name, origin, nearest, valid: registry::paths_beside(nearest) }
    })
}

/// The value of a family's member carries the member's name.
fn as_member(member: Option<&str>, raw: RawValue) -> RawValue {
    match (member, raw) {
        (Some(name), RawValue::One(value)) => RawValue::Member { name: name.to_owned(), value },
        (_, raw) => raw,
    }
}

/// The key's path, down to the member of a family.
fn full_path(key: &SettingKey, raw: &RawValue) -> String {
    match raw {
        RawValue::Member { name, .. } => format!("{}.{}", key.path, key.field.member(name)),
        RawValue::One(_) | RawValue::Many(_) => key.path.to_owned(),
    }
}

fn invalid(
    key: &SettingKey,
    raw: &RawValue,
    origin: &Origin,
    problem: InvalidValue,
) -> SettingsError {
    let value = printable(&key.field.shown(raw));
    SettingsError::Invalid { key: full_path(key, raw), value, origin: origin.clone(), problem }
}

/// On one line, whatever was typed.
fn printable(text: &str) -> String {
    text.escape_debug().to_string()
}
