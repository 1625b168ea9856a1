//! Answers every request with a line, on 127.0.0.1:8080, until SIGTERM. Then it serves the queued and open connections and ends.
//!
//! `cargo run -p fourtuple --example drain`
#![forbid(unsafe_code)]

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use fourtuple::listen::{AcceptPolicy, Acceptor, ListenError, ListenerGroupBuilder};
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address: SocketAddr = "127.0.0.1:8080".parse()?;
    let group = ListenerGroupBuilder::at(address).policy(AcceptPolicy::SharedOneshot).open()?;
    thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(|| serve(group.join()?))).collect();
        wait_for_sigterm()?;
        // The workers continue during the drain. After it, next() returns None.
        let report = group.drain(Duration::from_secs(10))?;
        println!("{report:?}");
        workers.into_iter().try_for_each(|worker| worker.join().expect("no worker panics"))?;
        Ok(())
    })
}

fn serve(mut acceptor: Acceptor) -> Result<(), ListenError> {
    while let Some(mut connection) = acceptor.next(None)? {
        let mut request = [0; 1024];
        if !matches!(connection.read(&mut request), Ok(1..)) {
            continue;
        }
        // During the drain each response is the last of its connection: HTTP servers send `Connection: close`.
        let answer: &[u8] = if connection.should_close() { b"last answer\n" } else { b"answer\n" };
        if connection.write_all(answer).is_err() {
            continue;
        }
        connection.response_sent();
        if !connection.should_close() {
            acceptor.keep(connection)?;
        }
    }
    Ok(())
}

/// Waits for SIGTERM; any other way to wait for a signal works too.
fn wait_for_sigterm() -> io::Result<()> {
    let runtime = runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(async {
        signal(SignalKind::terminate())?.recv().await;
        Ok(())
    })
}
