//! BFD control packets (RFC 5880, section 4.1).

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU8;

use thiserror::Error;

/// Length in bytes of a control packet without an authentication section.
pub const LENGTH: usize = 24;
/// The minimum length with an authentication section, which begins with its type and length bytes.
const LENGTH_WITH_AUTHENTICATION: usize = 26;
/// The only version that an RFC specifies.
const VERSION: u8 = 1;

/// The state of a session, as packets carry it (Sta).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum State {
    /// The administrator holds the session down. This is not a failure.
    AdminDown = 0,
    /// The session is down or was just created.
    Down = 1,
    /// The session receives the peer's packets, but the peer has not confirmed that it receives ours.
    Init = 2,
    /// Both ends receive each other's packets.
    Up = 3,
}

impl State {
    pub(super) fn from_bits(bits: u8) -> State {
        match bits & 0b11 {
            0 => State::AdminDown,
            1 => State::Down,
            2 => State::Init,
            _ => State::Up,
        }
    }

    /// Returns the name used in records and metrics.
    pub fn name(self) -> &'static str {
        match self {
            State::AdminDown => "admin-down",
            State::Down => "down",
            State::Init => "init",
            State::Up => "up",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The reason for a session's last change of state (Diag).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Diagnostic {
    /// 0: no diagnostic.
    None,
    /// 1: the detection time expired without a packet.
    DetectionTimeExpired,
    /// 2: the echo function failed. Never sent by this implementation.
    EchoFailed,
    /// 3: the neighbor signaled that the session is down.
    NeighborSignaledDown,
    /// 4: the forwarding plane was reset.
    ForwardingPlaneReset,
    /// 5: the path is down, as detected by a means other than BFD.
    PathDown,
    /// 6: a path concatenated to this one is down.
    ConcatenatedPathDown,
    /// 7: the session is administratively down.
    AdministrativelyDown,
    /// 8: a path concatenated to this one is down in the reverse direction.
    ReverseConcatenatedPathDown,
    /// 9 to 31: reserved by RFC 5880.
    Reserved(u8),
}

impl Diagnostic {
    /// Returns the code on the wire, 0 to 31.
    pub fn code(self) -> u8 {
        match self {
            Diagnostic::None => 0,
            Diagnostic::DetectionTimeExpired => 1,
            Diagnostic::EchoFailed => 2,
            Diagnostic::NeighborSignaledDown => 3,
            Diagnostic::ForwardingPlaneReset => 4,
            Diagnostic::PathDown => 5,
            Diagnostic::ConcatenatedPathDown => 6,
            Diagnostic::AdministrativelyDown => 7,
            Diagnostic::ReverseConcatenatedPathDown => 8,
            Diagnostic::Reserved(code) => code & 31,
        }
    }

    /// Returns the name used in records and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Diagnostic::None => "none",
            Diagnostic::DetectionTimeExpired => "detection-time-expired",
            Diagnostic::EchoFailed => "echo-failed",
            Diagnostic::NeighborSignaledDown => "neighbor-signaled-down",
            Diagnostic::ForwardingPlaneReset => "forwarding-plane-reset",
            Diagnostic::PathDown => "path-down",
            Diagnostic::ConcatenatedPathDown => "concatenated-path-down",
            Diagnostic::AdministrativelyDown => "administratively-down",
            Diagnostic::ReverseConcatenatedPathDown => "reverse-concatenated-path-down",
            Diagnostic::Reserved(_) => "reserved",
        }
    }

    /// Returns the diagnostic for a code on the wire; uses the low five bits.
    pub fn from_code(code: u8) -> Diagnostic {
        match code & 31 {
            0 => Diagnostic::None,
            1 => Diagnostic::DetectionTimeExpired,
            2 => Diagnostic::EchoFailed,
            3 => Diagnostic::NeighborSignaledDown,
            4 => Diagnostic::ForwardingPlaneReset,
            5 => Diagnostic::PathDown,
            6 => Diagnostic::ConcatenatedPathDown,
            7 => Diagnostic::AdministrativelyDown,
            8 => Diagnostic::ReverseConcatenatedPathDown,
            code => Diagnostic::Reserved(code),
        }
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Diagnostic::None => "no diagnostic",
            Diagnostic::DetectionTimeExpired => "control detection time expired",
            Diagnostic::EchoFailed => "echo function failed",
            Diagnostic::NeighborSignaledDown => "neighbor signaled session down",
            Diagnostic::ForwardingPlaneReset => "forwarding plane reset",
            Diagnostic::PathDown => "path down",
            Diagnostic::ConcatenatedPathDown => "concatenated path down",
            Diagnostic::AdministrativelyDown => "administratively down",
            Diagnostic::ReverseConcatenatedPathDown => "reverse concatenated path down",
            Diagnostic::Reserved(code) => return write!(formatter, "diagnostic {code}"),
        })
    }
}

