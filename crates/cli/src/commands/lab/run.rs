use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple_bench::lab::{LabError, Namespace, Watch};
use fourtuple_record::Host;

use crate::exit::Exit;
use crate::output::{self, Output};
use crate::progress::Bars;
use crate::stop;

/// The flags of one lab.
pub(super) trait Experiment {
    /// Returns whether the lab's records have times of connect(), if a run gives exactly one number for `compare`.
    ///
    /// # Errors
    /// A text for the user that names the flag to change.
    fn comparable(&self) -> Result<bool, String>;

    fn run(&self) -> anyhow::Result<Exit>;
}

/// Prepares the process, runs a lab with a progress bar until its end or Ctrl-C, and describes the host.
pub(super) fn with_watch<R>(
    output: &Output,
    lab: impl FnOnce(&Watch<'_>, LocalPortRange) -> Result<R, LabError>,
) -> anyhow::Result<(R, Host)> {
    // First, because a process with several threads cannot enter a user namespace.
    fourtuple_bench::lab::prepare_process()?;
    let stop = stop::flag()?;
    let bars = Bars::new(output.quiet);
    // The probe opens sockets, so it runs in a network namespace of its own.
    let found = Namespace::run(|_| Ok(capabilities::probe()))?.map_err(fourtuple::dial::BuildError::from)?;
    let result = lab(&Watch { stop: &stop, progress: &bars }, found.local_port_range)?;
    drop(bars);
    let host = output::host(
        &["net.ipv4.ip_local_port_range", "net.ipv4.tcp_tw_reuse", "net.core.somaxconn"],
        &[("ip_local_port_range", found.local_port_range.name())],
    );
    Ok((result, host))
}
