//! The rules about locks, bind buckets, connection tracking, descriptors and memory; about UDP, and processes that share an address.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::atomic::{AtomicU32, Ordering};

use fourtuple_observe::doctor::{Limits, diagnose};
use fourtuple_observe::host::snapshot::Reader;
use fourtuple_record::snapshot::{FailedCall, Failures, LockWaits, Part, Snapshot, Traced, TracedLocks};
use fourtuple_record::{Finding, Proof, Severity};
use fourtuple_syscalls::option;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::process::Python;
use fourtuple_testing::process::status;
use fourtuple_testing::stream::{Loopback, arrives};
use fourtuple_testing::wire::{self, Wire};
use fourtuple_testing::{in_namespace, listener, set_sysctl, skip};

use crate::scene::{
    apply_first, between, diagnosis, failed_call, findings, findings_in, known, only, owner, says, shows,
    snapshot, this_process, traced_connects, until, with_python,
};

/// A directory with files of /proc, which ends with the value.
struct Root(PathBuf);

impl Root {
    fn new(files: &[(&str, &str)]) -> Root {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = Root(env::temp_dir().join(format!("fourtuple-doctor-{}-{number}", process::id())));
        fs::create_dir_all(root.0.join("proc")).unwrap();
        files.iter().for_each(|(path, text)| root.write(path, text));
        root
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.join("proc").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn reader(&self) -> Reader {
        Reader::new(&self.0)
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

#[test]
fn packets_that_a_shaper_drops_are_named_with_its_device() {
    in_namespace(|| {
        let test = "host_rules::packets_that_a_shaper_drops_are_named_with_its_device";
        let Some(far) = Wire::open(test) else { return };
        let shaper = "qdisc add dev near root tbf rate 8kbit burst 2000 limit 3000";
        match status(Command::new("tc").args(shaper.split(' '))) {
            Ok(status) if status.success() => {}
            other => return skip(test, "programs", &format!("tc has no tbf: {other:?}")),
        }
        let sender = UdpSocket::bind((wire::NEAR_V4, 0)).unwrap();
        let receiver = far.far_away(|| UdpSocket::bind((wire::FAR_V4, 9)).unwrap());
        // Packets that wait for the link address of a neighbour do not meet the shaper.
        arrives(|| drop(sender.send_to(&[0], (wire::FAR_V4, 9))), &receiver, &mut [0]);
        let mut reader = Reader::new(Path::new("/"));
        crate::scene::read(&mut reader);
        for _ in 0..500 {
            // ENOBUFS: the queue is full.
            let _ = sender.send_to(&[0; 1_000], (wire::FAR_V4, 9));
        }
        let snapshot = crate::scene::read(&mut reader);
        let drops = snapshot.counter("qdisc.near.tbf.drops").unwrap();
        assert!(drops.during > 400 && drops.during == drops.total, "{drops:?}");
        let diagnosis = diagnose(&snapshot, &Limits::default());
        let found: Vec<&str> = diagnosis.findings.iter().map(|finding| finding.verdict.as_str()).collect();
        let expected = format!("the queueing discipline tbf of near dropped {} packets", drops.during);
        assert!(found.len() == 1 && found[0].contains(&expected), "{found:?}");
        // Another namespace has other devices.
        assert!(far.far_away(crate::scene::now).counter("qdisc.near.tbf.drops").is_err());
    });
}

#[test]
fn a_quiet_namespace_has_no_finding() {
    in_namespace(|| {
        let (listener, address) = listener("127.0.0.1", 100);
        let (mut client, mut server) = (None, None);
        let snapshot = snapshot(|| {
            client = Some(TcpStream::connect(address).unwrap());
            server = Some(fourtuple_syscalls::socket::accept(std::os::fd::AsFd::as_fd(&listener)).unwrap());
        });
        let diagnosis = diagnose(&snapshot, &Limits::default());
        assert!(diagnosis.findings.is_empty(), "{:?}", diagnosis.findings);
        // Without a trace, and with sysctls that the namespace hides.
        let unchecked = diagnosis.unchecked.iter().map(|unchecked| unchecked.id.as_str());
        let unchecked: Vec<&str> = unchecked.filter(|id| !id.starts_with(['P', 'T'])).collect();
        assert_eq!(unchecked, ["A07", "F02", "L01", "L03", "X01"]);
    });
}

#[test]
fn l01_and_l03_compare_with_the_processors() {
    in_namespace(|| {
        // The traces see the whole host: an affinity or a quota of this process does not count.
        let root = Root::new(&[("stat", "cpu  9 9\ncpu0 3 3\ncpu1 3 3\ncpu2 3 3\nintr 7\n")]);
        assert_eq!(root.reader().read().processors, 3);
        let mut snapshot = snapshot(|| ());
        (snapshot.interval_ns, snapshot.processors) = (1_000_000_000, 4);
        let mut of_times = |waited_ns, search_ns| {
            let classes = BTreeMap::from([("bhash".to_owned(), LockWaits { waits: 1000, waited_ns })]);
            snapshot.locks = Part::Seen(TracedLocks { interval_ns: 1_000_000_000, classes });
            snapshot.traced = Part::Seen(Traced { searches: 100, search_ns, ..Traced::default() });
            (findings_in(&snapshot, "L01"), findings_in(&snapshot, "L03"))
        };
        let (locks, searches) = of_times(190_000_000, 190_000_000);
        assert!(locks.is_empty() && searches.is_empty());
        let (locks, searches) = of_times(400_000_000, 800_000_000);
        let waits = "threads wait for locks of the class bhash, 0.4 of them at any time: 1,000 waits, 400 ms in 1.0 s";
        assert_eq!(only(&locks, Severity::Warning, waits).evidence, ["mean wait 400 us"]);
        let search = "20% of the CPU time is the port search of connect(): 100 searches, 8 ms each";
        only(&searches, Severity::Warning, search);
    });
}

#[test]
fn l02_many_sockets_for_each_port_are_named() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20000");
        let (_listener, address) = listener("0.0.0.0", 2000);
        let connect = |number: u32| {
            let ip = std::net::Ipv4Addr::from_bits(0x7f01_0000 + number);
            TcpStream::connect(SocketAddr::new(ip.into(), address.port())).unwrap()
        };
        let mut clients: Vec<TcpStream> = (1..900).map(connect).collect();
        assert!(findings("L02").is_empty());
        clients.extend((900..=1000).map(connect));
        let shared = "1,000 outgoing connections share 1 port, 1,000 for each";
        apply_first(&only(&findings("L02"), Severity::Notice, shared));
        assert!(findings("L02").is_empty());
    });
}

