//! The order of messages in the stream decides whether a worker ended or was lost, for every coordinator that reads them.

#[path = "../../crates/record/tests/samples/mod.rs"]
mod samples;

mod nats;

use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use async_nats::jetstream::Context;
use fourtuple_fleet::coordinator::Coordinator;
use fourtuple_fleet::interval::{Content, Counts, Message, Parts};
use fourtuple_fleet::protocol::{
    Lost, STREAM, STREAM_SUBJECTS, lost_subject, plan_subject, summary_subject, worker_subject,
};
use fourtuple_fleet::summary::Totals;
use fourtuple_record::LoadRecord;
use fourtuple_testing::in_namespace;
use nats::{NatsServer, connection, end};

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

/// Publishes the plan and the messages of each run, and creates the stream if it does not exist.
fn stream(runs: &[(&str, &[Sent])]) {
    stream_with(Duration::ZERO, runs);
}

/// As `stream`, with a pause after each message.
fn stream_with(pause: Duration, runs: &[(&str, &[Sent])]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let client = async_nats::connect("127.0.0.1:4222").await.expect("nats-server");
        let context = async_nats::jetstream::new(client);
        let stream = async_nats::jetstream::stream::Config {
            name: STREAM.to_owned(),
            subjects: vec![STREAM_SUBJECTS.to_owned()],
            ..Default::default()
        };
        context.get_or_create_stream(stream).await.expect("a stream");
        for (run, sent) in runs {
            let plan = serde_json::to_vec(&nats::plan(run, 1, &samples::steady())).expect("string keys");
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

fn server(test: &str) -> Option<NatsServer> {
    let server = NatsServer::start(test);
    if server.is_none() {
        fourtuple_testing::skip(&format!("order::{test}"), "nats", "there is no nats-server in PATH");
    }
    server
}

#[test]
fn the_stream_decides_between_end_and_loss() {
    in_namespace(|| {
        let Some(_server) = server("the_stream_decides_between_end_and_loss") else { return };
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
    in_namespace(|| {
        let Some(_server) = server("a_worker_that_ends_after_its_loss_stays_lost") else { return };
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
    in_namespace(|| {
        let Some(_server) = server("intervals_that_no_disk_has_end_a_collection") else { return };
        stream(&[("run", &[Second(0), End(3)])]);
        assert_eq!(verdict(&collect("run", false)), (1, None, vec!["intervals-missing"]));
    });
}

#[test]
fn a_run_in_progress_is_collected_with_any_start() {
    in_namespace(|| {
        let Some(_server) = server("a_run_in_progress_is_collected_with_any_start") else { return };
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
