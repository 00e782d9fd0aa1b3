//! What the Rust side logs, for Python's logging.
//!
//! Any thread may log, also one that holds the table's lock while another, which has the
//! interpreter, waits for that lock. So a thread that logs never waits for the interpreter: lines
//! are queued, and a thread of their own hands them on, holding no lock of ours meanwhile.

use std::collections::HashMap;
use std::fmt::{Debug, Write as _};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use kvbm_tiers::clock;
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Lines from one place in the code that are logged in a period; the others are counted, and their
/// number is logged at its end.
const BURST: u32 = 5;
const PERIOD: Duration = Duration::from_secs(10);
/// Lines that may wait for the interpreter.
const MAX_WAITING: usize = 1_000;
/// How long a process that ends waits for its last lines.
const END_LIMIT: Duration = Duration::from_secs(5);

pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(log_to, module)?)?;
    module.add_function(wrap_pyfunction!(flush_log, module)?)?;
    module.add_function(wrap_pyfunction!(end_log, module)?)
}

/// What is called with a level of `logging`, a file, a line in it, and a text.
static TELL: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Has `tell(level, file, line, text)` called, on a thread of its own, for what this module logs
/// from here on.
#[pyfunction]
fn log_to(py: Python<'_>, tell: Py<PyAny>) {
    // The first one stays.
    let _ = TELL.set(py, tell);
    // A program that embeds this module may listen on its own.
    let _ = tracing::subscriber::set_global_default(LogSubscriber);
}

/// Waits until what was logged is handed on, a few seconds at most.
#[pyfunction]
fn flush_log(py: Python<'_>) {
    py.detach(|| queue().flush());
}

/// Hands on the rest, and nothing from here on: the interpreter is about to end.
#[pyfunction]
fn end_log(py: Python<'_>) {
    py.detach(|| queue().end());
}

/// Takes our events, and no spans.
struct LogSubscriber;

impl Subscriber for LogSubscriber {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event()
            && *metadata.level() <= Level::INFO
            && metadata.target().starts_with("kvbm")
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }

    fn event(&self, event: &Event<'_>) {
        let queue = queue();
        if queue.admits(event.metadata()) {
            // With no lock taken: what is formatted may log something itself.
            queue.push(event.metadata(), LogRecord::of(event));
        }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[derive(Clone)]
struct LogRecord {
    /// As Python numbers them.
    level: u32,
    file: &'static str,
    line: u32,
    text: String,
}

impl LogRecord {
    fn of(event: &Event<'_>) -> Self {
        let metadata = event.metadata();
        let level = match *metadata.level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            _ => 20,
        };
        let mut text = EventText(String::new());
        event.record(&mut text);
        let (file, line) =
            (metadata.file().unwrap_or_default(), metadata.line().unwrap_or_default());
        Self { level, file, line, text: text.0 }
    }

    fn tell(&self, py: Python<'_>, tell: &Py<PyAny>) {
        if let Err(error) = tell.call1(py, (self.level, self.file, self.line, &self.text)) {
            error.write_unraisable(py, None);
        }
    }
}

/// The message, and fields behind it.
struct EventText(String);

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let Self(text) = self;
        // Writing to a text does not fail.
        let _ = match field.name() {
            "message" => write!(text, "{value:?}"),
            name if text.is_empty() => write!(text, "{name}={value:?}"),
            name => write!(text, " {name}={value:?}"),
        };
    }
}

/// Lines of a process on their way. A child of a fork has a queue of its own: it has no thread of
/// its parent's, and of its locks copies that may stay locked.
struct LogQueue {
    process: u32,
    state: Mutex<LogQueueState>,
    changed: Condvar,
    of_child: OnceLock<Box<Self>>,
}

#[derive(Default)]
struct LogQueueState {
    waiting: Vec<LogRecord>,
    /// Logged of late, by place in the code.
    sites: HashMap<Identifier, LogSite>,
    /// Did not fit.
    lost: u64,
    has_thread: bool,
    /// Lines are being handed on.
    is_telling: bool,
    is_over: bool,
}

/// A place in the code that logged something.
struct LogSite {
    since: Instant,
    admitted: u32,
    more: u64,
    /// The latest of those that were admitted.
    last: Option<LogRecord>,
}

fn queue() -> &'static LogQueue {
    static FIRST: OnceLock<LogQueue> = OnceLock::new();
    let process = std::process::id();
    let mut queue = FIRST.get_or_init(|| LogQueue::new(process));
    while queue.process != process {
        queue = queue.of_child.get_or_init(|| Box::new(LogQueue::new(process)));
    }
    queue
}

