//! Answers every request with a line, with four workers on 127.0.0.1:8080.
//!
//! `cargo run -p fourtuple --example listen`
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::thread;

use fourtuple::listen::{AcceptPolicy, Acceptor, ListenError, ListenerGroupBuilder};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address: SocketAddr = "127.0.0.1:8080".parse()?;
    let group = ListenerGroupBuilder::at(address).policy(AcceptPolicy::SharedOneshot).open()?;
    thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(|| serve(group.join()?))).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("no worker panics"))
    })?;
    Ok(())
}

fn serve(mut acceptor: Acceptor) -> Result<(), ListenError> {
    while let Some(mut connection) = acceptor.next(None)? {
        // An error of a connection ends this connection, not the worker. Dropping a connection closes it.
        let mut request = [0; 1024];
        if !matches!(connection.read(&mut request), Ok(1..)) || connection.write_all(b"answer\n").is_err() {
            continue;
        }
        connection.response_sent();
        if !connection.should_close() {
            acceptor.keep(connection)?; // any idle worker gets its next request
        }
    }
    Ok(())
}
