//! What users see of a command: one JSON object, or tables that fit the terminal; a bar while it
//! works; and how it fails, with a paragraph for the user and an exit status.

use std::error::Error;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use comfy_table::{Attribute, Cell, CellAlignment, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvbm::{ErrorKind, Manager};
use kvbm_settings::SettingsError;
use serde::Serialize;

use crate::engine::ServedTally;
use crate::trace::TraceError;

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

/// Why a command ends before its time.
#[derive(Debug)]
pub(crate) struct CommandFailure {
    status: u8,
    message: String,
}

impl CommandFailure {
    /// The input, the settings or the system are not as the command needs them: the user can change
    /// that.
    const UNUSABLE: u8 = 2;
    /// Something that should not happen did.
    const UNEXPECTED: u8 = 1;

    /// What was asked for cannot be done: says what is wrong, where, and what to change.
    pub(crate) fn unusable(message: impl Into<String>) -> Self {
        Self { status: Self::UNUSABLE, message: message.into() }
    }

    /// A result that must not be.
    pub(crate) fn unexpected(message: impl Into<String>) -> Self {
        Self { status: Self::UNEXPECTED, message: message.into() }
    }

    /// The user asked to stop; the status is the shell's for that signal.
    pub(crate) fn interrupted(signal: u8) -> Self {
        Self { status: 128 + signal, message: "interrupted".to_owned() }
    }

    /// The exit status.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.status)
    }
}

impl fmt::Display for CommandFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// The error and its causes in one line. Errors that quote their cause already are not repeated.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        cause = error.source();
    }
    message
}

impl From<SettingsError> for CommandFailure {
    fn from(error: SettingsError) -> Self {
        Self::unusable(with_causes(&error))
    }
}

impl From<TraceError> for CommandFailure {
    fn from(error: TraceError) -> Self {
        Self::unusable(with_causes(&error))
    }
}

impl From<kvbm::Error> for CommandFailure {
    fn from(error: kvbm::Error) -> Self {
        match error.kind() {
            ErrorKind::Invalid | ErrorKind::Unavailable => Self::unusable(with_causes(&error)),
            _ => Self::unexpected(with_causes(&error)),
        }
    }
}

/// Requests served, hit rate, bytes moved.
#[derive(Debug)]
pub(crate) struct ReplayProgress(ProgressBar);

impl ReplayProgress {
    /// For `requests` requests, where their number is known.
    pub(crate) fn new(requests: Option<u64>) -> Self {
        let template = match requests {
            Some(_) => "{bar:30} {pos}/{len} requests, {msg} ({eta} left)",
            None => "{spinner} {pos} requests, {msg} ({elapsed})",
        };
        Self(moving_bar(requests, template))
    }

    /// Shows the state after a request.
    pub(crate) fn show(&self, tally: &ServedTally, manager: &Manager) {
        if self.0.is_hidden() {
            return;
        }
        let moved = manager.admin().bytes().iter().map(|(.., bytes)| bytes).sum();
        let hit_rate = share(tally.hit_tokens.total(), tally.prompt_tokens);
        self.0.set_position(tally.requests);
        self.0.set_message(format!(
            "{:.0}/s, hit rate {}, {} moved",
            self.0.per_sec(),
            percent(hit_rate),
            bytes(moved)
        ));
    }

    /// Replaces the bar by a word on what happens after the last request.
    pub(crate) fn finishing(&self, what: &'static str) {
        self.0.set_style(ProgressStyle::default_spinner());
        self.0.set_message(what);
    }
}

impl Drop for ReplayProgress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// A bar on a terminal; nothing anywhere else.
pub(crate) fn bar(length: Option<u64>, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    ProgressBar::with_draw_target(length, ProgressDrawTarget::stderr_with_hz(10))
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// A bar that moves on its own, in colours where they are welcome.
pub(crate) fn moving_bar(length: Option<u64>, template: &str) -> ProgressBar {
    let mut template = template.to_owned();
    if is_lively(&io::stderr()) {
        template = template.replace("{bar:30}", "{bar:30.cyan/dim}");
        template = template.replace("{spinner}", "{spinner:.cyan}");
    }
    let bar = bar(length, &template);
    bar.set_style(bar.style().progress_chars("━━╌"));
    if !bar.is_hidden() {
        bar.enable_steady_tick(Duration::from_millis(200));
    }
    bar
}

#[cfg(test)]
mod tests {
    use std::io;

    use thiserror::Error;

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

    #[derive(Debug, Error)]
    #[error("cannot open it: {0}")]
    struct QuotedCause(#[source] io::Error);

    #[derive(Debug, Error)]
    #[error("the tier is not there")]
    struct SilentFailure(#[source] QuotedCause);

    #[test]
    fn every_cause_appears_once() {
        let error = SilentFailure(QuotedCause(io::Error::other("no such device")));
        assert_eq!(with_causes(&error), "the tier is not there: cannot open it: no such device");
    }
}
