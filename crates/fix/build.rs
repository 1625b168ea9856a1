//! Compiles the library of `run --via preload`, which the crate contains as bytes.
#![forbid(unsafe_code)]

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    for file in ["preload/abi.rs", "preload/preload.rs", "src/run/layout.rs"] {
        println!("cargo::rerun-if-changed={file}");
    }
    let variable = |name: &str| env::var_os(name).unwrap_or_else(|| panic!("cargo sets {name}"));
    let output = PathBuf::from(variable("OUT_DIR")).join("fourtuple-preload.so");
    let mut rustc = Command::new(variable("RUSTC"));
    rustc.args(["--crate-name", "fourtuple_preload", "--crate-type", "cdylib", "--edition", "2024"]);
    rustc.args(["-C", "panic=abort", "-C", "opt-level=3", "-C", "codegen-units=1", "-C", "strip=symbols"]);
    // Of the layout, the library uses the counters of its own way only.
    rustc.args(["-D", "warnings", "-A", "dead_code"]);
    rustc.arg("--target").arg(variable("TARGET"));
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        let mut argument = std::ffi::OsString::from("linker=");
        argument.push(linker);
        rustc.arg("-C").arg(argument);
    }
    rustc.arg("-o").arg(&output).arg("preload/preload.rs");
    let status = rustc.status().unwrap_or_else(|error| panic!("cannot run rustc: {error}"));
    assert!(status.success(), "rustc could not compile preload/preload.rs");
}
