//! The rules about TIME_WAIT and closing, on real sockets.

use std::cell::RefCell;
use std::fs;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use fourtuple_observe::doctor::{Cure, Limits, Place, diagnose_at};
use fourtuple_observe::host::snapshot::Reader;
use fourtuple_record::snapshot::{CloseWait, Counter, Snapshot};
use fourtuple_record::{Finding, Proof, Severity};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::{in_namespace, process, set_sysctl};

use crate::scene::{
    FAR, NEAR, RANGE, advice, apply, close, connect, connect_and_close, cured, findings, findings_in, ip,
    known, now, only, owner, read, reads_by_bpf, says, server, shows, small_range, snapshot, the_finding,
    this_process, until, until_found, until_says, until_time_wait,
};

const BUCKETS: &str = "net.ipv4.tcp_max_tw_buckets";

#[test]
fn t01_a_nearly_full_table_is_named() {
    in_namespace(|| {
        set_sysctl(BUCKETS, "50");
        let (server, _) = server("127.0.0.1", 4000);
        connect_and_close(&server, 30);
        until_time_wait(30);
        assert!(findings("T01").is_empty());
        connect_and_close(&server, 15);
        let finding = until_says("T01", "^45 ");
        says(&finding, &["90% of the 50"]);
        cured(&finding, BUCKETS);
    });
}

#[test]
fn t02_skipped_time_wait_is_counted() {
    in_namespace(|| {
        set_sysctl(BUCKETS, "10");
        let (server, _) = server("127.0.0.1", 4000);
        let mut reader = Reader::new(Path::new("/"));
        assert!(findings_in(&read(&mut reader), "T02").is_empty());
        connect_and_close(&server, 30);
        let snapshot = until("T02", || {
            let snapshot = read(&mut reader);
            (!findings_in(&snapshot, "T02").is_empty()).then_some(snapshot)
        });
        let finding = the_finding(&snapshot, "T02");
        says(&finding, &["skipped TIME_WAIT", "tcp_max_tw_buckets is 10"]);
        apply(advice(&finding, BUCKETS));
        let mut reader = Reader::new(Path::new("/"));
        read(&mut reader);
        connect_and_close(&server, 10);
        assert!(findings_in(&read(&mut reader), "T02").is_empty());
    });
}

#[test]
fn t03_reuse_is_proposed_where_it_helps() {
    in_namespace(|| {
        small_range("20000 20019");
        let (near, _) = server(NEAR, 4000);
        let (loopback, _) = server("127.0.0.1", 4001);
        // With 2, the default, a connect() over loopback that comes a second late takes one of the ports again.
        set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        connect_and_close(&near, 8);
        connect_and_close(&loopback, 20);
        until_time_wait(28);
        set_sysctl("net.ipv4.tcp_tw_reuse", "2");
        assert!(findings("T03").is_empty(), "loopback has it by default");
        connect_and_close(&near, 8);
        let finding = until_says("T03", "80%");
        says(&finding, &["is 2 (loopback only): 10.0.0.1 → 10.0.0.1:4000", "again after 1 s"]);
        let reuse = advice(&finding, "tcp_tw_reuse=1");
        assert!(reuse.effect.contains("20/s instead of 0.3/s"), "{reuse:?}");
        apply(reuse);
        assert!(findings("T03").is_empty());
        let has_delay = now().sysctls.contains_key("net.ipv4.tcp_tw_reuse_delay");
        if has_delay && reads_by_bpf("t03_reuse_is_proposed_where_it_helps") {
            // 4 closes in 10 s and a delay of 30 s: 12 ports. On a busy host the other closes are older.
            connect_and_close(&near, 4);
            set_sysctl("net.ipv4.tcp_tw_reuse_delay", "30000");
            let of_near = || findings("T03").into_iter().find(|finding| finding.subject.contains(NEAR));
            let finding = until("T03", of_near);
            says(&finding, &["tcp_tw_reuse_delay is 30 s"]);
            cured(&finding, "tcp_tw_reuse_delay");
        }
    });
}

