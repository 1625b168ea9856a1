use fastrand::Rng;

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
