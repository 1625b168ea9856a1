//! `cargo xtask kernels`: runs the library's tests and a small lab on kernels other than this machine's.
//!
//! Boots Debian's packaged kernels under qemu in software emulation, with an initramfs that holds only `guest-init` of `crates/testing` as
//! PID 1, a few modules, the test programs and the command. KERNELS.md documents the command.

mod architecture;
mod initramfs;
mod packages;
mod plan;
mod programs;
mod session;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use self::architecture::{Architecture, Series, Toolchain};
use self::packages::Kernel;
use self::plan::Entry;
use self::programs::Programs;
use self::session::{ProgramRun, Session};
use crate::Workspace;

/// Returns the probe result for IP_LOCAL_PORT_RANGE that the library must report on a kernel. Both kernels have the option;
/// they differ by the linear search of Linux 6.8. This checks the probe, which does not read the release.
fn port_range_of(release: &str) -> &'static str {
    if release.starts_with("6.1.") { "parity" } else { "linear" }
}

/// A kernel, and the programs and files that it is booted with.
struct Machine<'a> {
    architecture: &'static Architecture,
    kernel: &'a Kernel,
    /// Suffix of the machine's file names, after the kernel's name.
    suffix: &'static str,
    modules: &'static [&'static str],
    entries: Vec<Entry>,
}

/// What tests need and every guest must have: a skip for lack of it is a failure.
const REQUIRED: &[&str] = &["netns", "root", "bpf", "cc", "fexit", "io_uring", "veth"];

/// Time limit of a machine; it is killed if it has not powered off by then.
const LIMIT: Duration = Duration::from_secs(1200);

/// The arguments of the command line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    architecture: &'static Architecture,
    /// Value of `--kernel`; `None`: all kernels of the architecture.
    kernel: Option<&'static Series>,
    release: bool,
    /// Only build the programs.
    no_run: bool,
}

impl Options {
    /// Parses the arguments after `cargo xtask kernels`.
    pub(crate) fn parse(words: &[&str]) -> Result<Options, String> {
        let mut options =
            Options { architecture: Architecture::of_host(), kernel: None, release: false, no_run: false };
        let mut kernel = "all";
        let mut words = words.iter();
        while let Some(&word) = words.next() {
            let mut value = |expected: String| match words.next() {
                Some(&value) => Ok((value, format!("{word} {value}: expected {expected}"))),
                None => Err(format!("{word}: expected {expected}")),
            };
            match word {
                "--release" => options.release = true,
                "--no-run" => options.no_run = true,
                "--arch" => {
                    let (value, refusal) = value(listed(architecture::ALL.iter().map(|one| one.name)))?;
                    let known = architecture::ALL.iter().find(|one| one.name == value);
                    options.architecture = known.ok_or(refusal)?;
                }
                // The kernels depend on the architecture, which may follow.
                "--kernel" => kernel = value("a kernel or all".to_owned())?.0,
                other => return Err(format!("{other}: unknown flag of kernels")),
            }
        }
        if kernel != "all" {
            let known = options.architecture.kernels;
            let names = known.iter().map(|series| series.name).chain(["all"]);
            let found = known.iter().find(|series| series.name == kernel);
            options.kernel =
                Some(found.ok_or_else(|| format!("--kernel {kernel}: expected {}", listed(names)))?);
        }
        Ok(options)
    }

    fn kernels(&self) -> impl Iterator<Item = &'static Series> {
        let all = self.architecture.kernels.iter();
        all.filter(|series| self.kernel.is_none_or(|kernel| kernel == *series))
    }
}

/// Returns `a, b or c`.
fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    let (last, others) = names.split_last().expect("a table has rows");
    format!("{} or {last}", others.join(", "))
}

