use std::ffi::c_int;
use std::io;
use std::mem;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use fourtuple::dial::{Attempt, DialError, Dialer, Retry};
use libc::{sockaddr_storage, socklen_t};

use crate::dialer::SharedDialer;
use crate::{Error, Failure, c_address, run};

/// `FOURTUPLE_SAME_SOCKET` and `FOURTUPLE_FRESH_SOCKET`.
const SAME_SOCKET: c_int = 1;
const FRESH_SOCKET: c_int = 2;

/// `fourtuple_attempt`. The attempt borrows the dialer, so its field comes first: fields are dropped in their order.
pub(crate) struct OwnedAttempt {
    attempt: Attempt<'static>,
    dialer: Arc<Dialer>,
}

/// `struct fourtuple_report`.
#[repr(C)]
pub(crate) struct Report {
    source: sockaddr_storage,
    source_length: socklen_t,
    tries: u32,
}

const _: () = assert!(size_of::<Report>() == 136);

/// Borrows a descriptor of C for one call.
fn descriptor(fd: &c_int) -> Result<BorrowedFd<'_>, Failure> {
    if *fd < 0 {
        return Err(Failure::invalid(format!("{fd} is not a descriptor")));
    }
    // SAFETY: the caller keeps the descriptor open during the call; a closed one gives EBADF.
    Ok(unsafe { BorrowedFd::borrow_raw(*fd) })
}

/// Adds a census to the error of an attempt.
fn counted(dialer: &Dialer) -> impl Fn(DialError) -> Failure {
    |error| Failure::Dial(dialer.with_census(error))
}

/// `fourtuple_prepare()` of `fourtuple.h`.
///
/// # Safety
///
/// The pointers must be null or as the header describes them.
#[unsafe(no_mangle)]
unsafe extern "C" fn fourtuple_prepare(
    dialer: *const SharedDialer,
    fd: c_int,
    attempt: *mut *mut OwnedAttempt,
    error: *mut Error,
) -> c_int {
    let body = || {
        // SAFETY: the caller passes null or a place for the result.
        let place = unsafe { attempt.as_mut() }.ok_or_else(|| Failure::invalid("attempt is null"))?;
        *place = std::ptr::null_mut();
        // SAFETY: the caller passes null or a dialer.
        let dialer = unsafe { dialer.as_ref() }.ok_or_else(|| Failure::invalid("dialer is null"))?;
        let dialer = Arc::clone(&dialer.0);
        let prepared = dialer.prepare(descriptor(&fd)?).map_err(counted(&dialer))?;
        // SAFETY: the dialer is on the heap, and the Arc beside the attempt keeps it there until the attempt is dropped.
        let prepared = unsafe { mem::transmute::<Attempt<'_>, Attempt<'static>>(prepared) };
        *place = Box::into_raw(Box::new(OwnedAttempt { attempt: prepared, dialer }));
        Ok(0)
    };
    // SAFETY: the caller passes null or a place for the error.
    unsafe { run(error, body) }
}

/// `fourtuple_next()` of `fourtuple.h`.
///
/// # Safety
///
/// The pointers must be null or as the header describes them.
#[unsafe(no_mangle)]
unsafe extern "C" fn fourtuple_next(
    attempt: *mut OwnedAttempt,
    fd: c_int,
    errnum: c_int,
    error: *mut Error,
) -> c_int {
    let body = || {
        // SAFETY: the caller passes null or an attempt that no other thread uses.
        let attempt = unsafe { attempt.as_mut() }.ok_or_else(|| Failure::invalid("attempt is null"))?;
        if matches!(errnum, 0 | libc::EINPROGRESS | libc::EALREADY | libc::EINTR) {
            return Err(Failure::invalid(format!(
                "errno {errnum} is not a failure of connect(): wait for the socket"
            )));
        }
        let failure = io::Error::from_raw_os_error(errnum);
        let fd = descriptor(&fd)?;
        let OwnedAttempt { attempt, dialer } = attempt;
        Ok(match attempt.connect_failed(failure).map_err(counted(dialer))? {
            Retry::SameSocket => attempt.prepare(fd).map(|()| SAME_SOCKET).map_err(counted(dialer))?,
            Retry::FreshSocket => FRESH_SOCKET,
        })
    };
    // SAFETY: the caller passes null or a place for the error.
    unsafe { run(error, body) }
}

/// `fourtuple_renew()` of `fourtuple.h`.
///
/// # Safety
///
/// The pointers must be null or as the header describes them.
#[unsafe(no_mangle)]
unsafe extern "C" fn fourtuple_renew(attempt: *mut OwnedAttempt, fd: c_int, error: *mut Error) -> c_int {
    let body = || {
        // SAFETY: the caller passes null or an attempt that no other thread uses.
        let attempt = unsafe { attempt.as_mut() }.ok_or_else(|| Failure::invalid("attempt is null"))?;
        let OwnedAttempt { attempt, dialer } = attempt;
        attempt.prepare(descriptor(&fd)?).map(|()| 0).map_err(counted(dialer))
    };
    // SAFETY: the caller passes null or a place for the error.
    unsafe { run(error, body) }
}

/// `fourtuple_finish()` of `fourtuple.h`.
///
/// # Safety
///
/// The pointers must be null or as the header describes them.
#[unsafe(no_mangle)]
unsafe extern "C" fn fourtuple_finish(
    attempt: *mut OwnedAttempt,
    fd: c_int,
    report: *mut Report,
    error: *mut Error,
) -> c_int {
    let body = || {
        if attempt.is_null() {
            return Err(Failure::invalid("attempt is null"));
        }
        // SAFETY: the pointer comes from fourtuple_prepare, and the caller does not use it again.
        let owned = unsafe { Box::from_raw(attempt) };
        // Declared first, so that it is dropped after the attempt, which borrows from it.
        let _dialer = owned.dialer;
        let attempt = owned.attempt;
        let finished = attempt.finish(descriptor(&fd)?).map_err(Failure::Dial)?;
        // SAFETY: the caller passes null or a place for the report.
        if let Some(report) = unsafe { report.as_mut() } {
            let (source, source_length) = c_address(finished.source);
            *report = Report { source, source_length, tries: finished.attempts };
        }
        Ok(0)
    };
    // SAFETY: the caller passes null or a place for the error.
    unsafe { run(error, body) }
}

/// `fourtuple_abandon()` of `fourtuple.h`.
///
/// # Safety
///
/// The pointers must be null or as the header describes them.
#[unsafe(no_mangle)]
unsafe extern "C" fn fourtuple_abandon(attempt: *mut OwnedAttempt) {
    if !attempt.is_null() {
        // SAFETY: the pointer comes from fourtuple_prepare, and the caller does not use it again.
        drop(unsafe { Box::from_raw(attempt) });
    }
}

/// `fourtuple_settle()` of `fourtuple.h`.
///
/// # Safety
///
/// The pointers must be null or as the header describes them.
#[unsafe(no_mangle)]
unsafe extern "C" fn fourtuple_settle(attempt: *mut OwnedAttempt, fd: c_int) {
    let body = || {
        if !attempt.is_null() {
            // SAFETY: the pointer comes from fourtuple_prepare, and the caller does not use it again.
            let owned = unsafe { Box::from_raw(attempt) };
            // Declared first, so that it is dropped after the attempt, which borrows from it.
            let _dialer = owned.dialer;
            let attempt = owned.attempt;
            attempt.settle(descriptor(&fd)?);
        }
        Ok(0)
    };
    // SAFETY: null is permitted.
    unsafe { run(std::ptr::null_mut(), body) };
}