/// Checks that the first action was computed.
#[track_caller]
fn computed(finding: &Finding, action: &str) {
    assert_eq!((&*finding.now[0].action, finding.now[0].proof), (action, Proof::Calculation));
}

const STATISTICS: &str = "thread-self/net/stat/nf_conntrack";
const TRACKING: &str = "entries  clashres found new insert_failed drop early_drop\n";

#[test]
fn n01_a_full_table_is_named() {
    in_namespace(|| {
        assert!(findings("N01").is_empty(), "this host as it is");
        let root = Root::new(&[
            ("sys/net/netfilter/nf_conntrack_count", "899\n"),
            ("sys/net/netfilter/nf_conntrack_max", "1000\n"),
            (STATISTICS, &format!("{TRACKING}383 1 0 0 0 5 0\n383 0 0 0 0 0 0\n")),
        ]);
        let mut reader = root.reader();
        assert!(findings_in(&reader.read(), "N01").is_empty());
        root.write("sys/net/netfilter/nf_conntrack_count", "1000\n");
        let found = only(&findings_in(&reader.read(), "N01"), Severity::Warning, "1,000 of 1,000 entries");
        computed(&found, "sysctl -w net.netfilter.nf_conntrack_max=2000");
        root.write(STATISTICS, &format!("{TRACKING}3e8 1 0 0 0 15 0\n3e8 0 0 0 0 2 3\n"));
        let dropped = "18 packets of new connections dropped and 3 entries evicted";
        only(&findings_in(&reader.read(), "N01"), Severity::Critical, dropped);
    });
}

