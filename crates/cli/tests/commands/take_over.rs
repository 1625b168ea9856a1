//! `fourtuple forward --takeover`: each process takes the sockets over from its predecessor while packets flow.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::program::forwarder::Forwarder;
use crate::program::{Room, fourtuple, list, number, require_valid, run};
use fourtuple_syscalls::child;
use fourtuple_testing::in_namespace;
use fourtuple_testing::stream::{LONG, Stream, arrives, socket};

fn restarts() -> usize {
    let number = std::env::var("FOURTUPLE_RESTARTS").ok();
    number.map_or(5, |number| number.parse().expect("FOURTUPLE_RESTARTS is a number"))
}

/// Starts the next forwarder and waits until it has taken over. Returns it, and the number of packets that its predecessor
/// received.
fn next(arguments: &str, before: Forwarder) -> (Forwarder, u64) {
    let process = before.child.id();
    let mut next = Forwarder::start(&mut fourtuple(arguments));
    let line = next.line();
    assert_eq!(line, format!("taken over from process {process}\n"));
    (next, received(before))
}

/// Waits until the forwarder ends by itself, requires that it forwarded every packet that it received, and returns the count.
fn received(forwarder: Forwarder) -> u64 {
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

fn terminate(forwarder: Forwarder) -> u64 {
    child::terminate(forwarder.child.id()).unwrap();
    received(forwarder)
}

/// Replaces a forwarder again and again under a stream of packets.
fn replace(flags: &str, replies: bool) {
    let room = Room::new();
    let path = room.join("door");
    let mut stream = Stream::new(replies);
    let replies = if replies { "--return" } else { "" };
    let target = stream.target();
    let arguments =
        format!("forward --listen 127.0.0.1:0 --to {target} {flags} {replies} --takeover {path} --json");
    let mut forwarder = Some(Forwarder::start(&mut fourtuple(&arguments)));
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
        let room = Room::new();
        let (one, other, client) = (socket(), socket(), socket());
        let (to_one, to_other) = (one.local_addr().unwrap(), other.local_addr().unwrap());
        let first = |listen: &str| format!("[[link]]\nlisten = \"{listen}\"\nto = \"{to_one}\"\n");
        let second = format!("[[link]]\nlisten = \"127.0.0.2:4000\"\nto = \"{to_other}\"\nreturn = true\n");
        let file = room.file("links.toml", &format!("planes = 2\n{}{second}", first("127.0.0.1:0")));
        let door = room.join("door");
        let arguments = format!("forward --config {file} --takeover {door} --json");
        let forwarder = Forwarder::start(&mut fourtuple(&arguments));
        let addresses = [forwarder.address.clone(), "127.0.0.2:4000".to_owned()];
        let mut bytes = [0; 10];
        let (_, from) = arrives(|| _ = client.send_to(b"x", &addresses[1]).unwrap(), &other, &mut bytes);
        // The links come in another order and with other routes: the successor finds each link by its address.
        room.file("links.toml", &format!("planes = 1\n{second}{}", first(&addresses[0])));
        let mut next = Forwarder::start(&mut fourtuple(&arguments));
        assert_eq!(next.address, addresses[1]);
        assert!(next.line().starts_with(&format!("forwarding {} on 1 plane ", addresses[0])));
        assert!(next.line().starts_with("taken over from process "));
        assert_eq!(received(forwarder), 1);
        // The successor knows the client: replies from the next hop reach it, and its packets leave from the same source.
        assert_eq!(arrives(|| _ = other.send_to(b"back", from).unwrap(), &client, &mut bytes).0, 4);
        let sent = |bytes: &'static [u8], to: usize| _ = client.send_to(bytes, &addresses[to]).unwrap();
        assert_eq!(arrives(|| sent(b"y", 1), &other, &mut bytes).1, from);
        assert_eq!(arrives(|| sent(b"zz", 0), &one, &mut bytes).0, 2);
        assert_eq!(terminate(next), 2);
    });
}

#[test]
fn a_mismatch_is_refused_and_the_predecessor_continues() {
    in_namespace(|| {
        let room = Room::new();
        let (target, client) = (socket(), socket());
        let door = room.join("door");
        let to = target.local_addr().unwrap();
        let with =
            |flags: &str| format!("forward --to {to} --planes 1 --takeover {door} --json --listen {flags}");
        let mut forwarder = Forwarder::start(&mut fourtuple(&with("127.0.0.1:0")));
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
            client.send_to(b"x", &forwarder.address).unwrap();
            assert_eq!(target.recv(&mut [0; 4]).unwrap(), 1);
        }
        assert_eq!(terminate(forwarder), 3);
    });
}

#[test]
fn a_takeover_path_has_mode_0600_is_reused_and_removed() {
    in_namespace(|| {
        let room = Room::new();
        let (door, to) = (room.join("door"), socket().local_addr().unwrap());
        let arguments = format!("forward --listen 127.0.0.1:0 --to {to} --takeover {door} --json");
        let mut killed = Forwarder::start(&mut fourtuple(&arguments));
        assert_eq!(fs::metadata(&door).unwrap().permissions().mode() & 0o777, 0o600);
        killed.child.kill().unwrap();
        killed.child.wait().unwrap();
        assert!(Path::new(&door).exists());
        let forwarder = Forwarder::start(&mut fourtuple(&arguments));
        assert_eq!(terminate(forwarder), 0);
        assert!(!Path::new(&door).exists());
        let file = room.file("file", "of another program");
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
        let room = Room::new();
        let to = socket().local_addr().unwrap().port();
        let door = room.join("door");
        // The port was free, and no other process in this namespace can have bound it since.
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let start = |here: &str, there: &str, more: &str| {
            // A second without a packet on a busy machine does not take the session down.
            let intervals = "--bfd-interval 200ms --bfd-receive-interval 250ms --bfd-multiplier 20";
            format!("forward {} {intervals} --to {there}:{to} --planes 1 --json {more}", bfd(here, there))
        };
        let peer = Forwarder::start(&mut fourtuple(&start("127.0.0.2", "127.0.0.1", "")));
        let arguments = start("127.0.0.1", "127.0.0.2", &format!("--metrics {free} --takeover {door}"));
        let mut forwarder = Forwarder::start(&mut fourtuple(&arguments));
        assert!(forwarder.line().starts_with("metrics at "));
        let up = format!("fourtuple_forward_bfd_up{{session=\"0\",peer=\"{peers_name}\"}} 1\n");
        metrics(&free.to_string(), &up);
        for _ in 0..restarts() {
            let (mut next, _) = next(&arguments, forwarder);
            assert!(next.line().starts_with("metrics at "));
            metrics(&free.to_string(), &up);
            forwarder = next;
        }
        let sessions = |forwarder: Forwarder| {
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
