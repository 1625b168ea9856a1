use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fourtuple_syscalls::Endpoint;
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Transport};

use crate::listen::acceptor::Acceptor;
use crate::listen::auto::{self, Choice};
use crate::listen::break_even::BreakEven;
use crate::listen::dispatcher::Dispatcher;
use crate::listen::error::ListenError;
use crate::listen::fresh;
use crate::listen::lobby::Lobby;
use crate::listen::path::{self, OwnPath};
use crate::listen::policy::{Family, Policy};
use crate::listen::recycle::Recycle;
use crate::listen::seats::{Count, SeatStats, Seats};
use crate::listen::wait::{self, Common};

/// What the workers of a group are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Workers {
    /// Threads of this process.
    #[default]
    Threads,
    /// Processes, forked after [`Listen::open`]; a thread may be one too.
    Processes,
}

/// A group of workers that is yet to be opened.
#[derive(Clone, Debug)]
pub struct Listen {
    endpoint: Endpoint,
    policy: Policy,
    seats: usize,
    backlog: u32,
    workers: Workers,
    recycle: Recycle,
}

impl Listen {
    /// On this address or path, port 0 being any free one: [`Policy::Auto`], 64 seats, an accept queue of 4096, threads,
    /// connections kept until the client closes them.
    pub fn at(endpoint: Endpoint) -> Listen {
        Listen {
            endpoint,
            policy: Policy::Auto,
            seats: 64,
            backlog: 4096,
            workers: Workers::Threads,
            recycle: Recycle::Never,
        }
    }

    /// How workers wait.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Listen {
        self.policy = policy;
        self
    }

    /// The most workers at one time, at least 1; with [`Policy::ReuseportLeastBusy`] at most 64.
    #[must_use]
    pub fn seats(mut self, seats: usize) -> Listen {
        self.seats = seats.max(1);
        self
    }

    /// Length of each accept queue; the kernel cuts it to net.core.somaxconn without a word.
    #[must_use]
    pub fn backlog(mut self, backlog: u32) -> Listen {
        self.backlog = backlog;
        self
    }

    /// Threads or processes.
    #[must_use]
    pub fn workers(mut self, workers: Workers) -> Listen {
        self.workers = workers;
        self
    }

    /// When kept connections are closed.
    #[must_use]
    pub fn recycle(mut self, recycle: Recycle) -> Listen {
        self.recycle = recycle;
        self
    }

    /// Opens what the workers have in common. The sockets are in the network namespace of the calling thread.
    ///
    /// # Errors
    ///
    /// A policy that is impossible for the address, that this kernel has not got or does not permit; an address that
    /// cannot be had. Another policy is never used instead.
    pub fn open(self) -> Result<Group, ListenError> {
        let family = Family::of(&self.endpoint);
        let choice = auto::choose(self.policy, family, self.workers);
        choice.policy.check(family, self.workers)?;
        let failed = |call| {
            let endpoint = self.endpoint.clone();
            move |source| ListenError::Call { call, endpoint, source }
        };
        let seats = Arc::new(Seats::new(self.seats).map_err(failed("mmap()"))?);
        let lobby = Lobby::new().map_err(failed("socketpair()"))?;
        let backlog = i32::try_from(self.backlog).unwrap_or(i32::MAX);
        let (door, endpoint, path) = match &self.endpoint {
            Endpoint::Unix(path) => {
                let (listener, own) = path::bind_path(path, choice.policy != Policy::Blocking)?;
                socket::listen(listener.as_fd(), backlog).map_err(failed("listen()"))?;
                (Door::One(Arc::new(listener)), self.endpoint.clone(), Some(own))
            }
            Endpoint::Inet(_) => {
                let nonblocking = choice.policy != Policy::Blocking;
                // SO_REUSEPORT would let another server of the same user have a part of the connections, and nobody
                // would know. So the address is first bound as one that is not shared.
                let first = bound(&self.endpoint, false, nonblocking)?;
                if choice.policy.has_listener_each() {
                    drop(first);
                    let holder = bound(&self.endpoint, true, nonblocking)?;
                    let endpoint = local(&holder, &self.endpoint)?;
                    (Door::Each { _holder: holder, surplus: Mutex::default() }, endpoint, None)
                } else {
                    socket::listen(first.as_fd(), backlog).map_err(failed("listen()"))?;
                    let endpoint = local(&first, &self.endpoint)?;
                    (Door::One(Arc::new(first)), endpoint, None)
                }
            }
        };
        if self.recycle == Recycle::Measured {
            seats
                .scales()
                .set_fresh(fresh::measure(family).map_err(failed("a connection to measure its cost"))?);
        }
        let common = wait::common(choice.policy, &door, self.seats, &endpoint)?;
        let recycle = self.recycle;
        let inner = Inner {
            endpoint,
            family,
            choice,
            backlog,
            workers: self.workers,
            recycle,
            seats,
            lobby,
            door,
            common,
            _path: path,
        };
        Ok(Group(Arc::new(inner)))
    }
}

