//! `cargo xtask kernels`: the library's tests and a small lab on other kernels than this machine's.
//!
//! Debian's packaged kernels are booted under qemu in software emulation, with an initramfs that holds nothing but
//! `crates/guest` as PID 1, a few modules, the test programs and the command. KERNELS.md is the page about it.

mod modules;
mod newc;
mod packages;
mod plan;
mod programs;
mod qemu;
mod serial;
mod verdict;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use self::packages::Kernel;
use self::plan::Entry;
use self::programs::Programs;
use self::qemu::Booted;
use self::serial::{Ran, Session};
use crate::workspace::Workspace;

/// The kernels that are tested, by series.
const SERIES: &[&str] = &["6.1", "6.12"];

/// What the library must find of IP_LOCAL_PORT_RANGE on a kernel: both have the option, and only what came
/// with 6.8 tells them apart. It is the probe that is tested here, not the release.
fn port_range_of(release: &str) -> &'static str {
    if release.starts_with("6.1.") { "parity" } else { "linear" }
}

/// A machine that has not powered off by then is killed.
const LIMIT: Duration = Duration::from_secs(600);

/// What the command line asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    series: Vec<&'static str>,
    release: bool,
}

impl Options {
    /// Reads the words after `cargo xtask kernels`.
    pub(crate) fn parse(words: &[&str]) -> Result<Options, String> {
        let mut options = Options { series: SERIES.to_vec(), release: false };
        let mut words = words.iter();
        while let Some(&word) = words.next() {
            match word {
                "--release" => options.release = true,
                "--kernel" => {
                    let Some(&value) = words.next() else {
                        return Err(format!("--kernel: expected {} or all", SERIES.join(", ")));
                    };
                    if value != "all" {
                        let known = SERIES.iter().find(|series| **series == value);
                        options.series = vec![known.ok_or_else(|| {
                            format!("--kernel {value}: expected {} or all", SERIES.join(", "))
                        })?];
                    }
                }
                other => return Err(format!("{other}: unknown flag of kernels")),
            }
        }
        Ok(options)
    }
}

/// Runs the kernels; true when everything that ran passed and nothing that is required was skipped.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let required = std::env::var("FOURTUPLE_REQUIRE").unwrap_or_default();
    let required = required.split(',').any(|word| word.trim() == "kernels");
    let workspace = Workspace::read()?;
    let directory = &workspace.target.join("kernels");
    fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;

    let mut kernels = Vec::new();
    let mut skipped = Vec::new();
    for series in &options.series {
        if !qemu::is_installed() {
            skipped.push(format!("{series}: there is no qemu-system-x86_64 (Debian: qemu-system-x86)"));
            continue;
        }
        match packages::newest(series, &directory.join("cache")) {
            Ok(Some(kernel)) => kernels.push(kernel),
            Ok(None) => skipped.push(format!(
                "{series}: apt offers no linux-image-{series}.*-cloud-amd64 (are its lists fresh? apt-get update)"
            )),
            Err(error) => skipped.push(format!("{series}: {error:#}")),
        }
    }

    let mut passed = 0;
    if !kernels.is_empty() {
        println!("building for the guest");
        let programs = &programs::build(&workspace, plan::TEST_PACKAGES, options.release)?;
        let entries = &plan::entries(&programs.tests);
        // Each keeps one processor busy.
        for some in kernels.chunks(thread::available_parallelism().map_or(1, usize::from)) {
            let booted: Vec<Result<Booted>> = thread::scope(|scope| {
                let start = |kernel| scope.spawn(move || boot(kernel, programs, entries, directory));
                let booting: Vec<_> = some.iter().map(start).collect();
                booting.into_iter().map(|thread| thread.join().expect("a thread that boots")).collect()
            });
            for (kernel, booted) in some.iter().zip(booted) {
                match booted.and_then(|booted| judge(kernel, entries, &booted, directory)) {
                    Ok(true) => passed += 1,
                    Ok(false) => {}
                    // One kernel that cannot be packed or started is no reason to leave the others out.
                    Err(error) => println!("FAILED {}: {error:#}", kernel.release),
                }
            }
        }
    }
    for reason in &skipped {
        println!("skipped {reason}");
    }
    println!("kernels: {passed} passed, {} failed, {} skipped", kernels.len() - passed, skipped.len());
    if required && !skipped.is_empty() {
        println!("a skipped kernel is a failure: FOURTUPLE_REQUIRE names kernels");
    }
    Ok(passed == kernels.len() && (skipped.is_empty() || !required))
}

