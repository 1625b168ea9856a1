//! The cost of a merge of 1,000 workers. Ignored, because it computes for minutes; run it alone:
//! `cargo test --release -p fourtuple-fleet --test scale -- --ignored --nocapture`

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use fourtuple_fleet::interval::{Content, Counts, Message, Parts, WorkerEnd};
use fourtuple_fleet::merge::{Added, Merge};
use fourtuple_measure::Histogram;
use fourtuple_syscalls::resource::thread_cpu_time;

const WORKERS: u32 = 1_000;
const SECONDS: u64 = 600;

/// Operations of an interval.
const OPERATIONS: u32 = 1_000;

/// Different intervals that the workers send in turn.
const KINDS: usize = 16;

fn histogram(random: &mut fastrand::Rng, typical_ns: f64) -> Histogram {
    let mut histogram = Histogram::new();
    for _ in 0..OPERATIONS {
        histogram.record((typical_ns * (0.5 - (1.0 - random.f64()).ln())) as u64);
    }
    histogram
}

fn peak_mib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find(|line| line.starts_with("VmHWM")).expect("the peak of the resident set");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("KiB") / 1024
}

/// Replaces the number after `"name":` in the header of an encoded message.
fn with_numbers(bytes: &[u8], slot: u32, second: u64) -> Vec<u8> {
    let end = bytes.iter().position(|byte| *byte == b'\n').expect("a header");
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[..end]).expect("JSON");
    header["slot"] = slot.into();
    header["sequence"] = second.into();
    header["interval"]["second"] = second.into();
    [header.to_string().as_bytes(), &bytes[end..]].concat()
}

#[test]
#[ignore = "computes for minutes"]
fn a_thousand_workers_are_merged_as_they_send() {
    let mut random = fastrand::Rng::with_seed(1);
    let kinds: Vec<Vec<u8>> = (0..KINDS)
        .map(|_| {
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
            let content = Content::Interval(counts, Box::new(parts));
            Message { run: "r".to_owned(), slot: 0, sequence: 0, content }.encode().expect("a small message")
        })
        .collect();
    let size = kinds.iter().map(Vec::len).sum::<usize>() / KINDS;
    let before = peak_mib();
    let mut merge = Merge::new("r", WORKERS, None);
    let (mut cpu, mut worst) = (Duration::ZERO, Duration::ZERO);
    for second in 0..SECONDS {
        let messages: Vec<Vec<u8>> = (0..WORKERS)
            .map(|slot| with_numbers(&kinds[(slot as usize + second as usize) % KINDS], slot, second))
            .collect();
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
        let end = WorkerEnd { record: None, failed: None, start_error_ns: 0, intervals: SECONDS, dropped: 0 };
        merge.add(Message {
            run: "r".to_owned(),
            slot,
            sequence: SECONDS,
            content: Content::End(Box::new(end)),
        });
    }
    assert!(merge.is_complete());
    let (seconds, _) = merge.finish();
    let finished = begun.elapsed();
    assert_eq!(seconds.len() as u64, SECONDS);
    assert_eq!(merge.parts().total.count(), u64::from(WORKERS) * SECONDS * u64::from(OPERATIONS));
    let per_second = cpu / SECONDS as u32;
    // The test runner would capture the output of println!.
    writeln!(
        std::io::stderr(),
        "{size} bytes a message; {per_second:?} of CPU for the messages of a second, {worst:?} at most; {cpu:?} in all; \
         {finished:?} from the last message to the result; {} MiB ({before} before)",
        peak_mib()
    )
    .expect("stderr takes a line");
    assert!(worst < Duration::from_secs(1), "the merge keeps up with the workers: {worst:?}");
    assert!(finished < Duration::from_secs(2), "{finished:?}");
    assert!(peak_mib() < 256, "{} MiB", peak_mib());
}