#[test]
fn n02_collisions_are_told_from_a_full_table() {
    in_namespace(|| {
        assert!(findings("N02").is_empty(), "this host as it is");
        let root = Root::new(&[
            ("sys/net/netfilter/nf_conntrack_count", "100\n"),
            ("sys/net/netfilter/nf_conntrack_max", "1000\n"),
            (STATISTICS, &format!("{TRACKING}64 1 0 0 7 7 0\n")),
        ]);
        let mut reader = root.reader();
        assert!(
            findings_in(&reader.read(), "N02").is_empty(),
            "the collisions were before the first reading"
        );
        root.write(STATISTICS, &format!("{TRACKING}64 5 0 0 a a 0\n"));
        let snapshot = reader.read();
        assert!(findings_in(&snapshot, "N01").is_empty());
        let found = only(&findings_in(&snapshot, "N02"), Severity::Warning, "dropped 3 packets in ");
        assert!(found.evidence[0].starts_with("4 more collisions were resolved"), "{:?}", found.evidence);
        // Without the table of connections, SNAT may have no port left.
        shows(&found, &["whether SNAT has a port left is not known"]);
        let edits = |found: &Finding| found.now.iter().any(|advice| advice.action.contains("resolv.conf"));
        assert!(!edits(&found), "{found:#?}");
        // SNAT to the ports 30000 to 30099.
        let entry = |state: &str, port: u32| {
            format!(
                "ipv4 2 tcp 6 117 {state} src=172.30.0.2 dst=10.0.0.2 sport={} dport=4000 src=10.0.0.2 dst=10.0.0.1 sport=4000 dport={port} use=2\n",
                port + 9
            )
        };
        let table = |ports: std::ops::Range<u32>, state: &str| {
            ports.map(|port| entry(state, port)).collect::<String>()
        };
        root.write("thread-self/net/nf_conntrack", &table(30_000..30_100, "ESTABLISHED"));
        root.write(STATISTICS, &format!("{TRACKING}64 5 0 0 e e 0\n"));
        let mut snapshot = reader.read();
        let verdict = "SNAT has no port left: 10.0.0.1 → 10.0.0.2:4000 uses 100 of the 100 tcp ports 30000-30099; nf_conntrack dropped 4 packets in ";
        let found = only(&findings_in(&snapshot, "N02"), Severity::Warning, verdict);
        let all = found.now.iter().chain(&found.proper);
        assert!(all.clone().any(|advice| advice.action.contains("snat to 10.0.0.1-")), "{found:#?}");
        assert!(all.clone().all(|advice| !advice.action.contains("resolv.conf")), "{found:#?}");
        shows(&found, &["seem to be forwarded$"]);
        // A shorter TIME_WAIT gives back ports of closed connections only.
        const TIMEOUT: &str = "net.netfilter.nf_conntrack_tcp_timeout_time_wait";
        let proposed = |snapshot: &Snapshot| {
            let found = only(&findings_in(snapshot, "N02"), Severity::Warning, verdict);
            let shorter = found.now.into_iter().find(|advice| advice.action.contains(TIMEOUT));
            (found.evidence[0].clone(), shorter.map(|advice| advice.effect))
        };
        assert_eq!(
            proposed(&snapshot),
            ("all are of open connections: shorter timeouts would free none".to_owned(), None)
        );
        let mut closed = snapshot.clone();
        closed.sysctls.insert(TIMEOUT.to_owned(), "120".to_owned());
        known(&mut closed.conntrack).translated.as_mut().unwrap()[0].closed = 37;
        let fact = "37 ports are of closed connections (TIME_WAIT of nf_conntrack)".to_owned();
        let effect = "closed connections give 37 ports back after 30 s instead of 120 s; no effect on open connections";
        assert_eq!(proposed(&closed), (fact, Some(effect.to_owned())));
        closed.sysctls.insert(TIMEOUT.to_owned(), "20".to_owned());
        assert_eq!(proposed(&closed).1, None, "it is shorter already");
        // A process of this namespace.
        let connects = traced_connects(owner(812, "squid", 9), "10.0.0.2:4000".parse().unwrap());
        snapshot.traced = Part::Seen(Traced { connects: vec![connects], ..Traced::default() });
        let found = only(&findings_in(&snapshot, "N02"), Severity::Warning, verdict);
        shows(&found, &["^squid[812]: it called connect() to 10.0.0.2:4000 during the trace$"]);
        // Collisions without a full range have the sender of the datagrams that were dropped.
        root.write("thread-self/net/nf_conntrack", "");
        root.write(STATISTICS, &format!("{TRACKING}64 5 0 0 12 12 0\n"));
        let mut snapshot = reader.read();
        let call = failed_call(owner(813, "dig", 4), "send", "EPERM", "10.0.0.53:53");
        let call = FailedCall { protocol: "udp".to_owned(), ..call };
        snapshot.failures = Part::Seen(Failures { calls: vec![call], ..Failures::default() });
        let found = only(&findings_in(&snapshot, "N02"), Severity::Warning, "dropped 4 packets in ");
        shows(&found, &["^4 send() of dig[813] to 10.0.0.53:53 failed with EPERM$"]);
        assert!(edits(&found), "{found:#?}");
    });
}

