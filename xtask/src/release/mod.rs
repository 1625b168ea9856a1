//! `cargo xtask release`: builds every artifact of a release into `target/release-artifacts` and publishes nothing.
//!
//! With `--dry-run` the tree may be one that is not released yet: the changelog without a date, the addresses those of examples, no key.
//!
//! Two runs on one commit at one path give identical bytes: times come from the commit, entries are sorted, and no path of this machine
//! is in a file. docs/install.md and CONTRIBUTING.md describe the artifacts.

mod binary;
mod bindings;
mod packages;
mod third_party;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::{Workspace, call, cargo};

/// The file with the checksums of all artifacts.
const SUMS: &str = "SHA256SUMS";

/// The file with the version of the Go module.
const GO_VERSION: &str = "bindings/go/doc.go";

/// The namespace of Cargo.toml for addresses that nobody has: RFC 2606.
const EXAMPLE: &str = ".example";

/// The flags of the task.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    dry_run: bool,
    /// The target of the artifacts, by default the host.
    target: Option<String>,
    /// The private key of ssh-keygen that signs the checksums.
    key: Option<PathBuf>,
}

impl Options {
    /// Parses the flags. Without `--key` the environment may name the key.
    pub(crate) fn parse(words: &[&str], environment: Option<PathBuf>) -> Result<Options, String> {
        let mut options = Options { key: environment, ..Options::default() };
        let mut words = words.iter();
        while let Some(&word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("release {word}: no value"));
            match word {
                "--dry-run" => options.dry_run = true,
                "--target" => options.target = Some((*value()?).to_owned()),
                "--key" => options.key = Some(value()?.into()),
                other => {
                    return Err(format!(
                        "release: {other}: expected --dry-run, --target TRIPLE or --key FILE"
                    ));
                }
            }
        }
        Ok(options)
    }
}

/// A release in the making.
struct Release {
    workspace: Workspace,
    /// What `[workspace.package]` of Cargo.toml says.
    package: toml::Table,
    /// The target of the artifacts, such as `x86_64-unknown-linux-gnu`.
    target: String,
    version: String,
    /// The time of the last commit, in seconds since 1970: the time of every file in every archive.
    epoch: String,
    /// The directory of intermediate files.
    stage: PathBuf,
    /// The directory of the artifacts.
    artifacts: PathBuf,
}

/// Builds the artifacts; returns false if a check of the tree or of the binary fails.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let began = Instant::now();
    let release = Release::begin(options)?;
    let mut faults = release.unready(options)?;
    if !faults.is_empty() && !options.dry_run {
        faults.iter().for_each(|fault| eprintln!("release: {fault}"));
        return Ok(false);
    }
    let module = String::from_utf8(release.source(GO_VERSION)?).context(GO_VERSION)?;
    if !has_version(&module, &release.version) {
        faults.push(format!("{GO_VERSION} has another Version than Cargo.toml, {}", release.version));
    }
    faults.extend(release.python_metadata()?);
    faults.extend(release.unnamed_licences()?);
    let binaries = release.binaries()?;
    faults.extend(binaries.iter().flat_map(|binary| binary.faults.clone()));
    let static_binaries = release.static_binaries()?;
    faults.extend(static_binaries.iter().flat_map(|binary| binary.faults.clone()));
    release.manual()?;
    faults.extend(missing_pages(&release.stage.join("manual/man1"))?);
    let sbom = release.sbom()?;
    release.packages(&binaries, &static_binaries, &sbom)?;
    faults.extend(release.c_library()?);
    faults.extend(release.python_package()?);
    release.sums()?;
    if let Some(key) = &options.key {
        sign(&release.artifacts.join(SUMS), key)?;
    }
    for path in walk(&release.artifacts)? {
        println!("{:>10} bytes  {}", fs::metadata(&path)?.len(), path.display());
    }
    for binary in binaries.iter().chain(&static_binaries) {
        let needs = match &binary.glibc {
            Some(glibc) => format!("needs {} and GLIBC_{glibc}", binary.libraries.join(", ")),
            None => "static".to_owned(),
        };
        println!("{}: {} bytes stripped, {needs}", binary.name, binary.size);
    }
    println!("release {}: {} faults, {} s", release.version, faults.len(), began.elapsed().as_secs());
    faults.iter().for_each(|fault| eprintln!("release: {fault}"));
    Ok(faults.is_empty())
}

