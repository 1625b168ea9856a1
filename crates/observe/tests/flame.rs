//! The samples of a program that dials show its search for a port. The program does a fixed number of dials.

mod traced;

use std::net::TcpStream;
use std::process;
use std::thread;
use std::time::Duration;

use fourtuple_observe::trace::Connect;
use fourtuple_testing::{in_namespace, listener, set_sysctl};
use traced::{own_network, traced};

const PORTS: u16 = 2_000;
/// Failed dials. Each searches all ports; together they take about a second of CPU time and give some hundred samples.
const FAILURES: u32 = 20_000;

#[test]
fn most_samples_of_a_dialing_program_are_in_the_search() {
    let test = "most_samples_of_a_dialing_program_are_in_the_search";
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", &format!("20000 {}", 20000 + PORTS - 1));
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let connect = Connect {
            process: Some(process::id()),
            network: Some(own_network()),
            flame: true,
            ..Connect::default()
        };
        let mut taken = Vec::new();
        let Some(((), outcome)) = traced(test, &connect, || {
            let mut failures = 0;
            while failures < FAILURES {
                match TcpStream::connect(destination) {
                    Ok(stream) => taken.push(stream),
                    Err(_) => failures += 1,
                }
            }
        }) else {
            return;
        };
        assert_eq!(taken.len(), usize::from(PORTS));
        let flame = outcome.results.flame.expect("it was asked for");
        let sum: u64 = outcome.folded.iter().map(|(_, samples)| samples).sum();
        assert_eq!(flame.samples, sum, "{flame:?}");
        // The search takes most of the time of the program.
        assert!(flame.samples >= 10 && flame.in_search > 0.25, "{flame:?}");
        assert!(flame.in_connect >= flame.in_search, "{flame:?}");
        let searching = outcome.folded.iter().find(|(frames, _)| frames.contains("__inet_hash_connect"));
        let (frames, _) = searching.unwrap_or_else(|| panic!("{:?}", outcome.folded));
        let at = |function: &str| frames.find(function).unwrap_or_else(|| panic!("{function}: {frames}"));
        // The outermost function is first.
        assert!(at("connect") < at("tcp_v4_connect") && at("tcp_v4_connect") < at("__inet_hash_connect"));
        // No task is in a namespace with this inode.
        let nowhere = Connect { network: Some(1), ..connect };
        let fail = || (0..FAILURES / 10).for_each(|_| drop(TcpStream::connect(destination).unwrap_err()));
        let Some(((), outcome)) = traced(test, &nowhere, fail) else { return };
        assert_eq!(outcome.results.flame.map(|flame| flame.samples), Some(0));
    });
}

#[test]
fn without_a_filter_only_connecting_programs_are_sampled() {
    let test = "without_a_filter_only_connecting_programs_are_sampled";
    // No program connects to this documentation address.
    let connect = Connect { address: Some([192, 0, 2, 77].into()), flame: true, ..Connect::default() };
    let Some(((), outcome)) = traced(test, &connect, || thread::sleep(Duration::from_millis(50))) else {
        return;
    };
    assert_eq!(outcome.folded, []);
    assert_eq!(outcome.results.flame.map(|flame| flame.samples), Some(0));
    assert_eq!(outcome.results.searches, 0);
}