/// Runs the kernels; returns true if every run passed and no required run was skipped.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let required = std::env::var("FOURTUPLE_REQUIRE").unwrap_or_default();
    let required = required.split(',').any(|word| matches!(word.trim(), "kernels" | "all"));
    let architecture = options.architecture;
    let workspace = Workspace::read()?;
    let directory = &workspace.target.join("kernels");
    fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;

    let mut kernels = Vec::new();
    let mut skipped = Vec::new();
    let toolchain = Toolchain::find(architecture);
    let emulator = architecture.emulator();
    let missing = match &toolchain {
        Err(missing) => Some(missing.clone()),
        Ok(_) if !architecture::runs(Command::new(&emulator).arg("--version")) => {
            Some(format!("there is no {emulator} (Debian: {})", architecture.emulator_package))
        }
        Ok(_) => None,
    };
    match missing {
        Some(missing) => skipped.push(format!("{}: {missing}", architecture.name)),
        None => {
            for series in options.kernels() {
                match packages::newest(architecture, series, &directory.join("cache")) {
                    Ok(Some(kernel)) => kernels.push(kernel),
                    Ok(None) => skipped.push(format!(
                        "{}: apt offers no {} (are its lists fresh? apt-get update)",
                        series.name,
                        architecture.pattern(series)
                    )),
                    Err(error) => skipped.push(format!("{}: {error:#}", series.name)),
                }
            }
        }
    }

    let (mut passed, mut booted_in_all) = (0, 0);
    if let (Ok(toolchain), false) = (&toolchain, kernels.is_empty()) {
        println!("building for the guest");
        let programs = &programs::build(&workspace, toolchain, options.release)?;
        let machine =
            |kernel, suffix, modules, entries| Machine { architecture, kernel, suffix, modules, entries };
        let whole = kernels.iter().map(|kernel| {
            machine(kernel, "", initramfs::MODULES, plan::entries(&programs.tests, kernel.lacks))
        });
        let without_diag = kernels.iter().map(|kernel| {
            machine(kernel, "-without-diag", initramfs::MODULES_WITHOUT_DIAG, plan::entries_without_diag())
        });
        // Programs for another architecture are built if the whole plan has them.
        let of_limits = kernels.iter().filter(|_| architecture.is_native()).map(|kernel| {
            machine(kernel, "-limits", initramfs::MODULES_OF_LIMITS, plan::entries_of_limits())
        });
        let mut machines: Vec<Machine<'_>> = whole.chain(without_diag).chain(of_limits).collect();
        if options.no_run {
            machines.clear();
        }
        booted_in_all = machines.len();
        let machines = Mutex::new(machines.into_iter());
        let next = || machines.lock().unwrap_or_else(PoisonError::into_inner).next();
        let passing = Mutex::new(0);
        let work = || {
            while let Some(machine) = next() {
                let booted = machine.boot(programs, directory);
                // One verdict at a time is printed.
                let mut passing = passing.lock().unwrap_or_else(PoisonError::into_inner);
                match booted.and_then(|booted| machine.judge(&booted, directory)) {
                    Ok(true) => *passing += 1,
                    Ok(false) => {}
                    // If one kernel cannot be packed or started, the remaining kernels still run.
                    Err(error) => println!("FAILED {}: {error:#}", machine.name()),
                }
            }
        };
        thread::scope(|scope| {
            // Each machine keeps one processor busy.
            for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(work);
            }
        });
        passed = passing.into_inner().unwrap_or_else(PoisonError::into_inner);
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

