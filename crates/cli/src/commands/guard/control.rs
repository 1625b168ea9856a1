//! The socket at which `guard status`, `pause`, `resume` and a successor reach the running guard.

use std::fs::DirBuilder;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use fourtuple_observe::host::guard;
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::socket::{self, AcceptFailure};
use fourtuple_syscalls::unix_socket;
use fourtuple_syscalls::unix_socket::{Kind, SocketPath};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The accept backlog.
const BACKLOG: i32 = 16;
/// The maximum number of connections at a time.
const CONNECTIONS: usize = 16;
/// The maximum number of bytes of a request.
const MAX_REQUEST: usize = 64 << 10;
/// The time in which a client must send its request, and then each time read more of the answer. On a busy host it may stand still for seconds.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a client asks for, as JSON: `{"do":"pause","for_ns":null}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase", deny_unknown_fields)]
pub(super) enum RequestKind {
    /// The state of the guard.
    Status,
    /// To detach all fixes and to attach none for this time; `None`: until a resume.
    Pause { for_ns: Option<u64> },
    /// To go on.
    Resume,
    /// To hand over to the process with this number, which then ends this guard.
    Takeover { pid: u32 },
}

/// The control socket of this guard. A drop removes its path, unless a successor has it.
#[derive(Debug)]
pub(super) struct Control {
    _path: SocketPath,
    listener: OwnedFd,
    /// The listener and the connections whose requests are incomplete.
    epoll: Epoll,
    receiving: Vec<Receiving>,
    /// Answers that the socket buffer did not hold.
    sending: Vec<Sending>,
    unsent: (Sender<Sending>, Receiver<Sending>),
    /// Whether the last accept(2) has failed, as with EMFILE.
    is_starved: bool,
    /// Whether the last wait found no client.
    is_quiet: bool,
}

/// A connection whose request is incomplete.
#[derive(Debug)]
struct Receiving {
    stream: UnixStream,
    since: Instant,
    line: Vec<u8>,
}

/// A connection whose answer is incomplete.
#[derive(Debug)]
struct Sending {
    stream: UnixStream,
    /// When the client has last read a part of it.
    since: Instant,
    rest: Vec<u8>,
}

/// A request that waits for its answer.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) kind: RequestKind,
    stream: UnixStream,
    unsent: Sender<Sending>,
}

impl Control {
    /// Listens at the path, and makes its directory if it is missing.
    ///
    /// # Errors
    ///
    /// Another guard listens there; a file other than a socket is there.
    pub(super) fn bind(path: &Path) -> anyhow::Result<Control> {
        make_directory(path)?;
        match SocketPath::bind(path, Kind::Stream, BACKLOG) {
            Ok(bound) => Control::new(bound),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Kind::Stream.connect(path).is_ok() => {
                Err(anyhow!("another guard runs at {}; --takeover takes over from it", path.display()))
            }
            Err(error) => Err(error).with_context(|| format!("--socket {}", path.display())),
        }
    }

    /// Listens at the path in the place of the guard that this one takes over from.
    pub(super) fn replace(path: &Path) -> anyhow::Result<Control> {
        make_directory(path)?;
        let bound = SocketPath::replace(path, Kind::Stream, BACKLOG);
        Control::new(bound.with_context(|| format!("--socket {}", path.display()))?)
    }

    fn new((path, listener): (SocketPath, OwnedFd)) -> anyhow::Result<Control> {
        let epoll = Epoll::new().context("epoll_create1()")?;
        epoll.add(listener.as_fd(), 0, Interest::READ).context("epoll_ctl()")?;
        Ok(Control {
            _path: path,
            listener,
            epoll,
            receiving: Vec::new(),
            sending: Vec::new(),
            unsent: mpsc::channel(),
            is_starved: false,
            is_quiet: false,
        })
    }

    /// Waits until a client needs attention, a signal arrives or the time expires.
    pub(super) fn wait(&mut self, time: Duration) {
        if self.is_starved {
            // Without a descriptor for the next connection the listener would end each wait at once.
            thread::sleep(time);
            return;
        }
        // An error of epoll_wait(2) would be one of its arguments.
        self.is_quiet = self.epoll.wait(&mut [Ready::NONE], Some(time)).is_ok_and(|ready| ready.is_empty());
    }

