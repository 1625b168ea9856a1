//! The counters of a trace of connect() equal the counts of the program: many connects, filters, retries, active closes; and its
//! samples show the search for a port.

mod traced;

use std::env;
use std::fs;
use std::hint;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV6, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{self, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple_observe::trace::{Connect, Outcome};
use fourtuple_record::{TraceConnectResults, TraceTuple};
use fourtuple_syscalls::Errno;
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{resource, schedule};
use fourtuple_testing::process::{start, status, undisturbed};
use fourtuple_testing::{StopOnDrop, listener, set_sysctl};
use traced::{count, named, own_network, to, traced, until_none_missed};

fn dial(destination: SocketAddr) -> OwnedFd {
    let stream = socket::open(Transport::Tcp, destination, false).unwrap();
    socket::connect(stream.as_fd(), destination).unwrap();
    stream
}

fn only(results: &TraceConnectResults) -> &TraceTuple {
    let [tuple] = &results.tuples[..] else { panic!("{:?}", results.tuples) };
    tuple
}

fn number(variable: &str, otherwise: u32) -> u32 {
    env::var(variable).map_or(otherwise, |text| text.parse().expect("a number"))
}

#[test]
fn many_short_processes_are_one_row() {
    named(|test| {
        let (_server, address) = listener("127.0.9.9", 100);
        let connect = Connect { process: None, ..to(address) };
        let open = format!("exec 3<>/dev/tcp/{}/{}", address.ip(), address.port());
        let program = || {
            for _ in 0..5 {
                let status = status(Command::new("bash").args(["-c", &open])).unwrap();
                assert!(status.success(), "{status}");
            }
            drop(dial(address));
        };
        let run = || traced(test, &connect, program);
        let Some((_, outcome)) = until_none_missed(run) else { return };
        let rows: Vec<_> = outcome.results.tuples.iter().map(|row| (row.processes, row.searches)).collect();
        assert_eq!(rows, [(5, 5), (1, 1)], "{:#?}", outcome.results.tuples);
        let [short, own] = &outcome.results.tuples[..] else { panic!("two rows") };
        assert_eq!((short.name.as_str(), own.process), ("bash", process::id()));
        let samples: Vec<_> = outcome.results.samples.iter().filter_map(|sample| sample.tuple).collect();
        assert_eq!(samples, [0, 0, 0, 0, 0, 1]);
    });
}

/// The variable FOURTUPLE_TRACE_CONNECTS sets the number of connects.
#[test]
fn every_connect_of_many_is_counted() {
    named(|test| {
        let connects = number("FOURTUPLE_TRACE_CONNECTS", 4_000);
        set_sysctl("net.ipv4.ip_local_port_range", "20000 39999");
        let port = 4500;
        let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port);
        let server = socket::open(Transport::Tcp, any, false).unwrap();
        socket::bind(server.as_fd(), any).unwrap();
        socket::listen(server.as_fd(), 4096).unwrap();
        thread::spawn(move || while socket::accept(server.as_fd()).is_ok() {});
        let address = |number: u32| Ipv4Addr::from(0x7f00_0201 + number % 4);
        let connect = Connect { process: Some(process::id()), port: Some(port), ..Connect::default() };
        let program = || {
            let mut counts = [0_u64; 2];
            for number in 0..connects {
                let to = SocketAddr::new(address(number).into(), port);
                let stream = socket::open(Transport::Tcp, to, false).unwrap();
                assert_eq!(option::set_bind_address_no_port(stream.as_fd()).unwrap(), Answer::Done);
                socket::bind(stream.as_fd(), SocketAddr::new(address(number / 4).into(), 0)).unwrap();
                socket::connect(stream.as_fd(), to).unwrap();
                counts[usize::from(socket::local_address(stream.as_fd()).unwrap().port() % 2)] += 1;
                option::set_reset_on_close(stream.as_fd()).unwrap();
            }
            counts
        };
        let run = || traced(test, &connect, program);
        let Some((counts, outcome)) = until_none_missed(run) else { return };
        let results = outcome.results;
        assert_eq!([count(results.search_ns.even), count(results.search_ns.odd)], counts);
        assert_eq!(results.tuples.len(), 4);
        let sum = |of: fn(&TraceTuple) -> u64| results.tuples.iter().map(of).sum::<u64>();
        assert_eq!([sum(|tuple| tuple.even), sum(|tuple| tuple.odd)], counts);
        assert_eq!((results.searches, results.failed.len()), (connects.into(), 0));
    });
}

