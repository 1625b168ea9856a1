//! What is neither crr nor http: datagrams, sinks, service times, pins, namespaces.

mod client;

use std::io::{Read, Write};
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use client::{connect, errors, exchange, serve, sum, until};
use fourtuple_serve::{Protocol, Service, Shape};
use fourtuple_testing::{in_namespace, open_descriptors};

const SMALL: Protocol = Protocol::Crr { request: 1, response: 1 };

#[test]
fn datagrams_come_back_and_short_ones_do_not() {
    in_namespace(|| {
        let running = serve(Protocol::Udp { request: 2 }).start().unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(running.address().inet().unwrap()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        socket.send(b"a").unwrap();
        socket.send(b"abc").unwrap();
        let mut room = [0; 8];
        assert_eq!(socket.recv(&mut room).unwrap(), 3);
        let results = running.stop();
        assert_eq!(errors(&results), [("short-datagram".to_owned(), 1)]);
        assert_eq!(sum(&results.workers).requests, 1);
    });
}

#[test]
fn a_sink_holds_connections_that_say_nothing() {
    in_namespace(|| {
        let running = serve(Protocol::Sink).start().unwrap();
        let streams: Vec<_> = (0..50).map(|_| connect(&running)).collect();
        // They have sent nothing, and are accepted all the same.
        until(&running, |sum| sum.accepted == 50);
        for mut stream in streams {
            stream.write_all(b"words").unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        }
        let results = running.stop();
        assert_eq!((sum(&results.workers).received_bytes, results.max_over_mean.is_some()), (250, true));
    });
}

#[test]
fn whoever_sends_without_end_is_read_to_its_end_and_not_alone() {
    in_namespace(|| {
        const MUCH: usize = 64 << 20;
        let mut server = serve(Protocol::Http { body: 0 });
        server.workers = 1;
        let running = server.start().unwrap();
        let mut flood = connect(&running);
        write!(flood, "POST / HTTP/1.1\r\nContent-Length: {MUCH}\r\n\r\n").unwrap();
        let mut writer = flood.try_clone().unwrap();
        let sender = std::thread::spawn(move || writer.write_all(&vec![0; MUCH]).unwrap());
        let mut other = connect(&running);
        for _ in 0..100 {
            other.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            assert!(other.read(&mut [0; 1024]).unwrap() > 0);
        }
        sender.join().unwrap();
        assert!(flood.read(&mut [0; 1024]).unwrap() > 0, "all of it was read, in however many turns");
        let results = running.stop();
        assert_eq!((sum(&results.workers).requests, errors(&results)), (101, Vec::new()));
    });
}

/// A worker that sleeps serves nobody else: two requests of one worker take twice as long as one.
#[test]
fn sleeping_blocks_the_worker_and_so_does_spinning() {
    in_namespace(|| {
        const TIME: Duration = Duration::from_millis(40);
        for spin in [false, true] {
            let mut server = serve(SMALL);
            (server.workers, server.spin) = (1, spin);
            server.service = Service::of(Shape::Fixed(TIME));
            let running = server.start().unwrap();
            let mut streams: Vec<_> = (0..4).map(|_| connect(&running)).collect();
            let begun = Instant::now();
            for stream in &mut streams {
                stream.write_all(b"a").unwrap();
            }
            for stream in &mut streams {
                stream.read_exact(&mut [0]).unwrap();
            }
            // A lower bound holds on any machine.
            assert!(begun.elapsed() >= TIME * 4, "spin {spin}: {:?}", begun.elapsed());
        }
    });
}

#[test]
fn a_server_ends_in_the_middle_of_a_long_request() {
    in_namespace(|| {
        for spin in [false, true] {
            let mut server = serve(SMALL);
            server.spin = spin;
            server.service = Service::of(Shape::Fixed(Duration::from_secs(3600)));
            let running = server.start().unwrap();
            connect(&running).write_all(b"a").unwrap();
            until(&running, |sum| sum.requests == 1);
            // It returns at all.
            assert_eq!(sum(&running.stop().workers).requests, 1);
        }
    });
}

#[test]
fn pinned_workers_serve() {
    in_namespace(|| {
        let mut server = serve(SMALL);
        (server.pin, server.workers) = (true, 3);
        let running = server.start().unwrap();
        for _ in 0..20 {
            exchange(&mut connect(&running), b"a", 1);
        }
        assert_eq!(sum(&running.stop().workers).requests, 20);
    });
}

#[test]
fn nothing_is_left_behind() {
    in_namespace(|| {
        // Other tests of this file have descriptors too, at the same time: a leak of a thousand stands out.
        let before = open_descriptors();
        for _ in 0..5 {
            let running = serve(SMALL).start().unwrap();
            let open: Vec<_> = (0..200)
                .map(|_| {
                    let mut stream = connect(&running);
                    exchange(&mut stream, b"a", 1);
                    stream
                })
                .collect();
            drop(open);
            running.stop();
        }
        let after = open_descriptors();
        assert!(after < before + 500, "{before} before, {after} after");
    });
}
