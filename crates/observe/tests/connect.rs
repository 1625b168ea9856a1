//! The counters of a trace of connect(), over TCP and UDP, equal the counts of the program.

mod traced;

use std::cell::{Cell, RefCell};
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::{self, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fourtuple::dial::{DialError, Dialer, Strategy};
use fourtuple_bpf::BpfError;
use fourtuple_observe::trace::{Connect, Instrument, Protocol, TraceError};
use fourtuple_record::Remark;
use fourtuple_record::snapshot::Part;
use fourtuple_syscalls::ring::{OpenOptions, Ring};
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{Endpoint, Errno};
use fourtuple_testing::process::{Python, start, undisturbed};
use fourtuple_testing::{connect, listener, set_sysctl, skip};
use traced::{count, elsewhere, named, own_network, to, traced, tuple, until_none_missed};

const PORTS: u16 = 600;

/// A program of 32 bits for x86 that waits: an ELF header, a program header, and pause() by `int 0x80` in a loop.
const NARROW: &[u8] = b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x03\0\x01\0\0\0\x54\x80\x04\x08\x34\0\0\0\0\0\0\0\0\0\0\0\x34\0\x20\0\x01\0\x28\0\0\0\0\0\
    \x01\0\0\0\0\0\0\0\0\x80\x04\x08\0\x80\x04\x08\x5d\0\0\0\x5d\0\0\0\x05\0\0\0\0\x10\0\0\
    \xb8\x1d\0\0\0\xcd\x80\xeb\xf7";

#[test]
fn a_program_of_32_bits_in_scope_is_named() {
    let test = "connect::a_program_of_32_bits_in_scope_is_named";
    let path = std::env::temp_dir().join(format!("fourtuple-narrow-{}", process::id()));
    // Until its exec a child of another test would have the file open for writing: ETXTBSY.
    undisturbed(|| fs::write(&path, NARROW)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let mut narrow = match start(&mut Command::new(&path)) {
        Ok(narrow) => narrow,
        Err(error) => return skip(test, "ia32", &error.to_string()),
    };
    let ran = traced(test, &Connect { process: Some(narrow.id()), ..Connect::default() }, || ());
    narrow.kill().unwrap();
    narrow.wait().unwrap();
    fs::remove_file(&path).unwrap();
    let Some(((), outcome)) = ran else { return };
    let message =
        format!("system calls of programs of 32 bits are not seen: fourtuple-narro[{}]", narrow.id());
    let is_named = outcome.validity.contains(&Remark::new("calls-unseen", message));
    assert!(is_named, "{:?}", outcome.validity);
    let Part::Seen(calls) = &outcome.results.calls else { panic!("{:?}", outcome.results.calls) };
    let [owner] = &calls.processes_32_bit[..] else { panic!("{calls:?}") };
    assert_eq!((owner.pid, owner.name.as_str()), (narrow.id(), "fourtuple-narro"));
}

fn small_range() {
    set_sysctl("net.ipv4.ip_local_port_range", &format!("20000 {}", 20000 + PORTS - 1));
}

/// Counts of a program that dials one destination.
#[derive(Debug, Default)]
struct Known {
    even: u64,
    odd: u64,
    ports: Vec<u16>,
    /// Calls of connect() that returned EADDRNOTAVAIL.
    refused: u64,
}

/// Takes every port of the range and then dials in vain `beyond` times.
fn fill(strategy: Strategy, destination: SocketAddr, beyond: u64) -> Known {
    let dialer = Dialer::builder(destination).strategy(strategy).build().unwrap();
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
                // These strategies do not retry, so a failed dial is one call of connect().
                known.refused += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    known
}

fn agrees(test: &str, strategy: Strategy, address: &'static str) {
    small_range();
    let destination = Cell::new(None);
    let run = || {
        // A new listener, towards which all ports are free.
        let (_listener, at) = listener(address, 4096);
        destination.set(Some(at));
        traced(test, &to(at), || fill(strategy, at, 3))
    };
    let Some((known, outcome)) = until_none_missed(run) else { return };
    let destination = destination.get().expect("the last run has one");
    let results = outcome.results;
    assert_eq!(known.even + known.odd, u64::from(PORTS), "{known:?}");
    assert_eq!(outcome.validity, [], "{results:?}");
    let tuple = tuple(&results, destination);
    assert_eq!((tuple.even, tuple.odd), (known.even, known.odd), "{tuple:?}");
    assert_eq!((results.searches, results.lost), (u64::from(PORTS), 0));
    assert_eq!(count(results.search_ns.even), known.even);
    assert_eq!(count(results.search_ns.odd), known.odd);
    assert_eq!(count(results.handshake_ns), u64::from(PORTS));
    assert_eq!(results.histogram.iter().map(|step| step.even + step.odd).sum::<u64>(), u64::from(PORTS));
    let heat = &results.heat;
    assert_eq!(heat.columns.iter().flatten().sum::<u64>(), u64::from(PORTS), "{heat:?}");
    assert!((1..=120).contains(&heat.columns.len()), "{heat:?}");
    assert!(heat.columns.iter().all(|column| column.len() == heat.from_ns.len()), "{heat:?}");
    assert_eq!((tuple.established, tuple.given_port), (u64::from(PORTS), 0));
    // Every failure has its errno.
    assert!(known.refused >= 3);
    assert_eq!(
        results.failed.clone().into_iter().collect::<Vec<_>>(),
        [("EADDRNOTAVAIL".to_owned(), known.refused)]
    );
    assert_eq!((tuple.failed, tuple.no_port), (known.refused, known.refused));
    // Each sample has a port that the program got.
    assert!(!results.samples.is_empty());
    for sample in &results.samples {
        assert!(sample.source_port.is_none_or(|port| known.ports.contains(&port)), "{sample:?}");
        assert_eq!(sample.tuple, Some(0));
    }
}

#[test]
fn the_search_of_the_kernel_is_counted() {
    named(|test| agrees(test, Strategy::KernelDefault, "127.0.0.1"));
}

#[test]
fn the_search_of_full_range_is_counted() {
    named(|test| agrees(test, Strategy::FullRange, "127.0.0.2"));
}

#[test]
fn the_search_over_ipv6_is_counted() {
    named(|test| agrees(test, Strategy::KernelDefault, "::1"));
}

#[test]
fn without_a_thread_the_ports_in_use_are_unknown() {
    named(|test| {
        let (_listener, destination) = listener("127.0.0.4", 4096);
        let stop = AtomicBool::new(false);
        let (trace, connected) = (to(destination), RefCell::new(None));
        let attached = || {
            connected.replace(Some(connect(destination)));
            seccomp::refuse(Facility::Threads).unwrap();
            stop.store(true, Ordering::Relaxed);
        };
        let outcome = match trace.run(&stop, attached, |_| ()) {
            Err(TraceError::Bpf(error @ (BpfError::NotPermitted { .. } | BpfError::Absent { .. }))) => {
                return skip(test, "bpf", &error.to_string());
            }
            outcome => outcome.unwrap(),
        };
        let remark = outcome.validity.iter().find(|remark| remark.id == "fill-unseen");
        let message = "the number of ports in use is unknown: no thread could be started: EAGAIN";
        assert_eq!(remark.map(|remark| remark.message.as_str()), Some(message), "{:?}", outcome.validity);
    });
}

#[test]
fn without_sock_diag_the_ports_in_use_are_unknown() {
    named(|test| {
        let (_listener, destination) = listener("127.0.0.3", 4096);
        // Holds for the threads of the trace, which this thread starts.
        seccomp::refuse(Facility::SocketDiag).unwrap();
        let once = || until_none_missed(|| traced(test, &to(destination), || connect(destination)));
        let Some((_stream, outcome)) = once() else { return };
        let [remark] = &outcome.validity[..] else { panic!("{:?}", outcome.validity) };
        assert_eq!(remark.id, "fill-unseen");
        let unknown = "is unknown: the kernel does not list its sockets (sock_diag: EPROTONOSUPPORT)";
        assert!(remark.message.contains(unknown), "{remark:?}");
        let tuple = tuple(&outcome.results, destination);
        assert_eq!((tuple.established, tuple.in_use, tuple.fill), (1, None, None), "{tuple:?}");
    });
}

/// connect() that fails before it searches for a port, and errors of non-blocking connects that the program reads by SO_ERROR.
#[test]
fn each_failed_call_has_the_errno_of_the_program() {
    named(|test| {
        set_sysctl("net.ipv6.conf.lo.disable_ipv6", "1");
        let refused: SocketAddr = "127.0.0.5:9".parse().unwrap();
        let absent: SocketAddr = "[::1]:6432".parse().unwrap();
        let nobody: SocketAddr = "127.0.0.5:53".parse().unwrap();
        let far: SocketAddr = "192.0.2.1:53".parse().unwrap();
        let program = || {
            for _ in 0..5 {
                let error = TcpStream::connect(absent).unwrap_err();
                assert_eq!(Errno::of(&error), Some(Errno::EADDRNOTAVAIL));
            }
            for _ in 0..3 {
                // A non-blocking connect(), poll() and SO_ERROR.
                TcpStream::connect_timeout(&refused, Duration::from_secs(60)).unwrap_err();
            }
            let connected = UdpSocket::bind("127.0.0.1:0").unwrap();
            connected.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            connected.connect(nobody).unwrap();
            connected.send(b"x").unwrap();
            let error = connected.recv(&mut [0]).unwrap_err();
            assert_eq!(Errno::of(&error), Some(Errno::ECONNREFUSED));
            UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"x", far).unwrap_err();
        };
        let own = Connect { process: Some(std::process::id()), ..Connect::default() };
        let Some(((), outcome)) = traced(test, &own, program) else { return };
        let calls = &outcome.results.calls.seen().unwrap().calls;
        let of = |address: SocketAddr| {
            let call = calls.iter().find(|call| call.address == Some(address.to_string()));
            let call = call.unwrap_or_else(|| panic!("{address}: {calls:#?}"));
            (call.errno.as_str(), call.failed, call.before_search)
        };
        assert_eq!(of(absent), ("EADDRNOTAVAIL", 5, true));
        assert_eq!(of(refused), ("ECONNREFUSED", 3, false));
        assert_eq!(of(nobody), ("ECONNREFUSED", 1, false));
        assert_eq!(of(far), ("ENETUNREACH", 1, false));
        // Other tests of this process fail as well; the sums have at least these.
        assert!(outcome.results.failed["EADDRNOTAVAIL"] >= 5 && outcome.results.failed["ECONNREFUSED"] >= 3);
    });
}

#[test]
fn failed_calls_of_each_kind_are_in_the_account() {
    named(|test| {
        if !Python::is_installed(test) {
            return;
        }
        let mut python = Python::start();
        python.run(
            "import errno\ntcp, udp = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
             def fails(call):\n  try: call()\n  except OSError as error: return {errno.EOPNOTSUPP: 'EOPNOTSUPP'}.get(error.errno, errno.errorcode[error.errno])\n\
             calls = {'socket': lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 17), 'listen': lambda: udp.listen(),\n  \
             'accept': lambda: tcp.accept(), 'recv': lambda: tcp.recv(1), 'send': lambda: tcp.send(b'x')}\n\
             def all(): return [f'{name} {fails(call)}' for _ in range(3) for name, call in calls.items()][:5]",
        );
        let trace = Connect { process: Some(python.pid()), ..Connect::default() };
        let Some((said, outcome)) = traced(test, &trace, || python.run("print(*all(), sep=',')")) else {
            return;
        };
        let calls = &outcome.results.calls.seen().unwrap().calls;
        let mut found: Vec<_> =
            calls.iter().map(|call| (format!("{} {}", call.call, call.errno), call.failed)).collect();
        let mut expected: Vec<_> = said.trim().split(',').map(|call| (call.to_owned(), 3)).collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
        assert_eq!(expected.len(), 5, "{said}");
    });
}

