//! Memory near a device. Copies between a GPU and memory of another socket cross the link between
//! sockets, which both directions and all GPUs share.

#![expect(unsafe_code, reason = "calls of the C library")]

use std::path::Path;
use std::{fs, io};

/// Runs `allocate` with a preference for memory of this node: pages that it, and threads that it
/// starts, touch first come from there while there are any. On a machine with one node, where the
/// process was started with a choice of its own (`numactl`), or where the kernel refuses, it
/// changes nothing.
pub fn near<T>(node: Option<u32>, allocate: impl FnOnce() -> T) -> T {
    let _preferred =
        node.filter(|_| node_count(Path::new("/sys")) > 1).and_then(PreferredNode::new);
    allocate()
}

/// Nodes of this machine that are on. `sysfs`: `/sys`.
fn node_count(sysfs: &Path) -> usize {
    let online = fs::read_to_string(sysfs.join("devices/system/node/online")).unwrap_or_default();
    let ranges = online.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    });
    ranges.sum()
}

/// Words of a mask that holds all nodes of any kernel.
const MASK_WORDS: usize = 16;

/// A preference of this thread, and of those that it starts meanwhile.
struct PreferredNode;

impl PreferredNode {
    fn new(node: u32) -> Option<Self> {
        if policy() != Some(libc::MPOL_DEFAULT) {
            return None;
        }
        let mut mask = [0_u64; MASK_WORDS];
        *mask.get_mut(node as usize / 64)? |= 1 << (node % 64);
        match set_policy(libc::MPOL_PREFERRED, Some(&mask)) {
            Ok(()) => Some(Self),
            Err(error) => {
                tracing::info!(%error, node, "host memory comes from any NUMA node");
                None
            }
        }
    }
}

impl Drop for PreferredNode {
    fn drop(&mut self) {
        if let Err(error) = set_policy(libc::MPOL_DEFAULT, None) {
            tracing::warn!(%error, "this thread goes on preferring one NUMA node");
        }
    }
}

fn set_policy(mode: libc::c_int, nodes: Option<&[u64; MASK_WORDS]>) -> io::Result<()> {
    let start = nodes.map_or(std::ptr::null(), |nodes| nodes.as_ptr());
    // The kernel takes one bit less than it is told of.
    let bits = nodes.map_or(0, |nodes| nodes.len() * 64 + 1);
    // SAFETY: the kernel reads as many bits as there are, or no mask at all.
    let outcome = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, start, bits) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// This thread's; `None`: the kernel has no such thing.
fn policy() -> Option<libc::c_int> {
    let mut mode = 0;
    let none = std::ptr::null::<u64>();
    // SAFETY: the kernel writes the mode only.
    let outcome = unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, none, 0_usize, none, 0_usize)
    };
    (outcome == 0).then_some(mode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_counted_as_the_kernel_lists_them() {
        let home = tempfile::tempdir().unwrap();
        let list = home.path().join("devices/system/node/online");
        fs::create_dir_all(list.parent().unwrap()).unwrap();
        assert_eq!(node_count(home.path()), 0);
        for (online, nodes) in [("0\n", 1), ("0-1\n", 2), ("0,2-4\n", 4)] {
            fs::write(&list, online).unwrap();
            assert_eq!(node_count(home.path()), nodes);
        }
    }

    #[test]
    fn a_preference_holds_for_its_threads_and_ends_with_it() {
        match PreferredNode::new(0) {
            None => crate::testing::skip("numa", &"the kernel sets no policy"),
            Some(preferred) => {
                assert_eq!(policy(), Some(libc::MPOL_PREFERRED));
                std::thread::scope(|scope| {
                    scope.spawn(|| assert_eq!(policy(), Some(libc::MPOL_PREFERRED)));
                });
                assert!(PreferredNode::new(0).is_none(), "an earlier choice stays");
                drop(preferred);
                assert_eq!(policy(), Some(libc::MPOL_DEFAULT));
            }
        }
    }

    #[test]
    fn one_node_is_no_choice() {
        let before = policy();
        if node_count(Path::new("/sys")) <= 1 {
            assert_eq!(near(Some(0), policy), before);
        }
    }
}
