//! `kvbm top`: a running manager in the terminal.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Read as _, Write as _};
use std::time::Duration;

use clap::Args;
use crossterm::terminal::{self, Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen};
use crossterm::{cursor, execute, queue};
use kvbm_tiers::clock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Deserialize;
use tokio::runtime::Runtime;

use crate::GlobalOptions;
use crate::output::{self, CommandFailure};
use crate::stop::{self, StopSignal};
use crate::why::AskedProcess;

/// Shows tiers, routes, hits and faults of a process that serves its state
/// (`DYN_KVBM_METRICS=true`), anew every second, until q is pressed.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    process: AskedProcess,
    /// Print what is the case now, and end; as where standard input or output is no terminal, or
    /// with --json
    #[arg(long)]
    once: bool,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
}

/// As the process describes itself: `State` of the crate `kvbm`, as far as it is shown.
#[derive(Clone, Debug, Default, Deserialize)]
struct ScreenLook {
    version: String,
    uptime_s: f64,
    tiers: Vec<TierRow>,
    routes: Vec<RouteRow>,
    lookups: LookupCounts,
    faults: Vec<FaultRow>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct TierRow {
    #[serde(rename = "tier")]
    name: String,
    capacity_blocks: Option<u64>,
    resident_blocks: u64,
    dirty_blocks: u64,
    lost_blocks: u64,
    evictions_total: u64,
    hit_blocks_total: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct RouteRow {
    from: String,
    to: String,
    backend: String,
    queued_blocks: u64,
    in_flight_blocks: u64,
    bytes_total: u64,
    copied_blocks_total: u64,
    failed_total: u64,
    overdue_now: u64,
    breaker: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct LookupCounts {
    blocks_total: u64,
    hit_blocks_total: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct FaultRow {
    at_s: f64,
    what: String,
    #[serde(rename = "where")]
    place: String,
    count: u64,
}

pub(crate) fn run(args: &TopArgs, global: &GlobalOptions) -> Result<(), CommandFailure> {
    let runtime = stop::runtime()?;
    if global.json {
        return output::print_json(&runtime.block_on(args.process.get("v1/state", &[]))?);
    }
    let first = ask(&runtime, &args.process)?;
    if args.once || !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return output::print(&text(&first, &ScreenLook::default()));
    }
    let stop = StopSignal::on_signals(&runtime)?;
    watch(args, first, &runtime, &stop).map_err(|error| {
        CommandFailure::unexpected(format!("cannot draw on the terminal: {error}"))
    })?;
    stop.check()
}

fn ask(runtime: &Runtime, process: &AskedProcess) -> Result<ScreenLook, CommandFailure> {
    let state = runtime.block_on(process.get("v1/state", &[]))?;
    serde_json::from_value(state).map_err(|error| {
        CommandFailure::unusable(format!("{} is no kvbm of this version: {error}", process.url))
    })
}

fn watch(
    args: &TopArgs,
    first: ScreenLook,
    runtime: &Runtime,
    stop: &StopSignal,
) -> io::Result<()> {
    let _screen = TopScreen::open()?;
    let mut shown = text(&first, &ScreenLook::default());
    let mut before = first;
    loop {
        TopScreen::show(&format!("{shown}\nq: end"))?;
        if is_left(Duration::from_secs(args.interval), stop)? {
            return Ok(());
        }
        shown = match ask(runtime, &args.process) {
            Ok(now) => {
                // Another process answers there, or this one began anew.
                let since =
                    if now.uptime_s > before.uptime_s { before } else { ScreenLook::default() };
                let shown = text(&now, &since);
                before = now;
                shown
            }
            // It may come back: what it was is shown beside.
            Err(failure) => format!("{failure}\n\n{}", text(&before, &ScreenLook::default())),
        };
    }
}

/// Waits for the next look. True: the user has seen enough, or is gone.
fn is_left(interval: Duration, stop: &StopSignal) -> io::Result<bool> {
    /// A signal is heeded so soon.
    const STEP: Duration = Duration::from_millis(200);
    let end = clock::now() + interval;
    while stop.check().is_ok() {
        let left = end.saturating_duration_since(clock::now());
        if left.is_zero() {
            return Ok(false);
        }
        if is_key_pressed(left.min(STEP))? && ends(&read_keys()) {
            return Ok(true);
        }
    }
    Ok(true)
}

fn is_key_pressed(limit: Duration) -> io::Result<bool> {
    let stdin = io::stdin();
    let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
    let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
    match poll(&mut fds, Some(&limit)) {
        Err(Errno::INTR) => Ok(false),
        polled => Ok(polled? > 0),
    }
}

/// What a terminal sends for the keys that were pressed; nothing from one that hung up.
fn read_keys() -> Vec<u8> {
    let mut keys = [0; 64];
    let read = io::stdin().lock().read(&mut keys).unwrap_or(0);
    keys[..read].to_vec()
}

/// In this mode of the terminal Ctrl-C is a key as any other. Arrows and the like begin as Esc
/// does.
fn ends(keys: &[u8]) -> bool {
    matches!(keys, [] | b"\x1b")
        || (keys[0] != b'\x1b' && keys.iter().any(|key| b"q\x03".contains(key)))
}

/// The terminal, which is as it was when this is dropped.
struct TopScreen;

impl TopScreen {
    fn open() -> io::Result<Self> {
        terminal::enable_raw_mode()?;
        // From here on there is something to put back.
        let screen = Self;
        execute!(io::stdout(), EnterAlternateScreen, cursor::Hide)?;
        Ok(screen)
    }

    fn show(text: &str) -> io::Result<()> {
        // Some terminals, serial lines among them, do not know their size.
        let (width, height) = match terminal::size()? {
            (0, _) | (_, 0) => (80, 24),
            size => size,
        };
        let mut out = io::stdout().lock();
        queue!(out, cursor::MoveTo(0, 0))?;
        for line in text.lines().take(usize::from(height)) {
            let line: String = line.chars().take(usize::from(width)).collect();
            write!(out, "{line}")?;
            queue!(out, Clear(ClearType::UntilNewLine), cursor::MoveToNextLine(1))?;
        }
        queue!(out, Clear(ClearType::FromCursorDown))?;
        out.flush()
    }
}

impl Drop for TopScreen {
    fn drop(&mut self) {
        let _ = execute!(io::stdout(), cursor::Show, LeaveAlternateScreen);
        let _ = terminal::disable_raw_mode();
    }
}

/// The state `now`, and the rates since `before`; since the start, where that is the default.
fn text(now: &ScreenLook, before: &ScreenLook) -> String {
    let mut text = String::new();
    let seconds = (now.uptime_s - before.uptime_s).max(1e-3);
    let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
    let (asked, hit) = (now.lookups.blocks_total, now.lookups.hit_blocks_total);
    let of_late = output::share(
        hit.saturating_sub(before.lookups.hit_blocks_total),
        asked.saturating_sub(before.lookups.blocks_total),
    );
    let mut line = |line: String| {
        // What a process tells must not move the cursor.
        let _ = writeln!(text, "{}", line.replace(char::is_control, " ").trim_end());
    };
    line(format!("kvbm {}, up {:?}", now.version, Duration::from_secs(now.uptime_s as u64)));
    line(format!(
        "hit rate {} now, {} of {} blocks since the start",
        output::percent(of_late),
        output::percent(output::share(hit, asked)),
        output::count(asked)
    ));
    line(String::new());
    line(
        "tier            blocks                                 hits    dirty   evicted/s   lost"
            .to_owned(),
    );
    for (i, tier) in now.tiers.iter().enumerate() {
        let evicted = before.tiers.get(i).map_or(0, |tier| tier.evictions_total);
        line(format!(
            "{:<8} {:>13}  {} {:>12} {:>8} {:>11.1} {:>6}",
            tier.name,
            output::count(tier.resident_blocks),
            bar(tier.resident_blocks, tier.capacity_blocks.unwrap_or(u64::MAX)),
            output::count(tier.hit_blocks_total),
            output::count(tier.dirty_blocks),
            rate(tier.evictions_total, evicted),
            tier.lost_blocks
        ));
    }
    line(String::new());
    line(
        "route           backend           bytes/s  blocks/s   queued   under way   failed"
            .to_owned(),
    );
    for (i, route) in now.routes.iter().enumerate() {
        let then = before.routes.get(i).cloned().unwrap_or_default();
        let state = match (route.breaker.as_str(), route.overdue_now) {
            ("open", _) => "  left alone".to_owned(),
            (_, 0) => String::new(),
            (_, overdue) => format!("  {overdue} overdue"),
        };
        line(format!(
            "{:<15} {:<15} {:>9}  {:>8.0} {:>8} {:>11} {:>8}{state}",
            format!("{}>{}", route.from, route.to),
            route.backend,
            output::decimal_bytes(rate(route.bytes_total, then.bytes_total)),
            rate(route.copied_blocks_total, then.copied_blocks_total),
            route.queued_blocks,
            route.in_flight_blocks,
            route.failed_total
        ));
    }
    line(String::new());
    for fault in now.faults.iter().take(5) {
        let ago = Duration::from_secs((now.uptime_s - fault.at_s).max(0.0) as u64);
        line(format!("{ago:?} ago: {} at {}, {} times", fault.what, fault.place, fault.count));
    }
    if now.faults.is_empty() {
        line("no faults".to_owned());
    }
    text
}

/// How much of `whole` is taken.
fn bar(part: u64, whole: u64) -> String {
    const WIDTH: usize = 16;
    let share = output::share(part, whole).min(1.0);
    let full = (share * WIDTH as f64).round() as usize;
    format!("{}{} {:>7}", "#".repeat(full), ".".repeat(WIDTH - full), output::percent(share))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn look(uptime_s: f64, blocks: u64) -> ScreenLook {
        let tier = json!({"tier": "host", "capacity_blocks": 4000, "resident_blocks": 1000, "dirty_blocks": 7,
            "lost_blocks": 2, "evictions_total": blocks, "hit_blocks_total": 50});
        let route = json!({"from": "host", "to": "disk", "backend": "uring\u{1b}[2J", "queued_blocks": 3,
            "in_flight_blocks": 4, "bytes_total": blocks * 1_000_000, "copied_blocks_total": blocks,
            "failed_total": 1, "overdue_now": 0, "breaker": "open"});
        let fault = json!({"at_s": 5.0, "what": "copy_io", "where": "host>disk", "count": 9});
        let lookups = json!({"blocks_total": 2 * blocks, "hit_blocks_total": blocks});
        let look = json!({"version": "0.1.0", "uptime_s": uptime_s, "tiers": [tier], "routes": [route],
            "lookups": lookups, "faults": [fault], "more": "is ignored"});
        serde_json::from_value(look).unwrap()
    }

    #[test]
    fn keys_that_end_it_are_told_from_others() {
        for ends_it in [&b"q"[..], b"\x03", b"\x1b", b"xq", b""] {
            assert!(ends(ends_it), "{ends_it:?}");
        }
        for other in [&b"x"[..], b"\x1b[A", b"\x1bOq"] {
            assert!(!ends(other), "{other:?}");
        }
    }

    #[test]
    fn speeds_are_of_the_time_between_two_looks() {
        let shown = text(&look(12.0, 300), &look(10.0, 100));
        for expected in [
            "up 12s",
            "hit rate 50.0 % now",
            "####............  25.0 %",
            " 100.0 ",
            "100 MB",
            "left alone",
        ] {
            assert!(shown.contains(expected), "{expected}: {shown}");
        }
        assert!(shown.contains("7s ago: copy_io at host>disk, 9 times"), "{shown}");
        assert!(
            text(&look(10.0, 100), &ScreenLook::default()).contains("10.0 MB"),
            "since the start"
        );
        assert!(!shown.contains('\u{1b}'), "a process moves no cursor");
    }
}
