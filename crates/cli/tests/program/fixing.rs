//! A running `fourtuple fix`, a client for it, and a cgroup for the programs of a test.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_syscalls::child;
use serde_json::Value;

use super::{DEADLINE, Ended, fourtuple, require_valid};

/// A client that knows nothing of fourtuple. It reads lines `address port number` and answers each with the number of failed
/// connects and the source ports; it keeps its connections. It answers the line `source` with the source address of the last one.
pub(crate) const CLIENT: &str = r#"
import socket, sys
held = []
print("ready", flush=True)
for line in sys.stdin:
    if line == "source\n":
        print(held[-1].getsockname()[0], flush=True)
        continue
    address, port, number = line.split()
    failed, ports = 0, []
    for _ in range(int(number)):
        s = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            s.connect((address, int(port)))
            ports.append(s.getsockname()[1])
            held.append(s)
        except OSError:
            failed += 1
    print(failed, *ports, flush=True)
"#;

/// A running client in a cgroup. The cgroup of a socket is the cgroup that its process is in when it opens the socket.
pub(crate) struct Client {
    pub(crate) child: Child,
    pub(crate) input: ChildStdin,
    pub(crate) output: BufReader<ChildStdout>,
}

impl Client {
    /// Starts a client and moves it into a cgroup; `None` after a skip.
    pub(crate) fn start(test: &str, cgroup: &Cgroup) -> Option<Client> {
        let mut command = Command::new("python3");
        command.args(["-c", CLIENT]);
        let Some(client) = Client::of(command) else {
            fourtuple_testing::skip(test, "python3", "python3 does not start");
            return None;
        };
        fs::write(cgroup.0.join("cgroup.procs"), client.child.id().to_string()).unwrap();
        Some(client)
    }

    /// Runs a command that becomes or starts the client.
    pub(crate) fn of(mut command: Command) -> Option<Client> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().ok()?;
        let input = child.stdin.take().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        // A python3 that cannot start prints nothing.
        (line == "ready\n").then_some(Client { child, input, output })
    }

    /// Connects; returns the number of failed connects and the source ports.
    pub(crate) fn connect(&mut self, address: &str, port: u16, number: u16) -> (u32, Vec<u16>) {
        writeln!(self.input, "{address} {port} {number}").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        let mut numbers = line.split_whitespace().map(|number| number.parse::<u32>().unwrap());
        (numbers.next().unwrap(), numbers.map(|port| port as u16).collect())
    }

    /// Returns the source address of the last connection.
    pub(crate) fn source(&mut self) -> String {
        writeln!(self.input, "source").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a fix and waits for its ready line; `None` after a skip.
pub(crate) fn attached(test: &str, arguments: &str) -> Option<Child> {
    attached_by(test, &mut fourtuple(arguments))
}

/// Starts the command of a fix and waits for its ready line; `None` after a skip.
pub(crate) fn attached_by(test: &str, command: &mut Command) -> Option<Child> {
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut line = String::new();
    BufReader::new(child.stderr.as_mut().expect("a pipe")).read_line(&mut line).expect("UTF-8");
    if line.starts_with("fixing ") || line.starts_with("observing ") {
        // The server may listen at the unspecified address.
        let listen = command.get_args().skip_while(|word| *word != "--listen").nth(1);
        let port = listen.and_then(|address| address.to_str()?.rsplit(':').next());
        assert!(port.is_none_or(|port| line.trim_end().ends_with(&format!(":{port}"))), "{line}");
        return Some(child);
    }
    assert_eq!(child.wait().unwrap().code(), Some(4), "{line:?}");
    fourtuple_testing::skip(test, "bpf", line.trim_end());
    None
}

/// Ends a fix with SIGTERM and returns its record.
pub(crate) fn record_of(child: Child) -> Value {
    record_with(child, 0)
}

/// Ends a fix with SIGTERM, requires this exit code and returns the record.
pub(crate) fn record_with(mut child: Child, expected: i32) -> Value {
    child::terminate(child.id()).unwrap();
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    let code = child.wait().unwrap().code();
    let ended = Ended { code: code.unwrap(), stdout: text, stderr: String::new() };
    assert_eq!(ended.code, expected, "{ended:?}");
    let record = ended.json();
    require_valid(&record);
    record
}

/// A cgroup of a test, removed at its end.
pub(crate) struct Cgroup(pub(crate) PathBuf);

impl Cgroup {
    /// Makes a cgroup; `None` after a skip.
    pub(crate) fn new(test: &str, name: &str) -> Option<Cgroup> {
        let path = |root: PathBuf| root.join(format!("fourtuple-{name}-{}", std::process::id()));
        let made =
            fourtuple_testing::cgroup_root().ok().map(path).filter(|path| fs::create_dir(path).is_ok());
        if made.is_none() {
            fourtuple_testing::skip(test, "cgroup", "no cgroup can be made");
        }
        made.map(Cgroup)
    }

    /// Removes the cgroup, and those that its programs made in it, after its processes have ended.
    pub(crate) fn remove(&self) {
        let deadline = Instant::now() + DEADLINE;
        while self.0.exists() && removed(&self.0).is_err() {
            assert!(Instant::now() < deadline, "{} has processes", self.0.display());
            thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn flags(&self, more: &str) -> String {
        format!("fix ports --cgroup {} {more}", self.0.display())
    }
}

fn removed(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            removed(&entry.path())?;
        }
    }
    fs::remove_dir(path)
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if !thread::panicking() {
            return self.remove();
        }
        // After a failure its processes may still run; Linux 5.14 can end them.
        let _ = fs::write(self.0.join("cgroup.kill"), "1");
        let deadline = Instant::now() + Duration::from_secs(2);
        while self.0.exists() && removed(&self.0).is_err() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
    }
}
