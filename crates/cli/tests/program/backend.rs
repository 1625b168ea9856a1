//! A small HTTP server on a thread, which notes where connections come from.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// A server on 127.0.0.1 in the network namespace of the thread that starts it. Its threads end with the test.
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