impl Release {
    /// Reads the version and the commit, and empties the directories.
    fn begin(options: &Options) -> Result<Release> {
        let workspace = Workspace::read()?;
        let manifest = fs::read_to_string(workspace.root.join("Cargo.toml")).context("read Cargo.toml")?;
        let manifest: toml::Table = toml::from_str(&manifest).context("read Cargo.toml")?;
        let package =
            manifest["workspace"]["package"].as_table().context("Cargo.toml: no [workspace.package]")?;
        let version = package["version"].as_str().context("Cargo.toml: version is not a text")?.to_owned();
        let target = options.target.clone().unwrap_or_else(host);
        let epoch =
            text(Command::new("git").current_dir(&workspace.root).args(["log", "-1", "--format=%ct"]))?;
        // The artifacts of both architectures stand beside each other.
        let suffix = if target == host() { String::new() } else { format!("-{target}") };
        let stage = workspace.target.join(format!("release-stage{suffix}"));
        let artifacts = workspace.target.join(format!("release-artifacts{suffix}"));
        for directory in [&stage, &artifacts] {
            if directory.exists() {
                fs::remove_dir_all(directory).with_context(|| format!("remove {}", directory.display()))?;
            }
            fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
        }
        Ok(Release { workspace, package: package.clone(), target, version, epoch, stage, artifacts })
    }

    /// Returns what must be mended before the tree can be released. A dry run reports only the first, which is never right.
    fn unready(&self, options: &Options) -> Result<Vec<String>> {
        let changelog = String::from_utf8(self.source("CHANGELOG.md")?).context("read CHANGELOG.md")?;
        let version = &self.version;
        let mut faults = Vec::new();
        match section(&changelog, version) {
            None => {
                faults.push(format!("CHANGELOG.md has no section ## {version}, the version in Cargo.toml"))
            }
            Some(rest) if !options.dry_run && !is_date(rest) => {
                faults.push(format!(
                    "CHANGELOG.md: '## {version}{rest}' has no date: expected ## {version} - YYYY-MM-DD"
                ));
            }
            Some(_) => {}
        }
        if options.dry_run {
            return Ok(faults);
        }
        for key in ["repository", "homepage"] {
            if self.field(key)?.contains(EXAMPLE) {
                faults.push(format!("Cargo.toml: {key} is an example: {}", self.field(key)?));
            }
        }
        if self.author()?.contains(EXAMPLE) {
            faults.push(format!("Cargo.toml: the address of the authors is an example: {}", self.author()?));
        }
        if options.key.is_none() {
            faults.push("no key signs the checksums: --key FILE or FOURTUPLE_SIGNING_KEY".to_owned());
        }
        let mut status = Command::new("git");
        if !text(status.current_dir(&self.workspace.root).args(["status", "--porcelain"]))?.is_empty() {
            faults.push("the work tree has changes that are in no commit".to_owned());
        }
        Ok(faults)
    }

    /// Returns a field of `[workspace.package]`.
    fn field(&self, key: &str) -> Result<&str> {
        let value = self.package.get(key).and_then(toml::Value::as_str);
        value.with_context(|| format!("Cargo.toml: [workspace.package] has no {key}"))
    }

    /// Returns the name and the mail address of the maintainers of the packages.
    fn author(&self) -> Result<&str> {
        let authors = self.package.get("authors").and_then(|authors| authors.get(0)?.as_str());
        authors.context("Cargo.toml: [workspace.package] has no authors")
    }

    /// Writes man pages and completions into `manual`, with a development build of `fourtuple-fleet` that has the feature `manual`.
    fn manual(&self) -> Result<()> {
        let mut build = cargo();
        build.current_dir(&self.workspace.root);
        if !self.is_native() {
            // The compiler of the environment is for the target; this program runs here.
            build.env_remove("RUSTC");
        }
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
        let paths = walk(&self.artifacts)?;
        let names = paths.iter().filter_map(|path| path.strip_prefix(&self.artifacts).ok());
        let sums = text(Command::new("sha256sum").current_dir(&self.artifacts).args(names))?;
        write(&self.artifacts.join(SUMS), format!("{sums}\n"))
    }

    /// Returns a file of the tree.
    fn source(&self, path: &str) -> Result<Vec<u8>> {
        let path = self.workspace.root.join(path);
        fs::read(&path).with_context(|| format!("read {}", path.display()))
    }

    /// Returns the architecture of the artifacts, by the name of Rust.
    fn architecture(&self) -> &str {
        self.target.split('-').next().unwrap_or_default()
    }

    fn is_native(&self) -> bool {
        self.target == host()
    }

    /// Returns a program of binutils or gcc for the target.
    fn tool(&self, name: &str) -> Command {
        if self.is_native() {
            return Command::new(name);
        }
        Command::new(format!("{}-linux-gnu-{name}", self.architecture()))
    }
}

