//! A worker: performs its part of a run, and records its intervals. The generating threads hand an interval to a bounded queue and
//! never wait for NATS or the disk. One thread writes the journal; a task of the event loop publishes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use async_nats::header::NATS_MESSAGE_ID;
use async_nats::jetstream::Context;
use async_nats::jetstream::context::PublishErrorKind;
use async_nats::{Client, HeaderMap};
use bytes::Bytes;
use fourtuple_bench::load::{Coordination, Interval, Measured, Prepared, RunProgress};
use fourtuple_record::{Host, LoadRecord, Record, SCHEMA};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::interval::{Content, MAX_MESSAGE_BYTES, Message, WorkerEnd};
use crate::nats::{jetstream, require_stream};
use crate::protocol::{summary_subject, worker_subject};
use crate::summary::Totals;

/// Number of intervals that may wait for the disk. A further one is lost and counted.
const MAX_WAITING: usize = 64;

/// Maximum number of bytes that wait for NATS, which may be unreachable for days. A further interval stays in the journal, and a coordinator
/// asks for it after the end.
const MAX_UNSENT: usize = 64 << 20;

/// Time until a message that NATS did not acknowledge is sent again.
const AGAIN: Duration = Duration::from_millis(200);

/// No number of free ports is known.
const UNKNOWN: u64 = u64::MAX;

/// The part of one worker in a run.
pub(crate) struct Worker {
    pub(crate) run: String,
    pub(crate) slot: u32,
    pub(crate) directory: PathBuf,
    pub(crate) prepared: Arc<Prepared>,
    pub(crate) sources: Option<String>,
    pub(crate) anyway: bool,
    pub(crate) host: Host,
    /// Start for the record, RFC 3339.
    pub(crate) started: String,
    /// Time until the start.
    pub(crate) ahead: Duration,
    /// Time from the start until the worker stops by itself.
    pub(crate) deadline: Duration,
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) ended: Arc<AtomicBool>,
}

/// A message on its way to NATS.
pub(crate) struct Outgoing {
    subject: String,
    /// JetStream drops a message that arrives a second time within its window of duplicates.
    id: String,
    bytes: Vec<u8>,
}

impl Outgoing {
    /// Returns an interval or the end.
    fn new(run: &str, slot: u32, sequence: u64, bytes: Vec<u8>) -> Outgoing {
        Outgoing { subject: worker_subject(run, slot), id: format!("{run}.{slot}.{sequence}"), bytes }
    }
}

/// The messages of a worker on their way to NATS.
pub(crate) struct Outbox {
    run: String,
    slot: u32,
    sender: UnboundedSender<Outgoing>,
    /// Number of bytes in the queue.
    unsent: Arc<AtomicUsize>,
}

/// The other end of an [`Outbox`].
pub(crate) struct Queue {
    receiver: UnboundedReceiver<Outgoing>,
    unsent: Arc<AtomicUsize>,
}

impl Queue {
    async fn next(&mut self) -> Option<Outgoing> {
        let outgoing = self.receiver.recv().await?;
        self.unsent.fetch_sub(outgoing.bytes.len(), Ordering::Relaxed);
        Some(outgoing)
    }
}

impl Outbox {
    pub(crate) fn new(run: &str, slot: u32) -> (Outbox, Queue) {
        let (sender, receiver) = unbounded_channel();
        let unsent = Arc::new(AtomicUsize::new(0));
        let queue = Queue { receiver, unsent: Arc::clone(&unsent) };
        (Outbox { run: run.to_owned(), slot, sender, unsent }, queue)
    }

    /// Returns whether a message of this length exceeds [`MAX_UNSENT`].
    fn is_full(&self, length: usize) -> bool {
        self.unsent.load(Ordering::Relaxed) + length > MAX_UNSENT
    }

    /// Adds an interval or the end.
    pub(crate) fn add(&self, sequence: u64, bytes: Vec<u8>) {
        self.send(Outgoing::new(&self.run, self.slot, sequence, bytes));
    }

