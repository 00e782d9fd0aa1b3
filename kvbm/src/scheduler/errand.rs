//! Errands: copies that no request asked for, each of one block through a staging slot. The
//! scrubber uses them to read, and a directory that is left alone is tried with them. They go
//! overdue as all other copies do; one that never ends keeps what it may still touch, and nothing
//! else waits for it.

use std::sync::Arc;

use kvbm_tiers::{CopyError, CopyErrorKind, CopyOp, Done, Fences, Frame};

use super::Core;
use super::batch::TaskBatch;
use crate::sync::Mutex;
use crate::table::Scrubbed;

/// A copy that no request asked for.
#[derive(Debug)]
pub(super) struct InternalCopy {
    op: CopyOp,
    state: Mutex<CopyState>,
}

#[derive(Debug)]
enum CopyState {
    Working(CopyPurpose, Frame),
    /// The medium keeps the staging slot, and what the purpose holds, until it ends.
    Overdue(CopyPurpose, Frame),
    Ended,
}

/// What the copy is for.
#[derive(Debug)]
pub(super) enum CopyPurpose {
    /// To verify a block.
    Scrub(Scrubbed),
    /// To test whether this directory is well.
    Trial(usize),
}

impl InternalCopy {
    pub(super) const fn op(&self) -> &CopyOp {
        &self.op
    }

    pub(super) fn is_working(&self) -> bool {
        matches!(*self.state.lock(), CopyState::Working(..))
    }

    fn take(&self) -> CopyState {
        std::mem::replace(&mut *self.state.lock(), CopyState::Ended)
    }
}

impl Core {
    /// Sends the copy to its medium. `staging` is lent for it.
    pub(super) fn run_errand(self: &Arc<Self>, op: CopyOp, staging: Frame, purpose: CopyPurpose) {
        let errand = InternalCopy { op, state: Mutex::new(CopyState::Working(purpose, staging)) };
        let batch = self.health.batches.start_errand(errand, self.clock.uptime());
        let report = self.report(&batch);
        let done = Done::new(move |ended| {
            ended.into_iter().for_each(|(_, result)| report.errand_ended(result.as_ref().err()));
        });
        self.sending.executor.submit(op.route(), vec![op], Fences::default(), &done);
        if self.is_closed() {
            // It was closed since this was decided: nothing else will give it up.
            self.give_up(&batch);
        }
    }

    /// A backend reports the end of an errand.
    pub(super) fn errand_ended(self: &Arc<Self>, batch: &TaskBatch, error: Option<&CopyError>) {
        let Some(errand) = &batch.errand else { return };
        self.health.batches.progressed(batch, self.clock.uptime());
        self.health.batches.end(batch);
        match errand.take() {
            CopyState::Working(CopyPurpose::Scrub(scrubbed), staging) => {
                self.scrub_read(&errand.op, scrubbed, staging, error);
            }
            CopyState::Working(CopyPurpose::Trial(dir), staging) => {
                self.trial_ended(dir, &errand.op, staging, error);
            }
            CopyState::Overdue(purpose, staging) => self.errand_came_back(batch, purpose, staging),
            CopyState::Ended => {
                tracing::error!(route = ?(batch.route.from, batch.route.to), "a backend reported a copy twice");
            }
        }
    }

    /// Gives the errand up: its sender goes on without it.
    pub(super) fn give_up_errand(self: &Arc<Self>, batch: &TaskBatch, errand: &InternalCopy) {
        let mut state = errand.state.lock();
        let (purpose, staging) = match std::mem::replace(&mut *state, CopyState::Ended) {
            CopyState::Working(purpose, staging) => (purpose, staging),
            // Its end came first.
            other => return *state = other,
        };
        self.sending.staging.lock().lose_lent();
        self.metrics.went_overdue(batch.route, 1);
        let dir = if let CopyPurpose::Trial(dir) = purpose { Some(dir) } else { None };
        *state = CopyState::Overdue(purpose, staging);
        drop(state);
        match dir {
            Some(dir) => self.trial_overdue(dir),
            None => self.scrub_gave_up(),
        }
    }

    fn errand_came_back(self: &Arc<Self>, batch: &TaskBatch, purpose: CopyPurpose, staging: Frame) {
        match purpose {
            // Too late to say anything about the block: it is no longer pinned, and will be
            // verified in its next turn.
            CopyPurpose::Scrub(scrubbed) => self.end_scrub(scrubbed, None),
            CopyPurpose::Trial(dir) => self.trial_came_back(dir),
        }
        self.sending.staging.lock().regain(staging);
        self.metrics.came_back(batch.route, 1);
        self.health.breakers.revived(batch.route, self.clock.uptime());
        self.waker.wake();
        self.pump();
    }
}

pub(super) fn overdue() -> CopyError {
    CopyError::new(CopyErrorKind::TimedOut, "the medium did not answer in time".to_owned())
}