/// A TCP socket that is bound and does not listen yet.
fn bound(endpoint: &Endpoint, shared: bool, nonblocking: bool) -> Result<OwnedFd, ListenError> {
    let failed = |call| move |source| ListenError::Call { call, endpoint: endpoint.clone(), source };
    let Some(address) = endpoint.inet() else {
        return Err(failed("bind()")(io::ErrorKind::InvalidInput.into()));
    };
    let socket = socket::open(Transport::Tcp, address, nonblocking).map_err(failed("socket()"))?;
    // TIME_WAIT of an earlier server must not keep its address.
    option::set_reuse_address(socket.as_fd(), true).map_err(failed("SO_REUSEADDR"))?;
    // Accepted sockets have it from here. Else pipelined responses wait for the client's delayed ACK.
    option::set_no_delay(socket.as_fd()).map_err(failed("TCP_NODELAY"))?;
    if shared && option::set_reuse_port(socket.as_fd()).map_err(failed("SO_REUSEPORT"))? == Answer::Absent {
        return Err(failed("SO_REUSEPORT")(io::ErrorKind::Unsupported.into()));
    }
    socket::bind(socket.as_fd(), address).map_err(failed("bind()"))?;
    Ok(socket)
}

fn local(socket: &OwnedFd, endpoint: &Endpoint) -> Result<Endpoint, ListenError> {
    let failed = |source| ListenError::Call { call: "getsockname()", endpoint: endpoint.clone(), source };
    Ok(socket::local_address(socket.as_fd()).map_err(failed)?.into())
}

/// Whether the kernel moves connections from the queue of a listener that is closed to the others of its group
/// (net.ipv4.tcp_migrate_req, Linux 5.14).
fn migrates() -> bool {
    fs::read_to_string("/proc/sys/net/ipv4/tcp_migrate_req").is_ok_and(|value| value.trim() == "1")
}

/// Where connections come in.
#[derive(Debug)]
pub(crate) enum Door {
    /// One listener for all.
    One(Arc<OwnedFd>),
    /// One for each worker, opened when it joins.
    Each {
        /// Never listens: it keeps the port while no worker does.
        _holder: OwnedFd,
        /// Listeners of workers that left, each with a worker that looks after it until another one joins.
        surplus: Mutex<Vec<Ward>>,
    },
}

/// A listener that a worker looks after in the place of one that left.
#[derive(Clone, Debug)]
pub(crate) struct Ward {
    pub(crate) listener: Arc<OwnedFd>,
    /// Another worker has it now.
    claimed: Arc<AtomicBool>,
}

impl Ward {
    /// Takes it for good; `false`: somebody else was faster.
    fn claim(&self) -> bool {
        !self.claimed.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn is_claimed(&self) -> bool {
        self.claimed.load(Ordering::Acquire)
    }
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) endpoint: Endpoint,
    pub(crate) family: Family,
    pub(crate) choice: Choice,
    backlog: i32,
    workers: Workers,
    pub(crate) recycle: Recycle,
    pub(crate) seats: Arc<Seats>,
    pub(crate) lobby: Lobby,
    door: Door,
    pub(crate) common: Common,
    _path: Option<OwnPath>,
}

/// What the workers of an address have in common. Clones are the same group; the last one closes it.
#[derive(Clone, Debug)]
pub struct Group(pub(crate) Arc<Inner>);

impl Group {
    /// Where it listens, with the port it was given.
    pub fn endpoint(&self) -> &Endpoint {
        &self.0.endpoint
    }

    /// The family of its address.
    pub fn family(&self) -> Family {
        self.0.family
    }

