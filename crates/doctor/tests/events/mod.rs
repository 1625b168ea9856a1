//! Readings with an event in between, and processes that make events.
#![allow(dead_code, reason = "each test file uses a part")]

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use fourtuple_host::snapshot::Reader;
use fourtuple_record::snapshot::Snapshot;
use fourtuple_record::{Finding, Severity};
use fourtuple_syscalls::child;
use fourtuple_testing::skip;

use crate::scene::{apply, findings_in, read};

/// Returns the findings of a rule after two readings of the namespace with an event between them.
pub(crate) fn between(id: &str, event: impl FnOnce()) -> Vec<Finding> {
    findings_in(&snapshot(event), id)
}

/// Returns the snapshot of two readings of the namespace with an event between them.
pub(crate) fn snapshot(event: impl FnOnce()) -> Snapshot {
    let mut reader = Reader::new(Path::new("/"));
    reader.read();
    event();
    read(&mut reader)
}

/// Returns the only finding, and checks its severity and a part of its verdict.
#[track_caller]
pub(crate) fn only(found: &[Finding], severity: Severity, verdict: &str) -> Finding {
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].severity, severity, "{}", found[0].verdict);
    assert!(found[0].verdict.contains(verdict), "{} does not contain {verdict}", found[0].verdict);
    found[0].clone()
}

/// Sets the sysctl of the first recomputed remedy.
#[track_caller]
pub(crate) fn apply_first(finding: &Finding) {
    let advice =
        finding.now.iter().find(|advice| advice.recomputed && advice.action.starts_with("sysctl -w "));
    apply(advice.unwrap_or_else(|| panic!("no sysctl in {finding:?}")));
}

/// Returns whether python3 is installed; reports the test as skipped otherwise.
pub(crate) fn has_python(test: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).any(|directory| directory.join("python3").exists());
    if !found {
        skip(test, "python3", "not in PATH");
    }
    found
}

/// A Python process in the namespace of the calling thread, which runs the code that it is sent. It ends with the value.
pub(crate) struct Python {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// Process ID of the interpreter.
    pub(crate) pid: u32,
}

const LOOP: &str = r#"
import json, os, resource, select, signal, socket, sys
if sys.argv[1] == "detached":
    if os.fork():
        os._exit(0)
    os.setsid()
print(os.getpid(), flush=True)
for line in sys.stdin:
    exec(json.loads(line))
    print("done", flush=True)
# Workers end with their parent.
os.killpg(0, signal.SIGKILL) if sys.argv[1] == "detached" or os.getpgrp() == os.getpid() else os._exit(0)
"#;

impl Python {
    /// Starts a child in a process group of its own.
    pub(crate) fn start() -> Python {
        Python::begin("child")
    }

    /// Starts a process whose parent is not this process.
    pub(crate) fn detached() -> Python {
        Python::begin("detached")
    }

    fn begin(kind: &str) -> Python {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new("python3");
        command.args(["-c", LOOP, kind]).stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        child::end_with_this_thread(&mut command);
        let mut child = command.spawn().expect("python3");
        let input = child.stdin.take();
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a line");
        Python { child, input, output, pid: line.trim().parse().expect("a process ID") }
    }

    /// Sends code without waiting for its end.
    pub(crate) fn send(&mut self, code: &str) {
        writeln!(self.input.as_mut().expect("a pipe"), "{code:?}").expect("python3 reads");
    }

    /// Runs code and returns the line that it prints, or `done`.
    pub(crate) fn run(&mut self, code: &str) -> String {
        self.send(code);
        let mut first = None;
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).expect("a line") > 0, "python3 ended in {code}");
            match line.trim() {
                "done" => return first.unwrap_or_else(|| "done".to_owned()),
                printed => first = Some(printed.to_owned()),
            }
        }
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        drop(self.input.take());
        // A stopped process does not see the end of its input.
        let _ = Command::new("kill").args(["-CONT", &self.pid.to_string()]).output();
        let _ = self.child.wait();
        // The pipe ends when the last process has ended.
        let _ = std::io::copy(&mut self.output, &mut std::io::sink());
    }
}