    /// Adds a message of the summary.
    fn add_summary(&self, part: usize, bytes: Vec<u8>) {
        let Outbox { run, slot, .. } = self;
        let (subject, id) = (summary_subject(run, *slot, part), format!("{run}.{slot}.end.{part}"));
        self.send(Outgoing { subject, id, bytes });
    }

    fn send(&self, outgoing: Outgoing) {
        self.unsent.fetch_add(outgoing.bytes.len(), Ordering::Relaxed);
        // The event loop has ended with the agent if this fails; intervals and the end are in the journal.
        let _ = self.sender.send(outgoing);
    }
}

impl Worker {
    /// Starts the threads of the run. They end by themselves.
    pub(crate) fn start(self, outbox: Outbox, log: fn(&str)) -> Result<(), String> {
        let start = Instant::now() + self.ahead;
        let journal = Journal::create(&self.directory, &self.run, self.slot)
            .map_err(|error| format!("cannot write to {}: {error}", self.directory.display()))?;
        let recorder = Recorder {
            run: self.run.clone(),
            slot: self.slot,
            journal,
            outbox,
            sequence: 0,
            totals: Totals::default(),
            ports_left: Arc::new(AtomicU64::new(UNKNOWN)),
            dropped: Arc::default(),
            log,
        };
        let deadline = (start + self.deadline, Arc::clone(&self.stop), Arc::clone(&self.ended));
        let (sender, intervals) = mpsc::sync_channel(MAX_WAITING);
        let (ports_left, dropped) = (Arc::clone(&recorder.ports_left), Arc::clone(&recorder.dropped));
        let lost = Arc::clone(&dropped);
        let coordination = Coordination {
            start,
            intervals: Box::new(move |interval| {
                if sender.try_send(interval).is_err() {
                    lost.fetch_add(1, Ordering::Relaxed);
                }
            }),
        };
        let (ends, end) = mpsc::channel();
        let thread = |name: &str| thread::Builder::new().name(name.to_owned());
        let failed = |error| format!("cannot create a thread: {error}");
        thread("recorder").spawn(move || recorder.record(intervals, &end)).map_err(failed)?;
        thread("deadline").spawn(move || stop_at(deadline)).map_err(failed)?;
        let at_end = SetAtEnd(Arc::clone(&self.ended));
        let run = move || {
            let _at_end = at_end;
            let result = self.prepared.run(&self.stop, Some(coordination), |progress: &RunProgress| {
                ports_left.store(progress.ports_left.unwrap_or(UNKNOWN), Ordering::Relaxed);
            });
            let _ = ends.send(self.end(result, dropped.load(Ordering::Relaxed)));
        };
        // Without a thread the others end without an interval and without an end, because `run` is dropped.
        thread("load").spawn(run).map_err(failed)?;
        Ok(())
    }

    fn end(&self, result: Result<Measured, fourtuple_bench::load::LoadError>, dropped: u64) -> WorkerEnd {
        match result {
            Err(error) => WorkerEnd {
                record: None,
                failed: Some(error.to_string()),
                start_error_ns: 0,
                intervals: 0,
                dropped,
            },
            Ok(Measured { mut results, remarks, start_error, .. }) => {
                // They follow from the intervals.
                results.seconds.clear();
                results.distribution.clear();
                let record: LoadRecord = Record {
                    schema: SCHEMA.to_owned(),
                    command: "load".to_owned(),
                    started: self.started.clone(),
                    host: self.host.clone(),
                    settings: self.prepared.settings(self.sources.as_deref(), self.anyway),
                    validity: remarks,
                    results,
                };
                let start_error_ns = start_error.as_nanos() as u64;
                WorkerEnd { record: Some(record), failed: None, start_error_ns, intervals: 0, dropped }
            }
        }
    }
}

/// Sets its flag when it is dropped: after a panic the agent takes other runs too.
struct SetAtEnd(Arc<AtomicBool>);

