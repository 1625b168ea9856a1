//! `fourtuple fleet` and `fourtuple agent` with a real nats-server.

#[path = "../../../crates/cli/tests/program/mod.rs"]
mod program;
mod runs;
mod security;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_syscalls::child;
use fourtuple_testing::{in_namespace_of, test_of};
use serde_json::{Value, json};

use program::{TempDir, fourtuple, fourtuple_at, run, until};

/// The server under load.
pub(crate) const TARGET: &str = "tcp://127.0.0.1:4000";

/// A process that is killed when dropped, and the lines that it prints on stderr.
pub(crate) struct Process {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
    printed: Arc<Mutex<String>>,
}

impl Process {
    pub(crate) fn start(mut command: Command) -> Process {
        child::end_with_this_thread(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = loop {
            match command.spawn() {
                // ETXTBSY: a process that another test has just forked still has the copy of the program open for writing.
                Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => {
                    thread::sleep(Duration::from_millis(1));
                }
                child => break child.expect("the program starts"),
            }
        };
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (stderr, kept) = (child.stderr.take().expect("stderr is piped"), Arc::clone(&lines));
        // The thread ends with the pipe.
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                kept.lock().unwrap().push(line);
            }
        });
        let printed = Arc::new(Mutex::new(String::new()));
        let (stdout, kept) = (child.stdout.take().expect("stdout is piped"), Arc::clone(&printed));
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                kept.lock().unwrap().push_str(&line);
            }
        });
        Process { child, lines, printed }
    }

    /// Waits until stdout contains the text.
    pub(crate) fn until_printed(&self, text: &str) {
        until("the text is printed", || self.printed.lock().unwrap().contains(text));
    }

    pub(crate) fn has_said(&self, text: &str) -> bool {
        self.lines.lock().unwrap().iter().any(|line| line.contains(text))
    }

    /// Waits until a line contains the text.
    pub(crate) fn until_said(&self, text: &str) {
        let begun = Instant::now();
        while !self.has_said(text) {
            assert!(begun.elapsed() < crate::program::DEADLINE, "never said {text:?}: {}", self.said());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns all lines so far.
    pub(crate) fn said(&self) -> String {
        self.lines.lock().unwrap().join("\n")
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for the end and returns the exit code.
    pub(crate) fn code(&mut self) -> Option<i32> {
        self.child.wait().expect("it is our child").code()
    }

    /// Sends a signal by its name: `STOP`, `CONT`, `INT`.
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.id().to_string()]).status();
        assert!(sent.expect("kill of procps or util-linux").success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A fleet on the loopback of the namespace of a test.
pub(crate) struct LocalFleet {
    pub(crate) directory: TempDir,
    /// nats-server.
    program: PathBuf,
    pub(crate) nats: Process,
    _target: Process,
}

/// Returns the path of nats-server, or reports a skipped test.
pub(crate) fn nats_server(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut directories: Vec<PathBuf> = std::env::split_paths(&path).collect();
    directories.push("/usr/sbin".into());
    let found =
        directories.into_iter().map(|directory| directory.join("nats-server")).find(|file| file.is_file());
    if found.is_none() {
        fourtuple_testing::skip(test, "nats", "there is no nats-server in PATH");
    }
    found
}

/// Runs a test in a namespace of its own with nats-server and a server under load; skips it without nats-server. The closure has to be
/// of the test function itself, whose name the report takes from it.
pub(crate) fn with_fleet<F: FnOnce(LocalFleet) + Send + 'static>(test: F) {
    let name = test_of(&test);
    in_namespace_of(name.clone(), move || {
        if let Some(local) = LocalFleet::start_with(&name, "") {
            test(local);
        }
    });
}

impl LocalFleet {
    /// Starts nats-server with these lines in its configuration, and a server under load; `None` after a skip.
    pub(crate) fn start_with(test: &str, configuration: &str) -> Option<LocalFleet> {
        let program = nats_server(test)?;
        let directory = TempDir::new();
        let store = directory.join("jetstream");
        directory.file(
            "nats.conf",
            &format!("listen: \"127.0.0.1:4222\"\njetstream {{ store_dir: \"{store}\" }}\n{configuration}\n"),
        );
        let nats = start_nats(&program, &directory);
        let target = Process::start(fourtuple("serve crr --listen 127.0.0.1:4000 --quiet"));
        until("the target listens", || TcpStream::connect("127.0.0.1:4000").is_ok());
        Some(LocalFleet { directory, program, nats, _target: target })
    }

    pub(crate) fn restart_nats(&mut self) {
        self.nats = start_nats(&self.program, &self.directory);
    }

    /// Returns the number of intervals and ends of a worker in the stream, of all runs. Workers are in the order of their names.
    fn messages(&self, worker: u32) -> u64 {
        let filter = json!({ "subjects_filter": format!("fourtuple.run.*.slot.{worker}.second") });
        let filter = filter.to_string();
        let (_, reply) = RawClient::connect().request("$JS.API.STREAM.INFO.FOURTUPLE", filter.as_bytes());
        let reply: Value = serde_json::from_slice(&reply).expect("JSON");
        let subjects = reply.pointer("/state/subjects").and_then(Value::as_object);
        subjects.map_or(0, |subjects| subjects.values().filter_map(Value::as_u64).sum())
    }

    /// Starts a run by `start`, and waits until the second worker has reported that many seconds of it.
    pub(crate) fn under_way<T>(&self, seconds: u64, start: impl FnOnce() -> T) -> T {
        let before = self.messages(1);
        let started = start();
        until("the run is under way", || self.messages(1) >= before + seconds);
        started
    }

    /// Starts an agent and waits until it is ready.
    pub(crate) fn agent(&self, name: &str, flags: &str) -> Process {
        let agent = Process::start(self.agent_command(name, flags));
        agent.until_said("is ready");
        agent
    }

    pub(crate) fn agent_command(&self, name: &str, flags: &str) -> Command {
        let mut command = fourtuple(&format!("agent --name {name} {flags}"));
        command.args(["--state", &self.directory.join(name)]);
        command
    }

    /// Starts the agent of a copy of the program that differs in one byte behind its end.
    pub(crate) fn agent_of_another_binary(&self, name: &str) -> Process {
        let path = self.directory.path().join("another");
        let mut bytes = fs::read(env!("CARGO_BIN_EXE_fourtuple")).expect("the program");
        bytes.push(0);
        fs::write(&path, bytes).expect("a file in our own directory");
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .expect("our own file");
        // The program of the agent is the same: the one that it runs differs.
        let beside = path.with_file_name("fourtuple-fleet");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_fourtuple-fleet"), beside).expect("our own directory");
        let mut command = fourtuple_at(&path, &format!("agent --name {name}"));
        command.args(["--state", &self.directory.join(name)]);
        let agent = Process::start(command);
        agent.until_said("is ready");
        agent
    }
}

fn start_nats(program: &Path, directory: &TempDir) -> Process {
    let mut command = Command::new(program);
    command.args(["-c", &directory.join("nats.conf")]);
    let nats = Process::start(command);
    nats.until_said("Server is ready");
    nats
}

/// Returns the hosts of a merged record by name.
pub(crate) fn hosts(record: &Value) -> BTreeMap<String, Value> {
    let hosts = crate::program::list(record, "/results/hosts");
    hosts.iter().map(|host| (crate::program::text(host, "name").to_owned(), host.clone())).collect()
}

/// Runs `fleet ...` to its end and returns its exit code and record.
pub(crate) fn fleet(arguments: &str) -> (i32, Value) {
    let ended = run(&mut fourtuple(&format!("fleet {arguments} --json --quiet")));
    assert!(!ended.stdout.is_empty(), "{ended:?}");
    let record = ended.json();
    crate::program::require_valid(&record);
    (ended.code, record)
}

/// A proxy to 127.0.0.1:4222 that delays each direction.
pub(crate) fn delaying_proxy(listen: &str, delay: Duration) {
    let listener = TcpListener::bind(listen).expect("a free port");
    // The threads end with the process of the test or with their connections.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (Ok(outside), Ok(inside)) = (stream, TcpStream::connect("127.0.0.1:4222")) else { continue };
            for (from, to) in [(&outside, &inside), (&inside, &outside)] {
                to.set_nodelay(true).expect("a TCP socket");
                delayed_copy(from.try_clone().expect("a copy"), to.try_clone().expect("a copy"), delay);
            }
        }
    });
}

