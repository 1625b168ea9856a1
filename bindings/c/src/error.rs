use std::io;

use fourtuple::dial::{BuildError, DialError};

/// `enum fourtuple_kind`.
mod kind {
    pub(super) const FAILED: i32 = -1;
    pub(super) const PORTS_EXHAUSTED: i32 = -2;
    pub(super) const SOURCE_NOT_LOCAL: i32 = -3;
    pub(super) const TUPLE_BUSY: i32 = -4;
    pub(super) const REFUSED: i32 = -5;
    pub(super) const SELF_CONNECT: i32 = -6;
    pub(super) const TIMED_OUT: i32 = -7;
    pub(super) const NOT_SUPPORTED: i32 = -8;
    pub(super) const INVALID: i32 = -9;
}

const MESSAGE: usize = 372;

/// `struct fourtuple_error`.
#[repr(C)]
pub(crate) struct Error {
    kind: i32,
    errnum: i32,
    retryable: i32,
    message: [u8; MESSAGE],
}

const _: () = assert!(size_of::<Error>() == 384);

/// A failed function of the library.
#[derive(Debug)]
pub(crate) enum Failure {
    Dial(DialError),
    Build(BuildError),
    Io(io::Error),
    Invalid(String),
    Panicked,
}

impl Failure {
    pub(crate) fn invalid(reason: impl Into<String>) -> Failure {
        Failure::Invalid(reason.into())
    }

    pub(crate) fn panicked() -> Failure {
        Failure::Panicked
    }

    pub(crate) fn kind(&self) -> i32 {
        match self {
            Failure::Dial(error) => match error {
                DialError::PortsExhausted { .. } => kind::PORTS_EXHAUSTED,
                DialError::SourceNotLocal { .. } => kind::SOURCE_NOT_LOCAL,
                DialError::TupleBusy { .. } => kind::TUPLE_BUSY,
                DialError::Refused { .. } => kind::REFUSED,
                DialError::SelfConnect { .. } => kind::SELF_CONNECT,
                DialError::TimedOut { .. } => kind::TIMED_OUT,
                DialError::NotSupported { .. } => kind::NOT_SUPPORTED,
                _ => kind::FAILED,
            },
            Failure::Build(error) if error.kind() == io::ErrorKind::InvalidInput => kind::INVALID,
            Failure::Build(_) | Failure::Io(_) | Failure::Panicked => kind::FAILED,
            Failure::Invalid(_) => kind::INVALID,
        }
    }

    /// Returns the errno of the failed call, or the errno that package users expect for the kind; 0 if there is none.
    fn errnum(&self) -> i32 {
        match self {
            Failure::Dial(error) => error.raw_os_error().unwrap_or(0),
            Failure::Io(error) => errno(error),
            Failure::Invalid(_) => libc::EINVAL,
            Failure::Build(error) => match error {
                BuildError::Probe(probe) => errno(&probe.error),
                BuildError::Range { error, .. } => errno(error),
                _ => libc::EINVAL,
            },
            Failure::Panicked => 0,
        }
    }

    fn is_retryable(&self) -> bool {
        match self {
            Failure::Dial(error) => error.is_retryable(),
            Failure::Build(error) => error.is_retryable(),
            _ => false,
        }
    }

    fn message(&self) -> String {
        match self {
            Failure::Dial(error) => chain(error),
            Failure::Build(error) => chain(error),
            Failure::Io(error) => error.to_string(),
            Failure::Invalid(reason) => reason.clone(),
            Failure::Panicked => "a defect of the library: it panicked, see stderr".to_owned(),
        }
    }
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(0)
}

/// Returns the text of an error and of its sources: C has one message.
fn chain(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {}", chain(source)))
}

impl Error {
    pub(crate) fn new(failure: &Failure) -> Error {
        let mut message = [0; MESSAGE];
        copy(&failure.message(), &mut message);
        Error {
            kind: failure.kind(),
            errnum: failure.errnum(),
            retryable: i32::from(failure.is_retryable()),
            message,
        }
    }
}

/// Copies the start of a text that fits, and a null byte.
pub(crate) fn copy(text: &str, into: &mut [u8]) {
    let Some(room) = into.len().checked_sub(1) else { return };
    let length = text.floor_char_boundary(room.min(text.len()));
    into[..length].copy_from_slice(&text.as_bytes()[..length]);
    into[length] = 0;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters() {
        let mut buffer = [1; 5];
        copy("abcé", &mut buffer);
        assert_eq!(buffer, *b"abc\0\x01");
        copy("ab", &mut buffer);
        assert_eq!(&buffer[..3], b"ab\0");
        copy("ab", &mut []);
    }
}
