//! Worker processes of a group.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use fourtuple_syscalls::fork::{self, End, Process};

use crate::listen::error::ListenError;
use crate::listen::group::ListenerGroup;

/// A worker process of a group. Dropping it neither ends the process nor waits for it.
///
/// Example: [`ListenerGroup::fork`].
#[derive(Debug)]
pub struct WorkerProcess(Process);

impl ListenerGroup {
    /// Runs `work` in a child process, which shares the listeners, the seats and the handoff queue of this group, and uses its result as
    /// exit code (101 after a panic). For a group with [`Workers::Processes`](crate::listen::Workers::Processes).
    ///
    /// The kernel kills the child when the thread that called this function ends. After the death of a worker that did not leave, call
    /// [`vacate`](ListenerGroup::vacate) with its seat, and after the death of a dispatcher
    /// [`vacate_dispatcher`](ListenerGroup::vacate_dispatcher). `examples/prefork.rs` is a supervisor.
    ///
    /// # Errors
    ///
    /// [`ListenError::Call`]: this process has several threads, whose locks could stay locked in the child; or fork(2) failed.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use fourtuple::listen::{ListenError, ListenerGroup, ListenerGroupBuilder, Workers};
    ///
    /// fn serve(group: &ListenerGroup) -> Result<(), ListenError> {
    ///     let mut acceptor = group.join()?;
    ///     while let Some(connection) = acceptor.next(None)? {
    ///         drop(connection); // serve it
    ///     }
    ///     Ok(())
    /// }
    ///
    /// let group = ListenerGroupBuilder::at(([0, 0, 0, 0], 8080)).workers(Workers::Processes).open()?;
    /// let worker = group.fork(|group| i32::from(serve(group).is_err()))?;
    /// println!("process {} serves", worker.id());
    /// worker.kill()?;
    /// println!("{}", worker.wait()?); // signal: 9 (SIGKILL)
    /// group.vacate(0); // the first worker had seat 0
    /// group.vacate_dispatcher(); // only if the process ran the dispatcher
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fork(&self, work: impl FnOnce(&ListenerGroup) -> i32) -> Result<WorkerProcess, ListenError> {
        fork::run_in_child(|| work(self)).map(WorkerProcess).map_err(self.failed("fork()"))
    }
}

impl WorkerProcess {
    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Sends SIGKILL.
    ///
    /// # Errors
    ///
    /// The errors of kill(2).
    pub fn kill(&self) -> io::Result<()> {
        self.0.kill()
    }

    /// Waits until the process has ended.
    ///
    /// # Errors
    ///
    /// The errors of waitpid(2), such as ECHILD if another function of this process has reaped the child.
    pub fn wait(self) -> io::Result<ExitStatus> {
        // The form of waitpid(2): the exit code in the second byte, the signal in the first.
        self.0.wait().map(|end| match end {
            End::Exited(code) => ExitStatus::from_raw((code & 0xff) << 8),
            End::Killed(signal) => ExitStatus::from_raw(signal),
        })
    }
}
