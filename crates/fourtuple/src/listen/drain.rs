//! The drain of a group: it ends a server without resetting a connection.
//!
//! close(2) of a TCP listener resets the connections in its accept queue and answers the last ACK of a handshake with RST. So a
//! drain attaches a socket filter to the listener that drops SYNs and nothing else. A new client retransmits its SYN after a
//! second and then reaches the next server, or gets ECONNREFUSED. Handshakes in progress complete, because their ACKs pass the
//! filter, and their connections are accepted and served.
//!
//! For a unix socket, a drain removes the path and finally shuts the listener down: connect(2) then fails, and accept(2) still
//! returns the queued connections.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_syscalls::socket::AcceptFailure;
use fourtuple_syscalls::{Errno, option, sock_diag, socket};

use crate::listen::ListenError;
use crate::listen::group::ListenerGroup;
use crate::listen::handoff::{self, HandoffConnection};
use crate::listen::policy::Family;
use crate::listen::seats::Phase;
#[cfg(feature = "tokio")]
use crate::on_blocking_thread;

/// The interval at which a drain counts the remaining connections.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// The consecutive counts that must find no connection. A single count can miss a connection that moves between two counters.
const EMPTY_COUNTS: u32 = 4;
/// The time for which a message waits at most for a worker that has no connection.
const STALE: Duration = Duration::from_secs(1);
/// The time that handshakes get if the kernel cannot list them: a client has then retransmitted a lost segment.
const GRACE: Duration = Duration::from_secs(1);

/// The outcome of a drain.
///
/// Example: [`ListenerGroup::drain`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DrainReport {
    /// Connections that were accepted during the drain.
    pub accepted: u64,
    /// Requests that were answered during the drain.
    pub answered: u64,
    /// Connections that are still open; they are closed when their workers and the group are dropped. With the policy `Dispatcher` one that was
    /// on its way between a worker and the dispatcher at the deadline counts twice.
    pub open: u64,
    /// Connections in an accept queue, which are reset when the group is closed. For a unix socket: 1 if there is at least one.
    pub queued: u64,
    /// TCP handshakes in progress, whose connections will be reset. `None` if this kernel cannot list them (no tcp_diag).
    pub handshakes: Option<usize>,
    /// Whether the kernel went on to queue new TCP connections, which were served too. A client that connects at the very end is reset.
    /// Kernels since June 2026 refuse the filter that drops SYNs to a process without CAP_NET_ADMIN (EPERM; upstream commit 5d39580f68e6).
    pub still_queued: bool,
    /// The duration of the drain.
    pub elapsed: Duration,
}

impl DrainReport {
    /// Returns whether every connection was served to its end.
    pub fn is_complete(&self) -> bool {
        self.open == 0 && self.queued == 0 && self.handshakes.unwrap_or(0) == 0
    }
}

/// The connections that remain to be served.
struct Remaining {
    open: u64,
    queued: u64,
    handshakes: Option<usize>,
}

impl Remaining {
    fn is_empty(&self, elapsed: Duration) -> bool {
        self.open == 0
            && self.queued == 0
            && self.handshakes.map_or_else(|| elapsed >= GRACE, |handshakes| handshakes == 0)
    }
}

