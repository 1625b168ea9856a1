//! Accept policies, address families and kinds of workers: the settings that every other file of `listen` uses.

use std::fmt;
use std::mem;
use std::num::NonZeroU32;
use std::str::FromStr;

use fourtuple_syscalls::Endpoint;

use crate::listen::ListenError;
use crate::listen::wait::{
    Preparation, Seat, SharedState, Wait, blocking, dispatcher, least_busy, pool, shared_oneshot,
    uring_oneshot,
};

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

/// An accept policy and the reason for it.
///
/// Example: [`ListenerGroup`](crate::listen::ListenerGroup).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PolicyChoice {
    /// The policy.
    pub policy: AcceptPolicy,
    /// The reason, as a phrase.
    pub why: &'static str,
}

impl fmt::Display for PolicyChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.policy, self.why)
    }
}

/// Returns the requested policy, or the one for `Auto`.
///
/// The policies for `Auto` work on every kernel from 5.15: EPOLLEXCLUSIVE is from 4.5, EPOLLONESHOT from 2.6.
pub(crate) fn choose(requested: AcceptPolicy, _family: Family, workers: Workers) -> PolicyChoice {
    match (requested, workers) {
        (AcceptPolicy::Auto, Workers::Threads) => PolicyChoice {
            policy: AcceptPolicy::SharedOneshot,
            why: "threads can share one epoll of listener and connections, so that no request waits behind a busy worker \
                  while another is idle (with Workers::Threads; a runtime reads the requests of its connections itself)",
        },
        (AcceptPolicy::Auto, Workers::Runtimes) => PolicyChoice {
            policy: AcceptPolicy::ROTATE,
            why: "a runtime keeps its connections; workers take turns, so that each runtime gets as many connections",
        },
        (AcceptPolicy::Auto, Workers::Processes) => PolicyChoice {
            policy: AcceptPolicy::ROTATE,
            why: "processes cannot share connections; they take turns because each adds the listener again after an accept",
        },
        (policy, _) => PolicyChoice { policy, why: "as requested" },
    }
}

// The table of accept policies.
//
// Names, parsing, help texts, checks and constructors all derive from a policy's row. A new policy is a variant of
// [`AcceptPolicy`], its waiter in `listen/wait` and a row here.

/// The properties of one accept policy.
struct Row {
    policy: AcceptPolicy,
    /// The name on the command line and in records.
    name: &'static str,
    /// The system call, flag or option that the policy relies on.
    mechanism: &'static str,
    /// Whether every worker has its own listener (SO_REUSEPORT).
    listener_each: bool,
    /// Whether a kept connection stays with its worker while other workers may be idle.
    pins: bool,
    /// The kernel facility without which [`ListenerGroupBuilder::open`](crate::listen::ListenerGroupBuilder::open) fails.
    facility: Option<&'static str>,
    /// Returns the reason if no kernel can run the policy with this family and these workers.
    refusal: fn(Family, Workers) -> Option<&'static str>,
    /// Creates the state that the workers share, before the first worker joins.
    prepare: fn(&Preparation<'_>) -> Result<SharedState, ListenError>,
    /// Creates the waiter of a worker that joins.
    open: fn(&Seat) -> Result<Box<dyn Wait>, ListenError>,
}

/// The row of `Auto`; every other row starts from its values.
const AUTO: Row = Row {
    policy: AcceptPolicy::Auto,
    name: "auto",
    mechanism: "chosen when the group is opened",
    listener_each: false,
    pins: false,
    facility: None,
    refusal: |_, _| None,
    prepare: |_| Ok(SharedState::None),
    // The builder replaces `Auto` before a worker can join.
    open: shared_oneshot::open,
};

const TABLE: [Row; 9] = [
    Row {
        policy: AcceptPolicy::Exclusive,
        name: "exclusive",
        mechanism: "EPOLLEXCLUSIVE",
        pins: true,
        open: pool::exclusive,
        ..AUTO
    },
    Row {
        policy: AcceptPolicy::Plain,
        name: "plain",
        mechanism: "epoll",
        pins: true,
        open: pool::plain,
        ..AUTO
    },
    Row {
        policy: AcceptPolicy::Blocking,
        name: "blocking",
        mechanism: "accept()",
        prepare: blocking::prepare,
        open: blocking::open,
        ..AUTO
    },
    Row {
        policy: AcceptPolicy::ROTATE,
        name: "rotate",
        mechanism: "EPOLLEXCLUSIVE, re-added",
        pins: true,
        open: pool::rotate,
        ..AUTO
    },
    Row {
        policy: AcceptPolicy::SharedOneshot,
        name: "shared-oneshot",
        mechanism: "one epoll, EPOLLONESHOT",
        refusal: threads_only,
        prepare: shared_oneshot::prepare,
        open: shared_oneshot::open,
        ..AUTO
    },
    Row {
        policy: AcceptPolicy::UringOneshot,
        name: "uring-oneshot",
        mechanism: "io_uring, one-shot accept",
        pins: true,
        facility: Some("io_uring"),
        prepare: uring_oneshot::prepare,
        open: uring_oneshot::open,
        ..AUTO
    },
    Row {
        policy: AcceptPolicy::Reuseport,
        name: "reuseport",
        mechanism: "SO_REUSEPORT",
        listener_each: true,
        pins: true,
        refusal: tcp_only,
        open: pool::reuseport,
        ..AUTO
    },
    Row {
        policy: AcceptPolicy::ReuseportLeastBusy,
        name: "reuseport-least-busy",
        mechanism: "SO_REUSEPORT with BPF",
        listener_each: true,
        pins: true,
        facility: Some("bpf"),
        refusal: tcp_only,
        prepare: least_busy::prepare,
        open: least_busy::open,
    },
    Row {
        policy: AcceptPolicy::Dispatcher,
        name: "dispatcher",
        mechanism: "SCM_RIGHTS",
        prepare: dispatcher::prepare,
        open: dispatcher::open,
        ..AUTO
    },
];

fn tcp_only(family: Family, _workers: Workers) -> Option<&'static str> {
    (family == Family::Unix).then_some("AF_UNIX has no SO_REUSEPORT (EOPNOTSUPP)")
}

