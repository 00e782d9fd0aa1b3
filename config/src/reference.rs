//! `docs/configuration.md`, written from the registry.

use std::fmt::Write as _;

use crate::field::{SettingField, size_range};
use crate::registry::{
    EnvVariable, FALLBACKS, FOREIGN_VARIABLES, IGNORED, KEYS, NEVER_WERE, SettingKey,
};
use crate::settings::Settings;
use crate::value::{NONE, TEXTS, whole_numbers};

/// The whole of `docs/configuration.md`.
pub fn reference_markdown() -> String {
    let mut page = INTRODUCTION.replace("{example}", EXAMPLE);
    for (section, title, text) in SECTIONS {
        let keys: Vec<_> = KEYS.iter().filter(|key| key.section() == *section).collect();
        let _ = write!(page, "\n### {title}\n{text}\n\n{}", settings_table(&keys));
    }
    let _ = write!(page, "\n{MIGRATION}\n{}\n{NO_EFFECT}\n{}", differences_list(), ignored_list());
    let _ = write!(page, "\n{OTHERS}\n{}", others_list());
    page
}

/// Sections of the file: TOML table, title, introduction.
const SECTIONS: &[(&str, &str, &str)] = &[
    ("", "Top of the file", "Keys that stand before the first `[section]`."),
    ("device", "`[device]`: G1", "Capacity `none`: no device tier of our own."),
    ("host", "`[host]`: G2", "Capacity `none`: no host tier."),
    ("disk", "`[disk]`: G3", "Capacity `none`: no disk tier."),
    (
        "object",
        "`[object]`: G4",
        "URL `none` or capacity `0`: no object tier, whatever the other keys say.",
    ),
    (
        "encryption",
        "`[encryption]`",
        "Keys encrypt what outlives the process, on disk, in objects and in persistent DRAM: AES-256-GCM, see \
         [security](security.md). Each block then takes 68 bytes more, on disk and in DRAM up to a page.",
    ),
    ("transfer", "`[transfer]`", "How blocks move between tiers."),
    ("flush", "`[flush]`", "When blocks are copied to the tier below."),
    (
        "hybrid",
        "`[hybrid]`",
        "Models with sliding windows or a state: see [hybrid models](engine-memory.md#hybrid-models).",
    ),
    ("metrics", "`[metrics]`", "What is exported for Prometheus."),
    ("traces", "`[traces]`", "What a tracer is told."),
    (
        "peers",
        "`[peers]`",
        "Workers of the same model that read each other's host tier: see [peers](peers.md).",
    ),
    (
        "nixl",
        "`[nixl]`",
        "NVIDIA's transfer library, 1.5 or later, if installed (`pip install nixl-cu12`). `kvbm doctor` shows which plugins work \
         here.",
    ),
];

/// A settings file, used in the introduction.
const EXAMPLE: &str = r#"block_bytes = "1MiB"
eviction = "hazard"

[host]
capacity = "20GB"

[disk]
capacity = "5000 blocks"
dirs = ["/mnt/nvme0/kv", "/mnt/nvme1/kv"]

[object]
url = "s3://kv-cache/team-a"
region = "eu-central-1"

[flush]
interval_ms = 500

[metrics]
enabled = true
"#;

const INTRODUCTION: &str = "\
# Configuration

<!-- Generated from the registry of kvbm-settings. Do not edit: KVBM_BLESS=1 cargo test -p kvbm-settings -->

Every setting has one default, one key in a TOML file and at least one environment variable. `kvbm config` prints each value
and where it came from.

## Where values come from
Each source overrides the one above it:

1. the defaults below (a command such as `kvbm replay` may bring its own);
2. the TOML file named by `--config FILE` or, without that, by `DYN_KVBM_CONFIG`, of 1 MiB at most;
3. the environment: `DYN_KVBM_*`;
4. the command line.

An unknown `DYN_KVBM_*` variable or TOML key is an error that names the nearest one. An invalid value is an error that says
where it stands and what is valid. A tier needs `block_bytes`. A URL with a user, a password or a query is refused and never
shown.

```toml run
{example}```

## How values are written
White space around a value does not matter; an empty value is an error. `none` unsets what can be unset.

- toggle: `true`, `1`, `on`, `yes`, or `false`, `0`, `off`, `no`, in any case. `=false` always means off.
- `1–256`: a whole number in this range
- size: `65536` (bytes), `64KiB`, `1.5GB`, `1.5 GiB`: decimal units are powers of 1000, binary ones of 1024
- capacity: a size, rounded down to whole blocks, or `5000 blocks`, at most 1,073,741,816 of them; `0` or `none`: no tier; of
  the object tier also `unlimited`
- `…_GB`: a capacity; a plain number is decimal gigabytes, 10⁹ bytes; blocks are not taken
- `…_NUM_BLOCKS`: a whole number, which overrides the tier's `…_GB` in the environment. With `OVERRIDE` in the name, `0` or
  `none` leaves the size to the other variable; else they mean no tier, and `unlimited` is taken
