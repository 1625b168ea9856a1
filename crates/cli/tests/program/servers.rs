//! Servers of the tests: a running `fourtuple serve` or `fourtuple forward`, and a small HTTP server on a thread.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use fourtuple_syscalls::child;

use super::{DEADLINE, Ended};

/// A server that has reported that it is ready; killed on drop if it still runs.
pub(crate) struct Server {
    pub(crate) child: Child,
    stderr: BufReader<ChildStderr>,
    pub(crate) address: String,
    /// The rest of the ready line: `2 workers (SO_REUSEPORT)`, or `2 planes (offload, spread hash)`.
    pub(crate) workers: String,
}

impl Server {
    /// Starts `fourtuple serve`.
    pub(crate) fn start(command: &mut Command) -> Server {
        Server::ready(command, "listening on ", ", ")
    }

    /// Starts `fourtuple forward`.
    pub(crate) fn forward(command: &mut Command) -> Server {
        Server::ready(command, "forwarding ", " on ")
    }

    /// Waits for the ready line: `begin`, the address, `separator`, the workers.
    fn ready(command: &mut Command, begin: &str, separator: &str) -> Server {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("UTF-8");
        let words = line.strip_prefix(begin).unwrap_or_else(|| panic!("{line:?}"));
        let (address, workers) = words.trim_end().split_once(separator).expect("address and workers");
        let (address, workers) = (address.to_owned(), workers.to_owned());
        Server { child, stderr, address, workers }
    }

    /// Returns the next line on stderr.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.stderr.read_line(&mut line).expect("UTF-8");
        line
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    }

    /// Sends SIGINT and returns the exit code and the output.
    pub(crate) fn interrupt(self) -> Ended {
        child::interrupt(self.child.id()).unwrap();
        self.end()
    }

    pub(crate) fn end(mut self) -> Ended {
        let (mut stdout, mut stderr) = (String::new(), String::new());
        self.child.stdout.take().expect("a pipe").read_to_string(&mut stdout).expect("UTF-8");
        self.stderr.read_to_string(&mut stderr).expect("UTF-8");
        let code = self.child.wait().expect("it is our child").code().expect("an exit code");
        Ended { code, stdout, stderr }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process may have ended already: an error is expected then.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A small HTTP server, which notes where connections come from, on 127.0.0.1 in the network namespace of the thread that starts it. Its threads
/// end with the test.
pub(crate) struct Backend {
    pub(crate) address: SocketAddr,
    peers: Arc<Mutex<Vec<SocketAddr>>>,
}

impl Backend {
    /// Starts a server; with `keeps` it keeps connections, else it closes them after a response.
    pub(crate) fn start(keeps: bool) -> Backend {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("a bound socket");
        let peers = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&peers);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                noted.lock().unwrap().push(stream.peer_addr().expect("a connection"));
                thread::spawn(move || serve(stream, keeps));
            }
        });
        Backend { address, peers }
    }

    /// Returns the peers of the connections since the previous call.
    pub(crate) fn peers(&self) -> Vec<SocketAddr> {
        std::mem::take(&mut *self.peers.lock().unwrap())
    }
}

fn serve(stream: TcpStream, keeps: bool) {
    let Ok(mut writer) = stream.try_clone() else { return };
    let mut lines = BufReader::new(stream).lines();
    let connection = if keeps { "keep-alive" } else { "close" };
    while lines.by_ref().map_while(Result::ok).any(|line| line.is_empty()) {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: {connection}\r\n\r\nok\n");
        if writer.write_all(head.as_bytes()).is_err() || !keeps {
            return;
        }
    }
}
