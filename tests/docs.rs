//! docs/metrics.md lists exactly what a manager exports.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kvbm::scheduler::Tuning;
use kvbm::{Chain, Class, Elements, Options, Rank, RankGroup, RankOptions, RequestInfo, Tier};
use kvbm_settings::{Capacity, WriteBudget};
use kvbm_tests::engine;
use kvbm_tests::rig::{Rig, Sizes, TIGHT, chain, chaos, files_of, info_of, metric, wait_until};
use kvbm_tiers::testing::{Fault, FaultBackend};
use kvbm_tiers::{Backend, CopyErrorKind, MemcpyBackend, Route};
use prometheus::Registry;
use prometheus::proto::{Metric, MetricFamily, MetricType};

const PAGE: &str = include_str!("../docs/metrics.md");

/// A metric as the page describes it.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    kind: String,
    labels: Vec<String>,
    meaning: String,
}

#[test]
fn the_page_lists_exactly_the_metrics_of_the_registry() {
    let (exported, described) = (exported(), described());
    for (name, row) in &exported {
        let Some(found) = described.get(name) else {
            panic!("docs/metrics.md lacks `{name}`: {row:?}")
        };
        assert_eq!((&found.kind, &found.labels), (&row.kind, &row.labels), "{name}");
        assert!(
            found.meaning.starts_with(&row.meaning),
            "{name}: '{}' is '{}'",
            found.meaning,
            row.meaning
        );
    }
    for name in described.keys() {
        assert!(
            exported.contains_key(name),
            "docs/metrics.md describes `{name}`, which does not exist"
        );
        // OpenMetrics, and Python's client with it, names a counter without its ending.
        let family = name.strip_suffix("_total").unwrap_or_default();
        assert!(
            !described.contains_key(family),
            "`{name}` and `{family}` are of one name to OpenMetrics"
        );
    }
}

/// Of one manager with four tiers, whatever happens to it: labels come from closed sets, so no
/// request makes a series.
#[test]
fn series_are_few_whatever_happens() {
    /// Of values that a label has. One directory, rank and cache group: each more adds its own.
    const VALUES: [(&str, usize); 17] = [
        ("tier", 5),
        ("state", 6),
        ("reason", 10),
        ("scale", 5),
        ("backend", 1),
        ("request", 4),
        ("outcome", 6),
        ("direction", 2),
        ("rank", 1),
        ("dir", 1),
        ("verdict", 2),
        ("budget", 3),
        ("kind", 7),
        ("end", 8),
        ("way", 3),
        ("group", 1),
        // Eight that the settings name, and all others together.
        ("tenant", 9),
    ];
    const ROUTES: usize = 12;
    /// Buckets of the longer histogram, with those for infinity, the sum and the count.
    const ROWS_OF_HISTOGRAM: usize = 18 + 3;
    let values_of = |label: &String| {
        let known = VALUES.iter().find(|(known, _)| known == label);
        known.unwrap_or_else(|| panic!("the label {label} has no closed set of values")).1
    };
    let series_of = |row: &Row| {
        let routes = if row.labels.iter().any(|label| label == "from") { ROUTES } else { 1 };
        let others = row.labels.iter().filter(|label| !["from", "to"].contains(&label.as_str()));
        let rows = if row.kind == "histogram" { ROWS_OF_HISTOGRAM } else { 1 };
        routes * others.map(values_of).product::<usize>() * rows
    };
    let possible: usize = described().values().map(series_of).sum();
    assert!(possible <= 1_100, "{possible} series");
    let lines_of = |registry: Registry| {
        let text =
            prometheus::TextEncoder::new().encode_to_string(&registry.gather()).expect("UTF-8");
        text.lines().filter(|line| !line.starts_with('#')).count()
    };
    let everyday = lines_of(everyday());
    assert!(everyday <= 500, "{everyday} series of a manager that did a bit of everything");
}