/// The kernel keeps 4,096 kinds of failures: what comes after them is not forgotten.
#[test]
fn failed_calls_beyond_the_table_are_counted() {
    named(|test| {
        if !Python::is_installed(test) {
            return;
        }
        let mut python = Python::start();
        python.run(
            "def bind(host):\n  one = socket.socket()\n  try: one.bind((f'192.0.{host // 250}.{host % 250 + 1}', 0))\n  except OSError: one.close()",
        );
        let trace = Connect { process: Some(python.pid()), ..Connect::default() };
        let binds = || python.run("for host in range(4200): bind(host)");
        let Some((_, outcome)) = traced(test, &trace, binds) else { return };
        let account = outcome.results.calls.seen().unwrap();
        let listed: u64 = account.calls.iter().map(|call| call.failed).sum();
        assert_eq!((listed, account.left_out), (4_096, 104), "{:?}", account.calls.last());
    });
}

/// The account has the calls of all protocols, and operations of io_uring without their address.
#[test]
fn failed_operations_of_io_uring_are_in_the_account() {
    named(|test| {
        let refusing: SocketAddr = "127.0.6.1:1".parse().unwrap();
        let mut ring = match Ring::new(Transport::Tcp, &[Endpoint::Inet(refusing)], 1, 64) {
            Ok(ring) => ring,
            Err(error) => return skip(test, "io_uring", &error.to_string()),
        };
        let mut work = || {
            for _ in 0..3 {
                ring.open(0, &OpenOptions::default(), b"").unwrap();
                let event = loop {
                    ring.wait(Duration::from_secs(1)).unwrap();
                    if let Some(event) = ring.event() {
                        break event;
                    }
                };
                assert_eq!(Errno::of(&event.result.unwrap_err()), Some(Errno::ECONNREFUSED));
                ring.close(0).unwrap();
            }
            UdpSocket::bind("192.0.2.1:0").unwrap_err();
        };
        let trace = Connect { process: Some(process::id()), ..Connect::default() };
        let Some(((), outcome)) = traced(test, &trace, &mut work) else { return };
        let namespace = fs::metadata("/proc/thread-self/ns/net").unwrap().ino() as u32;
        let calls = &outcome.results.calls.seen().unwrap().calls;
        let own = calls.iter().filter(|call| call.namespace == namespace);
        let own: Vec<_> = own
            .map(|call| (call.call.as_str(), call.errno.as_str(), call.address.as_deref(), call.failed))
            .collect();
        assert!(own.contains(&("bind", "EADDRNOTAVAIL", Some("192.0.2.1:0"), 1)), "{own:?}");
        if !own.contains(&("connect", "ECONNREFUSED", None, 3)) {
            // The tracepoint of 6.12 and earlier does not have the completion as an argument.
            assert_eq!(own.len(), 1, "{own:?}");
            skip(test, "io_uring_complete", "the tracepoint has other arguments");
        }
    });
}

