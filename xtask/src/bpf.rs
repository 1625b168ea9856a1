//! `cargo xtask bpf`: builds the objects of `crates/bpf` from their C sources, or with `--check` compares.
//!
//! The objects are in the tree, so whoever builds fourtuple needs no clang. They are the same bytes wherever they are
//! built with the same compiler, which is why its version is looked at.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::Workspace;

/// Debian 12's. Another version generates other instructions, and every verifier would have to be asked again.
const MAJOR: u32 = 14;

/// Where sources and objects lie, below the root of the workspace.
const DIRECTORY: &str = "crates/bpf/src";
const SOURCE_ENDING: &str = ".bpf.c";

/// What becomes of an object that was built.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// It replaces the one in the tree.
    Rebuild,
    /// It is held against the one in the tree.
    Check,
}

/// Builds every program; false when one of the tree's objects is not what its source gives.
pub(crate) fn run(purpose: Purpose) -> Result<bool> {
    let workspace = Workspace::read()?;
    let directory = workspace.root.join(DIRECTORY);
    let built = workspace.target.join("bpf");
    fs::create_dir_all(&built).with_context(|| format!("make {}", built.display()))?;
    let compiler = tool("clang")?;
    let strip = tool("llvm-strip")?;
    let mut differ = 0;
    let sources = sources(&directory)?;
    for name in &sources {
        let object = built.join(format!("{name}.o"));
        build(&compiler, &strip, &directory, name, &object)?;
        let new = fs::read(&object).with_context(|| format!("read {}", object.display()))?;
        let place = directory.join(format!("{name}.o"));
        let old = fs::read(&place).unwrap_or_default();
        match (new == old, purpose) {
            (true, _) => {}
            (false, Purpose::Rebuild) => {
                fs::write(&place, &new).with_context(|| format!("write {}", place.display()))?;
                println!("bpf: wrote {DIRECTORY}/{name}.o, {} bytes", new.len());
            }
            (false, Purpose::Check) => {
                differ += 1;
                println!(
                    "bpf: {DIRECTORY}/{name}.o is not what {name}{SOURCE_ENDING} gives: run cargo xtask bpf"
                );
            }
        }
    }
    println!("bpf: {} programs, {differ} objects that differ", sources.len());
    Ok(differ == 0)
}

/// Names of the programs, sorted: `least_busy` of `least_busy.bpf.c`.
fn sources(directory: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let file = entry?.file_name();
        if let Some(name) = file.to_str().and_then(|name| name.strip_suffix(SOURCE_ENDING)) {
            names.push(name.to_owned());
        }
    }
    ensure!(!names.is_empty(), "no *{SOURCE_ENDING} in {}", directory.display());
    names.sort();
    Ok(names)
}

/// No path of this machine may get into the object: it is compiled where it lies, and called `.` in there.
fn build(compiler: &Path, strip: &Path, directory: &Path, name: &str, object: &Path) -> Result<()> {
    let mut prefix = std::ffi::OsString::from("-ffile-prefix-map=");
    prefix.push(directory);
    prefix.push("=.");
    let mut compile = Command::new(compiler);
    compile
        .current_dir(directory)
        // clang may tell the directory from the variable.
        .env("PWD", directory)
        // Atomics that give the old value are of v3 (Linux 5.12).
        .args(["-target", "bpf", "-mcpu=v3", "-O2", "-g", "-Wall", "-Wextra", "-Werror"])
        .args(["-Wno-unused-parameter", "-fdebug-compilation-dir=."])
        .arg(prefix)
        .arg("-c")
        .arg(format!("{name}{SOURCE_ENDING}"))
        .arg("-o")
        .arg(object);
    run_tool(&mut compile)?;
    // Debug information goes, BTF stays.
    run_tool(Command::new(strip).arg("-g").arg(object))
}

fn run_tool(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("start {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// The tool by the name that has its version, else by its plain name if it is of that version.
fn tool(name: &str) -> Result<PathBuf> {
    let mut found = Vec::new();
    for candidate in [format!("{name}-{MAJOR}"), name.to_owned()] {
        let Ok(output) = Command::new(&candidate).arg("--version").output() else { continue };
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        match major(&text) {
            Some(MAJOR) => return Ok(candidate.into()),
            other => found.push(format!(
                "{candidate} is {}",
                other.map_or("unknown".to_owned(), |major| major.to_string())
            )),
        }
    }
    let found = if found.is_empty() { "there is none".to_owned() } else { found.join(", ") };
    bail!("need {name} {MAJOR} (Debian: apt-get install clang-{MAJOR} llvm-{MAJOR}); {found}")
}

/// The first number behind the word "version".
fn major(text: &str) -> Option<u32> {
    let rest = text.split_once("version ")?.1;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_tools_print() {
        assert_eq!(major("Debian clang version 14.0.6\nTarget: x86_64-pc-linux-gnu"), Some(14));
        assert_eq!(major("llvm-strip, compatible with GNU strip\nDebian LLVM version 19.1.7\n"), Some(19));
        assert_eq!(major("strange"), None);
    }

    #[test]
    fn every_source_has_an_object_beside_it() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(DIRECTORY);
        for name in sources(&directory).unwrap() {
            assert!(directory.join(format!("{name}.o")).exists(), "{name}");
        }
    }
}