fn threads_only(_family: Family, workers: Workers) -> Option<&'static str> {
    (workers == Workers::Processes)
        .then_some("a connection that one process accepted has no descriptor in the other processes")
}

impl AcceptPolicy {
    /// Every policy except `Auto`, in the order of the table.
    pub const ALL: [AcceptPolicy; TABLE.len()] = {
        let mut all = [AcceptPolicy::Auto; TABLE.len()];
        let mut index = 0;
        while index < all.len() {
            all[index] = TABLE[index].policy;
            index += 1;
        }
        all
    };

    fn row(self) -> &'static Row {
        // `Rotate` has one row for every value of `every`.
        let is_same = |row: &&Row| mem::discriminant(&row.policy) == mem::discriminant(&self);
        const ROWS: &[Row] = &TABLE;
        ROWS.iter().find(is_same).unwrap_or(&AUTO)
    }

    /// Returns the name of the policy without its parameters, such as `rotate` for `rotate:16`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the names that [`FromStr`] accepts, separated by commas.
    pub fn names() -> String {
        let mut names = Vec::new();
        for policy in AcceptPolicy::ALL {
            names.push(policy.name());
            if policy == AcceptPolicy::ROTATE {
                names.push("rotate:N");
            }
        }
        names.push(AcceptPolicy::Auto.name());
        names.join(", ")
    }

    /// Returns the system call, flag or option that the policy relies on, such as `EPOLLEXCLUSIVE` or `SO_REUSEPORT`.
    pub fn mechanism(self) -> &'static str {
        self.row().mechanism
    }

    /// Returns whether every worker has its own listener.
    pub fn has_listener_each(self) -> bool {
        self.row().listener_each
    }

    /// Returns whether a kept connection stays with its worker, so that its next request may wait for this worker while another
    /// worker is idle. `false` for `Blocking`, whose worker has no other connection.
    pub fn pins_connections(self) -> bool {
        self.row().pins
    }

    /// Returns the kernel facility that the policy needs and that a host may lack or forbid: `io_uring` or `bpf`.
    pub fn facility(self) -> Option<&'static str> {
        self.row().facility
    }

    /// Checks that the policy can work with this family and these workers on some kernel.
    ///
    /// # Errors
    ///
    /// [`ListenError::Impossible`], with the reason.
    pub fn check(self, family: Family, workers: Workers) -> Result<(), ListenError> {
        match (self.row().refusal)(family, workers) {
            Some(why) => Err(ListenError::Impossible { policy: self, family, why }),
            None => Ok(()),
        }
    }

    /// Creates the state that the workers of a group share.
    pub(crate) fn prepare(self, preparation: &Preparation<'_>) -> Result<SharedState, ListenError> {
        (self.row().prepare)(preparation)
    }
}

