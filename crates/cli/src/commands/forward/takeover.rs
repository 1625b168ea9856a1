//! `--takeover`: this process takes over from the running process, and a later process can take over from this process.

use std::path::Path;
use std::time::Duration;

use crate::output;
use fourtuple_forward::{
    Forward, ForwardError, HandoverError, Predecessor, Running, SessionReport, TakenOver, TakeoverOutcome,
    TakeoverSocket,
};
use fourtuple_record::format_time;

/// The takeover socket of this process, and its predecessor.
pub(super) struct Takeover {
    takeover_socket: Option<TakeoverSocket>,
    process: Option<u32>,
}

/// Takes over from the process that listens at the path, or opens new sockets if there is none.
pub(super) fn start(forward: &Forward, path: Option<&Path>) -> Result<(Running, Takeover), ForwardError> {
    let Some(path) = path else {
        return Ok((forward.start()?, Takeover { takeover_socket: None, process: None }));
    };
    match follow(forward, path) {
        // The predecessor has ended in between, so that there is none.
        Err(ForwardError::Handover(HandoverError::Gone { .. })) => follow(forward, path),
        result => result,
    }
}

fn follow(forward: &Forward, path: &Path) -> Result<(Running, Takeover), ForwardError> {
    if let Some(predecessor) = Predecessor::at(path)? {
        let TakenOver { running, takeover_socket, process } = forward.take_over(predecessor)?;
        return Ok((running, Takeover { takeover_socket: Some(takeover_socket), process: Some(process) }));
    }
    // The path is bound first, so that an invalid path is reported before any socket is open.
    let takeover_socket = TakeoverSocket::open(path)?;
    Ok((forward.start()?, Takeover { takeover_socket: Some(takeover_socket), process: None }))
}

impl Takeover {
    /// Returns the PID of the predecessor.
    pub(super) fn from(&self) -> Option<u32> {
        self.process
    }

    /// Returns whether the predecessor has ended, so that this process can bind addresses that only one process can have.
    pub(super) fn is_alone(&self) -> bool {
        self.takeover_socket
            .as_ref()
            .is_none_or(|takeover_socket| takeover_socket.predecessor_has_ended(Duration::ZERO))
    }

    /// Checks for a process that requests the takeover. Returns the BFD sessions before the takeover if it is done.
    pub(super) fn look(
        &mut self,
        running: &mut Running,
        quiet: bool,
    ) -> Result<Option<Vec<SessionReport>>, ForwardError> {
        let tell = |line: String| {
            if !quiet {
                output::say(&line);
            }
        };
        let Some(takeover_socket) = &mut self.takeover_socket else { return Ok(None) };
        match running.hand_over(takeover_socket)? {
            TakeoverOutcome::Nothing => Ok(None),
            TakeoverOutcome::Failed(error) => {
                tell(format!("not handed over: {error}"));
                Ok(None)
            }
            TakeoverOutcome::Done { process, bfd, pause } => {
                let pause = format_time(pause);
                tell(format!("handed over to process {process}, for which packets waited {pause}"));
                // The successor waits for the end of this process, which closes the connection, before it binds exclusive addresses.
                if let Some(takeover_socket) = self.takeover_socket.take() {
                    Box::leak(Box::new(takeover_socket));
                }
                Ok(Some(bfd))
            }
        }
    }
}
