//! The endpoint with valid, idle, slow and invalid clients, and without free descriptors.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_report::exposition::{
    Collector, DescriptorEncoder, Endpoint, EndpointError, Kind, Limits, Page, Registry, Sample, write_family,
};
use fourtuple_testing::{in_namespace, process};

/// A time limit that no working machine reaches.
const LONG: Duration = Duration::from_secs(60);
/// A deadline that no test reaches: a test that depended on it would hang.
const NEVER: Duration = Duration::from_secs(3600);

#[derive(Debug)]
struct One;

impl Collector for One {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        write_family(&mut encoder, Kind::Counter, "ones", "Always 1", [Sample::new([("a", "b")], 1)])
    }
}

fn start(limits: Limits) -> Endpoint {
    let mut registry = Registry::with_prefix("test");
    registry.register_collector(Box::new(One));
    Endpoint::start(([127, 0, 0, 1], 0).into(), limits, registry).unwrap()
}

fn start_with_page(limits: Limits, page: Page) -> Endpoint {
    let mut registry = Registry::with_prefix("test");
    registry.register_collector(Box::new(One));
    Endpoint::start_with_page(([127, 0, 0, 1], 0).into(), limits, registry, page).unwrap()
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

/// Reads until the end of the connection; a reset counts as an end too.
fn read(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("{error}"),
    }
    String::from_utf8(answer).unwrap()
}

fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = connect(address);
    stream.write_all(request.as_bytes()).unwrap();
    read(stream)
}

const METRICS: &str = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// Repeats a request that got no answer: a busy host may stop the client beyond the deadline before it has asked.
fn ask_in_time(address: SocketAddr, request: &str) -> String {
    process::until_expected(20, || ask(address, request), |answer| !answer.is_empty())
}

#[track_caller]
fn scrape(address: SocketAddr) -> String {
    require_metrics(ask(address, METRICS))
}

#[track_caller]
fn require_metrics(answer: String) -> String {
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.contains("test_ones_total{a=\"b\"} 1\n"), "{answer}");
    answer
}

#[test]
fn a_scrape_is_openmetrics_text() {
    // In a namespace of its own, because another test could listen at the port after the end.
    in_namespace(|| {
        let endpoint = start(Limits { deadline: LONG / 2, ..Limits::default() });
        let answer = scrape(endpoint.address()).to_lowercase();
        assert!(answer.contains("content-type: application/openmetrics-text; version=1.0.0"), "{answer}");
        assert!(answer.ends_with("# eof\n"), "{answer}");
        assert_eq!(endpoint.accept_failures(), 0);
        let taken = Endpoint::start(endpoint.address(), Limits::default(), Registry::default()).unwrap_err();
        assert!(matches!(taken, EndpointError::Listen { .. }), "{taken}");
        let address = endpoint.address();
        drop(endpoint);
        // A child of another test has a copy of the listener until exec().
        let end = Instant::now() + LONG;
        while TcpStream::connect(address).is_ok() {
            assert!(Instant::now() < end, "the endpoint listens after its end");
        }
    });
}

#[test]
fn idle_clients_do_not_delay_a_scrape() {
    let endpoint = start(Limits { deadline: NEVER, ..Limits::default() });
    let mut idle: Vec<_> = (0..10).map(|_| connect(endpoint.address())).collect();
    scrape(endpoint.address());
    // The idle clients are still served.
    let mut last = idle.pop().unwrap();
    last.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    assert!(read(last).contains("test_ones_total"));
}

#[test]
fn the_oldest_connection_is_closed_at_the_limit() {
    let endpoint = start(Limits { connections: 4, deadline: NEVER, ..Limits::default() });
    let idle: Vec<_> = (0..20).map(|_| connect(endpoint.address())).collect();
    scrape(endpoint.address());
    // Of 20 idle connections, the first 17 were closed for later ones and for the scrape.
    for oldest in idle.into_iter().take(17) {
        assert_eq!(read(oldest), "");
    }
}

