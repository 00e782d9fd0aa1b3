//! Settings for Python.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use kvbm_settings::{Argument, Capacity, Loaded, Loader, OlderEpoch, Origin, Row};
use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyMapping, PyString, PyTuple};

use crate::errors::of_settings;

pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Settings>()
}

/// Settings of a manager, checked: docs/configuration.md lists them all.
///
/// Sources override each other in this order: defaults, `toml` or `file`, `environment`, `values`.
/// What is unknown or invalid is a `SettingsError` that names the nearest valid name and those
/// beside it.
///
/// Args: values: by dotted path, or nested: `{"host.capacity": "1GiB"}` is `{"host": {"capacity":
/// "1GiB"}}`. Values are booleans, numbers, strings, paths, lists of these, or `None` for what TOML
/// writes as `"none"`. toml: the text of a settings file. file: the path of one. environment:
/// variables, of which those that begin with `DYN_KVBM_` are read. The process's own are not,
/// unless they are given here: `os.environ`, or `Settings.from_environment`.
///
/// `settings["host.capacity"]` is the value as TOML writes it, without quotes; `"none"` where
/// nothing was chosen, and `"(set)"` for a secret.
#[pyclass(module = "kvbm_rs", frozen, eq)]
#[derive(Debug)]
pub(crate) struct Settings(Loaded);

impl PartialEq for Settings {
    fn eq(&self, other: &Self) -> bool {
        self.0.settings == other.0.settings
    }
}

#[pymethods]
impl Settings {
    #[new]
    #[pyo3(signature = (values=None, *, toml=None, file=None, environment=None))]
    fn new(
        values: Option<&Bound<'_, PyMapping>>,
        toml: Option<&str>,
        file: Option<PathBuf>,
        environment: Option<&Bound<'_, PyMapping>>,
    ) -> PyResult<Self> {
        if toml.is_some() && file.is_some() {
            return Err(PyTypeError::new_err(
                "settings come from `toml` or from `file`, not from both",
            ));
        }
        let mut loader =
            Loader::new().environment(environment.map_or_else(|| Ok(Vec::new()), variables)?);
        if let Some(text) = toml {
            loader = loader.text(text);
        }
        if let Some(path) = file {
            loader = loader.file(path);
        }
        Self::load(loader, values)
    }

    /// Settings from the text of a settings file.
    #[staticmethod]
    fn from_toml(text: &str) -> PyResult<Self> {
        Self::load(Loader::new().text(text), None)
    }

    /// Settings from a dictionary: see the class.
    #[staticmethod]
    fn from_dict(values: &Bound<'_, PyMapping>) -> PyResult<Self> {
        Self::load(Loader::new(), Some(values))
    }

    /// Settings from the `DYN_KVBM_*` variables of this process and the file that `DYN_KVBM_CONFIG`
    /// names, overridden by `values`.
    #[staticmethod]
    #[pyo3(signature = (values=None))]
    fn from_environment(py: Python<'_>, values: Option<&Bound<'_, PyMapping>>) -> PyResult<Self> {
        // Python's own view: what a program has put into os.environ counts.
        let environment = py.import("os")?.getattr("environ")?;
        let environment = variables(environment.cast::<PyMapping>()?)?;
        Self::load(Loader::new().environment(environment), values)
    }

    /// Every setting with its value, by dotted path.
    fn to_dict(&self) -> BTreeMap<String, String> {
        self.0.rows().into_iter().map(|row| (row.key, row.value)).collect()
    }

    /// Where the value of a setting came from: `default`, a file and line, a variable, or
    /// `argument`.
    fn origin(&self, path: &str) -> PyResult<String> {
        self.row(path).map(|row| row.origin.to_string())
    }

    /// What is worth a line in a log: settings that are valid but change nothing, and a disk tier
    /// in a directory that no setting names.
    fn remarks(&self) -> Vec<String> {
        let mut remarks: Vec<_> = self.0.accepted.iter().map(ToString::to_string).collect();
        let has_disk = self.0.settings.disk.capacity.is_some();
        remarks.extend(self.row("disk.dirs").ok().filter(|dirs| has_disk && dirs.origin == Origin::Default).map(
            |dirs| {
                let place = dirs.value;
                format!("the disk tier is in {place}, since disk.dirs is not set: name directories on the disk that is meant")
            },
        ));
        remarks
    }

    /// With `share` of the bytes of every tier, from 0 to 1; sizes in blocks stay as they are.
    fn scaled(&self, share: f64) -> Self {
        let mut part = self.0.clone();
        let scale = |capacity| match capacity {
            Capacity::Bytes(bytes) => Capacity::Bytes((bytes as f64 * share) as u64),
            blocks @ Capacity::Blocks(_) => blocks,
        };
        part.settings.rescale(scale, share);
        Self(part)
    }

    /// Of one of several engines on a machine that are given the same settings, as those of data
    /// parallelism are, by its number. What outlives the processes lies in a directory of its own
    /// below those that are named, such as `kvbm-dp1`. Metrics and peers are served at the named
    /// ports plus this number, and its name among peers ends with it (`-dp1`). The first one's are
    /// those that are named.
    fn of_replica(&self, number: u16) -> Self {
        let mut own = Self(self.0.clone());
        if number > 0 {
            move_to_replica(&mut own.0.settings, number);
        }
        own
    }

    fn __getitem__(&self, path: &str) -> PyResult<String> {
        self.row(path).map(|row| row.value)
    }