#[test]
fn filtered_out_connects_are_not_counted() {
    named(|test| {
        let (_one, one) = listener("127.0.3.1", 64);
        let (_other, other) = listener("127.0.3.2", 64);
        let name = format!("t{}", process::id());
        let program = &|| {
            let both = move || [one, one, other].map(dial);
            let named = thread::Builder::new().name(name.clone()).spawn(both).unwrap();
            (both(), named.join().unwrap())
        };
        let by_name = Connect { name: Some(name.clone()), ..Connect::default() };
        let run = |connect: &Connect| until_none_missed(|| traced(test, connect, program));
        let Some((_, Outcome { results, .. })) = run(&by_name) else { return };
        assert_eq!(results.searches, 3, "{:?}", results.tuples);
        // Rows have the name of the process, which selects all of its threads.
        let comm = fs::read_to_string("/proc/self/comm").unwrap().trim_end().to_owned();
        assert!(results.tuples.iter().all(|tuple| tuple.name == comm), "{:?}", results.tuples);
        let by_process = Connect { name: Some(comm), ..to(one) };
        let (_, Outcome { results, .. }) = run(&by_process).unwrap();
        assert_eq!(results.searches, 4, "{:?}", results.tuples);
        let by_address =
            Connect { process: Some(process::id()), address: Some(one.ip()), ..Connect::default() };
        let (_, Outcome { results, .. }) = run(&by_address).unwrap();
        let tuple = only(&results);
        assert_eq!((tuple.searches, tuple.destination.clone()), (4, one.to_string()));
        let of_another = Connect { process: Some(1), port: Some(one.port()), ..to(one) };
        let (_, Outcome { results, .. }) = run(&of_another).unwrap();
        assert_eq!((results.searches, results.tuples.len()), (0, 0));
    });
}

#[test]
fn ipv4_through_ipv6_is_ipv4() {
    named(|test| {
        // A new listener for each run, so that only connections of the run count as ports in use.
        let run = || {
            let (listener, destination) = listener("127.0.4.1", 64);
            let SocketAddr::V4(v4) = destination else { panic!("{destination}") };
            let mapped = SocketAddr::V6(SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0));
            let program = || (0..10).map(|_| dial(mapped)).collect::<Vec<_>>();
            let (streams, outcome) = traced(test, &to(destination), program)?;
            Some(((listener, destination, streams), outcome))
        };
        let Some(((_listener, destination, streams), outcome)) = until_none_missed(run) else { return };
        let tuple = only(&outcome.results);
        assert_eq!((tuple.searches, tuple.established), (streams.len() as u64, streams.len() as u64));
        assert_eq!((tuple.destination.clone(), tuple.in_use), (destination.to_string(), Some(10)));
    });
}

#[test]
fn connects_after_a_full_range_count_as_retries() {
    named(|test| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20099");
        set_sysctl("net.ipv4.ip_local_reserved_ports", "20010-20011,20020-20021,20030-20031,20040-20043");
        // A new listener for each run, towards which all ports are free.
        let run = || {
            let (listener, destination) = listener("127.0.5.1", 256);
            let program = || {
                let mut streams: Vec<_> = (0..90).map(|_| dial(destination)).collect();
                let fail = || {
                    let stream = socket::open(Transport::Tcp, destination, false).unwrap();
                    let error = socket::connect(stream.as_fd(), destination).unwrap_err();
                    assert_eq!(Errno::of(&error), Some(Errno::EADDRNOTAVAIL));
                };
                (0..3).for_each(|_| fail());
                // The port is free only if no process that is being started holds a copy of the socket.
                streams = undisturbed(|| {
                    option::set_reset_on_close(streams.pop().unwrap().as_fd()).unwrap();
                    streams.push(dial(destination));
                    streams
                });
                fail();
                streams
            };
            let (streams, outcome) = traced(test, &to(destination), program)?;
            Some(((listener, streams), outcome))
        };
        let Some((_sockets, outcome)) = until_none_missed(run) else { return };
        let tuple = only(&outcome.results);
        assert_eq!((tuple.failed, tuple.no_port), (4, 4));
        // Two failed connects after a failed connect, and one established connect.
        assert_eq!((tuple.retries, tuple.syn_retries), (3, 0));
        assert_eq!((tuple.in_use, tuple.range, tuple.fill), (Some(90), Some(90), Some(1.0)));
    });
}

