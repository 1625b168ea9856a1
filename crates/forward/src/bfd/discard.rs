//! The reasons for which a packet is discarded, and a counter for each.

use thiserror::Error;

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
    /// Counts one discarded packet.
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
    use super::*;

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
