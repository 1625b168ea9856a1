//! System calls on sockets that fail: the account that `doctor`, `top`, `export` and the traces show.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use fourtuple_bpf::FailedCalls;
use fourtuple_bpf::failed_calls::{Failed, Failure, Progress};
use fourtuple_bpf::filter::TaskFilter;
use fourtuple_record::snapshot::{FailedCall, Failures, Owner};
use fourtuple_syscalls::Errno;

use crate::trace::ended::{self, is_alive};
use crate::trace::error::TraceError;

/// Maximum number of rows in a record.
const MAX_ROWS: usize = 100;

/// A running count of failed calls.
#[derive(Debug)]
pub(crate) struct FailedSession {
    calls: FailedCalls,
    /// The counts at the end of the previous window.
    earlier: HashMap<Failure, u64>,
    lost: u64,
}

/// Failed calls of a time window.
#[derive(Debug)]
pub(crate) struct Counted {
    pub(crate) failed: Vec<Failed>,
    /// Calls that were not counted because the table was full.
    pub(crate) lost: u64,
}

impl FailedSession {
    pub(crate) fn attach(filter: &TaskFilter) -> Result<FailedSession, TraceError> {
        let calls = FailedCalls::attach(filter).map_err(TraceError::Failed)?;
        Ok(FailedSession { calls, earlier: HashMap::new(), lost: 0 })
    }

    /// Returns the failures since the previous window.
    pub(crate) fn window(&mut self) -> Result<Counted, TraceError> {
        let lost = self.calls.lost().map_err(TraceError::Failed)?;
        let lost_before = std::mem::replace(&mut self.lost, lost);
        let all = self.calls.failures().map_err(TraceError::Failed)?;
        let earlier = std::mem::take(&mut self.earlier);
        self.earlier = all.iter().map(|failed| (failed.failure, failed.calls)).collect();
        let since = all.into_iter().map(|failed| {
            let before = earlier.get(&failed.failure).copied().unwrap_or(0);
            Failed { calls: failed.calls - before, ..failed }
        });
        let failed = since.filter(|failed| failed.calls > 0).collect();
        Ok(Counted { failed, lost: lost - lost_before })
    }

    /// Detaches the programs and returns the failures since the previous window whose address matches; without an address and a port to
    /// match, all of them.
    pub(crate) fn end(&mut self, ip: Option<IpAddr>, port: Option<u16>) -> Result<Counted, TraceError> {
        self.calls.detach();
        let mut counted = self.window()?;
        counted.failed.retain(|failed| {
            let address = failed.failure.address();
            ip.is_none_or(|ip| address.is_some_and(|address| address.ip() == ip))
                && port.is_none_or(|port| address.is_some_and(|address| address.port() == port))
        });
        Ok(counted)
    }
}

/// Returns the rows of a record, most calls first, the number of `lost` calls and of those that are not listed, and the processes whose
/// calls are missing. Many processes of one name that have ended are one row.
pub(crate) fn account<'a>(
    failed: impl Iterator<Item = &'a Failed>,
    lost: u64,
    processes_32_bit: Vec<Owner>,
) -> Failures {
    let rows = rows(failed, is_alive);
    Failures { processes_32_bit, left_out: rows.left_out + lost, ..rows }
}

fn rows<'a>(failed: impl Iterator<Item = &'a Failed>, is_alive: impl Fn(u32) -> bool) -> Failures {
    // Failures that differ in what a row does not have, such as the state of the socket.
    let mut rows: BTreeMap<(String, u32), FailedCall> = BTreeMap::new();
    for failed in failed {
        let call = row(failed);
        let process = failed.failure.process;
        let FailedCall { call: name, errno, protocol, address, before_search, namespace, .. } = &call;
        let kind =
            format!("{name} {errno} {protocol} {address:?} {before_search} {namespace} {}", call.owner.name);
        let known = rows.entry((kind, process)).or_insert_with(|| FailedCall { failed: 0, ..call });
        known.failed += failed.calls;
        known.range = known.range.filter(|range| Some(*range) == failed.range);
    }
    let calls: Vec<((String, u32), FailedCall)> = rows.into_iter().collect();
    let rows =
        ended::rows(&calls, |((kind, _), _)| Some(kind.clone()), |((_, process), _)| *process, is_alive);
    let sum = |row: ended::Row| {
        let of_row: Vec<&FailedCall> = row.items.iter().map(|&index| &calls[index].1).collect();
        FailedCall::sum(&of_row)
    };
    let mut merged: Vec<FailedCall> = rows.into_iter().map(sum).collect();
    merged.sort_by(|a, b| {
        (Reverse(a.failed), &a.owner.name, a.owner.pid).cmp(&(Reverse(b.failed), &b.owner.name, b.owner.pid))
    });
    let further = merged.split_off(merged.len().min(MAX_ROWS));
    let mut further = of_many_addresses(&further);
    let left_out = further.iter().skip(MAX_ROWS).map(|call| call.failed).sum();
    further.truncate(MAX_ROWS);
    merged.append(&mut further);
    for call in &mut merged {
        call.owner.sockets = u32::try_from(call.failed).unwrap_or(u32::MAX);
    }
    Failures { calls: merged, left_out, ..Failures::default() }
}

