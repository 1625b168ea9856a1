//! The examples `crawler`, `dns_forwarder` and `proxy` against servers of the test.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_syscalls::{child, option};
use fourtuple_testing::{in_namespace, skip};

const DEADLINE: Duration = Duration::from_secs(60);

/// Returns the path of an example beside the test binary.
fn example(test: &str, name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().unwrap();
    let path = own.parent().and_then(|deps| deps.parent()).unwrap().join("examples").join(name);
    let found = path.exists();
    if !found {
        skip(test, "examples", &format!("{name} is not beside the test"));
    }
    found.then_some(path)
}

/// Answers requests, one per connection, and returns the source addresses of the clients.
fn serve(listener: &TcpListener, count: usize) -> HashSet<IpAddr> {
    (0..count)
        .map(|_| {
            let (mut stream, client) = listener.accept().unwrap();
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.push(byte[0]);
            }
            let request = String::from_utf8(request).unwrap().to_lowercase();
            assert!(!request.contains("x-hop") && !request.contains("connection: close"), "{request}");
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
                .unwrap();
            client.ip()
        })
        .collect()
}

#[test]
fn the_crawler_uses_all_sources() {
    in_namespace(|| {
        let Some(path) = example("the_crawler_uses_all_sources", "crawler") else { return };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        const PAGES: usize = 64;
        let server = thread::spawn(move || serve(&listener, PAGES));
        let sources: Vec<String> = (1..=16).map(|host| format!("127.0.0.{host}")).collect();
        let mut command = Command::new(path);
        command.arg(sources.join(",")).args(vec![url; PAGES]);
        child::end_with_this_thread(&mut command);
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}");
        assert_eq!(text.lines().filter(|line| line.contains("200 OK 5 bytes from 127.0.0.")).count(), PAGES);
        assert_eq!(server.join().unwrap().len(), 16);
    });
}

#[test]
fn the_dns_forwarder_returns_each_answer_to_its_client() {
    in_namespace(|| {
        let test = "the_dns_forwarder_returns_each_answer_to_its_client";
        let Some(path) = example(test, "dns_forwarder") else { return };
        let upstream = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address: SocketAddr = "127.0.0.1:5300".parse().unwrap();
        let mut command = Command::new(path);
        command.args([address.to_string(), upstream.local_addr().unwrap().to_string()]).stderr(Stdio::null());
        child::end_with_this_thread(&mut command);
        let mut forwarder = command.spawn().unwrap();
        const CLIENTS: u8 = 20;
        upstream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&over);
        let server = thread::spawn(move || {
            let mut ports = HashSet::new();
            // Until the last client has its answer: the forwarder drops one that comes after 3 s, and the client asks again.
            while !is_over.load(Ordering::Acquire) {
                let mut query = [0; 64];
                let Ok((length, from)) = upstream.recv_from(&mut query) else { continue };
                ports.insert(from.port());
                query[length] = b'!';
                upstream.send_to(&query[..=length], from).unwrap();
            }
            ports.len()
        });
        for number in 0..CLIENTS {
            let client = UdpSocket::bind("127.0.0.1:0").unwrap();
            client.connect(address).unwrap();
            client.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
            let mut answer = [0; 64];
            // The forwarder may not listen yet (ECONNREFUSED): a client repeats its query.
            let begun = Instant::now();
            let length = loop {
                match client.send(&[number, b'?']).and_then(|_| client.recv(&mut answer)) {
                    Ok(length) => break length,
                    Err(error) => assert!(begun.elapsed() < DEADLINE, "no answer: {error}"),
                }
                thread::sleep(Duration::from_millis(20));
            };
            assert_eq!(&answer[..length], [number, b'?', b'!']);
        }
        over.store(true, Ordering::Release);
        assert!(server.join().unwrap() >= usize::from(CLIENTS) / 2, "each query has a port of its own");
        forwarder.kill().unwrap();
        forwarder.wait().unwrap();
    });
}

/// Requests the page of a proxy on a new connection until the proxy listens. Returns the response.
fn through_the_proxy(proxy: &str) -> String {
    let begun = Instant::now();
    let mut stream = loop {
        match TcpStream::connect(proxy) {
            Ok(stream) => break stream,
            Err(error) => assert!(begun.elapsed() < DEADLINE, "no proxy: {error}"),
        }
        thread::sleep(Duration::from_millis(5));
    };
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close, x-hop\r\nX-Hop: 1\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

#[test]
fn the_proxy_forwards_and_reports_failures() {
    in_namespace(|| {
        let Some(path) = example("the_proxy_forwards_and_reports_failures", "proxy") else { return };
        let listener = TcpListener::bind("127.0.0.1:4000").unwrap();
        let upstream = thread::spawn(move || serve(&listener, 1));
        let start = |listen: &str, upstream: &str| {
            let mut command = Command::new(&path);
            child::end_with_this_thread(command.args([listen, upstream]));
            command.spawn().unwrap()
        };
        // No server listens on port 4003.
        let mut proxies =
            [start("127.0.0.1:4001", "127.0.0.1:4000"), start("127.0.0.1:4002", "127.0.0.1:4003")];
        let response = through_the_proxy("127.0.0.1:4001");
        assert!(response.starts_with("HTTP/1.1 200 ") && response.ends_with("\r\n\r\nhello"), "{response}");
        let response = through_the_proxy("127.0.0.1:4002");
        assert!(response.starts_with("HTTP/1.1 502 "), "{response}");
        assert!(response.contains("\r\n\r\n127.0.0.1:4003 refused the connection"), "{response}");
        upstream.join().unwrap();
        // Clients that reset their connections end no worker.
        for _ in 0..50 {
            let stream = TcpStream::connect("127.0.0.1:4002").unwrap();
            option::set_reset_on_close(stream.as_fd()).unwrap();
        }
        let response = through_the_proxy("127.0.0.1:4002");
        assert!(response.starts_with("HTTP/1.1 502 "), "{response}");
        for proxy in &mut proxies {
            child::terminate(proxy.id()).unwrap();
            assert!(proxy.wait().unwrap().success(), "a drained proxy ends with success");
        }
    });
}