fn delayed_copy(mut from: TcpStream, mut to: TcpStream, delay: Duration) {
    let (sender, receiver) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        let mut buffer = [0; 65_536];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if sender.send((Instant::now() + delay, buffer[..count].to_vec())).is_err() {
                return;
            }
        }
    });
    thread::spawn(move || {
        for (at, bytes) in receiver {
            thread::sleep(at.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                return;
            }
        }
    });
}

/// A client that speaks the protocol of NATS by hand: it sends what a hostile client could.
pub(crate) struct RawClient {
    stream: BufReader<TcpStream>,
}

impl RawClient {
    pub(crate) fn connect() -> RawClient {
        let mut stream = BufReader::new(TcpStream::connect("127.0.0.1:4222").expect("nats-server"));
        let mut info = String::new();
        stream.read_line(&mut info).expect("a line");
        let connect =
            "CONNECT {\"verbose\":false,\"headers\":true,\"no_responders\":true}\r\nSUB inbox 1\r\n";
        stream.get_mut().write_all(connect.as_bytes()).expect("sent");
        RawClient { stream }
    }

    /// Sends a request whose reply is not read.
    pub(crate) fn send(&mut self, subject: &str, payload: &[u8]) {
        self.publish(subject, "nowhere", payload);
    }

    fn publish(&mut self, subject: &str, reply: &str, payload: &[u8]) {
        let line = format!("PUB {subject} {reply} {}\r\n", payload.len());
        let message = [line.as_bytes(), payload, b"\r\n"].concat();
        self.stream.get_mut().write_all(&message).expect("sent");
    }

