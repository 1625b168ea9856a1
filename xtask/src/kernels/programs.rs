//! The programs that go into the guest: the programs that `cargo test --workspace` builds, so that nothing is built twice, and the
//! shared libraries that these programs load, because the guest has no libc of its own.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::kernels::architecture::Toolchain;
use crate::kernels::plan;
use crate::{Workspace, cargo, packages};

/// A program of the host's target directory.
pub(crate) struct Program {
    /// The name in the guest: `fourtuple`, or `fourtuple-unit` and `ports` for tests.
    pub(crate) name: String,
    path: PathBuf,
}

impl Program {
    /// Returns the content of the program.
    pub(crate) fn content(&self) -> Result<Vec<u8>> {
        fs::read(&self.path).with_context(|| format!("read {}", self.path.display()))
    }

    /// Returns a copy in `directory` without debug information, which would make the initramfs ten times larger. Symbols stay for
    /// backtraces.
    fn stripped(&self, toolchain: &Toolchain, directory: &Path) -> Result<Program> {
        let path = directory.join(&self.name);
        let status =
            toolchain.tool("strip").arg("--strip-debug").arg("-o").arg(&path).arg(&self.path).status();
        let status = status.context("start strip (Debian: binutils)")?;
        ensure!(status.success(), "strip {}: {status}", self.path.display());
        Ok(Program { name: self.name.clone(), path })
    }
}

/// Name of the tests of the Go module in the guest.
pub(crate) const GO_TESTS: &str = "go";

/// All programs that the guest runs, and the files that they need.
pub(crate) struct Programs {
    pub(crate) init: Program,
    pub(crate) binaries: Vec<Program>,
    pub(crate) tests: Vec<Program>,
    /// The dynamic linker and the shared libraries: paths in the guest, each with the path on this machine.
    pub(crate) libraries: BTreeMap<PathBuf, PathBuf>,
}

/// The clients of the tests of `run`, with the flags of the C compiler: a static program needs another way.
const CLIENTS: [(&str, &[&str]); 2] = [("client", &[]), ("static-client", &["-static"])];

/// Builds init, the command and the test programs of the plan.
pub(crate) fn build(workspace: &Workspace, toolchain: &Toolchain, release: bool) -> Result<Programs> {
    let build = |arguments: &[&str]| cargo_json(workspace, toolchain, arguments, release);
    let init = build(&["build", "-p", "fourtuple-testing", "--bin", "guest-init"])?;
    let init = executables(&init, |package, _, is_test| package == "fourtuple-testing" && !is_test)?.pop();
    let init = init.context("cargo built no guest-init")?;
    let messages = if toolchain.is_cross() {
        let tests = wanted_tests(&packages()?);
        let packages = plan::packages_elsewhere().flat_map(|package| ["-p", package]);
        let tests = tests.iter().flat_map(|test| ["--test", test.as_str()]);
        // The programs are of no use on this machine: no more of them are built than the guest runs.
        build(&["test", "--no-run", "--lib"].into_iter().chain(packages).chain(tests).collect::<Vec<_>>())?
    } else {
        build(&["test", "--workspace", "--no-run"])?
    };
    let mut binaries = executables(&messages, |package, _, is_test| package == "fourtuple-cli" && !is_test)?;
    ensure!(!binaries.is_empty(), "cargo built no fourtuple");
    let mut tests = executables(&messages, |package, name, is_test| {
        is_test && plan::is_wanted(package, name, toolchain.is_cross())
    })?;
    // cargo lists programs as they finish; sorting keeps the order of the table the same in every run.
    tests.sort_by(|a, b| a.name.cmp(&b.name));
    ensure!(!tests.is_empty(), "cargo built no test programs for the guest");
    let mut libraries =
        BTreeMap::from_iter(toolchain.is_cross().then(|| toolchain.libraries()).into_iter().flatten());
    let directory = &workspace.target.join("kernels/programs").join(toolchain.architecture.name);
    fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
    let mut init = vec![init];
    for program in [&mut init, &mut binaries, &mut tests].into_iter().flatten() {
        if !toolchain.is_cross() {
            libraries.extend(libraries_of(&program.path)?.into_iter().map(|path| (path.clone(), path)));
        }
        *program = program.stripped(toolchain, directory)?;
    }
    tests.extend(go_tests(workspace, toolchain, directory)?);
    for (name, flags) in CLIENTS {
        binaries.push(client(workspace, toolchain, directory, name, flags)?);
    }
    Ok(Programs { init: init.remove(0), binaries, tests, libraries })
}

/// Returns the names of the integration tests in the output of `cargo metadata` that the guest runs.
fn wanted_tests(metadata: &Value) -> Vec<String> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut names = Vec::new();
    for package in list(&metadata["packages"]) {
        for target in list(&package["targets"]) {
            let name = |value: &Value| value["name"].as_str().unwrap_or_default().to_owned();
            let is_test = target["kind"][0] == "test";
            if is_test && plan::runs_elsewhere(&name(&package), &name(&target)) {
                names.push(name(&target));
            }
        }
    }
    names
}

/// Compiles the client of the tests of `run`. Rust needs a C compiler too, as its linker.
fn client(
    workspace: &Workspace,
    toolchain: &Toolchain,
    directory: &Path,
    name: &str,
    flags: &[&str],
) -> Result<Program> {
    let path = directory.join(name);
    let mut compiler = toolchain.tool("cc");
    compiler.args(["-O1", "-pthread", "-o"]).arg(&path).args(flags);
    let status = compiler.arg(workspace.root.join("crates/cli/tests/run/client.c")).status();
    let status = status.context("start cc, which compiles the client of the tests of run")?;
    ensure!(status.success(), "cc {}: {status}", path.display());
    Ok(Program { name: name.to_owned(), path })
}

