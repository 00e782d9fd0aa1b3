//! What commands print: one JSON object, or tables that fit the terminal.

use std::io::{self, IsTerminal, Write};

use comfy_table::{Attribute, Cell, CellAlignment, ContentArrangement, Table, presets};
use serde::Serialize;

use crate::failure::CommandFailure;

/// Prints `text` and a line feed. A reader that is gone is no error.
pub(crate) fn print(text: &str) -> Result<(), CommandFailure> {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(CommandFailure::unexpected(format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Tells the user something that is no result. A listener that is gone is no error.
pub(crate) fn tell(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Prints `value` as one line of JSON.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), CommandFailure> {
    let json = serde_json::to_string(value).map_err(|error| {
        CommandFailure::unexpected(format!("cannot write the result as JSON: {error}"))
    })?;
    print(&json)
}

/// Whether colours and moving progress are welcome on `stream`.
pub(crate) fn is_lively(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// An empty table with these column titles. Columns from `numbers` on are aligned to the right.
pub(crate) fn table(titles: &[&str], numbers: usize) -> Table {
    let is_lively = is_lively(&io::stdout());
    let title = |text: &&str| {
        let cell = Cell::new(text);
        if is_lively { cell.add_attribute(Attribute::Bold) } else { cell }
    };
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(titles.iter().map(title).collect::<Vec<_>>());
    table
        .column_iter_mut()
        .skip(numbers)
        .for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

/// `1,234,567`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev().map(|group| String::from_utf8_lossy(group));
    groups.collect::<Vec<_>>().join(",")
}

/// `12.3 GiB`.
pub(crate) fn bytes(number: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if number < 1 << 10 {
        return format!("{number} B");
    }
    let power = (number.ilog2() / 10).min(UNITS.len() as u32);
    let scaled = number as f64 / f64::from(1 << 10).powi(power.cast_signed());
    format!("{scaled:.1} {}", UNITS[power as usize - 1])
}

/// `64.0 GB`: in powers of ten, as memory and drives are sold.
pub(crate) fn decimal_bytes(number: f64) -> String {
    const UNITS: [&str; 6] = ["B", "kB", "MB", "GB", "TB", "PB"];
    // What would be rounded to 1000 of a unit is 1.0 of the next.
    let power = ((number.max(1.0) * 1.0005).log10() / 3.0).floor().min(5.0);
    let scaled = number / 1e3_f64.powf(power);
    let decimals = usize::from(power > 0.0 && scaled < 100.0);
    format!("{scaled:.decimals$} {}", UNITS[power as usize])
}

/// `37.3 %`.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// `part` of `whole`; 0 where there is nothing to have a part of.
pub(crate) fn share(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// To four decimals, as figures stand in JSON.
pub(crate) fn rounded(number: f64) -> f64 {
    (number * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_as_people_read_them() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [0, 1_023, 1_024, 1_536 << 20, u64::MAX].map(bytes),
            ["0 B", "1023 B", "1.0 KiB", "1.5 GiB", "16384.0 PiB"]
        );
        assert_eq!(
            [0.0, 999.0, 1e3, 167_772_160.0, 64e9, 999.98e9, 2e18].map(decimal_bytes),
            ["0 B", "999 B", "1.0 kB", "168 MB", "64.0 GB", "1.0 TB", "2000 PB"]
        );
        assert_eq!(percent(share(1, 3)), "33.3 %");
        assert_eq!(percent(share(0, 0)), "0.0 %");
    }
}
