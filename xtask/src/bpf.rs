//! `cargo xtask bpf`: builds the objects of `crates/bpf` from their C sources; `--check` compares them with the tree.
//!
//! The objects are in the tree, so that a build of fourtuple needs no clang. The same compiler builds the same bytes on
//! every machine, so the version of the compiler is checked.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::{Workspace, call};

/// The version of Debian 12. Another version generates different instructions, which every verifier would have to check
/// again.
const MAJOR: u32 = 14;

/// The directories of sources and objects, below the root of the workspace.
const DIRECTORY: &str = "crates/bpf/src";
const SOURCE_ENDING: &str = ".bpf.c";

/// The use of a built object.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Replaces the object in the tree.
    Rebuild,
    /// Compares the object with the one in the tree.
    Check,
}

/// Builds every program; returns false if an object of the tree differs from the result of its source.
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

/// Returns the names of the programs, sorted: `least_busy` for `least_busy.bpf.c`.
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

/// Compiles in the directory of the source, and maps this directory to `.`, so that no path of this machine gets into the
/// object.
fn build(compiler: &Path, strip: &Path, directory: &Path, name: &str, object: &Path) -> Result<()> {
    let mut prefix = std::ffi::OsString::from("-ffile-prefix-map=");
    prefix.push(directory);
    prefix.push("=.");
    let mut compile = Command::new(compiler);
    compile
        .current_dir(directory)
        // clang may tell the directory from the variable.
        .env("PWD", directory)
        // Atomics that return the old value need -mcpu=v3 (Linux 5.12).
        .args(["-target", "bpf", "-mcpu=v3", "-O2", "-g", "-Wall", "-Wextra", "-Werror"])
        .args(["-Wno-unused-parameter", "-fdebug-compilation-dir=."])
        .arg(prefix)
        .arg("-c")
        .arg(format!("{name}{SOURCE_ENDING}"))
        .arg("-o")
        .arg(object);
    call(&mut compile)?;
    // Strips debug information and keeps BTF.
    call(Command::new(strip).arg("-g").arg(object))
}

/// Returns the tool whose name has the version, or the tool with the plain name if its version matches.
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

/// Returns the first number after the word "version".
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
