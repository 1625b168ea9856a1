//! The rules about UDP, and about processes that share an address, on real sockets.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use fourtuple_record::Severity;
use fourtuple_syscalls::option;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::in_namespace;
use fourtuple_testing::python::Python;

use crate::scene::{
    between, diagnosis, findings, findings_in, known, only, says, shows, snapshot, this_process, with_python,
};

/// Opens a socket of a SO_REUSEPORT group.
fn member(address: &str) -> UdpSocket {
    let address: SocketAddr = address.parse().unwrap();
    let socket = socket::open(Transport::Udp, address, true).unwrap();
    assert_eq!(option::set_reuse_port(socket.as_fd()).unwrap(), option::Answer::Done);
    socket::bind(socket.as_fd(), address).unwrap();
    socket.into()
}

/// Opens a member and sends it datagrams that it does not receive.
fn flooded(address: &str) -> impl Fn(usize) + use<> {
    let full = member(address);
    let to = full.local_addr().unwrap();
    let client = UdpSocket::bind((to.ip(), 0)).unwrap();
    move |number| {
        let _keep = &full;
        (0..number).for_each(|_| assert_eq!(client.send_to(&[0; 1000], to).unwrap(), 1000));
    }
}

#[test]
fn u01_drops_belong_to_their_socket() {
    in_namespace(|| {
        let (_idle, fill) = (member("127.0.0.2:5300"), flooded("127.0.0.1:5301"));
        assert!(between("U01", || fill(64)).is_empty(), "they fit");
        let found = between("U01", || fill(1000));
        let found = only(&found, Severity::Warning, "the UDP socket 127.0.0.1:5301 of ");
        says(&found, &[&format!("{} dropped ", this_process())]);
        assert!(found.evidence[0].contains("the counters have them all"), "{:?}", found.evidence);
        assert!(findings("U01").is_empty(), "the drops were before the first reading");
    });
}

#[test]
fn u01_names_what_the_counters_have() {
    in_namespace(|| {
        let fill = flooded("[::1]:5301");
        let found = between("U01", || fill(1000));
        let found = only(&found, Severity::Warning, "the UDP socket [::1]:5301 of ");
        let facts = &found.evidence;
        assert!(!facts[0].contains("Udp.RcvbufErrors 0"), "the counters of IPv6 count: {facts:?}");
    });
}

#[test]
fn u01_names_drops_that_are_in_no_counter() {
    in_namespace(|| {
        let fill = flooded("127.0.0.1:5301");
        let mut snapshot = snapshot(|| fill(1000));
        // As on Linux 6.18 after drops in the queue of a NUMA node.
        known(&mut snapshot.counters).retain(|name, _| !name.starts_with("Udp"));
        let found = only(&findings_in(&snapshot, "U01"), Severity::Warning, " dropped ");
        let fact = "of the drops are in no counter of /proc/net/snmp";
        assert!(found.evidence[0].contains(fact), "{:?}", found.evidence);
        let limit = snapshot.udp.seen().unwrap().sockets[0].limit_bytes.unwrap();
        for (default, says) in [(limit, "did not ask and has net.core.rmem_default"), (1, "asked for")] {
            snapshot.sysctls.insert("net.core.rmem_default".to_owned(), default.to_string());
            snapshot.sysctls.insert("net.core.rmem_max".to_owned(), "4194304".to_owned());
            let found = findings_in(&snapshot, "U01");
            assert!(found[0].now[0].action.contains(says), "{:?}", found[0].now);
        }
    });
}

#[test]
fn u01_is_silent_about_datagrams_that_a_filter_refuses() {
    with_python(|| {
        let mut python = Python::start();
        // A program of one instruction, which returns 0: the kernel refuses each datagram.
        python.run(
            "import ctypes, struct; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('127.0.0.1', 5300)); \
             refuse = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0)); \
             s.setsockopt(socket.SOL_SOCKET, 26, struct.pack('HxxxxxxQ', 1, ctypes.addressof(refuse)))",
        );
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        let send = || (0..50).for_each(|_| assert_eq!(client.send_to(b"x", "127.0.0.1:5300").unwrap(), 1));
        let snapshot = snapshot(send);
        let drops = snapshot.udp.seen().unwrap().sockets.iter().filter_map(|socket| socket.drops);
        assert_eq!(drops.map(|drops| drops.during).sum::<u64>(), 50);
        assert!(findings_in(&snapshot, "U01").is_empty());
    });
}

