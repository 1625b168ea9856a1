//! `fourtuple forward`: messages, forwarded packets, reload on SIGHUP, shutdown, refused arguments, and `--takeover`, in which each process
//! takes the sockets over from its predecessor while packets flow.

use std::cell::Cell;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use fourtuple_syscalls::seccomp::Facility;
use fourtuple_syscalls::{child, device};
use fourtuple_testing::in_namespace;
use fourtuple_testing::stream::{LONG, Loopback, Stream, arrives, socket};
use fourtuple_testing::wire::{FAR, FAR_V4, FAR_V6, NEAR_V4, NEAR_V6, Wire};

use crate::program::servers::Server;
use crate::program::{
    DEADLINE, TempDir, fourtuple, in_own_namespace, list, number, refused, require_valid, run, until,
};

fn port(socket: &UdpSocket) -> u16 {
    socket.local_addr().unwrap().port()
}

/// Sends a packet, and adds it to `sent`. A packet that [`arrives`] sends again may be in the counters of a forwarder as well.
fn send(sent: &Cell<u64>, from: &UdpSocket, bytes: &[u8], to: SocketAddr) {
    sent.set(sent.get() + 1);
    assert_eq!(from.send_to(bytes, to).unwrap(), bytes.len());
}

#[test]
fn the_record_counts_the_forwarded_packets() {
    in_namespace(|| {
        let (client, target) = (socket(), socket());
        let to = port(&target);
        let arguments = format!(
            "forward --listen 127.0.0.1:0 --to 127.0.0.1:{to} --planes 3 --spread flow:0:1 --return --json"
        );
        let forwarder = Server::forward(&mut fourtuple(&arguments));
        let at: SocketAddr = forwarder.address.parse().unwrap();
        let sent = Cell::new(0);
        let mut buffer = [0; 100];
        for packet in 0..30_u8 {
            let (length, from) = arrives(|| send(&sent, &client, &[packet; 64], at), &target, &mut buffer);
            assert_eq!((length, buffer[0]), (64, packet));
            assert_eq!(arrives(|| send(&sent, &target, b"back", from), &client, &mut buffer).0, 4);
        }
        let again = sent.get() - 60;
        child::terminate(forwarder.child.id()).unwrap();
        let ended = forwarder.end();
        assert_eq!(ended.code, 0, "{ended:?}");
        let record = ended.json();
        require_valid(&record);
        let planes = list(&record, "/results/planes");
        assert_eq!(planes.len(), 3);
        for plane in planes {
            for (field, expected, each) in
                [("received", 10, 1), ("received_bytes", 640, 64), ("sent", 10, 1), ("returned", 10, 1)]
            {
                let counted = number(plane, field);
                assert!((expected..=expected + again * each).contains(&counted), "{field} of {plane}");
            }
            assert_eq!(plane["dropped"], serde_json::json!({}));
        }
        assert!(again > 0 || record["results"]["jain"] == 1.0, "{record:#}");
    });
}

/// Every packet of one 4-tuple arrives under each BPF program that selects a plane.
#[test]
fn bpf_programs_select_the_plane() {
    in_namespace(|| {
        for spread in ["map:random", "map:flow:0:1", "xdp:64", "cpumap:1"] {
            let (client, target) = (socket(), socket());
            let to = port(&target);
            let arguments = format!(
                "forward --listen 127.0.0.1:0 --to 127.0.0.1:{to} --planes 2 --spread {spread} --for 1ms --json"
            );
            let tried = run(&mut fourtuple(&arguments));
            if tried.code == 4 && tried.stderr.contains("CAP_BPF") {
                return fourtuple_testing::skip("bpf_programs_select_the_plane", "bpf", &tried.stderr);
            }
            let arguments = arguments.replace(" --for 1ms", "");
            let forwarder = Server::forward(&mut fourtuple(&arguments));
            let at: SocketAddr = forwarder.address.parse().unwrap();
            let sent = Cell::new(0);
            let mut buffer = [0; 100];
            for packet in 0..100_u8 {
                let (length, _) = arrives(|| send(&sent, &client, &[packet; 64], at), &target, &mut buffer);
                assert_eq!((length, buffer[0]), (64, packet), "{spread}");
            }
            child::terminate(forwarder.child.id()).unwrap();
            let record = forwarder.end().json();
            let planes = list(&record, "/results/planes");
            let received: u64 = planes.iter().map(|plane| number(plane, "received")).sum();
            assert!((100..=sent.get()).contains(&received), "{spread}: {received}");
        }
    });
}

