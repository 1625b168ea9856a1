//! A running server.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fourtuple::listen::{
    AcceptPolicy, AcceptWaker, Acceptor, Dispatcher, DispatcherStats, ListenerGroup, SocketPath,
};
use fourtuple_record::measure::balance;
use fourtuple_record::measure::words::counted;
use fourtuple_record::{Remark, ServeResults, ServeWorker};
use fourtuple_syscalls::datagram::{Batch, Datagram};
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::{Endpoint, errno_name, option, schedule, socket};

use crate::serve::decoder::Decoder;
use crate::serve::policy_worker::{PolicyWorker, into_io};
use crate::serve::protocol::Protocol;
use crate::serve::service::{StallTimes, Work};
use crate::serve::worker::{Listener, Worker};
use crate::serve::{Close, ServeError, listener};

/// The worker threads and their resources. Dropping this value ends the threads.
pub(crate) struct WorkerThreads {
    pub(crate) protocol: Protocol,
    pub(crate) address: Endpoint,
    pub(crate) policy: AcceptPolicy,
    pub(crate) path: Option<SocketPath>,
    pub(crate) stop: Stop,
    pub(crate) workers: Vec<(JoinHandle<()>, Arc<Counts>)>,
    /// The group of the workers that wait with an accept policy.
    pub(crate) group: Option<ListenerGroup>,
    /// The thread of the policy `dispatcher`.
    pub(crate) dispatcher_thread: Option<DispatcherThread>,
    /// Requested length of each accept queue.
    pub(crate) backlog: u32,
}

impl Drop for WorkerThreads {
    fn drop(&mut self) {
        // The path is removed first, so that no client connects while the workers end.
        self.path.take();
        self.stop.set();
        // It wakes the workers; a worker of a drained group closes its connections and hands over none of them. After a failure the
        // workers see the stop flag half a second later.
        let _ = self.group.take().map(|group| group.drain(Duration::ZERO));
        for (thread, counts) in self.workers.drain(..) {
            if thread.join().is_err() {
                counts.error("worker-ended: panic");
            }
            // The counts of the first worker include the failures of the dispatcher, which accepts for all workers.
            for (name, count) in
                self.dispatcher_thread.as_mut().map(DispatcherThread::end).unwrap_or_default()
            {
                counts.errors(&name, count);
            }
        }
    }
}

/// A running server. Dropping it ends the server.
pub struct Running {
    started: WorkerThreads,
    begin: Instant,
}

impl Running {
    pub(crate) fn new(started: WorkerThreads, begin: Instant) -> Running {
        Running { started, begin }
    }

    /// Returns the address, with the actual port.
    pub fn address(&self) -> &Endpoint {
        &self.started.address
    }

    /// Returns the address in the syntax of `--listen`: `127.0.0.1:8080`, `unix:/run/x`.
    pub fn listen(&self) -> String {
        listener::shown(&self.started.address)
    }

    /// Returns the policy by which connections reach the workers.
    pub fn policy(&self) -> AcceptPolicy {
        self.started.policy
    }

    /// Returns the counts of each worker so far. The counts are not all read at the same moment.
    pub fn counts(&self) -> Vec<ServeWorker> {
        self.started.workers.iter().map(|(_, counts)| counts.now()).collect()
    }

    /// Returns whether a worker has ended before it was stopped. The results contain the reason.
    pub fn has_failed(&self) -> bool {
        let dispatcher_thread = self.started.dispatcher_thread.as_ref();
        dispatcher_thread.is_some_and(DispatcherThread::has_failed)
            || self.started.workers.iter().any(|(thread, _)| thread.is_finished())
    }

    /// Returns a remark if the kernel has limited the accept queues to net.core.somaxconn. It reads the value in the network
    /// namespace of the calling thread.
    pub fn backlog_remark(&self) -> Option<Remark> {
        if !self.started.protocol.has_connections() {
            return None;
        }
        let most = fs::read_to_string("/proc/sys/net/core/somaxconn").ok()?.trim().parse::<u32>().ok()?;
        let asked = self.started.backlog;
        (asked > most).then(|| {
            let message = format!(
                "accept queues hold {} instead of {asked}: raise net.core.somaxconn, or ask for --backlog {most}",
                counted(most.into(), "connection")
            );
            Remark::new("backlog-cut", message)
        })
    }

