//! Tasks of CI besides cargo's: `cargo xtask plurals`, `bpf`, `deny`, `kernels`, `package`, `site` and `release`.
#![forbid(unsafe_code)]

mod bpf;
mod deny;
mod kernels;
mod package;
mod plurals;
mod release;
mod site;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

const USAGE: &str = "usage: cargo xtask plurals
       cargo xtask bpf [--check]
       cargo xtask deny
       cargo xtask kernels [--arch x86_64|aarch64] [--kernel 6.1|6.12|6.12-16k|all] [--release] [--no-run]
       cargo xtask site
       cargo xtask package
       cargo xtask release [--dry-run] [--target TRIPLE] [--key FILE]";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.split_first() {
        Some((&"plurals", [])) => plurals::run(),
        Some((&"bpf", [])) => bpf::run(bpf::Purpose::Rebuild),
        Some((&"bpf", ["--check"])) => bpf::run(bpf::Purpose::Check),
        Some((&"deny", [])) => deny::run(),
        Some((&"kernels", rest)) => match kernels::Options::parse(rest) {
            Ok(options) => kernels::run(&options),
            Err(message) => return misused(&message),
        },
        Some((&"site", [])) => site::run(),
        Some((&"package", [])) => package::run(),
        Some((&"release", rest)) => {
            let key = std::env::var_os("FOURTUPLE_SIGNING_KEY").map(PathBuf::from);
            match release::Options::parse(rest, key) {
                Ok(options) => release::run(&options),
                Err(message) => return misused(&message),
            }
        }
        Some((other, _)) => return misused(&format!("{other}: no such task, or it takes no arguments")),
        None => return misused("which task?"),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn misused(message: &str) -> ExitCode {
    eprintln!("xtask: {message}\n{USAGE}");
    ExitCode::from(2)
}

/// The directories of the workspace, as `cargo metadata` describes it.
#[derive(Clone, Debug)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
}

/// Returns the cargo that started this program, or the one on the path.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Returns what `cargo metadata` prints about the packages of the workspace.
pub(crate) fn packages() -> Result<Value> {
    // Under `cargo run` the variable names the current checkout; the constant names the checkout of the build.
    let directory = std::env::var_os("CARGO_MANIFEST_DIR");
    metadata(&directory.map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from), &["--no-deps"])
}

/// Returns what `cargo metadata` prints with these arguments about the workspace of a directory.
pub(crate) fn metadata(directory: &Path, arguments: &[&str]) -> Result<Value> {
    let mut command = cargo();
    command.current_dir(directory).args(["metadata", "--format-version", "1"]).args(arguments);
    let output = command.output().context("start cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    serde_json::from_slice(&output.stdout).context("read what cargo metadata printed")
}

impl Workspace {
    /// Reads the workspace of this program from `cargo metadata`.
    pub(crate) fn read() -> Result<Workspace> {
        let metadata = packages()?;
        let path = |key: &str| {
            metadata[key].as_str().map(PathBuf::from).with_context(|| format!("cargo metadata: no {key:?}"))
        };
        Ok(Workspace { root: path("workspace_root")?, target: path("target_directory")? })
    }
}

/// Runs a program to its end.
pub(crate) fn call(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("start {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}
