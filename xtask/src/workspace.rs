//! The workspace, as `cargo metadata` describes it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The table of the manifest that lists a dependency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DependencyKind {
    Normal,
    Dev,
    Build,
}

/// A dependency of a manifest.
#[derive(Clone, Debug)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    pub(crate) kind: DependencyKind,
    pub(crate) optional: bool,
}

/// One package of the workspace.
#[derive(Clone, Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// The package's directory, relative to the root of the workspace.
    pub(crate) directory: PathBuf,
    /// The root files of its libraries and binaries, relative to the root of the workspace.
    pub(crate) roots: Vec<PathBuf>,
    /// `cargo test` runs the examples of its library.
    pub(crate) has_doctests: bool,
    pub(crate) dependencies: Vec<Dependency>,
}

/// The root of the workspace and all of its packages.
#[derive(Clone, Debug)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    pub(crate) packages: Vec<Package>,
}

/// Returns the cargo that started this program, or the one on the path.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

impl Workspace {
    /// Reads the workspace of this program from `cargo metadata`.
    pub(crate) fn read() -> Result<Workspace> {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        // Under `cargo run` the variable names the current checkout; the constant names the checkout of the build.
        let manifest =
            std::env::var_os("CARGO_MANIFEST_DIR").map_or(manifest, |dir| Path::new(&dir).join("Cargo.toml"));
        let output = cargo()
            .args(["metadata", "--no-deps", "--format-version", "1", "--manifest-path"])
            .arg(&manifest)
            .output()
            .context("start cargo metadata")?;
        ensure!(
            output.status.success(),
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Self::from_json(&serde_json::from_slice(&output.stdout).context("read what cargo metadata printed")?)
    }

    fn from_json(metadata: &Value) -> Result<Workspace> {
        let root = PathBuf::from(text(metadata, "workspace_root")?);
        let packages = list(metadata, "packages")
            .iter()
            .map(|package| Package::from_json(package, &root))
            .collect::<Result<_>>()?;
        Ok(Workspace { target: PathBuf::from(text(metadata, "target_directory")?), packages, root })
    }
}

impl Package {
    fn from_json(package: &Value, root: &Path) -> Result<Package> {
        let inside = |path: &str| Path::new(path).strip_prefix(root).unwrap_or(Path::new(path)).to_owned();
        let manifest = inside(text(package, "manifest_path")?);
        let (mut roots, mut has_doctests) = (Vec::new(), false);
        for target in list(package, "targets") {
            let built = |kind: &Value| matches!(kind.as_str(), Some("lib" | "bin" | "proc-macro" | "cdylib"));
            if list(target, "kind").iter().any(built) {
                roots.push(inside(text(target, "src_path")?));
            }
            has_doctests |= target["doctest"] == true;
        }
        let dependencies =
            list(package, "dependencies").iter().map(Dependency::from_json).collect::<Result<_>>()?;
        let directory = manifest.parent().unwrap_or(Path::new("")).to_owned();
        Ok(Package { name: text(package, "name")?.to_owned(), directory, roots, has_doctests, dependencies })
    }
}

impl Dependency {
    fn from_json(dependency: &Value) -> Result<Dependency> {
        let kind = match dependency["kind"].as_str() {
            Some("dev") => DependencyKind::Dev,
            Some("build") => DependencyKind::Build,
            _ => DependencyKind::Normal,
        };
        let optional = dependency["optional"].as_bool().unwrap_or(false);
        Ok(Dependency { name: text(dependency, "name")?.to_owned(), kind, optional })
    }
}

fn text<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    value[key].as_str().with_context(|| format!("cargo metadata: no {key:?}"))
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_roots_are_distinguished() {
        let metadata = serde_json::json!({
            "workspace_root": "/w",
            "target_directory": "/w/target",
            "packages": [{
                "name": "a",
                "manifest_path": "/w/crates/a/Cargo.toml",
                "targets": [
                    { "kind": ["lib"], "src_path": "/w/crates/a/src/lib.rs" },
                    { "kind": ["test"], "src_path": "/w/crates/a/tests/t.rs" },
                ],
                "dependencies": [
                    { "name": "b", "kind": null, "optional": true },
                    { "name": "c", "kind": "dev", "optional": false },
                ],
            }],
        });
        let workspace = Workspace::from_json(&metadata).unwrap();
        let package = &workspace.packages[0];
        assert_eq!(package.directory, Path::new("crates/a"));
        assert_eq!(package.roots, [Path::new("crates/a/src/lib.rs")]);
        assert_eq!(package.dependencies[0].kind, DependencyKind::Normal);
        assert!(package.dependencies[0].optional);
        assert_eq!(package.dependencies[1].kind, DependencyKind::Dev);
    }
}
