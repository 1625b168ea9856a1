//! Two tiers trace the same connects at once: their counters are equal and their times are similar.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::process;

use fourtuple::dial::{DialError, Dialer, Strategy};
use fourtuple_bpf::connect_search::{ConnectFilter, Totals};
use fourtuple_bpf::tracing::{FINE_BITS, Times};
use fourtuple_bpf::{BpfError, ConnectSearch, Tier};
use fourtuple_record::measure::LogLinear;
use fourtuple_testing::{in_namespace, listener, set_sysctl, skip};

/// Size of the range; half of its ports are even.
const PORTS: u16 = 3_000;
/// Number of searches that pass over all even ports.
const LONG: u64 = 300;

/// Attaches the tiers in the order of [`Tier::ALL`]. Returns `None` and reports a skipped test where a tier cannot be attached.
fn attach(test: &str, destination: SocketAddr) -> Option<[ConnectSearch; 2]> {
    let wanted = ConnectFilter {
        process: Some(process::id()),
        address: Some(destination.ip()),
        port: Some(destination.port()),
        ..ConnectFilter::default()
    };
    let one = |tier, need| match ConnectSearch::attach(&wanted, tier) {
        Ok(search) => Some(search),
        Err(error @ (BpfError::NotPermitted { .. } | BpfError::Barred { .. } | BpfError::Absent { .. })) => {
            skip(test, need, &error.to_string());
            None
        }
        Err(other) => panic!("{}: {other}", tier.name()),
    };
    Some([one(Tier::TpBtf, "bpf")?, one(Tier::Fexit, "fexit")?])
}

/// Dials until `odd` odd ports were found: the kernel takes the even ports first. Returns the number of even and odd ports.
fn dial(destination: SocketAddr, odd: u64) -> [u64; 2] {
    let dialer = Dialer::builder(destination).strategy(Strategy::KernelDefault).build().unwrap();
    let (mut found, mut streams) = ([0, 0], Vec::new());
    while found[1] < odd {
        let (stream, _) = dialer.dial().unwrap();
        found[usize::from(stream.local_addr().unwrap().port() % 2)] += 1;
        streams.push(stream);
    }
    found
}

fn median(times: &Times) -> u64 {
    LogLinear::new(FINE_BITS, times.buckets.to_vec(), times.sum_ns, times.max_ns).quantile(0.5)
}

fn agree(test: &str, address: &'static str) {
    set_sysctl("net.ipv4.ip_local_port_range", &format!("20000 {}", 20000 + PORTS - 1));
    let mut attempts = 0;
    let (totals, [even, odd]) = loop {
        // A new listener, towards which all ports are free.
        let (_listener, destination) = listener(address, 4096);
        let Some(searches) = attach(test, destination) else { return };
        let found = dial(destination, LONG);
        let counted = searches.map(|mut search| {
            search.detach();
            (search.totals().unwrap(), search.missed().unwrap())
        });
        let [even, odd] = found;
        let is_complete = |totals: &Totals| {
            (totals.even.count, totals.odd.count, totals.handshake.count) == (even, odd, even + odd)
        };
        // The kernel does not run a program for an event that comes while it runs; most of these are of no connection.
        if counted.iter().all(|(totals, missed)| *missed == 0 || is_complete(totals)) {
            break (counted.map(|(totals, _)| totals), found);
        }
        attempts += 1;
        assert!(attempts < 30, "events were missed in {attempts} attempts");
    };
    for (totals, tier) in totals.iter().zip(Tier::ALL) {
        assert_eq!((totals.even.count, totals.odd.count), (even, odd), "{}", tier.name());
        assert_eq!((totals.handshake.count, totals.without_end), (even + odd, 0), "{}", tier.name());
        assert_eq!(totals.failures().collect::<Vec<_>>(), [], "{}", tier.name());
    }
    let ratio = |of: fn(&Totals) -> &Times| {
        let [tp_btf, fexit] = totals.each_ref().map(|totals| median(of(totals)));
        (tp_btf, fexit, tp_btf as f64 / fexit as f64)
    };
    let (tp_btf, fexit, long) = ratio(|totals| &totals.odd);
    let short = ratio(|totals| &totals.even);
    // docs/trace-connect.md quotes these figures. println! would be hidden by the test runner when the test passes.
    writeln!(
        io::stderr(),
        "{test}: odd ports, median: tp_btf {tp_btf} ns, fexit {fexit} ns, ratio {long:.3}; even ports: {} ns, {} ns, \
         ratio {:.3}",
        short.0,
        short.1,
        short.2,
    )
    .expect("stderr takes a line");
    // Each search covers more than a thousand ports, so a tier that times another interval would differ widely.
    assert!((0.67..1.5).contains(&long), "tp_btf {tp_btf} ns, fexit {fexit} ns");
}

#[test]
fn tiers_agree_on_ipv4() {
    in_namespace(|| agree("tiers_agree_on_ipv4", "127.0.0.1"));
}

#[test]
fn tiers_agree_on_ipv6() {
    in_namespace(|| agree("tiers_agree_on_ipv6", "::1"));
}

#[test]
fn every_tier_counts_failed_searches() {
    in_namespace(|| {
        let test = "every_tier_counts_failed_searches";
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20063");
        let refused = 1;
        let mut attempts = 0;
        let totals = loop {
            // A new listener, towards which all ports are free.
            let (_listener, destination) = listener("127.0.0.3", 128);
            let Some(searches) = attach(test, destination) else { return };
            let dialer = Dialer::builder(destination).strategy(Strategy::KernelDefault).build().unwrap();
            let mut streams = Vec::new();
            let error = loop {
                match dialer.dial() {
                    Ok((stream, _)) => streams.push(stream),
                    Err(error) => break error,
                }
            };
            assert!(matches!(error, DialError::PortsExhausted { .. }), "{error}");
            assert_eq!(streams.len(), 64);
            let counted = searches.map(|mut search| {
                search.detach();
                (search.totals().unwrap(), search.missed().unwrap())
            });
            let is_complete = |totals: &Totals| {
                (totals.even.count + totals.odd.count, totals.failed.count) == (64, refused)
            };
            // The kernel does not run a program for an event that comes while it runs.
            if counted.iter().all(|(totals, missed)| *missed == 0 || is_complete(totals)) {
                break counted.map(|(totals, _)| totals);
            }
            attempts += 1;
            assert!(attempts < 30, "events were missed in {attempts} attempts");
        };
        for (totals, tier) in totals.iter().zip(Tier::ALL) {
            assert_eq!(totals.even.count + totals.odd.count, 64, "{}", tier.name());
            assert_eq!(totals.failed.count, refused, "{}", tier.name());
            assert_eq!(
                totals.failures().collect::<Vec<_>>(),
                [("EADDRNOTAVAIL".to_owned(), refused)],
                "{}",
                tier.name()
            );
        }
    });
}
