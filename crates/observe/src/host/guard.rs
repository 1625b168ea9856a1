//! Asks the `fourtuple guard` that runs at a socket: a connection carries one line of JSON to it, and one line of JSON back.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fourtuple_syscalls::errno_name;
use fourtuple_syscalls::unix_socket::{self, Peer};
use fourtuple_syscalls::unix_socket::{Kind, has_no_listener};
use serde_json::Value;

/// The path of the socket, unless `--socket` names another one.
pub const SOCKET: &str = "/run/fourtuple/guard.sock";

/// The maximum number of bytes of an answer: 100 events and some thousand fixes need less.
const MAX_ANSWER: u64 = 16 << 20;

/// The reason why a guard did not answer.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// No process listens at the path.
    #[error("no guard runs at {}", .0.display())]
    Absent(PathBuf),
    /// A system call has failed.
    #[error("cannot ask the guard at {}: {call}: {}{}", path.display(), errno_name(source), remedy(source))]
    Call {
        /// The call.
        call: &'static str,
        /// The path of the socket.
        path: PathBuf,
        /// The error of the call.
        source: io::Error,
    },
    /// The process at the path belongs to another user.
    #[error("the process at {} belongs to user {user}, which is not root and not this user", path.display())]
    Stranger {
        /// The path of the socket.
        path: PathBuf,
        /// The user of the process.
        user: u32,
    },
    /// The answer did not come in time.
    #[error("the guard at {} has not answered within {limit:?}", path.display())]
    Silent {
        /// The path of the socket.
        path: PathBuf,
        /// The time limit.
        limit: Duration,
    },
    /// The answer is not that of a guard.
    #[error("the answer of the process at {} is not that of a guard: {reason}", path.display())]
    Malformed {
        /// The path of the socket.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The guard has refused the request.
    #[error("the guard at {} has refused: {reason}", path.display())]
    Refused {
        /// The path of the socket.
        path: PathBuf,
        /// The reason of the guard.
        reason: String,
    },
}

/// Returns what to do about an error of a call, if that is known.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "; the guard of another user needs root",
        _ => "",
    }
}

/// The answer of a guard.
#[derive(Debug)]
pub struct Answer {
    /// The process that answered; 0 as its ID: it is in another PID namespace.
    pub peer: Peer,
    /// The value that the request asks for.
    pub value: Value,
}

/// Sends a request to the guard at the path, and returns its answer.
///
/// # Errors
///
/// All of [`GuardError`].
pub fn ask(path: &Path, request: &Value, limit: Duration) -> Result<Answer, GuardError> {
    let failed = |call| move |source| GuardError::Call { call, path: path.to_owned(), source };
    let malformed = |reason: String| GuardError::Malformed { path: path.to_owned(), reason };
    let silent = || GuardError::Silent { path: path.to_owned(), limit };
    let until = Instant::now() + limit;
    let socket = Kind::Stream.connect(path).map_err(|error| match error {
        error if has_no_listener(&error) => GuardError::Absent(path.to_owned()),
        // The accept queue is full.
        error if error.kind() == io::ErrorKind::WouldBlock => silent(),
        error => failed("connect()")(error),
    })?;
    let peer = unix_socket::peer(socket.as_fd()).map_err(failed("getsockopt(SO_PEERCRED)"))?;
    if !peer.is_root_or_own() {
        return Err(GuardError::Stranger { path: path.to_owned(), user: peer.user });
    }
    let mut stream = UnixStream::from(socket);
    let limited = |stream: &UnixStream| match until.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(silent()),
        left => stream.set_read_timeout(Some(left)).map_err(failed("setsockopt(SO_RCVTIMEO)")),
    };
    stream.set_nonblocking(false).map_err(failed("fcntl()"))?;
    // A request is smaller than the send buffer.
    stream.write_all(format!("{request}\n").as_bytes()).map_err(failed("send()"))?;
    let mut line = Vec::new();
    let mut part = [0; 16 << 10];
    while line.last() != Some(&b'\n') {
        limited(&stream)?;
        match stream.read(&mut part) {
            Ok(0) => return Err(malformed("it ends early".to_owned())),
            Ok(count) if (line.len() + count) as u64 > MAX_ANSWER => {
                return Err(malformed(format!("it is longer than {MAX_ANSWER} bytes")));
            }
            Ok(count) => line.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(silent()),
            Err(error) => return Err(failed("recv()")(error)),
        }
    }
    let mut answer: Value = serde_json::from_slice(&line).map_err(|error| malformed(error.to_string()))?;
    match (answer.get_mut("ok").map(Value::take), answer.get("error").and_then(Value::as_str)) {
        (Some(value), _) => Ok(Answer { peer, value }),
        (None, Some(reason)) => Err(GuardError::Refused { path: path.to_owned(), reason: reason.to_owned() }),
        (None, None) => Err(malformed("expected \"ok\" or \"error\"".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::thread;

    use serde_json::json;

    use super::*;

    /// Asks a process that sends this answer.
    fn answered(answer: &'static str, limit: Duration) -> Result<Value, String> {
        let directory = std::env::temp_dir().join(format!(
            "fourtuple-ask-{:?}-{}",
            thread::current().id(),
            std::process::id()
        ));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let guard = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = String::new();
            BufReader::new(&stream).read_line(&mut request).unwrap();
            assert_eq!(request, "{\"do\":\"status\"}\n");
            stream.write_all(answer.as_bytes()).unwrap();
            // Keeps the connection until the other end closes it.
            if answer.is_empty() {
                let _ = stream.read(&mut [0]);
            }
        });
        let answer = ask(&path, &json!({ "do": "status" }), limit);
        guard.join().unwrap();
        let absent = ask(&directory.join("none"), &json!({}), limit).unwrap_err();
        assert!(matches!(absent, GuardError::Absent(_)), "{absent}");
        fs::remove_dir_all(&directory).unwrap();
        answer.map(|answer| answer.value).map_err(|error| error.to_string())
    }

    #[test]
    fn an_answer_is_a_value_or_an_error() {
        let minute = Duration::from_secs(60);
        assert_eq!(answered("{\"ok\":[1,2]}\n", minute), Ok(json!([1, 2])));
        assert_eq!(answered("{\"ok\":null}\n", minute), Ok(Value::Null));
        for (answer, limit, expected) in [
            ("{\"error\":\"not now\"}\n", minute, "has refused: not now"),
            ("{}\n", minute, "expected \"ok\""),
            ("HTTP/1.1 400 \r\n", minute, "is not that of a guard"),
            ("{\"ok\":1}", minute, "it ends early"),
            ("", Duration::from_millis(50), "has not answered within 50ms"),
        ] {
            let error = answered(answer, limit).unwrap_err();
            assert!(error.contains(expected), "{answer:?}: {error}");
        }
    }
}