    /// Sends a request and returns the header and the payload of the reply.
    pub(crate) fn request(&mut self, subject: &str, payload: &[u8]) -> (String, Vec<u8>) {
        self.publish(subject, "inbox", payload);
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line).expect("a line");
            let words: Vec<&str> = line.split_whitespace().collect();
            let size = |word: &str| word.parse::<usize>().expect("a size");
            let (header, total) = match words.as_slice() {
                ["PING"] => {
                    self.stream.get_mut().write_all(b"PONG\r\n").expect("sent");
                    continue;
                }
                ["MSG", .., total] => (0, size(total)),
                ["HMSG", .., header, total] => (size(header), size(total)),
                _ => continue,
            };
            let mut bytes = vec![0; total + 2];
            self.stream.read_exact(&mut bytes).expect("a message");
            bytes.truncate(total);
            let payload = bytes.split_off(header);
            return (String::from_utf8(bytes).expect("UTF-8"), payload);
        }
    }

    /// Returns the prefix of the subjects of the only agent.
    pub(crate) fn agent(&mut self) -> String {
        let (_, payload) = self.request("$SRV.INFO.fourtuple", b"");
        let info: Value = serde_json::from_slice(&payload).expect("JSON");
        format!("fourtuple.agent.{}", info["metadata"]["instance"].as_str().expect("an instance"))
    }

    pub(crate) fn session(&mut self, agent: &str) -> String {
        let (_, payload) = self.request(&format!("{agent}.session"), b"");
        String::from_utf8(payload).expect("UTF-8")
    }

    pub(crate) fn ask(
        &mut self,
        agent: &str,
        session: &str,
        sequence: u64,
        request: Value,
    ) -> (String, Vec<u8>) {
        let envelope = json!({ "ticket": { "session": session, "sequence": sequence }, "request": request });
        self.request(&format!("{agent}.request"), envelope.to_string().as_bytes())
    }
}
