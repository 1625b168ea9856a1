use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{FixPortsResults, Record};

/// The record of `fourtuple run`.
pub type RunRecord = Record<RunSettings, RunResults>;

/// The settings of `run`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunSettings {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// The requested way: `cgroup`, `supervise` or `preload`; `bound`: the first that covers sockets which the program binds; `null`: the
    /// first that fits.
    pub via: Option<String>,
}

/// The results of `run`. `connects` is the sum of `changed` and `left`, for the way `cgroup` with `fallbacks` of `ports`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunResults {
    /// The way: `cgroup`, `supervise` or `preload`.
    pub way: String,
    /// The ways that were tried before and did not fit, with the reason.
    pub passed_over: BTreeMap<String, String>,
    /// Time from the start to the end of the program.
    pub elapsed_ns: u64,
    /// Exit code of the program; `null`: a signal ended it.
    pub exit_code: Option<u8>,
    /// The signal that ended the program; `null`: none.
    pub signal: Option<u8>,
    /// Calls of connect() for IP sockets that the way has seen.
    pub connects: u64,
    /// Connects for which the kernel searched the whole range port by port; for the way `cgroup`, connects whose port was drawn.
    pub changed: u64,
    /// Connects that proceeded unchanged, by reason. `own-range`: IP_LOCAL_PORT_RANGE of the program. `udp`, `protocol` (neither TCP
    /// nor UDP), `no-permission`: the supervisor may not duplicate the socket. For the way `cgroup`: the reasons of `fix ports`.
    pub left: BTreeMap<String, u64>,
    /// Connects of sockets whose bind() to port 0 left the choice of the port to connect(); `null` for the way `cgroup`.
    pub bound: Option<u64>,
    /// Ports of such sockets that were chosen before connect(), because the program asked for them; `null` for the way `cgroup`.
    pub named: Option<u64>,
    /// Time in connect() of the connects in `changed`; `null`: the way does not see the end of a call.
    pub connect_ns: Option<u64>,
    /// Connects in `changed` with an even source port; `null`: the way does not see the end of a call.
    pub even: Option<u64>,
    /// Connects in `changed` with an odd source port; `null`: the way does not see the end of a call.
    pub odd: Option<u64>,
    /// Connects that failed with EADDRNOTAVAIL; `null`: the way does not see the end of a call.
    pub unavailable: Option<u64>,
    /// Connects in `bound` during quarters of a second at whose end bind() to port 0 failed with EADDRINUSE, so that these programs
    /// could not have connected; `null` for the way `cgroup`.
    pub avoided: Option<u64>,
    /// Calls of connect(), bind() and getsockname() that the supervisor answered; `null` for other ways.
    pub calls: Option<u64>,
    /// Time from the receipt of a call by the supervisor to its answer, in total; `null` for other ways.
    pub held_ns: Option<u64>,
    /// Results of `fix ports`; `null` for other ways than `cgroup`.
    pub ports: Option<FixPortsResults>,
}
