//! Listeners of another process, and the options of listeners.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::listen::{AcceptPolicy, Family, ListenError, ListenerGroupBuilder, Workers};
use fourtuple_syscalls::{child, option};
use fourtuple_testing::{StopOnDrop, in_namespace};

use crate::policies::is_available;
use crate::processes::beside;
use crate::{Opened, Worker, ask, connect, endpoint, open, serve, try_ask};

const DEADLINE: Duration = Duration::from_secs(60);

/// Returns every policy that takes listeners of another process and that this host permits.
fn adopting(test: &'static str) -> impl Iterator<Item = AcceptPolicy> {
    let opens_its_own = |policy: &AcceptPolicy| *policy == AcceptPolicy::ReuseportLeastBusy;
    AcceptPolicy::ALL.into_iter().filter(move |policy| !opens_its_own(policy) && is_available(*policy, test))
}

fn listener() -> TcpListener {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()
}

fn refusal(builder: Result<ListenerGroupBuilder, ListenError>) -> String {
    let error = builder.and_then(ListenerGroupBuilder::open).unwrap_err();
    assert!(matches!(error, ListenError::Adopted { .. }) && error.is_usage(), "{error}");
    error.to_string()
}

#[test]
fn given_listeners_serve_with_every_shared_policy() {
    in_namespace(|| {
        let is_shared = |policy: &AcceptPolicy| !policy.has_listener_each();
        for policy in adopting("given_listeners_serve_with_every_shared_policy").filter(is_shared) {
            let builder = ListenerGroupBuilder::from_listeners([listener()]).unwrap();
            let group = Opened::from(builder.policy(policy).open().unwrap());
            let worker = Worker::start(&group);
            assert_eq!(ask(&mut *connect(&group), 0), (0, 1), "{policy}");
            worker.stop();
        }
        let family = endpoint(Family::Unix);
        let fourtuple::listen::Endpoint::Unix(path) = &family else { unreachable!("a path") };
        let group = ListenerGroupBuilder::from_listeners([UnixListener::bind(path).unwrap()]).unwrap();
        let group = group.open().unwrap();
        assert_eq!(group.endpoint(), &family);
        drop(group);
        assert!(path.exists(), "the path belongs to the other process");
        std::fs::remove_file(path).unwrap();
    });
}

#[test]
fn reuseport_takes_a_listener_for_each_worker() {
    in_namespace(|| {
        let first = ListenerGroupBuilder::at((Ipv4Addr::LOCALHOST, 0)).policy(AcceptPolicy::Reuseport);
        let first = first.open().unwrap();
        let workers = Worker::start_many(&first, 2);
        let listeners = first.listeners().unwrap();
        assert_eq!(listeners.len(), 2);
        let second = ListenerGroupBuilder::from_listeners(listeners).unwrap();
        let second = second.policy(AcceptPolicy::Reuseport).open().unwrap();
        assert_eq!(second.endpoint(), first.endpoint());
        workers.into_iter().for_each(Worker::stop);
        drop(first);
        let workers = Worker::start_many(&second, 3);
        for _ in 0..20 {
            ask(&mut *connect(&second), 0);
        }
        workers.into_iter().for_each(Worker::stop);
    });
}

#[test]
fn listeners_that_form_no_group_are_refused() {
    in_namespace(|| {
        let several = ListenerGroupBuilder::from_listeners;
        assert!(refusal(several(Vec::<OwnedFd>::new())).contains("there is none"));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(refusal(several(vec![OwnedFd::from(file)])).contains("not a socket"));
        let (first, second) = (listener(), listener());
        let stream = TcpStream::connect(first.local_addr().unwrap()).unwrap();
        assert!(refusal(several(vec![stream.into()])).contains("does not listen"));
        let both = || vec![OwnedFd::from(first.try_clone().unwrap()), OwnedFd::from(second)];
        assert!(refusal(several(both())).contains("different addresses"));
        let twice =
            vec![OwnedFd::from(first.try_clone().unwrap()), OwnedFd::from(first.try_clone().unwrap())];
        assert!(refusal(several(twice)).contains("takes one listener"));
        let without = several(vec![OwnedFd::from(first)]).unwrap().policy(AcceptPolicy::Reuseport);
        assert!(refusal(Ok(without)).contains("with SO_REUSEPORT"));
    });
}

