//! The messages of a worker during a run: an interval per second, and the end of the run.
//!
//! A message is one line of JSON (the header) and the histograms of the interval, as encoded by
//! [`Histogram::to_bytes`](fourtuple_record::measure::Histogram::to_bytes).

use std::collections::BTreeMap;

use fourtuple_bench::load::{Interval, MAX_TIME};
use fourtuple_record::measure::Histogram;
use fourtuple_record::{LoadRecord, Second};
use serde::{Deserialize, Serialize};

use crate::protocol::MAX_RUN;

/// Maximum size of a message of a worker in bytes: the default max_payload of nats-server.
pub const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// Maximum number of a second, of an interval and of a message, and of their counts: a run ends before.
pub(crate) const MAX_SECOND: u64 = MAX_RUN.as_secs() + MAX_TIME.as_secs();

/// Maximum of the counts of one second.
const MAX_PER_SECOND: u64 = 1 << 40;

/// Maximum number of kinds of failures, and maximum length of the name of one.
const MAX_ERRORS: usize = 64;

pub(crate) const SECOND_NS: u64 = 1_000_000_000;

/// The number of histograms of an interval.
const PARTS: usize = 5;

/// The latencies of an interval, or of a whole run.
#[derive(Clone, Debug)]
pub struct Parts {
    /// Time in connect().
    pub search: Histogram,
    /// Time from connect() until the connection is established.
    pub handshake: Histogram,
    /// Time from the request to the first byte of the response.
    pub first_byte: Histogram,
    /// Time from the intended start to the end.
    pub total: Histogram,
    /// Time from the intended start to the actual start, in an open loop.
    pub late: Histogram,
}

impl Default for Parts {
    fn default() -> Self {
        let new = Histogram::new;
        Parts { search: new(), handshake: new(), first_byte: new(), total: new(), late: new() }
    }
}

impl Parts {
    fn each(&self) -> [&Histogram; PARTS] {
        [&self.search, &self.handshake, &self.first_byte, &self.total, &self.late]
    }

    /// Returns the bytes of each part; an empty one has none.
    pub(crate) fn to_bytes(&self) -> [Vec<u8>; PARTS] {
        self.each().map(|part| if part.count() > 0 { part.to_bytes() } else { Vec::new() })
    }

    /// Reads the parts with these lengths from the beginning of `rest`, and sets `rest` to the remaining bytes.
    pub(crate) fn from_bytes(lengths: &[usize], rest: &mut &[u8]) -> Result<Parts, MessageError> {
        if lengths.len() != PARTS {
            return Err(MessageError::Histograms);
        }
        let mut lengths = lengths.iter();
        let mut next = || {
            let length = lengths.next().copied().unwrap_or(0);
            let (bytes, after) = rest.split_at_checked(length).ok_or(MessageError::Histograms)?;
            *rest = after;
            if bytes.is_empty() {
                return Ok(Histogram::new());
            }
            Histogram::from_bytes(bytes).map_err(|_| MessageError::Histograms)
        };
        // In the order of `each`.
        Ok(Parts { search: next()?, handshake: next()?, first_byte: next()?, total: next()?, late: next()? })
    }

    /// Adds the samples of `other`.
    pub fn merge(&mut self, other: &Parts) {
        let Parts { search, handshake, first_byte, total, late } = self;
        for (mine, theirs) in [search, handshake, first_byte, total, late].into_iter().zip(other.each()) {
            // Most intervals have a part without samples, and to add 34,000 empty buckets takes time too.
            if theirs.count() > 0 {
                mine.merge(theirs);
            }
        }
    }
}

/// The counts of an interval.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Number of the second since the start of the run, from 0.
    pub second: u64,
    /// Operations that ended in this second.
    pub operations: u64,
    pub connections: u64,
    /// Failures by name.
    pub errors: BTreeMap<String, u64>,
    /// Free 4-tuples left; `None` for targets without ports.
    pub ports_left: Option<u64>,
}

/// Returns the sum of numbers, which may come from another host: it saturates.
pub(crate) fn sum(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers.into_iter().fold(0, u64::saturating_add)
}

/// Adds the failures of a worker to a sum.
pub(crate) fn add_errors(to: &mut BTreeMap<String, u64>, errors: &BTreeMap<String, u64>) {
    for (name, count) in errors {
        let all = to.entry(name.clone()).or_default();
        *all = all.saturating_add(*count);
    }
}

/// Returns whether there are few names of failures, and all are short.
pub(crate) fn are_names(errors: &BTreeMap<String, u64>) -> bool {
    errors.len() <= MAX_ERRORS && errors.keys().all(|name| name.len() <= MAX_ERRORS)
}

impl Counts {
    /// Returns whether a worker can have counted this.
    fn is_possible(&self) -> bool {
        let Counts { second, operations, connections, errors, ports_left } = self;
        let counts = [*operations, *connections, ports_left.unwrap_or(0)];
        *second <= MAX_SECOND
            && are_names(errors)
            && counts.into_iter().chain(errors.values().copied()).all(|count| count <= MAX_PER_SECOND)
    }

