use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fourtuple_syscalls::child;

use crate::error::CompareError;

/// The time between two checks whether a server listens, or whether a process has ended.
pub(crate) const POLL: Duration = Duration::from_millis(2);

/// The time from SIGINT to SIGKILL for a server, and the longest time for the output of a server that has ended.
const GRACE: Duration = Duration::from_secs(2);

/// Bytes of a server's last output on stderr that an error quotes.
const QUOTED: usize = 400;

/// The command line of a server that each trial of a load starts.
#[derive(Clone, Debug)]
pub struct ServerCommand {
    /// The flag that gave the command: `--server` or `--server-b`.
    pub flag: &'static str,
    /// The command as typed.
    pub text: String,
    /// The program: the running `fourtuple` for `serve ...`, else a path or a name in PATH.
    pub program: OsString,
    /// The arguments of the program.
    pub arguments: Vec<String>,
}

impl ServerCommand {
    /// Starts the server on the CPUs and in the network namespace of the calling thread. It ends with this thread.
    pub(crate) fn start(&self) -> Result<RunningServer, CompareError> {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // In a process group of its own the server does not get the terminal's SIGINT, and does not end before the load.
        command.process_group(0);
        child::end_with_this_thread(&mut command);
        let mut child = command.spawn().map_err(|error| self.spawn_error(error))?;
        match child.stderr.take().map(StderrTail::read).expect("stderr is piped") {
            Ok(stderr) => Ok(RunningServer { child, stderr }),
            Err(error) => {
                // Without a reader the server would block on a full pipe.
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Returns an error of the command line, or of the environment if memory or processes are exhausted (ENOMEM, EAGAIN).
    fn spawn_error(&self, error: io::Error) -> CompareError {
        use std::io::ErrorKind::{OutOfMemory, WouldBlock};
        if matches!(error.kind(), WouldBlock | OutOfMemory) {
            return CompareError::Call { what: format!("cannot start '{}'", self.text), error };
        }
        let message = format!("invalid value '{}' for '{}': cannot start it: {error}", self.text, self.flag);
        CompareError::Usage(message)
    }
}

/// A server process. Dropping it sends SIGINT, and SIGKILL after a grace period.
pub(crate) struct RunningServer {
    child: Child,
    stderr: StderrTail,
}

impl RunningServer {
    /// Returns the exit status if the server has ended.
    pub(crate) fn exit_status(&mut self) -> Result<Option<ExitStatus>, CompareError> {
        self.child.try_wait().map_err(CompareError::call("cannot wait for a server"))
    }

    /// Returns the last output on stderr as the end of a sentence: `; it said: ...`.
    pub(crate) fn last_words(&mut self) -> String {
        // Output may still be in the pipe after the server has ended.
        let has_ended = matches!(self.child.try_wait(), Ok(Some(_)));
        let (begun, longest) = (Instant::now(), if has_ended { GRACE } else { Duration::from_millis(100) });
        while !self.stderr.reader.is_finished() && begun.elapsed() < longest {
            thread::sleep(POLL);
        }
        let last = self.stderr.last.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&last);
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        if lines.is_empty() {
            "; it said nothing".to_owned()
        } else {
            format!("; it said: {}", lines.join(" "))
        }
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        let begun = Instant::now();
        // After `wait` the process id may belong to another process, so only a running child gets the signal.
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = child::interrupt(self.child.id());
        }
        while matches!(self.child.try_wait(), Ok(None)) {
            if begun.elapsed() >= GRACE {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            thread::sleep(POLL);
        }
    }
}

/// The end of a server's output on stderr, which a thread reads.
struct StderrTail {
    last: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl StderrTail {
    /// Starts a thread that reads until the pipe closes, so that the server never blocks on a full pipe.
    fn read(mut pipe: ChildStderr) -> Result<StderrTail, CompareError> {
        let last = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&last);
        // The pipe closes when the last process that inherited it ends; `NamespaceCleanup` ends all of them.
        let reader = thread::Builder::new().spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut buffer) {
                let mut last = kept.lock().unwrap_or_else(PoisonError::into_inner);
                last.extend_from_slice(&buffer[..count]);
                let old = last.len().saturating_sub(QUOTED);
                last.drain(..old);
            }
        });
        let reader =
            reader.map_err(CompareError::call("cannot start a thread to read the output of a server"))?;
        Ok(StderrTail { last, reader })
    }
}