    /// Returns the requests that have arrived. Never waits.
    pub(super) fn requests(&mut self) -> Vec<Request> {
        self.sending.extend(self.unsent.1.try_iter());
        if self.is_quiet && self.sending.is_empty() && self.receiving.is_empty() {
            return Vec::new();
        }
        self.sending.retain_mut(|sending| !sending.send() && sending.since.elapsed() < PATIENCE);
        self.accept();
        let mut requests = Vec::new();
        let mut incomplete = Vec::new();
        for mut connection in self.receiving.drain(..) {
            match connection.receive() {
                Ok(None) if connection.since.elapsed() < PATIENCE => incomplete.push(connection),
                // The client is gone, or too slow.
                Ok(None) | Err(None) => {}
                Ok(Some(kind)) => {
                    let _ = self.epoll.remove(connection.stream.as_fd());
                    requests.push(Request { kind, stream: connection.stream, unsent: self.unsent.0.clone() });
                }
                Err(Some(reason)) => {
                    let _ = self.epoll.remove(connection.stream.as_fd());
                    answer(connection.stream, &self.unsent.0, &json!({ "error": reason }));
                }
            }
        }
        self.receiving = incomplete;
        requests
    }

    /// Accepts all connections. Above the maximum, the oldest ones are closed.
    fn accept(&mut self) {
        let accepted = loop {
            let socket = match socket::accept_nonblocking(self.listener.as_fd()) {
                Ok(socket) => socket,
                Err(error) => break AcceptFailure::of(&error),
            };
            // The mode of the path keeps others out; its owner may change it.
            let is_trusted = unix_socket::peer(socket.as_fd()).is_ok_and(|peer| peer.is_root_or_own());
            if is_trusted && self.epoll.add(socket.as_fd(), 1, Interest::READ).is_ok() {
                let stream = UnixStream::from(socket);
                self.receiving.push(Receiving { stream, since: Instant::now(), line: Vec::new() });
            }
        };
        self.is_starved = !matches!(accepted, AcceptFailure::Wait | AcceptFailure::Retry);
        self.receiving.drain(..self.receiving.len().saturating_sub(CONNECTIONS));
        self.sending.drain(..self.sending.len().saturating_sub(CONNECTIONS));
    }
}

impl Receiving {
    /// Reads what has arrived. Returns the request if it is complete. `Err`: an error for the client, or the client is gone.
    fn receive(&mut self) -> Result<Option<RequestKind>, Option<String>> {
        let mut part = [0; 4 << 10];
        loop {
            match self.stream.read(&mut part) {
                Ok(0) => return Err(None),
                Ok(count) => self.line.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return Err(None),
            }
            if let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
                let kind = serde_json::from_slice(&self.line[..end]);
                return kind.map(Some).map_err(|error| Some(format!("invalid request: {error}")));
            }
            if self.line.len() > MAX_REQUEST {
                return Err(Some(format!("the request is longer than {MAX_REQUEST} bytes")));
            }
        }
    }
}

impl Request {
    /// Sends the answer. What the socket buffer does not hold is sent by later calls of [`Control::requests`].
    pub(super) fn answer(self, result: Result<Value, String>) {
        let value = match result {
            Ok(value) => json!({ "ok": value }),
            Err(reason) => json!({ "error": reason }),
        };
        answer(self.stream, &self.unsent, &value);
    }
}

fn answer(stream: UnixStream, unsent: &Sender<Sending>, value: &Value) {
    let mut sending = Sending { stream, since: Instant::now(), rest: format!("{value}\n").into_bytes() };
    if !sending.send() {
        // The receiver is gone when the guard ends.
        let _ = unsent.send(sending);
    }
}

impl Sending {
    /// Sends what the socket buffer holds. Returns whether the connection is done.
    fn send(&mut self) -> bool {
        while !self.rest.is_empty() {
            match self.stream.write(&self.rest) {
                Ok(count) => {
                    self.since = Instant::now();
                    drop(self.rest.drain(..count));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
            }
        }
        true
    }
}

/// Makes the directory of a path if it is missing.
fn make_directory(path: &Path) -> anyhow::Result<()> {
    let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) else {
        return Ok(());
    };
    let made = DirBuilder::new().recursive(true).mode(0o755).create(directory);
    made.with_context(|| format!("--socket {}: cannot make its directory", path.display()))
}

