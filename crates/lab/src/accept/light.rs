//! The light load: sequential connections, each opened while all workers wait.

use std::thread;
use std::time::{Duration, Instant};

use fourtuple::listen::AcceptPolicy;
use fourtuple_syscalls::resource::monotonic_ns;
use fourtuple_syscalls::schedule;

use crate::accept::Accept;
use crate::pool::address::ServerAddress;
use crate::pool::client::Client;
use crate::pool::run::Measured;
use crate::pool::workers::Pool;
use crate::{LabError, Watch};

/// Pause between an answer and the next connection, long enough for the worker to wait again on an idle machine.
const REST: Duration = Duration::from_millis(1);
/// Maximum pause on a busy machine.
const MAX_REST: Duration = Duration::from_secs(1);

/// Opens the connections, each with one request, and keeps them open until all are open and counted, for the table of open
/// sockets. Only a blocking worker's connection is closed at once, since that worker would serve it until the end.
pub(crate) fn run(
    accept: &Accept,
    policy: AcceptPolicy,
    pool: Pool,
    watch: &Watch<'_>,
) -> Result<Measured, LabError> {
    let _ = schedule::sleep_precisely();
    let place = ServerAddress::at(pool.endpoint().clone());
    let close_every = u64::from(policy == AcceptPolicy::Blocking);
    let mut client = Client::new(&place, close_every, 0);
    let mut held = Vec::new();
    let mut measured = Measured { begun_ns: monotonic_ns(), ..Measured::default() };
    for connection in 0..accept.connections {
        if watch.stopped() {
            measured.cut = true;
            break;
        }
        client.request(accept.work, monotonic_ns());
        held.extend(client.take_connection());
        let answered = Instant::now();
        thread::sleep(REST);
        while !pool.is_waiting() && answered.elapsed() < MAX_REST {
            thread::sleep(REST);
        }
        if connection % 16 == 0 {
            let share = u64::from(connection) * accept.length.as_millis() as u64;
            watch.progress.at(share / u64::from(accept.connections));
        }
    }
    measured.load = std::mem::take(&mut client.results.answered);
    measured.add_errors(std::mem::take(&mut client.results.errors));
    measured.seats = pool.settled(measured.load.len() as u64, held.len() as u64);
    drop(held);
    pool.settled(0, 0);
    measured.cpu = pool.end()?;
    Ok(measured)
}