    fn __repr__(&self) -> String {
        let chosen = self.0.rows().into_iter().filter(|row| row.origin != Origin::Default);
        let chosen: Vec<_> = chosen.map(|row| format!("{:?}: {:?}", row.key, row.value)).collect();
        format!("Settings({{{}}})", chosen.join(", "))
    }
}

impl Settings {
    /// What a manager is opened with.
    pub(crate) fn plain(&self) -> kvbm_settings::Settings {
        self.0.settings.clone()
    }

    /// The same for an engine that counts no epochs: it goes on in that of an object store, unless
    /// it is told otherwise.
    pub(crate) fn without_epochs(&self) -> kvbm_settings::Settings {
        let mut settings = self.plain();
        if !self.0.origins.contains_key("object.older_epoch") {
            settings.object.older_epoch = OlderEpoch::Follow;
        }
        settings
    }

    /// The one or the other, as a fingerprint says.
    pub(crate) fn for_fingerprint(
        &self,
        fingerprint: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<kvbm_settings::Settings> {
        let counts_epochs =
            fingerprint.map(|fingerprint| fingerprint.contains("epoch")).transpose()?;
        Ok(if counts_epochs == Some(true) { self.plain() } else { self.without_epochs() })
    }

    fn load(loader: Loader, values: Option<&Bound<'_, PyMapping>>) -> PyResult<Self> {
        let mut arguments = Vec::new();
        if let Some(values) = values {
            flatten("", values, &mut arguments)?;
        }
        let loader = arguments
            .into_iter()
            .fold(loader, |loader, (path, value)| loader.argument(path, value));
        let settings = loader.nixl_plugins(kvbm::installed_nixl_plugins).load();
        settings.map(Self).map_err(|error| of_settings(&error))
    }

    fn row(&self, path: &str) -> PyResult<Row> {
        let row = self.0.rows().into_iter().find(|row| row.key == path);
        row.ok_or_else(|| PyKeyError::new_err(path.to_owned()))
    }
}

fn move_to_replica(settings: &mut kvbm_settings::Settings, number: u16) {
    let kvbm_settings::Settings { host, disk, metrics, peers, .. } = settings;
    let is_kept = disk.keep && disk.capacity.is_some();
    let disks = disk.dirs.iter_mut().filter(|_| is_kept);
    for dir in host.persist.iter_mut().chain(&mut host.persist_index).chain(disks) {
        // As the first one does, which may come later. Where it cannot be made, opening says so.
        let _ = DirBuilder::new().mode(0o700).create(&*dir);
        dir.push(format!("kvbm-dp{number}"));
    }
    for port in [&mut metrics.port, &mut peers.port] {
        if *port > 0 {
            // Behind the last one any free one will do.
            *port = port.checked_add(number).unwrap_or_default();
        }
    }
    peers.name = peers.name.as_ref().map(|name| format!("{name}-dp{number}"));
    // What is no address stays, and is refused when it is opened.
    if let Some((host, port)) = peers.address.as_ref().and_then(|address| address.rsplit_once(':'))
        && let Some(port) = port.parse::<u16>().ok().and_then(|port| port.checked_add(number))
    {
        peers.address = Some(format!("{host}:{port}"));
    }
}

/// Those that are ours: others need not even be text.
fn variables(environment: &Bound<'_, PyMapping>) -> PyResult<Vec<(String, String)>> {
    let mut ours = Vec::new();
    for item in environment.items()?.iter() {
        let (name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
        if let Ok(name) = name.extract::<String>()
            && name.starts_with("DYN_KVBM_")
        {
            ours.push((name, value.str()?.extract()?));
        }
    }
    Ok(ours)
}

fn flatten(
    above: &str,
    values: &Bound<'_, PyMapping>,
    into: &mut Vec<(String, Argument)>,
) -> PyResult<()> {
    for item in values.items()?.iter() {
        let (name, value): (String, Bound<'_, PyAny>) = item.extract()?;
        let path = if above.is_empty() { name } else { format!("{above}.{name}") };
        match value.cast::<PyMapping>() {
            Ok(inner) if inner.is_empty()? => into.push((path, Argument::Many(Vec::new()))),
            Ok(inner) => flatten(&path, inner, into)?,
            Err(_) => into.push((path.clone(), argument(&path, &value)?)),
        }
    }
    Ok(())
}

fn argument(path: &str, value: &Bound<'_, PyAny>) -> PyResult<Argument> {
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let texts = value.try_iter()?.map(|item| scalar(path, &item?));
        return Ok(Argument::Many(texts.collect::<PyResult<_>>()?));
    }
    scalar(path, value).map(Argument::One)
}

/// As TOML would write it, without quotes.
fn scalar(path: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    if value.is_none() {
        return Ok("none".to_owned());
    }
    if let Ok(on) = value.cast::<PyBool>() {
        return Ok(on.is_true().to_string());
    }
    let is_written_plainly = value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyInt>()
        || value.is_instance_of::<PyFloat>();
    if is_written_plainly {
        return value.str()?.extract();
    }
    if let Ok(path) = value.extract::<PathBuf>() {
        return Ok(path.to_string_lossy().into_owned());
    }
    let message = format!(
        "{path}: a setting is a boolean, a number, a string, a path, None or a list of these, not {}",
        value.get_type().name()?
    );
    Err(PyTypeError::new_err(message))
}
