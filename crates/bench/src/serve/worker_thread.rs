//! The thread of a worker, from its setup to its end.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fourtuple::listen::{AcceptWaker, Acceptor, Dispatcher, DispatcherStats};
use fourtuple_syscalls::datagram::{Batch, Datagram};
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::{errno_name, option, schedule, socket};

use crate::serve::decoder::Decoder;
use crate::serve::policy_worker::{PolicyWorker, into_io};
use crate::serve::protocol::Protocol;
use crate::serve::running::{Counts, Stop};
use crate::serve::service::{StallTimes, Work};
use crate::serve::settings::{Close, ServeError};
use crate::serve::worker::{Listener, Worker};

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
const ROOM: usize = 64 * 1024;
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
        let mut batch = Batch::new(1, ROOM);
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
