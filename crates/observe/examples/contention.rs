//! Causes contention of TCP's locks for `fourtuple trace locks` or `perf lock contention`, and shows its remedy.
//!
//! `cargo run --release -p fourtuple-observe --example contention -- [shared|own] [SECONDS]`
//!
//! Eight threads connect over loopback and eight accept, in a new network namespace. With `shared` all threads use one listener and
//! one port range; with `own` each has its own listener (SO_REUSEPORT) and its own range (IP_LOCAL_PORT_RANGE). The program prints
//! the number of connections at the end. The threads are named `contention`.

use std::env;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple_syscalls::option::Answer;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{netns, option, socket};
use fourtuple_testing::set_sysctl;

const THREADS: u16 = 8;
const PORT: u16 = 9_000;
const FIRST: u16 = 10_000;
const PORTS: u16 = 6_000;

fn main() {
    let words: Vec<String> = env::args().skip(1).collect();
    let own = match words.first().map(String::as_str) {
        None | Some("shared") => false,
        Some("own") => true,
        Some(other) => panic!("{other:?} is neither shared nor own"),
    };
    let seconds = words.get(1).map_or(3, |word| word.parse().expect("a number of seconds"));
    netns::enter_new().expect("a network namespace, which takes root");
    set_sysctl("net.ipv4.ip_local_port_range", &format!("{FIRST} {}", FIRST + THREADS * PORTS - 1));
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
    let listeners: Vec<OwnedFd> = (0..if own { THREADS } else { 1 }).map(|_| listen(address, own)).collect();
    let (over, reached) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for at in 0..THREADS {
            let listener = &listeners[usize::from(at) % listeners.len()];
            let (over, reached) = (&over, &reached);
            let named = || thread::Builder::new().name("contention".to_owned());
            let accept = move || {
                while !over.load(Ordering::Relaxed) {
                    // accept() fails with EAGAIN if no connection arrived.
                    drop(socket::accept(listener.as_fd()));
                }
            };
            named().spawn_scoped(scope, accept).expect("a thread");
            let connect = move || {
                while !over.load(Ordering::Relaxed) {
                    let client = socket::open(Transport::Tcp, address, true).expect("a socket");
                    // A RST leaves no TIME_WAIT socket.
                    option::set_reset_on_close(client.as_fd()).expect("SO_LINGER");
                    if own {
                        let low = FIRST + at * PORTS;
                        let answer = option::set_local_port_range(client.as_fd(), low, low + PORTS - 1);
                        assert_eq!(
                            answer.expect("IP_LOCAL_PORT_RANGE"),
                            Answer::Done,
                            "this kernel has no IP_LOCAL_PORT_RANGE"
                        );
                    }
                    let _ = socket::connect(client.as_fd(), address);
                    let connected = socket::wait_connected(client.as_fd(), Some(Duration::from_millis(50)));
                    reached.fetch_add(u64::from(connected.is_ok()), Ordering::Relaxed);
                }
            };
            named().spawn_scoped(scope, connect).expect("a thread");
        }
        thread::sleep(Duration::from_secs(seconds));
        over.store(true, Ordering::Relaxed);
    });
    println!("{} connections in {seconds} s", reached.load(Ordering::Relaxed));
}

fn listen(address: SocketAddr, group: bool) -> OwnedFd {
    let listener = socket::open(Transport::Tcp, address, false).expect("a socket");
    if group {
        let answer = option::set_reuse_port(listener.as_fd()).expect("SO_REUSEPORT");
        assert_eq!(answer, Answer::Done);
    }
    // The accepting thread checks the end of the run this often.
    option::set_receive_timeout(listener.as_fd(), Duration::from_millis(20)).expect("SO_RCVTIMEO");
    socket::bind(listener.as_fd(), address).expect("its port");
    socket::listen(listener.as_fd(), 4096).expect("a listening socket");
    listener
}
