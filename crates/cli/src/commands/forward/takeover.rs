//! `--takeover`: this process follows the one that is at work, and another one can follow it.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use fourtuple_forward::{
    Door, Forward, ForwardError, Handed, HandoverError, Predecessor, Running, TakenOver, Watched,
};

/// The door of this process, and whom it has followed.
pub(super) struct Takeover {
    door: Option<Door>,
    process: Option<u32>,
}

/// Starts in the place of whoever answers at the path, or anew when nobody does.
pub(super) fn start(forward: &Forward, path: Option<&Path>) -> Result<(Running, Takeover), ForwardError> {
    let Some(path) = path else {
        return Ok((forward.start()?, Takeover { door: None, process: None }));
    };
    match follow(forward, path) {
        // It has ended meanwhile: then there is none.
        Err(ForwardError::Handover(HandoverError::Gone { .. })) => follow(forward, path),
        result => result,
    }
}

fn follow(forward: &Forward, path: &Path) -> Result<(Running, Takeover), ForwardError> {
    if let Some(predecessor) = Predecessor::at(path)? {
        let TakenOver { running, door, process } = forward.take_over(predecessor)?;
        return Ok((running, Takeover { door: Some(door), process: Some(process) }));
    }
    // First: a path that cannot be is found out before anything listens.
    let door = Door::open(path)?;
    Ok((forward.start()?, Takeover { door: Some(door), process: None }))
}

impl Takeover {
    /// The process that this one has taken over from.
    pub(super) fn from(&self) -> Option<u32> {
        self.process
    }

    /// Whether what only one process can have may be there by now.
    pub(super) fn is_alone(&self) -> bool {
        self.door.as_ref().is_none_or(|door| door.predecessor_has_ended(Duration::ZERO))
    }

    /// Lets another process take over if one is there: then the BFD sessions as they were.
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
                // The successor waits for the end of this process to open what only one can have: the kernel tells it then.
                if let Some(door) = self.door.take() {
                    Box::leak(Box::new(door));
                }
                Ok(Some(bfd))
            }
        }
    }
}