/// Returns the shared libraries that a program loads, and the dynamic linker.
fn libraries_of(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("start ldd")?;
    ensure!(output.status.success(), "ldd {}: {}", program.display(), output.status);
    Ok(library_paths(&String::from_utf8_lossy(&output.stdout)))
}

/// Returns the paths in the output of ldd: `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)` and
/// `/lib64/ld-linux-x86-64.so.2 (0x...)`.
fn library_paths(listing: &str) -> Vec<PathBuf> {
    let paths = listing.split_whitespace().filter(|word| word.starts_with('/'));
    paths.map(PathBuf::from).collect()
}

/// Builds the tests of the Go module, without cgo and so without libc. Returns `None`, and says so, if Go is missing or too old.
fn go_tests(workspace: &Workspace, toolchain: &Toolchain, directory: &Path) -> Result<Option<Program>> {
    let path = directory.join(GO_TESTS);
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
        .env("GOARCH", toolchain.architecture.debian)
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

/// Runs cargo and returns its messages, one JSON object per line.
fn cargo_json(
    workspace: &Workspace,
    toolchain: &Toolchain,
    arguments: &[&str],
    release: bool,
) -> Result<String> {
    let mut command = cargo();
    command.args(arguments);
    toolchain.configure(&mut command, &workspace.target.join("kernels"));
    command
        .args(["--locked", "--quiet", "--message-format=json-render-diagnostics"])
        .current_dir(&workspace.root)
        .stderr(Stdio::inherit());
    if release {
        command.arg("--release");
    }
    let output = command.output().context("start cargo")?;
    ensure!(output.status.success(), "cargo {}: {}", arguments.join(" "), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the executables in cargo's messages that `wanted` selects by the package's name, the target's name and whether it is a
/// test program. Examples are never selected.
fn executables(messages: &str, wanted: impl Fn(&str, &str, bool) -> bool) -> Result<Vec<Program>> {
    let mut programs: Vec<Program> = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value = serde_json::from_str(line).context("read a message of cargo")?;
        let (Some(path), Some(target)) = (message["executable"].as_str(), message["target"]["name"].as_str())
        else {
            continue;
        };
        let kind = message["target"]["kind"][0].as_str().unwrap_or_default();
        let is_test = message["profile"]["test"].as_bool().unwrap_or(false);
        let package = package_name(message["package_id"].as_str().unwrap_or_default());
        if kind == "example" || !wanted(package, target, is_test) {
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

/// Returns the package's name in an identifier of cargo: `path+file:///crates/bpf#fourtuple-bpf@0.1.0`, or without `fourtuple-bpf@`
/// if the directory has the package's name.
fn package_name(id: &str) -> &str {
    let (url, fragment) = id.rsplit_once('#').unwrap_or((id, ""));
    match fragment.split_once('@') {
        Some((name, _)) => name,
        None => url.rsplit('/').next().unwrap_or(url),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(package: &str, name: &str, kind: &str, test: bool, executable: Option<&str>) -> String {
        serde_json::json!({
            "reason": "compiler-artifact",
            "package_id": package,
            "target": { "name": name, "kind": [kind] },
            "profile": { "test": test },
            "executable": executable,
        })
        .to_string()
    }

    const LIBRARY: &str = "path+file:///work/crates/fourtuple#0.1.0";
    const CLI: &str = "path+file:///work/crates/cli#fourtuple-cli@0.1.0";

    #[test]
    fn messages_name_the_wanted_programs() {
        let messages = [
            message("registry+https://example.org#libc@0.2.0", "libc", "lib", false, None),
            message(LIBRARY, "fourtuple", "lib", true, Some("/t/a")),
            message(LIBRARY, "dial", "test", true, Some("/t/b")),
            message(LIBRARY, "plain", "example", false, Some("/t/c")),
            message(CLI, "dial", "test", true, Some("/t/d")),
            message(CLI, "fourtuple", "bin", false, Some("/t/e")),
        ]
        .join("\n");
        let names = |wanted: fn(&str, &str, bool) -> bool| -> Vec<String> {
            executables(&messages, wanted).unwrap().into_iter().map(|program| program.name).collect()
        };
        assert_eq!(
            names(|package, _, is_test| package == "fourtuple" && is_test),
            ["fourtuple-unit", "dial"]
        );
        assert_eq!(names(|package, _, is_test| package == "fourtuple-cli" && !is_test), ["fourtuple"]);
    }

    #[test]
    fn only_tests_of_the_plan_are_cross_compiled() {
        let target = |name: &str, kind: &str| serde_json::json!({ "name": name, "kind": [kind] });
        let metadata = serde_json::json!({ "packages": [
            { "name": "fourtuple", "targets": [target("fourtuple", "lib"), target("library", "test"), target("listen", "test"), target("example_programs", "test")] },
            { "name": "fourtuple-cli", "targets": [target("commands", "test"), target("run", "test")] },
        ] });
        assert_eq!(wanted_tests(&metadata), ["library", "run"]);
    }

    #[test]
    fn duplicate_program_names_are_refused() {
        let messages = [
            message(LIBRARY, "dial", "test", true, Some("/a")),
            message(CLI, "dial", "test", true, Some("/b")),
        ]
        .join("\n");
        assert!(executables(&messages, |_, _, _| true).err().unwrap().to_string().contains("dial"));
    }

    #[test]
    fn ldd_names_libraries_and_the_dynamic_linker() {
        let listing = "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                       \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(library_paths(listing), expected);
    }
}
