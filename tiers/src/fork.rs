//! What the children that this process forks must leave alone.
//!
//! Engines fork: workers, data loaders, probes of libraries. A child has a copy of every value here, but none of the
//! threads, not the memory that is kept from children, and its files and locks on them are still the parent's.

/// The process that made a value. In any other one its destructor must not join threads (they are not there: it
/// would wait for ever), unlock files (the parent would lose its lock), remove what the parent uses, unmap memory
/// that is not there (something else of the child's may have its addresses), or close channels, whose locks a
/// thread of the parent may have held at the moment of the fork.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Maker(u32);

impl Maker {
    pub(crate) fn this_process() -> Self {
        Self(std::process::id())
    }

    pub(crate) fn is_this_process(self) -> bool {
        self.0 == std::process::id()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::backend::Backend;
    use crate::memcpy::MemcpyBackend;
    use crate::testing::{fill_pattern, has_pattern, holds_in_a_child, host, order, run};

    #[test]
    fn a_child_drops_a_pool_of_threads_without_waiting_for_it() {
        let memory = Arc::new(host(2, 4096));
        let mut frames = memory.frames().unwrap();
        let (mut from, to) = (frames.take().unwrap(), frames.take().unwrap());
        fill_pattern(1, memory.write(&mut from).unwrap());
        let mut backend = Some(MemcpyBackend::new(vec![Arc::clone(&memory) as _], 2).unwrap());
        assert!(holds_in_a_child(|| {
            drop(backend.take());
            true
        }));
        let backend: &dyn Backend = backend.as_ref().unwrap();
        run(backend, vec![order(1, from.slot_ref(), to.slot_ref())]).remove(0).unwrap();
        assert!(has_pattern(1, memory.read(&to).unwrap()));
    }
}