impl ListenerGroup {
    /// Drains the group: the kernel queues no new connection, and workers accept and serve connections that are queued or
    /// in a handshake. Each response is the last of its connection: [`should_close`](crate::listen::Connection::should_close) returns true, and the
    /// server must announce it, in HTTP with `Connection: close`.
    ///
    /// Returns when all connections are closed, or after `deadline`. From then on, [`next`](crate::listen::Acceptor::next)
    /// returns `None`. An idle connection stays open until the deadline, because its client may be about to send a request: one
    /// idle client makes the drain take the whole time, so set the deadline below the time after which a supervisor kills the process.
    ///
    /// Workers and dispatcher must continue meanwhile, so call this from another thread, such as one that waits for SIGTERM. In a
    /// group of processes each process calls it; the process that opened the group calls it first.
    ///
    /// # Errors
    ///
    /// An unexpected failure of a system call. The drain can be repeated.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::thread;
    /// use std::time::Duration;
    /// use fourtuple::listen::{ListenError, ListenerGroupBuilder};
    ///
    /// let group = ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).open()?;
    /// let mut acceptor = group.join()?;
    /// let worker = thread::spawn(move || {
    ///     while let Some(connection) = acceptor.next(None)? {
    ///         drop(connection); // serve it
    ///     }
    ///     Ok::<(), ListenError>(())
    /// });
    /// let report = group.drain(Duration::from_secs(10))?; // after SIGTERM
    /// assert!(report.is_complete() && group.is_drained(), "{report:?}");
    /// worker.join().expect("no worker panics")?;
    /// # Ok::<(), ListenError>(())
    /// ```
    pub fn drain(&self, deadline: Duration) -> Result<DrainReport, ListenError> {
        let begun = Instant::now();
        let before = self.sums();
        let seats = &self.0.seats;
        seats.set_phase(Phase::Draining);
        // Dropping the path of a unix socket removes it, in the process that opened the group.
        drop(self.0.path.lock().unwrap_or_else(PoisonError::into_inner).take());
        for listener in self.known_listeners() {
            self.stop_queueing(&listener)?;
        }
        let _unattended = self.stop_unattended()?;
        let (mut empty_counts, mut shut) = (0, self.is_drained());
        let mut since = (0, begun);
        let remaining = loop {
            let remaining = self.remaining(shut, &mut since)?;
            empty_counts = if remaining.is_empty(begun.elapsed()) { empty_counts + 1 } else { 0 };
            if begun.elapsed() >= deadline {
                break remaining;
            }
            if empty_counts >= EMPTY_COUNTS {
                shut = true;
                if self.shut_down()? == 0 {
                    break remaining;
                }
            }
            thread::sleep(CHECK_INTERVAL);
        };
        let report = self.end(begun, before, remaining);
        Ok(DrainReport { still_queued: self.0.is_filter_refused.load(Ordering::Relaxed), ..report })
    }

    /// Ends the group while another process accepts from the same listeners ([`listeners`](ListenerGroup::listeners)): workers stop
    /// accepting and serve the connections that they have. Each response is the last of its connection
    /// ([`should_close`](crate::listen::Connection::should_close)).
    ///
    /// Returns when every worker and the dispatcher have stopped accepting and all connections are closed, or after `deadline`. From
    /// then on, [`next`](crate::listen::Acceptor::next) returns `None`. A worker stops accepting in its next call of `next`, so
    /// workers must continue meanwhile: call this from another thread, and in each process of the group. The queued connections are
    /// left to the other process, except one for each listener of a worker, because the kernel may have woken only this worker for it:
    /// `queued` and `handshakes` of the report are 0.
    ///
    /// # Errors
    ///
    /// An unexpected failure of a system call.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use fourtuple::listen::ListenerGroupBuilder;
    ///
    /// let old = ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).open()?;
    /// let listeners = old.listeners()?; // sent to the new process, for example with SCM_RIGHTS of unix(7)
    ///
    /// let new = ListenerGroupBuilder::from_listeners(listeners)?.open()?; // in the new process
    /// assert_eq!(new.endpoint(), old.endpoint());
    ///
    /// let report = old.hand_over(Duration::from_secs(10))?; // in the old process, when the new process accepts
    /// assert!(report.is_complete() && old.is_drained() && !new.is_drained());
    /// # Ok::<(), fourtuple::listen::ListenError>(())
    /// ```
    pub fn hand_over(&self, deadline: Duration) -> Result<DrainReport, ListenError> {
        let begun = Instant::now();
        let (before, seats) = (self.sums(), &self.0.seats);
        seats.hand_over();
        // The path of a unix socket belongs to the other process now.
        if let Some(path) = self.0.path.lock().unwrap_or_else(PoisonError::into_inner).take() {
            path.leave();
        }
        self.wake_all();
        let (mut empty_counts, mut since) = (0, (0, begun));
        let open = loop {
            // Asked first: the last connections of a worker that has stopped are counted.
            let have_all_handed_over = seats.have_all_handed_over();
            let open = self.open_connections(&mut since);
            empty_counts = if have_all_handed_over && open == 0 { empty_counts + 1 } else { 0 };
            if begun.elapsed() >= deadline || empty_counts >= EMPTY_COUNTS {
                break open;
            }
            thread::sleep(CHECK_INTERVAL);
        };
        Ok(self.end(begun, before, Remaining { open, queued: 0, handshakes: Some(0) }))
    }

