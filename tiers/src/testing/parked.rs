use parking_lot::Mutex;
use std::sync::Arc;

use crate::backend::Backend;
use crate::batch::Share;
use crate::copy::{CopyError, CopyOp, Done, Endings, Route};
use crate::error::SetupError;
use crate::memory::{CpuMemories, Memory};

/// Holds every operation until the test says how it ends, in whichever order the test likes. The
/// bytes move at that moment and not before.
///
/// Between tiers of which it has no memory nothing moves: a test of bookkeeping alone needs no
/// regions.
#[derive(Debug)]
pub struct ParkedBackend {
    memories: CpuMemories,
    routes: Vec<Route>,
    parked: Mutex<Parked>,
}

#[derive(Debug, Default)]
struct Parked {
    submitted: u64,
    operations: Vec<(Pending, usize, Done)>,
}

/// An operation that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending {
    /// Its number: operations are counted in the order of submission.
    pub id: u64,
    /// What is to be copied.
    pub op: CopyOp,
}

impl ParkedBackend {
    /// Serves `routes`, copying between `regions`.
    ///
    /// # Errors
    /// Two regions are of one tier, or their blocks differ in size.
    pub fn new(regions: Vec<Arc<dyn Memory>>, routes: Vec<Route>) -> Result<Self, SetupError> {
        Ok(Self { memories: CpuMemories::new(regions)?, routes, parked: Mutex::default() })
    }

    /// What waits, in the order of submission.
    pub fn pending(&self) -> Vec<Pending> {
        self.parked.lock().operations.iter().map(|&(pending, ..)| pending).collect()
    }

    /// Ends the operation `id`: with `Ok` the block is copied first. False: nothing of that number
    /// waits.
    pub fn finish(&self, id: u64, result: Result<(), CopyError>) -> bool {
        let mut parked = self.parked.lock();
        let Some(place) = parked.operations.iter().position(|(pending, ..)| pending.id == id)
        else {
            return false;
        };
        let (Pending { op, .. }, index, done) = parked.operations.remove(place);
        // The report may submit again.
        drop(parked);
        done.report(vec![(index, result.and_then(|()| self.copy(&op)))]);
        true
    }

    /// Ends all that wait, well, in one report for each batch: as a medium that did all of it at
    /// once.
    pub fn finish_together(&self) {
        let parked = std::mem::take(&mut self.parked.lock().operations);
        let mut ended = Endings::default();
        parked
            .iter()
            .for_each(|(pending, index, done)| ended.add(done, *index, self.copy(&pending.op)));
        ended.report();
    }

    fn copy(&self, op: &CopyOp) -> Result<(), CopyError> {
        if !self.memories.serves(op.route()) {
            return Ok(());
        }
        // SAFETY: the operation is submitted and not completed: its submitter answers for the
        // slots.
        unsafe { self.memories.copy(op, Share::WHOLE) }
    }
}

// SAFETY: an operation is completed when it leaves the list, once, after its copy; dropping the
// backend with operations parked leaves them without completion and untouched, which is what a test
// of that wants.
unsafe impl Backend for ParkedBackend {
    fn name(&self) -> &'static str {
        "parked"
    }

    fn routes(&self) -> &[Route] {
        &self.routes
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        let mut parked = self.parked.lock();
        for (index, op) in batch.into_iter().enumerate() {
            let id = parked.submitted;
            parked.submitted += 1;
            parked.operations.push((Pending { id, op }, index, done.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::{CopyErrorKind, Tier};
    use crate::testing::{fill_pattern, has_pattern, host, order, start};

    #[test]
    fn bytes_move_when_the_test_says_so_in_its_order() {
        let memory = Arc::new(host(3, 4096));
        let mut frames = memory.frames().unwrap();
        let mut here: Vec<_> = std::iter::from_fn(|| frames.take()).collect();
        fill_pattern(5, memory.write(&mut here[0]).unwrap());
        let parked = ParkedBackend::new(
            vec![Arc::clone(&memory) as _],
            vec![Route::new(Tier::Host, Tier::Host)],
        )
        .unwrap();
        let op = |to: usize| order(to, here[0].slot_ref(), here[to].slot_ref());
        let reports = start(&parked, vec![op(1), op(2)]);
        assert!(reports.try_recv().is_err());
        assert!(!has_pattern(5, memory.read(&here[2]).unwrap()));
        let waiting = parked.pending();
        assert!(parked.finish(waiting[1].id, Ok(())));
        assert!(
            parked
                .finish(waiting[0].id, Err(CopyError::new(CopyErrorKind::Io, "as the test says")))
        );
        assert!(!parked.finish(waiting[0].id, Ok(())));
        assert!(matches!(reports.recv().unwrap(), (1, Ok(()))));
        assert!(matches!(reports.recv().unwrap(), (0, Err(_))));
        assert!(has_pattern(5, memory.read(&here[2]).unwrap()));
        assert!(!has_pattern(5, memory.read(&here[1]).unwrap()));
    }
}
