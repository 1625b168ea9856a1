//! `cargo xtask release --dry-run`: builds every artifact of a release into `target/release-artifacts` and publishes nothing.
//!
//! Two runs on one commit give identical bytes: times come from the commit, entries are sorted, and no path of this machine is in a
//! file. docs/install.md and CONTRIBUTING.md describe the artifacts.

mod binary;
mod c_library;
mod debian;
mod python;
mod sbom;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::workspace::{Workspace, cargo};

/// The file with the version of the Go module.
const GO_VERSION: &str = "bindings/go/doc.go";

/// A release in the making.
struct Release {
    workspace: Workspace,
    version: String,
    /// The time of the last commit, in seconds since 1970: the time of every file in every archive.
    epoch: String,
    /// The directory of intermediate files.
    stage: PathBuf,
    /// The directory of the artifacts.
    artifacts: PathBuf,
}

/// Builds the artifacts; returns false if a check of the tree or of the binary fails.
pub(crate) fn run() -> Result<bool> {
    let began = Instant::now();
    let release = Release::begin()?;
    let mut faults = Vec::new();
    let changelog =
        fs::read_to_string(release.workspace.root.join("CHANGELOG.md")).context("read CHANGELOG.md")?;
    if !has_section(&changelog, &release.version) {
        faults.push(format!("CHANGELOG.md has no section ## {}, the version in Cargo.toml", release.version));
    }
    let module = String::from_utf8(release.source(GO_VERSION)?).context(GO_VERSION)?;
    if !has_version(&module, &release.version) {
        faults.push(format!("{GO_VERSION} has another Version than Cargo.toml, {}", release.version));
    }
    faults.extend(release.python_version()?);
    let binaries = release.binaries()?;
    faults.extend(binaries.iter().flat_map(|binary| binary.faults.clone()));
    release.manual()?;
    faults.extend(missing_pages(&release.stage.join("manual/man1"))?);
    let sbom = release.sbom()?;
    release.packages(&binaries, &sbom)?;
    faults.extend(release.c_library()?);
    release.python_package()?;
    release.sums()?;
    for path in files(&release.artifacts)? {
        println!("{:>10} bytes  {}", fs::metadata(&path)?.len(), path.display());
    }
    for binary in &binaries {
        let libraries = binary.libraries.join(", ");
        println!(
            "{}: {} bytes stripped, needs {libraries} and GLIBC_{}",
            binary.name, binary.size, binary.glibc
        );
    }
    println!("release {}: {} faults, {} s", release.version, faults.len(), began.elapsed().as_secs());
    faults.iter().for_each(|fault| eprintln!("release: {fault}"));
    Ok(faults.is_empty())
}

impl Release {
    /// Reads the version and the commit, and empties the directories.
    fn begin() -> Result<Release> {
        let workspace = Workspace::read()?;
        let manifest = fs::read_to_string(workspace.root.join("Cargo.toml")).context("read Cargo.toml")?;
        let manifest: toml::Table = toml::from_str(&manifest).context("read Cargo.toml")?;
        let version = manifest["workspace"]["package"]["version"]
            .as_str()
            .context("Cargo.toml: workspace.package.version is no text")?
            .to_owned();
        let epoch =
            text(Command::new("git").current_dir(&workspace.root).args(["log", "-1", "--format=%ct"]))?;
        let stage = workspace.target.join("release-stage");
        let artifacts = workspace.target.join("release-artifacts");
        for directory in [&stage, &artifacts] {
            if directory.exists() {
                fs::remove_dir_all(directory).with_context(|| format!("remove {}", directory.display()))?;
            }
            fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
        }
        Ok(Release { workspace, version, epoch, stage, artifacts })
    }

    /// Writes man pages and completions into `manual`, with a development build of `fourtuple-fleet` that has the feature `manual`.
    fn manual(&self) -> Result<()> {
        let mut build = cargo();
        build.current_dir(&self.workspace.root);
        let target = self.workspace.target.join("fleet");
        build.args([
            "build",
            "--locked",
            "--quiet",
            "--manifest-path",
            "fleet/Cargo.toml",
            "--bin",
            binary::FLEET,
        ]);
        build.args(["--features", "manual", "--target-dir"]).arg(&target);
        call(&mut build)?;
        let program = target.join("debug").join(binary::FLEET);
        call(Command::new(program).arg("manual").arg(self.stage.join("manual")))
    }

