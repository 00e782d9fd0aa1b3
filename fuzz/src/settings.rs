//! Settings files and variables.

use std::fmt::Write as _;
use std::fs;

use kvbm_settings::{Loaded, Loader, Settings, SettingsError};
use toml::Value;

/// Reads bytes as a settings file and as variables, a line each; what that comes to, written as a
/// file, comes to the same.
pub fn settings(bytes: &[u8]) {
    if let Ok(loaded) = from_file(bytes) {
        assert_same_again(loaded);
    }
    if let Ok(loaded) = from_variables(&String::from_utf8_lossy(bytes)) {
        assert_same_again(loaded);
    }
}

fn from_file(bytes: &[u8]) -> Result<Loaded, SettingsError> {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    fs::write(file.path(), bytes).expect("room for a temporary file");
    Loader::new().file(file.path()).load()
}

fn from_variables(text: &str) -> Result<Loaded, SettingsError> {
    let variables = text.lines().filter_map(|line| line.split_once('='));
    // The one variable that has a file read, whichever it is.
    let variables = variables.filter(|(name, _)| *name != "DYN_KVBM_CONFIG");
    Loader::new().environment(variables.map(|(name, value)| (name.into(), value.into()))).load()
}

fn assert_same_again(loaded: Loaded) {
    let text = as_file(&loaded);
    let again = from_file(text.as_bytes()).unwrap_or_else(|error| panic!("{error} in\n{text}"));
    assert_eq!(without_secrets(again.settings), without_secrets(loaded.settings), "{text}");
}

/// What is set, but for secrets.
fn as_file(loaded: &Loaded) -> String {
    let mut text = String::new();
    for row in loaded.rows() {
        let value = match row.key.as_str() {
            // How several are shown together tells no comma between them from one in a name.
            "disk.dirs" => directories(&loaded.settings),
            _ if row.value == "none" || row.value == "(set)" => continue,
            _ => Some(Value::String(row.value)),
        };
        if let Some(value) = value {
            let _ = writeln!(text, "{} = {value}", row.key);
        }
    }
    text
}

fn directories(settings: &Settings) -> Option<Value> {
    let names = settings.disk.dirs.iter().map(|path| Value::String(path.display().to_string()));
    (!settings.disk.dirs.is_empty()).then(|| Value::Array(names.collect()))
}

fn without_secrets(mut settings: Settings) -> Settings {
    settings.object.access_key = None;
    settings.object.secret_key = None;
    settings
}
