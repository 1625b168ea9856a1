use std::time::Duration;

use fourtuple::dial::Strategy;
use fourtuple::listen::{self, AcceptPolicy};
use fourtuple::ports::PortRange;
use fourtuple_bench::lab::accept::{Accept, Load};
use fourtuple_bench::lab::pool::{Selection, Spend};
use fourtuple_bench::lab::time_wait::{Remedy, TimeWait};
use fourtuple_bench::lab::{LabError, Watch, ports};
use fourtuple_record::{AcceptResults, LabResults, LabSettings, PortsSettings, Remark, Saved};
use time::OffsetDateTime;

use crate::commands::lab::ports::all_strategies;
use crate::commands::lab::with_watch;
use crate::exit::Exit;
use crate::output::{self, Output};

/// Runs `ports`, `time-wait` and `accept` in a short form. `time-wait` shows the begin of the stall and does not wait for its
/// end, 60 s later.
pub(super) fn run(seed: u64, mut output: Output) -> anyhow::Result<Exit> {
    let time_wait = TimeWait {
        range: PortRange::new(49152, 65535).expect("low is below high"),
        remedies: Remedy::ALL.to_vec(),
        patience: Duration::from_millis(1500),
    };
    let started = OffsetDateTime::now_utc();
    let (result, host) = with_watch(&output, |watch, found| {
        let ports = PortsSettings {
            low: PortRange::KERNEL_DEFAULT.low(),
            high: PortRange::KERNEL_DEFAULT.high(),
            strategies: all_strategies(found).iter().map(Strategy::to_string).collect(),
            seed,
            ..PortsSettings::default()
        };
        let accept = short_accept();
        let settings = LabSettings {
            ports: ports.clone(),
            time_wait: time_wait.settings(),
            accept: Some(accept.settings()),
        };
        let (ports, mut remarks) = ports::run(&ports, watch)?;
        let (time_wait, more) = time_wait.run(watch)?;
        remarks.extend(more);
        let (accept, more) = run_accept(&accept, watch);
        remarks.extend(more);
        // One Ctrl-C ends all three labs, each of which remarks on it.
        remarks.dedup_by(|later, first| later.id == "interrupted" && first.id == later.id);
        Ok((settings, LabResults { ports, time_wait, accept }, remarks))
    })?;
    let (settings, results, validity) = result;
    let record = output::record("lab", started, host, settings, validity, results);
    output.html.get_or_insert_with(|| "report.html".into());
    output.finish(&Saved::Lab(record))
}

/// Returns settings that show the uneven distribution of EPOLLEXCLUSIVE and the even one of the rotating policy.
fn short_accept() -> Accept {
    Accept {
        selection: Selection {
            policies: vec![AcceptPolicy::Exclusive, AcceptPolicy::ROTATE],
            policies_named: true,
            families: vec![listen::Family::Unix],
            families_named: true,
        },
        loads: vec![Load::Light],
        workers: 8,
        connections: 48,
        clients: 1,
        work: Duration::from_micros(50),
        spend: Spend::Sleep,
        slow: Duration::from_millis(5),
        length: Duration::from_millis(100),
        repeats: 1,
    }
}

/// Runs the last lab. An error becomes a remark, so that the results of the labs before it are kept.
fn run_accept(accept: &Accept, watch: &Watch<'_>) -> (Option<AcceptResults>, Vec<Remark>) {
    match accept.run(watch) {
        Ok((results, remarks)) => (Some(results), remarks),
        Err(LabError::Interrupted) => {
            (None, vec![Remark::new("interrupted", "interrupted before lab accept: it is missing")])
        }
        Err(error) => (None, vec![Remark::new("failed", format!("lab accept failed: {error}"))]),
    }
}
