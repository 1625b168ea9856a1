//! The summary of a worker: its whole run in one or a few messages, so that `fleet collect` need not read its intervals.
//!
//! A message is one line of JSON (the header), the histograms of the whole run, and its seconds as variable-length integers. Each
//! second has its counts and percentiles, and its total times in coarse buckets ([`BITS`]), from which the percentiles of a second
//! of all workers follow.

use std::collections::BTreeMap;

use fourtuple_record::Second;
use fourtuple_record::measure::LogLinear;
use serde::{Deserialize, Serialize};

use crate::interval::{
    Counts, MAX_MESSAGE_BYTES, MAX_SECOND, MessageError, Parts, SECOND_NS, WorkerEnd, add_errors, are_names,
};

/// The total times of a second are kept in 2^`BITS` buckets per octave: percentiles of a second of all workers are at most 0.8% off.
pub const BITS: u32 = 6;

/// Bytes of seconds in one message. The rest of [`MAX_MESSAGE_BYTES`] is for histograms and the record of the worker.
const MAX_SECONDS: usize = 400 << 10;

/// Buckets with up to this many samples need no integer of their own.
const SMALL: u64 = 7;

/// The sum of the intervals that a worker has recorded.
#[derive(Clone, Default)]
pub struct Totals {
    parts: Parts,
    errors: BTreeMap<String, u64>,
    /// Encoded seconds, by message.
    seconds: Vec<Vec<u8>>,
    /// The second after the last one.
    next: u64,
}

/// The summary of a worker.
#[derive(Debug)]
pub struct Summary {
    pub run: String,
    /// The slot of the worker, from 0.
    pub slot: u32,
    /// The end of its run.
    pub end: Box<WorkerEnd>,
    /// Failures by name.
    pub errors: BTreeMap<String, u64>,
    /// The latencies of the whole run.
    pub parts: Box<Parts>,
    /// The seconds, in order.
    pub(crate) seconds: Vec<SummarySecond>,
    /// The buckets of all seconds.
    pub(crate) buckets: Vec<(u16, u32)>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SummarySecond {
    /// Number of the second since the start of the run.
    pub(crate) number: u64,
    /// The counts and percentiles of the worker.
    pub(crate) second: Second,
    /// Sum of the total times.
    pub(crate) sum_ns: u64,
    /// Number of buckets, which follow the buckets of the second before.
    pub(crate) buckets: usize,
}

#[derive(Serialize, Deserialize)]
struct Header {
    run: String,
    slot: u32,
    /// Number of this message, from 0, and of all messages of the summary.
    part: u32,
    parts: u32,
    /// In the last message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    whole: Option<Whole>,
}

#[derive(Serialize, Deserialize)]
struct Whole {
    end: Box<WorkerEnd>,
    errors: BTreeMap<String, u64>,
    /// Lengths of the histograms in bytes.
    histograms: Vec<usize>,
}

impl Totals {
    /// Adds an interval. Intervals come in order.
    pub fn add(&mut self, counts: &Counts, parts: &Parts) {
        self.parts.merge(parts);
        add_errors(&mut self.errors, &counts.errors);
        if self.seconds.last().is_none_or(|bytes| bytes.len() > MAX_SECONDS) {
            self.seconds.push(Vec::new());
            // Each message can be read by itself.
            self.next = 0;
        }
        let bytes = self.seconds.last_mut().expect("one was added");
        let second = counts.second(&parts.total);
        let coarse = parts.total.to_log_linear(BITS);
        for number in [
            counts.second - self.next,
            second.operations,
            second.connections,
            second.errors,
            second.p50_ns,
            second.p99_ns,
            second.max_ns,
            second.ports_left.map_or(0, |left| left.saturating_add(1)),
            coarse.sum_ns(),
            coarse.buckets().count() as u64,
        ] {
            write(bytes, number);
        }
        let mut after = 0;
        for (bucket, number) in coarse.buckets() {
            let gap = ((bucket - after) as u64) << 3;
            match number {
                ..=SMALL => write(bytes, gap | number),
                _ => {
                    write(bytes, gap);
                    write(bytes, number);
                }
            }
            after = bucket + 1;
        }
        self.next = counts.second + 1;
    }

