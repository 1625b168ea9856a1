//! Host names in a program that has the C library in it.

/// Makes getaddrinfo(3) of a static program use /etc/hosts and DNS only, whatever nsswitch.conf(5) says. Does nothing in other programs.
///
/// The other sources are libraries of the host, which a static program loads together with the host's glibc. If that has another
/// version, the process ends by a signal: SIGFPE with glibc 2.36 in the program and 2.41 on the host.
pub fn restrict_static_lookups() {
    #[cfg(all(target_feature = "crt-static", target_env = "gnu"))]
    {
        use std::ffi::{c_char, c_int};

        unsafe extern "C" {
            fn __nss_configure_lookup(database: *const c_char, services: *const c_char) -> c_int;
        }
        // SAFETY: both are texts with a zero at the end, which glibc copies. It takes a lock of its own.
        let failed = unsafe { __nss_configure_lookup(c"hosts".as_ptr(), c"files dns".as_ptr()) };
        // It fails for names that it does not know.
        debug_assert_eq!(failed, 0);
    }
}
