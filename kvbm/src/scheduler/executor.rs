//! The routing table: which backend moves blocks from one tier to another.

use std::sync::Arc;

use kvbm_tiers::backend::submit;
use kvbm_tiers::{Backend, CopyOp, Done, Fences, Route, Tier};

/// At most one backend per route, fixed at start-up.
#[derive(Clone, Debug, Default)]
pub struct Executor {
    routes: [[Option<Arc<dyn Backend>>; Tier::COUNT]; Tier::COUNT],
}

impl Executor {
    /// Lets `backend` serve those of its routes that no other backend serves yet.
    pub fn add(&mut self, backend: &Arc<dyn Backend>) {
        for &(from, to) in backend.routes() {
            self.routes[from.index()][to.index()].get_or_insert_with(|| Arc::clone(backend));
        }
    }

    /// The backend of a route.
    pub fn backend(&self, (from, to): Route) -> Option<&Arc<dyn Backend>> {
        self.routes[from.index()][to.index()].as_ref()
    }

    /// Whether a backend serves this route, so that blocks need not bounce.
    pub fn connects(&self, route: Route) -> bool {
        self.backend(route).is_some()
    }

    /// The routes that a block takes from one tier to another.
    pub(super) fn legs(&self, (from, to): Route) -> impl Iterator<Item = Route> + use<> {
        let legs = if self.connects((from, to)) {
            [Some((from, to)), None]
        } else {
            [Some((from, Tier::Host)), Some((Tier::Host, to))]
        };
        legs.into_iter().flatten()
    }

    /// Starts a batch whose operations share `route`, in this order with the engine's work.
    pub(super) fn submit(&self, route: Route, batch: Vec<CopyOp>, fences: Fences, done: &Done) {
        if let Some(backend) = self.backend(route) {
            return submit(backend, batch, fences, done.clone());
        }
        // Answers anyway: a task that is never completed would hold its slots for ever.
        done.refuse(0..batch.len(), &format!("no backend copies {} to {}", route.0, route.1));
    }
}