    /// Returns the messages of the summary of a worker.
    ///
    /// # Errors
    ///
    /// [`MessageError::TooLarge`]
    pub fn encode(mut self, run: &str, slot: u32, end: WorkerEnd) -> Result<Vec<Vec<u8>>, MessageError> {
        if self.seconds.is_empty() {
            self.seconds.push(Vec::new());
        }
        let parts = self.seconds.len() as u32;
        let histograms = self.parts.to_bytes();
        let mut whole = Some(Whole {
            end: Box::new(end),
            errors: self.errors,
            histograms: histograms.iter().map(Vec::len).collect(),
        });
        let message = |(part, seconds): (usize, Vec<u8>)| {
            let part = part as u32;
            let is_last = part + 1 == parts;
            let whole = whole.take_if(|_| is_last);
            let header = Header { run: run.to_owned(), slot, part, parts, whole };
            let mut bytes = serde_json::to_vec(&header).expect("a header has string keys");
            bytes.push(b'\n');
            if is_last {
                histograms.iter().for_each(|histogram| bytes.extend_from_slice(histogram));
            }
            bytes.extend(seconds);
            if bytes.len() > MAX_MESSAGE_BYTES { Err(MessageError::TooLarge(bytes.len())) } else { Ok(bytes) }
        };
        self.seconds.into_iter().enumerate().map(message).collect()
    }
}

impl Summary {
    /// Reads the messages of one worker, in any order. `None`: some are missing.
    ///
    /// # Errors
    ///
    /// [`MessageError`]
    pub fn decode(messages: &[impl AsRef<[u8]>]) -> Result<Option<Summary>, MessageError> {
        let mut all = BTreeMap::new();
        for bytes in messages {
            let bytes = bytes.as_ref();
            if bytes.len() > MAX_MESSAGE_BYTES {
                return Err(MessageError::TooLarge(bytes.len()));
            }
            let end = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
            let header: Header = serde_json::from_slice(&bytes[..end])
                .map_err(|error| MessageError::Header(error.to_string()))?;
            all.insert(header.part, (header, bytes.get(end + 1..).unwrap_or_default()));
        }
        let Some((_, (header, mut rest))) = all.pop_last() else { return Ok(None) };
        let parts = u64::from(header.parts);
        if all.len() as u64 + 1 < parts {
            return Ok(None);
        }
        let wrong = |why: &str| MessageError::Header(why.to_owned());
        let whole = header.whole.ok_or_else(|| wrong("expected the end of a worker"))?;
        if !whole.end.is_possible() || !are_names(&whole.errors) {
            return Err(MessageError::Range);
        }
        let histograms = Box::new(Parts::from_bytes(&whole.histograms, &mut rest)?);
        let mut summary = Summary {
            run: header.run,
            slot: header.slot,
            end: whole.end,
            errors: whole.errors,
            parts: histograms,
            seconds: Vec::new(),
            buckets: Vec::new(),
        };
        for (part, (header, bytes)) in &all {
            if header.run != summary.run || header.slot != summary.slot || u64::from(*part) + 1 >= parts {
                return Err(wrong("the messages are of different workers"));
            }
            summary.read_seconds(bytes)?;
        }
        summary.read_seconds(rest)?;
        Ok(Some(summary))
    }

    fn read_seconds(&mut self, mut bytes: &[u8]) -> Result<(), MessageError> {
        let most = LogLinear::bucket_of(BITS, u64::MAX);
        let mut after = 0_u64;
        while !bytes.is_empty() {
            let mut fields = [0; 10];
            for field in &mut fields {
                *field = read(&mut bytes)?;
            }
            let [gap, operations, connections, errors, p50_ns, p99_ns, max_ns, left, sum_ns, buckets] =
                fields;
            let number = after.checked_add(gap).filter(|number| *number <= MAX_SECOND);
            let number = number.ok_or(MessageError::Range)?;
            if self.seconds.last().is_some_and(|last| number <= last.number) {
                return Err(MessageError::Histograms);
            }
            after = number + 1;
            let second = Second {
                at_ns: number * SECOND_NS,
                operations,
                connections,
                errors,
                p50_ns,
                p99_ns,
                max_ns,
                ports_left: left.checked_sub(1),
            };
            let mut next = 0;
            for _ in 0..buckets {
                let word = read(&mut bytes)?;
                let count = match word & SMALL {
                    0 => read(&mut bytes)?,
                    small => small,
                };
                let bucket = (word >> 3) as usize + next;
                let count = u32::try_from(count).map_err(|_| MessageError::Histograms)?;
                if bucket > most {
                    return Err(MessageError::Histograms);
                }
                self.buckets.push((bucket as u16, count));
                next = bucket + 1;
            }
            self.seconds.push(SummarySecond { number, second, sum_ns, buckets: buckets as usize });
        }
        Ok(())
    }
}

/// Writes an integer in groups of 7 bits, the lowest first (LEB128).
fn write(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn read(bytes: &mut &[u8]) -> Result<u64, MessageError> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first().ok_or(MessageError::Histograms)?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if *byte < 0x80 {
            return Ok(number);
        }
    }
    Err(MessageError::Histograms)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::interval::{Content, Message};

