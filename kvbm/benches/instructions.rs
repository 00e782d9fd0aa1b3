//! What the bookkeeping of a block costs, in instructions: a prompt is saved from the device to the
//! host tier and loaded back, and leaves either in between. With `ring` it goes to disk through
//! `io_uring` instead. Copies, checksums and background work do not count.
//!
//! `cargo bench -p kvbm --bench instructions`, perhaps with `-- ring`, runs itself under callgrind
//! with few rounds and with many, and prints the difference for each block. `KVBM_CALLGRIND=DIR`
//! keeps the profiles, for `callgrind_annotate`. To compare with commit 60936ed, build it in the same
//! profile (link-time optimisation counts), and call `evict` on the manager itself there.
//!
//! Valgrind 3.19 hangs where a ring waits, since its `io_uring_enter` keeps all other threads from
//! running. For `ring` build it with `*flags |= SfMayBlock;` as the first line of
//! `PRE(sys_io_uring_enter)` (`coregrind/m_syswrap/syswrap-linux.c`), and put it first in `PATH`.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::{env, fs};

use kvbm::{BlockHash, Manager, Options, Tier};
use kvbm_settings::{Capacity, DiskBackend, Settings};

const BLOCK_BYTES: u64 = 64 << 10;
const PROMPT_BLOCKS: usize = 128;
const FEW_ROUNDS: usize = 2;
const MANY_ROUNDS: usize = 22;
/// Functions that do not count, with all that they call: copies, checksums, the background's round.
const APART: [&str; 3] = ["Memories::copy", "checksum::checksum", "Core>::tick"];

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    // Cargo adds `--bench`.
    let below =
        if env::args().any(|argument| argument == "ring") { Tier::Disk } else { Tier::Host };
    match env::args().find_map(|argument| argument.parse().ok()) {
        Some(rounds) => move_blocks(below, rounds),
        None => {
            let few = instructions(below, FEW_ROUNDS)?;
            let many = instructions(below, MANY_ROUNDS)?;
            let blocks = PROMPT_BLOCKS * (MANY_ROUNDS - FEW_ROUNDS);
            println!("{{\"instructions_per_block\": {}}}", (many - few) / blocks as i64);
            Ok(())
        }
    }
}

/// Saves a prompt to the tier `below` the device and loads it back, `rounds` times.
fn move_blocks(below: Tier, rounds: usize) -> Result<(), Failure> {
    let room = Some(Capacity::Blocks(PROMPT_BLOCKS as u64));
    let dir = tempfile::tempdir()?;
    let mut settings = Settings { block_bytes: Some(BLOCK_BYTES), ..Settings::default() };
    settings.device.capacity = room;
    if below == Tier::Disk {
        (settings.disk.capacity, settings.disk.backend) = (room, DiskBackend::Uring);
        settings.disk.dirs = vec![dir.path().to_owned()];
        // What is being scrubbed cannot leave.
        settings.transfer.scrub_mib_per_second = 0;
    } else {
        settings.host.capacity = room;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let manager = runtime.block_on(Manager::open(settings, Options::default()))?;
    let chain: Vec<_> = (1..=PROMPT_BLOCKS as u128).map(BlockHash::from_u128).collect();
    let mut slots = manager.allocate(&chain, manager.lease(&chain))?;
    for position in slots.blocks() {
        slots.fill(position, |block| block.fill(position as u8));
    }
    drop(slots.publish()?.wait()?);
    for _ in 0..rounds {
        let saved = manager.save(manager.lease(&chain)).wait()?;
        assert_eq!(saved.copied, PROMPT_BLOCKS);
        drop(saved);
        assert_eq!(manager.admin().evict(Tier::Device, PROMPT_BLOCKS), PROMPT_BLOCKS);
        let loaded = manager.load(manager.lease(&chain)).wait()?;
        assert_eq!(loaded.copied, PROMPT_BLOCKS);
        drop(loaded);
        assert_eq!(manager.admin().evict(below, PROMPT_BLOCKS), PROMPT_BLOCKS);
    }
    Ok(())
}

/// Instructions of a run of this program that count.
fn instructions(below: Tier, rounds: usize) -> Result<i64, Failure> {
    let own = tempfile::tempdir()?;
    let dir = env::var_os("KVBM_CALLGRIND").map_or(own.path().to_owned(), PathBuf::from);
    let profile = dir.join(format!("rounds-{rounds}.callgrind"));
    let ended = Command::new("valgrind")
        .args(["--quiet", "--tool=callgrind"])
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .args([env::current_exe()?.into_os_string(), rounds.to_string().into()])
        .args((below == Tier::Disk).then_some("ring"))
        .stdout(Stdio::null())
        .status()?;
    if !ended.success() {
        return Err(format!("valgrind ended with {ended}").into());
    }
    Ok(counted(&fs::read_to_string(&profile)?))
}

/// What a [profile] counts in all, less the calls that do not count. It writes a function's name where
/// it is met first, later its number; the line behind `calls=` has what a call cost, `LINE COST`.
///
/// [profile]: https://valgrind.org/docs/manual/cl-format.html
fn counted(profile: &str) -> i64 {
    let (mut apart, mut is_apart, mut sum) = (Vec::new(), false, 0);
    let mut lines = profile.lines();
    while let Some(line) = lines.next() {
        let function = line.strip_prefix("fn=").or_else(|| line.strip_prefix("cfn="));
        if let Some((number, name)) = function.and_then(|function| function.split_once(' '))
            && APART.iter().any(|part| name.contains(part))
        {
            apart.push(number);
        }
        if let Some(function) = line.strip_prefix("cfn=") {
            let number = function.split(' ').next();
            is_apart = number.is_some_and(|number| apart.contains(&number));
        } else if let Some(total) = line.strip_prefix("totals: ") {
            sum += total.parse::<i64>().expect("a count");
        } else if line.starts_with("calls=") && is_apart {
            let cost = lines.next().and_then(|line| line.split(' ').nth(1));
            sum -= cost.and_then(|cost| cost.parse::<i64>().ok()).expect("a call's cost");
        }
    }
    sum
}
