use std::collections::BTreeMap;
use std::time::Instant;

use fourtuple_measure::Histogram;

/// The counts and latencies of one complete second of a run, of all threads. The sum of all intervals is the run.
#[derive(Clone, Debug)]
pub struct Interval {
    /// Number of the second since the start of the run, from 0. The last one ends with the run.
    pub second: u64,
    /// Operations that ended in this second.
    pub operations: u64,
    /// Connections established.
    pub connections: u64,
    /// Failures by name, as in the record.
    pub errors: BTreeMap<String, u64>,
    /// Operations in progress at the end of the second.
    pub in_flight: u64,
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

/// Receives the intervals of a run, in order. A generating thread calls it, so it must not wait.
pub type IntervalSink = Box<dyn FnMut(Interval) + Send>;

/// The part of a run that a coordinator of several runs determines.
pub struct Coordination {
    /// The start of the run. The threads prepare their engines before and wait.
    pub start: Instant,
    /// Receives each complete second.
    pub intervals: IntervalSink,
}
