//! Independent work on all cores, with a bar.

use std::io;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;

/// Does `work` for each job, as many at a time as there are cores. The results are in the order of
/// the jobs.
pub(super) fn each<J: Sync, R: Send>(
    what: &'static str,
    jobs: &[J],
    work: impl Fn(&J) -> R + Sync,
) -> Vec<R> {
    let bar = bar(jobs.len() as u64, what);
    let waiting = Mutex::new(jobs.iter().enumerate());
    let next = || waiting.lock().ok().and_then(|mut waiting| waiting.next());
    let work_on = || {
        let mut done = Vec::new();
        while let Some((at, job)) = next() {
            done.push((at, work(job)));
            bar.inc(1);
        }
        done
    };
    let cores = thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let mut done = thread::scope(|scope| {
        let threads: Vec<_> = (1..cores).map(|_| scope.spawn(work_on)).collect();
        let mut done = work_on();
        for thread in threads {
            done.extend(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    bar.finish_and_clear();
    done.sort_by_key(|&(at, _)| at);
    done.into_iter().map(|(_, result)| result).collect()
}

/// A bar on a terminal; nothing anywhere else.
fn bar(jobs: u64, what: &'static str) -> ProgressBar {
    let template = if output::is_lively(&io::stderr()) {
        "{bar:30.cyan/dim} {pos}/{len} {msg} ({eta} left)"
    } else {
        "{bar:30} {pos}/{len} {msg} ({eta} left)"
    };
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::with_draw_target(Some(jobs), ProgressDrawTarget::stderr_with_hz(10))
        .with_style(style.progress_chars("━━╌"))
        .with_message(what);
    if !bar.is_hidden() {
        bar.enable_steady_tick(Duration::from_millis(200));
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order() {
        let jobs: Vec<u32> = (0..100).collect();
        assert_eq!(
            each("squares", &jobs, |job| job * job),
            jobs.iter().map(|job| job * job).collect::<Vec<_>>()
        );
        assert_eq!(each("nothing", &[], |job: &u32| *job), [0; 0]);
    }
}
