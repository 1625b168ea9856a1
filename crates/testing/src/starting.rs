//! Starts of processes, kept apart from readings of the processes that hold a socket.
//!
//! Between fork() and exec() a child holds copies of all sockets of the test program, also of the sockets of tests in other threads.

use std::io;
use std::process::{Child, Command, ExitStatus};
use std::sync::{PoisonError, RwLock};

/// Written while a process starts.
static STARTING: RwLock<()> = RwLock::new(());

/// Starts a process.
///
/// # Errors
///
/// The errors of [`Command::spawn`].
pub fn start(command: &mut Command) -> io::Result<Child> {
    let _starting = STARTING.write().unwrap_or_else(PoisonError::into_inner);
    // Returns after the exec().
    command.spawn()
}

/// Starts a process and waits for its end.
///
/// # Errors
///
/// The errors of [`Command::status`].
pub fn status(command: &mut Command) -> io::Result<ExitStatus> {
    start(command)?.wait()
}

/// Calls `read` while no process starts by way of this module.
pub fn undisturbed<T>(read: impl FnOnce() -> T) -> T {
    let _undisturbed = STARTING.read().unwrap_or_else(PoisonError::into_inner);
    read()
}
