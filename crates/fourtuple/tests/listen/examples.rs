//! The servers of the examples and docs against clients that reset.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fourtuple::listen::AcceptPolicy;
use fourtuple_syscalls::{child, option};
use fourtuple_testing::{in_namespace, set_sysctl, skip};

use crate::adopt::activate;
use crate::processes::{Prefork, example};

/// A timeout that only a failing test reaches.
const DEADLINE: Duration = Duration::from_secs(60);
/// Number of connections. An example that ended at the first reset did so after 35 to 131 connections.
const RESETS: usize = 1000;
const LISTEN: &str = include_str!("../../examples/listen.rs");

/// Returns the code of an example from its first `use`.
fn code(example: &str) -> &str {
    &example[example.find("\nuse ").expect("a use") + 1..]
}

#[test]
fn the_docs_contain_the_tested_example() {
    let page = include_str!("../../../../docs/listen.md");
    assert!(page.contains(code(LISTEN)), "docs/listen.md has not got this text:\n{}", code(LISTEN));
}

/// Opens connections and resets them: before a request, after a request, and after a part of the response.
fn reset(address: SocketAddr, request: &[u8]) {
    for number in 0..RESETS {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        // The write fails if the kernel has already reported a reset.
        if number % 4 != 0 {
            let _ = stream.write_all(request);
        }
        if number % 4 == 3 {
            let read = stream.read(&mut [0]);
            assert!(!read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "no answer in time");
        }
        option::set_reset_on_close(stream.as_fd()).unwrap();
    }
}

/// Sends as many requests at the same time as there are workers, each on its own connection, and expects an answer to each.
fn all_workers_answer(address: SocketAddr, request: &[u8], workers: usize) {
    let mut streams: Vec<_> = (0..workers).map(|_| TcpStream::connect(address).unwrap()).collect();
    for stream in &mut streams {
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.write_all(request).unwrap();
        assert!(stream.read(&mut [0; 1024]).unwrap() > 0);
    }
}

fn spawn(example: &PathBuf, arguments: &[&str]) -> Child {
    let mut command = Command::new(example);
    command.args(arguments).stdout(Stdio::piped());
    child::end_with_this_thread(&mut command);
    command.spawn().unwrap()
}

/// Waits until a server listens.
fn until_it_listens(address: SocketAddr) {
    let begun = Instant::now();
    while TcpStream::connect(address).is_err() {
        assert!(begun.elapsed() < DEADLINE, "no process listens on {address}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn beside(test: &str, name: &str) -> Option<PathBuf> {
    let path = example(test)?.with_file_name(name);
    if !path.exists() {
        skip(test, "examples", &format!("{name} is not beside the test"));
        return None;
    }
    Some(path)
}

#[test]
fn the_examples_survive_clients_that_reset() {
    let test = "the_examples_survive_clients_that_reset";
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 60000");
        let address: SocketAddr = "127.0.0.1:8080".parse().unwrap();
        for name in ["listen", "drain"] {
            let Some(path) = beside(test, name) else { continue };
            let mut server = spawn(&path, &[]);
            until_it_listens(address);
            reset(address, b"?");
            all_workers_answer(address, b"?", 4);
            assert_eq!(server.try_wait().unwrap(), None, "{name} goes on");
            if name == "drain" {
                let terminated = Command::new("kill").arg(server.id().to_string()).status().unwrap();
                assert!(terminated.success());
                let output = server.wait_with_output().unwrap();
                let said = String::from_utf8_lossy(&output.stdout).into_owned();
                assert!(output.status.success() && said.contains("open: 0, queued: 0"), "{output:?}");
            } else {
                server.kill().unwrap();
                server.wait().unwrap();
            }
        }
        // `accept` is an example of the tokio form.
        let policies: &[&str] = if cfg!(feature = "tokio") { &["exclusive", "rotate"] } else { &[] };
        for &policy in policies {
            let Some(path) = beside(test, "accept") else { break };
            let mut server =
                spawn(&path, &["--policy", policy, "--listen", "127.0.0.1:8080", "--workers", "2"]);
            until_it_listens(address);
            reset(address, b"GET / HTTP/1.1\r\n\r\n");
            all_workers_answer(address, b"GET / HTTP/1.1\r\n\r\n", 2);
            assert_eq!(server.try_wait().unwrap(), None, "accept goes on");
            server.kill().unwrap();
            server.wait().unwrap();
        }
        // `activated` needs the feature `tokio`.
        let policies: &[_] = if cfg!(feature = "tokio") {
            &[AcceptPolicy::SharedOneshot, AcceptPolicy::Exclusive, AcceptPolicy::Dispatcher]
        } else {
            &[]
        };
        for &policy in policies {
            let Some(path) = beside(test, "activated") else { break };
            // A process that another test forks meanwhile may hold a copy of the last listener, so each has a port of its own.
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let mut server = activate(&path, &listener, policy);
            reset(address, b"?");
            all_workers_answer(address, b"?", 3);
            assert_eq!(server.try_wait().unwrap(), None, "activated goes on with {policy}");
            child::terminate(server.id()).unwrap();
            let output = server.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success() && said.contains("open: 0"), "{policy}: {output:?}");
        }
        if let Some(path) = beside(test, "prefork") {
            let prefork = Prefork::start(&path, "rotate", 2);
            let address = prefork.address.parse().unwrap();
            reset(address, b"?\n");
            all_workers_answer(address, b"?\n", 2);
            prefork.stop();
        }
    });
}
