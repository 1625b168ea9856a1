//! Worker processes that share a listener: each answers lines with its seat. The supervisor replaces a worker that dies, and all
//! workers one by one on request. With the policy `dispatcher` one more process runs the dispatcher.
//!
//! `cargo run -p fourtuple --example prefork -- [POLICY] [ADDRESS] [WORKERS]`, as in `-- rotate 127.0.0.1:8000 4`; then on
//! standard input the commands `kill N`, `kill dispatcher`, `reload`, `stats`, `leaks` or `hand-over`.
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
use std::time::Duration;

use fourtuple::listen::{
    AcceptPolicy, AcceptWaker, Acceptor, Connection, ListenError, ListenerGroup, ListenerGroupBuilder,
    WorkerProcess, Workers,
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
        ListenerGroupBuilder::at(address).policy(policy).workers(Workers::Processes).max_workers(count + 1);
    let group = listen.open()?;
    let has_dispatcher = group.policy() == AcceptPolicy::Dispatcher;
    let mut dispatcher = has_dispatcher.then(|| Child::start(&group, dispatch)).transpose()?;
    let start = || Child::start(&group, work);
    let mut workers = (0..count).map(|_| start()).collect::<Result<Vec<_>, _>>()?;
    println!("listening on {} with {}", group.endpoint(), group.choice());
    for line in io::stdin().lock().lines() {
        match line?.split_whitespace().collect::<Vec<_>>().as_slice() {
            ["kill", "dispatcher"] => {
                let dead = dispatcher.take().ok_or("no dispatcher")?;
                dead.process.kill()?;
                println!("killed the dispatcher, {}", dead.process.wait()?);
                group.dispatcher_died();
                dispatcher = Some(Child::start(&group, dispatch)?);
            }
            ["kill", number] => {
                let number = number.parse::<usize>()?;
                let place = workers.get_mut(number).ok_or("no such worker")?;
                let dead = std::mem::replace(place, start()?);
                dead.process.kill()?;
                println!("killed {}, {}", dead.seat, dead.process.wait()?);
                group.worker_died(dead.seat);
            }
            ["reload"] => {
                for place in &mut workers {
                    let old = std::mem::replace(place, start()?);
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
            ["hand-over"] => {
                // Each process wakes its own threads.
                for child in workers.iter_mut().chain(&mut dispatcher) {
                    child.ours.write_all(RETIRE)?;
                }
                let report = group.hand_over(DEADLINE)?;
                let when = if report.elapsed < DEADLINE { "before" } else { "at" };
                println!("handed over {when} the deadline, {} open", report.open);
            }
            _ => println!("kill N, kill dispatcher, reload, stats, leaks or hand-over"),
        }
    }
    workers.into_iter().chain(dispatcher).try_for_each(Child::leave)?;
    Ok(())
}

/// The time that requests in progress get when the group hands over.
const DEADLINE: Duration = Duration::from_secs(60);

/// The work of a child process.
type Work = fn(&ListenerGroup, &mut UnixStream) -> Result<(), Box<dyn Error>>;

/// The process of a worker or of the dispatcher, and the stream that tells it to leave.
struct Child {
    process: WorkerProcess,
    seat: usize,
    ours: UnixStream,
}

impl Child {
    fn start(group: &ListenerGroup, work: Work) -> Result<Child, Box<dyn Error>> {
        let (mut ours, mut theirs) = UnixStream::pair()?;
        let process = group.fork(|group| match work(group, &mut theirs) {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("{error}");
                1
            }
        })?;
        drop(theirs);
        // A worker sends its seat when it has joined.
        let mut seat = [0];
        ours.read_exact(&mut seat)?;
        Ok(Child { process, seat: seat[0].into(), ours })
    }

    fn leave(mut self) -> Result<(), Box<dyn Error>> {
        // A group that has handed over has ended its dispatcher and its workers.
        let _ = self.ours.write_all(LEAVE);
        self.process.wait()?;
        Ok(())
    }
}

/// Runs in the process of the dispatcher.
fn dispatch(group: &ListenerGroup, theirs: &mut UnixStream) -> Result<(), Box<dyn Error>> {
    let mut dispatcher = group.dispatcher()?;
    theirs.write_all(&[0])?;
    let must_leave = orders(group, theirs, dispatcher.waker())?;
    Ok(dispatcher.run(&must_leave)?)
}

/// The orders of the supervisor.
const RETIRE: &[u8; 1] = b"r";
const LEAVE: &[u8; 1] = b"x";

/// Executes the orders of the supervisor. Returns a flag that is set by [`LEAVE`] and by the end of the supervisor.
fn orders(
    group: &ListenerGroup,
    theirs: &UnixStream,
    waker: AcceptWaker,
) -> Result<Arc<AtomicBool>, Box<dyn Error>> {
    let must_leave = Arc::new(AtomicBool::new(false));
    let (tell, group, mut parent) = (Arc::clone(&must_leave), group.clone(), theirs.try_clone()?);
    thread::spawn(move || {
        let mut order = [0];
        while parent.read_exact(&mut order).is_ok() && order == *RETIRE {
            if let Err(error) = group.hand_over(DEADLINE) {
                eprintln!("{error}");
            }
        }
        tell.store(true, Ordering::Release);
        waker.wake();
    });
    Ok(must_leave)
}

/// Runs in a worker process.
fn work(group: &ListenerGroup, theirs: &mut UnixStream) -> Result<(), Box<dyn Error>> {
    let mut acceptor = group.join()?;
    theirs.write_all(&[u8::try_from(acceptor.seat())?])?;
    let must_leave = orders(group, theirs, acceptor.waker())?;
    while !must_leave.load(Ordering::Acquire) && !group.is_drained() {
        if let Some(connection) = acceptor.next(None)? {
            answer(&mut acceptor, connection)?;
        }
    }
    acceptor.leave()?;
    Ok(())
}

/// Answers the complete lines, each with the seat of the worker and the number of the line.
fn answer(acceptor: &mut Acceptor, mut connection: Connection) -> Result<(), ListenError> {
    let mut buffer = [0; 4096];
    match connection.read(&mut buffer) {
        Ok(0) => return Ok(()),
        Ok(count) => connection.carry.extend_from_slice(&buffer[..count]),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(_) => return Ok(()),
    }
    while let Some(end) = connection.carry.iter().position(|byte| *byte == b'\n') {
        connection.carry.drain(..=end);
        connection.response_sent();
        let is_last = connection.should_close();
        let line = format!("{} {}\n", acceptor.seat(), connection.served());
        if connection.write_all(line.as_bytes()).is_err() || is_last {
            return Ok(());
        }
    }
    acceptor.keep(connection)
}