- ms: a whole number of milliseconds
- text: at most 4096 bytes
- directories: separated by `:` or `,`; in TOML also an array, for names with these
- secret: never printed: `kvbm config` says `(set)`

## Settings
† marks variables of NVIDIA Dynamo's KVBM ([differences](#coming-from-nvidia-dynamo-kvbm)). Of several variables the last one
wins.
";

const MIGRATION: &str = "\
## Coming from NVIDIA Dynamo KVBM
The variables marked † keep their names and meaning, except:
";

const NO_EFFECT: &str = "\
### Accepted, no effect yet
These are checked and reported, and change nothing.
";

const OTHERS: &str = "\
### Other names
With peers these are read too, where no setting says the same, or reported. Keys that articles name, and that NIXL and Dynamo
never had, are errors that say what to use.
";

fn settings_table(keys: &[&SettingKey]) -> String {
    let mut table = String::from(
        "| variable | TOML key | default | unit, valid values | meaning |\n|---|---|---|---|---|\n",
    );
    for key in keys {
        let variables: Vec<_> =
            key.variables.iter().map(|variable| variable_name(key, variable)).collect();
        let (variables, path, default) = (variables.join("<br>"), toml_path(key), default_of(key));
        let _ = writeln!(
            table,
            "| {variables} | `{path}` | {default} | {} | {} |",
            valid_values(key),
            key.doc
        );
    }
    table
}

fn variable_name(key: &SettingKey, variable: &EnvVariable) -> String {
    let member = match key.field {
        SettingField::Toggles(_) => "<NAME>",
        SettingField::Parameters(_) => "<NAME>__<KEY>",
        _ => "",
    };
    let mark = if variable.upstream.is_some() { " †" } else { "" };
    format!("`{}{member}`{mark}", variable.name)
}

fn toml_path(key: &SettingKey) -> String {
    match key.field {
        SettingField::Toggles(_) => format!("{}.<NAME>", key.path),
        SettingField::Parameters(_) => format!("{}.<name>.<key>", key.path),
        _ => key.path.to_owned(),
    }
}

fn default_of(key: &SettingKey) -> String {
    let values = key.field.values(&Settings::default());
    let shown: Vec<_> = values.iter().map(|raw| key.field.shown(raw)).collect();
    if shown.is_empty() { NONE.to_owned() } else { format!("`{}`", shown.join(", ")) }
}

/// Short where the introduction explains the sort.
fn valid_values(key: &SettingKey) -> String {
    match &key.field {
        SettingField::Flag(_) | SettingField::Toggles(_) => "toggle".to_owned(),
        SettingField::Capacity(_) => "capacity".to_owned(),
        SettingField::Limit(_) => "capacity, or `unlimited`".to_owned(),
        SettingField::Directories(_) => "directories".to_owned(),
        SettingField::Secret(_) => "secret".to_owned(),
        SettingField::Millis(_, range) => format!("ms; {}", short(whole_numbers(range))),
        SettingField::Bytes(_, range) | SettingField::BytesIfSet(_, range) => {
            format!("size {}", size_range(range))
        }
        SettingField::Choice(_) => format!("`{}`", key.field.valid().replace(", ", "`, `")),
        _ => short(key.field.valid()),
    }
}

fn short(valid: String) -> String {
    match valid.strip_prefix("a whole number from ") {
        Some(range) => range.replacen(" to ", "–", 1),
        None if valid == TEXTS => "text".to_owned(),
        None => valid,
    }
}

/// One row for all variables that differ alike.
fn differences_list() -> String {
    let mut rows: Vec<(&str, Vec<String>)> = Vec::new();
    for key in KEYS {
        for variable in key.variables {
            let Some(difference) = variable.upstream.filter(|difference| !difference.is_empty())
            else {
                continue;
            };
            let name = variable_name(key, variable).trim_end_matches(" †").to_owned();
            match rows.iter_mut().find(|(text, _)| *text == difference) {
                Some((_, names)) => names.push(name),
                None => rows.push((difference, vec![name])),
            }
        }
    }
    let mut list = String::new();
    for (difference, names) in rows {
        let _ = writeln!(list, "- {}: {difference}", names.join(", "));
    }
    list
}

fn ignored_list() -> String {
    let mut list = String::new();
    for alike in IGNORED.chunk_by(|one, next| one.doc == next.doc) {
        let names: Vec<_> = alike.iter().map(|ignored| format!("`{}`", ignored.name)).collect();
        let _ = writeln!(list, "- {}: {}", names.join(", "), alike[0].doc);
    }
    list
}

fn others_list() -> String {
    let mut list = String::new();
    for fallback in FALLBACKS {
        let _ = writeln!(list, "- `{}`: Read for `{}`.", fallback.name, fallback.path);
    }
    for foreign in FOREIGN_VARIABLES.iter().chain(NEVER_WERE) {
        let _ = writeln!(list, "- `{}`: Use {}.", foreign.name, foreign.instead);
    }
    list
}