/// Of metrics with labels that is, but for what happens at the start or never, and for failures, of
/// which the first is to be an increase.
#[test]
fn only_counters_of_failures_appear_before_their_first_event() {
    let registry = Registry::new();
    let dir = tempfile::tempdir().unwrap();
    let mut settings = engine::settings(4096, 8, 8);
    engine::add_disk(&mut settings, 16, dir.path());
    let manager = engine::open(settings, &registry).unwrap();
    drop(manager.lease(&chain(1, 3)));
    assert_eq!(manager.admin().failures(), 0);
    registry.gather();
    let is_early = |family: &&MetricFamily| {
        let counts = family.get_field_type() == MetricType::COUNTER;
        counts
            && family
                .get_metric()
                .iter()
                .any(|row| !row.get_label().is_empty() && row.get_counter().get_value() == 0.0)
    };
    let families = registry.gather();
    let early: Vec<_> = families.iter().filter(is_early).map(MetricFamily::name).collect();
    let happens_at_the_start_or_never = ["kvbm_backend_fallbacks_total"];
    let failures = [
        "kvbm_checksum_failures_total",
        "kvbm_disk_directory_failures_total",
        "kvbm_index_failures_total",
        "kvbm_overdue_copies_total",
        "kvbm_returned_copies_total",
        "kvbm_transfer_failures_total",
    ];
    let expected: BTreeSet<_> = happens_at_the_start_or_never.into_iter().chain(failures).collect();
    assert_eq!(early.into_iter().collect::<BTreeSet<_>>(), expected);
}

/// Rows such as ``| `name` | counter | `a`, `b` | What it counts. |``.
fn described() -> BTreeMap<String, Row> {
    let rows = PAGE.lines().filter(|line| line.starts_with("| `kvbm_"));
    rows.map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [name, kind, labels, meaning] = cells[..] else { panic!("not four cells: {line}") };
        let mut labels: Vec<_> = labels.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        labels.sort();
        let row = Row { kind: kind.to_owned(), labels, meaning: meaning.to_owned() };
        (name.trim_matches('`').to_owned(), row)
    })
    .collect()
}

/// A registry shows a metric with labels from its first event on: everything has to happen once.
fn exported() -> BTreeMap<String, Row> {
    let everyday = everyday();
    let families =
        [everyday, mishaps(), spent(), unwritable(), ranks(), half_a_disk(), tenants(), peers()]
            .into_iter()
            .flat_map(|registry| registry.gather());
    families.map(|family| (family.name().to_owned(), row(&family))).collect()
}

fn row(family: &MetricFamily) -> Row {
    let kind = match family.get_field_type() {
        MetricType::COUNTER => "counter",
        MetricType::GAUGE => "gauge",
        MetricType::HISTOGRAM => "histogram",
        other => panic!("{}: {other:?} is not described anywhere", family.name()),
    };
    let labels = family.get_metric().first().map(Metric::get_label).unwrap_or_default();
    let mut labels: Vec<_> = labels.iter().map(|label| label.name().to_owned()).collect();
    labels.sort();
    // The page says it in a heading.
    let meaning = family.help().replace(" (name used by NVIDIA's KVBM)", "");
    Row { kind: kind.to_owned(), labels, meaning }
}

fn everyday() -> Registry {
    let registry = Registry::new();
    let dir = tempfile::tempdir().unwrap();
    let mut settings = engine::settings(4096, 8, 8);
    engine::add_disk(&mut settings, 16, dir.path());
    settings.object.url = Some("memory:///".to_owned());
    let manager = engine::open(settings, &registry).unwrap();
    engine::serve(&manager, &chain(1, 3));
    engine::serve(&manager, &chain(1, 3));
    assert!(manager.drain(Duration::from_secs(10)).is_complete());
    for tier in Tier::ALL {
        manager.admin().evict(tier, 16);
    }
    drop(manager.lease(&chain(1, 3)));
    // Gauges are asked for while the manager is there.
    registry.gather();
    registry
}

/// Others may read here, and none has.
fn peers() -> Registry {
    let registry = Registry::new();
    let mut settings = engine::settings(4096, 8, 8);
    engine::add_peers(&mut settings, "");
    let known = engine::model(engine::fingerprint("w"));
    let options = Options { registry: registry.clone(), ..known };
    drop(engine::open_with(settings, options).unwrap());
    registry
}