impl Machine<'_> {
    fn name(&self) -> String {
        format!("{}{}", self.kernel.release, self.suffix)
    }

    /// Returns the path of a file of this machine's run.
    fn file(&self, directory: &Path, ending: &str) -> PathBuf {
        directory.join(self.name() + ending)
    }

    /// Boots the kernel and runs the whole plan.
    fn boot(&self, programs: &Programs, directory: &Path) -> Result<Booted> {
        println!("booting {}", self.name());
        let initramfs = self.file(directory, ".initramfs");
        fs::write(&initramfs, self.pack(programs)?)
            .with_context(|| format!("write {}", initramfs.display()))?;
        let required = REQUIRED.iter().filter(|requirement| !self.kernel.lacks.contains(requirement));
        let required: Vec<&str> = required.copied().collect();
        let booted = boot(
            self.architecture,
            &self.kernel.image(),
            &initramfs,
            &format!("FOURTUPLE_REQUIRE={}", required.join(",")),
            &self.file(directory, ".log"),
            LIMIT,
        )?;
        // The initramfs has tens of megabytes and is not needed after the run.
        fs::remove_file(&initramfs).with_context(|| format!("remove {}", initramfs.display()))?;
        Ok(booted)
    }

    /// Prints the result; returns true if everything passed.
    fn judge(&self, booted: &Booted, directory: &Path) -> Result<bool> {
        let entries = &self.entries;
        let session = Session::parse(&booted.log);
        let mut faults = session::faults(self.kernel, entries, &session);
        if booted.timed_out {
            faults.insert(0, format!("killed: not finished after {} s", LIMIT.as_secs()));
        }
        let path = |name: &str| self.file(directory, &format!("-{name}"));
        faults.extend(save(entries, &session, port_range_of(&self.kernel.release), path)?);
        println!();
        session::print(&session, &faults, booted, &self.file(directory, ".log"));
        Ok(faults.is_empty())
    }

    /// Returns the initramfs with all files of the guest.
    fn pack(&self, programs: &Programs) -> Result<Vec<u8>> {
        let mut archive = initramfs::Archive::default();
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
            if self.entries.iter().any(|entry| entry.program == path) {
                archive.file(path.trim_start_matches('/'), 0o755, &test.content()?);
            }
        }
        let parents: BTreeSet<&Path> =
            programs.libraries.keys().flat_map(|path| path.ancestors().skip(1)).collect();
        for parent in parents.into_iter().filter(|parent| parent.parent().is_some()) {
            archive.directory(relative(parent)?);
        }
        for (path, place) in &programs.libraries {
            let content = fs::read(place).with_context(|| format!("read {}", place.display()))?;
            archive.file(relative(path)?, 0o755, &content);
        }
        for (index, module) in initramfs::modules(&self.kernel.modules(), self.modules)?.iter().enumerate() {
            archive.file(&format!("modules/{index:02}-{}.ko", module.name), 0o644, &module.content);
        }
        archive.file("plan", 0o644, plan::file(&self.entries).as_bytes());
        Ok(archive.finish())
    }
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

/// Memory of the guest in MiB, for the initramfs twice and for tens of thousands of sockets.
const MEGABYTES: &str = "1024";

/// The first words that PID 1 of the guest writes to the console.
const FIRST_WORD: &[u8] = b"FOURTUPLE-GUEST kernel";

/// The result of a boot.
pub(crate) struct Booted {
    pub(crate) log: String,
    /// Time from the start of qemu until PID 1 had brought the machine up; `None` if the machine did not come up.
    pub(crate) up_after: Option<Duration>,
    /// Time from the start of qemu to its end.
    pub(crate) elapsed: Duration,
    /// Whether qemu was killed at the time limit.
    pub(crate) timed_out: bool,
}

