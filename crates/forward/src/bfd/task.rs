//! The thread that owns a session: only this thread reads its packets, sends for it and changes it.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use fourtuple_syscalls::datagram::Batch;
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::{option, schedule};

use crate::bfd::link::{LinkError, LinkReport, LinkState, thread_failed};
use crate::bfd::packet::{Demultiplexer, Diagnostic, Discard, Packet};
use crate::bfd::port::{Inbox, InboxReceiver, Sender};
use crate::bfd::session::{Action, HOPS, Session, Timers};

/// A command from the owner of a link.
#[derive(Debug)]
pub(super) enum Command {
    AdminDown(bool),
    Timers(Timers),
    Reset,
    Signal(Diagnostic),
    /// End when the peer has confirmed AdminDown, or when its detection time has expired.
    Drain,
    /// Send one last packet and end.
    End,
    /// Stop without a packet: another thread or process continues the session.
    Pause,
}

/// The number of packets to receive before the thread checks the timers again.
const BATCH: usize = 32;
/// The buffer for one packet in bytes: the length field of a control packet is one byte.
const ROOM: usize = 256;

pub(super) struct Task {
    pub(super) session: Session,
    /// The instant from which the session counts its times.
    pub(super) origin: Instant,
    pub(super) state: LinkState,
    /// The inbox, for its counters.
    pub(super) inbox: Inbox,
    pub(super) inbox_receiver: InboxReceiver,
    pub(super) commands: Receiver<Command>,
    pub(super) sender: Sender,
    pub(super) peer: SocketAddr,
    pub(super) receiver: Option<OwnedFd>,
    pub(super) peers: Demultiplexer<()>,
    pub(super) epoll: Epoll,
    pub(super) unsent: u64,
    /// The latest time at which the thread ends.
    pub(super) leaving: Option<Duration>,
    /// Whether the thread stops without ending the session.
    pub(super) pauses: bool,
}

impl std::fmt::Debug for Task {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Task").field("session", &self.session).finish_non_exhaustive()
    }
}

impl Task {
    /// Adds every descriptor that the thread waits for to its epoll.
    pub(super) fn watch(&self) -> Result<(), LinkError> {
        let failed = || thread_failed("epoll_ctl()");
        self.epoll.add(self.inbox_receiver.waker().as_fd(), 0, Interest::READ).map_err(failed())?;
        if let Some(receiver) = &self.receiver {
            self.epoll.add(receiver.as_fd(), 1, Interest::READ).map_err(failed())?;
        }
        Ok(())
    }

    /// Runs the session until it ends or stops, and returns the task, which can run again after a stop.
    pub(super) fn run(mut self) -> Task {
        // The session needs little CPU time, but a late packet can take it down, so the thread asks for a high priority.
        // Without permission it runs at the normal priority.
        let _ = schedule::go_first();
        let mut batch = Batch::new(BATCH, ROOM);
        loop {
            // Queued packets are processed before the detection time is checked.
            self.receive(&mut batch);
            self.handle_commands();
            let wait = if self.pauses { None } else { self.act() };
            self.publish();
            if self.is_over() || std::mem::take(&mut self.pauses) {
                return self;
            }
            // `epoll_wait` fails only for invalid arguments; then a busy loop is better than a dead session.
            let _ = self.epoll.wait(&mut [Ready::NONE; 2], wait);
        }
    }

    /// Returns the number of packets in the inbox that the session did not process before its end.
    pub(super) fn left(&self) -> u64 {
        self.inbox_receiver.take().count() as u64
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    fn receive(&mut self, batch: &mut Batch) {
        if let Some(receiver) = &self.receiver
            && batch.receive(receiver.as_fd()).is_ok()
        {
            for datagram in batch.iter() {
                take(
                    &mut self.session,
                    &self.peers,
                    self.origin.elapsed(),
                    datagram.bytes,
                    datagram.from(),
                    datagram.hops,
                );
            }
        }
        for queued in self.inbox_receiver.take() {
            take(
                &mut self.session,
                &self.peers,
                self.origin.elapsed(),
                queued.bytes(),
                Some(queued.from),
                queued.hops,
            );
        }
    }

    fn handle_commands(&mut self) {
        loop {
            let command = match self.commands.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Empty) => return,
                // The link was dropped, and no other command can arrive.
                Err(TryRecvError::Disconnected) => Command::End,
            };
            let now = self.now();
            match command {
                Command::AdminDown(is_down) => self.session.set_admin_down(now, is_down),
                Command::Timers(timers) => self.session.set_timers(timers),
                Command::Reset => self.session.reset_forwarding_plane(now),
                Command::Signal(diagnostic) => self.session.signal(diagnostic),
                Command::Pause => self.pauses = true,
                Command::Drain => {
                    // The session knows no peer, so no peer waits for AdminDown.
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

    /// Sends all due packets, and returns the time until the next step.
    fn act(&mut self) -> Option<Duration> {
        // The interval may be shorter than the time that sending takes; the thread must receive packets in between.
        let mut until = Some(Duration::ZERO);
        for _ in 0..BATCH {
            match self.session.next_action(self.now()) {
                Action::Transmit(packet) => {
                    // A send error does not end the session: detecting a failed link is its purpose.
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
        self.leaving.is_some_and(|latest| self.session.peer_expects_silence() || self.now() >= latest)
    }
}

/// Passes a packet to the session if it comes from the peer's address. Each packet is counted once: by the session, or as a
/// packet from a stranger.
fn take(
    session: &mut Session,
    peers: &Demultiplexer<()>,
    now: Duration,
    bytes: &[u8],
    from: Option<SocketAddr>,
    hops: Option<u8>,
) {
    let hops = hops.unwrap_or(0);
    let is_stranger = hops == HOPS
        && Packet::parse(bytes).is_ok_and(|packet| {
            from.is_none_or(|from| peers.find(&packet, from.ip()) == Err(Discard::Stranger))
        });
    if is_stranger {
        session.discard(Discard::Stranger);
    } else {
        // The session counts the packets that it discards.
        let _ = session.receive(now, bytes, hops);
    }
}