/// A control packet. Intervals are in microseconds, as on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The reason for the last change of state of the sender's session.
    pub diagnostic: Diagnostic,
    /// The state of the sender's session.
    pub state: State,
    /// P (Poll): the sender waits for a packet with F.
    pub poll: bool,
    /// F (Final): the packet answers a packet with P. A sender sets at most one of P and F; a receiver accepts a packet with
    /// both.
    pub is_final: bool,
    /// C: the sender's BFD keeps running when its control plane restarts.
    pub control_plane_independent: bool,
    /// A: the packet has an authentication section. [`Packet::encode`] writes none and leaves this bit clear.
    pub authenticated: bool,
    /// D: the sender wants no periodic packets while both sessions are Up.
    pub demand: bool,
    /// Number of consecutive packets that may be missing.
    pub detect_mult: NonZeroU8,
    /// The sender's discriminator for this session, never 0.
    pub my_discriminator: u32,
    /// The receiver's discriminator for this session; 0 if the sender does not know it.
    pub your_discriminator: u32,
    /// The minimum interval at which the sender would like to transmit, without jitter.
    pub desired_min_tx_us: u32,
    /// The minimum interval at which the sender can receive; 0 asks the peer to send no periodic packets.
    pub required_min_rx_us: u32,
    /// The minimum interval at which the sender can receive echo packets; 0 means that it does not support echo.
    pub required_min_echo_rx_us: u32,
}

impl Packet {
    /// Parses a datagram and applies the checks of RFC 5880, section 6.8.6 that need no session, in the order of that section.
    /// Ignores the contents of an authentication section, and all bytes beyond the length in the length field.
    ///
    /// # Errors
    ///
    /// The rule by which the packet is discarded.
    pub fn parse(datagram: &[u8]) -> Result<Packet, Discard> {
        let &[first, flags, detect_mult, length, ..] = datagram else {
            return Err(Discard::Length);
        };
        if first >> 5 != VERSION {
            return Err(Discard::Version);
        }
        let flag = |bit: u8| flags & (1 << bit) != 0;
        let authenticated = flag(2);
        let least = if authenticated { LENGTH_WITH_AUTHENTICATION } else { LENGTH };
        if usize::from(length) < least {
            return Err(Discard::Length);
        }
        if usize::from(length) > datagram.len() {
            return Err(Discard::LengthBeyondPayload);
        }
        // The checks above ensure that the datagram has at least `LENGTH` bytes.
        let bytes = datagram.first_chunk::<LENGTH>().ok_or(Discard::Length)?;
        let detect_mult = NonZeroU8::new(detect_mult).ok_or(Discard::DetectMult)?;
        if flag(0) {
            return Err(Discard::Multipoint);
        }
        let word = |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let packet = Packet {
            diagnostic: Diagnostic::from_code(first),
            state: State::from_bits(flags >> 6),
            poll: flag(5),
            is_final: flag(4),
            control_plane_independent: flag(3),
            authenticated,
            demand: flag(1),
            detect_mult,
            my_discriminator: word(4),
            your_discriminator: word(8),
            desired_min_tx_us: word(12),
            required_min_rx_us: word(16),
            required_min_echo_rx_us: word(20),
        };
        if packet.my_discriminator == 0 {
            return Err(Discard::MyDiscriminator);
        }
        if packet.your_discriminator == 0 && !matches!(packet.state, State::Down | State::AdminDown) {
            return Err(Discard::YourDiscriminatorZero);
        }
        Ok(packet)
    }

    /// Returns the packet as bytes on the wire, without an authentication section.
    pub fn encode(&self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        let bit = |set: bool, at: u8| u8::from(set) << at;
        bytes[0] = VERSION << 5 | self.diagnostic.code();
        bytes[1] = (self.state as u8) << 6
            | bit(self.poll, 5)
            | bit(self.is_final, 4)
            | bit(self.control_plane_independent, 3)
            | bit(self.demand, 1);
        bytes[2] = self.detect_mult.get();
        bytes[3] = LENGTH as u8;
        let words = [
            self.my_discriminator,
            self.your_discriminator,
            self.desired_min_tx_us,
            self.required_min_rx_us,
            self.required_min_echo_rx_us,
        ];
        for (field, word) in bytes[4..].chunks_exact_mut(4).zip(words) {
            field.copy_from_slice(&word.to_be_bytes());
        }
        bytes
    }
}

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

