//! A system without threads for a tokio runtime (RLIMIT_NPROC, pids.max): errors instead of panics, and no work that runs later.

use std::future::Future;
use std::io;
use std::thread;
use std::time::Duration;

use fourtuple::dial::{
    BuildError, ConnectError, Connector, DialError, Dialer, Sharing, Strategy, UdpDialer, Uncounted,
};
use fourtuple::listen::{AcceptPolicy, ListenError, ListenerGroupBuilder};
use fourtuple_syscalls::Errno;
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_testing::{in_namespace, listener, set_sysctl};
use tokio::runtime::{Builder, Runtime};
use tokio::task;

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Waits for the future on a thread that cannot start threads.
fn without_threads<T: Send>(runtime: &Runtime, future: impl Future<Output = T> + Send) -> T {
    let refused = || {
        seccomp::refuse(Facility::Threads).unwrap();
        runtime.block_on(future)
    };
    thread::scope(|scope| scope.spawn(refused).join().unwrap())
}

fn assert_no_thread(call: &str, error: &io::Error) {
    assert_eq!((call, Errno::of(error)), ("spawn_blocking", Some(Errno::EAGAIN)));
}

#[test]
fn a_long_search_fails_with_eagain() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 64);
        let dialer = Dialer::to(destination).strategy(Strategy::KernelDefault).build().unwrap();
        let error = without_threads(&runtime(), dialer.dial_tokio()).unwrap_err();
        assert!(error.is_retryable());
        let DialError::Call { call, error, .. } = error else { panic!("{error:?}") };
        assert_no_thread(call, &error);
    });
}

#[test]
fn exhaustion_is_reported_without_a_census() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 64);
        // Binds to free ports on the thread of the runtime.
        let dialer = Dialer::to(destination).strategy(Strategy::SELECT_TEST_REPEAT).build().unwrap();
        let _held: Vec<_> = (0..8).map(|_| dialer.dial().unwrap()).collect();
        let error = without_threads(&runtime(), dialer.dial_tokio()).unwrap_err();
        let DialError::PortsExhausted { census: Err(Uncounted::Unseen(unseen)), .. } = error else {
            panic!("{error:?}")
        };
        assert_no_thread(unseen.call, &Errno::new(unseen.errno).into());
    });
}

#[test]
fn builds_udp_dials_and_names_fail_with_eagain() {
    in_namespace(|| {
        let destination = "127.0.0.1:4000".parse().unwrap();
        let error = without_threads(&runtime(), Dialer::to(destination).build_tokio()).unwrap_err();
        assert!(error.is_retryable());
        let BuildError::Probe(error) = error else { panic!("{error:?}") };
        assert_no_thread(error.call, &error.error);
        let dialer = UdpDialer::new(destination, None, Sharing::Exclusive).unwrap();
        let error = without_threads(&runtime(), dialer.dial_tokio()).unwrap_err();
        let DialError::Call { call, error, .. } = error else { panic!("{error:?}") };
        assert_no_thread(call, &error);
        let connector = Connector::builder().build();
        let error = without_threads(&runtime(), connector.connect("localhost", 4000)).unwrap_err();
        let ConnectError::Resolve { error, .. } = error else { panic!("{error:?}") };
        assert_eq!(Errno::of(&error), Some(Errno::EAGAIN));
    });
}

/// The runtime queues the work before it panics.
#[test]
fn a_failed_drain_does_not_begin_later() {
    in_namespace(|| {
        let group =
            ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).policy(AcceptPolicy::Exclusive).open().unwrap();
        let runtime = runtime();
        let error = without_threads(&runtime, group.drain_tokio(Duration::ZERO)).unwrap_err();
        assert!(matches!(error, ListenError::Call { call: "spawn_blocking()", .. }), "{error:?}");
        // This thread can start threads, and the runtime runs its queue in order.
        runtime.block_on(async { task::spawn_blocking(|| ()).await.unwrap() });
        assert!(!group.is_drained());
        runtime.block_on(group.drain_tokio(Duration::ZERO)).unwrap();
        assert!(group.is_drained());
    });
}
