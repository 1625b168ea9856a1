//! Entry points for the fuzzer (`fuzz/`): the parsers of takeover messages between two processes.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use fourtuple_syscalls::unix_socket;

use crate::bfd::{Action, Session};
use crate::handover::FinalState;
use crate::handover::connection::{Offer, PeerConnection};
use crate::settings::Forward;

/// Returns a connection with these messages queued, each with this many copies of `descriptor`, and then closed.
fn connection(messages: &[(&[u8], usize)], descriptor: BorrowedFd<'_>) -> PeerConnection {
    let (ours, theirs) = unix_socket::pair().expect("socketpair()");
    for (bytes, number) in messages {
        // An empty message would mean the end of the connection.
        let bytes = if bytes.is_empty() { b"?" } else { *bytes };
        if unix_socket::send_all(theirs.as_fd(), bytes, &vec![descriptor; *number]).is_err() {
            break;
        }
    }
    drop(theirs);
    PeerConnection::new(ours, Path::new("fuzz")).expect("the peer is this process")
}

/// Parses messages as the offer of the running process. Returns whether `forward` could take over its sockets.
pub fn offer(messages: &[(&[u8], usize)], descriptor: BorrowedFd<'_>, forward: &Forward) -> bool {
    let Ok(offer) = Offer::receive(&connection(messages, descriptor)) else { return false };
    offer.fits(forward).is_ok() && offer.groups(forward).is_ok()
}

/// Parses messages as the final handover after the planes of the running process have ended. Runs the restored BFD sessions for
/// a while with this datagram received, and returns their number.
pub fn inherited(messages: &[(&[u8], usize)], descriptor: BorrowedFd<'_>, datagram: &[u8]) -> Option<usize> {
    let inherited = FinalState::receive(&connection(messages, descriptor)).ok()?;
    let mut now = Duration::from_secs(1);
    for session in &inherited.sessions {
        let Some(mut session) = Session::restore(&session.saved_state, now, fastrand::Rng::with_seed(1))
        else {
            continue;
        };
        for _ in 0..8 {
            match session.next_action(now) {
                Action::Transmit(_) => {}
                Action::Wait(until) => now = until,
                Action::WaitForPacket => drop(session.receive(now, datagram, 255)),
            }
        }
        let copy = Session::restore(&session.saved_state(now, false), now, fastrand::Rng::with_seed(1));
        assert!(copy.is_some(), "a session can be restored from its own saved state");
    }
    Some(inherited.sessions.len())
}
