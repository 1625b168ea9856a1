//! Runs that a coordinator collects from the stream. The order of the messages in it decides whether a worker ended or was lost, for
//! every coordinator that reads them.
//!
//! The cost of a merge of 1,000 workers is ignored, because it computes for minutes; run it alone:
//! `cargo test --release -p fourtuple-fleet --test collect -- --ignored --nocapture --test-threads 1`

#[path = "../../crates/record/tests/samples/mod.rs"]
mod samples;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use async_nats::jetstream::Context;
use async_nats::jetstream::context::PublishAckFuture;
use fourtuple_fleet::coordinator::Coordinator;
use fourtuple_fleet::interval::{Content, Counts, Message, Parts, WorkerEnd};
use fourtuple_fleet::merge::{Added, Merge};
use fourtuple_fleet::nats::Connection;
use fourtuple_fleet::protocol::{
    AgentInfo, ClockEstimate, Lost, Plan, PlannedWorker, STREAM, STREAM_SUBJECTS, lost_subject, plan_subject,
    summary_subject, worker_subject,
};
use fourtuple_fleet::summary::Totals;
use fourtuple_record::measure::Histogram;
use fourtuple_record::{LoadRecord, SCHEMA};
use fourtuple_syscalls::child;
use fourtuple_syscalls::resource::thread_cpu_time;
use fourtuple_testing::{in_namespace_of, test_of};

/// Returns the connection to the server of the test.
fn connection() -> Connection {
    Connection { url: "nats://127.0.0.1:4222".to_owned(), credentials: None, nkey: None, ca: None }
}

/// Returns the end of the run of a worker.
fn end(record: Option<LoadRecord>, intervals: u64) -> WorkerEnd {
    WorkerEnd { record, failed: None, start_error_ns: 0, intervals, dropped: 0 }
}

/// Returns the plan of a run long ago.
fn plan(run: &str, workers: u32, record: &LoadRecord) -> Plan {
    let worker = |slot| PlannedWorker {
        agent: AgentInfo {
            name: format!("host-{slot}"),
            instance: format!("i{slot}"),
            labels: BTreeMap::new(),
            binary: "b".to_owned(),
            schema: SCHEMA.to_owned(),
            allow: "load".to_owned(),
            kernel: "6.1".to_owned(),
            cpus: 2,
        },
        settings: record.settings.clone(),
        clock: ClockEstimate { offset_ns: 5, rtt_ns: 200_000, bound_ns: 100_000 },
    };
    Plan {
        run: run.to_owned(),
        started: "2026-01-01T00:00:00Z".to_owned(),
        started_ns: 0,
        settings: record.settings.clone(),
        deadline_ns: 700_000_000_000,
        most_skew_ns: 250_000_000,
        host: record.host.clone(),
        workers: (0..workers).map(worker).collect(),
    }
}

/// A nats-server with JetStream, which ends with the test.
struct NatsServer {
    child: Child,
    store: PathBuf,
}

impl NatsServer {
    /// Starts the server with its files in a directory of this name; `None`: it is not in PATH.
    fn start(name: &str) -> Option<NatsServer> {
        let store = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-jetstream"));
        let _ = fs::remove_dir_all(&store);
        // Debian has it in a directory that is not in the PATH of every user.
        let command = ["nats-server", "/usr/sbin/nats-server"].into_iter().find_map(|program| {
            let mut command = Command::new(program);
            command.args(["-a", "127.0.0.1", "-p", "4222", "-js", "-sd"]).arg(&store);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            child::end_with_this_thread(&mut command);
            command.spawn().ok()
        });
        let server = NatsServer { child: command?, store };
        while TcpStream::connect("127.0.0.1:4222").is_err() {
            thread::sleep(Duration::from_millis(20));
        }
        Some(server)
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.store);
    }
}

/// A message of a worker, or of the coordinator about it.
#[derive(Clone, Copy)]
enum Sent {
    /// An interval: its second and its number.
    Second(u64),
    /// The end after this number of intervals.
    End(u64),
    /// The summary of this number of intervals.
    Summary(u64),
    /// A coordinator declares the worker lost from this second on.
    Lost(u64),
}

