//! The Python package: its version, and its wheel and sdist where maturin is installed.

use std::ffi::OsString;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result};

use crate::release::binary::joined;
use crate::release::{Release, call};

/// Directory of the package, a workspace of its own.
const PACKAGE: &str = "bindings/python";

impl Release {
    /// Returns a fault if the package has another version than the workspace. maturin takes the version of Cargo.toml.
    pub(super) fn python_version(&self) -> Result<Option<String>> {
        let path = self.workspace.root.join(PACKAGE).join("Cargo.toml");
        let manifest = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let manifest: toml::Table =
            toml::from_str(&manifest).with_context(|| format!("read {}", path.display()))?;
        let version = manifest["package"]["version"].as_str();
        Ok((version != Some(self.version.as_str())).then(|| {
            format!(
                "{PACKAGE}/Cargo.toml has the version {}, the workspace {}",
                version.unwrap_or("of another type"),
                self.version
            )
        }))
    }

    /// Builds the wheel and the sdist into the artifacts. Without maturin the release has neither, and a line says so.
    pub(super) fn python_package(&self) -> Result<()> {
        if Command::new("maturin").arg("--version").output().is_err() {
            println!("release: no wheel and no sdist for Python, because maturin is not in PATH");
            return Ok(());
        }
        let target = self.workspace.target.join("release-python");
        let prefixes = self.prefixes(&target)?;
        let rustflags: Vec<OsString> =
            prefixes.iter().map(|prefix| joined("--remap-path-prefix=", prefix)).collect();
        for subcommand in [&["sdist"][..], &["build", "--release", "--locked"]] {
            let mut build = Command::new("maturin");
            build.current_dir(self.workspace.root.join(PACKAGE)).args(subcommand);
            build.arg("--out").arg(&self.artifacts).env("SOURCE_DATE_EPOCH", &self.epoch);
            build.env("CARGO_TARGET_DIR", &target);
            build.env("CARGO_ENCODED_RUSTFLAGS", rustflags.join(&OsString::from("\x1f")));
            call(&mut build)?;
        }
        Ok(())
    }
}
