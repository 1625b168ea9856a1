//! The program under test: starts it and collects its exit code and output.
#![allow(dead_code, reason = "`commands` and `run` each use a part of it")]

pub(crate) mod clients;
pub(crate) mod fixing;
pub(crate) mod servers;
pub(crate) mod situation;

use std::env;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use boon::{Compiler, Schemas};
use fourtuple_record::SCHEMA_JSON;
pub(crate) use fourtuple_testing::process::until;
use fourtuple_testing::{in_namespace_of, process, test_of};
use serde_json::Value;

/// The deadline of a run: long enough for a machine under load. It only decides that a test has failed.
pub(crate) const DEADLINE: Duration = Duration::from_secs(180);

/// Returns the command with its arguments, in an environment without variables that describe a terminal.
pub(crate) fn fourtuple(arguments: &str) -> Command {
    fourtuple_at(&binary(), arguments)
}

/// Returns the path of the command. On another kernel (`cargo xtask kernels`) it is not where it was built.
pub(crate) fn binary() -> PathBuf {
    env::var_os("FOURTUPLE_BINARY").map_or_else(|| env!("CARGO_BIN_EXE_fourtuple").into(), PathBuf::from)
}

/// Returns the command for the program at `path`.
pub(crate) fn fourtuple_at(program: &Path, arguments: &str) -> Command {
    let mut command = Command::new(program);
    command.args(arguments.split_whitespace()).stdin(Stdio::null());
    for name in ["NO_COLOR", "COLUMNS", "CLICOLOR_FORCE", "TERM"] {
        command.env_remove(name);
    }
    command.env("LC_ALL", "C.UTF-8");
    command
}

/// Runs a closure of a test in a network namespace of its own. The closure gets the name of the test, for skips.
pub(crate) fn in_own_namespace<F: FnOnce(&'static str) + Send + 'static>(run: F) {
    let test: &'static str = test_of(&run).leak();
    in_namespace_of(test.to_owned(), move || run(test));
}

/// The exit code and the output of a run.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The exit code; after a signal, 128 plus the number of the signal.
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.stdout.lines().count(), 1, "one record is one line: {self:?}");
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Requires that the run succeeded and said nothing on stderr.
    #[track_caller]
    pub(crate) fn require_silence(&self) {
        assert_eq!((self.code, self.stderr.as_str()), (0, ""), "{self:?}");
    }

    /// Requires this exit code and nothing on stderr, and returns the record, which conforms to the schema.
    #[track_caller]
    pub(crate) fn record(&self, code: i32) -> Value {
        assert_eq!((self.code, self.stderr.as_str()), (code, ""), "{self:?}");
        let record = self.json();
        require_valid(&record);
        record
    }

    /// Requires this exit code, nothing on stdout, and a single line on stderr with each of these parts.
    #[track_caller]
    pub(crate) fn require_line(&self, code: i32, parts: &[&str]) {
        assert_eq!((self.code, self.stdout.as_str()), (code, ""), "{self:?}");
        for part in parts {
            assert!(self.line().contains(part), "{part:?} is not in {self:?}");
        }
    }

    /// Returns the only line on stderr, without the program's name.
    pub(crate) fn line(&self) -> &str {
        let line = self.stderr.strip_suffix('\n').unwrap_or_else(|| panic!("no whole line: {self:?}"));
        assert!(!line.contains('\n'), "more than one line: {self:?}");
        line.strip_prefix("fourtuple: ").unwrap_or_else(|| panic!("whose line is it? {self:?}"))
    }

    /// Returns whether the run failed because this host refuses a network namespace to the user of the test.
    pub(crate) fn is_without_namespaces(&self) -> bool {
        self.code == 4 && self.stderr.contains("cannot make a network namespace")
    }

    /// The same; reports the test as skipped.
    pub(crate) fn skips_without_namespaces(&self, test: &str, need: &str) -> bool {
        let is_without = self.is_without_namespaces();
        if is_without {
            fourtuple_testing::skip(test, need, self.line());
        }
        is_without
    }
}

