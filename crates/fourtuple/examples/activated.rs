//! Answers every request with a line, on the listener of socket activation, until SIGTERM. Then it stops accepting, serves the connections
//! that it has and ends. The queued connections stay for the next process with this listener.
//!
//! `systemd-socket-activate --listen 127.0.0.1:8080 target/debug/examples/activated [POLICY] [WORKERS]`
#![forbid(unsafe_code)]

use std::env;
use std::error::Error;
use std::io::{self, Read, Write};
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use fourtuple::listen::{AcceptPolicy, Acceptor, ListenError, ListenerGroupBuilder};
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let policy: AcceptPolicy = arguments.next().map_or(Ok(AcceptPolicy::Auto), |name| name.parse())?;
    let count = arguments.next().map_or(Ok(4), |count| count.parse::<usize>())?;
    let builder =
        ListenerGroupBuilder::from_environment()?.ok_or("start this program by socket activation")?;
    let group = builder.policy(policy).open()?;
    let acceptors = (0..count).map(|_| group.join()).collect::<Result<Vec<_>, _>>()?;
    thread::scope(|scope| {
        if group.policy() == AcceptPolicy::Dispatcher {
            let mut dispatcher = group.dispatcher()?;
            scope.spawn(move || dispatcher.run(&AtomicBool::new(false)));
        }
        let serving = |acceptor| scope.spawn(|| serve(acceptor));
        let workers: Vec<_> = acceptors.into_iter().map(serving).collect();
        until_sigterm()?;
        println!("{:?}", group.hand_over(Duration::from_secs(60))?);
        workers.into_iter().try_for_each(|worker| worker.join().expect("no worker panics"))?;
        Ok(())
    })
}

fn serve(mut acceptor: Acceptor) -> Result<(), ListenError> {
    while let Some(mut connection) = acceptor.next(None)? {
        let mut request = [0; 1024];
        if matches!(connection.read(&mut request), Ok(1..)) && connection.write_all(b"answer\n").is_ok() {
            connection.response_sent();
            if !connection.should_close() {
                acceptor.keep(connection)?;
            }
        }
    }
    Ok(())
}

/// Says that the workers have joined, and waits for SIGTERM; any other way to wait for a signal works too.
fn until_sigterm() -> io::Result<()> {
    let runtime = runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(async {
        let mut terminated = signal(SignalKind::terminate())?;
        println!("ready");
        terminated.recv().await;
        Ok(())
    })
}
