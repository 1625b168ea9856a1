//! What a worker is given before it begins, and its thread from the first moment to the last.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use fourtuple::listen::Acceptor;
use fourtuple_syscalls::{errno_name, schedule};

use crate::counts::Counts;
use crate::datagrams::Datagrams;
use crate::error::ServeError;
use crate::pooled::Pooled;
use crate::serve::{Close, Protocol};
use crate::stop::Stop;
use crate::talk::Talk;
use crate::work::Work;
use crate::worker::{Listener, Worker};

/// Begin and end of the stall, if there is one.
pub(crate) type StallTimes = Option<(Instant, Instant)>;

/// Where a worker's connections come from.
pub(crate) enum Source {
    Socket {
        socket: Arc<OwnedFd>,
        /// Others accept from this socket too.
        shared: bool,
    },
    Pool(Acceptor),
}

/// What a worker is given.
pub(crate) struct Seat {
    pub(crate) number: usize,
    /// The processor that it is to stay on.
    pub(crate) cpu: Option<usize>,
    pub(crate) source: Source,
    /// A connection that is accepted has something to read already.
    pub(crate) deferred: bool,
    pub(crate) protocol: Protocol,
    /// `None` of datagrams.
    pub(crate) talk: Option<Arc<Talk>>,
    pub(crate) close: Close,
    pub(crate) work: Work,
    pub(crate) stop: Stop,
    pub(crate) counts: Arc<Counts>,
}

impl Seat {
    /// The life of a worker's thread: says whether it is ready, waits until all are, and serves.
    pub(crate) fn take(mut self, ready: &Sender<Result<(), ServeError>>, go: &Receiver<StallTimes>) {
        if ready.send(self.set_up()).is_err() {
            return;
        }
        // Nobody opens the gate where another worker could not be set up.
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
        let Seat { source, deferred, protocol, talk, close, work, stop, counts, .. } = self;
        match (source, talk, protocol) {
            (Source::Pool(acceptor), Some(talk), _) => {
                Pooled::new(acceptor, talk, close, work, stop, counts).run()
            }
            (Source::Socket { socket, shared }, Some(talk), _) => {
                let listener = Listener { socket, shared, deferred };
                Worker::new(listener, talk, close, work, stop, counts)?.run()
            }
            (Source::Socket { socket, .. }, None, Protocol::Udp { request }) => {
                Datagrams::new(&socket, request, work, stop, counts)?.run()
            }
            (_, None, _) => unreachable!("every protocol but udp is spoken on streams"),
        }
    }
}