/// Runs the command to its end.
pub(crate) fn run(command: &mut Command) -> Ended {
    loop {
        match command.output() {
            // ETXTBSY: a process that another test has just forked still has the copy of the program open for writing.
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

/// Requires that a command is refused: exit code 2, and one line with each of these parts.
#[track_caller]
pub(crate) fn refused(command: &mut Command, parts: &[&str]) {
    let ended = run(command);
    assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{command:?}: {ended:?}");
    for part in parts {
        assert!(ended.line().contains(part), "{command:?}: {part:?} is not in {ended:?}");
    }
}

/// Runs an experiment to its end. Where the host refuses a network namespace, reports a skipped test.
pub(crate) fn measure(test: &str, arguments: &str) -> Option<Ended> {
    measure_with(test, &mut fourtuple(arguments))
}

pub(crate) fn measure_with(test: &str, command: &mut Command) -> Option<Ended> {
    let ended = run(command);
    (!ended.skips_without_namespaces(test, "netns")).then_some(ended)
}

/// Runs an experiment with `--json`, requires that it succeeds, and returns its record.
pub(crate) fn record(test: &str, arguments: &str) -> Option<Value> {
    let ended = measure(test, &format!("{arguments} --json"))?;
    ended.require_silence();
    Some(ended.json())
}

/// Requires that the record conforms to the schema in the source tree.
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

/// Returns the number of operations that a run by time gave up, 2 s after their start: a machine under load may stop for as long.
pub(crate) fn unanswered(record: &Value) -> u64 {
    record["results"]["errors"].get("unanswered").map_or(0, |count| count.as_u64().expect("it is a number"))
}

/// Returns the identifiers of the remarks, without remarks that other load on the machine can cause.
pub(crate) fn remarks_but_of_haste(record: &Value) -> Vec<String> {
    let mut of_haste = vec!["offered-rate-not-reached", "client-saturated", "server-stalled", "start-skew"];
    if unanswered(record) > 0 && record["results"]["errors"].as_object().is_some_and(|all| all.len() == 1) {
        of_haste.push("errors");
    }
    let ids = list(record, "/validity").iter().map(|remark| text(remark, "id").to_owned());
    ids.filter(|id| !of_haste.contains(&id.as_str())).collect()
}

/// Runs a load to its end and returns its record, which has at most remarks that other load on the machine can cause.
pub(crate) fn loaded(command: &mut Command) -> Value {
    let ended = run(command);
    let record = ended.json();
    require_valid(&record);
    assert_eq!(remarks_but_of_haste(&record), [""; 0], "{ended:?}");
    assert_eq!(ended.code, if list(&record, "/validity").is_empty() { 0 } else { 3 }, "{ended:?}");
    record
}

/// Returns the list at `pointer`.
pub(crate) fn list<'a>(record: &'a Value, pointer: &str) -> &'a [Value] {
    let found = record.pointer(pointer).unwrap_or_else(|| panic!("no {pointer} in {record:#}"));
    found.as_array().unwrap_or_else(|| panic!("{pointer} is not a list"))
}

/// Returns the number at `key`.
pub(crate) fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("no number {key} in {value:#}"))
}

/// Returns the text at `key`.
pub(crate) fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no text {key} in {value:#}"))
}