    /// Ends the group. `before`: the sums when the drain began.
    fn end(&self, begun: Instant, before: (u64, u64), remaining: Remaining) -> DrainReport {
        self.0.seats.set_phase(Phase::Drained);
        self.wake_all();
        let after = self.sums();
        let Remaining { open, queued, handshakes } = remaining;
        DrainReport {
            accepted: after.0 - before.0,
            answered: after.1 - before.1,
            open,
            queued,
            handshakes,
            still_queued: false,
            elapsed: begun.elapsed(),
        }
    }

    /// Wakes the acceptors and dispatchers of this process.
    fn wake_all(&self) {
        for waker in self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            if let Some(waker) = waker.upgrade() {
                waker.signal();
            }
        }
    }

    /// Counts the connections of workers, and those between two workers. `since`: the previous number, and when it was first seen. Where no
    /// worker has a connection, one that stays in transit is none: a dispatcher was killed before it had counted it.
    fn open_connections(&self, since: &mut (u64, Instant)) -> u64 {
        let of_workers = self.stats().iter().fold(0_u64, |open, seat| open.wrapping_add(seat.open));
        let open = of_workers.wrapping_add(self.0.seats.in_transit());
        if open != since.0 {
            *since = (open, Instant::now());
        }
        let is_none = of_workers == 0 && self.0.seats.are_uncertain() && since.1.elapsed() >= STALE;
        if is_none { 0 } else { open }
    }

    /// Returns whether a drain of the group has ended: acceptors return no further connection.
    pub fn is_drained(&self) -> bool {
        self.0.seats.phase() == Phase::Drained
    }

    /// Returns the accepted connections and the answered requests of all seats.
    fn sums(&self) -> (u64, u64) {
        self.stats()
            .iter()
            .fold((0, 0), |(accepts, requests), seat| (accepts + seat.accepts, requests + seat.requests))
    }

    pub(crate) fn known_listeners(&self) -> Vec<Arc<OwnedFd>> {
        let listeners = self.0.known_listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.iter().filter_map(std::sync::Weak::upgrade).collect()
    }

    /// Counts the remaining connections. `shut`: the unix listeners were shut down and their queues emptied.
    fn remaining(&self, shut: bool, since: &mut (u64, Instant)) -> Result<Remaining, ListenError> {
        // Handshakes are counted first: one that completes meanwhile is then counted in the accept queue or as open.
        let handshakes = match self.endpoint().inet() {
            None => Some(0),
            Some(address) => sock_diag::handshakes(address).ok(),
        };
        let (mut queued, mut seen) = (0, Vec::new());
        for listener in self.known_listeners() {
            // A listener that was handed over has two descriptors in this process.
            let cookie = option::cookie(listener.as_fd()).map_err(self.failed("getsockopt(SO_COOKIE)"))?;
            if seen.contains(&cookie) {
                continue;
            }
            seen.push(cookie);
            queued += match self.family() {
                Family::Unix if shut => 0,
                Family::Unix => {
                    let readable = socket::wait_readable(listener.as_fd(), Some(Duration::ZERO));
                    u64::from(readable.map_err(self.failed("poll()"))?)
                }
                Family::Tcp4 | Family::Tcp6 => option::accept_queue(listener.as_fd())
                    .map_err(self.failed("getsockopt(TCP_INFO)"))?
                    .into(),
            };
        }
        Ok(Remaining { open: self.open_connections(since), queued, handshakes })
    }

    /// Stops the listeners without an owner and puts them back for the next worker that joins. Returns them, so that their
    /// accept queues are counted.
    fn stop_unattended(&self) -> Result<Vec<Arc<OwnedFd>>, ListenError> {
        let mut found = Vec::new();
        while let Some(listener) = self.0.handoff.take_listener().map_err(self.failed("recvmsg()"))? {
            found.push(Arc::new(listener));
        }
        let until = handoff::deadline();
        for listener in &found {
            self.register_listener(listener)?;
            self.0.handoff.offer_listener(listener.as_fd(), until).map_err(self.failed("sendmsg()"))?;
        }
        Ok(found)
    }

    /// Shuts the unix listeners down, puts their queued connections into the handoff queue and returns the number of these. A
    /// connect(2) that found the path before its removal may have succeeded until now.
    fn shut_down(&self) -> Result<usize, ListenError> {
        if self.family() != Family::Unix {
            return Ok(0);
        }
        let mut found = 0;
        for listener in self.known_listeners() {
            socket::shutdown(listener.as_fd()).map_err(self.failed("shutdown()"))?;
            loop {
                match socket::accept_nonblocking(listener.as_fd()) {
                    Ok(socket) => {
                        let connection = HandoffConnection::new(socket, &self.0.seats);
                        self.0.handoff.offer(&connection).map_err(self.failed("sendmsg()"))?;
                        found += 1;
                    }
                    Err(error) if ends_queue(&error) => break,
                    // A signal arrived, or the connection is gone from the queue.
                    Err(error)
                        if matches!(
                            AcceptFailure::of(&error),
                            AcceptFailure::Wait | AcceptFailure::Retry
                        ) => {}
                    Err(error) => return Err(self.failed("accept()")(error)),
                }
            }
        }
        Ok(found)
    }
}

