//! The cost of a merge of 1,000 workers. Ignored, because it computes for minutes; run it alone:
//! `cargo test --release -p fourtuple-fleet --test scale -- --ignored --nocapture --test-threads 1`

#[path = "../../crates/record/tests/samples/mod.rs"]
mod samples;

mod nats;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use async_nats::jetstream::context::PublishAckFuture;
use fourtuple_fleet::coordinator::Coordinator;
use fourtuple_fleet::interval::{Content, Counts, Message, Parts};
use fourtuple_fleet::merge::{Added, Merge};
use fourtuple_fleet::protocol::{STREAM, STREAM_SUBJECTS, plan_subject, summary_subject, worker_subject};
use fourtuple_fleet::summary::Totals;
use fourtuple_record::LoadRecord;
use fourtuple_record::measure::Histogram;
use fourtuple_syscalls::resource::thread_cpu_time;
use fourtuple_testing::in_namespace;
use nats::{NatsServer, connection, end};

const WORKERS: u32 = 1_000;
const SECONDS: u64 = 600;

/// Seconds that are merged one by one, as they arrive during a run.
const LIVE_SECONDS: u64 = 30;

/// Operations of an interval.
const OPERATIONS: u32 = 1_000;

/// Different intervals that the workers send in turn.
const KINDS: usize = 16;

/// Messages on their way to nats-server without an acknowledgement.
const UNACKNOWLEDGED: usize = 2_000;

const RUN: &str = "scale";

fn histogram(random: &mut fastrand::Rng, typical_ns: f64) -> Histogram {
    let mut histogram = Histogram::new();
    for _ in 0..OPERATIONS {
        histogram.record((typical_ns * (0.5 - (1.0 - random.f64()).ln())) as u64);
    }
    histogram
}

/// Returns intervals that differ.
fn kinds() -> Vec<(Counts, Parts)> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut kind = || {
        let parts = Parts {
            search: histogram(&mut random, 15e3),
            handshake: histogram(&mut random, 80e3),
            first_byte: histogram(&mut random, 200e3),
            total: histogram(&mut random, 300e3),
            late: histogram(&mut random, 20e3),
        };
        let operations = u64::from(OPERATIONS);
        let counts =
            Counts { operations, connections: operations, errors: BTreeMap::new(), ..Counts::default() };
        (counts, parts)
    };
    (0..KINDS).map(|_| kind()).collect()
}

fn kind_of(slot: u32, second: u64) -> usize {
    (slot as usize + second as usize) % KINDS
}

fn encoded(kinds: &[(Counts, Parts)]) -> Vec<Vec<u8>> {
    let encode = |(counts, parts): &(Counts, Parts)| {
        let content = Content::Interval(counts.clone(), Box::new(parts.clone()));
        Message { run: RUN.to_owned(), slot: 0, sequence: 0, content }.encode().expect("a small message")
    };
    kinds.iter().map(encode).collect()
}

/// Returns the peak of the resident set in MiB.
fn peak_mib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find(|line| line.starts_with("VmHWM")).expect("the peak of the resident set");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("KiB") / 1024
}

/// Sets the peak of the resident set to its size, and returns it in MiB.
fn reset_peak() -> u64 {
    fs::write("/proc/self/clear_refs", "5").expect("procfs");
    peak_mib()
}

fn say(line: &str) {
    // The test runner would capture the output of println!.
    writeln!(io::stderr(), "{line}").expect("stderr takes a line");
}

/// Sets the slot and the second in the header of an encoded message.
fn with_numbers(bytes: &[u8], slot: u32, second: u64) -> Vec<u8> {
    let end = bytes.iter().position(|byte| *byte == b'\n').expect("a header");
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[..end]).expect("JSON");
    header["slot"] = slot.into();
    header["sequence"] = second.into();
    header["interval"]["second"] = second.into();
    [header.to_string().as_bytes(), &bytes[end..]].concat()
}

