//! The thread of a worker, from its setup to its end.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use fourtuple::listen::Acceptor;
use fourtuple_syscalls::{errno_name, schedule};

use crate::counts::Counts;
use crate::datagrams::Datagrams;
use crate::decoder::Decoder;
use crate::error::ServeError;
use crate::policy_worker::PolicyWorker;
use crate::protocol::Protocol;
use crate::settings::Close;
use crate::stop::Stop;
use crate::work::{StallTimes, Work};
use crate::worker::{Listener, Worker};

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
