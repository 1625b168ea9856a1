//! `cargo xtask package`: packs the crates that are published, and builds a hello world and the documentation from the packages alone.
//!
//! The packages are unpacked into `target/packaged`, and a program in a workspace of its own depends on them. So the program sees
//! what a registry would give it: no file outside of the packages, no dev-dependency, and none of this workspace's features. Cargo
//! takes all other crates from its cache, at the versions of this workspace's Cargo.lock.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{Workspace, cargo, metadata};

/// The published crates, each after its dependencies.
const PUBLISHED: [&str; 3] = ["fourtuple-syscalls", "fourtuple-bpf", "fourtuple"];

/// The most crates that a program with default features may build, itself included.
const MAX_CRATES: usize = 12;

/// A program for each set of features: its name, the features, and its code.
const PROGRAMS: [(&str, &str, &str); 2] = [
    ("hello", "", include_str!("package/hello.rs")),
    (
        "everything",
        "\"axum\", \"bpf\", \"hyper\", \"serde\", \"tokio\", \"tracing\", \"uring\"",
        include_str!("package/everything.rs"),
    ),
];

pub(crate) fn run() -> Result<bool> {
    let workspace = Workspace::read()?;
    let stage = workspace.target.join("packaged");
    if stage.exists() {
        fs::remove_dir_all(&stage).with_context(|| format!("remove {}", stage.display()))?;
    }
    fs::create_dir_all(&stage).with_context(|| format!("create {}", stage.display()))?;
    let metadata = metadata(&workspace.root, &["--filter-platform", "x86_64-unknown-linux-gnu"])?;
    let mut faults = too_new(&metadata)?;
    pack(&workspace)?;
    let packages = unpack(&workspace, &metadata, &stage)?;
    for (name, features, code) in PROGRAMS {
        let program = Program::write(&workspace, &stage, &packages, name, features, code)?;
        let began = Instant::now();
        program.cargo(&["build"])?;
        let seconds = began.elapsed().as_secs_f64();
        let crates = program.crates()?;
        program.cargo(&["run"])?;
        // With the features of this program: a link to an item of another feature is an error.
        program.cargo(&["doc", "--package", "fourtuple", "--no-deps"])?;
        println!("package: {name} builds {} crates in {seconds:.1} s: {}", crates.len(), crates.join(", "));
        if features.is_empty() && crates.len() > MAX_CRATES {
            faults.push(format!("{name} needs {} crates, more than {MAX_CRATES}", crates.len()));
        }
    }
    faults.iter().for_each(|fault| println!("package: {fault}"));
    Ok(faults.is_empty())
}

fn succeed(command: &mut Command, what: &str) -> Result<Vec<u8>> {
    let output = command.output().with_context(|| format!("start {what}"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{what}: {}", stderr.trim());
    Ok(output.stdout)
}

fn field<'a>(package: &'a Value, key: &str) -> &'a str {
    package[key].as_str().unwrap_or_default()
}

/// Returns the packages that a published crate may build, with all features.
fn dependencies<'a>(metadata: &'a Value, roots: &[&str]) -> Vec<&'a Value> {
    let packages = metadata["packages"].as_array().map_or(&[][..], Vec::as_slice);
    let nodes = metadata["resolve"]["nodes"].as_array().map_or(&[][..], Vec::as_slice);
    let named = |package: &&Value| roots.contains(&field(package, "name"));
    let mut next: Vec<&str> = packages.iter().filter(named).map(|package| field(package, "id")).collect();
    let mut seen: Vec<&str> = Vec::new();
    while let Some(id) = next.pop() {
        if seen.contains(&id) {
            continue;
        }
        seen.push(id);
        let Some(node) = nodes.iter().find(|node| field(node, "id") == id) else { continue };
        for dependency in node["deps"].as_array().into_iter().flatten() {
            let kinds = dependency["dep_kinds"].as_array().map_or(&[][..], Vec::as_slice);
            if kinds.iter().any(|kind| kind["kind"] != "dev") {
                next.push(field(dependency, "pkg"));
            }
        }
    }
    packages.iter().filter(|package| seen.contains(&field(package, "id"))).collect()
}

/// Returns a fault for each dependency that needs a newer compiler than the published crates.
fn too_new(metadata: &Value) -> Result<Vec<String>> {
    let number = |text: &str| -> Vec<u32> { text.split('.').filter_map(|part| part.parse().ok()).collect() };
    let found = dependencies(metadata, &PUBLISHED);
    let own = found.iter().find(|package| field(package, "name") == "fourtuple");
    let own = own.map(|package| field(package, "rust_version")).context("no crate fourtuple")?;
    let newer = found.iter().filter(|package| number(field(package, "rust_version")) > number(own));
    Ok(newer
        .map(|package| {
            let (name, wanted) = (field(package, "name"), field(package, "rust_version"));
            format!("{name} {} needs Rust {wanted}, fourtuple promises {own}", field(package, "version"))
        })
        .collect())
}