/// Creates the waiter of a worker that joins.
pub(crate) fn open_waiter(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    (seat.group.policy().row().open)(seat)
}

impl fmt::Display for AcceptPolicy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AcceptPolicy::Rotate { every } if every.get() > 1 => formatter.pad(&format!("rotate:{every}")),
            _ => formatter.pad(self.name()),
        }
    }
}

/// The error for a text that names no accept policy.
///
/// ```
/// use fourtuple::listen::{AcceptPolicy, AcceptPolicyError};
///
/// assert_eq!("rotate:0".parse::<AcceptPolicy>(), Err(AcceptPolicyError::Every));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AcceptPolicyError {
    /// No policy has this name.
    #[error("expected one of {}", AcceptPolicy::names())]
    Unknown,
    /// The N of `rotate:N` is not a number of connections.
    #[error("rotate:N has N from 1 to 4294967295")]
    Every,
    /// The text asks for multishot accepts on a listener that workers share.
    #[error(
        "a multishot accept stays first in the listener's queue: the first worker would get every connection, also while \
         it is busy; use uring-oneshot"
    )]
    Multishot,
}

impl FromStr for AcceptPolicy {
    type Err = AcceptPolicyError;

    fn from_str(text: &str) -> Result<Self, AcceptPolicyError> {
        if text == "uring-multishot" {
            return Err(AcceptPolicyError::Multishot);
        }
        if let Some(every) = text.strip_prefix("rotate:") {
            return every
                .parse()
                .map(|every| AcceptPolicy::Rotate { every })
                .map_err(|_| AcceptPolicyError::Every);
        }
        let mut known = AcceptPolicy::ALL.into_iter().chain([AcceptPolicy::Auto]);
        known.find(|policy| policy.name() == text).ok_or(AcceptPolicyError::Unknown)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    #[test]
    fn auto_chooses_a_possible_policy() {
        for family in Family::ALL {
            for workers in [Workers::Threads, Workers::Runtimes, Workers::Processes] {
                let choice = choose(AcceptPolicy::Auto, family, workers);
                assert!(choice.policy.check(family, workers).is_ok(), "{choice}");
            }
        }
        assert_eq!(choose(AcceptPolicy::Plain, Family::Unix, Workers::Threads).policy, AcceptPolicy::Plain);
    }

    #[test]
    fn every_name_parses_to_its_policy() {
        for policy in AcceptPolicy::ALL.into_iter().chain([AcceptPolicy::Auto]) {
            assert_eq!(policy.to_string().parse(), Ok(policy));
            assert!(AcceptPolicy::names().split(", ").any(|name| name == policy.name()), "{policy}");
        }
        let every = NonZeroU32::new(16).unwrap();
        assert_eq!("rotate:16".parse(), Ok(AcceptPolicy::Rotate { every }));
        assert_eq!(AcceptPolicy::Rotate { every }.to_string(), "rotate:16");
        assert_eq!(AcceptPolicy::Rotate { every }.mechanism(), AcceptPolicy::ROTATE.mechanism());
        assert_eq!("rotate:0".parse::<AcceptPolicy>(), Err(AcceptPolicyError::Every));
        assert_eq!("roundrobin".parse::<AcceptPolicy>(), Err(AcceptPolicyError::Unknown));
        assert!(
            "uring-multishot".parse::<AcceptPolicy>().unwrap_err().to_string().contains("use uring-oneshot")
        );
    }

    #[test]
    fn impossible_combinations_are_refused_with_the_reason() {
        let refused = AcceptPolicy::Reuseport.check(Family::Unix, Workers::Threads).unwrap_err().to_string();
        assert_eq!(refused, "reuseport is not possible over unix: AF_UNIX has no SO_REUSEPORT (EOPNOTSUPP)");
        assert!(AcceptPolicy::SharedOneshot.check(Family::Tcp4, Workers::Processes).is_err());
        for family in Family::ALL {
            assert!(AcceptPolicy::ROTATE.check(family, Workers::Processes).is_ok());
            assert_eq!(family.to_string().parse(), Ok(family));
        }
    }
}