/// Of two directories one fails once blocks have been scrubbed.
fn half_a_disk() -> Registry {
    let registry = Registry::new();
    let dir = tempfile::tempdir().unwrap();
    let mut settings = engine::settings(4096, 8, 8);
    settings.disk.capacity = Some(Capacity::Blocks(16));
    settings.disk.dirs = ["a", "b"].map(|name| dir.path().join(name)).to_vec();
    settings.transfer.scrub_mib_per_second = 100;
    let chaos = chaos(&["disk1:eio@0s+1h"]);
    let options = Options {
        registry: registry.clone(),
        media_layer: Some(chaos.layer()),
        ..Options::default()
    };
    let manager = engine::open_with(settings, options).unwrap();
    let until = |name| {
        for n in 1.. {
            engine::serve(&manager, &chain(n, 3));
            let _ = manager.drain(Duration::from_millis(100));
            if metric(&registry, name, &[]) > 0 {
                return;
            }
            assert!(n < 1_000, "{name} did not happen");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    until("kvbm_scrubbed_blocks_total");
    chaos.start();
    until("kvbm_disk_directory_failures_total");
    registry.gather();
    registry
}

/// A leader of one rank.
fn ranks() -> Registry {
    let registry = Registry::new();
    let dir = tempfile::tempdir().unwrap();
    let settings = engine::settings(4096, 8, 8);
    let group = RankGroup { dir: dir.path().to_owned(), world: 1, limit: Duration::from_secs(30) };
    let options = RankOptions::new(group.clone(), 0);
    let of_rank = settings.clone();
    let rank = std::thread::spawn(move || Rank::join(&of_rank, options).unwrap());
    let options = Options { registry: registry.clone(), ranks: Some(group), ..Options::default() };
    let manager = engine::open_with(settings, options).unwrap();
    let _rank = rank.join().unwrap();
    registry.gather();
    drop(manager);
    registry
}

/// Copies that fail, come back changed or late, and a disk that is full.
fn mishaps() -> Registry {
    let mut kept = None;
    let limit = Duration::from_mins(10);
    let tuning = Tuning { timeout: limit, ..TIGHT };
    let rig = Rig::new(Sizes { tiers: [8, 8, 16, 16], staging: 2 }, tuning, |places| {
        let memory = vec![Arc::clone(&places.device) as _, Arc::clone(&places.host) as _];
        let disk = FaultBackend::new(Arc::clone(&places.disk), places.all()).unwrap();
        let disk = kept.insert(Arc::new(disk));
        let memory: Arc<dyn Backend> = Arc::new(MemcpyBackend::new(memory, 1).unwrap());
        vec![memory, places.verified(Arc::clone(disk))]
    });
    let disk = kept.expect("made with the rig");
    let transfer = |to, n| {
        let lease = rig.core.lease(Chain::from(&chain(n, 3)), RequestInfo::default());
        rig.core.transfer(Class::Load, to, lease)
    };
    let compute = |n| {
        let filled = rig.fill(Chain::from(&chain(n, 3)));
        drop(rig.publish(filled, Chain::from(&chain(n, 3))).wait().unwrap());
        drop(transfer(Tier::Host, n).wait().unwrap());
        let _ = rig.core.drain(Duration::from_millis(50));
    };
    let both = Route::new(Tier::Host, Tier::Disk).both_ways();
    compute(1);
    wait_until(Duration::from_secs(30), "three blocks are not on disk", || {
        let _ = rig.core.drain(Duration::from_millis(50));
        rig.core.table().counts(Tier::Disk).resident == 3
    });
    rig.core.table().evict(Tier::Device, 8);
    rig.core.table().evict(Tier::Host, 8);
    disk.inject(Fault::Slow(Duration::from_secs(1)), &both);
    let ticket = transfer(Tier::Device, 1);
    rig.clock.pass(limit * 2);
    rig.core.tick();
    drop(ticket.wait().unwrap());
    while rig.metric("kvbm_returned_copies_total", &[]) == 0 {
        std::thread::sleep(Duration::from_millis(1));
        rig.core.tick();
    }
    disk.inject(Fault::BitFlip, &both);
    // The disk is left alone for a moment after what it did.
    while rig.metric("kvbm_checksum_failures_total", &[]) == 0 {
        drop(transfer(Tier::Device, 1).wait().unwrap());
        std::thread::sleep(Duration::from_millis(1));
    }
    disk.inject(Fault::FailAfter(0, CopyErrorKind::NoSpace), &both);
    compute(2);
    compute(3);
    rig.registry.clone()
}

/// An object tier whose budget is spent, and an engine that computes again what it is given.
fn spent() -> Registry {
    let registry = Registry::new();
    let mut settings = engine::settings(4096, 8, 8);
    settings.object.url = Some("memory:///".to_owned());
    settings.object.put_budget = 1;
    settings.transfer.shadow_share = 1.0;
    let manager = engine::open(settings, &registry).unwrap();
    for n in 1..4 {
        engine::serve(&manager, &chain(n, 3));
        let _ = manager.drain(Duration::from_millis(100));
    }
    // A hit that is computed again.
    manager.admin().evict(Tier::Device, 8);
    let lease = manager.lease(&chain(3, 3));
    let sample = manager.admin().shadow_sample(&lease).swap_remove(0);
    manager.admin().shadow_compare(&chain(3, 3), &sample, Elements::F32, &[0; 4], &[0; 4]).unwrap();
    registry.gather();
    registry
}

/// A tenant with a quota, and a budget of writes.
fn tenants() -> Registry {
    let registry = Registry::new();
    let dir = tempfile::tempdir().unwrap();
    let mut settings = engine::settings(4096, 8, 8);
    engine::add_disk(&mut settings, 16, dir.path());
    settings.disk.write_budget = Some(WriteBudget::BytesPerDay(1 << 30));
    settings.tenant_quotas = [(7, Capacity::Blocks(4))].into();
    let manager = engine::open(settings, &registry).unwrap();
    engine::serve_for(&manager, info_of(7), &chain(1, 3));
    registry.gather();
    registry
}

/// An index that cannot be written.
fn unwritable() -> Registry {
    let registry = Registry::new();
    let dir = tempfile::tempdir().unwrap();
    let mut settings = engine::settings(4096, 8, 8);
    engine::add_disk(&mut settings, 16, dir.path());
    settings.disk.keep = true;
    let fingerprint = engine::fingerprint("w");
    let name = format!("kvbm-v1-block4096-{fingerprint}.index.partial");
    let options = Options {
        registry: registry.clone(),
        fingerprint: Some(fingerprint),
        ..Options::default()
    };
    let manager = engine::open_with(settings, options).unwrap();
    std::fs::create_dir(dir.path().join(name)).unwrap();
    manager.reset(1).unwrap_err();
    registry
}

/// The page promises that each effect is shown by a test: it must not name one that is gone.
#[test]
fn every_test_that_the_reliability_page_names_is_there() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace");
    let page = std::fs::read_to_string(root.join("docs/reliability.md")).expect("the page");
    let rows =
        page.lines().filter(|line| line.starts_with("| ") && line.matches(" | ").count() >= 3);
    let cells = rows.filter_map(|row| row.trim_end_matches('|').rsplit('|').next());
    let named = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let named: Vec<&str> =
        named.filter(|name| name.contains('_') && !name.contains(['/', '.'])).collect();
    assert!(named.len() > 20, "the table is not where it was");
    let mut source = String::new();
    ["kvbm", "tiers", "tests", "cli"]
        .iter()
        .flat_map(|part| files_of(&root.join(part), "rs"))
        .for_each(|path| source.push_str(&std::fs::read_to_string(path).expect("source")));
    for name in named {
        assert!(
            source.contains(&format!("fn {name}()")),
            "docs/reliability.md names {name}, which is no test"
        );
    }
}

/// Modules of a file that are not of its tests alone.
fn modules_of(source: &str) -> Vec<&str> {
    let lines: Vec<_> = source.lines().collect();
    let module = |at: usize| {
        let declared = lines[at].trim_start_matches("pub ").trim_start_matches("pub(crate) ");
        let name = declared.strip_prefix("mod ")?.strip_suffix(';')?;
        let mut attributes = lines[..at].iter().rev().take_while(|line| line.starts_with("#["));
        let is_of_tests = attributes.any(|line| line.contains("test"));
        (!is_of_tests).then_some(name)
    };
    (0..lines.len()).filter_map(module).collect()
}

#[test]
fn tables_of_modules_name_each_module() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace");
    let (mut tables, mut missing) = (0, Vec::new());
    let parts = ["cli", "config", "examples", "kvbm", "policies", "python", "tiers"];
    for path in parts.iter().flat_map(|part| files_of(&root.join(part), "rs")) {
        let source = std::fs::read_to_string(&path).expect("source");
        if !source.contains("//! | module | ") {
            continue;
        }
        tables += 1;
        let cells =
            source.lines().filter_map(|line| line.strip_prefix("//! | ")?.split('|').next());
        let named: BTreeSet<_> = cells.flat_map(|cell| cell.split(['`', '@']).skip(1)).collect();
        let unnamed = modules_of(&source).into_iter().filter(|name| !named.contains(name));
        missing.extend(unnamed.map(|name| format!("{}: {name}", path.display())));
    }
    assert!(tables > 25, "{tables} tables are read");
    assert_eq!(missing, [""; 0], "modules that are in no table");
}
