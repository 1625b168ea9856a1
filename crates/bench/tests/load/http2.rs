//! HTTP/2 against servers that answer frame by frame: what real servers rarely do.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::tls::{Saved, https_server};
use crate::{RunOutcome, answer, attempt, get, load, run, run_until, until, until_expected};
use fourtuple_bench::load::{Arrival, EngineChoice, Load, LoadError, Order, RequestList, Trust, Workload};
use fourtuple_testing::in_namespace;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
const REFUSED_STREAM: u32 = 7;
const MAX_CONCURRENT_STREAMS: u16 = 3;

/// The server's side of a connection (RFC 9113, 4.1).
struct Peer {
    socket: TcpStream,
    /// Streams whose request is complete and that have no response.
    open: VecDeque<u32>,
    /// Bytes of bodies that were received.
    body: usize,
    has_goodbye: bool,
    /// Bytes of all frames, and of the preface: received and sent.
    bytes: (u64, u64),
}

impl Peer {
    /// Reads the preface of the client and sends SETTINGS, with a limit of streams if there is one.
    fn accept(mut socket: TcpStream, streams: Option<u32>) -> io::Result<Peer> {
        socket.set_nodelay(true)?;
        let mut preface = [0; 24];
        socket.read_exact(&mut preface)?;
        assert_eq!(&preface, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        let bytes = (preface.len() as u64, 0);
        let mut peer = Peer { socket, open: VecDeque::new(), body: 0, has_goodbye: false, bytes };
        let mut settings = Vec::new();
        if let Some(streams) = streams {
            settings.extend_from_slice(&MAX_CONCURRENT_STREAMS.to_be_bytes());
            settings.extend_from_slice(&streams.to_be_bytes());
        }
        peer.send(SETTINGS, 0, 0, &settings)?;
        Ok(peer)
    }

    fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> io::Result<()> {
        let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend_from_slice(&[kind, flags]);
        frame.extend_from_slice(&stream.to_be_bytes());
        frame.extend_from_slice(payload);
        self.bytes.1 += frame.len() as u64;
        self.socket.write_all(&frame)
    }

    /// Reads a frame. Returns false at the end of the connection.
    fn read(&mut self) -> io::Result<bool> {
        let mut head = [0; 9];
        match self.socket.read(&mut head[..1])? {
            0 => return Ok(false),
            _ => self.socket.read_exact(&mut head[1..])?,
        }
        let [a, b, c, kind, flags, stream @ ..] = head;
        let stream = u32::from_be_bytes(stream);
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        self.socket.read_exact(&mut payload)?;
        self.bytes.0 += (head.len() + payload.len()) as u64;
        match kind {
            SETTINGS if flags & ACK == 0 => self.send(SETTINGS, ACK, 0, &[])?,
            DATA => self.body += payload.len(),
            GOAWAY => self.has_goodbye = true,
            _ => {}
        }
        if matches!(kind, HEADERS | DATA) && flags & END_STREAM != 0 {
            self.open.push_back(stream);
        }
        Ok(true)
    }

    /// Reads until there are this many requests without a response. Returns false at the end of the connection.
    fn wait_for(&mut self, requests: usize) -> io::Result<bool> {
        while self.open.len() < requests {
            if !self.read()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Answers the oldest request: 200, two bytes.
    fn answer(&mut self) -> io::Result<()> {
        let stream = self.open.pop_front().expect("a request");
        // `:status: 200` of the static table (RFC 7541, A).
        self.send(HEADERS, END_HEADERS, stream, &[0x88])?;
        self.send(DATA, END_STREAM, stream, b"ok")
    }

    fn go_away(&mut self, last: u32) -> io::Result<()> {
        let no_error = [0; 4];
        self.send(GOAWAY, 0, 0, &[last.to_be_bytes(), no_error].concat())
    }
}

/// Starts a server whose connections are served by `serve`; it counts there what it has answered.
fn served(
    streams: Option<u32>,
    serve: impl Fn(&mut Peer, &AtomicU64) -> io::Result<()> + Clone + Send + 'static,
) -> (SocketAddr, Arc<AtomicU64>) {
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    let address = answer(move |socket| serve(&mut Peer::accept(socket, streams)?, &counted));
    (address, count)
}

fn http2(address: SocketAddr, connections: u32, streams: u32, operations: u64) -> Load {
    let target = format!("http://{address}/");
    Load {
        connections,
        streams: Some(streams),
        operations: Some(operations),
        ..load(EngineChoice::Auto, &target, get(&target))
    }
}

fn post(load: &mut Load, bytes: usize) {
    let Workload::Http(request) = &mut load.workload else { panic!("HTTP") };
    request.method = "POST".into();
    request.body = vec![b'x'; bytes];
}

fn done(test: &str, load: &Load) -> RunOutcome {
    run(test, load).expect("HTTP/2 needs no io_uring")
}

/// Answers everything.
fn honest(peer: &mut Peer, count: &AtomicU64) -> io::Result<()> {
    while peer.wait_for(1)? {
        count.fetch_add(1, Ordering::Relaxed);
        peer.answer()?;
    }
    Ok(())
}

#[test]
fn streams_share_connections() {
    in_namespace(|| {
        let full = Arc::new(AtomicU64::new(0));
        let (address, count) = served(None, move |peer, count| {
            // Before its SETTINGS have come there is one stream. Nothing is answered before both are full: the other one could do all operations.
            if peer.wait_for(5)? {
                full.fetch_add(1, Ordering::Relaxed);
                until(|| full.load(Ordering::Relaxed) >= 2);
                honest(peer, count)?;
            }
            Ok(())
        });
        let ran = done("http2::streams_share_connections", &http2(address, 2, 5, 200));
        assert_eq!((ran.results.operations, ran.errors()), (200, vec![]), "{ran:#?}");
        assert_eq!(count.load(Ordering::Relaxed), 200);
        let http2 = ran.results.http2.unwrap();
        assert_eq!((ran.results.connections, http2.most_streams, http2.server_limit), (2, 5, None));
        assert_eq!((ran.results.engine.as_str(), ran.results.statuses[0].code), ("h2", 200));
        assert_eq!(ran.results.latency_ns.first_byte.samples, 200);
        assert_eq!(ran.results.latency_ns.handshake.samples, 2);
    });
}

/// The frames of settings and windows are counted, too; what follows the last response, GOAWAY and acknowledgements, is not.
#[test]
fn bytes_are_those_of_the_frames() {
    in_namespace(|| {
        let bytes = Arc::new(Mutex::new((0, 0)));
        let counted = Arc::clone(&bytes);
        let (address, answered) = served(None, move |peer, answered| {
            for _ in 0..100 {
                peer.wait_for(1)?;
                peer.answer()?;
                *counted.lock().unwrap() = peer.bytes;
                answered.fetch_add(1, Ordering::Relaxed);
            }
            while peer.read()? {}
            Ok(())
        });
        let ran = done("http2::bytes", &http2(address, 1, 1, 100));
        until(|| answered.load(Ordering::Relaxed) == 100);
        let (sent, received) = (ran.results.sent_bytes.unwrap(), ran.results.received_bytes.unwrap());
        assert_eq!((ran.results.operations, (sent, received)), (100, *bytes.lock().unwrap()), "{ran:#?}");
    });
}

/// Loads a server that sends GOAWAY on each connection after ten requests, and does not process what comes later.
fn go_away(arrival: Arrival, operations: u64) -> (RunOutcome, u64) {
    let (address, count) = served(None, |peer, count| {
        for _ in 0..10 {
            if !peer.wait_for(1)? {
                return Ok(());
            }
            count.fetch_add(1, Ordering::Relaxed);
            peer.answer()?;
        }
        // The streams of a client are odd: the tenth is 19. One more request proves that some are lost.
        peer.wait_for(1)?;
        peer.go_away(19)?;
        while peer.read()? {}
        Ok(())
    });
    let load = Load { arrival, ..http2(address, 2, 8, operations) };
    (done("http2::go_away", &load), count.load(Ordering::Relaxed))
}

#[test]
fn what_goaway_leaves_is_sent_again() {
    in_namespace(|| {
        for arrival in [Arrival::Closed, Arrival::Even(2000.0)] {
            let (ran, processed) = go_away(arrival, 205);
            let results = &ran.results;
            assert_eq!((results.operations, processed, ran.errors()), (205, 205, vec![]), "{ran:#?}");
            let goaways = results.http2.unwrap().goaways;
            // Each connection serves ten requests; GOAWAY follows an eleventh, which the last two may not get.
            assert!(results.connections >= 21 && goaways <= results.connections, "{ran:#?}");
            assert!(goaways + 2 >= results.connections, "{ran:#?}");
            assert!(results.retried >= goaways, "{ran:#?}");
        }
    });
}

#[test]
fn a_server_that_processes_nothing_is_an_error() {
    in_namespace(|| {
        let (address, _) = served(None, |peer, _| {
            peer.wait_for(1)?;
            peer.go_away(0)?;
            while peer.read()? {}
            Ok(())
        });
        let ran = done("http2::processes_nothing", &http2(address, 1, 1, 3));
        assert_eq!(
            (ran.error("GOAWAY"), ran.errors(), ran.results.retried),
            (3, vec!["GOAWAY"], 3),
            "{ran:#?}"
        );
        assert_eq!((ran.results.connections, ran.results.http2.unwrap().goaways), (6, 6));
    });
}

#[test]
fn refused_streams_are_counted() {
    in_namespace(|| {
        let (address, refused) = served(None, |peer, count| {
            for number in 0_u64.. {
                if !peer.wait_for(1)? {
                    break;
                }
                if number % 3 == 0 {
                    count.fetch_add(1, Ordering::Relaxed);
                    let stream = peer.open.pop_front().expect("a request");
                    peer.send(RST_STREAM, 0, stream, &REFUSED_STREAM.to_be_bytes())?;
                } else {
                    peer.answer()?;
                }
            }
            Ok(())
        });
        let ran = done("http2::refused_streams_are_counted", &http2(address, 2, 6, 300));
        let refused = refused.load(Ordering::Relaxed);
        assert_eq!((ran.error("REFUSED_STREAM"), ran.errors()), (refused, vec!["REFUSED_STREAM"]));
        assert_eq!(ran.results.http2.unwrap().refused_streams, refused);
        assert_eq!((ran.results.operations, ran.results.connections), (300 - refused, 2), "{ran:#?}");
    });
}

#[test]
fn the_limit_of_the_server_is_kept() {
    in_namespace(|| {
        for arrival in [Arrival::Closed, Arrival::Even(5000.0)] {
            let most = Arc::new(Mutex::new(0));
            let seen = Arc::clone(&most);
            let (address, count) = served(Some(3), move |peer, count| {
                // While requests come, they are not answered: all that the client dares to send is open.
                peer.socket.set_read_timeout(Some(Duration::from_millis(20)))?;
                loop {
                    match peer.read() {
                        Ok(true) => {
                            let mut most = seen.lock().unwrap();
                            *most = peer.open.len().max(*most);
                        }
                        Ok(false) => return Ok(()),
                        Err(_) => {
                            while !peer.open.is_empty() {
                                count.fetch_add(1, Ordering::Relaxed);
                                peer.answer()?;
                            }
                        }
                    }
                }
            });
            let load = Load { arrival, ..http2(address, 1, 20, 60) };
            let ran = done("http2::the_limit_of_the_server_is_kept", &load);
            assert_eq!((ran.results.operations, ran.errors()), (60, vec![]), "{ran:#?}");
            assert_eq!((count.load(Ordering::Relaxed), *most.lock().unwrap()), (60, 3));
            let http2 = ran.results.http2.unwrap();
            assert_eq!((http2.server_limit, http2.most_streams, ran.results.connections), (Some(3), 3, 1));
        }
    });
}

#[test]
fn waits_for_a_window_are_counted() {
    in_namespace(|| {
        // The windows of a connection and of a stream are 65,535 bytes at first (RFC 9113, 6.9.2).
        let (address, count) = served(None, |peer, count| {
            for number in 1.. {
                while peer.body < number * 65_535 {
                    if !peer.read()? {
                        return Ok(());
                    }
                }
                peer.body = number * 65_535;
                for stream in [0, number as u32 * 2 - 1] {
                    peer.send(WINDOW_UPDATE, 0, stream, &65_535_u32.to_be_bytes())?;
                }
                if !peer.wait_for(1)? {
                    return Ok(());
                }
                count.fetch_add(1, Ordering::Relaxed);
                peer.body = number * 65_535;
                // The rest of the window of the connection.
                peer.send(WINDOW_UPDATE, 0, 0, &34_465_u32.to_be_bytes())?;
                peer.answer()?;
            }
            Ok(())
        });
        let mut load = http2(address, 1, 1, 4);
        load.close_every = 1;
        post(&mut load, 100_000);
        let ran = done("http2::waits_for_a_window_are_counted", &load);
        assert_eq!((ran.results.operations, ran.errors()), (4, vec![]), "{ran:#?}");
        assert_eq!(count.load(Ordering::Relaxed), 4);
        let http2 = ran.results.http2.unwrap();
        assert_eq!(http2.window_waits, 4);
        assert!(http2.window_wait_ns > 0, "{http2:?}");
        post(&mut load, 65_535);
        let ran = done("http2::waits_for_a_window_are_counted", &load);
        assert_eq!((ran.results.operations, ran.results.http2.unwrap().window_waits), (4, 0), "{ran:#?}");
    });
}

#[test]
fn a_window_that_never_opens_is_a_timeout() {
    in_namespace(|| {
        let once = || {
            let (address, received) = served(None, |peer, count| {
                while peer.read()? {
                    count.store(peer.body as u64, Ordering::Relaxed);
                }
                Ok(())
            });
            let mut load = http2(address, 1, 3, 3);
            post(&mut load, 100_000);
            load.timeout = Duration::from_secs(2);
            Some((done("http2::a_window_that_never_opens_is_a_timeout", &load), received))
        };
        // Before the SETTINGS of a server that waits for a CPU have come there is one stream.
        let is_sent = |(ran, _): &(RunOutcome, _)| ran.results.http2.unwrap().window_waits == 3;
        let (ran, received) = until_expected(once, is_sent).unwrap();
        assert_eq!((ran.error("timeout"), ran.errors(), ran.results.operations), (3, vec!["timeout"], 0));
        assert_eq!(ran.results.http2.unwrap().window_waits, 3, "{ran:#?}");
        until(|| received.load(Ordering::Relaxed) >= 65_535);
        assert_eq!(received.load(Ordering::Relaxed), 65_535);
    });
}

#[test]
fn a_server_of_http1_is_named() {
    in_namespace(|| {
        let address = answer(|mut socket| {
            let mut buffer = [0; 24];
            socket.read_exact(&mut buffer)?;
            socket.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        });
        let ran = done("http2::a_server_of_http1_is_named", &http2(address, 1, 4, 4));
        assert_eq!((ran.error("http1"), ran.errors()), (4, vec!["http1"]), "{ran:#?}");
        let detail = &ran.results.error_details["http1"];
        assert!(detail.contains("the server speaks HTTP/1, not HTTP/2: \"HTTP/1.1 400"), "{detail}");
        for protocols in [&[&b"http/1.1"[..]][..], &[]] {
            let server = https_server(protocols);
            let saved = Saved::new("http2.pem", &server.certificate);
            let mut load = http2(server.address, 1, 2, 2);
            load.target = format!("https://{}/", server.address).parse().unwrap();
            load.trust = Trust::Also(saved.0.clone());
            let ran = done("http2::a_server_of_http1_is_named", &load);
            assert_eq!((ran.error("tls-alpn"), ran.errors()), (2, vec!["tls-alpn"]), "{ran:#?}");
        }
    });
}

#[test]
fn close_every_ends_a_connection_with_goaway() {
    in_namespace(|| {
        let goodbyes = Arc::new(AtomicU64::new(0));
        let said = Arc::clone(&goodbyes);
        let (address, count) = served(None, move |peer, count| {
            let mut served = 0;
            while peer.wait_for(1)? {
                served += 1;
                count.fetch_add(1, Ordering::Relaxed);
                peer.answer()?;
            }
            assert!(served <= 10);
            said.fetch_add(u64::from(peer.has_goodbye && served == 10), Ordering::Relaxed);
            Ok(())
        });
        let load = Load { close_every: 10, ..http2(address, 1, 4, 200) };
        let ran = done("http2::close_every", &load);
        assert_eq!((ran.results.operations, ran.errors(), ran.results.retried), (200, vec![], 0), "{ran:#?}");
        assert_eq!((count.load(Ordering::Relaxed), ran.results.connections), (200, 20));
        until(|| goodbyes.load(Ordering::Relaxed) == 20);
    });
}

#[test]
fn an_open_loop_opens_connections_as_streams_run_out() {
    in_namespace(|| {
        // Nothing is answered before 12 requests are open on all connections.
        let open = Arc::new(AtomicU64::new(0));
        let (address, _) = served(Some(4), move |peer, _| {
            peer.wait_for(4)?;
            open.fetch_add(4, Ordering::Relaxed);
            until(|| open.load(Ordering::Relaxed) >= 12);
            while peer.wait_for(1)? {
                peer.answer()?;
            }
            Ok(())
        });
        let load = Load { arrival: Arrival::Even(1000.0), ..http2(address, 5, 4, 12) };
        let ran = done("http2::an_open_loop", &load);
        assert_eq!((ran.results.operations, ran.results.connections), (12, 3), "{ran:#?}");
        assert_eq!(ran.results.ports.unwrap().used, 3);
        assert_eq!(load.need().connections, 5);
    });
}

#[test]
fn a_stopped_run_ends_without_its_answers() {
    in_namespace(|| {
        let (address, count) = served(None, |peer, count| {
            while peer.read()? {
                count.store(peer.open.len() as u64, Ordering::Relaxed);
            }
            Ok(())
        });
        let stop = AtomicBool::new(false);
        let load = http2(address, 1, 7, 1000);
        let ran = thread::scope(|scope| {
            scope.spawn(|| {
                until(|| count.load(Ordering::Relaxed) == 7);
                stop.store(true, Ordering::Relaxed);
            });
            run_until("http2::a_stopped_run", &load, &stop).expect("HTTP/2 needs no io_uring")
        });
        assert_eq!((ran.error("unanswered"), ran.errors()), (7, vec!["unanswered"]), "{ran:#?}");
        assert!(ran.remarks().contains(&"interrupted"));
    });
}

#[test]
fn what_http2_does_not_do_is_refused() {
    let address = "127.0.0.1:1".parse().unwrap();
    let refused = |change: &dyn Fn(&mut Load)| {
        let mut load = http2(address, 1, 1, 1);
        change(&mut load);
        match attempt(&load, &AtomicBool::new(false)) {
            Err(LoadError::Setting(why)) => why,
            other => panic!("{other:?}"),
        }
    };
    assert!(refused(&|load| load.engine = EngineChoice::Epoll).contains("'epoll' for '--engine'"));
    assert!(refused(&|load| load.hold = 1).contains("'--hold'"));
    assert!(refused(&|load| load.streams = Some(0)).contains("'--streams'"));
    assert!(refused(&|load| (load.connections, load.streams) = (1000, Some(10_000))).contains("streams"));
    let header = |load: &mut Load| {
        let Workload::Http(request) = &mut load.workload else { panic!("HTTP") };
        request.headers.push(("Connection".into(), "close".into()));
    };
    assert!(refused(&header).contains("'Connection: close' for '--header'"));
    let list = |load: &mut Load| {
        let Workload::Http(good) = load.workload.clone() else { panic!("HTTP") };
        header(load);
        let Workload::Http(bad) = load.workload.clone() else { panic!("HTTP") };
        let requests = vec![good, bad];
        load.requests = Some(Arc::new(RequestList { file: "list".to_owned(), requests, order: Order::Turn }));
    };
    assert!(refused(&list).starts_with("list: request 2: invalid value 'Connection: close'"));
}
