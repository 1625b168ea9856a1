//! The workspace, as `cargo metadata` describes it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The directories of the workspace.
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
pub(crate) fn metadata() -> Result<Value> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    // Under `cargo run` the variable names the current checkout; the constant names the checkout of the build.
    let manifest =
        std::env::var_os("CARGO_MANIFEST_DIR").map_or(manifest, |dir| Path::new(&dir).join("Cargo.toml"));
    let output = cargo()
        .args(["metadata", "--no-deps", "--format-version", "1", "--manifest-path"])
        .arg(&manifest)
        .output()
        .context("start cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    serde_json::from_slice(&output.stdout).context("read what cargo metadata printed")
}

impl Workspace {
    /// Reads the workspace of this program from `cargo metadata`.
    pub(crate) fn read() -> Result<Workspace> {
        let metadata = metadata()?;
        let path = |key: &str| {
            metadata[key].as_str().map(PathBuf::from).with_context(|| format!("cargo metadata: no {key:?}"))
        };
        Ok(Workspace { root: path("workspace_root")?, target: path("target_directory")? })
    }
}
