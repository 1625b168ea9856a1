//! Why a packet was not taken, and how many of each there were.

use thiserror::Error;

/// The rule by which a packet is discarded. All but the last three are of RFC 5880, section 6.8.6.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Discard {
    /// Not version 1.
    #[error("its version is not 1")]
    Version,
    /// The length is less than 24, or 26 with authentication; or the datagram is.
    #[error("it is shorter than a control packet")]
    Length,
    /// The length is more than what came.
    #[error("its length is more than what was received")]
    LengthBeyondPayload,
    /// A detection multiplier of 0.
    #[error("its detection multiplier is 0")]
    DetectMult,
    /// The multipoint bit, reserved for another RFC.
    #[error("its multipoint bit is set")]
    Multipoint,
    /// A sender without a number.
    #[error("its discriminator is 0")]
    MyDiscriminator,
    /// It answers nobody, and says a state that one has only in answer.
    #[error("it names no discriminator of ours in a state other than down")]
    YourDiscriminatorZero,
    /// It names a session that is not here.
    #[error("it names a discriminator that is not of a session here")]
    NoSession,
    /// It is authenticated, and nothing here is.
    #[error("it is authenticated, and no authentication is in use")]
    Authentication,
    /// The session here is administratively down: what the packet tells is noted, and it counts for nothing else.
    #[error("the session is administratively down")]
    AdminDown,
    /// RFC 5881, section 5: it has come from farther than the link (GTSM, RFC 5082).
    #[error("it was not received with 255 hops left")]
    Hops,
    /// It names no session, and came from an address that has none: RFC 5880 leaves to the application what to do then.
    #[error("it comes from an address without a session")]
    Stranger,
}

impl Discard {
    /// All of them.
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

    /// As records and metrics write it.
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

/// How many packets were discarded, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Discards([u64; Discard::ALL.len()]);

impl Discards {
    /// One more.
    pub fn count(&mut self, why: Discard) {
        self.0[why as usize] += 1;
    }

    /// How many for this reason.
    pub fn of(&self, why: Discard) -> u64 {
        self.0[why as usize]
    }

    /// Those that happened, with how often.
    pub fn iter(&self) -> impl Iterator<Item = (Discard, u64)> {
        Discard::ALL.into_iter().zip(self.0).filter(|(_, count)| *count > 0)
    }

    /// All together.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_place_and_its_name() {
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
