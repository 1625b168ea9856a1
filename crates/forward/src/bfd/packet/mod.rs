//! BFD control packets (RFC 5880, section 4.1).

use std::fmt;
use std::num::NonZeroU8;

use crate::bfd::discard::Discard;

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
        for (room, word) in bytes[4..].chunks_exact_mut(4).zip(words) {
            room.copy_from_slice(&word.to_be_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests;