/// Runs a machine until it powers off or reaches the time limit. The log is written continuously, so that an interrupted
/// run leaves its log so far. `variable`: of the environment of PID 1, in the form `NAME=VALUE`.
pub(crate) fn boot(
    architecture: &Architecture,
    image: &Path,
    initramfs: &Path,
    variable: &str,
    log: &Path,
    limit: Duration,
) -> Result<Booted> {
    let program = architecture.emulator();
    let mut file = File::create(log).with_context(|| format!("create {}", log.display()))?;
    let started = Instant::now();
    let child = Command::new(&program)
        .args(architecture.machine)
        // Both processors run on one thread and take turns: with one thread each, a processor of qemu 7.2 sometimes executes
        // an INT3 that the second processor has already patched back (attaching a tracepoint patches code), and the kernel
        // panics: 6.12 did in 1 of 6 runs of the tests of `trace accept`.
        .args(["-accel", "tcg,thread=single", "-smp", "2", "-m", MEGABYTES, "-no-reboot", "-nodefaults"])
        .args(["-display", "none", "-serial", "stdio"])
        .arg("-kernel")
        .arg(image)
        .arg("-initrd")
        .arg(initramfs)
        // panic=-1 restarts at once after a panic, and -no-reboot makes qemu exit instead. The kernel passes unknown parameters
        // to PID 1, as variables of its environment.
        .arg("-append")
        .arg(format!("{} quiet loglevel=1 panic=-1 rdinit=/init {variable}", architecture.parameters))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {program}"))?;
    let mut emulator = Emulator(child);
    let chunks = collect_output(&mut emulator.0);

    let mut log_bytes = Vec::new();
    let mut up_after = None;
    let mut timed_out = false;
    loop {
        match chunks.recv_timeout((started + limit).saturating_duration_since(Instant::now())) {
            Ok(chunk) => {
                file.write_all(&chunk).with_context(|| format!("write {}", log.display()))?;
                log_bytes.extend_from_slice(&chunk);
                if up_after.is_none()
                    && log_bytes.windows(FIRST_WORD.len()).any(|window| window == FIRST_WORD)
                {
                    up_after = Some(started.elapsed());
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                timed_out = true;
                break;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    drop(emulator);
    let log = String::from_utf8_lossy(&log_bytes).into_owned();
    Ok(Booted { log, up_after, elapsed: started.elapsed(), timed_out })
}

/// Reads both pipes into one queue, since errors of qemu belong in the log too.
fn collect_output(child: &mut Child) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    if let Some(pipe) = child.stdout.take() {
        let sender = sender.clone();
        thread::spawn(move || forward(pipe, &sender));
    }
    if let Some(pipe) = child.stderr.take() {
        thread::spawn(move || forward(pipe, &sender));
    }
    receiver
}

fn forward(mut pipe: impl Read, sender: &mpsc::Sender<Vec<u8>>) {
    let mut buffer = [0; 16_384];
    while let Ok(length @ 1..) = pipe.read(&mut buffer) {
        if sender.send(buffer[..length].to_vec()).is_err() {
            return;
        }
    }
}

/// A running qemu, which is killed on drop.
struct Emulator(Child);

impl Drop for Emulator {
    fn drop(&mut self) {
        // qemu has usually ended by itself; kill() then fails, and the error is ignored.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_read_and_bad_ones_named() {
        let parse = |words: &[&str]| {
            let options = Options::parse(words)?;
            let kernels: Vec<&str> = options.kernels().map(|series| series.name).collect();
            Ok::<_, String>((options.architecture.name, kernels, options.release))
        };
        let x86 = ["--arch", "x86_64"];
        let all = parse(&x86).unwrap();
        assert_eq!(all, ("x86_64", vec!["6.1", "6.12"], false));
        assert_eq!(parse(&[&x86[..], &["--kernel", "all"]].concat()).unwrap(), all);
        let one = parse(&["--kernel", "6.12-16k", "--release", "--arch", "aarch64"]).unwrap();
        assert_eq!(one, ("aarch64", vec!["6.12-16k"], true));
        let refused = |words: &[&str]| parse(words).unwrap_err();
        let of_x86 = refused(&[&x86[..], &["--kernel", "6.12-16k"]].concat());
        assert_eq!(of_x86, "--kernel 6.12-16k: expected 6.1, 6.12 or all");
        assert_eq!(refused(&["--arch", "mips"]), "--arch mips: expected x86_64 or aarch64");
        assert!(refused(&["--kernel"]).contains("expected"));
        assert!(refused(&["--fast"]).contains("--fast"));
    }
}
