//! Reads snapshots of a network namespace.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::capabilities::{self, LocalPortRange, ProbeError};
use fourtuple_host::snapshot::Reader;
use fourtuple_record::snapshot::{Part, PortSearch, Snapshot};
use fourtuple_syscalls::netns;
use fourtuple_trace::Survey;

use crate::watch::target::{Destination, Namespace};

/// The share of a processor for the pass over all sockets in a live view.
const SHARE: f64 = 0.01;

/// The source of snapshots of one namespace. It stays on the thread that created it, which is in the namespace.
#[derive(Debug)]
pub(crate) struct Watch {
    reader: Reader,
    search: Part<PortSearch>,
}

impl Watch {
    /// Probes the port search and takes the first of many readings.
    pub(crate) fn begin() -> Watch {
        Watch::with(Reader::new(Path::new("/")).limited_to(SHARE), search())
    }

    fn with(mut reader: Reader, search: Part<PortSearch>) -> Watch {
        reader.read();
        Watch { reader, search }
    }

    /// Returns a snapshot with the events since the previous reading.
    pub(crate) fn read(&mut self) -> Snapshot {
        Snapshot { search: self.search.clone(), ..self.reader.read() }
    }
}

/// Reads the namespace twice and traces in between. Returns the snapshot and the time between the readings, which is shorter than
/// `time` if `stop` was set.
pub(crate) fn once(
    namespace: &Namespace,
    time: Duration,
    to: Option<&Destination>,
    trace: bool,
    stop: &AtomicBool,
) -> anyhow::Result<(Snapshot, Duration)> {
    namespace.within(|| {
        let search = search();
        // After the probe of the search, whose connects would count.
        let mut survey = if trace {
            Survey::attach().map_err(|error| error.to_string())
        } else {
            Err("--no-trace".to_owned())
        };
        let reader = Reader::new(Path::new("/"));
        let reader = match to {
            Some(to) => reader.only(to.address(), to.port()),
            None => reader,
        };
        let mut watch = Watch::with(reader, search);
        let began = Instant::now();
        while began.elapsed() < time && !stop.load(Ordering::Relaxed) {
            if let Ok(running) = &mut survey
                && let Err(error) = running.poll()
            {
                survey = Err(error.to_string());
            }
            thread::sleep(Survey::POLL_INTERVAL.min(time.saturating_sub(began.elapsed())));
        }
        let elapsed = began.elapsed();
        let traced =
            survey.and_then(|survey| survey.finish(namespace.inode).map_err(|error| error.to_string()));
        Ok((Snapshot { traced: traced.into(), ..watch.read() }, elapsed))
    })
}

/// Probes the search in a network namespace of its own, so that the probe leaves no trace in the namespace under examination and does
/// not depend on its free ports.
fn search() -> Part<PortSearch> {
    let thread = thread::Builder::new().name("probe".to_owned()).spawn(|| {
        netns::enter_new().map_err(|error| {
            format!(
                "the probe needs a network namespace of its own: {}",
                fourtuple_syscalls::errno_name(&error)
            )
        })?;
        let failed = |error: ProbeError| error.to_string();
        let name = |found: LocalPortRange| match found {
            LocalPortRange::Unproven => Err("the probe could not connect on loopback".to_owned()),
            found => Ok(found.name().to_owned()),
        };
        Ok(PortSearch {
            default: name(capabilities::probe_default_search().map_err(failed)?)?,
            option: name(capabilities::probe().map_err(failed)?.local_port_range)?,
        })
    });
    let probed = thread
        .map_err(|error| format!("cannot start a thread: {error}"))
        .and_then(|thread| thread.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload)));
    probed.into()
}
