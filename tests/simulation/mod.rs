//! Runs tests of this binary in child processes that find simulated libraries in place of NVIDIA's.

use std::path::Path;
use std::process::Command;

use kvbm_tiers::cuda::{KERNEL_SOURCE, probe};
use kvbm_tiers::testing::skip;

/// Set in children: the fault that is simulated, or `none`.
const VARIABLE: &str = "KVBM_SIMULATED";

/// Whether this process is the child that simulates `fault`.
pub(crate) fn is(fault: &str) -> bool {
    std::env::var(VARIABLE).is_ok_and(|simulated| simulated == fault)
}

/// Runs all tests of this binary on a simulated GPU. `flags`: what the simulation is compiled with.
///
/// # Panics
/// If one fails, or is skipped for want of the GPU.
pub(crate) fn run_all_tests(flags: &str) {
    if probe().driver.ready().is_err() {
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
    if std::env::var_os(VARIABLE).is_some() {
        return;
    }
    let home = tempfile::tempdir().expect("a directory for the simulated libraries");
    if let Err(why) = build(home.path(), flags) {
        return skip("simulation", &why);
    }
    let binary = std::env::current_exe().expect("the path of this binary");
    let mut child = Command::new(binary);
    child.args(arguments).env(VARIABLE, fault).env("LD_LIBRARY_PATH", home.path());
    let required = if fault == "none" { "cuda" } else { "" };
    let output = child.env("KVBM_REQUIRE", required).output().expect("this binary runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{fault}: {said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(!said.contains("running 0 tests"), "{fault}: {arguments:?} names no test");
}

/// Compiles the simulated libraries.
fn build(home: &Path, flags: &str) -> Result<(), String> {
    let kernels = home.join("kernels.cu");
    std::fs::write(&kernels, KERNEL_SOURCE).map_err(|error| error.to_string())?;
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/simulated/cuda.cpp");
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++14", "-O2", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]);
    compiler.arg(format!("-DKERNELS=\"{}\"", kernels.display())).args(flags.split_whitespace());
    compiler.arg(source).arg("-o").arg(home.join("libcuda.so.1")).arg("-lpthread");
    let output = compiler.output().map_err(|error| format!("no C++ compiler: {error}"))?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