/// A running program; killed on drop if it still runs.
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

    /// Waits until `happened` returns true. Returns false if the program ends first.
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

    /// Waits until the program ends, at most until the deadline.
    pub(crate) fn end(mut self) -> Ended {
        let child = self.0.take().expect("it is waited for once");
        let id = child.id();
        let (sender, receiver) = std::sync::mpsc::channel();
        let watcher = thread::spawn(move || {
            if receiver.recv_timeout(DEADLINE).is_err() {
                // A second SIGINT ends the program at once.
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

/// Returns the number after `word` in the TCP line of sockstat, for the network namespace of each thread of a process.
pub(crate) fn tcp_sockets(process: u32, word: &str) -> Vec<(u32, u64)> {
    let count = |thread: u32| {
        let text = fs::read_to_string(format!("/proc/{process}/task/{thread}/net/sockstat")).ok()?;
        let mut words = text.lines().find(|line| line.starts_with("TCP:"))?.split_whitespace();
        words.find(|found| *found == word)?;
        words.next()?.parse().ok()
    };
    let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    let threads = threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    // The first thread stays in the namespace of the host, where other processes have sockets.
    threads.filter(|thread| *thread != process).filter_map(|thread| Some((thread, count(thread)?))).collect()
}

/// Returns the lengths of the accept queues of the listeners at a port, in the network namespace of the calling thread.
pub(crate) fn queues(port: u16) -> Vec<u64> {
    let table = fs::read_to_string("/proc/thread-self/net/tcp").expect("procfs");
    let queue = |line: &str| {
        // Local address, remote address, state (0A is LISTEN), send queue and receive queue, in hexadecimal.
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        let is_listener = words[0].ends_with(&format!(":{port:04X}")) && words[2] == "0A";
        is_listener.then(|| u64::from_str_radix(words[3].split_once(':')?.1, 16).ok()).flatten()
    };
    table.lines().filter_map(queue).collect()
}

/// Returns the processes whose parent is `parent`.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").expect("procfs");
    let ids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    ids.filter(|id| stat(*id).is_some_and(|(_, found)| found == parent)).collect()
}

/// Returns the state and the parent of a process; `None` if it does not exist.
pub(crate) fn stat(process: u32) -> Option<(char, u32)> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The process name is in parentheses and may contain spaces and parentheses.
    let (_, rest) = text.rsplit_once(") ")?;
    let mut words = rest.split_whitespace();
    Some((words.next()?.chars().next()?, words.next()?.parse().ok()?))
}

pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").expect("procfs").uid() == 0
}

/// A directory for one test; removed on drop.
pub(crate) struct TempDir(PathBuf);

impl TempDir {
    pub(crate) fn new() -> TempDir {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("fourtuple-program-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory for temporary files");
        TempDir(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn join(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("a path in UTF-8").to_owned()
    }

    /// Writes a file and returns its path.
    pub(crate) fn file(&self, name: &str, content: &str) -> String {
        let path = self.join(name);
        fs::write(&path, content).expect("a file in our own directory");
        path
    }

    /// Copies an executable file and returns its path. cp(1) writes it: a child of another test that had inherited the descriptor would
    /// make exec() fail with ETXTBSY.
    pub(crate) fn copy(&self, from: &str, name: &str) -> String {
        let path = self.join(name);
        let copied = process::status(Command::new("cp").args([from, &path])).expect("cp");
        assert!(copied.success(), "a copy of {from}");
        path
    }

    /// Returns the path of a copy of the program that every user may execute: other users may not enter the directory of the build.
    pub(crate) fn program(&self) -> String {
        let program = self.copy(env!("CARGO_BIN_EXE_fourtuple"), "fourtuple");
        for path in [Path::new(&program), self.path()] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("our own files");
        }
        program
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("our own directory");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8")).collect();
        names.sort();
        names
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            let _ = writeln!(io::stderr(), "{}: {error}", self.0.display());
        }
    }
}

/// A copy of the program that runs as another user with a few capabilities.
pub(crate) struct Limited {
    program: String,
    _room: TempDir,
}

impl Limited {
    pub(crate) fn new() -> Limited {
        let temp = TempDir::new();
        Limited { program: temp.program(), _room: temp }
    }

    /// Returns the command that runs the copy with the user ID 65534 and these capabilities of setpriv(1) only: `+bpf`.
    pub(crate) fn command(&self, capabilities: &[String], flags: &str) -> Command {
        let set = format!("-all,{}", capabilities.join(","));
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]);
        for kind in ["inh-caps", "ambient-caps", "bounding-set"] {
            command.args([format!("--{kind}"), set.clone()]);
        }
        command.arg(&self.program).args(flags.split(' '));
        command
    }
}

/// Returns the capabilities of a systemd setting (`CAP_BPF CAP_PERFMON`) as setpriv(1) names them.
pub(crate) fn capabilities(setting: &str) -> Vec<String> {
    let names = setting.split(' ').map(|name| name.strip_prefix("CAP_").expect("a capability"));
    names.map(|name| format!("+{}", name.to_lowercase())).collect()
}
