//! Runs one entry of the plan: in a process group of its own, with a time limit, its output passed on line by line.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_syscalls::boot;

use crate::console::Console;
use crate::plan::Entry;

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
        .env("FOURTUPLE_REQUIRE", "netns,root,bpf,cc,fexit,io_uring,veth")
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
