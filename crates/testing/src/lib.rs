//! Network namespaces for tests, and counted skips. A dev-dependency only.
#![forbid(unsafe_code)]

pub mod accept_queue;
pub mod process;
pub mod stream;
pub mod wire;

// The paths by which the tests of other crates name the contents of these modules.

use std::any::type_name_of_val;
use std::env;
use std::fs;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::panic;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_syscalls::netns;
use fourtuple_syscalls::socket::{self, Transport};

const INSIDE: &str = "FOURTUPLE_TEST_IS_INSIDE";

/// Runs the body of a test in a network namespace of its own, with loopback up and nothing else in it.
///
/// As root the body runs on a new thread in a new namespace. Without root the test binary runs again for this test, in a new user
/// namespace. If neither is allowed, the test is skipped with a message, or fails if `FOURTUPLE_REQUIRE` names `netns`. The body
/// must be a closure in the test function, because the name of the test is derived from the closure's type.
pub fn in_namespace<F: FnOnce() + Send + 'static>(body: F) {
    in_namespace_of(test_of(&body), body);
}

/// Does the same as [`in_namespace`] for a closure that is not the test's own.
pub fn in_namespace_of<F: FnOnce() + Send + 'static>(name: String, body: F) {
    if env::var_os(INSIDE).is_some() {
        return body();
    }
    let entered = thread::spawn(move || match netns::enter_new() {
        Ok(()) => {
            body();
            Ok(())
        }
        Err(error) => Err(error),
    });
    match entered.join() {
        Ok(Ok(())) => {}
        Ok(Err(error)) if error.kind() == io::ErrorKind::PermissionDenied => again_in_user_namespace(&name),
        Ok(Err(error)) => panic!("{name}: cannot enter a network namespace: {error}"),
        Err(payload) => panic::resume_unwind(payload),
    }
}

/// Runs `case` for each item in a network namespace of its own, eight at the same time. Called within [`in_namespace`], by tests whose
/// cases wait more than they compute.
pub fn each_in_namespace<T: Send>(items: impl IntoIterator<Item = T>, case: impl Fn(T) + Sync) {
    let items = Mutex::new(items.into_iter().collect::<Vec<_>>().into_iter());
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while let Some(item) = next() {
                    netns::enter_new().expect("a network namespace in a network namespace");
                    case(item);
                }
            });
        }
    });
}

/// Sets a flag when it is dropped, also by a panic, so that threads of a scope end and the test fails instead of waiting for them.
#[derive(Debug)]
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn again_in_user_namespace(name: &str) {
    let mut command = Command::new(env::current_exe().expect("a running test has a path"));
    command.args(["--exact", name, "--nocapture"]).env(INSIDE, "1");
    netns::start_in_new(&mut command);
    match command.output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success(),
                "{name} failed in a user namespace:\n{}{said}",
                String::from_utf8_lossy(&output.stdout)
            );
            // Some facilities, such as BPF, are not available in a user namespace.
            for skipped in said.lines().filter(|line| line.starts_with("SKIPPED ")) {
                writeln!(io::stderr(), "{skipped}").expect("stderr takes a line");
            }
        }
        Err(error) => skip(name, "netns", &format!("no network namespace to be had: {error}")),
    }
}

/// Returns the path of the test function within its crate that has this closure.
pub fn test_of<F>(closure: &F) -> String {
    test_name(type_name_of_val(closure))
}

/// Returns the path of a function within its crate, from the type name of a closure in it.
fn test_name(closure: &str) -> String {
    let path = closure.split("::{{closure}}").next().expect("split gives at least one part");
    path.split_once("::").map_or(path, |(_, rest)| rest).to_owned()
}

/// Prints a line that the test program does not keep back, as it does with eprintln!() of a test that passes.
pub fn print(line: &str) {
    writeln!(io::stderr(), "{line}").expect("stderr takes a line");
}

/// Reports a skipped test on standard error, or fails the test if `FOURTUPLE_REQUIRE` demands `need`.
pub fn skip(test: &str, need: &str, reason: &str) {
    let required = env::var("FOURTUPLE_REQUIRE").unwrap_or_default();
    assert!(!is_required(&required, need), "{test} needs {need}, which FOURTUPLE_REQUIRE demands: {reason}");
    print(&format!("SKIPPED {test} (needs {need}): {reason}"));
}