#[test]
#[ignore = "computes for a minute"]
fn a_thousand_workers_are_merged_as_they_send() {
    let kinds = encoded(&kinds());
    let size = kinds.iter().map(Vec::len).sum::<usize>() / KINDS;
    let before = reset_peak();
    let mut merge = Merge::new(RUN, WORKERS, None);
    let (mut cpu, mut worst) = (Duration::ZERO, Duration::ZERO);
    for second in 0..LIVE_SECONDS {
        let messages: Vec<Vec<u8>> =
            (0..WORKERS).map(|slot| with_numbers(&kinds[kind_of(slot, second)], slot, second)).collect();
        let begun = thread_cpu_time();
        for message in messages {
            assert_eq!(merge.add(Message::decode(&message).expect("a message")), Added::New);
        }
        let took = thread_cpu_time() - begun;
        cpu += took;
        worst = worst.max(took);
    }
    let begun = Instant::now();
    for slot in 0..WORKERS {
        let end = Content::End(Box::new(end(None, LIVE_SECONDS)));
        merge.add(Message { run: RUN.to_owned(), slot, sequence: LIVE_SECONDS, content: end });
    }
    assert!(merge.is_complete());
    let (seconds, _) = merge.finish();
    let finished = begun.elapsed();
    assert_eq!(seconds.len() as u64, LIVE_SECONDS);
    assert_eq!(merge.parts().total.count(), u64::from(WORKERS) * LIVE_SECONDS * u64::from(OPERATIONS));
    let per_second = cpu / LIVE_SECONDS as u32;
    say(&format!(
        "live: {size} bytes a message; {per_second:?} of CPU for the messages of a second, {worst:?} at most; {finished:?} from \
         the last message to the result; {} MiB ({before} before)",
        peak_mib()
    ));
    assert!(peak_mib() < 256, "{} MiB", peak_mib());
}

/// Returns the CPU time of nats-server so far in hundredths of a second, and the peak of its resident set in MiB.
fn cost(server: &NatsServer) -> (u64, u64) {
    let read = |file| fs::read_to_string(format!("/proc/{}/{file}", server.id())).expect("procfs");
    let stat = read("stat");
    let fields: Vec<&str> = stat.rsplit(')').next().expect("a name").split_whitespace().collect();
    let ticks = |at: usize| fields[at].parse::<u64>().expect("ticks");
    let status = read("status");
    let peak = status.lines().find(|line| line.starts_with("VmHWM")).expect("a resident set");
    let kib = peak.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("KiB");
    (ticks(11) + ticks(12), kib / 1024)
}

/// Publishes messages to JetStream with a window of acknowledgements.
struct Publisher {
    context: async_nats::jetstream::Context,
    waiting: std::collections::VecDeque<PublishAckFuture>,
    messages: u64,
    bytes: u64,
}

impl Publisher {
    async fn publish(&mut self, subject: String, payload: Vec<u8>) {
        self.messages += 1;
        self.bytes += payload.len() as u64;
        self.waiting.push_back(self.context.publish(subject, payload.into()).await.expect("published"));
        while self.waiting.len() > UNACKNOWLEDGED {
            self.waiting.pop_front().expect("not empty").await.expect("acknowledged");
        }
    }

    async fn flush(&mut self) {
        for ack in self.waiting.drain(..) {
            ack.await.expect("acknowledged");
        }
    }
}

