//! `--takeover`: this process takes over from the running process, and a later process can take over from this process.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use fourtuple_forward::{
    Door, Forward, ForwardError, Handed, HandoverError, Predecessor, Running, TakenOver, Watched,
};

/// The takeover socket of this process, and its predecessor.
pub(super) struct Takeover {
    door: Option<Door>,
    process: Option<u32>,
}

/// Takes over from the process that listens at the path, or opens new sockets if there is none.
pub(super) fn start(forward: &Forward, path: Option<&Path>) -> Result<(Running, Takeover), ForwardError> {
    let Some(path) = path else {
        return Ok((forward.start()?, Takeover { door: None, process: None }));
    };
    match follow(forward, path) {
        // The predecessor has ended in between, so that there is none.
        Err(ForwardError::Handover(HandoverError::Gone { .. })) => follow(forward, path),
        result => result,
    }
}

fn follow(forward: &Forward, path: &Path) -> Result<(Running, Takeover), ForwardError> {
    if let Some(predecessor) = Predecessor::at(path)? {
        let TakenOver { running, door, process } = forward.take_over(predecessor)?;
        return Ok((running, Takeover { door: Some(door), process: Some(process) }));
    }
    // The path is bound first, so that an invalid path is reported before any socket is open.
    let door = Door::open(path)?;
    Ok((forward.start()?, Takeover { door: Some(door), process: None }))
}

impl Takeover {
    /// Returns the PID of the predecessor.
    pub(super) fn from(&self) -> Option<u32> {
        self.process
    }

    /// Returns whether the predecessor has ended, so that this process can bind addresses that only one process can have.
    pub(super) fn is_alone(&self) -> bool {
        self.door.as_ref().is_none_or(|door| door.predecessor_has_ended(Duration::ZERO))
    }

    /// Checks for a process that requests the takeover. Returns the BFD sessions before the takeover if it is done.
    pub(super) fn look(
        &mut self,
        running: &mut Running,
        quiet: bool,
    ) -> Result<Option<Vec<Watched>>, ForwardError> {
        let tell = |line: String| {
            if !quiet {
                let _ = writeln!(io::stderr(), "{line}");
            }
        };
        let Some(door) = &mut self.door else { return Ok(None) };
        match running.hand_over(door)? {
            Handed::Nothing => Ok(None),
            Handed::Failed(error) => {
                tell(format!("not handed over: {error}"));
                Ok(None)
            }
            Handed::Done { process, bfd, pause } => {
                let pause = pause.as_secs_f64() * 1e3;
                tell(format!("handed over to process {process}, for which packets waited {pause:.1} ms"));
                // The successor waits for the end of this process, which closes the connection, before it binds exclusive addresses.
                if let Some(door) = self.door.take() {
                    Box::leak(Box::new(door));
                }
                Ok(Some(bfd))
            }
        }
    }
}