/// Returns the UDP packets of this namespace that had a wrong checksum.
fn checksum_errors() -> u64 {
    let old = fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
    let mut rows = old.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (rows.next().unwrap(), rows.next().unwrap());
    let mut v4 = names.split(' ').zip(values.split(' '));
    let (_, v4) = v4.find(|(name, _)| *name == "InCsumErrors").unwrap();
    let new = fs::read_to_string("/proc/thread-self/net/snmp6").unwrap();
    let v6 = new.lines().find_map(|line| line.strip_prefix("Udp6InCsumErrors")).unwrap();
    v4.parse::<u64>().unwrap() + v6.trim().parse::<u64>().unwrap()
}

/// A veth device leaves checksums to hardware that it does not have. Native `cpumap` loses the mark of such packets, and the kernel drops
/// them: no plane is too slow.
#[test]
fn wrong_checksums_behind_cpumap_are_named() {
    in_own_namespace(|test| {
        let Some(wire) = Wire::open(test) else { return };
        wire.far_away(|| device::leave_checksums(FAR, true)).unwrap();
        for (near, far) in [(NEAR_V4, FAR_V4), (NEAR_V6, FAR_V6)] {
            for plane in ["batched", "offload"] {
                let target = UdpSocket::bind((near, 0)).unwrap();
                let (listen, to) = (SocketAddr::new(near, 0), target.local_addr().unwrap());
                let arguments = format!(
                    "forward --listen {listen} --to {to} --plane {plane} --planes 1 --spread cpumap:1@near --json"
                );
                let tried = run(&mut fourtuple(&format!("{arguments} --for 1ms")));
                if tried.code == 4 && tried.stderr.contains("CAP_BPF") {
                    return fourtuple_testing::skip(test, "bpf", &tried.stderr);
                }
                let forwarder = Server::forward(&mut fourtuple(&arguments));
                let sender = wire.far_away(|| UdpSocket::bind((far, 0)).unwrap());
                let before = checksum_errors();
                for _ in 0..20 {
                    sender.send_to(&[7; 200], &forwarder.address).unwrap();
                }
                until("the packets are dropped", || checksum_errors() == before + 20);
                child::terminate(forwarder.child.id()).unwrap();
                let record = forwarder.end().json();
                let counted = &list(&record, "/results/planes")[0];
                let expected = serde_json::json!({ "checksum": 20 });
                assert_eq!(counted["dropped"], expected, "{plane} {near}: {counted}");
                let advice = record["results"]["advice"].to_string();
                assert!(advice.contains("20 packets had a wrong UDP checksum"), "{advice}");
            }
        }
    });
}

#[test]
fn a_reload_applies_valid_routes_and_no_invalid_ones() {
    in_namespace(|| {
        let (client, one, other) = (socket(), socket(), socket());
        let temp = TempDir::new();
        let file = |to: u16, more: &str| {
            format!("planes = 1\n[[link]]\nlisten = \"127.0.0.1:0\"\nto = \"127.0.0.1:{to}\"\n{more}")
        };
        let path = temp.file("links.toml", &file(port(&one), ""));
        let mut forwarder = Server::forward(&mut fourtuple(&format!("forward --config {path} --json")));
        let mut bytes = [0; 10];
        let here = forwarder.address.rsplit_once(':').expect("a port").1.parse().expect("a number");
        let mut reload = |content: &str| {
            temp.file("links.toml", content);
            child::hang_up(forwarder.child.id()).unwrap();
            forwarder.line()
        };
        assert!(reload(&file(port(&other), "")).contains("routes taken over"));
        let refused = reload(&file(port(&one), "unknown = 1\n"));
        assert!(refused.contains("line 5") && refused.contains("nothing is changed"), "{refused}");
        let refused = reload(&file(here, ""));
        assert!(refused.contains("forward to itself") && refused.contains("nothing is changed"), "{refused}");
        assert!(reload(&file(port(&other), "return = true\n")).contains("only its routes"));
        assert!(forwarder.line().contains("routes taken over"));
        let send = || _ = client.send_to(b"x", &forwarder.address).unwrap();
        assert_eq!(arrives(send, &other, &mut bytes).0, 1);
        child::interrupt(forwarder.child.id()).unwrap();
        let ended = forwarder.end();
        assert_eq!(ended.code, 0, "{ended:?}");
        require_valid(&ended.json());
    });
}

