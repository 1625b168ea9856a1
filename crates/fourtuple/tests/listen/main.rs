//! Every accept policy with real workers and clients, which this file has.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Deref;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fourtuple::listen::{
    AcceptPolicy, AcceptWaker, Acceptor, Connection, DispatcherStats, Endpoint, Family, ListenerGroup,
    ListenerGroupBuilder,
};

mod adopt;
mod drain;
mod errnos;
mod limits;
mod policies;
mod processes;

/// A timeout that only a failing test reaches.
const DEADLINE: Duration = Duration::from_secs(60);

/// A client's stream over TCP or a unix socket.
pub(crate) trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

pub(crate) fn connect(group: &ListenerGroup) -> Box<dyn Stream> {
    match group.endpoint() {
        Endpoint::Unix(path) => {
            let stream = UnixStream::connect(path).unwrap();
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            Box::new(stream)
        }
        Endpoint::Inet(address) => {
            let stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            stream.set_nodelay(true).unwrap();
            Box::new(stream)
        }
    }
}

/// Requests `work` microseconds of a worker's time. Returns the worker's seat and the number of requests that were answered on
/// this connection.
pub(crate) fn ask(stream: &mut dyn Stream, work: u32) -> (u32, u32) {
    try_ask(stream, work).expect("an answer")
}

pub(crate) fn try_ask(stream: &mut dyn Stream, work: u32) -> std::io::Result<(u32, u32)> {
    stream.write_all(&work.to_ne_bytes())?;
    let mut answer = [0; 8];
    stream.read_exact(&mut answer)?;
    let (seat, served) = answer.split_at(4);
    Ok((u32::from_ne_bytes(seat.try_into().unwrap()), u32::from_ne_bytes(served.try_into().unwrap())))
}

/// A request that lasts until the test ends it. A client requests it with the gate's number as work.
#[derive(Default)]
pub(crate) struct Gate(Mutex<(bool, bool)>, Condvar);

/// Values of `work` from here on are numbers of gates.
const GATES: u32 = u32::MAX - 7;

static ALL: LazyLock<[Gate; 8]> = LazyLock::new(Default::default);

fn gate(work: u32) -> Option<&'static Gate> {
    ALL.get(work.checked_sub(GATES)? as usize)
}

/// Returns a gate that no other test uses, and the work that waits for it.
pub(crate) fn closed_gate() -> (&'static Gate, u32) {
    static NEXT: AtomicU32 = AtomicU32::new(GATES);
    let work = NEXT.fetch_add(1, Ordering::Relaxed);
    (gate(work).expect("a gate for every test that has one"), work)
}

impl Gate {
    /// Waits in the worker until the gate is open.
    fn pass(&self) {
        let mut state = self.0.lock().unwrap();
        state.0 = true;
        self.1.notify_all();
        while !state.1 {
            state = self.1.wait(state).unwrap();
        }
    }

    /// Waits until the worker has reached the gate.
    pub(crate) fn wait(&self) {
        let mut state = self.0.lock().unwrap();
        while !state.0 {
            state = self.1.wait(state).unwrap();
        }
    }

    pub(crate) fn open(&self) {
        self.0.lock().unwrap().1 = true;
        self.1.notify_all();
    }
}

/// Returns an endpoint that no other test uses.
pub(crate) fn endpoint(family: Family) -> Endpoint {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    match family {
        Family::Unix => {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let name = format!("fourtuple-listen-{}-{number}.sock", std::process::id());
            Endpoint::Unix([std::env::temp_dir(), PathBuf::from(name)].iter().collect())
        }
        Family::Tcp4 => Endpoint::Inet("127.0.0.1:0".parse().unwrap()),
        Family::Tcp6 => Endpoint::Inet("[::1]:0".parse().unwrap()),
    }
}

/// Returns the settings of a group with an endpoint of its own.
pub(crate) fn builder(policy: AcceptPolicy, family: Family) -> ListenerGroupBuilder {
    ListenerGroupBuilder::at(endpoint(family)).policy(policy)
}

/// A group, and the thread of its dispatcher if the policy has one.
pub(crate) struct Opened {
    group: ListenerGroup,
    dispatching: Option<Dispatching>,
}

impl Deref for Opened {
    type Target = ListenerGroup;

    fn deref(&self) -> &ListenerGroup {
        &self.group
    }
}

pub(crate) fn open(policy: AcceptPolicy, family: Family) -> Opened {
    Opened::from(builder(policy, family).max_workers(16).open().unwrap())
}

impl From<ListenerGroup> for Opened {
    fn from(group: ListenerGroup) -> Opened {
        let dispatching = (group.policy() == AcceptPolicy::Dispatcher).then(|| Dispatching::start(&group));
        Opened { group, dispatching }
    }
}

impl Opened {
    /// Stops the dispatcher and returns its counters.
    pub(crate) fn end_dispatcher(&mut self) -> DispatcherStats {
        self.dispatching.take().unwrap().end()
    }

    pub(crate) fn start_dispatcher(&mut self) {
        self.dispatching = Some(Dispatching::start(&self.group));
    }
}

/// The thread of a dispatcher.
struct Dispatching {
    thread: Option<JoinHandle<DispatcherStats>>,
    stop: Arc<AtomicBool>,
    waker: AcceptWaker,
}

impl Dispatching {
    fn start(group: &ListenerGroup) -> Dispatching {
        let mut dispatcher = group.dispatcher().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let waker = dispatcher.waker();
        let stop_flag = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            dispatcher.run(&stop_flag).unwrap();
            dispatcher.stats()
        });
        Dispatching { thread: Some(thread), stop, waker }
    }

    fn end(mut self) -> DispatcherStats {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Dispatching {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
    }
}

/// The thread of a worker.
pub(crate) struct Worker {
    thread: JoinHandle<()>,
    stop: Arc<AtomicBool>,
    waker: AcceptWaker,
}

impl Worker {
    /// Joins in the calling thread, so that seats are in order.
    pub(crate) fn start(group: &ListenerGroup) -> Worker {
        let mut acceptor = group.join().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let waker = acceptor.waker();
        let stop_flag = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !stop_flag.load(Ordering::Acquire) {
                if let Some(connection) = acceptor.next(None).unwrap() {
                    serve(&mut acceptor, connection);
                }
            }
            let report = acceptor.leave().unwrap();
            assert!(report.kept.is_empty(), "{} connections were not handed over", report.kept.len());
        });
        Worker { thread, stop, waker }
    }

    pub(crate) fn start_many(group: &ListenerGroup, count: usize) -> Vec<Worker> {
        (0..count).map(|_| Worker::start(group)).collect()
    }

    pub(crate) fn stop(self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
        self.thread.join().unwrap();
    }
}

pub(crate) fn serve(acceptor: &mut Acceptor, mut connection: Connection) {
    let mut buffer = [0; 64];
    match connection.read(&mut buffer) {
        Ok(0) => return,
        Ok(count) => connection.carry.extend_from_slice(&buffer[..count]),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
        Err(_) => return,
    }
    while connection.carry.len() >= 4 {
        let request: Vec<u8> = connection.carry.drain(..4).collect();
        let work = u32::from_ne_bytes(request.try_into().unwrap());
        match gate(work) {
            Some(gate) => gate.pass(),
            None => thread::sleep(Duration::from_micros(work.into())),
        }
        connection.response_sent();
        let mut answer = (acceptor.seat() as u32).to_ne_bytes().to_vec();
        answer.extend(connection.served().to_ne_bytes());
        if connection.write_all(&answer).is_err() || connection.should_close() {
            return;
        }
    }
    acceptor.keep(connection).unwrap();
}
