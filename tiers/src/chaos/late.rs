//! Work for later.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::clock;
use crate::fork::ServiceThread;

/// Does each job when its time has come, on one thread that starts with the first job.
///
/// Dropping it does at once what is left: no hanging operation is forgotten.
#[derive(Debug, Default)]
pub(crate) struct LateTimer {
    queue: Arc<LateQueue>,
    thread: Mutex<Option<ServiceThread>>,
}

#[derive(Debug, Default)]
struct LateQueue {
    jobs: Mutex<LateJobs>,
    changed: Condvar,
}

#[derive(Default)]
struct LateJobs {
    /// By time, then by number.
    waiting: BTreeMap<(Instant, u64), LateJob>,
    next: u64,
    closing: bool,
}

type LateJob = Box<dyn FnOnce() + Send>;

impl fmt::Debug for LateJobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jobs").field("waiting", &self.waiting.len()).finish_non_exhaustive()
    }
}

impl LateTimer {
    /// Does `job` at `when`, or now if there is no thread to be had.
    pub(crate) fn at(&self, when: Instant, job: impl FnOnce() + Send + 'static) {
        if !self.has_thread() {
            return job();
        }
        let mut jobs = self.queue.jobs.lock();
        let number = jobs.next;
        jobs.next += 1;
        jobs.waiting.insert((when, number), Box::new(job));
        self.queue.changed.notify_one();
    }

    /// Everything that waits is due now.
    pub(super) fn release(&self) {
        let mut jobs = self.queue.jobs.lock();
        let now = clock::now();
        let waiting = std::mem::take(&mut jobs.waiting);
        jobs.waiting = waiting
            .into_iter()
            .map(|((when, number), job)| ((when.min(now), number), job))
            .collect();
        self.queue.changed.notify_one();
    }

    fn has_thread(&self) -> bool {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let queue = Arc::clone(&self.queue);
            let started = ServiceThread::spawn("kvbm-chaos", move || queue.work());
            *thread = started.inspect_err(|error| tracing::warn!(%error, "nothing can hang")).ok();
        }
        thread.is_some()
    }
}

impl LateQueue {
    fn work(&self) {
        let mut jobs = self.jobs.lock();
        loop {
            let due = jobs.waiting.first_key_value().map(|(&(when, _), _)| when);
            match due {
                Some(when) if jobs.closing || when <= clock::now() => {
                    let job = jobs.waiting.pop_first();
                    // It may submit, report, and so come back here.
                    drop(jobs);
                    job.into_iter().for_each(|(_, job)| job());
                    jobs = self.jobs.lock();
                }
                Some(when) => drop(self.changed.wait_until(&mut jobs, when)),
                None if jobs.closing => return,
                None => self.changed.wait(&mut jobs),
            }
        }
    }
}

impl Drop for LateTimer {
    fn drop(&mut self) {
        self.queue.jobs.lock().closing = true;
        self.queue.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn jobs_are_done_in_the_order_of_their_times() {
        let (late, (report, reports)) = (LateTimer::default(), mpsc::channel());
        let now = Instant::now();
        // Its thread is busy until all of them wait.
        let (all_wait, waiting) = mpsc::channel::<()>();
        late.at(now, move || assert!(waiting.recv().is_err(), "nothing is sent"));
        for number in [3, 1, 2] {
            let report = report.clone();
            late.at(now + Duration::from_millis(number), move || report.send(number).unwrap());
        }
        drop(all_wait);
        assert_eq!(reports.iter().take(3).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(now.elapsed() >= Duration::from_millis(3));
    }

    #[test]
    fn what_is_released_or_left_is_done_at_once() {
        let (late, (report, reports)) = (LateTimer::default(), mpsc::channel());
        let tomorrow = Instant::now() + Duration::from_hours(24);
        let wait = |late: &LateTimer, number| {
            let report = report.clone();
            late.at(tomorrow, move || report.send(number).unwrap());
        };
        wait(&late, 1);
        assert!(reports.try_recv().is_err());
        late.release();
        assert_eq!(reports.recv(), Ok(1));
        wait(&late, 2);
        drop(late);
        assert_eq!(reports.try_recv(), Ok(2));
    }

    #[test]
    fn a_job_may_hold_the_last_handle() {
        let (late, (report, reports)) = (Arc::new(LateTimer::default()), mpsc::channel());
        let own = Arc::clone(&late);
        let job = move || {
            drop(own);
            report.send(()).unwrap();
        };
        late.at(Instant::now() + Duration::from_millis(2), job);
        drop(late);
        assert_eq!(reports.recv(), Ok(()));
    }
}
