//! What the errors of all modules share: which system calls may succeed later, and texts that do not repeat their source.

use std::error::Error;
use std::io;

use fourtuple_syscalls::Errno;

/// Returns whether the same system call may succeed later: the host may get descriptors, memory or a route.
pub(crate) fn is_temporary(error: &io::Error) -> bool {
    match error.kind() {
        io::ErrorKind::ConnectionAborted
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::HostUnreachable
        | io::ErrorKind::Interrupted
        | io::ErrorKind::NetworkDown
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::OutOfMemory
        | io::ErrorKind::WouldBlock => true,
        _ => matches!(Errno::of(error), Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS)),
    }
}

/// Returns whether the same system call of a server may succeed later: as [`is_temporary`], or another process may give up the address
/// (EADDRINUSE), the device (EBUSY) or watches of epoll (ENOSPC).
pub(crate) fn is_temporary_for_server(error: &io::Error) -> bool {
    is_temporary(error) || matches!(Errno::of(error), Some(Errno::EADDRINUSE | Errno::EBUSY | Errno::ENOSPC))
}

/// Returns whether [`is_temporary_for_server`] is true for the error of a system call in this chain of errors.
pub(crate) fn has_temporary_cause(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.downcast_ref::<io::Error>().is_some_and(is_temporary_for_server) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Display of an error does not repeat the text of its source: a report prints the whole chain.
#[cfg(test)]
mod texts {
    use std::error::Error;
    use std::io;
    use std::net::{IpAddr, Ipv4Addr, SocketAddr};
    use std::time::Duration;

    use fourtuple_syscalls::Errno;

    use crate::dial::{BuildError, DialError, SourcePool, Strategy, Uncounted};
    use crate::listen::{AcceptPolicy, Family, ListenError};
    use crate::ports::{PortRange, PortSet};
    use crate::spread::{ControlFilter, DeviceName, Selector, UdpGroupError};

    fn io_error() -> io::Error {
        io::Error::from(Errno::EACCES)
    }

    fn address() -> SocketAddr {
        (Ipv4Addr::LOCALHOST, 80).into()
    }

    fn source_address() -> IpAddr {
        Ipv4Addr::LOCALHOST.into()
    }

    fn dial_errors() -> Vec<DialError> {
        let (local, destination, source_address) = (address(), address(), Some(source_address()));
        vec![
            DialError::PortsExhausted {
                source_address,
                destination,
                attempts: 1,
                census: Err(Uncounted::NotAsked),
            },
            DialError::SourceNotLocal { source_address: Ipv4Addr::LOCALHOST.into() },
            DialError::TupleBusy { local, destination },
            DialError::WouldShadow { local, destination },
            DialError::Refused { destination, source_address },
            DialError::SelfConnect { destination },
            DialError::TimedOut { destination, source_address, after: Duration::from_secs(1) },
            DialError::NotSupported {
                option: "IP_LOCAL_PORT_RANGE",
                strategy: Strategy::FullRange.to_string(),
            },
            DialError::Call { call: "connect", address: destination, source_address, error: io_error() },
        ]
    }

    fn build_errors() -> Vec<BuildError> {
        vec![
            BuildError::PortZero { destination: address() },
            BuildError::Family { source_address: source_address(), destination: address() },
            BuildError::Device { name: "eth0".to_owned() },
            BuildError::SourcePort,
            BuildError::Range { error: io_error() },
        ]
    }

    fn listen_errors() -> Vec<ListenError> {
        let policy = AcceptPolicy::ROTATE;
        vec![
            ListenError::Impossible { policy, family: Family::Unix, why: "why" },
            ListenError::NotPermitted { policy, call: "io_uring_setup()", needs: "needs", error: io_error() },
            ListenError::Absent { policy, what: "what", error: io_error() },
            ListenError::NoDispatcher { policy, why: "why" },
            ListenError::NotBuilt { policy, feature: "bpf" },
            ListenError::Bpf { policy, error: io_error().into() },
            ListenError::Setting { setting: "max_workers", value: "0".to_owned(), accepted: "at least 1" },
            ListenError::Drained,
            ListenError::Full { seats: 1 },
            ListenError::NotASocket { path: "/tmp".into() },
            ListenError::PathInUse { path: "/tmp".into() },
            ListenError::NotMeasurable,
            ListenError::Adopted { why: "why", error: Some(io_error()) },
            ListenError::Call { call: "bind()", endpoint: address().into(), error: io_error() },
        ]
    }

    fn group_errors() -> Vec<UdpGroupError> {
        let (selector, address) = (Selector::Random, address());
        let (filter, device): (ControlFilter, DeviceName) =
            ("ttl=255".parse().unwrap(), "lo".parse().unwrap());
        vec![
            UdpGroupError::Members { members: 0 },
            UdpGroupError::Impossible { selector, why: "why" },
            UdpGroupError::NoControl { selector, filter, why: "why" },
            UdpGroupError::Absent { selector, what: "what", error: Some(io_error()) },
            UdpGroupError::NotPermitted { selector, call: "bpf()", needs: "needs", error: io_error() },
            UdpGroupError::NotBuilt { selector, feature: "bpf" },
            UdpGroupError::Bpf { selector, error: io_error().into() },
            UdpGroupError::NoDevice { selector, device, error: io_error() },
            UdpGroupError::WhichDevice { selector, address },
            UdpGroupError::Fixed { selector },
            UdpGroupError::Weights { given: vec![0], members: 1, why: "why" },
            UdpGroupError::NoMember { index: 1 },
            UdpGroupError::NotOne { selector, why: "why", error: Some(io_error()) },
            UdpGroupError::Call { call: "bind()", address, error: io_error() },
        ]
    }

    /// Errors of texts, of which no other variant has a source.
    fn parse_errors() -> Vec<Box<dyn Error>> {
        vec![
            Box::new("x".parse::<SourcePool>().unwrap_err()),
            Box::new("x".parse::<Strategy>().unwrap_err()),
            Box::new("x".parse::<AcceptPolicy>().unwrap_err()),
            Box::new("x".parse::<Selector>().unwrap_err()),
            Box::new("x".parse::<ControlFilter>().unwrap_err()),
            Box::new("".parse::<DeviceName>().unwrap_err()),
            Box::new("x".parse::<PortRange>().unwrap_err()),
            Box::new(PortSet::parse_list("x").unwrap_err()),
        ]
    }

    #[cfg(feature = "tokio")]
    fn connect_errors() -> Vec<Box<dyn Error>> {
        use crate::dial::ConnectError;
        let (host, uri) = ("example.org".to_owned(), "http://".to_owned());
        let refused =
            || ConnectError::Dial(DialError::Refused { destination: address(), source_address: None });
        let errors = [
            ConnectError::NoHost { uri: uri.clone() },
            ConnectError::NotHttp { uri },
            ConnectError::Resolve { host: host.clone(), error: io_error() },
            ConnectError::NoAddress { host: host.clone() },
            ConnectError::TimedOut { host: host.clone(), port: 80, after: Duration::from_secs(1) },
            ConnectError::Build(BuildError::Range { error: io_error() }),
            ConnectError::Dial(dial_errors().pop().unwrap()),
            ConnectError::AllFailed { host, failures: vec![refused(), refused()] },
        ];
        errors.into_iter().map(|error| Box::new(error) as Box<dyn Error>).collect()
    }

    #[cfg(not(feature = "tokio"))]
    fn connect_errors() -> Vec<Box<dyn Error>> {
        Vec::new()
    }

    #[test]
    fn display_does_not_contain_the_text_of_the_source() {
        fn boxed<E: Error + 'static>(errors: Vec<E>) -> impl Iterator<Item = Box<dyn Error>> {
            errors.into_iter().map(|error| Box::new(error) as Box<dyn Error>)
        }
        let errors = boxed(dial_errors())
            .chain(boxed(build_errors()))
            .chain(boxed(listen_errors()))
            .chain(boxed(group_errors()))
            .chain(parse_errors())
            .chain(connect_errors());
        let mut sources = 0;
        for error in errors {
            let mut error: &dyn Error = &*error;
            while let Some(source) = error.source() {
                assert!(!error.to_string().contains(&source.to_string()), "{error} repeats {source}");
                error = source;
                sources += 1;
            }
        }
        assert!(sources >= 15, "{sources} sources");
    }

    #[test]
    fn errors_become_io_errors_of_a_fitting_kind() {
        for error in listen_errors() {
            let expected = match &error {
                ListenError::NotPermitted { .. } | ListenError::Call { .. } => {
                    io::ErrorKind::PermissionDenied
                }
                ListenError::PathInUse { .. } => io::ErrorKind::AddrInUse,
                _ => continue,
            };
            let error = io::Error::from(error);
            assert_eq!(error.kind(), expected, "{error}");
            assert!(error.downcast::<ListenError>().is_ok());
        }
        for error in group_errors() {
            let expected = match &error {
                UdpGroupError::NotPermitted { .. } | UdpGroupError::Call { .. } => {
                    io::ErrorKind::PermissionDenied
                }
                UdpGroupError::Fixed { .. } => io::ErrorKind::Unsupported,
                _ => continue,
            };
            assert_eq!(io::Error::from(error).kind(), expected);
        }
    }

    #[test]
    fn errors_of_servers_tell_a_retry_from_a_change() {
        let policy = AcceptPolicy::Dispatcher;
        let is_exceptional = |error: &ListenError| {
            matches!(error, ListenError::Full { .. }) || matches!(error, ListenError::PathInUse { .. })
        };
        for error in listen_errors() {
            assert_eq!(error.is_retryable(), is_exceptional(&error), "{error}");
            assert_eq!(error.is_exhausted(), matches!(error, ListenError::Full { .. }), "{error}");
        }
        for error in group_errors() {
            assert!(!error.is_retryable() && !error.is_exhausted(), "{error}");
        }
        assert!(ListenError::NoDispatcher { policy, why: "why" }.is_retryable());
        let selector = Selector::Random;
        for errno in [Errno::EADDRINUSE, Errno::EMFILE, Errno::ENOSPC] {
            let cause = || io::Error::from(errno);
            for (call, port) in [("bind()", 0), ("bind()", 80), ("socket()", 0)] {
                let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
                let listen = ListenError::Call { call, endpoint: address.into(), error: cause() };
                let group = UdpGroupError::Call { call, address, error: cause() };
                let is_exhausted = (errno, call, port) == (Errno::EADDRINUSE, "bind()", 0);
                assert!(listen.is_retryable() && group.is_retryable(), "{listen}, {group}");
                assert_eq!(
                    [listen.is_exhausted(), group.is_exhausted()],
                    [is_exhausted; 2],
                    "{listen}, {group}"
                );
            }
            assert!(ListenError::Bpf { policy, error: cause().into() }.is_retryable());
            // As BpfError, which has the error of the call as its source.
            let error = Box::new(DialError::Call {
                call: "bpf()",
                address: address(),
                source_address: None,
                error: cause(),
            });
            assert!(UdpGroupError::Bpf { selector, error }.is_retryable());
        }
    }
}
