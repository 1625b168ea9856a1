//! What the trace counts is what the dialing program itself knows. No time decides.

mod traced;

use std::net::SocketAddr;

use fourtuple::dial::{DialError, Dialer, Strategy};
use fourtuple_testing::{in_namespace, listener, set_sysctl};
use traced::{to, traced, tuple};

const PORTS: u16 = 600;

fn small_range() {
    set_sysctl("net.ipv4.ip_local_port_range", &format!("20000 {}", 20000 + PORTS - 1));
}

/// What a program knows of its dials to one destination.
#[derive(Debug, Default)]
struct Known {
    even: u64,
    odd: u64,
    ports: Vec<u16>,
    /// Calls to connect() that said EADDRNOTAVAIL.
    refused: u64,
}

/// Takes every port of the range and then fails `beyond` times.
fn fill(strategy: Strategy, destination: SocketAddr, beyond: u64) -> Known {
    let dialer = Dialer::to(destination).strategy(strategy).build().unwrap();
    let (mut known, mut streams) = (Known::default(), Vec::new());
    let mut dials = 0;
    while dials < beyond {
        match dialer.dial() {
            Ok((stream, report)) => {
                let port = stream.local_addr().unwrap().port();
                if port % 2 == 0 {
                    known.even += 1
                } else {
                    known.odd += 1
                }
                known.ports.push(port);
                known.refused += u64::from(report.attempts) - 1;
                streams.push(stream);
            }
            Err(DialError::PortsExhausted { .. }) => {
                dials += 1;
                // Neither strategy tries again: a failed dial is one call.
                known.refused += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    known
}

fn agrees(test: &str, strategy: Strategy, address: &'static str) {
    small_range();
    let (_listener, destination) = listener(address, 4096);
    let Some((known, outcome)) = traced(test, &to(destination), || fill(strategy, destination, 3)) else {
        return;
    };
    let results = outcome.results;
    assert_eq!(known.even + known.odd, u64::from(PORTS), "{known:?}");
    assert_eq!(outcome.validity, [], "{results:?}");
    let tuple = tuple(&results, destination);
    assert_eq!((tuple.even, tuple.odd), (known.even, known.odd), "{tuple:?}");
    assert_eq!((results.searches, results.lost), (u64::from(PORTS), 0));
    let count = |spread: Option<fourtuple_record::Spread>| spread.map_or(0, |spread| spread.count);
    assert_eq!(count(results.search_ns.even), known.even);
    assert_eq!(count(results.search_ns.odd), known.odd);
    assert_eq!(count(results.handshake_ns), u64::from(PORTS));
    assert_eq!(results.histogram.iter().map(|step| step.even + step.odd).sum::<u64>(), u64::from(PORTS));
    let heat = &results.heat;
    assert_eq!(heat.columns.iter().flatten().sum::<u64>(), u64::from(PORTS), "{heat:?}");
    assert!((1..=120).contains(&heat.columns.len()), "{heat:?}");
    assert!(heat.columns.iter().all(|column| column.len() == heat.from_ns.len()), "{heat:?}");
    assert_eq!((tuple.established, tuple.given_port), (u64::from(PORTS), 0));
    // Every one of them by its errno, and no other.
    assert!(known.refused >= 3);
    assert_eq!(
        results.failed.clone().into_iter().collect::<Vec<_>>(),
        [("EADDRNOTAVAIL".to_owned(), known.refused)]
    );
    assert_eq!((tuple.failed, tuple.no_port), (known.refused, known.refused));
    // A sample is of searches that took place.
    assert!(!results.samples.is_empty());
    for sample in &results.samples {
        assert!(sample.source_port.is_none_or(|port| known.ports.contains(&port)), "{sample:?}");
        assert_eq!(sample.tuple, Some(0));
    }
}

#[test]
fn the_kernels_own_search_is_counted() {
    in_namespace(|| agrees("the_kernels_own_search_is_counted", Strategy::KernelDefault, "127.0.0.1"));
}

#[test]
fn the_full_range_is_counted() {
    in_namespace(|| agrees("the_full_range_is_counted", Strategy::FullRange, "127.0.0.2"));
}

#[test]
fn ipv6_is_counted() {
    in_namespace(|| agrees("ipv6_is_counted", Strategy::KernelDefault, "::1"));
}
