//! A panic in a thread of ours ends the test process: a caller may never hear of it, and the test
//! would pass.

use std::panic;
use std::process::abort;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

static ARE_MEANT: AtomicBool = AtomicBool::new(false);

/// The test has threads of ours panic. From here on that ends nothing.
pub fn panics_are_meant() {
    ARE_MEANT.store(true, Ordering::Relaxed);
}

/// Called before our first thread starts.
pub(crate) fn end_at_panics() {
    static HOOK: Once = Once::new();
    // A thread that is started while another one's panic unwinds it cannot set a hook.
    if thread::panicking() {
        return;
    }
    HOOK.call_once(|| {
        let tell = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            tell(info);
            let is_ours = thread::current().name().is_some_and(|name| name.starts_with("kvbm-"));
            if is_ours && !ARE_MEANT.load(Ordering::Relaxed) {
                eprintln!("no test means this panic (testing::panics_are_meant)");
                abort();
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use crate::clock;
    use crate::testing::{holds_in_a_child, panics_are_meant};

    #[test]
    fn a_panic_in_our_threads_ends_the_process() {
        let panics =
            || clock::spawn("kvbm-test", || panic!("as the test wants")).unwrap().join().is_err();
        assert!(holds_in_a_child(|| {
            panics_are_meant();
            panics()
        }));
        assert!(!holds_in_a_child(panics));
    }
}
