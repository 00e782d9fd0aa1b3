//! How plugins of NIXL and their parameters are named.

use crate::value::InvalidValue;

/// The plugins that NIXL is known to have, in one release or another. A machine may have more.
pub const NIXL_PLUGINS: &[&str] = &[
    "UCX",
    "UCX_MO",
    "POSIX",
    "GDS",
    "GDS_MT",
    "OBJ",
    "AZURE_BLOB",
    "GPUNETIO",
    "GUSLI",
    "HF3FS",
    "INFINIA",
    "LIBFABRIC",
    "MOONCAKE",
    "UCCL",
];

/// Parts of names of parameters that hold credentials: those would be shown.
const SECRETS: [&str; 5] = ["secret", "token", "password", "access_key", "connection_string"];

const PLUGIN_NAMES: &str = "letters, digits and `_`, such as UCX or GDS_MT";
const PARAMETER_NAMES: &str = "`nixl.plugin.parameter` in TOML and `DYN_KVBM_NIXL_PARAM_PLUGIN__PARAMETER` in the environment";

/// A plugin's name as it is kept: in upper case.
pub(crate) fn plugin_name(name: &str) -> Result<String, InvalidValue> {
    let named =
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let invalid = || InvalidValue::new("not the name of a backend", PLUGIN_NAMES);
    named.then(|| name.to_ascii_uppercase()).ok_or_else(invalid)
}

/// Plugin and parameter, from `plugin.parameter` or `PLUGIN__PARAMETER`. A parameter in capitals
/// alone, as variables have it, is one in small letters.
pub(crate) fn parameter_name(name: &str) -> Result<(String, String), InvalidValue> {
    let parts =
        name.split_once('.').or_else(|| name.split_once("__")).filter(|(_, key)| !key.is_empty());
    let (plugin, key) =
        parts.ok_or_else(|| InvalidValue::new("not a plugin and a parameter", PARAMETER_NAMES))?;
    let is_shouted = !key.bytes().any(|byte| byte.is_ascii_lowercase());
    let key = if is_shouted { key.to_ascii_lowercase() } else { key.to_owned() };
    if names_a_secret(&key) {
        let elsewhere = "object.access_key and object.secret_key, or the variables that the plugin reads itself";
        return Err(InvalidValue::new("credentials have no place here", elsewhere));
    }
    Ok((plugin_name(plugin)?, key))
}

/// Whether a parameter of this name holds a credential.
pub(crate) fn names_a_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRETS.iter().any(|secret| name.contains(secret))
}

/// The plugin that a setting is about, by the setting's path.
pub(crate) fn plugin_of(path: &str) -> Option<String> {
    let name = path
        .strip_prefix("nixl.backends.")
        .or_else(|| Some(path.strip_prefix("nixl.")?.split_once('.')?.0));
    name.map(str::to_ascii_uppercase)
}

/// The list of plugins is not closed: `installed` are on this machine.
pub(crate) fn check_known(plugin: &str, installed: &[String]) -> Result<(), InvalidValue> {
    if NIXL_PLUGINS.contains(&plugin) || installed.iter().any(|name| name == plugin) {
        return Ok(());
    }
    let others = installed.iter().map(String::as_str).filter(|name| !NIXL_PLUGINS.contains(name));
    let known: Vec<_> = NIXL_PLUGINS.iter().copied().chain(others).collect();
    Err(InvalidValue::new("NIXL has no plugin of that name", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_named_alike_in_both_places() {
        let named = |plugin: &str, key: &str| Ok((plugin.to_owned(), key.to_owned()));
        assert_eq!(parameter_name("posix.use_uring"), named("POSIX", "use_uring"));
        assert_eq!(parameter_name("POSIX__USE_URING"), named("POSIX", "use_uring"));
        assert_eq!(parameter_name("GDS_MT__thread_count"), named("GDS_MT", "thread_count"));
        assert_eq!(parameter_name("OBJ__crtMinLimit"), named("OBJ", "crtMinLimit"));
        for name in [
            "",
            "POSIX",
            "POSIX__",
            "posix.",
            "__KEY",
            "A-B__KEY",
            "OBJ__SECRET_KEY",
            "obj.access_key",
        ] {
            assert!(parameter_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn paths_tell_their_plugin() {
        let plugins = [
            ("nixl.backends.GDS_MT", Some("GDS_MT")),
            ("nixl.posix.use_uring", Some("POSIX")),
            ("nixl.library", None),
            ("nixl.backends", None),
            ("host.capacity", None),
        ];
        for (path, plugin) in plugins {
            assert_eq!(plugin_of(path).as_deref(), plugin, "{path}");
        }
    }

    #[test]
    fn unknown_plugins_are_told_the_known_ones() {
        let installed = ["OURS".to_owned(), "UCX".to_owned()];
        assert!(check_known("OURS", &installed).is_ok() && check_known("GDS_MT", &[]).is_ok());
        let message = check_known("NOSUCH", &installed).unwrap_err().to_string();
        assert!(message.contains("UCX, ") && message.ends_with("OURS"), "{message}");
    }
}
