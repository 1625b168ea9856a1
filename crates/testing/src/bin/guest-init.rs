//! PID 1 of the virtual machines that `cargo xtask kernels` boots: brings the machine up, runs the programs listed in
//! `/plan` and powers the machine off. All output goes to the serial console:
//!
//! ```text
//! FOURTUPLE-GUEST kernel 6.1.0-56-cloud-amd64
//! FOURTUPLE-GUEST dial begin
//! dial| a line that `dial` wrote to stdout
//! dial! a line that `dial` wrote to stderr
//! FOURTUPLE-GUEST dial exit=0 seconds=1.2
//! FOURTUPLE-GUEST done failed=0
//! ```
#![forbid(unsafe_code)]

use std::env;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_syscalls::{boot, netns, resource};

fn main() {
    if std::process::id() != 1 {
        eprintln!("guest-init: this is the first process of a virtual machine; it is of no use elsewhere");
        std::process::exit(2);
    }
    let console = Console::default();
    let mut failed = 0;
    for trouble in bring_up() {
        failed += 1;
        console.say(&format!("trouble {trouble}"));
    }
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    console.say(&format!("kernel {}", release.trim()));

    match read("/plan") {
        Ok(entries) => failed += entries.iter().filter(|entry| !run(entry, &console)).count(),
        Err(message) => {
            failed += 1;
            console.say(&format!("trouble {message}"));
        }
    }
    console.say(&format!("done failed={failed}"));
    let error = fourtuple_syscalls::boot::power_off();
    // Returning from PID 1 would panic the kernel, which also ends the machine but prints a trace.
    console.say(&format!("trouble power off: {error}"));
}

/// Serializes the lines of several threads.
#[derive(Default)]
pub(crate) struct Console {
    turn: Mutex<()>,
}

impl Console {
    /// Writes a line for `cargo xtask kernels` to read.
    pub(crate) fn say(&self, message: &str) {
        self.line("FOURTUPLE-GUEST ", message.as_bytes());
    }

    /// Writes one line with a prefix. Ignores errors: without a console there is no place to report them.
    pub(crate) fn line(&self, prefix: &str, text: &[u8]) {
        let _turn = self.turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut line = Vec::with_capacity(prefix.len() + text.len() + 1);
        line.extend_from_slice(prefix.as_bytes());
        line.extend_from_slice(text);
        line.push(b'\n');
        let mut stdout = io::stdout().lock();
        let _ = stdout.write_all(&line).and_then(|()| stdout.flush());
    }
}

/// File system types and their mount points.
const MOUNTS: &[(&str, &str)] = &[
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("cgroup2", "/sys/fs/cgroup"),
    ("devtmpfs", "/dev"),
    ("tmpfs", "/tmp"),
    ("tmpfs", "/run"),
];

/// PID 1 starts with 1,024 descriptors (4,096 hard); the labs hold a socket or two per port.
const DESCRIPTORS: u64 = 20_000;

/// Directory of the modules: `00-name.ko`, `01-name.ko`, ... in the order in which they must be loaded.
const MODULES: &str = "/modules";

/// Brings the machine up. Continues after a failure, and returns the failures, one line each.
pub(crate) fn bring_up() -> Vec<String> {
    let mut troubles = Vec::new();
    let mut note = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            troubles.push(format!("{what}: {error}"));
        }
    };
    for (kind, target) in MOUNTS {
        let mounted = fs::create_dir_all(target).and_then(|()| boot::mount(kind, target));
        // With CONFIG_DEVTMPFS_MOUNT the kernel may have mounted devtmpfs already.
        let busy = mounted.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy);
        note(&format!("mount {kind} on {target}"), if busy { Ok(()) } else { mounted });
    }
    note("raise RLIMIT_NOFILE", resource::set_descriptor_limits(DESCRIPTORS, DESCRIPTORS));
    match modules() {
        Ok(paths) => {
            for path in paths {
                // Without this, connections are tracked only if a rule of a firewall asks for it.
                let parameters = if path.ends_with("-nf_conntrack.ko") { c"enable_hooks=1" } else { c"" };
                let loaded = File::open(&path).and_then(|file| boot::load_module(file.as_fd(), parameters));
                note(&format!("load {path}"), loaded);
            }
        }
        Err(error) => note(&format!("list {MODULES}"), Err(error)),
    }
    note("bring lo up", netns::set_loopback_up());
    troubles
}

fn modules() -> io::Result<Vec<String>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(MODULES)? {
        paths.push(entry?.path().to_string_lossy().into_owned());
    }
    paths.sort();
    Ok(paths)
}