/// What a test in a namespace of its own says of a remedy: tried, without effect on this kernel, or not tried.
#[test]
fn proposed_cures_are_tried_first() {
    in_namespace(|| {
        small_range("20000 20099");
        let (server, address) = server(FAR, 4000);
        let kept = connect(address, 5);
        let _accepted: Vec<_> = kept.iter().map(|_| server.accept().unwrap()).collect();
        // Asked for nothing that no finding proposes.
        let asked = RefCell::new(Vec::new());
        let diagnose = |snapshot: &Snapshot, result: Option<bool>| {
            let try_cure = |cure: Cure| {
                asked.borrow_mut().push(cure);
                result
            };
            let place = Place { try_cure: &try_cure, ..Place::default() };
            let findings = diagnose_at(snapshot, &Limits::default(), &place).findings;
            let proofs = |part: &str| -> Vec<Proof> {
                let findings = findings.iter().filter(|finding| finding.id != "T04");
                let now = findings.flat_map(|finding| &finding.now);
                now.filter(|advice| advice.action.contains(part)).map(|advice| advice.proof).collect()
            };
            (proofs("tcp_tw_reuse=1"), proofs("ip_local_port_range"))
        };
        let healthy = diagnose(&now(), Some(true));
        assert!(asked.borrow().is_empty(), "{asked:?}: {healthy:?}");
        connect_and_close(&server, 92);
        until_time_wait(92);
        let mut snapshot = now();
        let with_plain = |snapshot: &mut Snapshot, number| {
            let tuples = &mut known(&mut snapshot.connections).tuples;
            tuples.iter_mut().for_each(|tuple| tuple.time_wait_plain = number);
        };
        // As a BPF iterator tells.
        with_plain(&mut snapshot, Some(0));
        for (result, proof) in [(Some(true), Proof::Test), (None, Proof::Calculation)] {
            let (reuse, range) = diagnose(&snapshot, result);
            assert!(!reuse.is_empty() && reuse.iter().all(|&found| found == proof), "{result:?}: {reuse:?}");
            assert!(!range.is_empty() && range.iter().all(|&found| found == proof), "{result:?}: {range:?}");
        }
        assert_eq!(diagnose(&snapshot, Some(false)), (Vec::new(), Vec::new()));
        assert!(asked.borrow().contains(&Cure::Reuse) && asked.borrow().contains(&Cure::Range));
        // A peer that may have no timestamps is another one than the test has, and than a calculation.
        with_plain(&mut snapshot, None);
        let (reuse, _) = diagnose(&snapshot, Some(true));
        assert!(!reuse.is_empty() && reuse.iter().all(|&found| found == Proof::None), "{reuse:?}");
    });
}

#[test]
fn t03_a_port_is_free_again_after_the_delay() {
    in_namespace(|| {
        small_range("20000 20003");
        set_sysctl("net.ipv4.tcp_tw_reuse", "1");
        let (server, address) = server(NEAR, 4000);
        connect_and_close(&server, 4);
        // The kernel compares whole seconds.
        until("a port in TIME_WAIT is used again", || {
            TcpStream::connect(address).ok().or_else(|| {
                std::thread::sleep(std::time::Duration::from_millis(5));
                None
            })
        });
    });
}

#[test]
fn t04_reuse_needs_timestamps() {
    in_namespace(|| {
        set_sysctl(RANGE, "20000 20019");
        set_sysctl("net.ipv4.tcp_timestamps", "0");
        let (server, _) = server("127.0.0.1", 4000);
        assert!(findings("T04").is_empty(), "nothing is in TIME_WAIT");
        connect_and_close(&server, 12);
        let finding = until_says("T04", "60%");
        says(&finding, &["tcp_tw_reuse is 2 but net.ipv4.tcp_timestamps is 0"]);
        cured(&finding, "tcp_timestamps=1");
    });
}

