//! A dial allocates no memory, with any strategy and any result: the allocator of this program counts. Child processes draw other ports than
//! each other. The binary has no other tests, and these run in turn: until exec() a child has copies of the sockets of all tests, which then
//! stay open.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple::dial::{DialError, Dialer, Retry, SourcePool, Strategy};
use fourtuple_syscalls::option;
use fourtuple_syscalls::resource::{CountingAllocator, allocations};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::{in_namespace, listener, set_sysctl};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Held by the test that runs.
static ALONE: Mutex<()> = Mutex::new(());

const DIALS: u64 = 50;

/// Counts the allocations of this thread while `act` runs. A thread's one-time allocations happen before.
fn allocations_of(mut act: impl FnMut()) -> u64 {
    act();
    let before = allocations();
    for _ in 0..DIALS {
        act();
    }
    allocations() - before
}

#[test]
fn a_dial_allocates_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    in_namespace(|| {
        assert!(allocations_of(|| drop(std::hint::black_box(Box::new(1)))) >= DIALS, "the count counts");
        // Slightly fewer ports than each strategy dials, so that the ledger is cleared and windows become full.
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20099");
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let has_option = capabilities::probe().unwrap().local_port_range != LocalPortRange::Absent;
        let mut strategies = vec![Strategy::KernelDefault, Strategy::SELECT_TEST_REPEAT, Strategy::Auto];
        if has_option {
            strategies.extend([Strategy::FullRange, "random-window:10".parse().unwrap()]);
        }
        let pools = ["", "127.0.0.2", "127.0.0.3,127.0.0.4,127.0.0.5"];
        for strategy in strategies {
            for (host, pool) in pools.iter().enumerate() {
                for timeout in [None, Some(Duration::from_secs(60))] {
                    let (_listener, destination) = listener(&format!("127.0.1.{}", host + 1), 4096);
                    dials_allocate_nothing(destination, strategy, pool, timeout);
                }
            }
        }
        a_prepared_socket_allocates_nothing(destination);
        failures_allocate_nothing();
    });
}

fn dials_allocate_nothing(
    destination: SocketAddr,
    strategy: Strategy,
    pool: &str,
    timeout: Option<Duration>,
) {
    let mut builder = Dialer::builder(destination).strategy(strategy);
    if !pool.is_empty() {
        builder = builder.sources(pool.parse().unwrap());
    }
    if let Some(timeout) = timeout {
        builder = builder.timeout(timeout);
    }
    let dialer = builder.build().unwrap();
    let mut held = Vec::with_capacity(DIALS as usize + 1);
    let mut released = false;
    let count = allocations_of(|| {
        let (stream, report) = dialer.dial().unwrap();
        // Every second port is returned, so that the ledger is written both ways.
        if released {
            dialer.release(report.source);
        }
        released = !released;
        held.push(stream);
    });
    assert_eq!(count, 0, "{strategy} from {pool:?}, timeout {timeout:?}: in {DIALS} dials");
    // The next dialer needs these ports, which are free at once after a reset.
    held.iter().for_each(|stream| option::set_reset_on_close(stream.as_fd()).unwrap());
}

fn a_prepared_socket_allocates_nothing(destination: SocketAddr) {
    let dialer = Dialer::builder(destination).sources(SourcePool::any()).build().unwrap();
    let mut held = Vec::with_capacity(DIALS as usize + 1);
    let count = allocations_of(|| {
        let mut socket = socket::open(Transport::Tcp, destination, false).unwrap();
        let mut attempt = dialer.prepare(socket.as_fd()).unwrap();
        // Before Linux 6.8 a window may be full although the range is not.
        while let Err(error) = socket::connect(socket.as_fd(), destination) {
            if attempt.connect_failed(error).unwrap() == Retry::FreshSocket {
                socket = socket::open(Transport::Tcp, destination, false).unwrap();
            }
            attempt.prepare(socket.as_fd()).unwrap();
        }
        attempt.finish(socket.as_fd()).unwrap();
        held.push(socket);
    });
    assert_eq!(count, 0, "prepare and finish");
}

/// Checks failed dials too, because a crawler has as many failures as connections.
fn failures_allocate_nothing() {
    let refusing: SocketAddr = "127.0.0.1:4999".parse().unwrap();
    let dialer = Dialer::builder(refusing).build().unwrap();
    let count = allocations_of(|| assert!(matches!(dialer.dial(), Err(DialError::Refused { .. }))));
    assert_eq!(count, 0, "refused connections");
    let (_listener, destination) = listener("127.0.0.9", 4096);
    let dialer = Dialer::builder(destination).without_census().build().unwrap();
    let _held: Vec<_> = std::iter::from_fn(|| dialer.dial().ok()).collect();
    let exhausted = || assert!(matches!(dialer.dial(), Err(DialError::PortsExhausted { .. })));
    assert_eq!(allocations_of(exhausted), 0, "no port left");
}

#[test]
fn trap_11_a_child_process_draws_other_ports() {
    // The child process runs this test again and only prints the ports that it draws.
    const CHILD: &str = "FOURTUPLE_TEST_DRAWS";
    if std::env::var_os(CHILD).is_some() {
        let dialer = |port: u16| {
            let destination = SocketAddr::from(([127, 0, 0, 1], port));
            Dialer::builder(destination).strategy(Strategy::SELECT_TEST_REPEAT).build().unwrap()
        };
        let (_listener, destination) = listener("127.0.0.1", 64);
        let drawn: Vec<u16> =
            (0..8).map(|_| dialer(destination.port()).dial().unwrap().1.source.port()).collect();
        println!("drawn {drawn:?}");
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    in_namespace(|| {
        let draw = || {
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "trap_11_a_child_process_draws_other_ports", "--nocapture"])
                .env(CHILD, "1")
                .output()
                .unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            text.lines().find(|line| line.starts_with("drawn")).expect(&text).to_owned()
        };
        let draws: HashSet<String> = (0..4).map(|_| draw()).collect();
        assert_eq!(draws.len(), 4, "children that draw alike collide on every port: {draws:?}");
    });
}
