//! Every blocking call of the library with one signal per millisecond, as from a sampling profiler: a dial, whose thread gets the signals, and
//! all other calls, while each thread of the process gets them. The handler is installed without SA_RESTART. The program is separate because
//! the signals reach all threads of its tests.
#![forbid(unsafe_code)]

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::capabilities;
use fourtuple::dial::{Connector, DialError, Dialer, Dialers, Sharing, Strategy, UdpDialer};
use fourtuple::listen::{
    AcceptPolicy, Acceptor, AsyncAcceptor, DrainReport, Endpoint, Family, ListenError, ListenerGroup,
    ListenerGroupBuilder, Recycle, Workers,
};
use fourtuple::spread::{ControlFilter, Selector, SlotRule, UdpGroup, UdpGroupError};
use fourtuple_syscalls::signals::{IntervalTimer, SignalStorm};
use fourtuple_syscalls::{option, socket};
use fourtuple_testing::accept_queue::{full_listener, listen_overflows};
use fourtuple_testing::{StopOnDrop, each_in_namespace, in_namespace, listener, set_sysctl, skip};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::{Builder, Runtime};

/// A timeout that only a failing test reaches.
const DEADLINE: Duration = Duration::from_secs(60);

fn storm() -> SignalStorm {
    SignalStorm::start(Duration::from_millis(1)).unwrap()
}

/// Repeats calls that do not wait until many signals were delivered meanwhile.
fn repeat(mut calls: impl FnMut()) {
    let before = IntervalTimer::signals();
    while IntervalTimer::signals() < before + 1000 {
        calls();
    }
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Returns the policies that this host can open over TCP.
fn policies(test: &str) -> Vec<AcceptPolicy> {
    let is_available = |policy: &AcceptPolicy| match at(*policy).open() {
        Ok(_) => true,
        Err(
            error @ (ListenError::NotBuilt { .. }
            | ListenError::NotPermitted { .. }
            | ListenError::Absent { .. }),
        ) => {
            skip(test, policy.facility().expect("a facility"), &error.to_string());
            false
        }
        Err(error) => panic!("{policy}: {error:?}"),
    };
    AcceptPolicy::ALL.into_iter().filter(is_available).collect()
}

fn at(policy: AcceptPolicy) -> ListenerGroupBuilder {
    ListenerGroupBuilder::at((Ipv4Addr::LOCALHOST, 0)).policy(policy).max_workers(4)
}

fn connect(group: &ListenerGroup) -> TcpStream {
    TcpStream::connect(group.endpoint().inet().unwrap()).unwrap()
}

/// Sends a byte and reads the answer. The timeout of a socket begins again after each signal.
fn ask(stream: &mut TcpStream) {
    stream.write_all(b"?").unwrap();
    let begun = Instant::now();
    loop {
        match stream.read(&mut [0]) {
            Ok(1) => return,
            Err(error) if error.kind() == ErrorKind::Interrupted && begun.elapsed() < DEADLINE => {}
            other => panic!("no answer: {other:?}"),
        }
    }
}

/// Answers each byte until the group is drained, and leaves.
fn work(mut acceptor: Acceptor) {
    while !acceptor.group().is_drained() {
        let Some(mut connection) = acceptor.next(None).unwrap() else { continue };
        let mut request = [0];
        match connection.read(&mut request) {
            Ok(1) => {
                connection.response_sent();
                connection.write_all(&request).unwrap();
                acceptor.keep(connection).unwrap();
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => acceptor.keep(connection).unwrap(),
            _ => {}
        }
    }
    acceptor.leave().unwrap();
}

/// Runs a worker, and the dispatcher if the policy has one, until `test` returns.
fn beside_worker(group: &ListenerGroup, test: impl FnOnce()) {
    let stop = &AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = StopOnDrop(stop);
        if group.policy() == AcceptPolicy::Dispatcher {
            let mut dispatcher = group.dispatcher().unwrap();
            scope.spawn(move || dispatcher.run(stop).unwrap());
        }
        let acceptor = group.join().unwrap();
        scope.spawn(|| work(acceptor));
        test();
    });
}