impl Drop for SetAtEnd {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Sets the stop flag at the deadline, so that no worker outlives it even if NATS is gone.
fn stop_at((deadline, stop, ended): (Instant, Arc<AtomicBool>, Arc<AtomicBool>)) {
    const LOOK: Duration = Duration::from_millis(100);
    while !ended.load(Ordering::Relaxed) {
        match deadline.checked_duration_since(Instant::now()) {
            Some(left) if !left.is_zero() => thread::sleep(left.min(LOOK)),
            _ => return stop.store(true, Ordering::Relaxed),
        }
    }
}

/// Writes the messages of a worker to its journal and to its outbox.
struct Recorder {
    run: String,
    slot: u32,
    journal: Journal,
    outbox: Outbox,
    sequence: u64,
    totals: Totals,
    ports_left: Arc<AtomicU64>,
    dropped: Arc<AtomicU64>,
    log: fn(&str),
}

impl Recorder {
    fn record(mut self, intervals: Receiver<Interval>, end: &Receiver<WorkerEnd>) {
        for interval in intervals {
            let left = self.ports_left.load(Ordering::Relaxed);
            let left = (left != UNKNOWN).then_some(left);
            let message = Message::interval(&self.run, self.slot, self.sequence, interval, left);
            self.add(message);
        }
        let Ok(mut end) = end.recv() else { return };
        end.intervals = self.sequence;
        end.dropped = self.dropped.load(Ordering::Relaxed);
        let (run, slot, sequence) = (self.run.clone(), self.slot, self.sequence);
        self.add(Message { run, slot, sequence, content: Content::End(Box::new(end.clone())) });
        // Behind the end, for which a coordinator may wait. Without a summary the intervals are read.
        match std::mem::take(&mut self.totals).encode(&self.run, self.slot, end) {
            Ok(parts) => {
                let parts = parts.into_iter().enumerate();
                parts.for_each(|(part, bytes)| self.outbox.add_summary(part, bytes));
            }
            Err(error) => (self.log)(&format!("the run {} has no summary: {error}", self.run)),
        }
        (self.log)(&format!("the run {} has ended", self.run));
    }

