//! Processes that tests start, kept apart from readings of the processes that hold a socket; a Python process, which is another program as a
//! server or a client; and the threads of a test.

use std::env;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_syscalls::child;

use crate::skip;

/// Written while a process starts: between fork() and exec() a child holds copies of all sockets of the test program, also of the sockets of
/// tests in other threads.
static STARTING: RwLock<()> = RwLock::new(());

/// Starts a process.
///
/// # Errors
///
/// The errors of [`Command::spawn`].
pub fn start(command: &mut Command) -> io::Result<Child> {
    let _starting = STARTING.write().unwrap_or_else(PoisonError::into_inner);
    child::start_by_fork(command);
    command.spawn()
}

/// Starts a process and waits for its end.
///
/// # Errors
///
/// The errors of [`Command::status`].
pub fn status(command: &mut Command) -> io::Result<ExitStatus> {
    start(command)?.wait()
}

/// Repeats `once` until its result is as expected, `tries` times at most, and returns the last result: a busy machine may stop a thread for
/// seconds, and meanwhile a limit passes, or a measurement sees nothing.
pub fn until_expected<T>(tries: u32, mut once: impl FnMut() -> T, is_expected: impl Fn(&T) -> bool) -> T {
    let mut last = once();
    for _ in 1..tries {
        if is_expected(&last) {
            break;
        }
        last = once();
    }
    last
}

/// Waits until the condition holds; `what` names it in the error.
///
/// # Panics
///
/// It does not hold within 3 minutes.
#[track_caller]
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(180), "never: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Calls `read`, which reads what processes hold, while no process starts by way of this module.
pub fn undisturbed<T>(read: impl FnOnce() -> T) -> T {
    let _undisturbed = STARTING.read().unwrap_or_else(PoisonError::into_inner);
    read()
}

/// A Python process in the network namespace of the calling thread. It ends with the value, and with the thread.
#[derive(Debug)]
pub struct Python {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    pid: u32,
}

const LOOP: &str = r#"
import errno, json, os, resource, select, signal, socket, sys, time
if sys.argv[1] == "detached":
    if os.fork():
        os._exit(0)
    os.setsid()
print(os.getpid(), flush=True)
held = []
for line in sys.stdin:
    exec(json.loads(line))
    print("done", flush=True)
# Workers end with their parent.
os.killpg(0, signal.SIGKILL) if sys.argv[1] == "detached" or os.getpgrp() == os.getpid() else os._exit(0)
"#;

impl Python {
    /// Returns whether python3 is installed; reports the test as skipped otherwise.
    pub fn is_installed(test: &str) -> bool {
        let path = env::var_os("PATH").unwrap_or_default();
        let found = env::split_paths(&path).any(|directory| directory.join("python3").exists());
        if !found {
            skip(test, "python3", "not in PATH");
        }
        found
    }

    /// Starts a child in a process group of its own.
    ///
    /// # Panics
    ///
    /// python3 does not start.
    pub fn start() -> Python {
        Python::begin("child")
    }

    /// Starts a process whose parent is not this process.
    ///
    /// # Panics
    ///
    /// python3 does not start.
    pub fn detached() -> Python {
        Python::begin("detached")
    }

    fn begin(kind: &str) -> Python {
        let mut command = Command::new("python3");
        command.args(["-c", LOOP, kind]).stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        child::end_with_this_thread(&mut command);
        let mut child = start(&mut command).expect("python3");
        let input = child.stdin.take();
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a line");
        if kind == "detached" {
            // Until the parent has ended, the process is a grandchild of this one.
            child.wait().expect("the parent of python3");
        }
        Python { child, input, output, pid: line.trim().parse().expect("a process ID") }
    }

    /// Returns the process ID of the interpreter.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends code without waiting for its end.
    ///
    /// # Panics
    ///
    /// The process has ended.
    pub fn send(&mut self, code: &str) {
        writeln!(self.input.as_mut().expect("a pipe"), "{code:?}").expect("python3 reads");
    }

    /// Runs code and returns the last line that it prints, or `done`.
    ///
    /// # Panics
    ///
    /// The process has ended.
    pub fn run(&mut self, code: &str) -> String {
        self.send(code);
        let mut last = "done".to_owned();
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).expect("a line") > 0, "python3 ended in {code}");
            match line.trim() {
                "done" => return last,
                printed => last = printed.to_owned(),
            }
        }
    }

    /// Runs code that prints a number.
    ///
    /// # Panics
    ///
    /// The process has ended, or the last line is not a number.
    pub fn number(&mut self, code: &str) -> u64 {
        let line = self.run(code);
        line.parse().unwrap_or_else(|_| panic!("{line:?} of {code}"))
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        drop(self.input.take());
        // A stopped process does not see the end of its input.
        let _ = status(Command::new("kill").args(["-CONT", &self.pid.to_string()]).stderr(Stdio::null()));
        let _ = self.child.wait();
        // The pipe ends when the last process has ended.
        let _ = io::copy(&mut self.output, &mut io::sink());
    }
}

/// Waits until the other threads of the calling thread's network namespace sleep: all workers wait for events, and no message is on
/// its way between two of them.
///
/// The threads of other tests are in other namespaces.
pub fn until_others_sleep() {
    // A thread that slept at its turn may have been woken by a thread whose turn came later, so a second look must find the same.
    while !(do_others_sleep() && do_others_sleep()) {
        thread::sleep(Duration::from_millis(1));
    }
}

fn do_others_sleep() -> bool {
    let this = fs::read_link("/proc/thread-self").expect("procfs");
    let namespace = fs::read_link("/proc/thread-self/ns/net").expect("procfs");
    let threads =
        fs::read_dir("/proc/self/task").expect("procfs").map(|entry| entry.expect("a thread").path());
    let others = threads.filter(|path| path.file_name() != this.file_name());
    // A thread that has ended in the meantime has no files.
    let is_here = |path: &Path| fs::read_link(path.join("ns/net")).is_ok_and(|other| other == namespace);
    let sleeps = |path: &Path| {
        let stat = fs::read_to_string(path.join("stat"));
        stat.map_or(true, |stat| stat.rsplit(')').next().is_some_and(|fields| fields.starts_with(" S")))
    };
    others.filter(|path| is_here(path)).all(|path| sleeps(&path))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use crate::in_namespace;

    use super::*;

    #[test]
    fn sleeping_threads_are_told_from_busy_ones() {
        in_namespace(|| {
            let (begin, begun) = mpsc::channel();
            let (end, ended) = mpsc::channel::<()>();
            let other = thread::spawn(move || {
                // Busy until the test asks it to wait.
                while begun.try_recv().is_err() {}
                ended.recv().unwrap_err();
            });
            assert!(!(do_others_sleep() && do_others_sleep() && do_others_sleep()), "one thread is busy");
            begin.send(()).unwrap();
            until_others_sleep();
            drop(end);
            other.join().unwrap();
        });
    }
}