#[test]
fn sysctls_that_disable_ipv6_are_read() {
    in_namespace(|| {
        let values = [("all", "0"), ("default", "1"), ("lo", "0"), ("eth0.7", "1")];
        let files = values.map(|(device, value)| (format!("sys/net/ipv6/conf/{device}/disable_ipv6"), value));
        let files = files.each_ref().map(|(path, value)| (path.as_str(), *value));
        let sysctls = Root::new(&files).reader().read().sysctls;
        let names: Vec<&String> = sysctls.keys().filter(|name| name.contains("ipv6")).collect();
        assert_eq!(names, ["net.ipv6.conf.default.disable_ipv6", "net.ipv6.conf.eth0/7.disable_ipv6"]);
    });
}

#[test]
fn n01_and_n02_are_silent_without_the_module() {
    in_namespace(|| {
        let snapshot = Root::new(&[]).reader().read();
        assert!(findings_in(&snapshot, "N01").is_empty() && findings_in(&snapshot, "N02").is_empty());
    });
}

#[test]
fn f01_a_process_at_its_limit_is_named() {
    with_python(|| {
        let mut python = Python::start();
        python.run("resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096)); held = []");
        let fill = |number: usize| {
            format!("while len(os.listdir('/proc/self/fd')) - 1 < {number}: held.append(socket.socket())")
        };
        python.run(&fill(50));
        assert!(findings("F01").is_empty());
        python.run(&fill(58));
        let name = format!("[{}] has 58 of 64 descriptors, 90%", python.pid());
        only(&findings("F01"), Severity::Warning, &name);
        python.run(&fill(63));
        python.run("held.append(socket.socket())");
        let found = only(
            &findings("F01"),
            Severity::Critical,
            "has 64 descriptors and may open no more: its limit is 64",
        );
        assert!(found.now[0].proof == Proof::Calculation);
        let words: Vec<&str> = found.now[0].action.split(' ').collect();
        assert!(status(Command::new(words[0]).args(&words[1..])).unwrap().success(), "{words:?}");
        let mut snapshot = snapshot(|| ());
        assert!(findings_in(&snapshot, "F01").is_empty());
        // The hard limit can be at most fs.nr_open.
        let limit = |snapshot: &mut Snapshot, most: u64| {
            let mut processes = known(&mut snapshot.processes).iter_mut();
            let own = processes.find(|process| process.pid == python.pid()).unwrap();
            (own.descriptor_limit, own.descriptor_ceiling) = (Some(most), Some(most));
            own.descriptors = most as u32;
        };
        let command = |snapshot: &Snapshot| {
            let found = only(
                &findings_in(snapshot, "F01"),
                Severity::Critical,
                " and may open no more: its limit is ",
            );
            found.now[0].action.clone()
        };
        snapshot.sysctls.insert("fs.nr_open".to_owned(), "1048576".to_owned());
        limit(&mut snapshot, 400_000);
        let prlimit = format!("prlimit --pid {} --nofile=", python.pid());
        assert_eq!(command(&snapshot), format!("{prlimit}1048576:1048576"));
        limit(&mut snapshot, 1_048_576);
        assert_eq!(command(&snapshot), format!("sysctl -w fs.nr_open=4194304 && {prlimit}4194304:4194304"));
    });
}

#[test]
fn f02_orphans_near_their_limit_are_named() {
    in_namespace(|| {
        // tcp_max_orphans belongs to the host, so that only the file is replaced.
        let root = Root::new(&[
            ("sys/net/ipv4/tcp_max_orphans", "65536\n"),
            ("sys/net/ipv4/tcp_mem", "900000000 900000001 900000002\n"),
        ]);
        symlink("/proc/thread-self", root.0.join("proc/thread-self")).unwrap();
        assert!(findings_in(&root.reader().read(), "F02").is_empty());
        let (_listener, address) = listener("127.0.0.1", 100);
        for _ in 0..20 {
            let mut client = TcpStream::connect(address).unwrap();
            client.set_nonblocking(true).unwrap();
            // What the peer does not read stays in the queue of a socket that no process has.
            while client.write(&[0; 65_536]).is_ok() {}
        }
        root.write("sys/net/ipv4/tcp_max_orphans", "20\n");
        let found = until("the state", || {
            Some(findings_in(&root.reader().read(), "F02")).filter(|found| !found.is_empty())
        });
        let found = only(&found, Severity::Warning, "of 20 orphaned TCP sockets");
        assert!(found.now.iter().any(|advice| advice.action.contains("tcp_orphan_retries")));
    });
}