/// Returns the target of this program, for which glibc is the one to link.
fn host() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

/// Returns what follows the version in the heading of its section: nothing, or ` - 2026-01-31`.
fn section<'a>(changelog: &'a str, version: &str) -> Option<&'a str> {
    let headings = changelog.lines().filter_map(|line| line.strip_prefix("## "));
    headings.map(|heading| heading.trim_start_matches('[')).find_map(|heading| {
        let rest = heading.strip_prefix(version)?;
        (rest.is_empty() || rest.starts_with([' ', ']'])).then_some(rest)
    })
}

/// Returns whether the rest of a heading is a date: ` - 2026-01-31`.
fn is_date(rest: &str) -> bool {
    let date = rest.trim_start_matches(']').strip_prefix(" - ").unwrap_or_default();
    let shape: String = date.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    shape == "0000-00-00"
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

/// Returns every file below a directory, sorted. A symbolic link is not followed.
pub(crate) fn walk(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for path in files(directory)? {
        if path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            found.extend(walk(&path)?);
        } else {
            found.push(path);
        }
    }
    Ok(found)
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

/// Runs a program and returns its output without the last line end.
fn text(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("start {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8(output.stdout).context("read its output")?.trim_end().to_owned())
}

/// What the signature is for: a signature of the same key for another purpose is not accepted.
const NAMESPACE: &str = "fourtuple-release";

/// Writes `<file>.sig` by a key of SSH: `ssh-keygen -Y verify` is on nearly every host.
fn sign(file: &Path, key: &Path) -> Result<()> {
    call(Command::new("ssh-keygen").args(["-q", "-Y", "sign", "-n", NAMESPACE, "-f"]).args([key, file]))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    #[test]
    fn a_release_needs_a_dated_section() {
        let heading = |heading: &str| format!("# Changelog\n\n{heading}\n");
        for (line, dated) in [
            ("## 0.1.0", false),
            ("## 0.1.0 - Unreleased", false),
            ("## 0.1.0 - 2026-1-31", false),
            ("## 0.1.0 - 2026-01-31", true),
            ("## [0.1.0] - 2026-01-31", true),
        ] {
            assert_eq!(section(&heading(line), "0.1.0").map(is_date), Some(dated), "{line}");
        }
        for line in ["## Unreleased", "## 0.1.01", "### 0.1.0", "0.1.0"] {
            assert_eq!(section(&heading(line), "0.1.0"), None, "{line}");
        }
    }

    #[test]
    fn flags_of_the_release_are_parsed() {
        let parse = |words: &[&str]| Options::parse(words, Some("from-environment".into()));
        let options = parse(&["--target", "aarch64-unknown-linux-gnu", "--dry-run", "--key", "id"]).unwrap();
        let target = Some("aarch64-unknown-linux-gnu".to_owned());
        assert_eq!(options, Options { dry_run: true, target, key: Some("id".into()) });
        assert_eq!(parse(&[]).unwrap().key, Some("from-environment".into()));
        assert!(parse(&["--target"]).unwrap_err().contains("no value"));
        assert!(parse(&["--publish"]).unwrap_err().contains("expected --dry-run"));
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

    #[test]
    fn changed_checksums_are_refused() {
        if Command::new("ssh-keygen").arg("-?").output().is_err() {
            return fourtuple_testing::skip("changed_checksums_are_refused", "programs", "no ssh-keygen");
        }
        let directory = std::env::temp_dir().join(format!("fourtuple-signature-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let (key, sums) = (directory.join("key"), directory.join("SHA256SUMS"));
        call(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key)).unwrap();
        let public = fs::read_to_string(key.with_extension("pub")).unwrap();
        let signers = directory.join("signers");
        fs::write(&signers, format!("releases {public}")).unwrap();
        fs::write(&sums, "ab  file\n").unwrap();
        sign(&sums, &key).unwrap();
        // The command of docs/install.md.
        let verify = || {
            let mut verify = Command::new("ssh-keygen");
            verify.args(["-Y", "verify", "-I", "releases", "-n", "fourtuple-release", "-f"]).arg(&signers);
            verify.arg("-s").arg(directory.join("SHA256SUMS.sig")).stdin(File::open(&sums).unwrap());
            verify.output().unwrap().status.success()
        };
        assert!(verify());
        fs::write(&sums, "ac  file\n").unwrap();
        assert!(!verify());
        fs::remove_dir_all(&directory).unwrap();
    }
}
