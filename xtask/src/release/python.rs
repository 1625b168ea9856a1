//! The Python package: its version, and its wheel and sdist where maturin is installed.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
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
        let maturin = |directory: &Path, arguments: &[&str]| {
            let mut maturin = Command::new("maturin");
            maturin.current_dir(directory).args(arguments);
            maturin.arg("--out").arg(&self.artifacts).env("SOURCE_DATE_EPOCH", &self.epoch);
            maturin.env("CARGO_TARGET_DIR", &target);
            maturin.env("CARGO_ENCODED_RUSTFLAGS", rustflags.join(&OsString::from("\x1f")));
            call(&mut maturin)
        };
        maturin(&self.workspace.root.join(PACKAGE), &["sdist"])?;
        // The crates of the library are outside of the package's workspace, so the names of their symbols depend on their directory:
        // the wheel is built in the same directory everywhere.
        let sources = env::temp_dir().join(format!("fourtuple-{}-wheel", self.version));
        if sources.exists() {
            fs::remove_dir_all(&sources).with_context(|| format!("remove {}", sources.display()))?;
        }
        fs::create_dir(&sources).with_context(|| format!("make {}", sources.display()))?;
        let sdist = self.artifacts.join(format!("fourtuple-{}.tar.gz", self.version));
        let mut tar = Command::new("tar");
        call(
            tar.arg("--extract")
                .arg("--strip-components=1")
                .arg("--file")
                .arg(&sdist)
                .arg("--directory")
                .arg(&sources),
        )?;
        maturin(&sources, &["build", "--release", "--locked"])?;
        fs::remove_dir_all(&sources).with_context(|| format!("remove {}", sources.display()))?;
        Ok(())
    }
}