/// The rule by which a packet is discarded. All but the last three are in RFC 5880, section 6.8.6.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Discard {
    /// The version is not 1.
    #[error("its version is not 1")]
    Version,
    /// The length field is less than 24, or less than 26 with authentication, or the datagram is shorter than 4 bytes.
    #[error("it is shorter than a control packet")]
    Length,
    /// The length field exceeds the length of the datagram.
    #[error("its length is more than what was received")]
    LengthBeyondPayload,
    /// The detection multiplier is 0.
    #[error("its detection multiplier is 0")]
    DetectMult,
    /// The multipoint bit is set, which RFC 5880 reserves.
    #[error("its multipoint bit is set")]
    Multipoint,
    /// My Discriminator is 0.
    #[error("its discriminator is 0")]
    MyDiscriminator,
    /// Your Discriminator is 0 although the packet's state is neither Down nor AdminDown, or although the local session is in
    /// Init or Up (the second rule is stricter than RFC 5880: see `Session::receive`).
    #[error("its Your Discriminator is 0, which its state or the state of the session forbids")]
    YourDiscriminatorZero,
    /// No local session has this Your Discriminator.
    #[error("it names a discriminator that is not of a session here")]
    NoSession,
    /// The packet is authenticated, and no local session uses authentication.
    #[error("it is authenticated, and no authentication is in use")]
    Authentication,
    /// The local session is administratively down: it stores the values of the packet and ignores it otherwise.
    #[error("the session is administratively down")]
    AdminDown,
    /// The packet has passed a router: it arrived with a TTL or hop limit below 255 (RFC 5881, section 5; GTSM, RFC 5082).
    #[error("it was not received with 255 hops left")]
    Hops,
    /// The source address differs from the peer's address.
    #[error("it comes from an address other than the peer address of the session")]
    Stranger,
}

impl Discard {
    /// All reasons.
    pub const ALL: [Discard; 12] = [
        Discard::Version,
        Discard::Length,
        Discard::LengthBeyondPayload,
        Discard::DetectMult,
        Discard::Multipoint,
        Discard::MyDiscriminator,
        Discard::YourDiscriminatorZero,
        Discard::NoSession,
        Discard::Authentication,
        Discard::AdminDown,
        Discard::Hops,
        Discard::Stranger,
    ];

    /// Returns the name used in records and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Discard::Version => "version",
            Discard::Length => "length",
            Discard::LengthBeyondPayload => "length-beyond-payload",
            Discard::DetectMult => "detect-mult",
            Discard::Multipoint => "multipoint",
            Discard::MyDiscriminator => "my-discriminator",
            Discard::YourDiscriminatorZero => "your-discriminator-zero",
            Discard::NoSession => "no-session",
            Discard::Authentication => "authentication",
            Discard::AdminDown => "admin-down",
            Discard::Hops => "hops",
            Discard::Stranger => "stranger",
        }
    }
}

/// Numbers of discarded packets, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Discards([u64; Discard::ALL.len()]);

impl Discards {
    pub fn count(&mut self, why: Discard) {
        self.0[why as usize] += 1;
    }

    /// Returns the number of packets discarded for one reason.
    pub fn of(&self, why: Discard) -> u64 {
        self.0[why as usize]
    }

    /// Returns the reasons with a count above 0, and their counts.
    pub fn iter(&self) -> impl Iterator<Item = (Discard, u64)> {
        Discard::ALL.into_iter().zip(self.0).filter(|(_, count)| *count > 0)
    }

    /// Returns the sum over all reasons.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;

    use super::super::packet::{Diagnostic, State};
    use super::*;

    fn example() -> Packet {
        Packet {
            diagnostic: Diagnostic::NeighborSignaledDown,
            state: State::Up,
            poll: true,
            is_final: false,
            control_plane_independent: false,
            authenticated: false,
            demand: false,
            detect_mult: NonZeroU8::new(3).unwrap(),
            my_discriminator: 0x0102_0304,
            your_discriminator: 0x0506_0708,
            desired_min_tx_us: 300_000,
            required_min_rx_us: 1_000_000,
            required_min_echo_rx_us: 0,
        }
    }

