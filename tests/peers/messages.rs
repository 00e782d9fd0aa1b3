//! What a lease takes of messages, once two workers have met.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use kvbm::{RequestInfo, Tier};
use kvbm_tests::engine::{self, peer_name};
use kvbm_tests::rig::{chain, wait_until};
use serde_json::json;

use super::{LIMIT, compute, from_toml, list, open, tell_figures};

const BLOCKS: u32 = 512;

/// The bytes of each frame that went over a connection, whichever way.
type Frames = Arc<Mutex<Vec<usize>>>;

/// A way to a worker on which frames are counted. No block goes over it: neighbours copy those.
fn counted_way(to: &str) -> (String, Frames) {
    let (listener, frames) = (TcpListener::bind("127.0.0.1:0").unwrap(), Frames::default());
    let (address, to) = (listener.local_addr().unwrap().to_string(), to.to_owned());
    let counted = Arc::clone(&frames);
    thread::spawn(move || {
        for reader in listener.incoming() {
            let (reader, holder) = (reader.unwrap(), TcpStream::connect(&to).unwrap());
            let back = (holder.try_clone().unwrap(), reader.try_clone().unwrap());
            for (from, to) in [(reader, holder), back] {
                let counted = Arc::clone(&counted);
                thread::spawn(move || {
                    // One of the two has ended.
                    let _ = pass_on(&from, &to, &counted);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    (address, frames)
}

fn pass_on(mut from: &TcpStream, mut to: &TcpStream, frames: &Mutex<Vec<usize>>) -> io::Result<()> {
    loop {
        let mut frame = vec![0; 4];
        from.read_exact(&mut frame)?;
        frame.resize(4 + u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]) as usize, 0);
        from.read_exact(&mut frame[4..])?;
        frames.lock().unwrap().push(frame.len());
        to.write_all(&frame)?;
    }
}

#[test]
fn a_lease_takes_two_messages_or_four() {
    let host = "host.capacity = \"32MiB\"\npeers.lease_share = 1.0";
    let there = open(from_toml(host), "1").unwrap();
    // More of other prompts lie between, so that slots are not in a row.
    let held = chain(1, BLOCKS);
    for until in (32..=BLOCKS as usize).step_by(32) {
        compute(&there, &held[..until]);
        compute(&there, &chain(1 + until as u32, 1));
    }
    let address = engine::address(there.manager());
    let (way, frames) = counted_way(&address);
    let here = open(from_toml(&format!("{host}\n{}", list(&way))), "1").unwrap();
    let peers = here.manager().peers().unwrap();
    // What goes over the way until the lease is there, and how many blocks it names.
    let lease = |blocks: u32| {
        frames.lock().unwrap().clear();
        let lease = peers.lease(&peer_name(&way), chain(1, blocks), RequestInfo::default());
        let lease = lease.wait().unwrap();
        let (of_lease, named) = (frames.lock().unwrap().clone(), lease.only_there());
        assert_eq!(peers.pull(lease).wait().unwrap().copied, named);
        // Its release is counted a moment later, and is not of the next lease.
        let is_counted = || frames.lock().unwrap().len() > of_lease.len();
        wait_until(LIMIT, "a lease is not released", is_counted);
        here.manager().admin().evict(Tier::Host, usize::MAX);
        (of_lease, named)
    };
    lease(1);
    let (whole, named) = lease(BLOCKS);
    assert_eq!((whole.len(), named), (2, BLOCKS as usize));
    assert!(whole[0] <= 256 && whole[1] <= 256 + (16 + 8) * named, "{whole:?}");
    let (part, named) = lease(BLOCKS + BLOCKS / 2);
    assert!(part.len() <= 4 && named + 8 >= BLOCKS as usize, "{part:?}, {named} blocks");
    assert!(part[..3].iter().all(|bytes| *bytes <= 256), "{part:?}");
    tell_figures(&json!({"messages": {
        "blocks": BLOCKS,
        "whole": whole.len(),
        "whole_bytes": whole.iter().sum::<usize>(),
        "part": part.len(),
        "part_bytes": part.iter().sum::<usize>(),
    }}));
}