/// Publishes what the workers of a whole run send. Returns the numbers and bytes of intervals and of summaries.
async fn publish_run(record: LoadRecord) -> [(u64, u64); 2] {
    let client = async_nats::connect("127.0.0.1:4222").await.expect("nats-server");
    let mut context = async_nats::jetstream::new(client);
    context.set_timeout(Duration::from_secs(60));
    let stream = async_nats::jetstream::stream::Config {
        name: STREAM.to_owned(),
        subjects: vec![STREAM_SUBJECTS.to_owned()],
        ..Default::default()
    };
    context.create_stream(stream).await.expect("a stream");
    let mut publisher = Publisher { context, waiting: Default::default(), messages: 0, bytes: 0 };
    let plan = serde_json::to_vec(&nats::plan(RUN, WORKERS, &record)).expect("string keys");
    publisher.publish(plan_subject(RUN), plan).await;
    let kinds = kinds();
    let messages = encoded(&kinds);
    (publisher.messages, publisher.bytes) = (0, 0);
    for second in 0..SECONDS {
        for slot in 0..WORKERS {
            let message = with_numbers(&messages[kind_of(slot, second)], slot, second);
            publisher.publish(worker_subject(RUN, slot), message).await;
        }
    }
    let intervals = (publisher.messages, publisher.bytes);
    (publisher.messages, publisher.bytes) = (0, 0);
    // The sums of workers with the same sequence of intervals are equal.
    let totals = |slot: usize| {
        let mut totals = Totals::default();
        for second in 0..SECONDS {
            let (counts, parts) = &kinds[kind_of(slot as u32, second)];
            totals.add(&Counts { second, ..counts.clone() }, parts);
        }
        totals
    };
    let cpu = thread_cpu_time();
    let totals: Vec<Totals> = (0..KINDS).map(totals).collect();
    let each = (thread_cpu_time() - cpu) / (KINDS as u32 * SECONDS as u32);
    say(&format!("{each:?} of CPU to add an interval to a summary"));
    for slot in 0..WORKERS {
        let totals = totals[kind_of(slot, 0)].clone();
        let parts = totals.encode(RUN, slot, end(Some(record.clone()), SECONDS)).expect("small messages");
        for (part, message) in parts.into_iter().enumerate() {
            publisher.publish(summary_subject(RUN, slot, part), message).await;
        }
    }
    publisher.flush().await;
    [intervals, (publisher.messages, publisher.bytes)]
}

#[test]
#[ignore = "publishes 2 GB and computes for minutes"]
fn a_run_of_a_thousand_workers_is_collected_from_nats() {
    in_namespace(|| {
        let Some(server) = NatsServer::start("scale") else {
            return fourtuple_testing::skip(
                "scale::a_run_of_a_thousand_workers_is_collected_from_nats",
                "nats",
                "there is no nats-server in PATH",
            );
        };
        let mut record = samples::steady();
        (record.results.seconds, record.results.distribution, record.validity) = Default::default();
        let begun = Instant::now();
        let publish = async || publish_run(record.clone()).await;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let [intervals, summaries] = runtime.block_on(publish());
        drop(runtime);
        say(&format!(
            "published in {:?}: {} intervals of {} bytes, {} summaries of {} bytes; nats-server: {:?} (1/100 s of CPU, MiB)",
            begun.elapsed(),
            intervals.0,
            intervals.1,
            summaries.0,
            summaries.1,
            cost(&server)
        ));
        let before = reset_peak();
        let served = cost(&server).0;
        let coordinator = Coordinator::connect(&connection()).expect("nats-server");
        let (begun, cpu) = (Instant::now(), thread_cpu_time());
        let outcome = coordinator.collect(RUN, false, &AtomicBool::new(false), |_| ()).expect("a run");
        let (took, cpu) = (begun.elapsed(), thread_cpu_time() - cpu);
        let peak = peak_mib();
        say(&format!(
            "collected in {took:?} with {cpu:?} of CPU and {peak} MiB ({before} before); nats-server: {} hundredths of a second",
            cost(&server).0 - served
        ));
        let results = &outcome.record.results;
        let operations = u64::from(WORKERS) * SECONDS * u64::from(OPERATIONS);
        assert_eq!((results.operations, results.latency_ns.total.samples), (operations, operations));
        assert_eq!((results.seconds.len() as u64, results.hosts.len()), (SECONDS, WORKERS as usize));
        assert_eq!(outcome.record.validity, []);
        assert!(peak < 256, "{peak} MiB");
    });
}
