//! The program under test: how it is started, and what came of it.
#![allow(dead_code, reason = "every theme uses its part of it")]

pub(crate) mod forwarder;

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use boon::{Compiler, Schemas};
use fourtuple_record::SCHEMA_JSON;
use serde_json::Value;

/// Long enough for a machine that builds something else; nothing is decided by it but that a test has failed.
const DEADLINE: Duration = Duration::from_secs(60);

/// The program with its arguments, in an environment that says nothing about terminals.
pub(crate) fn fourtuple(arguments: &str) -> Command {
    fourtuple_at(Path::new(env!("CARGO_BIN_EXE_fourtuple")), arguments)
}

/// A copy of the program.
pub(crate) fn fourtuple_at(program: &Path, arguments: &str) -> Command {
    let mut command = Command::new(program);
    command.args(arguments.split_whitespace()).stdin(Stdio::null());
    for name in ["NO_COLOR", "COLUMNS", "CLICOLOR_FORCE"] {
        command.env_remove(name);
    }
    command
}

/// What came of a run.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The exit code; a signal is its number above 128.
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.stdout.lines().count(), 1, "one record is one line: {self:?}");
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The only line on stderr, without the program's name.
    pub(crate) fn line(&self) -> &str {
        let line = self.stderr.strip_suffix('\n').unwrap_or_else(|| panic!("no whole line: {self:?}"));
        assert!(!line.contains('\n'), "more than one line: {self:?}");
        line.strip_prefix("fourtuple: ").unwrap_or_else(|| panic!("whose line is it? {self:?}"))
    }

    /// Whether this host lets nobody like us make a network namespace.
    pub(crate) fn is_without_namespaces(&self) -> bool {
        self.code == 4 && self.stderr.contains("cannot make a network namespace")
    }
}

/// Runs to the end.
pub(crate) fn run(command: &mut Command) -> Ended {
    loop {
        match command.output() {
            // A copy of the program, which a process that another test has just forked still has open for writing.
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {
                thread::sleep(Duration::from_millis(1));
            }
            output => return ended(output.expect("the program starts")),
        }
    }
}

fn ended(output: Output) -> Ended {
    Ended {
        code: output
            .status
            .code()
            .or(output.status.signal().map(|signal| 128 + signal))
            .expect("it has ended"),
        stdout: String::from_utf8(output.stdout).expect("UTF-8 on stdout"),
        stderr: String::from_utf8(output.stderr).expect("UTF-8 on stderr"),
    }
}

/// Runs an experiment to the end; where no namespace is to be had the test is skipped, aloud.
pub(crate) fn measure(test: &str, arguments: &str) -> Option<Ended> {
    measure_with(test, &mut fourtuple(arguments))
}

pub(crate) fn measure_with(test: &str, command: &mut Command) -> Option<Ended> {
    let ended = run(command);
    if ended.is_without_namespaces() {
        fourtuple_testing::skip(test, "netns", ended.line());
        return None;
    }
    Some(ended)
}

/// Runs an experiment that must succeed, with --json, and gives its record.
pub(crate) fn record(test: &str, arguments: &str) -> Option<Value> {
    let ended = measure(test, &format!("{arguments} --json"))?;
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{ended:?}");
    Some(ended.json())
}

/// Fails unless the record is what the schema in the tree says.
pub(crate) fn require_valid(record: &Value) {
    let schema: Value = serde_json::from_str(SCHEMA_JSON).expect("the schema is JSON");
    let mut compiler = Compiler::new();
    compiler.add_resource("urn:test", schema).expect("the schema is a resource");
    let mut schemas = Schemas::new();
    let index = compiler.compile("urn:test", &mut schemas).expect("the schema compiles");
    if let Err(error) = schemas.validate(record, index) {
        panic!("{error:#}\n{record:#}");
    }
}

/// The list at `pointer`.
pub(crate) fn list<'a>(record: &'a Value, pointer: &str) -> &'a [Value] {
    let found = record.pointer(pointer).unwrap_or_else(|| panic!("no {pointer} in {record:#}"));
    found.as_array().unwrap_or_else(|| panic!("{pointer} is no list"))
}