/// A file of one kernel's run.
fn file(directory: &Path, kernel: &Kernel, ending: &str) -> PathBuf {
    directory.join(format!("{}{ending}", kernel.release))
}

/// Boots one kernel and lets it do everything.
fn boot(kernel: &Kernel, programs: &Programs, entries: &[Entry], directory: &Path) -> Result<Booted> {
    println!("booting {}", kernel.release);
    let initramfs = file(directory, kernel, ".initramfs");
    fs::write(&initramfs, pack(kernel, programs, entries)?)
        .with_context(|| format!("write {}", initramfs.display()))?;
    let booted = qemu::boot(&kernel.image(), &initramfs, &file(directory, kernel, ".log"), LIMIT)?;
    // It is tens of megabytes, and nothing can be learned from it.
    fs::remove_file(&initramfs).with_context(|| format!("remove {}", initramfs.display()))?;
    Ok(booted)
}

/// Says how it went; true when everything passed.
fn judge(kernel: &Kernel, entries: &[Entry], booted: &Booted, directory: &Path) -> Result<bool> {
    let session = Session::parse(&booted.log);
    let mut faults = verdict::faults(kernel, entries, &session);
    if booted.timed_out {
        faults.insert(0, format!("killed: not finished after {} s", LIMIT.as_secs()));
    }
    let path = |name: &str| file(directory, kernel, &format!("-{name}"));
    faults.extend(save(entries, &session, port_range_of(&kernel.release), path)?);
    println!();
    verdict::print(&session, &faults, booted, &file(directory, kernel, ".log"));
    Ok(faults.is_empty())
}

/// Everything the guest has, as an initramfs.
fn pack(kernel: &Kernel, programs: &Programs, entries: &[Entry]) -> Result<Vec<u8>> {
    let mut archive = newc::Archive::default();
    for path in ["bin", "dev", "modules", "proc", "run", "sys", "tests", "tmp"] {
        archive.directory(path);
    }
    // The kernel gives PID 1 its console before anybody could mount devtmpfs.
    archive.character_device("dev/console", 5, 1);
    archive.file("init", 0o755, &programs.init.content()?);
    for program in &programs.binaries {
        archive.file(&format!("bin/{}", program.name), 0o755, &program.content()?);
    }
    for test in &programs.tests {
        archive.file(plan::guest_test_path(&test.name).trim_start_matches('/'), 0o755, &test.content()?);
    }
    for (index, module) in modules::collect(&kernel.modules(), modules::WANTED)?.iter().enumerate() {
        archive.file(&format!("modules/{index:02}-{}.ko", module.name), 0o644, &module.content);
    }
    archive.file("plan", 0o644, plan::file(entries).as_bytes());
    Ok(archive.finish())
}

/// Keeps the records that programs wrote; returns those that are not what they should be.
fn save(
    entries: &[Entry],
    session: &Session,
    port_range: &str,
    path: impl Fn(&str) -> PathBuf,
) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    for entry in entries {
        let Some(name) = entry.save else { continue };
        let path = path(name);
        // The record of an earlier run must not pass for this one's.
        if path.exists() {
            fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
        }
        // One that failed has its fault already, and may have written half a record.
        let passed = |ran: &&Ran| ran.name == entry.name && ran.exit.as_deref() == Some("0");
        let Some(ran) = session.ran.iter().find(passed) else { continue };
        let text = ran.output.join("\n");
        match serde_json::from_str::<serde_json::Value>(&text) {
            Ok(record) => {
                let found = &record["host"]["capabilities"]["ip_local_port_range"];
                if found != port_range {
                    faults
                        .push(format!("{}: the probe says {found} where {port_range} is right", entry.name));
                }
                fs::write(&path, text + "\n").with_context(|| format!("write {}", path.display()))?;
            }
            Err(error) => faults.push(format!("{}: its stdout is not JSON: {error}", entry.name)),
        }
    }
    Ok(faults)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_read_and_bad_ones_named() {
        let all = Options::parse(&[]).unwrap();
        assert_eq!(all, Options { series: vec!["6.1", "6.12"], release: false });
        let one = Options::parse(&["--kernel", "6.12", "--release"]).unwrap();
        assert_eq!(one, Options { series: vec!["6.12"], release: true });
        assert_eq!(Options::parse(&["--kernel", "all"]).unwrap(), all);
        assert!(
            Options::parse(&["--kernel", "5.4"]).unwrap_err().contains("--kernel 5.4: expected 6.1, 6.12")
        );
        assert!(Options::parse(&["--kernel"]).unwrap_err().contains("expected 6.1"));
        assert!(Options::parse(&["--fast"]).unwrap_err().contains("--fast"));
    }
}