    /// Returns the second for a record.
    pub fn second(&self, total: &Histogram) -> Second {
        Second {
            at_ns: self.second * SECOND_NS,
            operations: self.operations,
            connections: self.connections,
            errors: sum(self.errors.values().copied()),
            p50_ns: total.quantile(0.5),
            p99_ns: total.quantile(0.99),
            max_ns: total.max(),
            ports_left: self.ports_left,
        }
    }
}

/// The end of the run of one worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerEnd {
    /// The record of the worker, without its seconds and its distribution, which are in its intervals; `None` if it failed.
    pub record: Option<LoadRecord>,
    /// The reason why the run failed, with `record` `None`.
    pub failed: Option<String>,
    /// Delay of the worker behind its start, on its own clock.
    pub start_error_ns: u64,
    /// Number of intervals that the worker recorded.
    pub intervals: u64,
    /// Number of intervals that the worker lost because its disk did not keep up.
    pub dropped: u64,
}

impl WorkerEnd {
    /// Returns whether a worker can have ended so.
    pub(crate) fn is_possible(&self) -> bool {
        [self.intervals, self.dropped].into_iter().all(|count| count <= MAX_SECOND)
            && self.start_error_ns <= MAX_RUN.as_nanos() as u64
            && self.record.as_ref().is_none_or(|record| record.results.elapsed_ns <= MAX_SECOND * SECOND_NS)
    }
}

/// The content of a message.
#[derive(Clone, Debug)]
pub enum Content {
    /// A complete second.
    Interval(Counts, Box<Parts>),
    /// The end of the run.
    End(Box<WorkerEnd>),
}

/// A message of a worker.
#[derive(Clone, Debug)]
pub struct Message {
    pub run: String,
    /// The slot of the worker, from 0.
    pub slot: u32,
    /// Number of the message of this worker, from 0.
    pub sequence: u64,
    pub content: Content,
}

/// The first line of a message.
#[derive(Serialize, Deserialize)]
struct Header {
    run: String,
    slot: u32,
    sequence: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    interval: Option<Counts>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    end: Option<Box<WorkerEnd>>,
    /// Lengths of the histograms in bytes, 0 for an empty one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    parts: Vec<usize>,
}

/// The reason why bytes are not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The message is larger than [`MAX_MESSAGE_BYTES`].
    #[error("a message of {0} bytes is too large: at most {MAX_MESSAGE_BYTES} are accepted")]
    TooLarge(usize),
    /// The header is not JSON of this form.
    #[error("the header of a message is invalid: {0}")]
    Header(String),
    /// A count, a second or a name is out of its range.
    #[error("a number of a message is out of its range")]
    Range,
    /// The histograms do not match the header, or are damaged.
    #[error("the histograms of a message are damaged")]
    Histograms,
}

impl Message {
    /// Creates the message of an interval.
    pub fn interval(
        run: &str,
        slot: u32,
        sequence: u64,
        interval: Interval,
        ports_left: Option<u64>,
    ) -> Message {
        let counts = Counts {
            second: interval.second,
            operations: interval.operations,
            connections: interval.connections,
            errors: interval.errors,
            ports_left,
        };
        let parts = Parts {
            search: interval.search,
            handshake: interval.handshake,
            first_byte: interval.first_byte,
            total: interval.total,
            late: interval.late,
        };
        Message { run: run.to_owned(), slot, sequence, content: Content::Interval(counts, Box::new(parts)) }
    }

    /// Returns the message as bytes.
    ///
    /// # Errors
    ///
    /// [`MessageError::TooLarge`]
    pub fn encode(&self) -> Result<Vec<u8>, MessageError> {
        let Message { run, slot, sequence, content } = self;
        let (interval, end, histograms) = match content {
            Content::End(end) => (None, Some(end.clone()), None),
            Content::Interval(counts, parts) => (Some(counts.clone()), None, Some(parts.to_bytes())),
        };
        let parts = histograms.iter().flatten().map(Vec::len).collect();
        let header = Header { run: run.clone(), slot: *slot, sequence: *sequence, interval, end, parts };
        let mut bytes = serde_json::to_vec(&header).expect("a header has string keys");
        bytes.push(b'\n');
        bytes.extend(histograms.iter().flatten().flatten());
        if bytes.len() > MAX_MESSAGE_BYTES {
            return Err(MessageError::TooLarge(bytes.len()));
        }
        Ok(bytes)
    }