/// Returns whether accept(2) failed because the queue is empty. After shutdown(2) the error is EINVAL.
fn ends_queue(error: &io::Error) -> bool {
    matches!(Errno::of(error), Some(Errno::EAGAIN | Errno::EINVAL))
}

#[cfg(feature = "tokio")]
impl ListenerGroup {
    /// Does the same as [`drain`](ListenerGroup::drain) on a blocking thread of the current runtime, so that the tasks of this runtime finish
    /// their requests meanwhile.
    ///
    /// # Errors
    ///
    /// The errors of [`drain`](ListenerGroup::drain); [`ListenError::Call`] if the runtime shuts down, or with EAGAIN if the system has no thread
    /// left.
    ///
    /// # Panics
    ///
    /// Panics outside of a tokio runtime.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let group = fourtuple::listen::ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).open()?;
    /// let report = group.drain_tokio(Duration::from_secs(10)).await?;
    /// assert!(report.is_complete());
    /// # Ok(()) }
    /// ```
    pub async fn drain_tokio(&self, deadline: Duration) -> Result<DrainReport, ListenError> {
        self.off_runtime(move |group| group.drain(deadline)).await
    }

    /// Does the same as [`hand_over`](ListenerGroup::hand_over) on a blocking thread of the current runtime.
    ///
    /// # Errors
    ///
    /// The errors of [`hand_over`](ListenerGroup::hand_over); [`ListenError::Call`] if the runtime shuts down, or with EAGAIN if the system has no thread
    /// left.
    ///
    /// # Panics
    ///
    /// Panics outside of a tokio runtime.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let group = fourtuple::listen::ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).open()?;
    /// let report = group.hand_over_tokio(Duration::from_secs(10)).await?;
    /// assert!(report.is_complete());
    /// # Ok(()) }
    /// ```
    pub async fn hand_over_tokio(&self, deadline: Duration) -> Result<DrainReport, ListenError> {
        self.off_runtime(move |group| group.hand_over(deadline)).await
    }

    async fn off_runtime<T: Send + 'static>(
        &self,
        work: impl FnOnce(&ListenerGroup) -> Result<T, ListenError> + Send + 'static,
    ) -> Result<T, ListenError> {
        let group = self.clone();
        let done = on_blocking_thread(move || work(&group)).await;
        done.unwrap_or_else(|error| Err(self.failed("spawn_blocking()")(error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listen::{AcceptPolicy, ListenerGroupBuilder};

    #[test]
    fn a_connection_that_a_killed_dispatcher_did_not_count_is_none() {
        let builder = ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).policy(AcceptPolicy::Dispatcher);
        let group = builder.open().unwrap();
        // The dispatcher has read the message with the connection, and nothing more.
        group.0.seats.add_in_transit();
        let open = |deadline| group.hand_over(deadline).unwrap().open;
        assert_eq!(open(STALE + Duration::from_millis(200)), 1, "a message of a group that lost nobody");
        group.dispatcher_died();
        assert_eq!(open(Duration::from_secs(60)), 0);
    }
}