fn udp(destination: SocketAddr) -> Connect {
    Connect { protocol: Protocol::Udp, ..to(destination) }
}

fn open(destination: SocketAddr) -> io::Result<OwnedFd> {
    let socket = socket::open(Transport::Udp, destination, false).unwrap();
    socket::connect(socket.as_fd(), destination).map(|_| socket)
}

fn refused(destination: SocketAddr) {
    let error = open(destination).unwrap_err();
    assert_eq!(Errno::of(&error), Some(Errno::EAGAIN), "{error}");
}

fn ports(sockets: &[OwnedFd]) -> Vec<u16> {
    sockets.iter().map(|socket| socket::local_address(socket.as_fd()).unwrap().port()).collect()
}

/// Takes every port, fails three times, then releases a port and connects again.
fn fill_udp(destination: SocketAddr) -> Vec<u16> {
    let mut sockets: Vec<OwnedFd> = (0..PORTS).map(|_| open(destination).unwrap()).collect();
    let mut known = ports(&sockets);
    (0..3).for_each(|_| refused(destination));
    // The port is free only if no process that is being started holds a copy of the socket.
    let last = undisturbed(|| {
        sockets.pop();
        open(destination).unwrap()
    });
    // A socket that has a port does not search.
    socket::connect(last.as_fd(), destination).unwrap();
    known.extend(ports(&[last]));
    known
}

