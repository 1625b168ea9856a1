//! What the tests have in common: a server, and clients that give up instead of hanging.
#![allow(dead_code, reason = "every test file uses its part of it")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use fourtuple::listen::Policy;
use fourtuple_record::{ServeResults, ServeWorker};
use fourtuple_serve::{Protocol, Running, Serve};

/// Nothing is decided by it but that a test has failed.
const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) fn serve(protocol: Protocol) -> Serve {
    let anywhere: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let mut serve = Serve::new(protocol, anywhere.into());
    serve.workers = 2;
    serve
}

/// The same server with every way to wait: what it answers must not depend on it.
pub(crate) fn in_every_way(server: &Serve, test: impl Fn(&Serve)) {
    test(server);
    for policy in
        [Policy::Exclusive, Policy::Blocking, Policy::ROTATE, Policy::SharedOneshot, Policy::Reuseport]
    {
        let mut server = server.clone();
        server.policy = Some(policy);
        test(&server);
    }
}

pub(crate) fn connect(running: &Running) -> TcpStream {
    with_deadline(TcpStream::connect(running.address().inet().unwrap()).unwrap())
}

pub(crate) fn with_deadline(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.set_write_timeout(Some(DEADLINE)).unwrap();
    stream
}

/// Sends, and reads as many bytes.
pub(crate) fn exchange(stream: &mut (impl Read + Write), request: &[u8], response: usize) -> Vec<u8> {
    stream.write_all(request).unwrap();
    let mut bytes = vec![0; response];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// What comes until the server closes.
pub(crate) fn to_the_end(stream: &mut impl Read) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// The workers' counts in one.
pub(crate) fn sum(workers: &[ServeWorker]) -> ServeWorker {
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

/// Waits until the counts are as wanted; what happens in the server has no other witness.
pub(crate) fn until(running: &Running, wanted: impl Fn(&ServeWorker) -> bool) {
    let begun = std::time::Instant::now();
    while !wanted(&sum(&running.counts())) {
        assert!(begun.elapsed() < DEADLINE, "{:?}", running.counts());
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn errors(results: &ServeResults) -> Vec<(String, u64)> {
    sum(&results.workers).errors.into_iter().collect()
}