/// Returns whether a list demands `need`: by its name, or by `all` without `-NAME`.
fn is_required(list: &str, need: &str) -> bool {
    let has = |wanted: &str| list.split(',').any(|name| name == wanted);
    has(need) || has("all") && !has(&format!("-{need}"))
}

/// An array of the named constants of `Errno`, which the caller has imported.
#[macro_export]
macro_rules! errnos {
    ($($name:ident)*) => { [$(Errno::$name),*] };
}

/// Returns the mount point of a cgroup2 file system.
pub fn cgroup_root() -> io::Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts")?;
    let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let found = mounts.find(|fields| fields.get(2) == Some(&"cgroup2"));
    found.map(|fields| PathBuf::from(fields[1])).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Returns whether the current network namespace has MPTCP, or reports a skipped test.
pub fn has_mptcp(test: &str) -> bool {
    let is_on = fs::read_to_string("/proc/sys/net/mptcp/enabled").is_ok_and(|text| text.trim() == "1");
    if !is_on {
        skip(test, "mptcp", "this kernel has no MPTCP, or it is off");
    }
    is_on
}

/// Writes a sysctl of the current network namespace, by its dotted name.
pub fn set_sysctl(name: &str, value: &str) {
    let path = format!("/proc/sys/{}", name.replace('.', "/"));
    fs::write(&path, value).unwrap_or_else(|error| panic!("{path}: {error}"));
}

/// Lets sockets of the current network namespace stay in TIME_WAIT for its whole time. On a busy host a client's last ACK may reach a server
/// socket that is gone; the answer is a RST, and without net.ipv4.tcp_rfc1337 it ends TIME_WAIT (RFC 1337): of 14,115 connections 269 to 290,
/// beside six busy loops.
pub fn keep_time_wait() {
    set_sysctl("net.ipv4.tcp_rfc1337", "1");
}

/// Opens a listener without accept(): its accept queue holds the server side of connections without descriptors.
pub fn listener(address: &str, backlog: i32) -> (OwnedFd, SocketAddr) {
    let address: IpAddr = address.parse().expect("an address");
    let wanted = SocketAddr::new(address, 0);
    let socket = socket::open(Transport::Tcp, wanted, false).expect("a socket");
    // Below the small ranges that tests set, so that the listener takes none of their ports.
    let port = (4000..5000)
        .find(|port| socket::bind(socket.as_fd(), SocketAddr::new(address, *port)).is_ok())
        .expect("a free port for the listener");
    socket::listen(socket.as_fd(), backlog).expect("a listening socket");
    (socket, SocketAddr::new(address, port))
}

/// Connects over IPv4, and waits until the connection is in the accept queue: on a busy machine the kernel handles the last ACK of a
/// handshake after connect(), in a thread of its own.
pub fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).expect("a listener");
    let port = |address: SocketAddr| format!(":{:04X}", address.port());
    let (server, client) = (port(to), port(stream.local_addr().expect("a connected socket")));
    let begun = Instant::now();
    loop {
        let table = fs::read_to_string("/proc/thread-self/net/tcp").expect("procfs");
        // Local address, remote address and state, in hexadecimal. 03 is SYN_RECV.
        let is_queued = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words[1].ends_with(&server) && words[2].ends_with(&client) && words[3] != "03"
        };
        if table.lines().any(is_queued) {
            return stream;
        }
        assert!(begun.elapsed() < stream::LONG, "no connection at {to}: {table}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the number of open descriptors of this process.
pub fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").expect("procfs").count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_test_name_comes_from_the_closure_type() {
        let closure = || ();
        assert_eq!(test_name(type_name_of_val(&closure)), "tests::the_test_name_comes_from_the_closure_type");
    }

    #[test]
    fn a_minus_takes_a_need_out_of_all() {
        for (list, is_demanded) in [
            ("", false),
            ("bpf,netns", true),
            ("bpf", false),
            ("all", true),
            ("all,-bpf", true),
            ("all,-netns", false),
        ] {
            assert_eq!(is_required(list, "netns"), is_demanded, "{list}");
        }
    }

    #[test]
    fn every_test_has_a_namespace_of_its_own() {
        let outside = netns::identity().unwrap();
        in_namespace(move || {
            assert_ne!(netns::identity().unwrap(), outside);
            set_sysctl("net.ipv4.ip_local_port_range", "20000 20001");
        });
        assert_eq!(netns::identity().unwrap(), outside);
    }
}
