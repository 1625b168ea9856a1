//! The servers of `serve` over sockets.

mod protocols;
mod workers;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use fourtuple::listen::AcceptPolicy;
use fourtuple_bench::serve::{Protocol, Running, Serve};
use fourtuple_record::{ServeResults, ServeWorker};

const SMALL: Protocol = Protocol::Crr { request: 1, response: 1 };

/// The deadline only makes a failing test end.
const DEADLINE: Duration = Duration::from_secs(60);

fn serve(protocol: Protocol) -> Serve {
    let anywhere: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let mut serve = Serve::new(protocol, anywhere.into());
    serve.workers = 2;
    serve
}

/// Runs `test` without an accept policy and with several policies: the responses must not depend on the policy.
fn in_every_way(server: &Serve, test: impl Fn(&Serve)) {
    test(server);
    for policy in [
        AcceptPolicy::Exclusive,
        AcceptPolicy::Blocking,
        AcceptPolicy::ROTATE,
        AcceptPolicy::SharedOneshot,
        AcceptPolicy::Reuseport,
    ] {
        let mut server = server.clone();
        server.policy = Some(policy);
        test(&server);
    }
}

fn connect(running: &Running) -> TcpStream {
    with_deadline(TcpStream::connect(running.address().inet().unwrap()).unwrap())
}

fn with_deadline(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.set_write_timeout(Some(DEADLINE)).unwrap();
    stream
}

/// Sends a request and reads a response of `response` bytes.
fn exchange(stream: &mut (impl Read + Write), request: &[u8], response: usize) -> Vec<u8> {
    stream.write_all(request).unwrap();
    let mut bytes = vec![0; response];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Reads until the server closes.
fn to_the_end(stream: &mut impl Read) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// Returns the sum of the counts of all workers.
fn sum(workers: &[ServeWorker]) -> ServeWorker {
    let mut sum = ServeWorker::default();
    for worker in workers {
        sum.accepted += worker.accepted;
        sum.requests += worker.requests;
        sum.received_bytes += worker.received_bytes;
        sum.sent_bytes += worker.sent_bytes;
        for (name, count) in &worker.errors {
            *sum.errors.entry(name.clone()).or_default() += count;
        }
    }
    sum
}

/// Waits until the counts of the server fulfil a condition.
fn until(running: &Running, wanted: impl Fn(&ServeWorker) -> bool) {
    let begun = std::time::Instant::now();
    while !wanted(&sum(&running.counts())) {
        assert!(begun.elapsed() < DEADLINE, "{:?}", running.counts());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn errors(results: &ServeResults) -> Vec<(String, u64)> {
    sum(&results.workers).errors.into_iter().collect()
}
