//! A line of progress on a terminal; nothing anywhere else.

use std::io;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvbm::Manager;

use crate::engine::ServedTally;
use crate::output;

/// Requests served, hit rate, bytes moved.
#[derive(Debug)]
pub(crate) struct ReplayProgress(ProgressBar);

impl ReplayProgress {
    /// For `requests` requests, where their number is known.
    pub(crate) fn new(requests: Option<u64>) -> Self {
        let target = ProgressDrawTarget::stderr_with_hz(10);
        let bar =
            ProgressBar::with_draw_target(requests, target).with_style(style(requests.is_some()));
        if !bar.is_hidden() {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Self(bar)
    }

    /// Shows the state after a request.
    pub(crate) fn show(&self, tally: &ServedTally, manager: &Manager) {
        if self.0.is_hidden() {
            return;
        }
        let moved = manager.admin().bytes().iter().map(|(.., bytes)| bytes).sum();
        let hit_rate = output::share(tally.hit_tokens.total(), tally.prompt_tokens);
        self.0.set_position(tally.requests);
        self.0.set_message(format!(
            "{:.0}/s, hit rate {}, {} moved",
            self.0.per_sec(),
            output::percent(hit_rate),
            output::bytes(moved)
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

fn style(has_length: bool) -> ProgressStyle {
    let (colour, plain) = if has_length {
        (
            "{bar:30.cyan/dim} {pos}/{len} requests, {msg} ({eta} left)",
            "{bar:30} {pos}/{len} requests, {msg} ({eta} left)",
        )
    } else {
        (
            "{spinner:.cyan} {pos} requests, {msg} ({elapsed})",
            "{spinner} {pos} requests, {msg} ({elapsed})",
        )
    };
    let template = if output::is_lively(&io::stderr()) { colour } else { plain };
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━━╌")
}
