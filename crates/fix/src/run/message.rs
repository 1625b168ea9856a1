//! Messages from the supervisor to the main process, twelve bytes each on a Unix socket.

use std::io::{self, Read, Write};

/// A step of the start that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The supervisor's own preparation.
    Prepare,
    /// fork(2) of the program.
    Fork,
    /// seccomp(2) in the program.
    Filter,
    /// pidfd_getfd(2) of the listener.
    Listener,
    /// The move of the program to its cgroup.
    Cgroup,
    /// execve(2).
    Execute,
}

const STEPS: [Step; 6] =
    [Step::Prepare, Step::Fork, Step::Filter, Step::Listener, Step::Cgroup, Step::Execute];

/// A message to the main process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// The program waits for the permission to start: its process, and the number of its listener's descriptor.
    Ready { process: u32, listener: i32 },
    /// A step of the start has failed with this errno.
    Failed(Step, i32),
    /// The program runs.
    Running,
    /// The program has exited with this code.
    Exited(i32),
    /// This signal has ended the program.
    Killed(i32),
    /// A signal has stopped the program.
    Stopped,
}

impl Message {
    pub(super) fn write(self, mut to: impl Write) -> io::Result<()> {
        let (kind, value, detail) = match self {
            Message::Ready { process, listener } => (0, process.cast_signed(), listener),
            Message::Failed(step, errno) => (1, errno, step as i32),
            Message::Running => (2, 0, 0),
            Message::Exited(code) => (3, code, 0),
            Message::Killed(signal) => (4, signal, 0),
            Message::Stopped => (5, 0, 0),
        };
        let mut bytes = [0; 12];
        for (place, number) in bytes.chunks_exact_mut(4).zip([kind, value, detail]) {
            place.copy_from_slice(&i32::to_ne_bytes(number));
        }
        to.write_all(&bytes)
    }

    /// Reads a message; UnexpectedEof if the supervisor has ended.
    pub(super) fn read(mut from: impl Read) -> io::Result<Message> {
        let mut numbers = [0; 3];
        for number in &mut numbers {
            let mut bytes = [0; 4];
            from.read_exact(&mut bytes)?;
            *number = i32::from_ne_bytes(bytes);
        }
        let [kind, value, detail] = numbers;
        match kind {
            0 => Ok(Message::Ready { process: value.cast_unsigned(), listener: detail }),
            1 => {
                let step = usize::try_from(detail).ok().and_then(|index| STEPS.get(index));
                Ok(Message::Failed(step.copied().unwrap_or(Step::Prepare), value))
            }
            2 => Ok(Message::Running),
            3 => Ok(Message::Exited(value)),
            4 => Ok(Message::Killed(value)),
            _ => Ok(Message::Stopped),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_written() {
        let failed = STEPS.map(|step| Message::Failed(step, 22));
        let others = [
            Message::Ready { process: 4_194_304, listener: 17 },
            Message::Running,
            Message::Exited(255),
            Message::Killed(9),
            Message::Stopped,
        ];
        for message in failed.into_iter().chain(others) {
            let mut bytes = Vec::new();
            message.write(&mut bytes).unwrap();
            assert_eq!(Message::read(bytes.as_slice()).unwrap(), message);
        }
        assert!(Message::read(&[0u8; 11][..]).is_err());
    }
}
