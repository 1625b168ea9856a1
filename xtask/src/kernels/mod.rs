//! `cargo xtask kernels`: runs the library's tests and a small lab on kernels other than this machine's.
//!
//! Boots Debian's packaged kernels under qemu in software emulation, with an initramfs that holds only `guest-init` of `crates/testing` as
//! PID 1, a few modules, the test programs and the command. KERNELS.md documents the command.

mod modules;
mod newc;
mod packages;
mod plan;
mod programs;
mod qemu;
mod serial;
mod verdict;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use self::packages::Kernel;
use self::plan::Entry;
use self::programs::Programs;
use self::qemu::Booted;
use self::serial::{ProgramRun, Session};
use crate::workspace::Workspace;

/// The kernels that are tested, by series.
const SERIES: &[&str] = &["6.1", "6.12"];

/// Returns the probe result for IP_LOCAL_PORT_RANGE that the library must report on a kernel. Both kernels have the option;
/// they differ by the linear search of Linux 6.8. This checks the probe, which does not read the release.
fn port_range_of(release: &str) -> &'static str {
    if release.starts_with("6.1.") { "parity" } else { "linear" }
}

/// The programs and files that a kernel is booted with.
struct Machine {
    /// Suffix of the machine's file names, after the kernel's name.
    suffix: &'static str,
    modules: &'static [&'static str],
    entries: Vec<Entry>,
}

/// Time limit of a machine; it is killed if it has not powered off by then.
const LIMIT: Duration = Duration::from_secs(1200);

/// The arguments of the command line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    series: Vec<&'static str>,
    release: bool,
}

impl Options {
    /// Parses the arguments after `cargo xtask kernels`.
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

/// Runs the kernels; returns true if every run passed and no required run was skipped.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let required = std::env::var("FOURTUPLE_REQUIRE").unwrap_or_default();
    let required = required.split(',').any(|word| matches!(word.trim(), "kernels" | "all"));
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

    let (mut passed, mut booted_in_all) = (0, 0);
    if !kernels.is_empty() {
        println!("building for the guest");
        let programs = &programs::build(&workspace, plan::is_wanted, options.release)?;
        let whole = Machine { suffix: "", modules: modules::WANTED, entries: plan::entries(&programs.tests) };
        let without_diag = Machine {
            suffix: "-without-diag",
            modules: modules::WANTED_WITHOUT_DIAG,
            entries: plan::entries_without_diag(),
        };
        let machines: Vec<(&Kernel, &Machine)> = [&whole, &without_diag]
            .into_iter()
            .flat_map(|machine| kernels.iter().map(move |kernel| (kernel, machine)))
            .collect();
        booted_in_all = machines.len();
        // Each machine keeps one processor busy.
        for some in machines.chunks(thread::available_parallelism().map_or(1, usize::from)) {
            let booted: Vec<Result<Booted>> = thread::scope(|scope| {
                let start =
                    |&(kernel, machine)| scope.spawn(move || boot(kernel, machine, programs, directory));
                let booting: Vec<_> = some.iter().map(start).collect();
                booting.into_iter().map(|thread| thread.join().expect("a thread that boots")).collect()
            });
            for ((kernel, machine), booted) in some.iter().zip(booted) {
                match booted.and_then(|booted| judge(kernel, machine, &booted, directory)) {
                    Ok(true) => passed += 1,
                    Ok(false) => {}
                    // If one kernel cannot be packed or started, the remaining kernels still run.
                    Err(error) => println!("FAILED {}{}: {error:#}", kernel.release, machine.suffix),
                }
            }
        }
    }
    for reason in &skipped {
        println!("skipped {reason}");
    }
    println!("kernels: {passed} passed, {} failed, {} skipped", booted_in_all - passed, skipped.len());
    if required && !skipped.is_empty() {
        println!("a skipped kernel is a failure: FOURTUPLE_REQUIRE demands kernels");
    }
    Ok(passed == booted_in_all && (skipped.is_empty() || !required))
}

