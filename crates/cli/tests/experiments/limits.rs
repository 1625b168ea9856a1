//! Limits of the whole host. `cargo xtask kernels` runs these experiments in a virtual machine, which they have for themselves.

use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use fourtuple_testing::set_sysctl;

use crate::program::TempDir;
use crate::program::situation::{diagnose, diagnose_during, do_now, first};
use crate::row;

/// Returns a directory on a host whose sysctls may be changed.
fn host() -> TempDir {
    // The plan of guest-init.
    assert!(
        Path::new("/plan").exists(),
        "this changes sysctls of the host: `cargo xtask kernels` runs it in a virtual machine"
    );
    TempDir::new()
}

/// Sets the sysctl of a command: the machine has neither a shell nor sysctl.
fn set(command: &str) {
    let setting = command.strip_prefix("sysctl -w ").expect("a sysctl");
    let (name, value) = setting.split_once('=').expect("a value");
    set_sysctl(name, value.trim_matches(['\'', '"']));
}

#[test]
#[ignore = "it changes a sysctl of the host"]
fn a_full_table_of_tracked_connections_is_named() {
    let temp = host();
    set_sysctl("net.netfilter.nf_conntrack_max", "200");
    let listener = TcpListener::bind("127.0.0.1:4000").expect("a listener");
    let address = listener.local_addr().expect("its address");
    let _server = thread::spawn(move || listener.incoming().collect::<Vec<_>>());
    let connect = |time| TcpStream::connect_timeout(&address, Duration::from_millis(time));
    // A machine under emulation may need longer for one of them.
    let held: Vec<TcpStream> = std::iter::from_fn(|| (0..3).find_map(|_| connect(500).ok())).collect();
    assert!(held.len() >= 190, "{} connections", held.len());
    let fail = |time| (0..10).filter(|_| connect(time).is_err()).count();
    let before = fail(500);
    // Several begin between the two readings.
    let record = diagnose_during(&temp, || drop(connect(50)));
    let finding = first(&record, "N01", &[]);
    let command = do_now(finding);
    set(&command);
    let after = fail(20_000);
    assert_eq!((before, after), (10, 0));
    set_sysctl("net.netfilter.nf_conntrack_max", "65536");
    row(
        finding,
        "a table of tracked connections with 200 entries, all of open connections",
        "a client and a server",
        "10 of 10 connects get no answer",
        &command,
        "10 succeed",
    );
}

#[test]
#[ignore = "it changes a sysctl of the host"]
fn a_lack_of_memory_for_tcp_is_named() {
    let temp = host();
    set_sysctl("net.ipv4.tcp_mem", "1000 1500 2000");
    let listener = TcpListener::bind("127.0.0.1:4001").expect("a listener");
    let address = listener.local_addr().expect("its address");
    // Sends 16 segments to a server that does not read. Returns what is in its queue.
    let fill = || {
        let mut client = TcpStream::connect(address).expect("a connection");
        let (server, _) = listener.accept().expect("the same");
        client.set_nodelay(true).expect("a socket");
        client.set_nonblocking(true).expect("a socket");
        (0..16).for_each(|_| _ = client.write(&[0; 4096]));
        server.set_nonblocking(true).expect("a socket");
        let queued = server.peek(&mut [0; 65_536]).unwrap_or(0);
        (client, server, queued)
    };
    let mut held = Vec::new();
    while pages() < 2000 {
        held.push(fill());
        assert!(held.len() < 1000, "{} pages", pages());
    }
    let queued = || (0..10).map(|_| fill().2 / 1024).max();
    let before = queued();
    let record = diagnose(&temp);
    let finding = first(&record, "F02", &[]);
    let command = do_now(finding);
    set(&command);
    let after = queued();
    assert!(before == Some(4) && after >= Some(16), "{before:?}, then {after:?} KiB");
    row(
        finding,
        "connections whose server does not read; 2,000 pages are allowed",
        "a client and a server",
        "of 64 KiB on a new connection one segment arrives, the others are dropped",
        &command,
        "several arrive",
    );
}

/// Returns the memory of all TCP sockets of the host.
fn pages() -> u64 {
    let text = fs::read_to_string("/proc/net/sockstat").expect("procfs");
    let mut memory =
        text.split_whitespace().skip_while(|word| *word != "TCP:").skip_while(|word| *word != "mem");
    memory.nth(1).and_then(|pages| pages.parse().ok()).expect("a number")
}
