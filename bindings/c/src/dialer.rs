use std::ffi::{c_char, c_int};
use std::sync::Arc;

use fourtuple::dial::Dialer;
use libc::{size_t, sockaddr, socklen_t};

use crate::{Error, Failure, copy, read_address, run, text};

/// `struct fourtuple_settings`.
#[repr(C)]
pub(crate) struct Settings {
    strategy: *const c_char,
    sources: *const c_char,
    device: *const c_char,
    source_port: u16,
    without_census: u16,
    reserved: u32,
}

#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<Settings>() == 32);

/// `fourtuple_dialer`: attempts hold the dialer, so that C may free both in any order.
pub(crate) struct SharedDialer(pub(crate) Arc<Dialer>);

/// `fourtuple_dialer_new()` of `fourtuple.h`.
///
/// # Safety
///
/// The pointers must be null or as the header describes them.
#[unsafe(no_mangle)]
unsafe extern "C" fn fourtuple_dialer_new(
    destination: *const sockaddr,
    length: socklen_t,
    settings: *const Settings,
    dialer: *mut *mut SharedDialer,
    error: *mut Error,
) -> c_int {
    let body = || {
        // SAFETY: the caller passes null or a place for the result.
        let place = unsafe { dialer.as_mut() }.ok_or_else(|| Failure::invalid("dialer is null"))?;
        *place = std::ptr::null_mut();
        // SAFETY: the caller passes an address of this length.
        let mut builder = Dialer::builder(unsafe { read_address(destination, length) }?);
        // SAFETY: the caller passes null or settings.
        if let Some(settings) = unsafe { settings.as_ref() } {
            if settings.reserved != 0 {
                return Err(Failure::invalid("settings.reserved must be 0"));
            }
            // SAFETY: the texts of the settings are null or end with a null byte.
            let (strategy, sources, device) = unsafe {
                (
                    text("settings.strategy", settings.strategy)?,
                    text("settings.sources", settings.sources)?,
                    text("settings.device", settings.device)?,
                )
            };
            if let Some(name) = strategy {
                builder =
                    builder.strategy(name.parse().map_err(|error| Failure::invalid(format!("{error}")))?);
            }
            if let Some(list) = sources {
                builder =
                    builder.sources(list.parse().map_err(|error| Failure::invalid(format!("{error}")))?);
            }
            if let Some(name) = device {
                builder = builder.device(name);
            }
            if settings.source_port != 0 {
                builder = builder.source_port(settings.source_port);
            }
            if settings.without_census != 0 {
                builder = builder.without_census();
            }
        }
        let built = builder.build().map_err(Failure::Build)?;
        *place = Box::into_raw(Box::new(SharedDialer(Arc::new(built))));
        Ok(0)
    };
    // SAFETY: the caller passes null or a place for the error.
    unsafe { run(error, body) }
}

/// `fourtuple_dialer_free()` of `fourtuple.h`.
///
/// # Safety
///
/// The pointers must be null or as the header describes them.
#[unsafe(no_mangle)]
unsafe extern "C" fn fourtuple_dialer_free(dialer: *mut SharedDialer) {
    if !dialer.is_null() {
        // SAFETY: the pointer comes from fourtuple_dialer_new, and the caller does not use it again.
        drop(unsafe { Box::from_raw(dialer) });
    }
}

/// `fourtuple_dialer_choice()` of `fourtuple.h`.
///
/// # Safety
///
/// The pointers must be null or as the header describes them.
#[unsafe(no_mangle)]
unsafe extern "C" fn fourtuple_dialer_choice(
    dialer: *const SharedDialer,
    buffer: *mut c_char,
    size: size_t,
) -> c_int {
    let body = || {
        // SAFETY: the caller passes null or a dialer.
        let dialer = unsafe { dialer.as_ref() }.ok_or_else(|| Failure::invalid("dialer is null"))?;
        let choice = dialer.0.choice().to_string();
        if !buffer.is_null() {
            // SAFETY: the caller passes a buffer of this size.
            copy(&choice, unsafe { std::slice::from_raw_parts_mut(buffer.cast(), size) });
        }
        Ok(i32::try_from(choice.len()).expect("a choice is a short text"))
    };
    // SAFETY: null is permitted.
    unsafe { run(std::ptr::null_mut(), body) }
}

/// `fourtuple_release()` of `fourtuple.h`.
///
/// # Safety
///
/// The pointers must be null or as the header describes them.
#[unsafe(no_mangle)]
unsafe extern "C" fn fourtuple_release(
    dialer: *const SharedDialer,
    source: *const sockaddr,
    length: socklen_t,
    error: *mut Error,
) -> c_int {
    let body = || {
        // SAFETY: the caller passes null or a dialer.
        let dialer = unsafe { dialer.as_ref() }.ok_or_else(|| Failure::invalid("dialer is null"))?;
        // SAFETY: the caller passes an address of this length.
        dialer.0.release(unsafe { read_address(source, length) }?);
        Ok(0)
    };
    // SAFETY: the caller passes null or a place for the error.
    unsafe { run(error, body) }
}

/// `fourtuple_refresh()` of `fourtuple.h`.
///
/// # Safety
///
/// The pointers must be null or as the header describes them.
#[unsafe(no_mangle)]
unsafe extern "C" fn fourtuple_refresh(dialer: *const SharedDialer, error: *mut Error) -> c_int {
    let body = || {
        // SAFETY: the caller passes null or a dialer.
        let dialer = unsafe { dialer.as_ref() }.ok_or_else(|| Failure::invalid("dialer is null"))?;
        dialer.0.refresh().map(|()| 0).map_err(Failure::Io)
    };
    // SAFETY: the caller passes null or a place for the error.
    unsafe { run(error, body) }
}