/// As with a peer that has no timestamps: the sockets decide, not the sysctl.
#[test]
fn ports_without_timestamps_are_not_reusable() {
    in_namespace(|| {
        small_range("20000 20019");
        set_sysctl("net.ipv4.tcp_tw_reuse", "1");
        let (server, address) = server(NEAR, 4000);
        set_sysctl("net.ipv4.tcp_timestamps", "0");
        connect_and_close(&server, 20);
        set_sysctl("net.ipv4.tcp_timestamps", "1");
        until_time_wait(20);
        let mut snapshot = now();
        let seen = |snapshot: &Snapshot| snapshot.connections.seen().unwrap().tuples[0].time_wait_plain;
        if snapshot.connections.seen().unwrap().processes_by == "bpf" {
            assert_eq!(seen(&snapshot), Some(20));
            let finding = the_finding(&snapshot, "P01");
            assert_eq!(finding.severity, Severity::Critical, "{finding:#?}");
        } else {
            assert_eq!(seen(&snapshot), None, "no open connection tells");
        }
        assert!(TcpStream::connect(address).is_err());
        // Without the iterator: none was taken again so far.
        known(&mut snapshot.connections).tuples[0].time_wait_plain = None;
        assert_eq!(the_finding(&snapshot, "P01").severity, Severity::Critical);
        // Ports of another destination may have been; of this one none was taken between the readings, or one was.
        snapshot.interval_ns = 1_000_000_000;
        let mut recycled = |during| {
            let counter = Counter { total: 1, during };
            known(&mut snapshot.counters).insert("TcpExt.TWRecycled".to_owned(), counter);
            assert!(findings_in(&snapshot, "T04").is_empty());
            findings_in(&snapshot, "P01")
        };
        assert!(recycled(1).is_empty());
        let presumed = recycled(0).remove(0);
        assert_eq!(presumed.severity, Severity::Warning);
        shows(&presumed, &["if the connections had no TCP timestamps, which root sees"]);
        // An open connection tells, without privileges.
        let tuple = &mut known(&mut snapshot.connections).tuples[0];
        tuple.destination = "192.0.2.1:443".parse().unwrap();
        tuple.time_wait_plain = Some(20);
        let finding = the_finding(&snapshot, "T04");
        let verdict = "10.0.0.1 → 192.0.2.1:443 uses no TCP timestamps: connect() takes none of the 20 ports in TIME_WAIT again before 60 s have \
                       passed, in spite of net.ipv4.tcp_tw_reuse = 1";
        assert_eq!(finding.verdict, verdict);
        advice(&finding, "switch on TCP timestamps at 192.0.2.1:443");
        snapshot.sysctls.insert("net.ipv4.tcp_tw_reuse".to_owned(), "2".to_owned());
        assert!(findings_in(&snapshot, "T03").is_empty(), "reuse would not help");
        let now = the_finding(&snapshot, "P01").now;
        assert!(now.iter().all(|advice| !advice.action.contains("tcp_tw_reuse")), "{now:#?}");
    });
}

#[test]
fn t05_a_changed_fin_timeout_is_a_myth() {
    in_namespace(|| {
        set_sysctl(RANGE, "20000 20019");
        // By default a connect() over loopback that comes a second late takes one of the ports again.
        set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        set_sysctl("net.ipv4.tcp_fin_timeout", "15");
        assert!(findings("T05").is_empty(), "nothing is in TIME_WAIT");
        let (server, _) = server("127.0.0.1", 4000);
        connect_and_close(&server, 10);
        let finding = until_says("T05", "10 sockets");
        says(&finding, &["tcp_fin_timeout is 15 s instead of 60 s"]);
        cured(&finding, "tcp_fin_timeout=60");
    });
}

