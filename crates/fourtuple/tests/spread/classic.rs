//! Selectors that take no privilege.

use fourtuple::spread::{Group, Spread, SpreadError};
use fourtuple_testing::in_namespace;

use crate::group::{assert_even, lengths, open, sender, shares};

fn got(test: &str, spread: &str, members: usize, packets: u32, to: &str) -> Vec<Vec<u32>> {
    let group = open(test, to.parse().unwrap(), members, spread).unwrap();
    shares(&group, &sender(&group), packets)
}

#[test]
fn one_tuple_meets_one_socket_by_hash() {
    in_namespace(|| {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let got = got("one_tuple_meets_one_socket_by_hash", "hash", 4, 2_000, address);
            assert_eq!(got.iter().filter(|got| !got.is_empty()).count(), 1, "{address}");
        }
    });
}

#[test]
fn one_tuple_meets_all_at_random() {
    in_namespace(|| {
        // Of 100,000 one point is more than seven times the standard deviation, of 60,000 more than five times.
        for (address, packets) in [("127.0.0.1:0", 100_000), ("[::1]:0", 60_000)] {
            assert_even(&got("one_tuple_meets_all_at_random", "random", 4, packets, address));
        }
    });
}

#[test]
fn all_ten_of_ten_are_busy() {
    in_namespace(|| {
        for spread in ["random", "flow:0:4"] {
            let got = got("all_ten_of_ten_are_busy", spread, 10, 2_000, "127.0.0.1:0");
            // 200 each; 100 are more than seven times the standard deviation.
            assert!(got.iter().all(|got| got.len().abs_diff(200) < 100), "{:?}", lengths(&got));
        }
    });
}

#[test]
fn a_flow_within_the_tuple_stays_with_one_socket() {
    in_namespace(|| {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let test = "a_flow_within_the_tuple_stays_with_one_socket";
            let got = got(test, "flow:0:4:0xf", 4, 4_000, address);
            for (index, got) in got.iter().enumerate() {
                assert_eq!(got.len(), 1_000);
                assert!(got.iter().all(|packet| packet & 0xf & 3 == index as u32));
                assert!(got.is_sorted(), "packets overtook each other");
            }
        }
    });
}

#[test]
fn what_is_too_short_for_its_key_goes_to_the_first() {
    in_namespace(|| {
        let test = "what_is_too_short_for_its_key_goes_to_the_first";
        assert_eq!(lengths(&got(test, "flow:8:4", 3, 30, "127.0.0.1:0")), [30, 0, 0]);
    });
}

/// The processor that sends handles what goes over loopback.
#[test]
fn a_processor_has_its_socket() {
    in_namespace(|| {
        let allowed = fourtuple_syscalls::schedule::allowed_cpus().unwrap();
        for cpu in allowed {
            fourtuple_syscalls::schedule::pin_to(cpu).unwrap();
            let got = got("a_processor_has_its_socket", "cpu", 2, 500, "127.0.0.1:0");
            // Softirqs that are behind go to another thread, but of the same processor.
            assert_eq!(got[cpu % 2].len(), 500, "{:?}", lengths(&got));
        }
    });
}

#[test]
fn groups_that_cannot_be_are_refused() {
    in_namespace(|| {
        let open = |members, spread: &Spread| Group::open("127.0.0.1:0".parse().unwrap(), members, spread);
        for members in [0, 1025] {
            assert!(matches!(open(members, &Spread::Random), Err(SpreadError::Members { .. })));
        }
        let odd = Spread::Key(fourtuple::spread::Key { offset: 0, width: 3, mask: 1 });
        assert!(matches!(open(1, &odd), Err(SpreadError::Impossible { .. })));
        let mut group = open(2, &Spread::Random).unwrap();
        assert!(matches!(group.steer(&[1, 1]), Err(SpreadError::Fixed { .. })));
        assert!(matches!(group.join(), Err(SpreadError::Fixed { .. })));
        assert!(matches!(group.leave(0), Err(SpreadError::Fixed { .. })));
        assert!(group.control().is_err() && group.member(2).is_err());
        assert_eq!(group.len(), 2);
    });
}