/// Ends groups that have an idle connection: one that stays open for longer than `end` waits, and one that its client closes meanwhile.
fn with_idle_connection(
    policy: AcceptPolicy,
    end: impl Fn(&ListenerGroup, Duration) -> Result<DrainReport, ListenError> + Sync,
) {
    const WAIT: Duration = Duration::from_millis(300);
    let signals_meanwhile = |closes: bool| {
        let group = at(policy).open().unwrap();
        let mut signals = 0;
        beside_worker(&group, || {
            let mut stream = connect(&group);
            ask(&mut stream);
            let before = IntervalTimer::signals();
            let report = thread::scope(|scope| {
                let ending = scope.spawn(|| end(&group, if closes { DEADLINE } else { WAIT }));
                if closes {
                    while IntervalTimer::signals() < before + 100 {
                        thread::sleep(Duration::from_millis(1));
                    }
                    drop(stream);
                }
                ending.join().unwrap().unwrap()
            });
            // A connection on its way from a worker to the dispatcher counts for both.
            let most = 1 + u64::from(policy == AcceptPolicy::Dispatcher);
            let expected = if closes { 0..=0 } else { 1..=most };
            assert!(expected.contains(&report.open), "{policy}: {report:?}");
            // `None`: the kernel could not list the handshakes.
            assert_eq!(report.handshakes, Some(0), "{policy}");
            assert!(closes || report.elapsed >= WAIT, "{policy}: {report:?}");
            signals = IntervalTimer::signals() - before;
        });
        signals
    };
    for closes in [false, true] {
        // The thread that sends the signals may wait for a CPU.
        assert!((0..20).any(|_| signals_meanwhile(closes) > 10), "{policy}: too few signals");
    }
}

#[test]
fn drain_and_hand_over_keep_their_deadlines_under_signals() {
    in_namespace(|| {
        let _storm = storm();
        each_in_namespace(policies("drain_and_hand_over_keep_their_deadlines_under_signals"), |policy| {
            with_idle_connection(policy, ListenerGroup::drain);
            with_idle_connection(policy, ListenerGroup::hand_over);
        });
    });
}

#[test]
fn a_runtime_accepts_drains_and_leaves_under_signals() {
    in_namespace(|| {
        let _storm = storm();
        each_in_namespace(policies("a_runtime_accepts_drains_and_leaves_under_signals"), |policy| {
            let group = at(policy).workers(Workers::Runtimes).open().unwrap();
            let stop = &AtomicBool::new(false);
            thread::scope(|scope| {
                let _stop = StopOnDrop(stop);
                if policy == AcceptPolicy::Dispatcher {
                    let mut dispatcher = group.dispatcher().unwrap();
                    scope.spawn(move || dispatcher.run(stop).unwrap());
                }
                let mut acceptor = AsyncAcceptor::new(group.join().unwrap()).unwrap();
                scope.spawn(move || {
                    runtime().block_on(async {
                        loop {
                            match acceptor.accept().await {
                                Ok(mut accepted) => {
                                    accepted.read_u8().await.unwrap();
                                    accepted.write_u8(1).await.unwrap();
                                    accepted.response_sent();
                                }
                                Err(ListenError::Drained) => break,
                                Err(error) => panic!("{policy}: {error}"),
                            }
                        }
                        acceptor.leave().await.unwrap();
                    });
                });
                for _ in 0..3 {
                    let before = IntervalTimer::signals();
                    while IntervalTimer::signals() < before + 100 {
                        thread::sleep(Duration::from_millis(1));
                    }
                    ask(&mut connect(&group));
                }
                let report = runtime().block_on(group.drain_tokio(DEADLINE)).unwrap();
                assert!(report.is_complete() && report.handshakes == Some(0), "{policy}: {report:?}");
            });
            assert_eq!(group.stats()[0].requests, 3, "{policy}");
        });
    });
}