#[test]
fn a_search_does_not_include_the_wait_for_a_processor() {
    named(|test| {
        // All ports but one are taken, so that each search looks at most of them.
        set_sysctl("net.ipv4.ip_local_port_range", "20000 22999");
        let run = || {
            let (listener, destination) = listener("127.0.6.1", 4096);
            let streams: Vec<_> = (0..2_999).map(|_| dial(destination)).collect();
            let searches = || {
                let before = resource::thread_cpu_time();
                undisturbed(|| {
                    for _ in 0..200 {
                        option::set_reset_on_close(dial(destination).as_fd()).unwrap();
                    }
                });
                resource::thread_cpu_time() - before
            };
            let on_a_busy_processor = || {
                let over = AtomicBool::new(false);
                let processor = schedule::allowed_cpus().unwrap()[0];
                let compete = || {
                    schedule::pin_to(processor).unwrap();
                    while !over.load(Ordering::Relaxed) {
                        hint::spin_loop();
                    }
                };
                thread::scope(|scope| {
                    (0..3).for_each(|_| drop(scope.spawn(compete)));
                    let _end = StopOnDrop(&over);
                    let dialer = scope.spawn(|| {
                        schedule::pin_to(processor).unwrap();
                        searches()
                    });
                    dialer.join().unwrap()
                })
            };
            let (ran, outcome) = traced(test, &to(destination), on_a_busy_processor)?;
            Some(((listener, streams, ran), outcome))
        };
        let Some(((.., ran), outcome)) = until_none_missed(run) else { return };
        let all = outcome.results.search_ns.all.unwrap();
        assert_eq!(all.count, 200);
        // The kernel counts an interrupt for the thread or for nobody.
        let searched = Duration::from_nanos(all.count * all.mean);
        assert!(searched < ran.mul_f64(1.25), "{searched:?} of searches in {ran:?} of CPU time");
        assert!(searched > ran / 10, "{searched:?} of searches in {ran:?} of CPU time");
    });
}

#[test]
fn a_closed_port_is_distinguished_from_a_full_range() {
    named(|test| {
        // A child of another test would have a copy of the listener until its exec.
        let destination = undisturbed(|| listener("127.0.6.1", 64).1);
        let program = || {
            let stream = socket::open(Transport::Tcp, destination, false).unwrap();
            socket::connect(stream.as_fd(), destination).unwrap_err();
        };
        let run = || traced(test, &to(destination), program);
        let Some(((), Outcome { results, .. })) = until_none_missed(run) else { return };
        assert_eq!(results.failed.into_iter().collect::<Vec<_>>(), [("ECONNREFUSED".to_owned(), 1)]);
        assert_eq!((results.searches, results.failed_search_ns), (1, None));
    });
}

/// The variable FOURTUPLE_TRACE_CLOSES sets the number of closes.
#[test]
fn active_closes_are_counted_per_side() {
    named(|test| {
        let closes = number("FOURTUPLE_TRACE_CLOSES", 1_000);
        let (server, destination) = listener("127.0.7.1", 64);
        let program = || {
            for number in 0..closes {
                let client = dial(destination);
                let accepted = socket::accept(server.as_fd()).unwrap();
                let [first, second] = if number % 4 == 0 { [accepted, client] } else { [client, accepted] };
                drop(first);
                // The FIN of the first socket has arrived.
                assert_eq!(socket::receive(second.as_fd(), &mut [0]).unwrap(), 0);
            }
        };
        let run = || traced(test, &to(destination), program);
        let Some(((), Outcome { results, .. })) = until_none_missed(run) else { return };
        let tuple = only(&results);
        let by_peer = u64::from(closes.div_ceil(4));
        assert_eq!((tuple.closed_first, tuple.closed_by_peer), (u64::from(closes) - by_peer, by_peer));
    });
}

/// A child holds copies of all sockets until its exec, and the last copy closes the connection.
#[test]
fn closes_by_another_process_count_for_the_one_that_connected() {
    named(|test| {
        let (server, destination) = listener("127.0.8.1", 64);
        let program = || {
            for is_first in [true, false, false] {
                let client = dial(destination);
                let accepted = socket::accept(server.as_fd()).unwrap();
                let mut holder = Command::new("sh");
                holder.args(["-c", "read line"]).stdin(client);
                let mut child = start(&mut holder).unwrap();
                // The copy of this process is closed.
                drop(holder);
                // A child of another test has copies of both sockets until its exec.
                undisturbed(|| {
                    if is_first {
                        assert_eq!(socket::send(accepted.as_fd(), b"\n").unwrap(), 1);
                    } else {
                        drop(accepted);
                    }
                    child.wait().unwrap();
                });
            }
        };
        let run = || traced(test, &to(destination), program);
        let Some(((), Outcome { results, .. })) = until_none_missed(run) else { return };
        let tuple = only(&results);
        assert_eq!((tuple.closed_first, tuple.closed_by_peer), (1, 2));
    });
}

const PORTS: u16 = 2_000;
/// Failed dials. Each searches all ports; together they take about a second of CPU time and give some hundred samples.
const FAILURES: u32 = 20_000;

#[test]
fn most_samples_of_a_dialing_program_are_in_the_search() {
    named(|test| {
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
