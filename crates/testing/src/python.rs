//! A Python process that runs the code that a test sends: a server or a client that is another program.

use std::env;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use fourtuple_syscalls::child;

use crate::{skip, starting};

/// Returns whether python3 is installed; reports the test as skipped otherwise.
pub fn is_installed(test: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).any(|directory| directory.join("python3").exists());
    if !found {
        skip(test, "python3", "not in PATH");
    }
    found
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
        let mut child = starting::start(&mut command).expect("python3");
        let input = child.stdin.take();
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a line");
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
        let _ = starting::status(
            Command::new("kill").args(["-CONT", &self.pid.to_string()]).stderr(Stdio::null()),
        );
        let _ = self.child.wait();
        // The pipe ends when the last process has ended.
        let _ = io::copy(&mut self.output, &mut io::sink());
    }
}