/// Two groups on one listener stand for two processes. Clients keep a connection for two requests.
#[test]
fn a_takeover_loses_no_request() {
    in_namespace(|| {
        let test = "a_takeover_loses_no_request";
        let families = |policy| [Family::Tcp4, Family::Unix].map(|family| (policy, family));
        let is_possible =
            |&(policy, family): &(AcceptPolicy, Family)| policy.check(family, Workers::Threads).is_ok();
        for (policy, family) in adopting(test).flat_map(families).filter(is_possible) {
            let old = open(policy, family);
            let workers = Worker::start_many(&old, 3);
            let stop = AtomicBool::new(false);
            let answered: [AtomicU32; 4] = Default::default();
            thread::scope(|scope| {
                let stopping = StopOnDrop(&stop);
                let clients = answered.each_ref().map(|answered| {
                    scope.spawn(|| {
                        while !stop.load(Ordering::Acquire) {
                            let mut stream = connect(&old);
                            ask(&mut *stream, 50);
                            // The old group closes the connection after the response when it hands over.
                            let _closed = try_ask(&mut *stream, 50);
                            answered.fetch_add(1, Ordering::AcqRel);
                        }
                    })
                });
                // Waits until each client has used another connection.
                let next_connections = || {
                    let begun = Instant::now();
                    for answered in &answered {
                        let before = answered.load(Ordering::Acquire);
                        while answered.load(Ordering::Acquire) < before + 2 {
                            assert!(begun.elapsed() < DEADLINE, "{policy}: a client gets no answer");
                            thread::sleep(Duration::from_millis(1));
                        }
                    }
                };
                next_connections();
                let new = ListenerGroupBuilder::from_listeners(old.listeners().unwrap()).unwrap();
                let new = Opened::from(new.policy(policy).open().unwrap());
                let successors = Worker::start_many(&new, 3);
                let report = old.hand_over(DEADLINE).unwrap();
                assert!(report.is_complete(), "{policy}: {report:?}");
                let accepts = |group: &fourtuple::listen::ListenerGroup| {
                    group.stats().iter().map(|seat| seat.accepts).sum::<u64>()
                };
                let before = accepts(&old);
                workers.into_iter().for_each(Worker::stop);
                next_connections();
                drop(stopping);
                // The last requests need the workers too.
                clients.into_iter().for_each(|client| client.join().unwrap());
                assert_eq!(accepts(&old), before, "{policy}: a group that has handed over accepts nothing");
                assert!(accepts(&new) > 0, "{policy}");
                successors.into_iter().for_each(Worker::stop);
            });
            let endpoint = old.endpoint().clone();
            drop(old);
            if let fourtuple::listen::Endpoint::Unix(path) = endpoint {
                assert!(path.exists(), "{policy}: the path belongs to the new process");
                std::fs::remove_file(path).unwrap();
            }
        }
    });
}

fn voluntary_switches() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let number = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    number.expect("procfs").trim().parse().unwrap()
}

/// The new group sets O_NONBLOCK on the listener of both.
#[test]
fn blocking_waits_beside_another_policy() {
    in_namespace(|| {
        let old = open(AcceptPolicy::Blocking, Family::Tcp4);
        let mut acceptor = old.join().unwrap();
        let new = ListenerGroupBuilder::from_listeners(old.listeners().unwrap()).unwrap();
        let new = new.policy(AcceptPolicy::Exclusive).open().unwrap();
        // A worker that does not wait has no voluntary context switches; this one waits for at most 50 ms at a time, on a busy machine perhaps
        // only once in a second.
        let before = voluntary_switches();
        let waits = (0..10).any(|_| {
            assert!(acceptor.next(Some(Duration::from_secs(1))).unwrap().is_none());
            voluntary_switches() - before >= 3
        });
        assert!(waits, "{} context switches", voluntary_switches() - before);
        drop(new);
    });
}

