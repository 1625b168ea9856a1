//! Names of errnos. Records have errnos as text; a constant cannot be misspelt where one is compared.

macro_rules! errnos {
    ($($name:ident)*) => {
        $(pub const $name: &str = stringify!($name);)*

        #[cfg(test)]
        const ALL: &[&str] = &[$($name),*];
    };
}

errnos! {
    EACCES EADDRINUSE EADDRNOTAVAIL EAFNOSUPPORT EAGAIN EALREADY EBADF ECONNABORTED ECONNREFUSED ECONNRESET EHOSTUNREACH EINVAL
    EISCONN EMFILE EMSGSIZE ENETUNREACH ENFILE ENOBUFS ENOENT ENOMEM ENOTCONN EPERM EPIPE ETIMEDOUT
}

#[cfg(test)]
mod tests {
    use fourtuple_syscalls::Errno;

    use super::ALL;

    #[test]
    fn each_name_is_of_an_errno() {
        let names: Vec<_> = Errno::ALL.iter().filter_map(|errno| errno.name()).collect();
        let unknown: Vec<_> = ALL.iter().filter(|name| !names.contains(name)).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }
}