    fn add(&mut self, message: Message) {
        let bytes = match message.encode() {
            Ok(bytes) => bytes,
            Err(error) => {
                self.dropped.fetch_add(1, Ordering::Relaxed);
                return (self.log)(&format!("an interval of the run {} is lost: {error}", self.run));
            }
        };
        if let Content::Interval(counts, parts) = &message.content {
            self.totals.add(counts, parts);
        }
        let written = self.journal.add(&bytes);
        if let Err(error) = &written {
            // The message can still arrive over NATS.
            (self.log)(&format!("cannot write the journal of the run {}: {error}", self.run));
        }
        let is_interval = matches!(message.content, Content::Interval(..));
        if !(is_interval && written.is_ok() && self.outbox.is_full(bytes.len())) {
            self.outbox.add(self.sequence, bytes);
        }
        self.sequence += 1;
    }
}

/// Publishes messages in order, each until NATS acknowledges it.
pub(crate) async fn publish(client: Client, mut queue: Queue, log: fn(&str)) {
    let mut publisher = Publisher { context: jetstream(&client), complained: false, log };
    while let Some(outgoing) = queue.next().await {
        publisher.send(outgoing).await;
    }
}

/// Publishes the messages of a journal again, from a sequence number on. One message is in memory at a time.
pub(crate) async fn publish_again(
    client: Client,
    mut journal: JournalReader,
    (run, slot, from): (String, u32, u64),
) {
    /// Number of messages that are skipped before other requests get their turn.
    const TURN: u64 = 1_000;
    // The requests are in the log, and there may be many.
    let mut publisher = Publisher { context: jetstream(&client), complained: false, log: |_| () };
    for number in 0..from {
        if !journal.pass() {
            return;
        }
        if number % TURN == TURN - 1 {
            tokio::task::yield_now().await;
        }
    }
    for (sequence, bytes) in (from..).zip(journal) {
        publisher.send(Outgoing::new(&run, slot, sequence, bytes)).await;
    }
}

struct Publisher {
    context: Context,
    complained: bool,
    log: fn(&str),
}

impl Publisher {
    async fn send(&mut self, Outgoing { subject, id, bytes }: Outgoing) {
        let Publisher { context, complained, log } = self;
        let bytes = Bytes::from(bytes);
        loop {
            let mut headers = HeaderMap::new();
            headers.insert(NATS_MESSAGE_ID, id.as_str());
            let sent = async {
                let ack = context.publish_with_headers(subject.clone(), headers, bytes.clone()).await?;
                ack.await
            };
            match sent.await {
                Ok(_) => break,
                // It would be refused each time.
                Err(error) if error.kind() == PublishErrorKind::MaxPayloadExceeded => {
                    log(&format!("a message is larger than NATS accepts: {error}"));
                    break;
                }
                Err(error) => {
                    if !std::mem::replace(complained, true) {
                        log(&format!("cannot publish to NATS, trying again: {error}"));
                    }
                }
            }
            tokio::time::sleep(AGAIN).await;
            // A server that lost its storage has lost the stream too.
            let _ = require_stream(context).await;
        }
        if std::mem::take(complained) {
            log("NATS accepts messages again");
        }
    }
}

/// Number of journals that an agent keeps. The oldest is removed first.
const MAX_JOURNALS: usize = 32;

const SUFFIX: &str = "journal";

/// A journal that grows during a run: each message after its length in 4 bytes, little-endian.
/// One without a message is removed on drop: its run has not started, and the next start writes it.
pub(crate) struct Journal {
    file: File,
    path: PathBuf,
    is_empty: bool,
}

impl Journal {
    /// Creates the journal of a worker in `directory`, and removes the oldest journals there.
    pub(crate) fn create(directory: &Path, run: &str, slot: u32) -> io::Result<Journal> {
        fs::create_dir_all(directory)?;
        forget_oldest(directory)?;
        let path = path(directory, run, slot);
        let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok(Journal { file, path, is_empty: true })
    }