#[test]
fn u02_a_connected_member_is_named() {
    in_namespace(|| {
        let group: Vec<UdpSocket> = (0..3).map(|_| member("127.0.0.1:5300")).collect();
        let wide: Vec<UdpSocket> = (0..3).map(|_| member("0.0.0.0:5301")).collect();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect("127.0.0.1:5300").unwrap();
        assert!(findings("U02").is_empty(), "a client is not a member");
        group[0].connect(client.local_addr().unwrap()).unwrap();
        let shared = "shares 127.0.0.1:5300 with 2 unconnected sockets";
        let found = only(&findings("U02"), Severity::Notice, shared);
        says(&found, &[&format!("{} is connected to {}", this_process(), client.local_addr().unwrap())]);
        // The fault for real: the connected socket gets all datagrams of its peer, and no others.
        (0..20).for_each(|_| assert_eq!(client.send(b"x").unwrap(), 1));
        for _ in 0..20 {
            UdpSocket::bind("127.0.0.1:0").unwrap().send_to(b"x", "127.0.0.1:5300").unwrap();
        }
        let received = |socket: &UdpSocket| std::iter::from_fn(|| socket.recv(&mut [0; 8]).ok()).count();
        let received: Vec<usize> = group.iter().map(received).collect();
        assert_eq!((received[0], received[1] + received[2]), (20, 20));
        let flood = || (0..1000).for_each(|_| assert_eq!(client.send(&[0; 1000]).unwrap(), 1000));
        only(&between("U02", flood), Severity::Warning, " were dropped in ");
        drop(group);
        wide[0].connect(client.local_addr().unwrap()).unwrap();
        only(&findings("U02"), Severity::Notice, "shares 0.0.0.0:5301 with 2 unconnected sockets");
    });
}

#[test]
fn u02_a_socket_for_each_client_is_on_purpose() {
    in_namespace(|| {
        let _group: Vec<UdpSocket> = (0..2).map(|_| member("127.0.0.1:5300")).collect();
        let _connected: Vec<UdpSocket> = (9001..9004)
            .map(|port| {
                let socket = member("127.0.0.1:5300");
                socket.connect(("127.0.0.1", port)).unwrap();
                socket
            })
            .collect();
        assert!(findings("U02").is_empty());
    });
}

const JOIN: &str = "s = socket.socket(type=socket.SOCK_DGRAM); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); \
                    s.bind(('127.0.0.1', 5300))";

#[test]
fn u03_a_foreign_process_in_a_group_is_named() {
    with_python(|| {
        let _own = [member("127.0.0.1:5300"), member("127.0.0.1:5300")];
        let mut child = Python::start();
        child.run(JOIN);
        assert!(findings("U03").is_empty(), "a child is a worker");
        let mut foreign = Python::detached();
        foreign.run(JOIN);
        child.run("s.close()");
        let one = "has 1 of the 3 sockets at UDP 127.0.0.1:5300, which ";
        let found = only(&findings("U03"), Severity::Warning, one);
        says(&found, &[&format!("[{}] has", foreign.pid())]);
        assert!(found.now.iter().any(|advice| advice.action == format!("kill {}", foreign.pid())));
        foreign.run("s.close()");
        assert!(findings("U03").is_empty());
    });
}

#[test]
fn u03_a_foreign_listener_is_named() {
    with_python(|| {
        let mut server = Python::start();
        let listen = "t = socket.socket(); t.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); t.bind(('127.0.0.1', 5400)); t.listen()";
        server.run(listen);
        let mut same = Python::detached();
        same.run(listen);
        // A copy that another parent started. The older one may have been left behind.
        let one = format!("[{}] has 1 of the 2 sockets", server.pid());
        let found = only(&findings("U03"), Severity::Warning, &one);
        let line = format!("the command line of python3[{}]: ", server.pid());
        let program = found.evidence[0].strip_prefix(&line).unwrap_or_else(|| panic!("{found:#?}"));
        assert!(program.contains("python3 -c import errno, json"), "{program}");
        let why = [
            &format!("^both are called python3: python3[{}] started ", server.pid()),
            "probably left behind; ",
        ];
        shows(&found, &why.map(|part| part as &str));
        assert!(
            found.now[0].action.starts_with("ps -o pid,") && found.now[1].action.starts_with("kill "),
            "{found:#?}"
        );
        same.run("open('/proc/self/comm', 'w').write('intruder')");
        only(&findings("U03"), Severity::Warning, "intruder[");
    });
}

#[test]
fn u03_another_user_takes_the_datagrams() {
    with_python(|| {
        let share = "u = socket.socket(type=socket.SOCK_DGRAM); u.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); ";
        let (mut server, mut other) = (Python::start(), Python::start());
        server.run(&format!("{share} u.bind(('127.0.0.1', 5300))"));
        // In a user namespace there is no second user.
        if other.run("try: os.setuid(65534)\nexcept OSError: print('refused')") == "refused" {
            return fourtuple_testing::skip("u03_another_user_takes_the_datagrams", "root", "setuid(65534)");
        }
        other.run(&format!("{share} u.bind(('127.0.0.1', 5300))"));
        let one = format!("[{}] has 1 of the 2 sockets", other.pid());
        shows(&only(&findings("U03"), Severity::Warning, &one), &["^user IDs "]);
        // Programs share the ports of multicast discovery on purpose.
        server.run("u.close()");
        other.run("u.close()");
        server.run(&format!("{share} u.bind(('0.0.0.0', 5353))"));
        other.run(&format!("{share} u.bind(('0.0.0.0', 5353))"));
        assert!(diagnosis().findings.is_empty());
    });
}
