use std::collections::BTreeMap;
use std::time::Duration;

use fourtuple_record::{Remark, Second};

use super::{Need, Preflight};

/// What was seen of a run.
#[derive(Clone, Debug)]
pub struct Seen<'a> {
    /// What the preflight said.
    pub preflight: &'a Preflight,
    /// What was asked.
    pub need: &'a Need,
    /// When the ports were to end, at the latest forecast ([`predict_live`](super::predict_live)) or by the preflight.
    pub predicted_stall: Option<Duration>,
    /// When there was no port.
    pub no_port: Option<NoPort>,
    /// Tuples that the run's connections took.
    pub tuples_used: u64,
    /// Sockets in TIME_WAIT towards the destination when the ports were gone, or at the end; `None`: not read.
    pub time_wait: Option<u64>,
    /// Failures by name, as in the record.
    pub errors: &'a BTreeMap<String, u64>,
    /// Operations done.
    pub operations: u64,
    /// Second by second.
    pub seconds: &'a [Second],
    /// Operations that were under way at the end of each second, beside `seconds`. Empty: not counted.
    pub in_flight: &'a [u64],
    /// From the first intended start to the end of the last operation.
    pub elapsed: Duration,
    /// CPU time of the generating threads together.
    pub client_cpu: Duration,
    /// CPU time of the busiest of them.
    pub busiest_cpu: Duration,
    /// Time in which an operation was due and every connection was busy.
    pub all_busy: Duration,
}

/// The time without a port (EADDRNOTAVAIL of connect(); EAGAIN of a UDP socket).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoPort {
    /// When a connection first found none, since the start of the run.
    pub first: Duration,
    /// When one last found none.
    pub last: Duration,
    /// For how long in all none could be opened.
    pub total: Duration,
}

/// What the run proves less, and what to do about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hindsight {
    /// Why the run is not, or not wholly, to be believed.
    pub remarks: Vec<Remark>,
    /// What it means, in plain words.
    pub advice: Vec<String>,
}

/// Looks back at a run.
pub fn hindsight(seen: &Seen<'_>) -> Hindsight {
    let _ = seen;
    unimplemented!("follows")
}
