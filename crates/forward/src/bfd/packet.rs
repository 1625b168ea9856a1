//! Control packets: RFC 5880, section 4.1.

use std::fmt;
use std::num::NonZeroU8;

use super::discard::Discard;

/// Bytes of a control packet without an authentication section.
pub const LENGTH: usize = 24;
/// The least with one: it begins with its type and its length.
const LENGTH_WITH_AUTHENTICATION: usize = 26;
/// The only version there is; version 0 was never an RFC.
const VERSION: u8 = 1;

/// State of a session, as its packets say it (Sta).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum State {
    /// Held down by its administrator. No failure.
    AdminDown = 0,
    /// No session, or just created.
    Down = 1,
    /// The peer is heard, and does not say yet that it hears.
    Init = 2,
    /// Both hear each other.
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

    /// As records and metrics write it.
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

/// Why a session left its last state (Diag).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Diagnostic {
    /// 0: nothing to report.
    None,
    /// 1: the detection time went by without a packet.
    DetectionTimeExpired,
    /// 2: echoes did not come back. Never sent from here.
    EchoFailed,
    /// 3: the neighbour said that the session is down.
    NeighborSignaledDown,
    /// 4: the data plane began anew.
    ForwardingPlaneReset,
    /// 5: the path is down, which something else than BFD has found out.
    PathDown,
    /// 6: a path that this one is continued by is down.
    ConcatenatedPathDown,
    /// 7: the administrator said so.
    AdministrativelyDown,
    /// 8: the same as 6, of the other direction.
    ReverseConcatenatedPathDown,
    /// 9 to 31: not given a meaning by RFC 5880.
    Reserved(u8),
}

impl Diagnostic {
    /// The number on the wire, 0 to 31.
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

    /// As records and metrics write it.
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

    /// From the number on the wire, of which five bits count.
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
    /// Why the sender's session left its last state.
    pub diagnostic: Diagnostic,
    /// The sender's state.
    pub state: State,
    /// P: the sender waits for an answer with F.
    pub poll: bool,
    /// F: that answer. Not both are sent; of received ones nothing forbids to take both as they are.
    pub is_final: bool,
    /// C: the sender's BFD goes on when its control plane does not.
    pub control_plane_independent: bool,
    /// A: there is an authentication section. [`Packet::encode`] writes none, and leaves this bit clear.
    pub authenticated: bool,
    /// D: the sender wants no periodic packets while both are up.
    pub demand: bool,
    /// How many packets in a row may be missed.
    pub detect_mult: NonZeroU8,
    /// The sender's number of this session, never 0.
    pub my_discriminator: u32,
    /// The receiver's number of it; 0 when the sender does not know it.
    pub your_discriminator: u32,
    /// How often the sender would like to send at most, without jitter.
    pub desired_min_tx_us: u32,
    /// How often it can receive; 0: nothing periodic, please.
    pub required_min_rx_us: u32,
    /// How often it would send echoes back; 0: not at all.
    pub required_min_echo_rx_us: u32,
}

impl Packet {
    /// Reads a datagram as RFC 5880, section 6.8.6 has it, as far as that does not take a session: the tests come in its
    /// order. Bytes behind the length that the packet says are left alone, and so are those of an authentication section.
    ///
    /// # Errors
    ///
    /// Which rule the packet is discarded by.
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
        // It is at least as long as its length says, which is at least this.
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

    /// The packet as it is sent, without authentication.
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
        for (room, word) in bytes[4..].chunks_exact_mut(4).zip(words) {
            room.copy_from_slice(&word.to_be_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests;