    /// Reads a message.
    ///
    /// # Errors
    ///
    /// [`MessageError`]
    pub fn decode(bytes: &[u8]) -> Result<Message, MessageError> {
        if bytes.len() > MAX_MESSAGE_BYTES {
            return Err(MessageError::TooLarge(bytes.len()));
        }
        let end = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
        let header: Header =
            serde_json::from_slice(&bytes[..end]).map_err(|error| MessageError::Header(error.to_string()))?;
        let mut rest = bytes.get(end + 1..).unwrap_or_default();
        let is_possible = header.interval.as_ref().is_none_or(Counts::is_possible)
            && header.end.as_ref().is_none_or(|end| end.is_possible())
            && header.sequence <= MAX_SECOND;
        if !is_possible {
            return Err(MessageError::Range);
        }
        let content = match (header.interval, header.end) {
            (Some(counts), None) => {
                Content::Interval(counts, Box::new(Parts::from_bytes(&header.parts, &mut rest)?))
            }
            (None, Some(end)) => Content::End(end),
            _ => return Err(MessageError::Header("expected an interval or an end".to_owned())),
        };
        Ok(Message { run: header.run, slot: header.slot, sequence: header.sequence, content })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the message of a second with these total times.
    pub(crate) fn message(slot: u32, second: u64, totals: &[u64]) -> Message {
        let mut parts = Parts::default();
        totals.iter().for_each(|total| parts.total.record(*total));
        let operations = totals.len() as u64;
        let counts = Counts { second, operations, connections: operations, ..Counts::default() };
        let content = Content::Interval(counts, Box::new(parts));
        Message { run: "r".into(), slot, sequence: second, content }
    }

    #[test]
    fn an_interval_survives_the_wire() {
        let mut sent = message(3, 7, &[100, 2_000, 3_000_000]);
        let Content::Interval(counts, parts) = &mut sent.content else { panic!() };
        counts.errors.insert("timeout".into(), 2);
        counts.ports_left = Some(9);
        parts.late.record(5);
        let bytes = sent.encode().unwrap();
        let back = Message::decode(&bytes).unwrap();
        assert_eq!((back.run.as_str(), back.slot, back.sequence), ("r", 3, 7));
        let (Content::Interval(sent, one), Content::Interval(back, two)) = (sent.content, back.content)
        else {
            panic!()
        };
        assert_eq!(sent, back);
        for (one, two) in one.each().into_iter().zip(two.each()) {
            assert_eq!(one.summary(), two.summary());
        }
    }

    #[test]
    fn an_end_survives_the_wire() {
        let end = WorkerEnd {
            record: None,
            failed: Some("no ports".into()),
            start_error_ns: 5,
            intervals: 3,
            dropped: 1,
        };
        let message =
            Message { run: "r".into(), slot: 1, sequence: 4, content: Content::End(Box::new(end.clone())) };
        let Content::End(back) = Message::decode(&message.encode().unwrap()).unwrap().content else {
            panic!()
        };
        assert_eq!(*back, end);
    }

    /// Numbers of another host: each at the end of its type and of its range.
    #[test]
    fn numbers_out_of_range_are_refused() {
        let header = |change: &dyn Fn(&mut serde_json::Value)| {
            let mut header = serde_json::json!({
                "run": "r", "slot": 0, "sequence": 0, "parts": [0, 0, 0, 0, 0],
                "interval": { "second": 0, "operations": 0, "connections": 0, "errors": {}, "ports_left": null },
            });
            change(&mut header);
            Message::decode(header.to_string().as_bytes()).map(drop)
        };
        assert_eq!(header(&|_| ()), Ok(()));
        for field in ["second", "operations", "connections", "ports_left"] {
            for value in [u64::MAX, u64::MAX - 2, 1 << 63, MAX_PER_SECOND + 1] {
                let refused = header(&|header| header["interval"][field] = value.into());
                assert_eq!(refused, Err(MessageError::Range), "{field} {value}");
            }
        }
        assert_eq!(header(&|header| header["sequence"] = u64::MAX.into()), Err(MessageError::Range));
        let errors =
            |errors: serde_json::Value| header(&|header| header["interval"]["errors"] = errors.clone());
        assert_eq!(errors(serde_json::json!({ "timeout": MAX_PER_SECOND })), Ok(()));
        assert_eq!(errors(serde_json::json!({ "timeout": u64::MAX })), Err(MessageError::Range));
        assert_eq!(errors(serde_json::json!({ "x".repeat(65): 1 })), Err(MessageError::Range));
        let many: BTreeMap<String, u64> = (0..65).map(|number| (number.to_string(), 1)).collect();
        assert_eq!(errors(serde_json::json!(many)), Err(MessageError::Range));
        for field in ["start_error_ns", "intervals", "dropped"] {
            let refused = header(&|header| {
                header["interval"] = serde_json::Value::Null;
                header["end"] = serde_json::json!({
                    "record": null, "failed": null, "start_error_ns": 0, "intervals": 0, "dropped": 0
                });
                header["end"][field] = u64::MAX.into();
            });
            assert_eq!(refused, Err(MessageError::Range), "{field}");
        }
    }

    #[test]
    fn damaged_and_oversized_messages_are_refused() {
        let bytes = message(0, 0, &[1, 2, 3]).encode().unwrap();
        for length in [0, 1, 20, bytes.len() / 2, bytes.len() - 9] {
            assert!(Message::decode(&bytes[..length]).is_err(), "{length}");
        }
        assert!(matches!(
            Message::decode(&vec![b' '; MAX_MESSAGE_BYTES + 1]),
            Err(MessageError::TooLarge(_))
        ));
        assert!(matches!(
            Message::decode(b"{\"run\":\"r\",\"slot\":0,\"sequence\":0}"),
            Err(MessageError::Header(_))
        ));
    }
}