/// The worker of the old group stops while connections are queued. The new group answers all but at most one of them.
#[test]
fn hand_over_leaves_the_accept_queue() {
    const QUEUED: u64 = 20;
    in_namespace(|| {
        // The dispatcher accepts before a worker is idle.
        let has_queue = |policy: &AcceptPolicy| *policy != AcceptPolicy::Dispatcher;
        for policy in adopting("hand_over_leaves_the_accept_queue").filter(has_queue) {
            let old = open(policy, Family::Tcp4);
            let mut acceptor = old.join().unwrap();
            let mut first = connect(&old);
            first.write_all(b"x").unwrap();
            let served = acceptor.next(Some(DEADLINE)).unwrap().unwrap();
            let mut queued: Vec<_> = (0..QUEUED).map(|_| connect(&old)).collect();
            queued.iter_mut().for_each(|stream| stream.write_all(&0_u32.to_ne_bytes()).unwrap());
            let new = ListenerGroupBuilder::from_listeners(old.listeners().unwrap()).unwrap();
            let new = new.policy(policy).open().unwrap();
            thread::scope(|scope| {
                let hand_over = scope.spawn(|| old.hand_over(DEADLINE).unwrap());
                while !served.should_close() {
                    thread::yield_now();
                }
                drop(served);
                while let Some(connection) = acceptor.next(None).unwrap() {
                    serve(&mut acceptor, connection);
                }
                let report = hand_over.join().unwrap();
                assert!(report.is_complete() && report.accepted <= 1, "{policy}: {report:?}");
            });
            let worker = Worker::start(&new);
            // Each closes its connection: a worker with `blocking` serves one at a time.
            for mut stream in queued {
                stream.read_exact(&mut [0; 8]).unwrap();
            }
            assert!(new.stats()[0].accepts >= QUEUED - 1, "{policy}");
            worker.stop();
        }
    });
}

/// Starts the example `activated` on a listener, and waits until its workers have joined.
pub(crate) fn activate(path: &Path, listener: &TcpListener, policy: AcceptPolicy) -> Child {
    // A worker without a listener of its own would open one, which the next process does not get.
    let workers = if policy.has_listener_each() { "1" } else { "3" };
    let mut command = Command::new("sh");
    command
        .args(["-c", "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" \"$@\" 3<&0 </dev/null"])
        .args([path.as_os_str(), policy.name().as_ref(), workers.as_ref()])
        .stdin(Stdio::from(OwnedFd::from(listener.try_clone().unwrap())))
        .stdout(Stdio::piped());
    child::end_with_this_thread(&mut command);
    let mut server = command.spawn().unwrap();
    let mut ready = [0; 6];
    server.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    assert_eq!(&ready, b"ready\n", "{policy}");
    server
}

/// Sends a request to the example `activated`.
fn ask_activated(stream: &mut TcpStream) -> std::io::Result<()> {
    let mut answer = [0; 7];
    stream.write_all(b"?")?;
    stream.read_exact(&mut answer)?;
    assert_eq!(&answer, b"answer\n");
    Ok(())
}

fn connect_to(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

/// The service manager keeps the listener, and a new process takes over from the old one while clients connect.
#[test]
fn a_takeover_between_processes_loses_no_request() {
    in_namespace(|| {
        let test = "a_takeover_between_processes_loses_no_request";
        let Some(path) = beside(test, "activated") else { return };
        for policy in adopting(test) {
            let listener = listener();
            assert_eq!(option::set_reuse_port(listener.as_fd()).unwrap(), option::Answer::Done);
            let address = listener.local_addr().unwrap();
            let old = activate(&path, &listener, policy);
            let stop = AtomicBool::new(false);
            let mut new = thread::scope(|scope| {
                let _stopping = StopOnDrop(&stop);
                for _ in 0..4 {
                    scope.spawn(|| {
                        while !stop.load(Ordering::Acquire) {
                            let mut stream = connect_to(address);
                            ask_activated(&mut stream)
                                .expect("the first request of a connection is answered");
                            // The old process closes the connection after a response when it hands over.
                            let _closed = ask_activated(&mut stream);
                        }
                    });
                }
                let new = activate(&path, &listener, policy);
                child::terminate(old.id()).unwrap();
                let output = old.wait_with_output().unwrap();
                let said = String::from_utf8_lossy(&output.stdout).into_owned();
                assert!(output.status.success() && said.contains("open: 0"), "{policy}: {output:?}");
                new
            });
            ask_activated(&mut connect_to(address)).expect("the new process serves");
            new.kill().unwrap();
            new.wait().unwrap();
        }
    });
}

#[test]
fn options_are_set_on_every_listener() {
    const TCP: i32 = 6;
    const IPV6: i32 = 41;
    const TCP_DEFER_ACCEPT: i32 = 9;
    const TCP_FASTOPEN: i32 = 23;
    const IPV6_V6ONLY: i32 = 26;
    in_namespace(|| {
        for policy in [AcceptPolicy::SharedOneshot, AcceptPolicy::Reuseport] {
            let group = ListenerGroupBuilder::at((Ipv6Addr::UNSPECIFIED, 0))
                .policy(policy)
                .defer_accept(Duration::from_millis(900))
                .fast_open(7)
                .ipv6_only(true)
                .open()
                .unwrap();
            let workers = Worker::start_many(&group, 2);
            for listener in group.listeners().unwrap() {
                let option = |level, name| option::get_int(listener.as_fd(), level, name).unwrap();
                assert!(option(TCP, TCP_DEFER_ACCEPT) >= 1, "{policy}");
                assert_eq!((option(TCP, TCP_FASTOPEN), option(IPV6, IPV6_V6ONLY)), (7, 1), "{policy}");
            }
            let port = group.endpoint().inet().unwrap().port();
            assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err(), "IPv6 only");
            assert!(TcpStream::connect((Ipv6Addr::LOCALHOST, port)).is_ok());
            workers.into_iter().for_each(Worker::stop);
        }
    });
}

