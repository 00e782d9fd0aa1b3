//! Runs tests of this binary in child processes that find simulated libraries in place of NVIDIA's.

use std::ffi::{CStr, c_char};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::cuda::{KERNEL_SOURCE, probe};
use kvbm_tiers::testing::skip;

/// Set in children: the fault that is simulated, or `none`.
const VARIABLE: &str = "KVBM_SIMULATED";

/// Whether this process is the child that simulates `fault`.
pub(crate) fn is(fault: &str) -> bool {
    std::env::var(VARIABLE).is_ok_and(|simulated| simulated == fault)
}

/// Whether this process simulates anything.
pub(crate) fn is_on() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// The simulated driver has another fault from here on; `no-fault` heals it.
pub(crate) fn set(fault: &'static CStr) {
    // SAFETY: it is the library that this process uses already.
    let driver = unsafe { libloading::Library::new("libcuda.so.1") }.expect("a simulated library");
    // SAFETY: the simulation's own function, and a name that stays.
    unsafe {
        let set = driver.get::<unsafe extern "C" fn(*const c_char)>(b"simulated_fault");
        set.expect("a simulation")(fault.as_ptr());
    }
}

/// How many things the simulated driver has made.
pub(crate) fn allocations() -> i64 {
    ask("libcuda.so.1", b"simulated_allocations")
}

/// How many streams hang at their work.
pub(crate) fn streams_hanging() -> i64 {
    ask("libcuda.so.1", b"simulated_streams_hanging")
}

/// How many groups of threads had part in checksums since the last question.
pub(crate) fn summing_groups() -> i64 {
    ask("libcuda.so.1", b"simulated_summing_groups")
}

/// How many transfers the simulated cuFile has had in flight at once since the last question.
pub(crate) fn transfers_at_once() -> i64 {
    ask("libcufile.so.0", b"simulated_transfers_at_once")
}

fn ask(library: &str, question: &[u8]) -> i64 {
    // SAFETY: it is the library that this process uses already.
    let library = unsafe { libloading::Library::new(library) }.expect("a simulated library");
    // SAFETY: the simulation's own functions, without arguments.
    unsafe { library.get::<unsafe extern "C" fn() -> i64>(question).expect("a simulation")() }
}

/// Runs all tests of this binary on a simulated GPU. `flags`: what the simulation is compiled with.
///
/// # Panics
/// If one fails, or is skipped for want of the GPU.
pub(crate) fn run_all_tests(flags: &str) {
    if probe().driver.is_err() {
        run("none", flags, &[]);
    }
}

/// Runs one test in a child that simulates `fault`.
///
/// # Panics
/// If it fails.
pub(crate) fn run_one_test(fault: &str, flags: &str, test: &str) {
    run(fault, flags, &["--exact", test]);
}

fn run(fault: &str, flags: &str, arguments: &[&str]) {
    if is_on() {
        return;
    }
    let libraries = match libraries(flags) {
        Ok(home) => home,
        Err(why) => return skip("simulation", &why),
    };
    let binary = std::env::current_exe().expect("the path of this binary");
    let mut child = Command::new(binary);
    child.args(arguments).env(VARIABLE, fault).env("LD_LIBRARY_PATH", libraries);
    let required = if fault == "none" { "cuda,gds" } else { "" };
    let output = child.env("KVBM_REQUIRE", required).output().expect("this binary runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{fault}: {said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(!said.contains("running 0 tests"), "{fault}: {arguments:?} names no test");
}

/// The libraries, each with its source. Where NVIDIA's are installed they also lie there without a
/// version, which is the name that is looked for first: the simulated ones must have it too.
const LIBRARIES: [(&str, &str); 2] = [
    ("libcuda.so.1", include_str!("../simulated/cuda.cpp")),
    ("libcufile.so.0", include_str!("../simulated/cufile.cpp")),
];

/// A directory with the simulated libraries, compiled if no earlier run has left them there.
fn libraries(flags: &str) -> io::Result<PathBuf> {
    let sources = [KERNEL_SOURCE, flags].into_iter().chain(LIBRARIES.map(|(_, source)| source));
    let sum = checksum(sources.collect::<String>().as_bytes());
    let shared = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let home = shared.join(format!("simulated-gpu-{sum:08x}"));
    if !home.exists() {
        fs::create_dir_all(shared)?;
        let scratch = tempfile::tempdir_in(shared)?;
        compile(scratch.path(), flags)?;
        // Another test may have been faster.
        let _ = fs::rename(scratch.path(), &home);
    }
    Ok(home)
}

fn compile(home: &Path, flags: &str) -> io::Result<()> {
    let kernels = home.join("kernels.cu");
    fs::write(&kernels, KERNEL_SOURCE)?;
    for (library, source) in LIBRARIES {
        let path = home.join(library).with_extension("cpp");
        fs::write(&path, source)?;
        let mut compiler = Command::new("c++");
        compiler.args([
            "-std=c++14",
            "-O1",
            "-shared",
            "-fPIC",
            "-fno-strict-aliasing",
            "-Wno-unknown-pragmas",
        ]);
        compiler.arg(format!("-DKERNELS=\"{}\"", kernels.display())).args(flags.split_whitespace());
        let output =
            compiler.arg(&path).arg("-o").arg(home.join(library)).arg("-lpthread").output()?;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        symlink(library, home.join(library).with_extension(""))?;
    }
    Ok(())
}
