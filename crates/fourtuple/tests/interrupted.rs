//! Every blocking call of a dial with one signal per millisecond, as from a sampling profiler.

use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::capabilities;
use fourtuple::dial::{DialError, Dialer, Sharing, Strategy, UdpDialer};
use fourtuple_syscalls::interval_timer::IntervalTimer;
use fourtuple_syscalls::{option, socket};
use fourtuple_testing::accept_queue::{full_listener, listen_overflows};
use fourtuple_testing::{in_namespace, listener, set_sysctl};

fn storm() -> IntervalTimer {
    IntervalTimer::for_this_thread(Duration::from_millis(1)).unwrap()
}

#[test]
fn a_dial_keeps_its_timeout_under_signals() {
    in_namespace(|| {
        let (_listener, destination, _queued) = full_listener("127.0.0.1");
        let timeout = Duration::from_millis(300);
        let dialer = Dialer::builder(destination).timeout(timeout).build().unwrap();
        let (before, _storm) = (IntervalTimer::signals(), storm());
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
                [(); 2].map(|()| socket::accept(socket.as_fd()).unwrap())
            });
            let _storm = storm();
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
        let _storm = storm();
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
#[ignore = "a measurement: cargo test --release -p fourtuple --test interrupted -- --ignored --nocapture"]
fn dials_under_signals_are_counted() {
    in_namespace(|| {
        let (queue, destination) = listener("127.0.0.1", 64);
        let dialer = Dialer::builder(destination).build().unwrap();
        let before = IntervalTimer::signals();
        let (mut dials, mut failed, mut ratios) = ([0_u32; 2], 0_u32, Vec::new());
        for _ in 0..5 {
            let mut block = [0_u32; 2];
            for with_signals in [false, true, true, false] {
                let (timer, begun) = (with_signals.then(storm), Instant::now());
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
                drop(timer);
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
