//! The end of `load` against peers that keep sending: by SIGINT, and a measurement of the ends by all limits.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::program::situation::{has, nginx, wait_for};
use crate::program::{Room, Running, fourtuple, require_valid};
use fourtuple_syscalls::child;
use fourtuple_testing::in_namespace;
use serde_json::{Value, json};

/// The part of a response that a peer repeats, and the pause after each.
type Rest = (Vec<u8>, Duration);

fn endless_body() -> Rest {
    (vec![b'x'; 65_536], Duration::ZERO)
}

fn drip() -> Rest {
    (b"x".to_vec(), Duration::from_millis(50))
}

/// Starts a peer in this namespace that reads a request and sends a response without end. Returns its address and the number of
/// requests that it has read.
fn peer((piece, pause): Rest) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, requests) = (listener.local_addr().unwrap(), Arc::new(AtomicU64::new(0)));
    let counted = Arc::clone(&requests);
    let talk = move |mut stream: TcpStream, piece: &[u8]| -> io::Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut room = [0; 1000];
            match stream.read(&mut room)? {
                0 => return Ok(()),
                count => head.extend_from_slice(&room[..count]),
            }
        }
        counted.fetch_add(1, Ordering::Relaxed);
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
        loop {
            stream.write_all(piece)?;
            thread::sleep(pause);
        }
    };
    thread::spawn(move || {
        // The threads end with the process of the test.
        while let Ok((stream, _)) = listener.accept() {
            let (talk, piece) = (talk.clone(), piece.clone());
            thread::spawn(move || talk(stream, &piece));
        }
    });
    (address, requests)
}

/// Neither `--for` nor `--timeout` ends these runs before the deadline of the test.
#[test]
fn ctrl_c_ends_a_load_whose_peer_keeps_sending() {
    in_namespace(|| {
        for rest in [endless_body, drip] {
            for engine in ["auto", "epoll"] {
                let (address, requests) = peer(rest());
                let flags = "--connections 64 --for 1h --timeout 1h --json";
                let line = format!("load http://{address}/ --engine {engine} {flags}");
                let mut load = Running::start(&mut fourtuple(&line));
                assert!(
                    load.until("asked", |_| requests.load(Ordering::Relaxed) == 64),
                    "it ended by itself"
                );
                child::interrupt(load.id()).unwrap();
                let ended = load.end();
                assert_eq!((ended.code, ended.stderr.as_str()), (3, ""), "{ended:?}");
                let record = ended.json();
                require_valid(&record);
                assert_eq!(record["validity"][0]["id"], "interrupted", "{record:#}");
                let results = &record["results"];
                assert_eq!(
                    (&results["operations"], &results["errors"]),
                    (&json!(0), &json!({ "unanswered": 64 })),
                    "{record:#}"
                );
            }
        }
    });
}

#[test]
fn ctrl_c_ends_a_load_that_waits_for_a_name_server() {
    in_namespace(|| {
        if !has("load_ends::ctrl_c_ends_a_load_that_waits_for_a_name_server", &["unshare"]) {
            return;
        }
        // It never answers.
        let server = UdpSocket::bind("127.0.0.1:53").unwrap();
        let room = Room::new();
        let settings = room.file("resolv.conf", "nameserver 127.0.0.1\noptions timeout:30 attempts:1\n");
        let load = fourtuple("load http://slow.example/");
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "sh",
            "-c",
            // A shell that starts the tests in the background makes its children ignore SIGINT.
            "mount --bind \"$0\" /etc/resolv.conf && exec env --default-signal=INT \"$@\"",
            &settings,
        ]);
        let mut load = Running::start(command.arg(load.get_program()).args(load.get_args()));
        server.set_nonblocking(true).unwrap();
        assert!(load.until("asked", |_| server.recv(&mut [0; 512]).is_ok()), "{:?}", load.end());
        child::interrupt(load.id()).unwrap();
        let ended = load.end();
        assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (130, "", ""), "{ended:?}");
    });
}

/// The limits of a run: flags, the time after which the run should end, and whether SIGINT ends it.
const LIMITS: [(&str, Duration, bool); 3] = [
    ("--for 3s", Duration::from_secs(3), false),
    ("--timeout 1s --operations 64", Duration::from_secs(1), false),
    ("--for 1h --timeout 1h", Duration::from_secs(1), true),
];

/// Prints for each peer, limit and engine how much later than its limit the process has ended, with its start, in ms: median and
/// maximum of 10 runs, for docs/load.md. The connections are the default, 64.
#[test]
#[ignore = "a measurement of five minutes on an idle machine"]
fn ends_after_limits() {
    in_namespace(|| {
        if !has("load_ends::ends_after_limits", &["nginx"]) {
            return;
        }
        let room = Room::new();
        let file = std::fs::File::create(room.join("large")).unwrap();
        file.set_len(2 << 30).unwrap();
        let server = format!("server {{ listen 127.0.0.1:8080; root {}; }}", room.path().display());
        let _nginx = nginx(&room, "nginx", 1, None, &server);
        wait_for("127.0.0.1", 8080);
        let peers = [
            ("endless body", peer(endless_body()).0.to_string()),
            ("drip", peer(drip()).0.to_string()),
            ("2 GiB from nginx", "127.0.0.1:8080/large".to_owned()),
        ];
        for (peer, address) in &peers {
            for (flags, limit, by_signal) in LIMITS {
                for engine in ["uring", "epoll"] {
                    let mut late: Vec<u64> = (0..10)
                        .map(|_| {
                            let line =
                                format!("load http://{address} --engine {engine} {flags} --json --quiet");
                            let mut begun = Instant::now();
                            let mut load = Running::start(&mut fourtuple(&line));
                            if by_signal {
                                thread::sleep(limit);
                                begun = Instant::now() - limit;
                                child::interrupt(load.id()).unwrap();
                            }
                            let record: Value = load.end().json();
                            let took = begun.elapsed();
                            assert_eq!(record["results"]["operations"], 0, "{line}: {record:#}");
                            took.checked_sub(limit).expect("not before the limit").as_millis() as u64
                        })
                        .collect();
                    late.sort_unstable();
                    println!("{peer:>16} {flags:>28} {engine} median {} max {}", late[5], late[9]);
                }
            }
        }
    });
}
