//! The library in network namespaces. One test program: it builds and runs sooner than one for each file. No test here starts a process:
//! until its exec() a child has copies of the sockets of all tests. This file has the tests of the features `serde` and `tracing`.
#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple::dial::{Dialer, Sharing, SourcePool, Strategy};
use fourtuple::listen::{AcceptPolicy, Family, ListenerGroupBuilder, Recycle, Workers};
use fourtuple::ports::{PortRange, PortSet};
use fourtuple::spread::Selector;
use fourtuple_syscalls::sock_diag;
use fourtuple_testing::{in_namespace, set_sysctl, skip};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::with_default;
use tracing::{Event, Metadata, Subscriber};

mod acceptor;
mod connector;
mod failures;
mod strategies;
mod traps;
mod udp;

/// A timeout that only a failing test reaches.
const DEADLINE: Duration = Duration::from_secs(60);

/// Sets the range of ports of this namespace.
fn range(text: &str) {
    set_sysctl("net.ipv4.ip_local_port_range", text);
}

/// Returns whether this kernel has IP_LOCAL_PORT_RANGE, or reports a skipped test.
fn has_option(test: &str) -> bool {
    let has = capabilities::probe().unwrap().local_port_range != LocalPortRange::Absent;
    if !has {
        skip(test, "ip_local_port_range", "not in this kernel");
    }
    has
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Runs a future, and fails the test if it does not end.
fn run<T>(future: impl Future<Output = T>) -> T {
    runtime().block_on(async { tokio::time::timeout(DEADLINE, future).await.expect("an end in time") })
}

/// Waits until no TCP socket has this local address: on a busy machine the kernel handles the last ACK of a closed connection after close().
fn until_gone(local: SocketAddr) {
    let begun = Instant::now();
    loop {
        let mut is_there = false;
        sock_diag::each_connection(|entry| is_there |= entry.local == local).unwrap();
        if !is_there {
            return;
        }
        assert!(begun.elapsed() < DEADLINE, "{local} is still in use");
        thread::yield_now();
    }
}

/// Collects the fields of events as text.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<String>>);

impl Subscriber for Collector {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Fields(&mut self.0.lock().unwrap()));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        *self.0 += &format!("{}={value:?} ", field.name());
    }
}

/// Returns the events of `work`, which is repeated if there are none: a thread without a subscriber that meets an event first can make
/// tracing cache that no subscriber wants it, until the next subscriber is created.
fn collected<T>(work: impl Fn() -> T) -> (T, String) {
    let once = || {
        let collector = Collector::default();
        let done = with_default(collector.clone(), &work);
        let seen = collector.0.lock().unwrap().clone();
        (done, seen)
    };
    let mut tries = std::iter::repeat_with(once).take(10);
    tries.find(|(_, seen)| !seen.is_empty()).expect("an event in ten tries")
}

#[test]
fn a_dial_is_an_event_and_its_report_is_json() {
    in_namespace(|| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialer = Dialer::builder(listener.local_addr().unwrap()).build().unwrap();
        let (dialed, seen) = collected(|| dialer.dial());
        let (stream, report) = dialed.unwrap();
        assert!(seen.contains("connected") && seen.contains(&format!("source={}", report.source)), "{seen}");
        let json = serde_json::to_value(report).unwrap();
        assert_eq!(json["source"], stream.local_addr().unwrap().to_string());
        assert_eq!(json["attempts"], report.attempts);
    });
}

#[test]
fn a_refused_dial_is_an_event() {
    in_namespace(|| {
        let dialer = Dialer::builder("127.0.0.1:4999".parse().unwrap()).build().unwrap();
        let (dialed, seen) = collected(|| dialer.dial());
        dialed.unwrap_err();
        assert!(seen.contains("dial failed") && seen.contains("refused"), "{seen}");
    });
}

#[test]
fn workers_and_the_end_of_a_group_are_events() {
    let (_, seen) = collected(|| {
        let group = ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).open().unwrap();
        drop(group.join().unwrap());
        group.drain(Duration::ZERO).unwrap();
    });
    for expected in ["worker joined seat=0", "worker left seat=0", "group ends phase=Draining"] {
        assert!(seen.contains(expected), "{expected}: {seen}");
    }
}

/// A setting is read from the form in which it is written.
fn is_kept<T: Serialize + DeserializeOwned + PartialEq + Debug>(setting: &T, json: &Value) {
    assert_eq!(&serde_json::to_value(setting).unwrap(), json);
    assert_eq!(&T::deserialize(json).unwrap(), setting);
}

#[test]
fn settings_are_read_as_they_are_written() {
    is_kept(&Strategy::FullRange, &json!("full-range"));
    is_kept(&Strategy::RANDOM_WINDOW, &json!("random-window:500"));
    is_kept(&AcceptPolicy::ROTATE, &json!("rotate"));
    is_kept(&Family::Tcp6, &json!("tcp6"));
    is_kept(&Workers::Runtimes, &json!("runtimes"));
    is_kept(&Recycle::Requests(100), &json!({"requests": 100}));
    is_kept(&Sharing::Shared, &json!("shared"));
    is_kept(&PortRange::KERNEL_DEFAULT, &json!("32768-60999"));
    is_kept(&PortSet::parse_list("8080,9000-9002").unwrap(), &json!("8080,9000-9002"));
    is_kept(&Selector::Random, &json!("random"));
    is_kept(&SourcePool::any(), &json!([]));
    is_kept(&SourcePool::one([127, 0, 0, 1].into()), &json!(["127.0.0.1"]));
    let network = SourcePool::deserialize(json!(["127.0.0.0/28", "127.0.1.1"])).unwrap();
    assert_eq!(network.addresses().len(), 15);
    let error = Strategy::deserialize(json!("fast")).unwrap_err().to_string();
    assert!(error.starts_with("\"fast\" is not a port strategy"), "{error}");
}