/// Asks the guard at the path.
pub(super) fn ask(path: &Path, request: &RequestKind) -> anyhow::Result<Value> {
    /// A guard that detaches its fixes answers a moment later.
    const LIMIT: Duration = Duration::from_secs(30);
    Ok(guard::ask(path, &serde_json::to_value(request)?, LIMIT)?.value)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;
    use std::thread::JoinHandle;

    use fourtuple_testing::process::until_expected;

    use super::*;

    /// The longest wait for something that must happen.
    const DEADLINE: Duration = Duration::from_secs(60);

    /// A directory of one test.
    struct TempDir(PathBuf);

    impl TempDir {
        fn new(test: &str) -> TempDir {
            let path = std::env::temp_dir().join(format!("fourtuple-{test}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            TempDir(path)
        }

        fn socket(&self) -> PathBuf {
            self.0.join("below/guard.sock")
        }
    }

    impl Drop for TempDir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Answers until `clients` has ended, and returns its result.
    fn serve<T>(
        control: &mut Control,
        clients: JoinHandle<T>,
        answers: impl Fn(&RequestKind) -> Result<Value, String>,
    ) -> T {
        let until = Instant::now() + DEADLINE;
        while !clients.is_finished() {
            assert!(Instant::now() < until, "the clients have no answer");
            control.wait(Duration::from_millis(10));
            for request in control.requests() {
                let answer = answers(&request.kind);
                request.answer(answer);
            }
        }
        clients.join().unwrap()
    }

    #[test]
    fn a_client_gets_its_answer() {
        let temp = TempDir::new("control");
        let path = temp.socket();
        let mut control = Control::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let client = thread::spawn(move || {
            let pause = RequestKind::Pause { for_ns: Some(5) };
            // More than a socket buffer.
            // The guard gives a client up that reads nothing for a while, as a thread on a busy machine may.
            let long = until_expected(20, || ask(&path, &RequestKind::Status), Result::is_ok).unwrap();
            (long, ask(&path, &pause).unwrap(), ask(&path, &RequestKind::Takeover { pid: 7 }).unwrap_err())
        });
        let long = Value::from("x".repeat(4 << 20));
        let (status, pause, takeover) = serve(&mut control, client, |kind| match kind {
            RequestKind::Status => Ok(long.clone()),
            RequestKind::Pause { for_ns } => Ok(json!(for_ns)),
            _ => Err("not now".to_owned()),
        });
        assert!(status == long && pause == json!(5));
        assert!(takeover.to_string().ends_with("has refused: not now"), "{takeover}");
    }

    #[test]
    fn requests_are_bounded() {
        let temp = TempDir::new("bounded");
        let path = temp.socket();
        let mut control = Control::bind(&path).unwrap();
        let send = |text: &[u8]| {
            let mut stream = UnixStream::connect(&path).unwrap();
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            // The guard closes the connection in the middle of a request that is too long.
            let _ = stream.write_all(text);
            stream
        };
        // Slow clients hold neither the guard nor each other.
        let mut slow = send(b"{\"do\":");
        let refused: Vec<(UnixStream, &str)> = vec![
            (send(&[b'x'; MAX_REQUEST + 1]), "longer than 65536 bytes"),
            (send(b"{\"do\":\"status\",\"for_ns\":1}\n"), ""),
            (send(b"{\"do\":\"end\"}\n"), "unknown variant `end`"),
            (send(b"{\"do\":\"pause\",\"for_ns\":-1}\n"), "invalid value"),
            (send(b"\xff\n"), "invalid request"),
        ];
        let clients = thread::spawn(move || {
            let answer = |mut stream: UnixStream| {
                let mut text = String::new();
                stream.read_to_string(&mut text).unwrap();
                text
            };
            for (stream, expected) in refused {
                let text = answer(stream);
                assert!(text.contains(expected), "{expected}: {text}");
            }
            // The guard closes the connection without an answer once the time is over.
            let mut rest = Vec::new();
            slow.read_to_end(&mut rest).unwrap();
            rest
        });
        let rest = serve(&mut control, clients, |_| Ok(Value::Null));
        assert!(rest.is_empty(), "{rest:?}");
        assert!(control.receiving.is_empty() && control.sending.is_empty());
    }

    #[test]
    fn a_second_guard_is_refused_unless_it_takes_over() {
        let temp = TempDir::new("second");
        let path = temp.socket();
        let first = Control::bind(&path).unwrap();
        let error = Control::bind(&path).unwrap_err().to_string();
        assert!(error.starts_with(&format!("another guard runs at {}", path.display())), "{error}");
        let mut second = Control::replace(&path).unwrap();
        drop(first);
        let ours = path.clone();
        let client = thread::spawn(move || ask(&ours, &RequestKind::Resume).unwrap());
        assert_eq!(serve(&mut second, client, |_| Ok(json!("second"))), json!("second"));
        drop(second);
        assert!(!path.exists());
        let gone = ask(&path, &RequestKind::Status).unwrap_err().to_string();
        assert_eq!(gone, format!("no guard runs at {}", path.display()));
    }
}
