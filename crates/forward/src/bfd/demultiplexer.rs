//! Which session a packet is for.

use std::collections::HashMap;
use std::net::IpAddr;

use super::discard::Discard;
use super::packet::Packet;

/// Sessions by their discriminator, and by the address of their peer.
///
/// RFC 5880, section 6.8.6: a discriminator that is named decides alone, wherever the packet comes from (RFC 5881, section
/// 6). A packet that names none is for the session with the address that it comes from: RFC 5881, section 3 has one session
/// with a system, an interface and a protocol.
#[derive(Clone, Debug)]
pub struct Demultiplexer<S> {
    by_discriminator: HashMap<u32, S>,
    by_peer: HashMap<IpAddr, S>,
}

impl<S> Default for Demultiplexer<S> {
    fn default() -> Demultiplexer<S> {
        Demultiplexer { by_discriminator: HashMap::new(), by_peer: HashMap::new() }
    }
}

impl<S: Clone> Demultiplexer<S> {
    /// Without a session.
    pub fn new() -> Demultiplexer<S> {
        Demultiplexer::default()
    }

    /// Adds a session; `false`, and nothing is added, when its discriminator is 0 or another session has it, or its peer.
    pub fn add(&mut self, discriminator: u32, peer: IpAddr, session: S) -> bool {
        let peer = peer.to_canonical();
        if discriminator == 0
            || self.by_discriminator.contains_key(&discriminator)
            || self.by_peer.contains_key(&peer)
        {
            return false;
        }
        self.by_discriminator.insert(discriminator, session.clone());
        self.by_peer.insert(peer, session);
        true
    }

    /// Takes a session out, by what it was added with.
    pub fn remove(&mut self, discriminator: u32, peer: IpAddr) {
        self.by_discriminator.remove(&discriminator);
        self.by_peer.remove(&peer.to_canonical());
    }

    /// The session that a packet from an address is for.
    ///
    /// # Errors
    ///
    /// [`Discard::NoSession`] for a discriminator that nobody has, [`Discard::Stranger`] for an address without a session.
    pub fn find(&self, packet: &Packet, from: IpAddr) -> Result<&S, Discard> {
        match packet.your_discriminator {
            0 => self.by_peer.get(&from.to_canonical()).ok_or(Discard::Stranger),
            named => self.by_discriminator.get(&named).ok_or(Discard::NoSession),
        }
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
    fn a_discriminator_decides_alone_and_an_address_where_there_is_none() {
        let address = |last: u8| IpAddr::from([192, 0, 2, last]);
        let mut sessions = Demultiplexer::new();
        assert!(sessions.add(10, address(1), 'a'));
        assert!(sessions.add(20, address(2), 'b'));
        assert_eq!(sessions.find(&packet(10), address(1)), Ok(&'a'));
        assert_eq!(sessions.find(&packet(20), address(1)), Ok(&'b'), "the address says nothing then");
        assert_eq!(sessions.find(&packet(30), address(1)), Err(Discard::NoSession));
        assert_eq!(sessions.find(&packet(0), address(2)), Ok(&'b'));
        assert_eq!(sessions.find(&packet(0), address(3)), Err(Discard::Stranger));
        assert_eq!(sessions.find(&packet(0), "::ffff:192.0.2.2".parse().unwrap()), Ok(&'b'));
        sessions.remove(20, address(2));
        assert_eq!(sessions.find(&packet(20), address(2)), Err(Discard::NoSession));
        assert_eq!(sessions.find(&packet(0), address(2)), Err(Discard::Stranger));
    }

    #[test]
    fn what_is_taken_is_not_given_twice() {
        let mut sessions = Demultiplexer::new();
        assert!(!sessions.add(0, [192, 0, 2, 1].into(), 'z'));
        assert!(sessions.add(1, [192, 0, 2, 1].into(), 'a'));
        assert!(!sessions.add(1, [192, 0, 2, 2].into(), 'b'));
        assert!(!sessions.add(2, [192, 0, 2, 1].into(), 'c'));
        assert_eq!(sessions.find(&packet(0), [192, 0, 2, 2].into()), Err(Discard::Stranger));
        assert_eq!(sessions.find(&packet(2), [192, 0, 2, 2].into()), Err(Discard::NoSession));
    }
}