/// Packs the published crates. The build of the hello world verifies them.
fn pack(workspace: &Workspace) -> Result<()> {
    let mut command = cargo();
    command.args(["package", "--quiet", "--no-verify", "--allow-dirty", "--offline"]);
    PUBLISHED.iter().for_each(|name| {
        command.args(["--package", name]);
    });
    succeed(command.current_dir(&workspace.root), "cargo package").map(drop)
}

/// Unpacks the packages, and returns the name and the directory of each.
fn unpack(workspace: &Workspace, metadata: &Value, stage: &Path) -> Result<Vec<(String, PathBuf)>> {
    let packages = metadata["packages"].as_array().map_or(&[][..], Vec::as_slice);
    let published = packages.iter().filter(|package| PUBLISHED.contains(&field(package, "name")));
    published
        .map(|package| {
            let name = format!("{}-{}", field(package, "name"), field(package, "version"));
            let archive = workspace.target.join("package").join(format!("{name}.crate"));
            let mut tar = Command::new("tar");
            succeed(tar.arg("-xzf").arg(&archive).arg("-C").arg(stage), "tar")?;
            Ok((field(package, "name").to_owned(), stage.join(name)))
        })
        .collect()
}

/// A program that depends on the unpacked packages.
struct Program {
    directory: PathBuf,
    name: &'static str,
    target: PathBuf,
}

impl Program {
    fn write(
        workspace: &Workspace,
        stage: &Path,
        packages: &[(String, PathBuf)],
        name: &'static str,
        features: &str,
        code: &str,
    ) -> Result<Program> {
        let directory = stage.join(name);
        let tokio = match features {
            "" => "",
            _ => "tokio = { version = \"1\", features = [\"macros\", \"rt\"] }\n",
        };
        let mut manifest = format!(
            "[package]\nname = \"{name}\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n[dependencies]\n\
             fourtuple = {{ version = \"0.1\", features = [{features}] }}\n{tokio}\n[patch.crates-io]\n"
        );
        for (package, path) in packages {
            manifest += &format!("{package} = {{ path = {path:?} }}\n");
        }
        fs::create_dir_all(directory.join("src")).context("create the program")?;
        fs::write(directory.join("Cargo.toml"), manifest).context("write Cargo.toml")?;
        fs::write(directory.join("src/main.rs"), code).context("write main.rs")?;
        fs::copy(workspace.root.join("Cargo.lock"), directory.join("Cargo.lock"))
            .context("copy Cargo.lock")?;
        Ok(Program { directory, name, target: stage.join("target").join(name) })
    }

    fn cargo(&self, task: &[&str]) -> Result<Vec<u8>> {
        let mut command = cargo();
        command.args(task).args(["--quiet", "--offline"]);
        command.env("CARGO_TARGET_DIR", &self.target).env("RUSTDOCFLAGS", "--deny warnings");
        succeed(command.current_dir(&self.directory), &format!("cargo {} of {}", task.join(" "), self.name))
    }

    /// Returns the names of the crates that the program builds, itself included.
    fn crates(&self) -> Result<Vec<String>> {
        let mut command = cargo();
        command.args(["tree", "--offline", "--edges", "normal,build", "--prefix", "none", "--no-dedupe"]);
        let output = succeed(command.current_dir(&self.directory), "cargo tree")?;
        let text = String::from_utf8(output).context("read what cargo tree printed")?;
        let names = text.lines().filter_map(|line| line.split(' ').next()).filter(|name| !name.is_empty());
        let mut names: Vec<String> = names.map(str::to_owned).collect();
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dependency_with_a_newer_compiler_is_found() {
        let metadata = serde_json::json!({
            "packages": [
                { "id": "f", "name": "fourtuple", "version": "0.1.0", "rust_version": "1.88" },
                { "id": "a", "name": "a", "version": "1.0.0", "rust_version": "1.9" },
                { "id": "b", "name": "b", "version": "2.0.0", "rust_version": "1.90.0" },
                { "id": "c", "name": "c", "version": "3.0.0", "rust_version": "1.95" },
            ],
            "resolve": { "nodes": [
                { "id": "f", "deps": [
                    { "pkg": "a", "dep_kinds": [{ "kind": null }] },
                    { "pkg": "c", "dep_kinds": [{ "kind": "dev" }] },
                ] },
                { "id": "a", "deps": [{ "pkg": "b", "dep_kinds": [{ "kind": null }] }] },
            ] },
        });
        assert_eq!(too_new(&metadata).unwrap(), ["b 2.0.0 needs Rust 1.90.0, fourtuple promises 1.88"]);
    }
}