#[test]
fn t05_tw_recycle_in_a_file_is_a_myth() {
    let root = std::env::temp_dir().join(format!("fourtuple-doctor-t05-{}", std::process::id()));
    fs::create_dir_all(root.join("etc/sysctl.d")).unwrap();
    fs::write(root.join("etc/sysctl.d/99-net.conf"), "# tuned\nnet.ipv4.tcp_tw_recycle = 1\n").unwrap();
    for (path, text) in [
        ("proc/sys/net/ipv4/ip_local_port_range", "20000 20019"),
        ("proc/sys/net/ipv4/tcp_fin_timeout", "60"),
        ("proc/thread-self/net/sockstat", "TCP: inuse 1 orphan 0 tw 10 alloc 1 mem 0\n"),
    ] {
        fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
        fs::write(root.join(path), text).unwrap();
    }
    let mut snapshot = read(&mut Reader::new(&root));
    let finding = the_finding(&snapshot, "T05");
    says(&finding, &["^/etc/sysctl.d/99-net.conf:2 sets net.ipv4.tcp_tw_recycle"]);
    let remedy = advice(&finding, "sed -i");
    assert_eq!(remedy.proof, Proof::Calculation);
    assert!(remedy.action.ends_with("/etc/sysctl.d/99-net.conf"), "{remedy:?}");
    known(&mut snapshot.memory).time_wait = 4;
    assert!(findings_in(&snapshot, "T05").is_empty(), "few sockets");
    // The command is applied to the copy.
    let command = remedy.action.replace("/etc/", &format!("{}/etc/", root.display()));
    assert!(process::status(Command::new("sh").args(["-c", &command])).unwrap().success());
    assert_eq!(fs::read_to_string(root.join("etc/sysctl.d/99-net.conf")).unwrap(), "# tuned\n");
    assert!(findings_in(&read(&mut Reader::new(&root)), "T05").is_empty());
    fs::remove_dir_all(root).unwrap();
}

#[test]
fn t06_a_client_that_closes_first_is_named() {
    in_namespace(|| {
        small_range("20000 20019");
        let (server, address) = server(NEAR, 4000);
        let _open = connect(address, 1);
        let _accepted = server.accept().unwrap();
        connect_and_close(&server, 8);
        until_time_wait(8);
        assert!(findings("T06").is_empty());
        connect_and_close(&server, 4);
        let finding = until_found("T06");
        says(&finding, &[&format!("{} closes its connections to 10.0.0.1:4000 first", this_process())]);
        assert!(finding.severity == Severity::Notice && !finding.proper.is_empty());
    });
}

/// A full tuple whose sockets have no process: the page says so, and names the processes that have to do with its destination.
#[test]
fn an_exhausted_tuple_has_its_causes_beside_it() {
    in_namespace(|| {
        small_range("20000 20019");
        let (server, address) = server(NEAR, 4000);
        connect_and_close(&server, 20);
        let text = "all of the sockets are in TIME_WAIT, which belong to no process; ";
        let own = this_process();
        let finding = until_found("P01");
        let named = |finding: &Finding| {
            let found = finding.evidence.iter().find_map(|line| line.strip_prefix(text)).map(str::to_owned);
            found.unwrap_or_else(|| panic!("{finding:#?}"))
        };
        let listens = format!("{own} listens at {address}, on this host");
        assert!(named(&finding).ends_with(&listens), "{finding:#?}");
        assert!(finding.now.iter().any(|advice| advice.action.starts_with("fourtuple trace connect")));
        // Rules about the cause are on the same page.
        for id in ["T03", "T06"] {
            let found = until_found(id);
            assert_eq!(found.subject, finding.subject, "{id}");
        }
        assert!(named(&until_found("T06")).contains(&own));
        // A connection from another source to the same destination.
        let _other = {
            let client = socket::open(Transport::Tcp, address, false).unwrap();
            socket::bind(client.as_fd(), SocketAddr::new(ip(FAR), 0)).unwrap();
            socket::connect(client.as_fd(), address).unwrap();
            client
        };
        let finding = until_found("P01");
        let words = format!("{own} has 1 connection from {FAR} to {address}; ");
        assert!(named(&finding).contains(&words), "{finding:#?}");
        drop(server);
        assert!(!named(&until_found("P01")).contains("listens"));
    });
}

#[test]
fn t06_a_server_that_closes_first_is_named() {
    in_namespace(|| {
        set_sysctl(BUCKETS, "40");
        let (server, address) = server("127.0.0.1", 4000);
        let close_first = |number: usize| {
            for _ in 0..number {
                let client = TcpStream::connect(address).unwrap();
                close(server.accept().unwrap().0, client);
            }
        };
        close_first(10);
        until_time_wait(10);
        assert!(findings("T06").is_empty());
        close_first(14);
        let finding = until_says("T06", "24 sockets");
        says(&finding, &["on port 4000 closes first", "60% of the 40"]);
    });
}