    pub(crate) fn add(&mut self, message: &[u8]) -> io::Result<()> {
        let mut bytes = (message.len() as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(message);
        self.is_empty = false;
        // One write, so that a crash truncates at most the last message.
        self.file.write_all(&bytes)
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if self.is_empty {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Reads a journal message by message: it can have hundreds of megabytes.
pub(crate) struct JournalReader(BufReader<File>);

impl JournalReader {
    pub(crate) fn open(directory: &Path, run: &str, slot: u32) -> io::Result<JournalReader> {
        Ok(JournalReader(BufReader::new(File::open(path(directory, run, slot))?)))
    }

    /// Returns the length of the next message; `None` at the end.
    fn length(&mut self) -> Option<usize> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).ok()?;
        Some(u32::from_le_bytes(length) as usize).filter(|length| *length <= MAX_MESSAGE_BYTES)
    }

    /// Skips a message. Returns whether there was one.
    fn pass(&mut self) -> bool {
        let length = self.length();
        length.is_some_and(|length| self.0.seek_relative(length as i64).is_ok())
    }
}

impl Iterator for JournalReader {
    type Item = Vec<u8>;

    /// Returns the next complete message.
    fn next(&mut self) -> Option<Vec<u8>> {
        let mut message = vec![0; self.length()?];
        self.0.read_exact(&mut message).ok()?;
        Some(message)
    }
}

/// The name of a run is a token, so the path stays in the directory.
fn path(directory: &Path, run: &str, slot: u32) -> PathBuf {
    directory.join(format!("{run}-{slot}.{SUFFIX}"))
}

fn forget_oldest(directory: &Path) -> io::Result<()> {
    let mut journals = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.path().extension().is_some_and(|extension| extension == SUFFIX) {
            journals.push((entry.metadata()?.modified()?, entry.path()));
        }
    }
    journals.sort();
    let surplus = (journals.len() + 1).saturating_sub(MAX_JOURNALS);
    journals.iter().take(surplus).try_for_each(|(_, path)| fs::remove_file(path))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::interval::Counts;

    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Directory {
            let path = std::env::temp_dir().join(format!("fourtuple-journal-{name}-{}", std::process::id()));
            // A killed process with the same ID may have left it.
            let _ = fs::remove_dir_all(&path);
            Directory(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_journal_is_read_up_to_its_last_whole_message() {
        let directory = Directory::new("read");
        let mut journal = Journal::create(&directory.0, "r", 3).unwrap();
        journal.add(b"one").unwrap();
        journal.add(b"").unwrap();
        journal.add(b"three").unwrap();
        let open = |slot| JournalReader::open(&directory.0, "r", slot);
        let messages: Vec<_> = open(3).unwrap().collect();
        assert_eq!(messages, [b"one".to_vec(), b"".to_vec(), b"three".to_vec()]);
        let mut reader = open(3).unwrap();
        assert!(reader.pass() && reader.pass());
        assert_eq!((reader.next(), reader.pass()), (Some(b"three".to_vec()), false));
        let path = path(&directory.0, "r", 3);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert_eq!(open(3).unwrap().count(), 2);
        assert!(open(4).is_err());
        assert!(Journal::create(&directory.0, "r", 3).is_err(), "a run has one journal per slot");
        // The threads of its run could not be created.
        drop(Journal::create(&directory.0, "r", 5).unwrap());
        assert!(Journal::create(&directory.0, "r", 5).is_ok());
    }

    /// NATS accepts nothing: nothing takes messages from the queue.
    #[test]
    fn unsent_intervals_are_bounded_and_in_the_journal() {
        let directory = Directory::new("unsent");
        let (outbox, mut queue) = Outbox::new("r", 0);
        let unsent = Arc::clone(&outbox.unsent);
        let mut recorder = Recorder {
            run: "r".to_owned(),
            slot: 0,
            journal: Journal::create(&directory.0, "r", 0).unwrap(),
            outbox,
            sequence: 0,
            totals: Totals::default(),
            ports_left: Arc::default(),
            dropped: Arc::default(),
            log: |line| panic!("{line}"),
        };
        let mut add = |content| {
            let sequence = recorder.sequence;
            recorder.add(Message { run: "r".to_owned(), slot: 0, sequence, content });
        };
        let interval = |second| Content::Interval(Counts { second, ..Counts::default() }, Box::default());
        let end = WorkerEnd { record: None, failed: None, start_error_ns: 0, intervals: 0, dropped: 0 };
        let mut sent = || -> Vec<String> {
            std::iter::from_fn(|| queue.next().now_or_never().flatten()).map(|outgoing| outgoing.id).collect()
        };
        add(interval(0));
        let length = unsent.load(Ordering::Relaxed);
        assert_eq!((sent(), unsent.load(Ordering::Relaxed)), (vec!["r.0.0".to_owned()], 0));
        // Space for two more.
        unsent.store(MAX_UNSENT - 2 * length, Ordering::Relaxed);
        (1..6).for_each(|second| add(interval(second)));
        add(Content::End(Box::new(end)));
        assert_eq!(sent(), ["r.0.1", "r.0.2", "r.0.6"], "the end is sent");
        // NATS has accepted messages.
        add(interval(7));
        assert_eq!(sent(), ["r.0.7"]);
        assert_eq!(JournalReader::open(&directory.0, "r", 0).unwrap().count(), 8);
    }

    #[test]
    fn the_oldest_journals_are_removed() {
        let directory = Directory::new("oldest");
        for number in 0..MAX_JOURNALS + 3 {
            Journal::create(&directory.0, &format!("r{number}"), 0).unwrap().add(b"one").unwrap();
        }
        assert_eq!(fs::read_dir(&directory.0).unwrap().count(), MAX_JOURNALS);
    }
}
