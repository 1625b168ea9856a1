//! Answers every request with a line, on the listener of socket activation, with four workers.
//!
//! `systemd-socket-activate --listen 127.0.0.1:8080 target/debug/examples/activated`
#![forbid(unsafe_code)]

use std::error::Error;
use std::io::{Read, Write};
use std::thread;

use fourtuple::listen::{Acceptor, ListenError, ListenerGroupBuilder};

fn main() -> Result<(), Box<dyn Error>> {
    let builder =
        ListenerGroupBuilder::from_environment()?.ok_or("start this program by socket activation")?;
    let group = builder.open()?;
    thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(|| serve(group.join()?))).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("no worker panics"))
    })?;
    Ok(())
}

fn serve(mut acceptor: Acceptor) -> Result<(), ListenError> {
    while let Some(mut connection) = acceptor.next(None)? {
        let mut request = [0; 1024];
        if matches!(connection.read(&mut request), Ok(1..)) && connection.write_all(b"answer\n").is_ok() {
            connection.answered();
            acceptor.keep(connection)?;
        }
    }
    Ok(())
}
