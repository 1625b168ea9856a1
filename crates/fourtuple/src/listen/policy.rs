//! Accept policies, address families and kinds of workers: the settings that every other file of `listen` uses.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use fourtuple_syscalls::Endpoint;

/// The address family of a listener.
///
/// ```
/// use fourtuple::listen::{Endpoint, Family};
///
/// assert_eq!(Family::of(&Endpoint::from(([127, 0, 0, 1], 80))), Family::Tcp4);
/// assert_eq!(Family::ALL.map(|family| family.to_string()), ["unix", "tcp4", "tcp6"]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums, reason = "mirrors the addresses of a listener")]
pub enum Family {
    /// AF_UNIX, SOCK_STREAM.
    Unix,
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
}

impl Family {
    /// Every address family.
    pub const ALL: [Family; 3] = [Family::Unix, Family::Tcp4, Family::Tcp6];

    /// Returns the family of an endpoint.
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

/// A text that names no family.
///
/// ```
/// use fourtuple::listen::Family;
///
/// let error = "udp".parse::<Family>().unwrap_err();
/// assert_eq!(error.to_string(), "\"udp\" is not a family: expected unix, tcp4 or tcp6");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a family: expected unix, tcp4 or tcp6")]
pub struct UnknownFamily(String);

impl FromStr for Family {
    type Err = UnknownFamily;

    fn from_str(text: &str) -> Result<Self, UnknownFamily> {
        let found = Family::ALL.into_iter().find(|family| family.to_string() == text);
        found.ok_or_else(|| UnknownFamily(text.to_owned()))
    }
}

/// The kind of workers of a group.
///
/// Example: [`ListenerGroupBuilder`](crate::listen::ListenerGroupBuilder).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Workers {
    /// Threads of this process.
    #[default]
    Threads,
    /// Threads with an async runtime each, which reads the requests of its connections itself: the workers of `AsyncAcceptor`.
    Runtimes,
    /// Processes, forked after [`ListenerGroupBuilder::open`](crate::listen::ListenerGroupBuilder::open), as by
    /// [`ListenerGroup::fork`](crate::listen::ListenerGroup::fork). A thread may join
    /// such a group too.
    Processes,
}

/// The way in which the workers of a group wait for connections and requests.
///
/// ```
/// use fourtuple::listen::{AcceptPolicy, Family, Workers};
///
/// let policy: AcceptPolicy = "rotate:16".parse()?;
/// assert_eq!((policy.name(), policy.mechanism()), ("rotate", AcceptPolicy::ROTATE.mechanism()));
/// assert!(policy.pins_connections() && !policy.has_listener_each());
/// assert_eq!(AcceptPolicy::UringOneshot.facility(), Some("io_uring"));
///
/// println!("one of {}", AcceptPolicy::names());
/// let possible = |policy: &AcceptPolicy| policy.check(Family::Unix, Workers::Threads).is_ok();
/// let over_unix: Vec<_> = AcceptPolicy::ALL.into_iter().filter(possible).collect();
/// assert!(!over_unix.contains(&AcceptPolicy::Reuseport)); // AF_UNIX has no SO_REUSEPORT
/// # Ok::<(), fourtuple::listen::AcceptPolicyError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AcceptPolicy {
    /// One epoll per worker; the shared listener is added with EPOLLEXCLUSIVE. The kernel always wakes the first idle worker
    /// in the order of joining.
    Exclusive,
    /// One epoll per worker, without a flag. The kernel wakes all waiting workers, and one of them gets the connection.
    Plain,
    /// Blocking accept(2). A worker serves one connection until that connection is closed.
    Blocking,
    /// Like `Exclusive`, but a worker removes the listener from its epoll and adds it again after every `every` accepts,
    /// before it serves the connection. Workers take turns.
    Rotate {
        /// Accepted connections after which the listener is added again.
        every: NonZeroU32,
    },
    /// One epoll for all workers, with the listener and every connection in it. An idle worker takes the next ready socket.
    SharedOneshot,
    /// A one-shot accept of io_uring, armed while the worker is idle. Workers take turns.
    UringOneshot,
    /// One listener per worker. The kernel's hash of the 4-tuple chooses a listener at the SYN.
    Reuseport,
    /// One listener per worker. A BPF program chooses the least busy worker's listener at the SYN.
    ReuseportLeastBusy,
    /// One thread accepts, waits for the first bytes and sends the descriptor to an idle worker.
    Dispatcher,
    /// The policy that [`ListenerGroup::choice`](crate::listen::ListenerGroup::choice) names for this family and these workers.
    Auto,
}

impl AcceptPolicy {
    /// `Rotate` after every connection.
    pub const ROTATE: AcceptPolicy = AcceptPolicy::Rotate { every: NonZeroU32::MIN };
}