fn udp_agrees(test: &str, destination: &str) {
    let searches = u64::from(PORTS) + 1;
    set_sysctl("net.ipv4.ip_local_port_range", &format!("20000 {}", 20_000 + PORTS - 1));
    let destination: SocketAddr = destination.parse().unwrap();
    let run = || traced(test, &udp(destination), || fill_udp(destination));
    let Some((known, outcome)) = until_none_missed(run) else { return };
    let results = outcome.results;
    assert_eq!(outcome.validity, [], "{results:?}");
    let tuple = tuple(&results, destination);
    let even = known.iter().filter(|&port| port % 2 == 0).count() as u64;
    assert_eq!((tuple.even, tuple.odd), (even, searches - even), "{tuple:?}");
    assert_eq!((results.searches, results.lost, results.tier.as_str()), (searches, 0, "cgroup+tp_btf"));
    assert_eq!((count(results.search_ns.even), count(results.search_ns.odd)), (even, searches - even));
    assert_eq!(results.histogram.iter().map(|step| step.even + step.odd).sum::<u64>(), searches);
    assert_eq!(results.heat.columns.iter().flatten().sum::<u64>(), searches);
    // UDP has no handshake.
    assert_eq!((results.handshake_ns, results.established), (None, 0));
    assert_eq!(results.failed.clone().into_iter().collect::<Vec<_>>(), [("EAGAIN".to_owned(), 3)]);
    assert_eq!((tuple.failed, tuple.no_port, tuple.retries), (3, 3, 3), "{tuple:?}");
    assert_eq!((results.given_port, tuple.given_port), (1, 1));
    assert!(!results.samples.is_empty());
    for sample in &results.samples {
        assert!(sample.source_port.is_some_and(|port| known.contains(&port)), "{sample:?}");
    }
}

