//! The ways to wait, by name.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use fourtuple_syscalls::Endpoint;

use crate::listen::error::ListenError;
use crate::listen::group::Workers;

/// What a listener is reached by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// AF_UNIX, SOCK_STREAM.
    Unix,
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
}

impl Family {
    /// All of them.
    pub const ALL: [Family; 3] = [Family::Unix, Family::Tcp4, Family::Tcp6];

    /// The family of an endpoint.
    pub fn of(endpoint: &Endpoint) -> Family {
        match endpoint.inet() {
            None => Family::Unix,
            Some(address) if address.is_ipv4() => Family::Tcp4,
            Some(_) => Family::Tcp6,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Family::Unix => "unix",
            Family::Tcp4 => "tcp4",
            Family::Tcp6 => "tcp6",
        })
    }
}

impl FromStr for Family {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Family::ALL.into_iter().find(|family| family.to_string() == text);
        found.ok_or_else(|| "expected unix, tcp4 or tcp6".to_owned())
    }
}

/// How the workers of a group wait for work, each in a file of its own under `listen/wait`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// An epoll per worker, EPOLLEXCLUSIVE on the shared listener: always the same worker first, then the next: the ladder.
    Exclusive,
    /// An epoll per worker, nothing else: all are woken, one gets it.
    Plain,
    /// accept() that blocks; a worker is its one connection's until that ends.
    Blocking,
    /// As `Exclusive`, but the listener is added anew after every so many connections, before they are served: workers take
    /// turns.
    Rotate {
        /// Connections between two such moments.
        every: NonZeroU32,
    },
    /// One epoll for all workers, with the listener and every connection in it: whoever is idle takes what is next.
    SharedOneshot,
    /// A one-shot accept of io_uring, armed while the worker is idle: workers take turns.
    UringOneshot,
    /// A listener per worker; the kernel's hash of the 4-tuple chooses at the SYN.
    Reuseport,
    /// A listener per worker; a BPF program chooses the one with the least to do, at the SYN.
    ReuseportLeastBusy,
    /// One thread accepts, waits for the first bytes, and hands the descriptor to a worker that is idle.
    Dispatcher,
    /// The best for this family, on this kernel.
    Auto,
}

impl Policy {
    /// `Rotate` after every connection.
    pub const ROTATE: Policy = Policy::Rotate { every: NonZeroU32::MIN };

    /// All that wait; `Auto` is none of them.
    pub const ALL: [Policy; 9] = [
        Policy::Exclusive,
        Policy::Plain,
        Policy::Blocking,
        Policy::ROTATE,
        Policy::SharedOneshot,
        Policy::UringOneshot,
        Policy::Reuseport,
        Policy::ReuseportLeastBusy,
        Policy::Dispatcher,
    ];

    fn name(self) -> &'static str {
        match self {
            Policy::Exclusive => "exclusive",
            Policy::Plain => "plain",
            Policy::Blocking => "blocking",
            Policy::Rotate { .. } => "rotate",
            Policy::SharedOneshot => "shared-oneshot",
            Policy::UringOneshot => "uring-oneshot",
            Policy::Reuseport => "reuseport",
            Policy::ReuseportLeastBusy => "reuseport-least-busy",
            Policy::Dispatcher => "dispatcher",
            Policy::Auto => "auto",
        }
    }

    /// What the kernel calls it: `EPOLLEXCLUSIVE`, `SO_REUSEPORT`.
    pub fn mechanism(self) -> &'static str {
        match self {
            Policy::Exclusive => "EPOLLEXCLUSIVE",
            Policy::Plain => "epoll",
            Policy::Blocking => "accept()",
            Policy::Rotate { .. } => "EPOLLEXCLUSIVE, added anew",
            Policy::SharedOneshot => "one epoll, EPOLLONESHOT",
            Policy::UringOneshot => "io_uring, one-shot accept",
            Policy::Reuseport => "SO_REUSEPORT",
            Policy::ReuseportLeastBusy => "SO_REUSEPORT with BPF",
            Policy::Dispatcher => "SCM_RIGHTS",
            Policy::Auto => "to be chosen",
        }
    }

    /// Whether every worker has a listener of its own.
    pub fn has_listener_each(self) -> bool {
        matches!(self, Policy::Reuseport | Policy::ReuseportLeastBusy)
    }

    /// Refuses what no kernel can do.
    ///
    /// # Errors
    ///
    /// [`ListenError::Impossible`], with the reason.
    pub fn check(self, family: Family, workers: Workers) -> Result<(), ListenError> {
        let impossible = |why| Err(ListenError::Impossible { policy: self, family, why });
        if self.has_listener_each() && family == Family::Unix {
            return impossible("AF_UNIX has no SO_REUSEPORT (EOPNOTSUPP)");
        }
        if self == Policy::SharedOneshot && workers == Workers::Processes {
            return impossible("a connection that one process accepted is not a descriptor of the others");
        }
        Ok(())
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Policy::Rotate { every } if every.get() > 1 => formatter.pad(&format!("rotate:{every}")),
            _ => formatter.pad(self.name()),
        }
    }
}

/// A name that is no policy, or one that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// No such name.
    #[error(
        "expected exclusive, plain, blocking, rotate, rotate:N, shared-oneshot, uring-oneshot, reuseport, \
         reuseport-least-busy, dispatcher or auto"
    )]
    Unknown,
    /// A number of connections that is none.
    #[error("rotate:N has N from 1 to 4294967295")]
    Every,
    /// Multishot accepts on a listener that workers share.
    #[error(
        "a multishot accept stays first in the listener's queue: the first worker would get every connection, also while \
         it is busy; use uring-oneshot"
    )]
    Multishot,
}

impl FromStr for Policy {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        if text == "uring-multishot" {
            return Err(PolicyError::Multishot);
        }
        if let Some(every) = text.strip_prefix("rotate:") {
            return every.parse().map(|every| Policy::Rotate { every }).map_err(|_| PolicyError::Every);
        }
        let mut known = Policy::ALL.into_iter().chain([Policy::Auto]);
        known.find(|policy| policy.name() == text).ok_or(PolicyError::Unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for policy in Policy::ALL.into_iter().chain([Policy::Auto]) {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        let every = NonZeroU32::new(16).unwrap();
        assert_eq!("rotate:16".parse(), Ok(Policy::Rotate { every }));
        assert_eq!(Policy::Rotate { every }.to_string(), "rotate:16");
        assert_eq!("rotate:0".parse::<Policy>(), Err(PolicyError::Every));
        assert_eq!("roundrobin".parse::<Policy>(), Err(PolicyError::Unknown));
        assert!("uring-multishot".parse::<Policy>().unwrap_err().to_string().contains("use uring-oneshot"));
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_reason() {
        let refused = Policy::Reuseport.check(Family::Unix, Workers::Threads).unwrap_err().to_string();
        assert_eq!(refused, "reuseport is not possible over unix: AF_UNIX has no SO_REUSEPORT (EOPNOTSUPP)");
        assert!(Policy::SharedOneshot.check(Family::Tcp4, Workers::Processes).is_err());
        for family in Family::ALL {
            assert!(Policy::ROTATE.check(family, Workers::Processes).is_ok());
            assert_eq!(family.to_string().parse(), Ok(family));
        }
    }
}