#[test]
fn a_reload_names_every_setting_that_stays() {
    in_namespace(|| {
        let target = socket();
        let temp = TempDir::new();
        let file = |whole: &str, link: &str| {
            format!(
                "{whole}[[link]]\nlisten = \"127.0.0.1:0\"\nto = \"127.0.0.1:{}\"\nreturn = true\n{link}",
                port(&target)
            )
        };
        let path = temp.file("links.toml", &file("planes = 1\n", ""));
        let mut forwarder = Server::forward(&mut fourtuple(&format!("forward --config {path}")));
        let whole = "planes = 2\nplane = \"batched\"\npin = true\nclients-total = 9\nshare = true\n";
        let link = "spread = \"random\"\nidle = \"1s\"\nclients = 7\nbfd = \"127.0.0.2\"\n";
        temp.file("links.toml", &file(whole, link));
        child::hang_up(forwarder.child.id()).unwrap();
        assert_eq!(
            forwarder.line(),
            "SIGHUP: planes, plane, pin, clients-total, share not taken over: needs a new start\n"
        );
        assert_eq!(
            forwarder.line(),
            "SIGHUP: link 1: only its routes are taken over; spread, idle, clients, bfd needs a new start\n"
        );
        assert_eq!(forwarder.line(), "SIGHUP: link 1: routes taken over\n");
        temp.file("links.toml", &(file("planes = 0\n", "")));
        child::hang_up(forwarder.child.id()).unwrap();
        let line = forwarder.line();
        assert!(line.contains("'planes'") && line.contains("nothing is changed"), "{line}");
        // A flag overrides the file.
        let mut forwarder = Server::forward(&mut fourtuple(&format!("forward --config {path} --planes 1")));
        temp.file("links.toml", &file("planes = 5\n", ""));
        child::hang_up(forwarder.child.id()).unwrap();
        assert_eq!(forwarder.line(), "SIGHUP: link 1: routes taken over\n");
    });
}

#[test]
fn a_second_forwarder_at_one_address_is_refused() {
    in_namespace(|| {
        let arguments = "forward --listen 127.0.0.1:4000 --to 127.0.0.1:1 --planes 2";
        let first = Server::forward(&mut fourtuple(arguments));
        let second = run(&mut fourtuple(arguments));
        assert_eq!(second.code, 4, "{second:?}");
        assert_eq!(second.stderr.lines().count(), 1, "{second:?}");
        for expected in ["127.0.0.1:4000", "EADDRINUSE", "--takeover", "--share"] {
            assert!(second.stderr.contains(expected), "{second:?}");
        }
        let shared = run(&mut fourtuple(&format!("{arguments} --share --for 1ms")));
        assert_eq!(shared.code, 0, "{shared:?}");
        drop(first);
    });
}

#[test]
fn clients_without_room_make_a_remark() {
    in_namespace(|| {
        let target = socket();
        let arguments = format!(
            "forward --listen 127.0.0.1:0 --to 127.0.0.1:{} --planes 1 --return --clients-total 1 --json",
            port(&target)
        );
        let forwarder = Server::forward(&mut fourtuple(&arguments));
        for _ in 0..2 {
            let client = socket();
            let send = || _ = client.send_to(b"x", &forwarder.address).unwrap();
            assert_eq!(arrives(send, &target, &mut [0; 10]).0, 1);
        }
        child::interrupt(forwarder.child.id()).unwrap();
        let ended = forwarder.end();
        assert_eq!(ended.code, 3, "{ended:?}");
        let record = ended.json();
        require_valid(&record);
        assert_eq!(record["validity"][0]["id"], "clients");
        assert_eq!(record["results"]["client_limit"], 1);
        assert_eq!(number(&list(&record, "/results/planes")[0], "evicted"), 1);
        let refused = run(&mut fourtuple("forward --listen 127.0.0.1:0 --to 127.0.0.1:1 --clients-total 5"));
        assert_eq!(refused.code, 2, "{refused:?}");
        assert!(refused.line().contains("'--clients-total' needs '--return'"), "{refused:?}");
        let many = arguments.replace("--clients-total 1 ", "--clients-total 70000 ");
        let refused = run(&mut fourtuple(&many));
        assert_eq!(refused.code, 2, "{refused:?}");
        assert!(refused.stderr.contains("net.ipv4.ip_local_port_range"), "{refused:?}");
    });
}