#[test]
fn slow_clients_end_at_the_deadline() {
    let endpoint = start(Limits { deadline: Duration::from_secs(2), ..Limits::default() });
    let mut slow: Vec<_> = (0..5).map(|_| connect(endpoint.address())).collect();
    let begun = Instant::now();
    // One byte at a time makes progress, but the deadline applies to the whole request.
    let request = "GET /metrics HTTP/1.1\r\nX-Long: ".bytes().chain(std::iter::repeat(b'x'));
    for byte in request {
        assert!(begun.elapsed() < LONG, "it waits for ever for a slow client");
        slow.retain_mut(|stream| stream.write_all(&[byte]).is_ok());
        if slow.is_empty() {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    require_metrics(ask_in_time(endpoint.address(), METRICS));
}

#[test]
fn wrong_requests_get_their_status() {
    let endpoint = start(Limits { deadline: LONG / 2, ..Limits::default() });
    let long = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(7_000));
    let endless = format!("GET / HTTP/1.1\r\nX: {}", "x".repeat(8 * 1024));
    for (request, status) in [
        ("nonsense\r\n\r\n", "400"),
        ("GET /metrics SMTP/9\r\n\r\n", "400"),
        ("GET /other HTTP/1.1\r\nHost: localhost\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", "405"),
        ("HEAD /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", "200"),
        ("GET /metrics HTTP/1.1\r\nHost: rebound.example\r\n\r\n", "421"),
        ("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n", "200"),
        (&long, "200"),
        (&endless, "431"),
    ] {
        let answer = ask(endpoint.address(), request);
        let first = answer.lines().next().unwrap_or_default().to_owned();
        assert!(first.contains(&format!(" {status} ")), "{:?}: {first}", &request[..request.len().min(30)]);
    }
    scrape(endpoint.address());
}

#[test]
fn a_live_page_gets_events() {
    let rendered = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&rendered);
    let (page, publisher) = Page::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        "<p>page</p>".to_owned()
    });
    let limits = Limits { deadline: NEVER, stream_deadline: NEVER, ..Limits::default() };
    let endpoint = start_with_page(limits, page);
    assert!(!publisher.has_readers());
    assert!(ask(endpoint.address(), "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").ends_with("<p>page</p>"));
    for _ in 0..3 {
        ask(endpoint.address(), "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    }
    assert_eq!(rendered.load(Ordering::Relaxed), 1, "one rendering for a reading");
    publisher.renew();
    assert!(ask(endpoint.address(), "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").ends_with("<p>page</p>"));
    assert_eq!(rendered.load(Ordering::Relaxed), 2);
    let mut stream = connect(endpoint.address());
    stream.write_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let begun = Instant::now();
    while !publisher.has_readers() {
        assert!(begun.elapsed() < LONG, "the stream never began");
        thread::sleep(Duration::from_millis(5));
    }
    publisher.send("one".to_owned());
    let mut text = String::new();
    let mut bytes = [0; 1024];
    while !text.contains("data: one\n\n") {
        let length = stream.read(&mut bytes).unwrap();
        assert!(length > 0, "{text}");
        text += std::str::from_utf8(&bytes[..length]).unwrap();
    }
    assert!(text.to_lowercase().contains("content-type: text/event-stream"), "{text}");
    scrape(endpoint.address());
}

#[test]
fn an_event_stream_ends_at_its_deadline() {
    // The stream would also end with its publisher.
    let (page, _publisher) = Page::new(|| "<p>page</p>".to_owned());
    let limits = Limits {
        deadline: Duration::from_secs(2),
        stream_deadline: Duration::from_secs(1),
        ..Limits::default()
    };
    let endpoint = start_with_page(limits, page);
    let text = ask_in_time(endpoint.address(), "GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(text.to_lowercase().contains("content-type: text/event-stream"), "{text}");
    require_metrics(ask_in_time(endpoint.address(), METRICS));
}

const CHILD: &str = "FOURTUPLE_TEST_WITHOUT_DESCRIPTORS";

/// The test runs in a child process whose descriptors are used up.
#[test]
fn without_descriptors_it_backs_off_and_recovers() {
    if std::env::var_os(CHILD).is_some() {
        return without_descriptors();
    }
    let output = Command::new("sh")
        .args([
            "-c",
            "ulimit -n 40; exec \"$0\" --exact without_descriptors_it_backs_off_and_recovers --nocapture",
        ])
        .arg(std::env::current_exe().unwrap())
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
}

fn without_descriptors() {
    let endpoint = start(Limits { deadline: NEVER, ..Limits::default() });
    let mut held: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    // One descriptor is free for the client; the endpoint has none for its side of the connection.
    held.pop();
    let begun = Instant::now();
    let mut client = connect(endpoint.address());
    client.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    while endpoint.accept_failures() < 3 {
        assert!(begun.elapsed() < LONG, "accept() never failed");
        thread::sleep(Duration::from_millis(10));
    }
    // A slow machine makes fewer attempts: at most one every 100 ms.
    let failures = endpoint.accept_failures();
    let most = begun.elapsed().as_millis() as u64 / 100 + 2;
    assert!(failures <= most, "{failures} failures, at most {most} are expected: it spins");
    held.clear();
    assert!(read(client).contains("test_ones_total"), "no answer once there are descriptors");
}
