//! The selection of the session for a received packet.

use std::collections::HashMap;
use std::net::IpAddr;

use crate::bfd::discard::Discard;
use crate::bfd::packet::Packet;

/// The sessions by discriminator and by peer address.
///
/// RFC 5880, section 6.8.6: a packet's Your Discriminator selects the session. If it is 0, the source address selects the
/// session: RFC 5881, section 3 allows one session per remote system, interface and protocol.
///
/// A packet with a discriminator must also come from the address of the session's peer. RFC 5881, section 6 requires this check
/// on a shared link (source and destination are in its subnet), and forbids it on a point-to-point link, where a peer may
/// change its address. Here the configured address identifies the peer, so a packet from another address is discarded.
#[derive(Clone, Debug)]
pub struct Demultiplexer<S> {
    by_discriminator: HashMap<u32, (IpAddr, S)>,
    by_peer: HashMap<IpAddr, S>,
}

impl<S> Default for Demultiplexer<S> {
    fn default() -> Demultiplexer<S> {
        Demultiplexer { by_discriminator: HashMap::new(), by_peer: HashMap::new() }
    }
}

impl<S: Clone> Demultiplexer<S> {
    /// Creates a demultiplexer without sessions.
    pub fn new() -> Demultiplexer<S> {
        Demultiplexer::default()
    }

    /// Adds a session. Returns `false` and adds nothing if the discriminator is 0, or if another session has the same
    /// discriminator or peer.
    pub fn add(&mut self, discriminator: u32, peer: IpAddr, session: S) -> bool {
        let peer = peer.to_canonical();
        if discriminator == 0
            || self.by_discriminator.contains_key(&discriminator)
            || self.by_peer.contains_key(&peer)
        {
            return false;
        }
        self.by_discriminator.insert(discriminator, (peer, session.clone()));
        self.by_peer.insert(peer, session);
        true
    }

    /// Removes the session that was added with this discriminator and peer.
    pub fn remove(&mut self, discriminator: u32, peer: IpAddr) {
        self.by_discriminator.remove(&discriminator);
        self.by_peer.remove(&peer.to_canonical());
    }

    /// Returns the session for a packet received from an address.
    ///
    /// # Errors
    ///
    /// [`Discard::NoSession`] if no session has the discriminator. [`Discard::Stranger`] if the source address differs from the
    /// peer address of the session, or if no session has this peer.
    pub fn find(&self, packet: &Packet, from: IpAddr) -> Result<&S, Discard> {
        let from = from.to_canonical();
        if packet.your_discriminator == 0 {
            return self.by_peer.get(&from).ok_or(Discard::Stranger);
        }
        let (peer, session) =
            self.by_discriminator.get(&packet.your_discriminator).ok_or(Discard::NoSession)?;
        if *peer == from { Ok(session) } else { Err(Discard::Stranger) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::packet::{Diagnostic, State};
    use super::*;

    fn packet(your_discriminator: u32) -> Packet {
        Packet {
            diagnostic: Diagnostic::None,
            state: State::Down,
            poll: false,
            is_final: false,
            control_plane_independent: false,
            authenticated: false,
            demand: false,
            detect_mult: std::num::NonZeroU8::MIN,
            my_discriminator: 77,
            your_discriminator,
            desired_min_tx_us: 1,
            required_min_rx_us: 1,
            required_min_echo_rx_us: 0,
        }
    }

    #[test]
    fn discriminator_and_address_must_match() {
        let address = |last: u8| IpAddr::from([192, 0, 2, last]);
        let mut sessions = Demultiplexer::new();
        assert!(sessions.add(10, address(1), 'a'));
        assert!(sessions.add(20, address(2), 'b'));
        assert_eq!(sessions.find(&packet(10), address(1)), Ok(&'a'));
        assert_eq!(sessions.find(&packet(20), address(2)), Ok(&'b'));
        assert_eq!(sessions.find(&packet(20), address(1)), Err(Discard::Stranger), "of another peer");
        assert_eq!(sessions.find(&packet(20), address(9)), Err(Discard::Stranger), "of no peer");
        assert_eq!(sessions.find(&packet(30), address(1)), Err(Discard::NoSession));
        assert_eq!(sessions.find(&packet(0), address(2)), Ok(&'b'));
        assert_eq!(sessions.find(&packet(0), address(3)), Err(Discard::Stranger));
        assert_eq!(sessions.find(&packet(0), "::ffff:192.0.2.2".parse().unwrap()), Ok(&'b'));
        sessions.remove(20, address(2));
        assert_eq!(sessions.find(&packet(20), address(2)), Err(Discard::NoSession));
        assert_eq!(sessions.find(&packet(0), address(2)), Err(Discard::Stranger));
    }

    #[test]
    fn discriminators_and_peers_are_unique() {
        let mut sessions = Demultiplexer::new();
        assert!(!sessions.add(0, [192, 0, 2, 1].into(), 'z'));
        assert!(sessions.add(1, [192, 0, 2, 1].into(), 'a'));
        assert!(!sessions.add(1, [192, 0, 2, 2].into(), 'b'));
        assert!(!sessions.add(2, [192, 0, 2, 1].into(), 'c'));
        assert_eq!(sessions.find(&packet(0), [192, 0, 2, 2].into()), Err(Discard::Stranger));
        assert_eq!(sessions.find(&packet(2), [192, 0, 2, 2].into()), Err(Discard::NoSession));
    }
}