    /// Ends all workers, closes their connections, and returns the results.
    pub fn stop(mut self) -> ServeResults {
        let counts: Vec<Arc<Counts>> =
            self.started.workers.iter().map(|(_, counts)| Arc::clone(counts)).collect();
        let (protocol, policy, listen) = (self.started.protocol, self.started.policy, self.listen());
        self.started.stop.set();
        let elapsed = self.begin.elapsed();
        self.started.path.take();
        drop(self);
        let workers: Vec<ServeWorker> = counts.iter().map(|counts| counts.now()).collect();
        let requests: u64 = workers.iter().map(|worker| worker.requests).sum();
        let shares: Vec<u64> = workers
            .iter()
            .map(|worker| if protocol.has_responses() { worker.requests } else { worker.accepted })
            .collect();
        ServeResults {
            listen,
            protocol: protocol.name().to_owned(),
            policy: policy.to_string(),
            elapsed_ns: u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX),
            requests_per_s: requests as f64 / elapsed.as_secs_f64().max(1e-9),
            jain: balance::jain(&shares),
            max_over_mean: balance::max_over_mean(&shares),
            workers,
        }
    }
}

/// A counter that one thread writes and others read, without atomic read-modify-write instructions.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    /// Adds to the counter. Only the worker that owns the counter may call this.
    pub(crate) fn add(&self, more: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counts of one worker, on separate cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Counts {
    pub(crate) accepted: Count,
    pub(crate) requests: Count,
    pub(crate) received_bytes: Count,
    pub(crate) sent_bytes: Count,
    errors: Mutex<BTreeMap<String, u64>>,
}

impl Counts {
    /// Counts a failure by name. Failures are rare, so a lock is acceptable.
    pub(crate) fn error(&self, name: &str) {
        self.errors(name, 1);
    }

    /// Counts several failures of one name.
    pub(crate) fn errors(&self, name: &str, more: u64) {
        if more == 0 {
            return;
        }
        let mut errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        match errors.get_mut(name) {
            Some(count) => *count += more,
            None => drop(errors.insert(name.to_owned(), more)),
        }
    }

    /// Returns the current counts.
    pub(crate) fn now(&self) -> ServeWorker {
        ServeWorker {
            accepted: self.accepted.get(),
            requests: self.requests.get(),
            received_bytes: self.received_bytes.get(),
            sent_bytes: self.sent_bytes.get(),
            errors: self.errors.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

/// A flag for busy workers, and a descriptor that becomes readable for workers in epoll_wait().
#[derive(Clone, Debug)]
pub(crate) struct Stop(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    set: AtomicBool,
    ours: UnixStream,
    theirs: UnixStream,
}

impl Stop {
    pub(crate) fn new() -> io::Result<Stop> {
        let (ours, theirs) = UnixStream::pair()?;
        Ok(Stop(Arc::new(Inner { set: AtomicBool::new(false), ours, theirs })))
    }

    /// Sets the flag and wakes all workers.
    pub(crate) fn set(&self) {
        self.0.set.store(true, Ordering::Release);
        // The end of the stream makes the descriptor readable in each epoll, and it stays readable.
        let _ = self.0.ours.shutdown(Shutdown::Both);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.set.load(Ordering::Acquire)
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.theirs.as_fd()
    }
}

/// The source of the connections of a worker.
pub(crate) enum Source {
    Socket {
        socket: Arc<OwnedFd>,
        /// Other workers accept from this socket too.
        shared: bool,
    },
    Pool(Acceptor),
}

/// The settings and resources of a worker.
pub(crate) struct WorkerThread {
    pub(crate) number: usize,
    /// The CPU to which the thread is pinned.
    pub(crate) cpu: Option<usize>,
    pub(crate) source: Source,
    /// An accepted connection already has bytes to read (TCP_DEFER_ACCEPT).
    pub(crate) deferred: bool,
    pub(crate) protocol: Protocol,
    /// `None` for UDP.
    pub(crate) decoder: Option<Arc<dyn Decoder>>,
    pub(crate) close: Close,
    /// A connection without traffic for this long is closed.
    pub(crate) idle: Duration,
    pub(crate) work: Work,
    pub(crate) stop: Stop,
    pub(crate) counts: Arc<Counts>,
}

impl WorkerThread {
    /// Sets up the thread, reports the outcome to `ready`, waits for `go`, and serves.
    pub(crate) fn run(mut self, ready: &Sender<Result<(), ServeError>>, go: &Receiver<StallTimes>) {
        if ready.send(self.set_up()).is_err() {
            return;
        }
        // The channel closes without a message if the setup of another worker failed.
        let Ok(stall) = go.recv() else { return };
        self.work.set_stall(stall);
        let counts = Arc::clone(&self.counts);
        if let Err(error) = self.serve() {
            counts.error(&format!("worker-ended: {}", errno_name(&error)));
        }
    }

    fn set_up(&self) -> Result<(), ServeError> {
        let failed = |call| move |source| ServeError::Worker { worker: self.number, call, source };
        if let Some(cpu) = self.cpu {
            schedule::pin_to(cpu).map_err(failed("sched_setaffinity()"))?;
        }
        if self.work.sleeps() {
            schedule::sleep_precisely().map_err(failed("prctl(PR_SET_TIMERSLACK)"))?;
        }
        Ok(())
    }

    fn serve(self) -> io::Result<()> {
        let WorkerThread { source, deferred, protocol, decoder, close, idle, work, stop, counts, .. } = self;
        match (source, decoder, protocol) {
            (Source::Pool(acceptor), Some(decoder), _) => {
                PolicyWorker::new(acceptor, decoder, close, work, stop, counts).run()
            }
            (Source::Socket { socket, shared }, Some(decoder), _) => {
                let listener = Listener { socket, shared, deferred };
                Worker::new(listener, decoder, close, idle, work, stop, counts)?.run()
            }
            (Source::Socket { socket, .. }, None, Protocol::Udp { request }) => {
                Datagrams::new(&socket, request, work, stop, counts)?.run()
            }
            (_, None, _) => unreachable!("every protocol but udp is spoken on streams"),
        }
    }
}

// A worker for UDP: it sends each datagram back with a TTL that is one lower than the received TTL.
//
// Two echo servers could answer each other endlessly after one datagram with a forged source address. The TTL of a datagram
// therefore decreases with each reply, and a datagram whose TTL would become 0 is dropped. Datagrams from ports below 1024,
// where other echo services are, and from the own address of the server get no reply.

const SOCKET: u64 = 0;
const STOP: u64 = 1;

/// The pause after a failed receive call.
const BACK_OFF: Duration = Duration::from_millis(10);

/// Maximum length of a datagram.
const BUFFER: usize = 64 * 1024;
/// Lowest port of a client that gets a reply.
const FIRST_CLIENT_PORT: u16 = 1024;

pub(crate) struct Datagrams {
    epoll: Epoll,
    replies: Replies,
    stop: Stop,
}

/// The state needed to reply.
struct Replies {
    socket: OwnedFd,
    own: SocketAddr,
    request: usize,
    work: Work,
    counts: Arc<Counts>,
    /// The TTL set on the socket; `None` before the first reply.
    hops: Option<u8>,
}

impl Datagrams {
    pub(crate) fn new(
        socket: &OwnedFd,
        request: usize,
        work: Work,
        stop: Stop,
        counts: Arc<Counts>,
    ) -> io::Result<Datagrams> {
        let epoll = Epoll::new()?;
        let socket = socket.try_clone()?;
        option::set_receive_hops(socket.as_fd(), true)?;
        let own = socket::local_address(socket.as_fd())?;
        epoll.add(socket.as_fd(), SOCKET, Interest::READ)?;
        epoll.add(stop.as_fd(), STOP, Interest::READ)?;
        Ok(Datagrams { epoll, replies: Replies { socket, own, request, work, counts, hops: None }, stop })
    }

    /// Serves until the stop flag is set.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = [Ready::NONE; 2];
        let mut batch = Batch::new(1, BUFFER);
        while !self.stop.is_set() {
            self.epoll.wait(&mut events, None)?;
            // Both events are handled the same way: the loop checks the stop flag and receives until EAGAIN.
            while !self.stop.is_set() {
                self.replies.work.stall();
                match batch.receive(self.replies.socket.as_fd()) {
                    Ok(_) => batch.iter().for_each(|datagram| self.replies.answer(datagram)),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => {
                        self.replies.counts.error(&errno_name(&error).to_string());
                        // The failure may repeat at once.
                        thread::sleep(BACK_OFF);
                    }
                }
            }
        }
        Ok(())
    }
}

impl Replies {
    fn answer(&mut self, datagram: Datagram<'_>) {
        self.counts.received_bytes.add(datagram.bytes.len() as u64);
        if datagram.bytes.len() < self.request {
            self.counts.error("short-datagram");
            return;
        }
        let Some(client) = datagram.from() else { return };
        let hops = datagram.hops.unwrap_or(u8::MAX).saturating_sub(1);
        if hops == 0 || self.is_own(client) || client.port() < FIRST_CLIENT_PORT {
            self.counts.error("reflected-datagram");
            return;
        }
        self.counts.requests.add(1);
        self.work.serve();
        match self.send(datagram.bytes, client, hops) {
            Ok(count) => self.counts.sent_bytes.add(count as u64),
            Err(error) => self.counts.error(&errno_name(&error).to_string()),
        }
    }

    /// Returns whether a client is the server itself. A server at the unspecified address has each address of the host.
    fn is_own(&self, client: SocketAddr) -> bool {
        let own = self.own;
        client.port() == own.port() && (own.ip().is_unspecified() || client.ip() == own.ip())
    }

    fn send(&mut self, bytes: &[u8], client: SocketAddr, hops: u8) -> io::Result<usize> {
        if self.hops.replace(hops) != Some(hops) {
            option::set_hops(self.socket.as_fd(), hops)?;
        }
        socket::send_to(self.socket.as_fd(), bytes, client)
    }
}

/// The dispatcher thread. Dropping this value ends the thread.
pub(crate) struct DispatcherThread {
    thread: Option<JoinHandle<(io::Result<()>, DispatcherStats)>>,
    stop: Arc<AtomicBool>,
    waker: AcceptWaker,
}

impl DispatcherThread {
    pub(crate) fn start(mut dispatcher: Dispatcher) -> Result<DispatcherThread, ServeError> {
        let stop = Arc::new(AtomicBool::new(false));
        let (waker, flag) = (dispatcher.waker(), Arc::clone(&stop));
        let thread = thread::Builder::new()
            .name("serve-dispatcher".to_owned())
            // After an error the thread ends, has_failed() reports it, and end() returns it.
            .spawn(move || (dispatcher.run(&flag).map_err(into_io), dispatcher.stats()))
            .map_err(|source| ServeError::Worker { worker: 0, call: "a new thread", source })?;
        Ok(DispatcherThread { thread: Some(thread), stop, waker })
    }

    /// Returns whether the thread has ended before it was stopped.
    pub(crate) fn has_failed(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl DispatcherThread {
    /// Ends the thread and returns its failures by name. A second call returns none.
    pub(crate) fn end(&mut self) -> Vec<(String, u64)> {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
        let Some(thread) = self.thread.take() else { return Vec::new() };
        let Ok((ended, stats)) = thread.join() else {
            return vec![("dispatcher-ended: panic".to_owned(), 1)];
        };
        let failure = ended.err().map(|error| format!("dispatcher-ended: {}", errno_name(&error)));
        let counts = [
            ("dispatcher accept: EMFILE", stats.out_of_process_descriptors),
            ("dispatcher accept: ENFILE", stats.out_of_host_descriptors),
            ("dispatcher accept: ENOMEM", stats.out_of_memory),
            ("dispatcher accept: other", stats.other_failed_accepts),
            ("dispatcher epoll_ctl: ENOSPC", stats.unwatched),
            ("dispatcher lost: EMFILE", stats.lost),
            ("idle-closed", stats.idle_closed),
        ];
        let counts = counts.map(|(name, count)| (name.to_owned(), count));
        failure.map(|name| (name, 1)).into_iter().chain(counts).collect()
    }
}

impl Drop for DispatcherThread {
    fn drop(&mut self) {
        self.end();
    }
}