    /// The expected bytes are written by hand from the figure in section 4.1.
    #[test]
    fn fields_are_at_the_offsets_of_the_rfc() {
        let expected = [
            0x23, 0xe0, 3, 24, // version 1, diag 3; up, P
            1, 2, 3, 4, 5, 6, 7, 8, // discriminators
            0x00, 0x04, 0x93, 0xe0, 0x00, 0x0f, 0x42, 0x40, 0, 0, 0, 0, // 300 ms, 1 s, no echo
        ];
        assert_eq!(example().encode(), expected);
        assert_eq!(Packet::parse(&expected), Ok(example()));
        for (bit, packet) in [
            (0x10, Packet { is_final: true, ..example() }),
            (0x08, Packet { control_plane_independent: true, ..example() }),
            (0x02, Packet { demand: true, ..example() }),
        ] {
            let mut bytes = expected;
            bytes[1] |= bit;
            assert_eq!(packet.encode(), bytes);
            assert_eq!(Packet::parse(&bytes), Ok(packet));
        }
        let states = [(0x20, State::AdminDown), (0x60, State::Down), (0xa0, State::Init), (0xe0, State::Up)];
        for (byte, state) in states {
            let mut bytes = expected;
            bytes[1] = byte;
            assert_eq!(Packet::parse(&bytes), Ok(Packet { state, ..example() }));
        }
    }

    #[test]
    fn diagnostics_survive_encoding() {
        for code in 0..32 {
            let packet = Packet { diagnostic: Diagnostic::from_code(code), ..example() };
            assert_eq!(packet.diagnostic.code(), code);
            assert_eq!(packet.diagnostic.name() == "reserved", code > 8);
            assert_eq!(Packet::parse(&packet.encode()), Ok(packet));
        }
    }

    fn changed(change: impl FnOnce(&mut Vec<u8>)) -> Result<Packet, Discard> {
        let mut bytes = example().encode().to_vec();
        change(&mut bytes);
        Packet::parse(&bytes)
    }

    #[test]
    fn another_version_is_discarded() {
        for version in [0, 2, 7] {
            assert_eq!(changed(|bytes| bytes[0] = version << 5), Err(Discard::Version));
        }
    }

    #[test]
    fn a_length_below_the_minimum_is_discarded() {
        assert_eq!(changed(|bytes| bytes[3] = 23), Err(Discard::Length));
        assert_eq!(changed(|bytes| bytes[3] = 0), Err(Discard::Length));
        assert_eq!(Packet::parse(&[]), Err(Discard::Length));
        assert_eq!(Packet::parse(&[0x20, 0, 1]), Err(Discard::Length));
        let with_authentication = |length: u8| {
            changed(|bytes| {
                bytes[1] |= 4;
                bytes[3] = length;
                bytes.resize(30, 0);
            })
        };
        assert_eq!(with_authentication(24), Err(Discard::Length));
        assert_eq!(with_authentication(25), Err(Discard::Length));
        assert_eq!(with_authentication(26), Ok(Packet { authenticated: true, ..example() }));
    }

    #[test]
    fn the_length_field_bounds_the_packet() {
        assert_eq!(changed(|bytes| bytes[3] = 25), Err(Discard::LengthBeyondPayload));
        assert_eq!(changed(|bytes| bytes.truncate(23)), Err(Discard::LengthBeyondPayload));
        assert_eq!(changed(|bytes| bytes.truncate(4)), Err(Discard::LengthBeyondPayload));
        assert_eq!(changed(|bytes| bytes.extend([0xff; 40])), Ok(example()));
    }

    #[test]
    fn a_multiplier_of_zero_is_discarded() {
        assert_eq!(changed(|bytes| bytes[2] = 0), Err(Discard::DetectMult));
    }

    #[test]
    fn the_multipoint_bit_is_discarded() {
        assert_eq!(changed(|bytes| bytes[1] |= 1), Err(Discard::Multipoint));
    }

    #[test]
    fn my_discriminator_0_is_discarded() {
        assert_eq!(changed(|bytes| bytes[4..8].fill(0)), Err(Discard::MyDiscriminator));
    }

    #[test]
    fn your_discriminator_0_needs_down_or_admin_down() {
        for (state, taken) in
            [(State::AdminDown, true), (State::Down, true), (State::Init, false), (State::Up, false)]
        {
            let packet = Packet { state, your_discriminator: 0, ..example() };
            let expected = if taken { Ok(packet) } else { Err(Discard::YourDiscriminatorZero) };
            assert_eq!(Packet::parse(&packet.encode()), expected);
        }
    }