#[test]
fn listener_groups_open_under_signals() {
    in_namespace(|| {
        let _storm = storm();
        let path = std::env::temp_dir().join(format!("fourtuple-storm-{}.sock", std::process::id()));
        for policy in policies("listener_groups_open_under_signals") {
            for family in
                Family::ALL.into_iter().filter(|family| policy.check(*family, Workers::Threads).is_ok())
            {
                repeat(|| {
                    let endpoint: Endpoint = match family {
                        Family::Unix => path.as_path().into(),
                        Family::Tcp4 => ([127, 0, 0, 1], 0).into(),
                        Family::Tcp6 => (Ipv6Addr::LOCALHOST, 0).into(),
                    };
                    let builder = ListenerGroupBuilder::at(endpoint).policy(policy).max_workers(4);
                    let group = builder.recycle(Recycle::Measured).open().unwrap();
                    let acceptors = [group.join().unwrap(), group.join().unwrap()];
                    if policy == AcceptPolicy::Dispatcher {
                        group.dispatcher().unwrap();
                    }
                    for acceptor in acceptors {
                        acceptor.leave().unwrap();
                    }
                });
            }
        }
        repeat(|| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            ListenerGroupBuilder::from_listeners([listener]).unwrap().open().unwrap().listeners().unwrap();
        });
    });
}

/// Returns the group, or counts a skipped test if this host has no BPF.
fn opened(result: Result<UdpGroup, UdpGroupError>) -> Option<UdpGroup> {
    match result {
        Ok(group) => Some(group),
        Err(error @ (UdpGroupError::NotPermitted { .. } | UdpGroupError::Absent { .. })) => {
            skip("udp_groups_open_and_change_under_signals", "bpf", &error.to_string());
            None
        }
        Err(UdpGroupError::NotBuilt { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn udp_groups_open_and_change_under_signals() {
    in_namespace(|| {
        let _storm = storm();
        let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let filter: ControlFilter = "ttl=255".parse().unwrap();
        for selector in Selector::ALL {
            repeat(|| {
                let Some(mut group) = opened(UdpGroup::open(address, 3, &selector)) else { return };
                group.connected().unwrap();
                if let Selector::Map(_) = selector {
                    group.steer(&[1, 2, 5]).unwrap();
                    group.choose(SlotRule::Hash).unwrap();
                    drop(group.leave(1).unwrap());
                    assert_eq!(group.join().unwrap(), 1);
                }
            });
        }
        for selector in [Selector::Random, Selector::Map(SlotRule::Random)] {
            repeat(|| {
                let group = opened(UdpGroup::open_with_control(address, 2, &selector, &filter));
                drop(group.map(|group| group.control().unwrap()));
            });
        }
    });
}

#[test]
fn dials_of_udp_and_of_a_runtime_work_under_signals() {
    in_namespace(|| {
        let _storm = storm();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        for sharing in [Sharing::Exclusive, Sharing::Shared] {
            let dialer = UdpDialer::new(udp.local_addr().unwrap(), None, sharing).unwrap();
            let dialer = dialer.sources("127.0.0.2,127.0.0.3".parse().unwrap()).unwrap();
            repeat(|| drop(dialer.dial().unwrap()));
            runtime().block_on(async {
                for _ in 0..20 {
                    dialer.dial_tokio().await.unwrap();
                }
            });
        }
        let (queue, address) = listener("127.0.0.1", 4096);
        let dialers = Dialers::new(4);
        let connector = Connector::builder().dialers(dialers.clone()).timeout(DEADLINE).build();
        let runtime = runtime();
        repeat(|| {
            runtime.block_on(async {
                // Each build lists the sockets, on a blocking thread.
                dialers.clear();
                let dialer = dialers.get(address).await.unwrap();
                drop(dialer.dial_tokio().await.unwrap());
                dialer.refresh().unwrap();
                drop(connector.connect("127.0.0.1", address.port()).await.unwrap());
            });
            // The queue of the listener never fills.
            while option::accept_queue(queue.as_fd()).unwrap() > 0 {
                drop(socket::accept(queue.as_fd()).unwrap());
            }
        });
    });
}

/// Accepts a connection, also while the threads of another test get signals.
fn accept(listener: &OwnedFd) -> OwnedFd {
    loop {
        match socket::accept(listener.as_fd()) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            accepted => return accepted.unwrap(),
        }
    }
}

/// Sends signals to the calling thread only.
fn timer() -> IntervalTimer {
    IntervalTimer::for_this_thread(Duration::from_millis(1)).unwrap()
}

#[test]
fn a_dial_keeps_its_timeout_under_signals() {
    in_namespace(|| {
        let (_listener, destination, _queued) = full_listener("127.0.0.1");
        let timeout = Duration::from_millis(300);
        let dialer = Dialer::builder(destination).timeout(timeout).build().unwrap();
        let (before, _storm) = (IntervalTimer::signals(), timer());
        loop {
            match dialer.dial().unwrap_err() {
                DialError::TimedOut { after, .. } => assert!(after >= timeout, "{after:?}"),
                other => panic!("{other:?}"),
            }
            // A thread that waits for a CPU gets several signals as one.
            if IntervalTimer::signals() > before + 10 {
                break;
            }
        }
    });
}

#[test]
fn a_dial_that_waits_for_its_handshake_succeeds_under_signals() {
    in_namespace(|| {
        for timeout in [None, Some(Duration::from_secs(60))] {
            let (socket, destination, _queued) = full_listener("127.0.0.1");
            let before = listen_overflows();
            let mut builder = Dialer::builder(destination);
            if let Some(timeout) = timeout {
                builder = builder.timeout(timeout);
            }
            let dialer = builder.build().unwrap();
            // Accepts a connection after the kernel has dropped the SYN of the dial, which then waits for the retransmit of its SYN, after a
            // second.
            let accepts = thread::spawn(move || {
                while listen_overflows() == before {
                    thread::sleep(Duration::from_millis(1));
                }
                [(); 2].map(|()| accept(&socket))
            });
            let _storm = timer();
            dialer.dial().unwrap();
            accepts.join().unwrap();
        }
    });
}

#[test]
fn other_calls_of_a_dial_work_under_signals() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20999");
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let _storm = timer();
        capabilities::probe().unwrap();
        for strategy in [Strategy::Auto, Strategy::KernelDefault, Strategy::SELECT_TEST_REPEAT] {
            let dialer = Dialer::builder(destination).strategy(strategy).build().unwrap();
            let mut held = Vec::new();
            let error = loop {
                match dialer.dial() {
                    Ok((stream, _)) => {
                        option::set_reset_on_close(stream.as_fd()).unwrap();
                        held.push(stream);
                    }
                    Err(error) => break error,
                }
            };
            assert!(matches!(error, DialError::PortsExhausted { census: Ok(_), .. }), "{error:?}");
            // Repeated dumps of a thousand sockets.
            for _ in 0..50 {
                dialer.refresh().unwrap();
            }
        }
        for sharing in [Sharing::Exclusive, Sharing::Shared] {
            let dialer = UdpDialer::new(server.local_addr().unwrap(), None, sharing).unwrap();
            let _held: Vec<_> = (0..100).map(|_| dialer.dial().unwrap()).collect();
        }
    });
}