    /// How its workers wait.
    pub fn policy(&self) -> Policy {
        self.0.choice.policy
    }

    /// The policy, and why it is that.
    pub fn choice(&self) -> Choice {
        self.0.choice
    }

    /// Takes the lowest free seat. Where order matters (`Exclusive` wakes the same worker first) it is the order of these
    /// calls, whichever threads the acceptors go to afterwards.
    ///
    /// # Errors
    ///
    /// No seat is free, or a call failed.
    pub fn join(&self) -> Result<Acceptor, ListenError> {
        Acceptor::join(self)
    }

    /// What accepts for the workers, where the policy is [`Policy::Dispatcher`]. It is one for all, and they wait until it
    /// [runs](Dispatcher::run); call this in the process in which it will.
    ///
    /// # Errors
    ///
    /// Another policy; a dispatcher that was given out and not dropped; a call failed.
    pub fn dispatcher(&self) -> Result<Dispatcher, ListenError> {
        Dispatcher::of(self)
    }

    /// Gives a seat back whose worker died without leaving. Whoever knows that it died (the parent, after waitpid(2)) may
    /// do so.
    pub fn vacate(&self, seat: usize) {
        if seat < self.0.seats.count() {
            // They went with it. Else whoever takes the seat looks busier than the others for ever.
            self.0.seats.set(seat, Count::Open, 0);
            self.0.seats.free(seat);
        }
    }

    /// What has been done in each seat, whoever had it.
    pub fn stats(&self) -> Vec<SeatStats> {
        self.0.seats.stats()
    }

    /// What a fresh connection costs and what kept ones wait, and so whether they are closed: with [`Recycle::Measured`].
    pub fn break_even(&self) -> Option<BreakEven> {
        self.is_measured().then(|| self.0.seats.scales().report())
    }

    pub(crate) fn is_measured(&self) -> bool {
        self.0.recycle == Recycle::Measured
    }

    /// The listener of a worker: the one there is; or one that a worker left behind; or a new one that listens already.
    pub(crate) fn listener(&self) -> Result<Arc<OwnedFd>, ListenError> {
        let surplus = match &self.0.door {
            Door::One(listener) => return Ok(Arc::clone(listener)),
            Door::Each { surplus, .. } => surplus,
        };
        while let Some(ward) = surplus.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            if ward.claim() {
                return Ok(ward.listener);
            }
        }
        if let Some(listener) = self.0.lobby.take_listener().map_err(self.failed("recvmsg()"))? {
            return Ok(Arc::new(listener));
        }
        let listener = bound(&self.0.endpoint, true, true)?;
        socket::listen(listener.as_fd(), self.0.backlog).map_err(self.failed("listen()"))?;
        Ok(Arc::new(listener))
    }

    /// A listener that was left behind gets a worker that looks after it, until another one joins.
    pub(crate) fn look_after(&self, listener: OwnedFd) -> Ward {
        let ward = Ward { listener: Arc::new(listener), claimed: Arc::default() };
        if let Door::Each { surplus, .. } = &self.0.door {
            surplus.lock().unwrap_or_else(PoisonError::into_inner).push(ward.clone());
        }
        ward
    }

    /// The listener of a worker that leaves, with everybody in its queue: another worker looks after it until one joins.
    /// Processes do not know who has joined, and would look after more and more of them: where the kernel gives the queue to
    /// the other listeners (tcp_migrate_req), theirs are closed, although it then resets a connection now and then whose
    /// handshake is under way.
    pub(crate) fn leave_behind(&self, seat: usize, listener: &OwnedFd) -> Result<(), ListenError> {
        if self.0.workers == Workers::Processes && self.0.seats.has_others(seat) && migrates() {
            return Ok(());
        }
        self.0.lobby.put_listener(listener.as_fd()).map(drop).map_err(self.failed("sendmsg()"))
    }

    /// The same for one that was looked after.
    pub(crate) fn leave_ward(&self, seat: usize, ward: &Ward) -> Result<(), ListenError> {
        if ward.claim() { self.leave_behind(seat, &ward.listener) } else { Ok(()) }
    }

    pub(crate) fn failed(&self, call: &'static str) -> impl Fn(io::Error) -> ListenError + use<> {
        let endpoint = self.0.endpoint.clone();
        move |source| ListenError::Call { call, endpoint: endpoint.clone(), source }
    }
}
