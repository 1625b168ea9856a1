//! The break-even point of `Recycle::Measured`: one more run, in which workers may close connections and clients never do.

use fourtuple::listen::Recycle;
use fourtuple_measure::words::counted;
use fourtuple_record::{BreakEven, Remark, format_duration};

use crate::keepalive::{Keepalive, client_ports};
use crate::namespace::Namespace;
use crate::pool::address::ListenAddress;
use crate::pool::client::nanos;
use crate::pool::matrix::Pair;
use crate::pool::words::in_rust;
use crate::pool::workers::Pool;
use crate::{LabError, Watch};

/// Minimum number of requests for a decision.
const MIN_REQUESTS: u64 = 200;

/// Runs the measurement. A failure becomes a remark, so that earlier results are kept.
pub(super) fn measure(
    keepalive: &Keepalive,
    pair: Pair,
    watch: &Watch<'_>,
) -> (Option<BreakEven>, Option<Remark>) {
    let title = format!("{} {} break-even", pair.policy, pair.family);
    watch.progress.begin(&title, keepalive.length.as_millis() as u64);
    match run(keepalive, pair, watch) {
        Ok(Some(found)) => (Some(found), None),
        Ok(None) => {
            let message = format!("interrupted at {title}: whether closing pays is not known");
            (None, Some(Remark::new("interrupted", message)))
        }
        Err(error) => (None, Some(Remark::new("failed", format!("{title} failed: {error}")))),
    }
}

/// Returns `None` if the run was stopped early.
fn run(keepalive: &Keepalive, pair: Pair, watch: &Watch<'_>) -> Result<Option<BreakEven>, LabError> {
    Namespace::run(|namespace| {
        namespace.set_range(client_ports())?;
        let room = ListenAddress::new(pair.family)?;
        let workers = keepalive.workers as usize;
        let pool = Pool::start(&room.endpoint, pair.policy, workers, keepalive.spend, Recycle::Measured)?;
        let group = pool.group().clone();
        let measured = keepalive.client_load(0, 0).run(pool, watch)?;
        Ok(group.break_even().filter(|_| !measured.cut).map(|found| BreakEven {
            fresh_connection_ns: nanos(found.fresh_connection),
            misplaced_wait_ns: nanos(found.misplaced_wait),
            requests: found.samples,
            closes: found.closes,
        }))
    })
}

/// Returns the break-even point in words, and the setting that follows from it.
pub(super) fn advice(pair: Pair, found: &BreakEven) -> String {
    let time = |ns| format_duration(ns);
    let Pair { policy, family } = pair;
    format!(
        "Break-even of {policy} over {family}: a fresh connection costs {}, and a request on a kept one waits {} for its worker \
         while another is idle (mean of {}): {}.",
        time(found.fresh_connection_ns),
        time(found.misplaced_wait_ns),
        counted(found.requests, "request"),
        match (found.closes, found.requests < MIN_REQUESTS) {
            (true, _) => format!(
                "closing after each request pays. Workers that find this out by themselves: \
                 ListenerGroupBuilder::at(endpoint).policy({}).recycle(Recycle::Measured)",
                in_rust(&policy.to_string())
            ),
            (false, true) => "too few to tell whether closing pays; take a longer --for".to_owned(),
            (false, false) => "keeping connections pays".to_owned(),
        }
    )
}

#[cfg(test)]
mod tests {
    use fourtuple::listen::{AcceptPolicy, Family};

    use super::*;

    #[test]
    fn break_even_advice_contains_its_figures() {
        let pair = Pair { policy: AcceptPolicy::ROTATE, family: Family::Tcp4 };
        let said = |misplaced_wait_ns, requests, closes| {
            let fresh_connection_ns = 12_200;
            advice(pair, &BreakEven { fresh_connection_ns, misplaced_wait_ns, requests, closes })
        };
        let closes = said(1_200_000, 2000, true);
        for part in ["rotate over tcp4", "costs 12.2us", "waits 1.20ms", "mean of 2,000 requests"] {
            assert!(closes.contains(part), "{part:?} in {closes}");
        }
        assert!(closes.ends_with("policy(AcceptPolicy::ROTATE).recycle(Recycle::Measured)."), "{closes}");
        assert!(said(0, 2000, false).ends_with("keeping connections pays."));
        assert!(said(9000, 1, false).contains("mean of 1 request): too few"));
    }
}