#[test]
fn t07_a_close_wait_leak_names_the_process() {
    in_namespace(|| {
        let (server, address) = server("127.0.0.1", 4000);
        let mut reader = Reader::new(Path::new("/"));
        // The first reading loads BPF programs, which takes seconds on a busy host.
        read(&mut reader);
        let mut clients = Vec::new();
        let mut snapshot = until("CLOSE_WAIT", || {
            // After a slow reading the sockets are no longer young.
            clients = connect(address, 60);
            for _ in &clients {
                drop(server.accept().unwrap());
            }
            let snapshot = read(&mut reader);
            let leak = snapshot.connections.seen().unwrap().close_wait.first()?;
            (leak.owner.sockets == 60 && leak.settled == 0).then_some(snapshot)
        });
        assert!(findings_in(&snapshot, "T07").is_empty(), "the sockets are young");
        // A test does not wait for a minute.
        let leak = &mut known(&mut snapshot.connections).close_wait[0];
        (leak.old, leak.oldest_ns) = (60, 300_000_000_000);
        let own = format!("{} has not closed 60 connections", this_process());
        let silent = "silent for 5 min, most with 127.0.0.1:4000";
        says(&the_finding(&snapshot, "T07"), &[&own, silent]);
        known(&mut snapshot.connections).close_wait[0].old = 49;
        assert!(findings_in(&snapshot, "T07").is_empty());
        // Each worker of a server has few.
        let mut workers = snapshot.clone();
        let leaks = &mut known(&mut workers.connections).close_wait;
        let worker =
            |pid| CloseWait { owner: owner(pid, "gunicorn", 20), old: 20, settled: 20, ..leaks[0].clone() };
        *leaks = (1..=3).map(worker).collect();
        says(&the_finding(&workers, "T07"), &["gunicorn (3 processes) has not closed 60 connections"]);
        known(&mut workers.connections).close_wait[2].old = 9;
        known(&mut workers.connections).close_wait[2].settled = 9;
        assert!(findings_in(&workers, "T07").is_empty());
        known(&mut snapshot.connections).close_wait[0].settled = 60;
        let finding = the_finding(&snapshot, "T07");
        says(&finding, &["closed 5 s ago or more"]);
        assert_eq!((finding.severity, &*finding.now[0].action), (Severity::Notice, "fourtuple doctor"));
    });
}

#[test]
fn t07_unix_sockets_whose_peer_closed_are_named() {
    in_namespace(|| {
        let (pairs, peers): (Vec<_>, Vec<_>) = (0..60).map(|_| UnixStream::pair().unwrap()).unzip();
        // A peer that ends only its sending side has not closed.
        peers.iter().for_each(|peer| peer.shutdown(Shutdown::Write).unwrap());
        let reading = || snapshot(|| ()).connections.seen().unwrap().unix_close_wait.clone();
        assert!(reading().is_empty());
        drop(peers);
        let mut reader = Reader::new(Path::new("/"));
        // A child of another test has copies of the descriptors until its end. What is so for a second is a finding.
        let mut snapshot = until("closed peers", || {
            let snapshot = read(&mut reader);
            let leak = snapshot.connections.seen().unwrap().unix_close_wait.first()?;
            (leak.settled == 60 && leak.settled_ns < 1_000_000_000).then_some(snapshot)
        });
        assert!(findings_in(&snapshot, "T07").is_empty(), "they may be on their way to close()");
        let mut at = |seconds: u64, settled| {
            let leak = &mut known(&mut snapshot.connections).unix_close_wait[0];
            (leak.settled_ns, leak.settled) = (seconds * 1_000_000_000, settled);
            findings_in(&snapshot, "T07")
        };
        let name = format!("{} has not closed 60 unix sockets whose peer closed ", this_process());
        let found = only(&at(2, 60), Severity::Notice, &format!("{name}2 s ago or more"));
        assert_eq!(found.now[0].action, "fourtuple doctor --for 60s");
        only(&at(60, 60), Severity::Warning, &format!("{name}60 s ago or more"));
        assert!(at(60, 49).is_empty());
        drop(pairs);
    });
}