use Sent::{End, Lost as LostFrom, Second, Summary};

fn interval(second: u64) -> (Counts, Parts) {
    let mut parts = Parts::default();
    (0..=second).for_each(|sample| parts.total.record(1_000_000 * (sample + 1)));
    let operations = second + 1;
    (Counts { second, operations, connections: operations, ..Counts::default() }, parts)
}

/// Publishes messages of the only worker of a run, in this order.
async fn publish(context: &Context, run: &str, all: &[Sent]) {
    let mut record = samples::steady();
    (record.results.seconds, record.results.distribution, record.validity) = Default::default();
    let send = async |subject: String, bytes: Vec<u8>| {
        context.publish(subject, bytes.into()).await.expect("published").await.expect("stored");
    };
    for sent in all {
        let message = |sequence, content| {
            let message = Message { run: run.to_owned(), slot: 0, sequence, content };
            message.encode().expect("a small message")
        };
        match *sent {
            Second(second) => {
                let (counts, parts) = interval(second);
                let content = Content::Interval(counts, Box::new(parts));
                send(worker_subject(run, 0), message(second, content)).await;
            }
            End(intervals) => {
                let content = Content::End(Box::new(end(Some(record.clone()), intervals)));
                send(worker_subject(run, 0), message(intervals, content)).await;
            }
            Summary(intervals) => {
                let mut totals = Totals::default();
                for (counts, parts) in (0..intervals).map(interval) {
                    totals.add(&counts, &parts);
                }
                let parts = totals.encode(run, 0, end(Some(record.clone()), intervals)).expect("a summary");
                for (part, bytes) in parts.into_iter().enumerate() {
                    send(summary_subject(run, 0, part), bytes).await;
                }
            }
            LostFrom(second) => {
                let lost = serde_json::to_vec(&Lost { slot: 0, second }).expect("string keys");
                send(lost_subject(run, 0), lost).await;
            }
        }
    }
}

/// Returns the context of the stream, which it creates if it does not exist.
async fn jetstream() -> Context {
    let client = async_nats::connect("127.0.0.1:4222").await.expect("nats-server");
    let mut context = async_nats::jetstream::new(client);
    context.set_timeout(Duration::from_secs(60));
    let stream = async_nats::jetstream::stream::Config {
        name: STREAM.to_owned(),
        subjects: vec![STREAM_SUBJECTS.to_owned()],
        ..Default::default()
    };
    context.get_or_create_stream(stream).await.expect("a stream");
    context
}

/// Publishes the plan and the messages of each run, and creates the stream if it does not exist.
fn stream(runs: &[(&str, &[Sent])]) {
    stream_with(Duration::ZERO, runs);
}

/// As `stream`, with a pause after each message.
fn stream_with(pause: Duration, runs: &[(&str, &[Sent])]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let context = jetstream().await;
        for (run, sent) in runs {
            let plan = serde_json::to_vec(&plan(run, 1, &samples::steady())).expect("string keys");
            context.publish(plan_subject(run), plan.into()).await.expect("published").await.expect("stored");
            for sent in *sent {
                publish(&context, run, std::slice::from_ref(sent)).await;
                tokio::time::sleep(pause).await;
            }
        }
    });
}

/// Collects a run: from summaries if there are any, or (`log`) from its intervals.
fn collect(run: &str, log: bool) -> LoadRecord {
    let coordinator = Coordinator::connect(&connection()).expect("nats-server");
    coordinator.collect(run, log, &AtomicBool::new(false), |_| ()).expect("a run").record
}

/// Returns the number of intervals, the second of the loss, and the remarks.
fn verdict(record: &LoadRecord) -> (u64, Option<u64>, Vec<&str>) {
    let [host] = record.results.hosts.as_slice() else { panic!("{:?}", record.results.hosts) };
    let remarks = record.validity.iter().map(|remark| remark.id.as_str()).collect();
    (host.intervals, host.lost_at_ns.map(|at| at / 1_000_000_000), remarks)
}

