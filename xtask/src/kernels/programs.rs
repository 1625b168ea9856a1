//! The programs that go into the guest, linked statically because the guest has no libc.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::workspace::{Workspace, cargo};

/// With `--target`, cargo does not apply these flags to build scripts and procedural macros, which the flags would break.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Flags for a static program without debug information, which would make the initramfs ten times larger. Symbols stay for
/// backtraces.
const FLAGS: &str = "-C target-feature=+crt-static -C strip=debuginfo";

/// A program of the host's target directory.
pub(crate) struct Program {
    /// The name in the guest: `fourtuple`, or `fourtuple-unit` and `ports` for tests.
    pub(crate) name: String,
    path: PathBuf,
}

impl Program {
    /// Returns the path of the program.
    pub(crate) fn content(&self) -> Result<Vec<u8>> {
        fs::read(&self.path).with_context(|| format!("read {}", self.path.display()))
    }
}

/// Name of the tests of the Go module in the guest.
pub(crate) const GO_TESTS: &str = "go";

/// All programs that the guest runs.
pub(crate) struct Programs {
    pub(crate) init: Program,
    pub(crate) binaries: Vec<Program>,
    pub(crate) tests: Vec<Program>,
}

/// Builds init, the command and the test programs of some packages.
pub(crate) fn build(workspace: &Workspace, test_packages: &[&str], release: bool) -> Result<Programs> {
    let mut binaries =
        cargo_json(workspace, &["build", "-p", "fourtuple-guest", "-p", "fourtuple-cli", "--bins"], release)?;
    let init = binaries.iter().position(|program| program.name == "guest-init");
    let init = binaries.remove(init.context("cargo built no guest-init")?);
    // The policies that need BPF or tokio are tested on these kernels too.
    let mut arguments = vec!["test", "--no-run", "--all-features"];
    for package in test_packages {
        arguments.extend(["-p", package]);
    }
    let mut tests = cargo_json(workspace, &arguments, release)?;
    // cargo lists programs as they finish; sorting keeps the order of the table the same in every run.
    tests.sort_by(|a, b| a.name.cmp(&b.name));
    ensure!(!tests.is_empty(), "cargo built no test programs of {}", test_packages.join(", "));
    tests.extend(go_tests(workspace)?);
    Ok(Programs { init, binaries, tests })
}

/// Builds the tests of the Go module, without cgo and so without libc. Returns `None`, and says so, if Go is missing or too old.
fn go_tests(workspace: &Workspace) -> Result<Option<Program>> {
    let path = workspace.target.join("guest").join(GO_TESTS);
    // The archive of go.dev is unpacked there; it is not in the path of every user.
    let unpacked = Path::new("/usr/local/go/bin/go");
    let go = if unpacked.exists() { unpacked } else { Path::new("go") };
    let version = Command::new(go).args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local").output();
    let version = version.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    if !version.as_deref().is_ok_and(is_new_enough) {
        let found = version.unwrap_or_else(|error| error.to_string());
        println!("kernels: SKIPPED the tests of bindings/go: they need Go 1.22 or later ({found})");
        return Ok(None);
    }
    let status = Command::new(go)
        .args(["test", "-c", "-o"])
        .arg(&path)
        .arg(".")
        .current_dir(workspace.root.join("bindings/go"))
        .envs([("CGO_ENABLED", "0"), ("GOTOOLCHAIN", "local"), ("GOFLAGS", "-buildvcs=false")])
        .status()
        .context("start go, which builds the tests of bindings/go")?;
    ensure!(status.success(), "go test -c in bindings/go: {status}");
    Ok(Some(Program { name: GO_TESTS.to_owned(), path }))
}

/// Returns whether a version such as `go1.26.1` has what bindings/go/go.mod needs.
fn is_new_enough(version: &str) -> bool {
    let minor = version.strip_prefix("go1.").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    minor.is_some_and(|minor| minor >= 22)
}

fn cargo_json(workspace: &Workspace, arguments: &[&str], release: bool) -> Result<Vec<Program>> {
    let mut command = cargo();
    command
        .args(arguments)
        .args(["--quiet", "--target", TARGET, "--message-format=json-render-diagnostics", "--target-dir"])
        .arg(workspace.target.join("guest"))
        .current_dir(&workspace.root)
        // CARGO_ENCODED_RUSTFLAGS would override RUSTFLAGS.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env("RUSTFLAGS", FLAGS)
        .stderr(Stdio::inherit());
    if release {
        command.arg("--release");
    }
    let output = command.output().context("start cargo")?;
    ensure!(output.status.success(), "cargo {}: {}", arguments.join(" "), output.status);
    executables(&String::from_utf8_lossy(&output.stdout), arguments.first() == Some(&"test"))
}

/// Returns the executables in cargo's messages (one JSON object per line): the test programs, or all programs but tests.
fn executables(messages: &str, tests: bool) -> Result<Vec<Program>> {
    let mut programs: Vec<Program> = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value = serde_json::from_str(line).context("read a message of cargo")?;
        let (Some(path), Some(target)) = (message["executable"].as_str(), message["target"]["name"].as_str())
        else {
            continue;
        };
        let kind = message["target"]["kind"][0].as_str().unwrap_or_default();
        let is_test = message["profile"]["test"].as_bool().unwrap_or(false);
        // `cargo test` also builds the package's binaries and examples, which are not run here.
        if is_test != tests {
            continue;
        }
        let name = match (is_test, kind) {
            (true, "lib") => format!("{target}-unit"),
            (true, "bin") => format!("{target}-bin-unit"),
            _ => target.to_owned(),
        };
        if programs.iter().any(|program| program.name == name) {
            bail!("two programs for the guest are called {name}");
        }
        programs.push(Program { name, path: Path::new(path).to_owned() });
    }
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(name: &str, kind: &str, test: bool, executable: Option<&str>) -> String {
        serde_json::json!({
            "reason": "compiler-artifact",
            "target": { "name": name, "kind": [kind] },
            "profile": { "test": test },
            "executable": executable,
        })
        .to_string()
    }

    #[test]
    fn unit_tests_and_test_files_are_distinguished() {
        let messages = [
            message("libc", "lib", false, None),
            message("fourtuple", "lib", true, Some("/t/a")),
            message("dial", "test", true, Some("/t/b")),
            message("plain", "example", false, Some("/t/c")),
        ]
        .join("\n");
        let names: Vec<String> =
            executables(&messages, true).unwrap().into_iter().map(|it| it.name).collect();
        assert_eq!(names, ["fourtuple-unit", "dial"]);
    }

    #[test]
    fn cargo_messages_name_the_binaries() {
        let messages = message("guest-init", "bin", false, Some("/t/guest-init"));
        assert_eq!(executables(&messages, false).unwrap()[0].name, "guest-init");
    }

    #[test]
    fn duplicate_program_names_are_refused() {
        let messages =
            [message("dial", "test", true, Some("/a")), message("dial", "test", true, Some("/b"))].join("\n");
        assert!(executables(&messages, true).err().unwrap().to_string().contains("dial"));
    }
}