#[test]
fn f02_memory_under_pressure_is_named() {
    in_namespace(|| {
        let is_unchecked = diagnosis().unchecked.iter().any(|unchecked| unchecked.id == "F02");
        assert!(is_unchecked, "the namespace hides the limits");
        let sockstat = |pages| format!("sockets: used 9\nTCP: inuse 5 orphan 0 tw 0 alloc 9 mem {pages}\n");
        let root = Root::new(&[
            ("sys/net/ipv4/tcp_max_orphans", "65536\n"),
            ("sys/net/ipv4/tcp_mem", "800\t1000\t2000\n"),
            ("thread-self/net/sockstat", &sockstat(999)),
        ]);
        let found = || findings_in(&Reader::new(Path::new(&root.0)).read(), "F02");
        assert!(found().is_empty());
        root.write("thread-self/net/sockstat", &sockstat(1200));
        let pressure = "use 1,200 pages of memory, 60% of the limit of 2,000";
        let warning = only(&found(), Severity::Warning, pressure);
        computed(&warning, "sysctl -w net.ipv4.tcp_mem=\"1600 2000 4000\"");
        root.write("thread-self/net/sockstat", &sockstat(1900));
        assert_eq!(only(&found(), Severity::Critical, "95% of the limit").now[0].remains, None);
        // Twice the memory leaves it under pressure.
        root.write("thread-self/net/sockstat", &sockstat(2100));
        let critical = only(&found(), Severity::Critical, "105% of the limit");
        assert_eq!(critical.now[0].remains, Some(Severity::Warning));
    });
}

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
        // A reading takes its numbers one after the other: those of datagrams that arrive meanwhile would disagree.
        Loopback::open().flush();
    }
}

#[test]
fn u01_drops_belong_to_their_socket() {
    in_namespace(|| {
        let (_idle, fill) = (member("127.0.0.2:5300"), flooded("127.0.0.1:5301"));
        assert!(between("U01", || fill(64)).is_empty(), "they fit");
        let found = between("U01", || fill(1000));
        let found = only(&found, Severity::Warning, "the UDP socket 127.0.0.1:5301 of ");
        // A process that another test starts holds the socket as well until its exec().
        says(&found, &[&this_process(), " dropped "]);
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

/// Reads Udp.InErrors of the namespace.
fn udp_errors() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
    // The second line has the values: InDatagrams, NoPorts, InErrors.
    let values = text.lines().filter(|line| line.starts_with("Udp: ")).nth(1).unwrap();
    values.split(' ').nth(3).unwrap().parse().unwrap()
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
        let mut sent = 0;
        let snapshot = snapshot(|| {
            // The queue of the loopback device drops some where other tests flood it.
            until("the drops", || {
                sent += client.send_to(b"x", "127.0.0.1:5300").unwrap() as u64;
                (udp_errors() >= 50).then_some(())
            });
        });
        let drops = snapshot.udp.seen().unwrap().sockets.iter().filter_map(|socket| socket.drops);
        let drops = drops.map(|drops| drops.during).sum::<u64>();
        assert!((50..=sent).contains(&drops), "{drops} of {sent}");
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
        // The fault for real: the connected socket gets all datagrams of its peer, and no others. The queue of the loopback device drops some
        // where other tests flood it.
        let mut received = [0; 2];
        until("the datagrams of both", || {
            assert_eq!(client.send(b"x").unwrap(), 1);
            UdpSocket::bind("127.0.0.1:0").unwrap().send_to(b"y", "127.0.0.1:5300").unwrap();
            for (socket, kind) in group.iter().zip([0, 1, 1]) {
                let mut byte = [0];
                while socket.recv(&mut byte).is_ok() {
                    assert_eq!(byte[0], b"xy"[kind]);
                    received[kind] += 1;
                }
            }
            received.iter().all(|number| *number >= 20).then_some(())
        });
        let flood = || {
            (0..1000).for_each(|_| assert_eq!(client.send(&[0; 1000]).unwrap(), 1000));
            Loopback::open().flush();
        };
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
        // Until its first parent has ended, the process is one of this process.
        let found = until("U03", || Some(findings("U03")).filter(|found| !found.is_empty()));
        let found = only(&found, Severity::Warning, one);
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
        // Until its first parent has ended, the copy is one of this process.
        let found = until("U03", || Some(findings("U03")).filter(|found| !found.is_empty()));
        let found = only(&found, Severity::Warning, &one);
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