/// Of 100 descriptors, one plane with one socket leaves 30 for clients (`ClientLimit`).
#[test]
fn clients_leave_descriptors_for_everything_else() {
    in_namespace(|| {
        let target = socket();
        let command = |clients: u32| {
            let mut command = fourtuple(&format!(
                "forward --listen 127.0.0.1:0 --to 127.0.0.1:{} --planes 1 --return --clients-total {clients} --metrics 127.0.0.1:9100 \
                 --json",
                port(&target)
            ));
            child::limit_descriptors(&mut command, 100);
            command
        };
        let refused = run(command(31).args(["--for", "1ms"]));
        assert_eq!(refused.code, 2, "{refused:?}");
        assert!(refused.line().ends_with("of which RLIMIT_NOFILE leaves 30"), "{refused:?}");
        let forwarder = Server::forward(&mut command(30));
        let clients: Vec<UdpSocket> = (0..30).map(|_| socket()).collect();
        let at: SocketAddr = forwarder.address.parse().unwrap();
        let sent = Cell::new(0);
        let exchange = |client: &UdpSocket| {
            let mut buffer = [0; 10];
            let (_, from) = arrives(|| send(&sent, client, b"x", at), &target, &mut buffer);
            assert_eq!(arrives(|| send(&sent, &target, b"x", from), client, &mut buffer).0, 1);
        };
        // A client with two replies is established.
        (0..2).for_each(|_| clients.iter().for_each(exchange));
        let name = "fourtuple_forward_dropped_packets_total{plane=\"0\",reason=\"no-client\"} ";
        let mut refused = 0_u64;
        // More packets if the queue of the loopback device was full.
        until("the refused packets are counted", || {
            socket().send_to(b"y", &forwarder.address).unwrap();
            refused += 1;
            let page = page("127.0.0.1:9100");
            let counted = page.lines().find_map(|line| line.strip_prefix(name));
            counted.is_some_and(|count| count.parse::<u64>().expect("a number") >= 5)
        });
        clients.iter().for_each(exchange);
        child::interrupt(forwarder.child.id()).unwrap();
        let record = forwarder.end().json();
        assert_eq!(
            (record["validity"][0]["id"].as_str(), &record["results"]["client_limit"]),
            (Some("clients"), &30.into())
        );
        let plane = &list(&record, "/results/planes")[0];
        let dropped = number(&plane["dropped"], "no-client");
        assert!((5..=refused).contains(&dropped), "{refused} packets: {plane}");
        assert_eq!(plane["dropped"], serde_json::json!({ "no-client": dropped }));
        let exchanges = 90..=sent.get() - 90;
        for field in ["sent", "returned"] {
            assert!(exchanges.contains(&number(plane, field)), "{field} of {plane}");
        }
        assert_eq!(number(plane, "evicted"), 0);
    });
}

#[test]
fn a_kernel_without_udp_gro_is_in_the_record() {
    in_namespace(|| {
        for (plane, is_wanted) in [("offload", true), ("batched", false)] {
            let mut command = fourtuple(&format!(
                "forward --listen 127.0.0.1:0 --to 127.0.0.1:1 --planes 1 --plane {plane} --for 1ms --json"
            ));
            child::refuse(&mut command, Facility::UdpGro);
            let ended = run(&mut command);
            assert_eq!(ended.code, 0, "{ended:?}");
            let record = ended.json();
            let advice = list(&record, "/results/advice");
            let is_told = advice.iter().any(|line| line.to_string().contains("no UDP_GRO"));
            assert_eq!(is_told, is_wanted, "{plane}: {advice:?}");
        }
    });
}

#[test]
fn a_refused_receive_call_ends_it_with_one_line() {
    in_namespace(|| {
        let mut command = fourtuple("forward --listen 127.0.0.1:0 --to 127.0.0.1:1 --planes 1");
        child::refuse(&mut command, Facility::ReceiveMany);
        let mut forwarder = Server::forward(&mut command);
        let client = socket();
        // More than one packet: the queue of the loopback device may be full.
        until("it ends", || {
            client.send_to(b"x", &forwarder.address).unwrap();
            forwarder.child.try_wait().unwrap().is_some()
        });
        let ended = forwarder.end();
        assert_eq!(ended.code, 4, "{ended:?}");
        assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
        assert!(ended.stderr.contains("recvmmsg(): EPERM"), "{ended:?}");
    });
}

