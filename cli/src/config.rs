//! `kvbm config`: the effective settings, and where each came from.

use kvbm_settings::{Accepted, Row};
use serde::Serialize;

use crate::failure::CommandFailure;
use crate::global::GlobalOptions;
use crate::output;

#[derive(Serialize)]
struct EffectiveSettings {
    settings: Vec<Row>,
    /// Recognised and checked, without effect yet.
    accepted: Vec<Accepted>,
}

pub(crate) fn run(global: &GlobalOptions) -> Result<(), CommandFailure> {
    let loaded = global.loader()?.load()?;
    let effective = EffectiveSettings { settings: loaded.rows(), accepted: loaded.accepted };
    if global.json {
        return output::print_json(&effective);
    }
    let mut table = output::table(&["setting", "value", "from"], usize::MAX);
    for Row { key, value, origin } in &effective.settings {
        table.add_row([key, value, &origin.to_string()]);
    }
    output::print(&table.trim_fmt())?;
    effective.accepted.iter().try_for_each(|accepted| output::print(&format!("note: {accepted}")))
}
