//! Worker processes that share a listener: each answers lines with its seat. The supervisor replaces a worker that dies, and all
//! workers one by one on request.
//!
//! `cargo run -p fourtuple --example prefork -- [POLICY] [ADDRESS] [WORKERS]`, as in `-- rotate 127.0.0.1:8000 4`; then on
//! standard input the commands `kill N`, `reload`, `stats` or `leaks`.
#![forbid(unsafe_code)]

use std::env;
use std::error::Error;
use std::io::{self, BufRead, Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use fourtuple::listen::{
    AcceptPolicy, Acceptor, Connection, ListenError, ListenerGroup, ListenerGroupBuilder, WorkerProcess,
    Workers,
};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let policy: AcceptPolicy = arguments.next().map_or(Ok(AcceptPolicy::Auto), |name| name.parse())?;
    let address: SocketAddr = arguments.next().unwrap_or_else(|| "127.0.0.1:0".to_owned()).parse()?;
    let count = arguments.next().map_or(Ok(4), |count| count.parse::<usize>())?;
    // One additional seat lets a new worker join before an old one leaves.
    let listen =
        ListenerGroupBuilder::at(address).policy(policy).workers(Workers::Processes).seats(count + 1);
    let group = listen.open()?;
    let mut workers = (0..count).map(|_| Worker::start(&group)).collect::<Result<Vec<_>, _>>()?;
    println!("listening on {} with {}", group.endpoint(), group.choice());
    for line in io::stdin().lock().lines() {
        match line?.split_whitespace().collect::<Vec<_>>().as_slice() {
            ["kill", number] => {
                let number = number.parse::<usize>()?;
                let place = workers.get_mut(number).ok_or("no such worker")?;
                let dead = std::mem::replace(place, Worker::start(&group)?);
                dead.process.kill()?;
                println!("killed {}, {}", dead.seat, dead.process.wait()?);
                group.vacate(dead.seat);
            }
            ["reload"] => {
                for place in &mut workers {
                    let old = std::mem::replace(place, Worker::start(&group)?);
                    old.leave()?;
                }
                println!("reloaded");
            }
            ["stats"] => {
                let requests = group.stats().iter().map(|seat| seat.requests.to_string()).collect::<Vec<_>>();
                println!("requests {}", requests.join(" "));
            }
            ["leaks"] => {
                let leaked = group.stats().iter().map(|seat| seat.leaked.to_string()).collect::<Vec<_>>();
                println!("leaked {}", leaked.join(" "));
            }
            _ => println!("kill N, reload, stats or leaks"),
        }
    }
    workers.into_iter().try_for_each(Worker::leave)?;
    Ok(())
}

/// A worker process, and the stream that tells it to leave.
struct Worker {
    process: WorkerProcess,
    seat: usize,
    ours: UnixStream,
}

impl Worker {
    fn start(group: &ListenerGroup) -> Result<Worker, Box<dyn Error>> {
        let (mut ours, mut theirs) = UnixStream::pair()?;
        let process = group.fork(|group| match work(group, &mut theirs) {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("{error}");
                1
            }
        })?;
        drop(theirs);
        // The worker sends its seat when it has joined.
        let mut seat = [0];
        ours.read_exact(&mut seat)?;
        Ok(Worker { process, seat: seat[0].into(), ours })
    }

    fn leave(mut self) -> Result<(), Box<dyn Error>> {
        self.ours.write_all(b"x")?;
        self.process.wait()?;
        Ok(())
    }
}

/// Runs in the worker process.
fn work(group: &ListenerGroup, theirs: &mut UnixStream) -> Result<(), Box<dyn Error>> {
    let mut acceptor = group.join()?;
    theirs.write_all(&[u8::try_from(acceptor.seat())?])?;
    let must_leave = Arc::new(AtomicBool::new(false));
    let (waker, tell, mut parent) = (acceptor.waker(), Arc::clone(&must_leave), theirs.try_clone()?);
    thread::spawn(move || {
        // Readable when the supervisor sends a byte or ends.
        let _ = parent.read(&mut [0]);
        tell.store(true, Ordering::Release);
        waker.wake();
    });
    while !must_leave.load(Ordering::Acquire) {
        if let Some(connection) = acceptor.next(None)? {
            answer(&mut acceptor, connection)?;
        }
    }
    acceptor.leave()?;
    Ok(())
}

/// Answers the complete lines, each with the seat of the worker and the number of the line.
fn answer(acceptor: &mut Acceptor, mut connection: Connection) -> Result<(), ListenError> {
    let mut room = [0; 4096];
    match connection.read(&mut room) {
        Ok(0) => return Ok(()),
        Ok(count) => connection.carry.extend_from_slice(&room[..count]),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(_) => return Ok(()),
    }
    while let Some(end) = connection.carry.iter().position(|byte| *byte == b'\n') {
        connection.carry.drain(..=end);
        connection.answered();
        let line = format!("{} {}\n", acceptor.seat(), connection.served());
        if connection.write_all(line.as_bytes()).is_err() {
            return Ok(());
        }
    }
    acceptor.keep(connection)
}
