//! What a peer takes of its reader: memory, threads and descriptors.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{Worker, has_nixl, list, tell_figures};

const KNOWN: usize = 64;
const IN_USE: usize = 16;
/// Blocks of 1 MiB that each holder has, and that the reader copies.
const BLOCKS: u32 = 64;
/// What the goals are for.
const REGION_GIB: f64 = 8.0;

/// What a process takes of the system.
#[derive(Clone, Copy, Debug)]
struct Usage {
    /// Memory that it shares with no process.
    private_kib: f64,
    page_tables_kib: f64,
    threads: f64,
    descriptors: f64,
}

impl Usage {
    fn of(worker: &Worker) -> Self {
        let process = Path::new("/proc").join(worker.process.id().to_string());
        let status = fs::read_to_string(process.join("status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse().unwrap()
        };
        Self {
            private_kib: field("RssAnon"),
            page_tables_kib: field("VmPTE"),
            threads: field("Threads"),
            descriptors: fs::read_dir(process.join("fd")).unwrap().count() as f64,
        }
    }
}

fn worker(blocks: u32, addresses: &[String], way: &'static str) -> Worker {
    let list = list(&addresses.join(","));
    let settings = format!(
        "block_bytes = 1048576\nhost.capacity = \"{blocks}MiB\"\npeers.lease_share = 1.0\n{list}"
    );
    Worker::with(&settings, way)
}

/// Each figure is for one more peer: what all share comes with the first.
fn measure(way: &'static str) -> Value {
    let mut holders: Vec<_> = (0..IN_USE).map(|_| worker(BLOCKS, &[], way)).collect();
    let mut known: Vec<_> = holders.iter().map(|holder| holder.address.clone()).collect();
    known.extend((IN_USE..KNOWN).map(|n| format!("127.0.0.1:{n}")));
    let alone = worker(BLOCKS, &known[..1], way);
    let mut reader = worker(BLOCKS, &known, way);
    let (of_one, idle) = (Usage::of(&alone), Usage::of(&reader));
    let mut used = Vec::new();
    for (n, holder) in (1..).zip(&mut holders) {
        assert_eq!(holder.ask(&format!("compute {n} {BLOCKS}")), BLOCKS as usize);
        assert_eq!(reader.read(n, BLOCKS, &holder.address), BLOCKS as usize);
        assert_eq!(reader.ask(&format!("evict {BLOCKS}")), BLOCKS as usize);
        used.push(Usage::of(&reader));
    }
    let (first, all) = (used[0], used[IN_USE - 1]);
    let each = |figure: fn(&Usage) -> f64| (figure(&all) - figure(&first)) / (IN_USE - 1) as f64;
    // They grow with the region, unless its pages are huge.
    let region_gib = f64::from(BLOCKS) / 1024.0;
    let page_tables_kib = each(|usage| usage.page_tables_kib) / region_gib * REGION_GIB;
    json!({"scale": {
        "way": way,
        "known_kib": (idle.private_kib - of_one.private_kib) / (KNOWN - 1) as f64,
        "private_kib": each(|usage| usage.private_kib),
        "page_tables_kib_of_8_gib": page_tables_kib,
        "threads": each(|usage| usage.threads),
        "descriptors": each(|usage| usage.descriptors),
    }})
}

#[test]
#[ignore = "tests/peers.sh scale: it measures"]
fn sixteen_peers_of_sixty_four_are_used() {
    let ways = ["memory", "tcp", "nixl"].into_iter().filter(|way| *way != "nixl" || has_nixl());
    ways.map(measure).for_each(|figures| tell_figures(&figures));
}