    /// A packet that breaks two rules is discarded by the rule that comes first in section 6.8.6.
    #[test]
    fn rules_apply_in_the_order_of_the_rfc() {
        let mut bytes = [0; LENGTH];
        bytes[1] = 0b1100_0001;
        let steps: [(Discard, usize, u8); 6] = [
            (Discard::Version, 0, 0x20),
            (Discard::Length, 3, 25),
            (Discard::LengthBeyondPayload, 3, 24),
            (Discard::DetectMult, 2, 1),
            (Discard::Multipoint, 1, 0b1100_0000),
            (Discard::MyDiscriminator, 7, 1),
        ];
        for (why, at, repaired) in steps {
            assert_eq!(Packet::parse(&bytes), Err(why));
            bytes[at] = repaired;
        }
        assert_eq!(Packet::parse(&bytes), Err(Discard::YourDiscriminatorZero));
        bytes[11] = 1;
        assert!(Packet::parse(&bytes).is_ok());
    }

    /// Returns whether a datagram is a valid packet; restates the rules of section 6.8.6 as one expression.
    fn may_be_taken(datagram: &[u8]) -> bool {
        let [first, flags, detect_mult, length] = datagram[..4] else { return false };
        let has = |range: std::ops::Range<usize>| datagram[range].iter().any(|byte| *byte != 0);
        first & 0xe0 == 0x20
            && length >= if flags & 4 != 0 { 26 } else { 24 }
            && usize::from(length) <= datagram.len()
            && detect_mult != 0
            && flags & 1 == 0
            && has(4..8)
            && (has(8..12) || flags & 0x80 == 0)
    }

    /// The test parses 200,000 datagrams: random bytes, and valid packets with flipped bits, replaced bytes, truncated or extended.
    #[test]
    fn random_datagrams_are_parsed_by_the_rules() {
        let mut random = Rng::with_seed(5880);
        let (mut taken, mut discarded) = (0, 0);
        for round in 0..200_000 {
            let mut datagram = if round % 4 == 0 {
                let length = random.usize(..80);
                std::iter::repeat_with(|| random.u8(..)).take(length).collect()
            } else {
                example().encode().to_vec()
            };
            for _ in 0..random.usize(..4) {
                match (random.u8(..5), datagram.len()) {
                    (0, length) => datagram.truncate(random.usize(..=length)),
                    (1, length) => datagram.resize(length + random.usize(..30), random.u8(..)),
                    (_, 0) => {}
                    (2, length) => datagram[random.usize(..length)] = random.u8(..),
                    (3, length) => datagram[random.usize(..length.min(12))] ^= 1 << random.u8(..8),
                    (_, length) => {
                        let start = random.usize(..length);
                        let end = (start + 4).min(length);
                        datagram[start..end].fill(0);
                    }
                }
            }
            let legal = datagram.len() >= 4 && may_be_taken(&datagram);
            match Packet::parse(&datagram) {
                Ok(packet) => {
                    assert!(legal, "{datagram:02x?}");
                    // The encoder writes the parsed packet, without authentication and without trailing bytes.
                    let mut expected = datagram[..LENGTH].to_vec();
                    expected[1] &= !4;
                    expected[3] = 24;
                    assert_eq!(packet.encode(), expected[..], "{datagram:02x?}");
                    taken += 1;
                }
                Err(why) => {
                    assert!(!legal, "{why}: {datagram:02x?}");
                    discarded += 1;
                }
            }
        }
        assert!(taken > 20_000 && discarded > 20_000, "{taken} taken, {discarded} discarded");
    }

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

    #[test]
    fn each_reason_has_its_index_and_name() {
        let mut discards = Discards::default();
        for (index, why) in Discard::ALL.into_iter().enumerate() {
            assert_eq!(why as usize, index);
            for _ in 0..=index {
                discards.count(why);
            }
        }
        for (index, (why, count)) in discards.iter().enumerate() {
            assert_eq!((why, count), (Discard::ALL[index], index as u64 + 1));
            assert_eq!(discards.of(why), count);
        }
        assert_eq!(discards.total(), 78);
        let names: std::collections::HashSet<_> = Discard::ALL.iter().map(|why| why.name()).collect();
        assert_eq!(names.len(), Discard::ALL.len());
    }
}