#[test]
fn prometheus_gets_its_counters() {
    in_namespace(|| {
        let (client, target) = (socket(), socket());
        let arguments = format!(
            "forward --listen 127.0.0.1:0 --to 127.0.0.1:{} --planes 1 --metrics 127.0.0.1:0",
            port(&target)
        );
        let mut forwarder = Server::forward(&mut fourtuple(&arguments));
        let line = forwarder.line();
        let address =
            line.trim_end().strip_prefix("metrics at http://").and_then(|rest| rest.strip_suffix("/metrics"));
        let address = address.unwrap_or_else(|| panic!("{line:?}"));
        let at: SocketAddr = forwarder.address.parse().unwrap();
        let sent = Cell::new(0);
        assert_eq!(arrives(|| send(&sent, &client, b"abc", at), &target, &mut [0; 10]).0, 3);
        let get = |path: &str| {
            let mut stream = TcpStream::connect(address).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        };
        let name = "fourtuple_forward_sent_bytes_total{plane=\"0\"}";
        let is_counted = |page: &str| {
            let line = |packets: u64| format!("{name} {}\n", 3 * packets);
            (1..=sent.get()).any(|packets| page.contains(&line(packets)))
        };
        let begun = Instant::now();
        while !is_counted(&get("/metrics")) {
            assert!(begun.elapsed() < DEADLINE, "{}", get("/metrics"));
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(get("/metrics").starts_with("HTTP/1.1 200 OK\r\n"));
        assert!(get("/other").starts_with("HTTP/1.1 404 "));
    });
}

/// Intervals with which no delay of a busy machine takes a session down.
const PATIENT: &str = "--bfd-interval 200ms --bfd-receive-interval 250ms --bfd-multiplier 100";

#[test]
fn bfd_reports_up_and_a_terminated_peer_reports_down() {
    in_namespace(|| {
        let flags = |here: &str, there: &str| format!("--bfd {there}%lo@{here} {PATIENT}");
        watch_each_other(0, flags, |peer| format!("{peer}%lo"), "port");
    });
}

#[test]
fn in_band_bfd_reports_up_and_a_peer_down() {
    in_namespace(|| {
        let flag = |_: &str, there: &str| format!("--bfd-in-band {there}:4000 {PATIENT}");
        watch_each_other(4000, flag, |peer| format!("{peer}:4000"), "filter");
    });
}

/// Runs two forwarders with a BFD session. `flag` returns the flags for a local and a peer address, `named` the peer's name in a
/// record.
fn watch_each_other(
    listen: u16,
    flag: impl Fn(&str, &str) -> String,
    named: impl Fn(&str) -> String,
    reception: &str,
) {
    let target = socket();
    let to = port(&target);
    let start = |here: &str, there: &str| {
        let arguments = format!(
            "forward --listen {here}:{listen} --to {there}:{to} --planes 1 {} --metrics 127.0.0.1:0 --json",
            flag(here, there),
        );
        let mut forwarder = Server::forward(&mut fourtuple(&arguments));
        let line = forwarder.line();
        let address = line.trim_end().strip_prefix("metrics at http://").unwrap().to_owned();
        (forwarder, address.strip_suffix("/metrics").unwrap().to_owned())
    };
    let (one, metrics) = start("127.0.0.1", "127.0.0.2");
    let (other, metrics_of_other) = start("127.0.0.2", "127.0.0.1");
    let is = |metrics: &str, peer: &str, up: u8| {
        let peer = named(peer);
        page(metrics).contains(&format!("fourtuple_forward_bfd_up{{session=\"0\",peer=\"{peer}\"}} {up}\n"))
    };
    // The peers reach the state Up one after another.
    until("up", || is(&metrics, "127.0.0.2", 1) && is(&metrics_of_other, "127.0.0.1", 1));
    child::terminate(other.child.id()).unwrap();
    let record = other.end().json();
    require_valid(&record);
    let session = &list(&record, "/results/bfd")[0];
    assert_eq!(
        (session["peer"].as_str(), session["state"].as_str()),
        (Some(named("127.0.0.1").as_str()), Some("up"))
    );
    assert_eq!(session["reception"], reception);
    // The end of the process itself is not a failure of the session.
    assert_eq!(session["diagnostic"] == "none", number(session, "downs") == 0, "{session}");
    assert!(number(session, "ups") >= 1 && number(session, "received") >= 3, "{session}");
    until("down", || is(&metrics, "127.0.0.2", 0));
    child::terminate(one.child.id()).unwrap();
    let record = one.end().json();
    require_valid(&record);
    let session = &list(&record, "/results/bfd")[0];
    assert_eq!(session["state"], "down");
    assert!(number(session, "downs") >= 1, "{session}");
}

/// Returns the response with the metrics.
fn page(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// The default queue holds about 90 packets of 1,000 bytes.
#[test]
fn a_larger_receive_queue_holds_a_burst() {
    in_namespace(|| {
        let (client, target) = (socket(), socket());
        let to = port(&target);
        for (flag, holds) in [("--receive-buffer 212992", true), ("--receive-buffer 20000", false)] {
            let arguments =
                format!("forward --listen 127.0.0.1:0 --to 127.0.0.1:{to} --planes 1 {flag} --json");
            let forwarder = Server::forward(&mut fourtuple(&arguments));
            let id = forwarder.child.id();
            let signal = |name: &str| {
                assert!(Command::new("kill").args([name, &id.to_string()]).status().unwrap().success());
            };
            signal("-STOP");
            until("it stops", || {
                std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap().contains(") T ")
            });
            (0..120).for_each(|_| assert_eq!(client.send_to(&[7; 1000], &forwarder.address).unwrap(), 1000));
            // A packet that is on its way at the end would be in neither count.
            Loopback::open().flush();
            signal("-CONT");
            child::terminate(id).unwrap();
            let record = forwarder.end().json();
            let [plane] = list(&record, "/results/planes") else { panic!("{record:#}") };
            let overflow = plane["dropped"].get("overflow").map_or(0, |count| count.as_u64().unwrap());
            assert_eq!(
                (number(plane, "received") + overflow, overflow == 0),
                (120, holds),
                "{flag} {record:#}"
            );
        }
        for (arguments, part) in [
            ("--to 127.0.0.1:1 --receive-buffer 1000000000", "net.core.rmem_max=1000000000"),
            ("--to 127.255.255.255:1", "a broadcast address"),
        ] {
            let ended = run(&mut fourtuple(&format!("forward --listen 127.0.0.1:0 {arguments}")));
            assert_eq!(ended.code, 2, "{ended:?}");
            assert!(ended.line().contains(part), "{ended:?}");
        }
    });
}

#[test]
fn bad_values_are_named_with_their_flag() {
    let to = "--to 127.0.0.1:1";
    let mistakes = [
        ("", "--listen"),
        ("--listen 127.0.0.1:0", "'--to'"),
        ("--listen nowhere --to 127.0.0.1:1", "'nowhere' for '--listen'"),
        (&format!("--listen 127.0.0.1:0 {to} --spread even"), "'--spread'"),
        (&format!("--listen 127.0.0.1:0 {to} --spread xdp:64 --return"), "'--spread'"),
        (&format!("--listen 127.0.0.1:0 {to} --planes 0"), "--planes"),
        (&format!("--listen 127.0.0.1:0 {to} --plane fast"), "--plane"),
        (&format!("--listen 127.0.0.1:0 {to} --idle 5s"), "'--return'"),
        (&format!("--listen 127.0.0.1:0 {to} --route 10.0.0.1/8=127.0.0.1:1"), "'--route'"),
        (&format!("--listen 127.0.0.1:0 {to} --config x"), "--config"),
        ("--config /nonexistent", "'/nonexistent' for '--config'"),
        ("--listen 127.0.0.1:4000 --to 127.0.0.1:4000", "forward to itself"),
        ("--listen 0.0.0.0:4000 --to 127.1.2.3:4000", "forward to itself"),
    ];
    for (arguments, expected) in mistakes {
        refused(&mut fourtuple(&format!("forward {arguments}")), &[expected]);
    }
}

fn restarts() -> usize {
    let number = std::env::var("FOURTUPLE_RESTARTS").ok();
    number.map_or(5, |number| number.parse().expect("FOURTUPLE_RESTARTS is a number"))
}

/// Starts the next forwarder and waits until it has taken over. Returns it, and the number of packets that its predecessor
/// received.
fn next(arguments: &str, before: Server) -> (Server, u64) {
    let process = before.child.id();
    let mut next = Server::forward(&mut fourtuple(arguments));
    let line = next.line();
    assert_eq!(line, format!("taken over from process {process}\n"));
    (next, received(before))
}

/// Waits until the forwarder ends by itself, requires that it forwarded every packet that it received, and returns the count.
fn received(forwarder: Server) -> u64 {
    let ended = forwarder.end();
    assert_eq!(ended.code, 0, "{ended:?}");
    let record = ended.json();
    require_valid(&record);
    let planes = list(&record, "/results/planes");
    for plane in planes {
        assert_eq!(plane["dropped"], serde_json::json!({}));
    }
    planes.iter().map(|plane| number(plane, "received")).sum()
}

fn terminate(forwarder: Server) -> u64 {
    child::terminate(forwarder.child.id()).unwrap();
    received(forwarder)
}

/// Replaces a forwarder again and again under a stream of packets.
fn replace(flags: &str, replies: bool) {
    let temp = TempDir::new();
    let path = temp.join("door");
    let mut stream = Stream::new(replies);
    let replies = if replies { "--return" } else { "" };
    let target = stream.target();
    let arguments =
        format!("forward --listen 127.0.0.1:0 --to {target} {flags} {replies} --takeover {path} --json");
    let mut forwarder = Some(Server::forward(&mut fourtuple(&arguments)));
    let to = forwarder.as_ref().unwrap().address.parse().unwrap();
    let mut in_all = 0;
    let sent = stream.run(to, || {
        for _ in 0..restarts() {
            let (next, received) = next(&arguments, forwarder.take().unwrap());
            in_all += received;
            forwarder = Some(next);
        }
    });
    in_all += terminate(forwarder.unwrap());
    assert_eq!(in_all, sent, "{arguments}");
    assert!(!Path::new(&path).exists());
}

#[test]
fn no_packet_is_lost_one_way() {
    in_namespace(|| {
        for kind in ["one-by-one", "batched", "offload"] {
            replace(&format!("--planes 2 --spread flow:0:4 --plane {kind}"), false);
        }
    });
}

#[test]
fn no_packet_is_lost_with_replies() {
    in_namespace(|| {
        for kind in ["one-by-one", "batched", "offload"] {
            replace(&format!("--planes 2 --spread flow:0:4 --plane {kind}"), true);
        }
    });
}

/// The BPF program that selects the plane stays attached to the sockets or to the device.
#[test]
fn bpf_programs_stay_attached() {
    in_namespace(|| {
        for spread in ["map:random", "map:flow:0:4", "xdp:64", "cpumap:1"] {
            let tried = format!(
                "forward --listen 127.0.0.1:0 --to 127.0.0.1:9 --planes 2 --spread {spread} --for 1ms --json"
            );
            let tried = run(&mut fourtuple(&tried));
            if tried.code == 4 && tried.stderr.contains("CAP_BPF") {
                return fourtuple_testing::skip("bpf_programs_stay_attached", "bpf", &tried.stderr);
            }
            replace(&format!("--planes 2 --spread {spread}"), false);
        }
    });
}

#[test]
fn two_links_are_taken_over_together() {
    in_namespace(|| {
        let temp = TempDir::new();
        let (one, other, client) = (socket(), socket(), socket());
        let (to_one, to_other) = (one.local_addr().unwrap(), other.local_addr().unwrap());
        let first = |listen: &str| format!("[[link]]\nlisten = \"{listen}\"\nto = \"{to_one}\"\n");
        let second = format!("[[link]]\nlisten = \"127.0.0.2:4000\"\nto = \"{to_other}\"\nreturn = true\n");
        let file = temp.file("links.toml", &format!("planes = 2\n{}{second}", first("127.0.0.1:0")));
        let door = temp.join("door");
        let arguments = format!("forward --config {file} --takeover {door} --json");
        let forwarder = Server::forward(&mut fourtuple(&arguments));
        let addresses = [forwarder.address.clone(), "127.0.0.2:4000".to_owned()];
        let mut bytes = [0; 10];
        let at = addresses.each_ref().map(|address| address.parse::<SocketAddr>().unwrap());
        let sent = Cell::new(0);
        let (_, from) = arrives(|| send(&sent, &client, b"x", at[1]), &other, &mut bytes);
        // The links come in another order and with other routes: the successor finds each link by its address.
        temp.file("links.toml", &format!("planes = 1\n{second}{}", first(&addresses[0])));
        let mut next = Server::forward(&mut fourtuple(&arguments));
        assert_eq!(next.address, addresses[1]);
        assert!(next.line().starts_with(&format!("forwarding {} on 1 plane ", addresses[0])));
        assert!(next.line().starts_with("taken over from process "));
        assert!((1..=sent.get()).contains(&received(forwarder)));
        // The successor knows the client: replies from the next hop reach it, and its packets leave from the same source.
        assert_eq!(arrives(|| _ = other.send_to(b"back", from).unwrap(), &client, &mut bytes).0, 4);
        sent.set(0);
        assert_eq!(arrives(|| send(&sent, &client, b"y", at[1]), &other, &mut bytes).1, from);
        assert_eq!(arrives(|| send(&sent, &client, b"zz", at[0]), &one, &mut bytes).0, 2);
        assert!((2..=sent.get()).contains(&terminate(next)));
    });
}

#[test]
fn a_mismatch_is_refused_and_the_predecessor_continues() {
    in_namespace(|| {
        let temp = TempDir::new();
        let (target, client) = (socket(), socket());
        let sent = Cell::new(0);
        let door = temp.join("door");
        let to = target.local_addr().unwrap();
        let with =
            |flags: &str| format!("forward --to {to} --planes 1 --takeover {door} --json --listen {flags}");
        let mut forwarder = Server::forward(&mut fourtuple(&with("127.0.0.1:0")));
        for (flags, why) in [
            ("127.0.0.1:0 --spread random", "spread by hash"),
            ("127.0.0.9:0", "does not listen at 127.0.0.9:0"),
            ("127.0.0.1:0 --plane batched", "put together"),
        ] {
            let ended = run(&mut fourtuple(&with(flags)));
            assert_eq!(ended.code, 2, "{ended:?}");
            assert!(ended.line().contains(why), "{ended:?}");
            let message = forwarder.line();
            assert!(message.starts_with("not handed over: ") && message.contains(why), "{message}");
            let at: SocketAddr = forwarder.address.parse().unwrap();
            assert_eq!(arrives(|| send(&sent, &client, b"x", at), &target, &mut [0; 4]).0, 1);
        }
        assert!((3..=sent.get()).contains(&terminate(forwarder)));
    });
}

#[test]
fn a_takeover_path_has_mode_0600_is_reused_and_removed() {
    in_namespace(|| {
        let temp = TempDir::new();
        // Open until the end: the forwarder must not be given its port.
        let target = socket();
        let (door, to) = (temp.join("door"), target.local_addr().unwrap());
        let arguments = format!("forward --listen 127.0.0.1:0 --to {to} --takeover {door} --json");
        let mut killed = Server::forward(&mut fourtuple(&arguments));
        assert_eq!(fs::metadata(&door).unwrap().permissions().mode() & 0o777, 0o600);
        killed.child.kill().unwrap();
        killed.child.wait().unwrap();
        assert!(Path::new(&door).exists());
        let forwarder = Server::forward(&mut fourtuple(&arguments));
        assert_eq!(terminate(forwarder), 0);
        assert!(!Path::new(&door).exists());
        let file = temp.file("file", "of another program");
        let ended = run(&mut fourtuple(&arguments.replace(&door, &file)));
        assert_eq!(ended.code, 4, "{ended:?}");
        assert!(ended.line().contains("EADDRINUSE"), "{ended:?}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "of another program");
    });
}

/// Polls the metrics at this address until they contain this text.
fn metrics(address: &str, what: &str) {
    let begun = Instant::now();
    loop {
        let mut answer = String::new();
        if let Ok(mut stream) = TcpStream::connect(address) {
            write!(stream, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
            // A server that ends in the middle of its response has sent part of it: this part is kept.
            let _ = stream.read_to_string(&mut answer);
        }
        if answer.contains(what) {
            return;
        }
        assert!(begun.elapsed() < LONG, "{answer}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn bfd_stays_up_and_metrics_move() {
    stays_up("127.0.0.2", |here, there| format!("--listen {here}:0 --bfd {there}@{here}"));
}

#[test]
fn bfd_among_the_data_stays_up() {
    stays_up("127.0.0.2:4000", |here, there| {
        format!("--listen {here}:4000 --spread random --bfd-in-band {there}:4000")
    });
}

/// Runs two forwarders at 127.0.0.1 and 127.0.0.2 with a BFD session between them; the arguments are their BFD flags.
fn stays_up(peers_name: &'static str, bfd: fn(&str, &str) -> String) {
    in_namespace(move || {
        let temp = TempDir::new();
        let to = socket().local_addr().unwrap().port();
        let door = temp.join("door");
        // The port was free, and no other process in this namespace can have bound it since.
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let start = |here: &str, there: &str, more: &str| {
            format!("forward {} {PATIENT} --to {there}:{to} --planes 1 --json {more}", bfd(here, there))
        };
        let peer = Server::forward(&mut fourtuple(&start("127.0.0.2", "127.0.0.1", "")));
        let arguments = start("127.0.0.1", "127.0.0.2", &format!("--metrics {free} --takeover {door}"));
        let mut forwarder = Server::forward(&mut fourtuple(&arguments));
        assert!(forwarder.line().starts_with("metrics at "));
        let up = format!("fourtuple_forward_bfd_up{{session=\"0\",peer=\"{peers_name}\"}} 1\n");
        metrics(&free.to_string(), &up);
        for _ in 0..restarts() {
            let (mut next, _) = next(&arguments, forwarder);
            assert!(next.line().starts_with("metrics at "));
            metrics(&free.to_string(), &up);
            forwarder = next;
        }
        let sessions = |forwarder: Server| {
            child::terminate(forwarder.child.id()).unwrap();
            let record = forwarder.end().json();
            list(&record, "/results/bfd")[0].clone()
        };
        // The peer ends first, because its session is up until then. A restarted session would go down at every takeover.
        let peer = sessions(peer);
        assert!(number(&peer, "downs") < restarts() as u64, "{peer}");
        let own = sessions(forwarder);
        assert!(number(&own, "ups") <= restarts() as u64, "{own}");
    });
}