/// One program to run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) limit: Duration,
    pub(crate) program: String,
    pub(crate) arguments: Vec<String>,
}

/// Parses a plan. One invalid line makes the whole plan invalid.
pub(crate) fn read(path: &str) -> Result<Vec<Entry>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("read {path}: {error}"))?;
    text.lines().filter(|line| !line.is_empty()).map(parse).collect()
}

fn parse(line: &str) -> Result<Entry, String> {
    let mut fields = line.split('\t');
    let (Some(name), Some(seconds), Some(program)) = (fields.next(), fields.next(), fields.next()) else {
        return Err(format!("plan line {line:?}: expected name, seconds and program between tabs"));
    };
    let seconds = seconds.parse().map_err(|_| format!("plan line {line:?}: seconds are a whole number"))?;
    Ok(Entry {
        name: name.to_owned(),
        limit: Duration::from_secs(seconds),
        program: program.to_owned(),
        arguments: fields.map(str::to_owned).collect(),
    })
}

/// Interval at which a running program is polled.
const TICK: Duration = Duration::from_millis(20);

/// Runs the program and reports its end; returns true if it exited with 0 in time.
pub(crate) fn run(entry: &Entry, console: &Console) -> bool {
    console.say(&format!("{} begin", entry.name));
    let started = Instant::now();
    let end = match command(entry).spawn() {
        Ok(child) => watch(child, entry, console),
        Err(error) => {
            console.line(&format!("{}! ", entry.name), format!("{}: {error}", entry.program).as_bytes());
            // The exit code of a shell for a program that cannot be started.
            "127".to_owned()
        }
    };
    console.say(&format!("{} exit={end} seconds={:.1}", entry.name, started.elapsed().as_secs_f64()));
    end == "0"
}

fn command(entry: &Entry) -> Command {
    let mut command = Command::new(&entry.program);
    command
        .args(&entry.arguments)
        .env_clear()
        // A parameter of the kernel.
        .env("FOURTUPLE_REQUIRE", env::var_os("FOURTUPLE_REQUIRE").unwrap_or_default())
        .env("FOURTUPLE_BINARY", "/bin/fourtuple")
        .env("FOURTUPLE_CLIENT_DIRECTORY", "/bin")
        .env("HOME", "/tmp")
        .env("PATH", "/bin")
        .env("RUST_BACKTRACE", "1")
        .env("TMPDIR", "/tmp")
        .current_dir("/tmp")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    command
}

/// Forwards the output until the program ends or reaches its time limit; returns the end as one word.
fn watch(mut child: Child, entry: &Entry, console: &Console) -> String {
    let stdout = child.stdout.take();
    let stderr = child.stderr.take();
    let group = child.id();
    thread::scope(|scope| {
        scope.spawn(|| pass_on(stdout, &format!("{}| ", entry.name), console));
        scope.spawn(|| pass_on(stderr, &format!("{}! ", entry.name), console));
        let end = wait(&mut child, entry.limit);
        // A remaining process of the group would hold the pipes open and compete with the next entry.
        // ESRCH is the usual result: no process remains.
        let _ = boot::kill_group(group);
        if end == "timeout" {
            let _ = child.wait();
        }
        end
    })
}

fn wait(child: &mut Child, limit: Duration) -> String {
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return word(status),
            Ok(None) if Instant::now() >= deadline => return "timeout".to_owned(),
            Ok(None) => thread::sleep(TICK),
            Err(error) => return format!("lost-{}", error.raw_os_error().unwrap_or_default()),
        }
    }
}

fn word(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => code.to_string(),
        (None, Some(signal)) => format!("signal-{signal}"),
        (None, None) => "unknown".to_owned(),
    }
}

fn pass_on(pipe: Option<impl Read>, prefix: &str, console: &Console) {
    let Some(pipe) = pipe else { return };
    let mut reader = BufReader::new(pipe);
    let mut line = Vec::new();
    loop {
        line.clear();
        match reader.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => console.line(prefix, line.strip_suffix(b"\n").unwrap_or(&line)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_keep_their_spaces() {
        let entry = parse("ports\t60\t/bin/fourtuple\tlab\ttwo words").unwrap();
        assert_eq!(entry.name, "ports");
        assert_eq!(entry.limit, Duration::from_secs(60));
        assert_eq!(entry.program, "/bin/fourtuple");
        assert_eq!(entry.arguments, ["lab", "two words"]);
    }

    #[test]
    fn a_short_or_wordy_line_is_refused() {
        assert!(parse("ports\t60").unwrap_err().contains("expected name"));
        assert!(parse("ports\tsoon\t/bin/true").unwrap_err().contains("whole number"));
    }
}