/// Returns the path of a file of one kernel's run.
fn file(directory: &Path, kernel: &Kernel, machine: &Machine, ending: &str) -> PathBuf {
    directory.join(format!("{}{}{ending}", kernel.release, machine.suffix))
}

/// Boots one kernel and runs the whole plan.
fn boot(kernel: &Kernel, machine: &Machine, programs: &Programs, directory: &Path) -> Result<Booted> {
    println!("booting {}{}", kernel.release, machine.suffix);
    let initramfs = file(directory, kernel, machine, ".initramfs");
    fs::write(&initramfs, pack(kernel, machine, programs)?)
        .with_context(|| format!("write {}", initramfs.display()))?;
    let booted = qemu::boot(&kernel.image(), &initramfs, &file(directory, kernel, machine, ".log"), LIMIT)?;
    // The initramfs has tens of megabytes and is not needed after the run.
    fs::remove_file(&initramfs).with_context(|| format!("remove {}", initramfs.display()))?;
    Ok(booted)
}

/// Prints the result; returns true if everything passed.
fn judge(kernel: &Kernel, machine: &Machine, booted: &Booted, directory: &Path) -> Result<bool> {
    let entries = &machine.entries;
    let session = Session::parse(&booted.log);
    let mut faults = verdict::faults(kernel, entries, &session);
    if booted.timed_out {
        faults.insert(0, format!("killed: not finished after {} s", LIMIT.as_secs()));
    }
    let path = |name: &str| file(directory, kernel, machine, &format!("-{name}"));
    faults.extend(save(entries, &session, port_range_of(&kernel.release), path)?);
    println!();
    verdict::print(&session, &faults, booted, &file(directory, kernel, machine, ".log"));
    Ok(faults.is_empty())
}

/// Returns the initramfs with all files of the guest.
fn pack(kernel: &Kernel, machine: &Machine, programs: &Programs) -> Result<Vec<u8>> {
    let mut archive = newc::Archive::default();
    for path in ["bin", "dev", "modules", "proc", "run", "sys", "tests", "tmp"] {
        archive.directory(path);
    }
    // The kernel opens the console of PID 1 before devtmpfs is mounted.
    archive.character_device("dev/console", 5, 1);
    archive.file("init", 0o755, &programs.init.content()?);
    for program in &programs.binaries {
        archive.file(&format!("bin/{}", program.name), 0o755, &program.content()?);
    }
    for test in &programs.tests {
        let path = plan::guest_test_path(&test.name);
        // Not every test of the packages is in the plan.
        if machine.entries.iter().any(|entry| entry.program == path) {
            archive.file(path.trim_start_matches('/'), 0o755, &test.content()?);
        }
    }
    let parents: BTreeSet<&Path> =
        programs.libraries.iter().flat_map(|path| path.ancestors().skip(1)).collect();
    for parent in parents.into_iter().filter(|parent| parent.parent().is_some()) {
        archive.directory(relative(parent)?);
    }
    for library in &programs.libraries {
        let content = fs::read(library).with_context(|| format!("read {}", library.display()))?;
        archive.file(relative(library)?, 0o755, &content);
    }
    for (index, module) in modules::collect(&kernel.modules(), machine.modules)?.iter().enumerate() {
        archive.file(&format!("modules/{index:02}-{}.ko", module.name), 0o644, &module.content);
    }
    archive.file("plan", 0o644, plan::file(&machine.entries).as_bytes());
    Ok(archive.finish())
}

/// Returns an absolute path as the archive needs it.
fn relative(path: &Path) -> Result<&str> {
    let path = path.strip_prefix("/").with_context(|| format!("{} is not absolute", path.display()))?;
    path.to_str().context("a path that is not UTF-8")
}

/// Stores the records that programs wrote. Returns the invalid ones.
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
        // The record of an earlier run is removed first, so that it is not mistaken for this run's record.
        if path.exists() {
            fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
        }
        // A failed program already has its fault, and may have written an incomplete record.
        let passed = |ran: &&ProgramRun| ran.name == entry.name && ran.exit.as_deref() == Some("0");
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
