//! The C library: `fourtuple.h` describes its functions and types.
//!
//! C passes pointers, so this crate contains `unsafe`; it decides nothing and calls `fourtuple::dial`. A panic does not cross the border:
//! it becomes the error `FOURTUPLE_FAILED`.
//!
//! An attempt keeps its dialer alive. The header is kept by hand, because its comments are the documentation for C: `tests/programs.rs` compares
//! it with `fourtuple.abi` and the library. Wrappers in `syscalls` instead would make the lowest crate depend on the library.
#![allow(unsafe_code, reason = "C passes pointers")]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod address;
mod attempt;
mod dialer;
mod error;
mod step;

use std::ffi::{CStr, c_char};
use std::panic::{self, AssertUnwindSafe};

use crate::error::{Error, Failure};

/// Runs the body of a function of the library. Returns its result, or the kind of its error.
///
/// # Safety
///
/// `error` must be null or point to a `struct fourtuple_error`.
unsafe fn run(error: *mut Error, body: impl FnOnce() -> Result<i32, Failure>) -> i32 {
    let failure = match panic::catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => return value,
        Ok(Err(failure)) => failure,
        Err(_) => Failure::panicked(),
    };
    let kind = failure.kind();
    // SAFETY: the caller passes null or a valid pointer.
    if let Some(error) = unsafe { error.as_mut() } {
        *error = Error::new(&failure);
    }
    kind
}

/// Returns a text of C; `None` for null.
///
/// # Safety
///
/// `text` must be null or end with a null byte, and must outlive the result.
unsafe fn text<'a>(name: &str, text: *const c_char) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller passes a text that ends with a null byte.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Failure::invalid(format!("{name} is not UTF-8")))
}

/// Returns the version of the library.
#[unsafe(no_mangle)]
extern "C" fn fourtuple_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}