    /// Writes SHA256SUMS.
    fn sums(&self) -> Result<()> {
        let names = files(&self.artifacts)?;
        let names = names.iter().filter_map(|path| path.file_name());
        let sums = text(Command::new("sha256sum").current_dir(&self.artifacts).args(names))?;
        write(&self.artifacts.join("SHA256SUMS"), format!("{sums}\n"))
    }

    /// Returns a file of the tree.
    fn source(&self, path: &str) -> Result<Vec<u8>> {
        let path = self.workspace.root.join(path);
        fs::read(&path).with_context(|| format!("read {}", path.display()))
    }

    /// Returns the architecture of the artifacts, by the name of Rust.
    fn architecture(&self) -> &'static str {
        std::env::consts::ARCH
    }
}

/// Returns whether a changelog has a section for the version: `## 0.1.0`, or `## 0.1.0 - 2026-01-31`.
fn has_section(changelog: &str, version: &str) -> bool {
    let headings = changelog.lines().filter_map(|line| line.strip_prefix("## "));
    headings.map(|heading| heading.trim_start_matches('[')).any(|heading| {
        heading.strip_prefix(version).is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', ']']))
    })
}

/// Returns whether the source of the Go module has this version.
fn has_version(module: &str, version: &str) -> bool {
    module.lines().any(|line| line == format!("const Version = \"{version}\""))
}

/// Returns one fault for each page that another page refers to and that is not there.
fn missing_pages(directory: &Path) -> Result<Vec<String>> {
    let mut pages = BTreeSet::new();
    let mut referred = BTreeSet::new();
    for path in files(directory)? {
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        referred.extend(references(&text));
        pages.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
    }
    ensure!(pages.len() > 1, "{}: no man pages of subcommands", directory.display());
    Ok(referred.difference(&pages).map(|page| format!("there is no man page {page}(1)")).collect())
}

/// Returns the pages of section 1 in the references of a page: `.BR fourtuple\-lab (1),`.
fn references(page: &str) -> Vec<String> {
    let references = page.lines().filter_map(|line| line.strip_prefix(".BR ")?.split_once(" (1)"));
    references.map(|(name, _)| name.replace("\\-", "-")).collect()
}

/// Returns the files of a directory, sorted.
fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// Writes a file that everyone may read, and makes its directories.
fn write(path: &Path, contents: impl AsRef<[u8]>) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(|| format!("make {}", parent.display()))?;
    }
    fs::write(path, contents).with_context(|| format!("write {}", path.display()))?;
    set_mode(path, 0o644)
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    let permissions = fs::Permissions::from_mode(mode);
    fs::set_permissions(path, permissions).with_context(|| format!("chmod {}", path.display()))
}

/// Runs a program to its end.
fn call(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("start {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Runs a program and returns its output without the last line end.
fn text(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("start {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8(output.stdout).context("read its output")?.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_changelog_needs_a_section_of_the_version() {
        for heading in ["## 0.1.0", "## 0.1.0 - Unreleased", "## [0.1.0] - 2026-01-31"] {
            assert!(has_section(&format!("# Changelog\n\n{heading}\n"), "0.1.0"), "{heading}");
        }
        for heading in ["## Unreleased", "## 0.1.01", "### 0.1.0", "0.1.0"] {
            assert!(!has_section(&format!("# Changelog\n\n{heading}\n"), "0.1.0"), "{heading}");
        }
    }

    #[test]
    fn the_go_module_has_the_version_of_the_crates() {
        let module = include_str!("../../../bindings/go/doc.go");
        assert!(has_version(module, env!("CARGO_PKG_VERSION")));
        assert!(!has_version(module, "0.1"));
    }

    #[test]
    fn references_to_pages_are_read() {
        let page = ".SH \"SEE ALSO\"\n.BR fourtuple\\-lab (1),\n.BR fourtuple\\-lab\\-time\\-wait (1),\n.BR ip (7)\n";
        assert_eq!(references(page), ["fourtuple-lab", "fourtuple-lab-time-wait"]);
    }
}