/// The service manager opens one listener, and three workers join.
#[test]
fn further_listeners_have_the_options_of_the_adopted_one() {
    in_namespace(|| {
        let first = ListenerGroupBuilder::at((Ipv6Addr::UNSPECIFIED, 0)).policy(AcceptPolicy::Reuseport);
        let first = first.ipv6_only(true).fast_open(7).defer_accept(Duration::from_secs(3)).backlog(9);
        let first = first.open().unwrap();
        let acceptor = first.join().unwrap();
        let group = ListenerGroupBuilder::from_listeners(first.listeners().unwrap()).unwrap();
        let group = group.policy(AcceptPolicy::Reuseport).open().unwrap();
        drop((acceptor, first));
        assert_eq!(group.backlog(), Some(9));
        let workers = Worker::start_many(&group, 3);
        let listeners = group.listeners().unwrap();
        assert_eq!(listeners.len(), 3);
        for listener in listeners.iter().map(AsFd::as_fd) {
            assert!(option::is_ipv6_only(listener).unwrap());
            assert_eq!(
                (option::fast_open(listener).unwrap(), option::defer_accept(listener).unwrap()),
                (7, 3)
            );
            assert_eq!(option::backlog(listener).unwrap(), 9);
        }
        workers.into_iter().for_each(Worker::stop);
        let path = endpoint(Family::Unix);
        let fourtuple::listen::Endpoint::Unix(path) = path else { unreachable!("a path") };
        let unix = ListenerGroupBuilder::from_listeners([UnixListener::bind(&path).unwrap()]).unwrap();
        assert_eq!(unix.open().unwrap().backlog(), None);
        std::fs::remove_file(path).unwrap();
    });
}

#[test]
fn defer_accept_queues_a_connection_with_its_first_bytes() {
    in_namespace(|| {
        let limit = Duration::from_secs(60);
        let group = ListenerGroupBuilder::at((Ipv4Addr::LOCALHOST, 0)).defer_accept(limit).open().unwrap();
        let mut stream = connect(&group);
        let listener = &group.listeners().unwrap()[0];
        assert_eq!(option::accept_queue(listener.as_fd()).unwrap(), 0);
        stream.write_all(&0_u32.to_ne_bytes()).unwrap();
        while option::accept_queue(listener.as_fd()).unwrap() == 0 {
            thread::yield_now();
        }
    });
}

#[test]
fn options_that_do_not_fit_are_refused() {
    in_namespace(|| {
        let v4: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
        for builder in [
            ListenerGroupBuilder::at(v4).ipv6_only(true),
            ListenerGroupBuilder::at(v4).defer_accept(Duration::ZERO),
            ListenerGroupBuilder::at(endpoint(Family::Unix)).fast_open(1),
            ListenerGroupBuilder::from_listeners([listener()]).unwrap().fast_open(1),
        ] {
            let error = builder.open().unwrap_err();
            assert!(matches!(error, ListenError::Setting { .. }), "{error}");
        }
    });
}