/// Prints the number of dials with and without signals, in blocks of four seconds: without, with, with, without.
#[test]
#[ignore = "a measurement: cargo test --release -p fourtuple --test signals -- --ignored --nocapture"]
fn dials_under_signals_are_counted() {
    in_namespace(|| {
        let (queue, destination) = listener("127.0.0.1", 64);
        let dialer = Dialer::builder(destination).build().unwrap();
        let before = IntervalTimer::signals();
        let (mut dials, mut failed, mut ratios) = ([0_u32; 2], 0_u32, Vec::new());
        for _ in 0..5 {
            let mut block = [0_u32; 2];
            for with_signals in [false, true, true, false] {
                let (signals, begun) = (with_signals.then(timer), Instant::now());
                while begun.elapsed() < Duration::from_secs(1) {
                    match dialer.dial() {
                        Ok((stream, _)) => option::set_reset_on_close(stream.as_fd()).unwrap(),
                        Err(error) => {
                            eprintln!("{error}");
                            failed += 1;
                        }
                    }
                    while option::accept_queue(queue.as_fd()).unwrap() > 0 {
                        drop(socket::accept(queue.as_fd()));
                    }
                    block[usize::from(with_signals)] += 1;
                }
                drop(signals);
            }
            ratios.push(f64::from(block[1]) / f64::from(block[0]));
            dials = [0, 1].map(|index| dials[index] + block[index]);
        }
        ratios.sort_by(f64::total_cmp);
        let ([without, with], signals) = (dials, IntervalTimer::signals() - before);
        eprintln!(
            "{with} dials in 10 s with {signals} signals, {without} dials in 10 s without, {failed} failed; \
             ratio per block {:.2} ({:.2} to {:.2})",
            ratios[2], ratios[0], ratios[4]
        );
        assert!(failed == 0 && signals > 0);
    });
}