/// Joins the rows of one call, errno and name that differ in process and address. Addresses of two families stay apart: a program that tries
/// one family after the other may need only one of them.
fn of_many_addresses(rows: &[FailedCall]) -> Vec<FailedCall> {
    let mut joined: BTreeMap<String, Vec<&FailedCall>> = BTreeMap::new();
    for row in rows {
        let FailedCall { call, errno, protocol, address, before_search, namespace, owner, .. } = row;
        let is_ipv6 = address.as_ref().is_some_and(|address| address.starts_with('['));
        let kind = format!("{call} {errno} {protocol} {is_ipv6} {before_search} {namespace} {}", owner.name);
        joined.entry(kind).or_default().push(row);
    }
    let mut rows: Vec<FailedCall> = joined.values().map(|rows| FailedCall::sum(rows)).collect();
    rows.sort_by_key(|row| Reverse(row.failed));
    rows
}

fn row(failed: &Failed) -> FailedCall {
    let failure = &failed.failure;
    let address = failure.address().map(|address| address.to_string());
    FailedCall {
        call: failure.call().to_owned(),
        errno: errno(failure).to_string(),
        protocol: failure.protocol().to_owned(),
        owner: Owner { pid: failure.process, name: failed.name.clone(), sockets: 0 },
        processes: 1,
        address: address.or_else(|| failure.path()),
        addresses: 1,
        before_search: failure.call() == "connect"
            && failure.protocol() == "tcp"
            && failure.progress() == Progress::BeforeSyn,
        failed: failed.calls,
        namespace: failure.namespace,
        range: failed.range,
        route: None,
        holder: None,
        running_ns: None,
        causes: Vec::new(),
    }
}

fn errno(failure: &Failure) -> Errno {
    Errno::new(i32::from(failure.errno))
}

/// Corrects the failed attempts of a trace of TCP, by errno, which count sockets that were in SYN_SENT: adds calls that failed
/// before, and gives attempts whose errno the program has read before it closed the socket this errno.
pub(crate) fn correct(by_errno: &mut BTreeMap<String, u64>, failed: &[Failed]) {
    let is_connect =
        |failed: &&Failed| failed.failure.call() == "connect" && failed.failure.protocol() == "tcp";
    for failed in failed.iter().filter(is_connect) {
        let name = errno(&failed.failure).to_string();
        match failed.failure.progress() {
            Progress::AfterSyn => {}
            Progress::BeforeSyn => *by_errno.entry(name).or_default() += failed.calls,
            Progress::InSynSent => {
                // A socket that is still open has not been counted as closed.
                let closed = by_errno.get("closed").copied().unwrap_or(0);
                let moved = closed.min(failed.calls);
                by_errno.insert("closed".to_owned(), closed - moved);
                *by_errno.entry(name).or_default() += failed.calls;
            }
        }
    }
    by_errno.retain(|_, number| *number > 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_for_further_addresses_are_a_row_of_each_family() {
        let row = |pid, address: String| FailedCall {
            owner: Owner { pid, name: "crawler".to_owned(), sockets: 0 },
            address: Some(address),
            processes: 1,
            failed: 2,
            ..FailedCall::default()
        };
        let of = |number| (1..=number).map(|host| row(7 + host % 2, format!("10.0.0.{host}:80")));
        let rows = of(9).chain(of(1)).chain([row(7, "[2001:db8::1]:80".to_owned())]);
        let joined = of_many_addresses(&rows.collect::<Vec<_>>());
        let found = joined.iter().map(|row| (row.addresses, row.processes, row.failed)).collect::<Vec<_>>();
        assert_eq!(found, [(9, 2, 20), (1, 1, 2)]);
        assert_eq!(joined[0].address.as_deref(), Some("10.0.0.1:80"));
    }
}