/// The number at `key`.
pub(crate) fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("no number {key} in {value:#}"))
}

/// The text at `key`.
pub(crate) fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no text {key} in {value:#}"))
}

/// A run that has not ended; it is killed when the test ends before it.
pub(crate) struct Running(Option<Child>);

impl Running {
    pub(crate) fn start(command: &mut Command) -> Running {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        Running(Some(child.expect("the program starts")))
    }

    fn child(&mut self) -> &mut Child {
        self.0.as_mut().expect("it is waited for once")
    }

    pub(crate) fn id(&mut self) -> u32 {
        self.child().id()
    }

    /// Waits until `happened`; false when the program ended before.
    pub(crate) fn until(&mut self, what: &str, mut happened: impl FnMut(u32) -> bool) -> bool {
        let begun = Instant::now();
        let id = self.id();
        while !happened(id) {
            if self.child().try_wait().expect("it is our child").is_some() {
                return false;
            }
            assert!(begun.elapsed() < DEADLINE, "never {what}");
            thread::sleep(Duration::from_millis(5));
        }
        true
    }

    pub(crate) fn kill(&mut self) {
        self.child().kill().expect("it is our child");
    }

    /// Waits for the end, no longer than the deadline.
    pub(crate) fn end(mut self) -> Ended {
        let child = self.0.take().expect("it is waited for once");
        let id = child.id();
        let (sender, receiver) = std::sync::mpsc::channel();
        let watcher = thread::spawn(move || {
            if receiver.recv_timeout(DEADLINE).is_err() {
                // SIGINT twice is the hard way out.
                let _ = fourtuple_syscalls::child::interrupt(id);
                let _ = fourtuple_syscalls::child::interrupt(id);
                return false;
            }
            true
        });
        let output = child.wait_with_output().expect("it is our child");
        let _ = sender.send(());
        assert!(watcher.join().expect("no panic"), "it did not end by itself");
        ended(output)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Numbers that the TCP line of sockstat gives for `word`, for the namespace of each thread of a process.
pub(crate) fn tcp_sockets(process: u32, word: &str) -> Vec<(u32, u64)> {
    let count = |thread: u32| {
        let text = fs::read_to_string(format!("/proc/{process}/task/{thread}/net/sockstat")).ok()?;
        let mut words = text.lines().find(|line| line.starts_with("TCP:"))?.split_whitespace();
        words.find(|found| *found == word)?;
        words.next()?.parse().ok()
    };
    let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    let threads = threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    // The first thread stays in the namespace of the host, where others have sockets.
    threads.filter(|thread| *thread != process).filter_map(|thread| Some((thread, count(thread)?))).collect()
}

/// Processes whose parent is `parent`.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").expect("procfs");
    let ids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    ids.filter(|id| stat(*id).is_some_and(|(_, found)| found == parent)).collect()
}

/// State and parent of a process; `None`: it is gone.
pub(crate) fn stat(process: u32) -> Option<(char, u32)> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    let (_, rest) = text.rsplit_once(") ")?;
    let mut words = rest.split_whitespace();
    Some((words.next()?.chars().next()?, words.next()?.parse().ok()?))
}

pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").expect("procfs").uid() == 0
}

/// A directory of its own for a test, removed at its end.
pub(crate) struct Room(PathBuf);

impl Room {
    pub(crate) fn new() -> Room {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("fourtuple-program-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory for temporary files");
        Room(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn join(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("a path in UTF-8").to_owned()
    }

    /// Writes a file and gives its path.
    pub(crate) fn file(&self, name: &str, content: &str) -> String {
        let path = self.join(name);
        fs::write(&path, content).expect("a file in our own directory");
        path
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("our own directory");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8")).collect();
        names.sort();
        names
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            let _ = writeln!(io::stderr(), "{}: {error}", self.0.display());
        }
    }
}
