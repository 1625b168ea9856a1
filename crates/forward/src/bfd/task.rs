//! The thread that owns a session: it alone receives for it, sends for it, and changes it.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use fourtuple_syscalls::datagram::Batch;
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::{option, schedule};

use super::demultiplexer::Demultiplexer;
use super::discard::Discard;
use super::error::{LinkError, thread_failed};
use super::inbox::{Inbox, Outlet};
use super::packet::{Diagnostic, Packet};
use super::session::{Action, HOPS, Session};
use super::sockets::Sender;
use super::state::{LinkReport, LinkState};
use super::timers::Timers;

/// What the owner of a link can have done.
#[derive(Debug)]
pub(super) enum Command {
    AdminDown(bool),
    Timers(Timers),
    Reset,
    Signal(Diagnostic),
    /// End when the peer knows, or must.
    Drain,
    /// End with one last packet.
    End,
    /// Stop, and say nothing: another one goes on with the session.
    Part,
}

/// Packets that are received before the timers are looked at again.
const BATCH: usize = 32;
/// Bytes of each: the length of a control packet is a byte.
const ROOM: usize = 256;

pub(super) struct Task {
    pub(super) session: Session,
    /// What the session's times are counted from.
    pub(super) origin: Instant,
    pub(super) state: LinkState,
    /// For its counts.
    pub(super) inbox: Inbox,
    pub(super) outlet: Outlet,
    pub(super) commands: Receiver<Command>,
    pub(super) sender: Sender,
    pub(super) peer: SocketAddr,
    pub(super) receiver: Option<OwnedFd>,
    pub(super) peers: Demultiplexer<()>,
    pub(super) epoll: Epoll,
    pub(super) unsent: u64,
    /// When to end, at the latest.
    pub(super) leaving: Option<Duration>,
    /// Whether to stop in the middle.
    pub(super) parts: bool,
}

impl std::fmt::Debug for Task {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Task").field("session", &self.session).finish_non_exhaustive()
    }
}

impl Task {
    /// Has everything that the thread waits for watched.
    pub(super) fn watch(&self) -> Result<(), LinkError> {
        let failed = || thread_failed("epoll_ctl()");
        self.epoll.add(self.outlet.bell().as_fd(), 0, Interest::READ).map_err(failed())?;
        if let Some(receiver) = &self.receiver {
            self.epoll.add(receiver.as_fd(), 1, Interest::READ).map_err(failed())?;
        }
        Ok(())
    }

    /// Until the session has ended, or has parted; what is left of it can be run again then.
    pub(super) fn run(mut self) -> Task {
        // It has little to do, and a session is lost when it does that late. Whoever may not go first stands in line.
        let _ = schedule::go_first();
        let mut batch = Batch::new(BATCH, ROOM);
        loop {
            // What has come is heard before it is decided that nothing came.
            self.receive(&mut batch);
            self.obey();
            let wait = if self.parts { None } else { self.act() };
            self.publish();
            if self.is_over() || std::mem::take(&mut self.parts) {
                return self;
            }
            // It fails for bad arguments only; a thread that goes round quickly is better than a session that is dead.
            let _ = self.epoll.wait(&mut [Ready::NONE; 2], wait);
        }
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    fn receive(&mut self, batch: &mut Batch) {
        if let Some(receiver) = &self.receiver
            && batch.receive(receiver.as_fd()).is_ok()
        {
            for datagram in batch.iter() {
                if let Some(from) = datagram.from() {
                    take(
                        &mut self.session,
                        &self.peers,
                        self.origin.elapsed(),
                        datagram.bytes,
                        from,
                        datagram.hops,
                    );
                }
            }
        }
        for handed in self.outlet.take() {
            take(
                &mut self.session,
                &self.peers,
                self.origin.elapsed(),
                handed.bytes(),
                handed.from,
                handed.hops,
            );
        }
    }

    fn obey(&mut self) {
        loop {
            let command = match self.commands.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Empty) => return,
                // Nobody is left who could say anything.
                Err(TryRecvError::Disconnected) => Command::End,
            };
            let now = self.now();
            match command {
                Command::AdminDown(is_down) => self.session.set_admin_down(now, is_down),
                Command::Timers(timers) => self.session.set_timers(timers),
                Command::Reset => self.session.reset_forwarding_plane(now),
                Command::Signal(diagnostic) => self.session.signal(diagnostic),
                Command::Part => self.parts = true,
                Command::Drain => {
                    // A peer that is not known waits for nothing.
                    let is_known = self.session.remote_discriminator().is_some();
                    let time = if is_known { self.session.detection_time_of_peer() } else { Duration::ZERO };
                    self.session.set_admin_down(now, true);
                    self.leaving = Some(now + time);
                    return;
                }
                Command::End => {
                    self.session.set_admin_down(now, true);
                    self.leaving = Some(now);
                    return;
                }
            }
        }
    }

    /// Sends what is due; how long there is nothing to do then.
    fn act(&mut self) -> Option<Duration> {
        // An interval may be shorter than sending takes: what comes must be heard all the same.
        let mut until = Some(Duration::ZERO);
        for _ in 0..BATCH {
            match self.session.next_action(self.now()) {
                Action::Transmit(packet) => {
                    // A link that is down is no reason to end: it is what the session is there to find out.
                    if self.sender.send(&packet.encode(), self.peer).is_err() {
                        self.unsent += 1;
                    }
                }
                Action::Wait(time) => {
                    until = Some(time);
                    break;
                }
                Action::WaitForPacket => {
                    until = None;
                    break;
                }
            }
        }
        let until = until.into_iter().chain(self.leaving).min();
        until.map(|until| until.saturating_sub(self.now()))
    }

    fn publish(&self) {
        let (handed, handed_dropped) = self.inbox.counts();
        let report = LinkReport::of(&self.session, self.now());
        let transmitted = report.transmitted - self.unsent;
        let overflowed = self.receiver.as_ref().and_then(|receiver| option::dropped(receiver.as_fd()).ok());
        let report = LinkReport {
            transmitted,
            unsent: self.unsent,
            handed,
            handed_dropped,
            overflowed: overflowed.unwrap_or(0).into(),
            ..report
        };
        self.state.publish(self.session.since(), report);
    }

    fn is_over(&self) -> bool {
        self.leaving.is_some_and(|latest| self.session.farewell_was_heard() || self.now() >= latest)
    }
}

/// Gives the session a packet, unless it names nobody and comes from somebody else than the peer.
fn take(
    session: &mut Session,
    peers: &Demultiplexer<()>,
    now: Duration,
    bytes: &[u8],
    from: SocketAddr,
    hops: Option<u8>,
) {
    let hops = hops.unwrap_or(0);
    let is_stranger = hops == HOPS
        && Packet::parse(bytes).is_ok_and(|packet| peers.find(&packet, from.ip()) == Err(Discard::Stranger));
    if is_stranger {
        session.discard(Discard::Stranger);
    } else {
        // Discards are counted there.
        let _ = session.receive(now, bytes, hops);
    }
}