#[test]
fn udp_over_ipv4_is_counted() {
    named(|test| udp_agrees(test, "127.0.0.1:53"));
}

#[test]
fn udp_in_another_namespace_is_not_counted() {
    named(|test| {
        let destination = SocketAddr::from(([127, 0, 0, 1], 54));
        let program = || {
            open(destination).unwrap();
            elsewhere(|| (0..5).for_each(|_| drop(open(destination).unwrap())));
            open(destination).unwrap();
        };
        for (network, number) in [(Some(own_network()), 2), (None, 7), (Some(1), 0)] {
            let trace = Connect { network, ..udp(destination) };
            let Some(((), outcome)) = until_none_missed(|| traced(test, &trace, program)) else { return };
            assert_eq!(outcome.results.searches, number, "{:?}", outcome.results);
        }
    });
}

#[test]
fn udp_over_ipv6_is_counted() {
    named(|test| udp_agrees(test, "[::1]:53"));
}

#[test]
fn a_search_without_an_end_counts_as_failed() {
    named(|test| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20001");
        let destination = SocketAddr::from(([127, 0, 0, 3], 53));
        let filled = || {
            let sockets = [open(destination).unwrap(), open(destination).unwrap()];
            refused(destination);
            ports(&sockets)
        };
        let run = || traced(test, &udp(destination), filled);
        let Some((mut known, outcome)) = until_none_missed(run) else { return };
        known.sort_unstable();
        assert_eq!(known, [20_000, 20_001]);
        let (results, tuple) = (&outcome.results, tuple(&outcome.results, destination));
        assert_eq!((tuple.even, tuple.odd, tuple.failed, tuple.no_port), (1, 1, 1, 0), "{tuple:?}");
        assert_eq!(results.failed.clone().into_iter().collect::<Vec<_>>(), [("unknown".to_owned(), 1)]);
    });
}
