//! A SO_REUSEPORT group of the server with its selector.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_bpf::FixAccept;
use fourtuple_bpf::fix_accept::{FoundSocket, GroupSelector, Learner};
use fourtuple_record::FixAcceptListener;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{Errno, option};

use crate::accept::discover;
use crate::accept::error::AcceptError;
use crate::accept::guard::Handle;
use crate::processes;

/// A socket of a group.
pub(super) struct Listener {
    pub(super) cookie: u64,
    /// Number of its entry in the maps.
    pub(super) entry: usize,
    /// Descriptors of processes that refer to the socket.
    pub(super) handles: Vec<Handle>,
    pub(super) process: u32,
    pub(super) command: String,
    pub(super) queue: u32,
}

/// A group. Two groups may have the same address: the old one and the new one of a restarted server.
pub(super) struct Group {
    /// Number that identifies the group in the kernel, also when it grows.
    pub(super) key: u64,
    pub(super) transport: Transport,
    pub(super) local: SocketAddr,
    /// `None` in a dry run.
    pub(super) selector: Option<GroupSelector>,
    pub(super) listeners: Vec<Listener>,
}

/// A socket that is about to join a group.
pub(super) struct Candidate {
    pub(super) transport: Transport,
    pub(super) local: SocketAddr,
    pub(super) cookie: u64,
    pub(super) queue: u32,
    pub(super) handles: Vec<Handle>,
    pub(super) found: FoundSocket,
}

impl Candidate {
    /// Returns `127.0.0.1:80 (TCP, nginx, process 7)`.
    pub(super) fn describe(&self) -> String {
        let process = discover::worker(&self.handles);
        let (transport, command) = (transport(self.transport).to_uppercase(), processes::command(process));
        format!("{} ({transport}, {command}, process {process})", self.local)
    }
}

/// Returns the name of a transport protocol in records.
pub(super) fn transport(transport: Transport) -> &'static str {
    match transport {
        Transport::Tcp => "tcp",
        Transport::Udp => "udp",
    }
}

impl Group {
    pub(super) fn entries(&self) -> Vec<usize> {
        self.listeners.iter().map(|listener| listener.entry).collect()
    }

    pub(super) fn handles(&self) -> Vec<Handle> {
        self.listeners.iter().flat_map(|listener| listener.handles.iter().copied()).collect()
    }

    /// Tells the selector which listeners are open.
    pub(super) fn update(&self) {
        if let Some(selector) = &self.selector {
            selector.set_members(&self.entries());
        }
    }

    /// Attaches the selector. Returns false if no process holds a socket of the group any more.
    pub(super) fn attach(&self) -> Result<bool, AcceptError> {
        let socket = duplicate(&self.handles())?;
        if let (Some(selector), Some(socket)) = (&self.selector, &socket) {
            selector.attach(socket.as_fd())?;
        }
        Ok(socket.is_some())
    }

    /// Returns whether the group of a socket is this one and has its selector.
    pub(super) fn is_group_of(&self, socket: &FoundSocket) -> bool {
        let own = self.selector.as_ref().and_then(|selector| selector.id().ok());
        let program = socket.program.as_ref().map(|program| program.id);
        socket.group == Some(self.key) && own.is_some() && own == program
    }

    /// Leaves the choice to the kernel's hash, until the selector is detached, and if it cannot be.
    pub(super) fn rest(&self) {
        if let Some(selector) = &self.selector {
            selector.set_members(&[]);
        }
    }

    /// Returns the row of a listener for the record.
    pub(super) fn row(
        &self,
        listener: &Listener,
        is_closed: bool,
        fix: &FixAccept,
    ) -> Result<FixAcceptListener, AcceptError> {
        let counts = fix.counts(listener.entry)?;
        Ok(FixAcceptListener {
            transport: transport(self.transport).to_owned(),
            address: self.local.to_string(),
            cookie: listener.cookie,
            process: listener.process,
            command: listener.command.clone(),
            choices: counts.chosen,
            connections: counts.connections,
            share: None,
            open: counts.open,
            queue: (!is_closed).then_some(listener.queue),
        })
    }
}

/// Detaches the programs from all groups of these sockets that have one of them; a socket is a list of its handles. Returns the groups
/// with another program, which stays.
pub(super) fn detach(
    learner: &Learner,
    sockets: &[Vec<Handle>],
    programs: &BTreeSet<u32>,
) -> Result<BTreeSet<u64>, AcceptError> {
    let (mut seen, mut others) = (BTreeSet::new(), BTreeSet::new());
    for handles in sockets {
        let Some(socket) = handles.iter().find_map(|handle| handle.duplicate().ok().flatten()) else {
            continue;
        };
        let found = learner.learn(socket.as_fd())?;
        let Some(group) = found.group.filter(|group| seen.insert(*group)) else { continue };
        match found.program {
            Some(program) if programs.contains(&program.id) => {
                // An error: the group has lost its program since.
                let _ = option::detach_group_selector(socket.as_fd());
            }
            Some(_) => _ = others.insert(group),
            None => {}
        }
    }
    Ok(others)
}

/// Duplicates the descriptor of a socket by the first of its handles that still refers to it. `None`: the socket is closed.
pub(super) fn duplicate(handles: &[Handle]) -> Result<Option<OwnedFd>, AcceptError> {
    let mut refused = None;
    for handle in handles {
        match handle.duplicate() {
            Ok(Some(socket)) => return Ok(Some(socket)),
            Ok(None) => {}
            Err(error) if is_gone(&error) => {}
            Err(source) => refused = Some(AcceptError::Duplicate { process: handle.process, source }),
        }
    }
    refused.map_or(Ok(None), Err)
}

/// Returns whether the process or its descriptor is gone.
fn is_gone(error: &io::Error) -> bool {
    matches!(Errno::of(error), Some(Errno::EBADF | Errno::ESRCH))
}