impl LogQueue {
    fn new(process: u32) -> Self {
        Self {
            process,
            state: Mutex::default(),
            changed: Condvar::new(),
            of_child: OnceLock::new(),
        }
    }

    /// Whether what is logged there is to be handed on now. If not, it is counted.
    fn admits(&self, metadata: &Metadata<'_>) -> bool {
        let mut state = self.state.lock();
        if state.is_over {
            return false;
        }
        let site = state.site(metadata);
        if site.admitted < BURST {
            site.admitted += 1;
            return true;
        }
        site.more += 1;
        if site.more == 1 {
            // The thread has a time to wait for.
            self.changed.notify_all();
        }
        false
    }

    fn push(&'static self, metadata: &Metadata<'_>, line: LogRecord) {
        let mut state = self.state.lock();
        // It may have come while the line was made.
        if state.is_over {
            return;
        }
        state.site(metadata).last = Some(line.clone());
        if state.waiting.len() < MAX_WAITING {
            state.waiting.push(line);
        } else {
            state.lost += 1;
        }
        // Without a thread, which the system may refuse, the message is lost.
        state.has_thread = state.has_thread || clock::spawn("kvbm-log", || self.serve()).is_ok();
        self.changed.notify_all();
    }

    fn serve(&self) {
        loop {
            let (lines, is_last) = self.next_lines();
            let tell = |py: Python<'_>| {
                TELL.get(py)
                    .into_iter()
                    .for_each(|tell| lines.iter().for_each(|line| line.tell(py, tell)));
            };
            let has_told = lines.is_empty() || Python::try_attach(tell).is_some();
            let mut state = self.state.lock();
            state.is_telling = false;
            state.is_over |= !has_told;
            state.has_thread = !is_last && has_told;
            self.changed.notify_all();
            if !state.has_thread {
                return;
            }
        }
    }

    /// Waits for lines. Whether they are the last ones.
    fn next_lines(&self) -> (Vec<LogRecord>, bool) {
        let mut state = self.state.lock();
        loop {
            let lines = state.take_lines(clock::now());
            if !lines.is_empty() || state.is_over {
                state.is_telling = true;
                return (lines, state.is_over);
            }
            match state.next_count() {
                Some(at) => drop(self.changed.wait_until(&mut state, at)),
                None => self.changed.wait(&mut state),
            }
        }
    }

    fn flush(&self) {
        self.wait_while(|state| !state.waiting.is_empty() || state.is_telling);
    }

    fn end(&self) {
        self.state.lock().is_over = true;
        self.changed.notify_all();
        self.wait_while(|state| state.has_thread);
    }

    fn wait_while(&self, is_busy: impl Fn(&LogQueueState) -> bool) {
        let deadline = clock::now() + END_LIMIT;
        let mut state = self.state.lock();
        while state.has_thread && is_busy(&state) {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return;
            }
        }
    }
}

impl LogQueueState {
    fn site(&mut self, metadata: &Metadata<'_>) -> &mut LogSite {
        let now = clock::now();
        let site = self.sites.entry(metadata.callsite()).or_insert_with(|| LogSite::new(now));
        // Those beyond are handed on first.
        if site.more == 0 && now >= site.since + PERIOD {
            *site = LogSite::new(now);
        }
        site
    }

    /// Those that wait, and how many more there were where the period has ended.
    fn take_lines(&mut self, now: Instant) -> Vec<LogRecord> {
        let mut lines = std::mem::take(&mut self.waiting);
        let lost = std::mem::take(&mut self.lost);
        if let Some(last) = lines.last_mut().filter(|_| lost > 0) {
            let _ = write!(last.text, " (and {lost} lines that are not told)");
        }
        for site in self.sites.values_mut() {
            if site.more > 0 && (self.is_over || now >= site.since + PERIOD) {
                let more = std::mem::replace(site, LogSite::new(now));
                lines.extend(more.counted(now));
            }
        }
        lines
    }

    /// When a period ends in which there was more.
    fn next_count(&self) -> Option<Instant> {
        self.sites.values().filter(|site| site.more > 0).map(|site| site.since + PERIOD).min()
    }
}

impl LogSite {
    const fn new(since: Instant) -> Self {
        Self { since, admitted: 0, more: 0, last: None }
    }

    fn counted(self, now: Instant) -> Option<LogRecord> {
        let seconds = now.duration_since(self.since).as_secs_f64();
        let last = self.last?;
        Some(LogRecord {
            text: format!("{} more in {seconds:.0} s like: {}", self.more, last.text),
            ..last
        })
    }
}