/// Runs a test in a namespace of its own with nats-server; skips it without one. The closure has to be of the test function itself,
/// whose name the report takes from it.
fn with_server<F: FnOnce(NatsServer) + Send + 'static>(test: F) {
    let name = test_of(&test);
    in_namespace_of(name.clone(), move || match NatsServer::start(&name) {
        Some(server) => test(server),
        None => {
            fourtuple_testing::skip(&format!("collect::{name}"), "nats", "there is no nats-server in PATH")
        }
    });
}

#[test]
fn the_stream_decides_between_end_and_loss() {
    with_server(|_server| {
        let lost = |second| (second, Some(second), vec!["worker-lost"]);
        let cases: [(&str, &[Sent], _); 6] = [
            ("ended", &[Second(0), Second(1), Second(2), End(3), Summary(3)], (3, None, vec![])),
            ("late", &[Second(0), Second(1), Second(2), End(3), LostFrom(3), Summary(3)], (3, None, vec![])),
            ("later", &[Second(0), Second(1), Second(2), End(3), Summary(3), LostFrom(3)], (3, None, vec![])),
            ("early", &[Second(0), Second(1), LostFrom(2), Second(2), End(3), Summary(3)], lost(2)),
            // An interval that is in the stream before the loss counts, although the coordinator had not read it.
            ("between", &[Second(0), Second(1), Second(2), LostFrom(1), End(3), Summary(3)], lost(3)),
            ("twice", &[Second(0), LostFrom(1), Second(1), LostFrom(2), End(2)], lost(1)),
        ];
        stream(&cases.each_ref().map(|(run, sent, _)| (*run, *sent)));
        for (run, _, expected) in &cases {
            let record = collect(run, false);
            assert_eq!(verdict(&record), *expected, "{run}");
            assert_eq!(record, collect(run, true), "{run}: summaries and intervals differ");
        }
    });
}

#[test]
fn a_worker_that_ends_after_its_loss_stays_lost() {
    with_server(|_server| {
        stream(&[("run", &[Second(0), Second(1)])]);
        // Two coordinators decide at about the same time.
        let others: Vec<_> = (0..2).map(|_| thread::spawn(|| collect("run", false))).collect();
        let records: Vec<LoadRecord> = others.into_iter().map(|it| it.join().expect("a record")).collect();
        assert_eq!(verdict(&records[0]), (2, Some(2), vec!["worker-lost"]));
        stream(&[("run", &[Second(2), End(3), Summary(3)])]);
        assert_eq!([records[1].clone(), collect("run", false)], [records[0].clone(), records[0].clone()]);
    });
}

#[test]
fn intervals_that_no_disk_has_end_a_collection() {
    with_server(|_server| {
        stream(&[("run", &[Second(0), End(3)])]);
        assert_eq!(verdict(&collect("run", false)), (1, None, vec!["intervals-missing"]));
    });
}

#[test]
fn a_run_in_progress_is_collected_with_any_start() {
    with_server(|_server| {
        stream(&[("run", &[Second(0)])]);
        // By its plan the run began in 1970: the wall clock of this host is far ahead, or the start of the run was late.
        let collected = thread::spawn(|| collect("run", false));
        let mut rest: Vec<Sent> = (1..100).map(Second).collect();
        rest.push(End(100));
        // Longer than the time in which a worker without a message is lost.
        stream_with(Duration::from_millis(100), &[("run", &rest)]);
        assert_eq!(verdict(&collected.join().expect("a record")), (100, None, vec![]));
    });
}

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
    peak_of("self")
}

/// Returns the peak of the resident set of a process in MiB.
fn peak_of(process: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("procfs");
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
    let process = server.child.id().to_string();
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).expect("procfs");
    let fields: Vec<&str> = stat.rsplit(')').next().expect("a name").split_whitespace().collect();
    let ticks = |at: usize| fields[at].parse::<u64>().expect("ticks");
    (ticks(11) + ticks(12), peak_of(&process))
}

/// Publishes messages to JetStream with a window of acknowledgements.
struct Publisher {
    context: Context,
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
    let mut publisher =
        Publisher { context: jetstream().await, waiting: Default::default(), messages: 0, bytes: 0 };
    let plan = serde_json::to_vec(&plan(RUN, WORKERS, &record)).expect("string keys");
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
    with_server(|server| {
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