    pub(crate) fn end(intervals: u64) -> WorkerEnd {
        WorkerEnd { record: None, failed: None, start_error_ns: 5, intervals, dropped: 0 }
    }

    /// Returns the messages of the summary of these intervals.
    pub(crate) fn encoded<'a>(messages: impl IntoIterator<Item = &'a Message>, slot: u32) -> Vec<Vec<u8>> {
        let mut totals = Totals::default();
        let mut intervals = 0;
        for message in messages {
            let Content::Interval(counts, parts) = &message.content else { panic!() };
            totals.add(counts, parts);
            intervals += 1;
        }
        totals.encode("r", slot, end(intervals)).unwrap()
    }

    fn message(second: u64, totals: &[u64]) -> Message {
        crate::interval::tests::message(3, second, totals)
    }

    #[test]
    fn a_summary_survives_the_wire() {
        let sent = [message(0, &[100, 2_000, 3_000_000]), message(2, &[]), message(5, &[70_000; 300])];
        let bytes = encoded(&sent, 3);
        assert_eq!(bytes.len(), 1);
        let back = Summary::decode(&bytes).unwrap().unwrap();
        assert_eq!((back.run.as_str(), back.slot, *back.end), ("r", 3, end(3)));
        assert_eq!(back.parts.total.count(), 303);
        assert_eq!(back.seconds.iter().map(|second| second.number).collect::<Vec<_>>(), [0, 2, 5]);
        let mut rest = back.buckets.as_slice();
        for (sent, second) in sent.iter().zip(&back.seconds) {
            let Content::Interval(counts, parts) = &sent.content else { panic!() };
            assert_eq!(second.second, counts.second(&parts.total));
            let (buckets, after) = rest.split_at(second.buckets);
            rest = after;
            let mut coarse = LogLinear::new(BITS, Vec::new(), 0, 0);
            let buckets = buckets.iter().map(|(bucket, count)| (usize::from(*bucket), u64::from(*count)));
            coarse.add_counted(buckets, second.sum_ns, second.second.max_ns);
            assert_eq!(coarse, parts.total.to_log_linear(BITS));
        }
    }

    #[test]
    fn a_long_run_has_several_messages() {
        // Times in many buckets, so that a second has hundreds of bytes.
        let totals: Vec<u64> = (0..2_000_u64).map(|step| 1_000 + step * step * 50).collect();
        let sent: Vec<Message> = (0..800).map(|second| message(second, &totals)).collect();
        let mut bytes = encoded(&sent, 0);
        assert!(
            bytes.len() > 1 && bytes.iter().all(|part| part.len() <= MAX_MESSAGE_BYTES),
            "{}",
            bytes.len()
        );
        assert!(Summary::decode(&bytes[1..]).unwrap().is_none());
        assert!(Summary::decode(&bytes[..1]).unwrap().is_none());
        bytes.reverse();
        let back = Summary::decode(&bytes).unwrap().unwrap();
        let numbers: Vec<u64> = back.seconds.iter().map(|second| second.number).collect();
        assert_eq!(numbers, (0..800).collect::<Vec<_>>());
        assert_eq!(back.parts.total.count(), 800 * 2_000);
    }

    #[test]
    fn damaged_summaries_are_refused() {
        let bytes = encoded(&[message(0, &[1, 2, 3]), message(1, &[5_000_000; 9])], 0).remove(0);
        for length in 0..bytes.len() {
            // Cut behind a second, it is a summary of fewer seconds.
            if let Ok(Some(summary)) = Summary::decode(&[&bytes[..length]]) {
                assert!(summary.seconds.len() < 2, "{length}");
            }
        }
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..5_000 {
            let mut damaged = bytes.clone();
            let at = random.usize(..damaged.len());
            damaged[at] = random.u8(..);
            let _ = Summary::decode(&[damaged]);
        }
        assert!(matches!(
            Summary::decode(&[vec![b' '; MAX_MESSAGE_BYTES + 1]]),
            Err(MessageError::TooLarge(_))
        ));
    }
}
