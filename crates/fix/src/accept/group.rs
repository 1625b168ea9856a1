//! A SO_REUSEPORT group of the server with its selector.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, PipeReader};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_bpf::FixAccept;
use fourtuple_bpf::fix_accept::{FoundSocket, GroupSelector, Learner};
use fourtuple_record::FixAcceptListener;
use fourtuple_syscalls::fork::Guard;
use fourtuple_syscalls::pidfd::Pidfd;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{Errno, netns, option};

use crate::accept::{AcceptError, AcceptTarget, discover};

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
        discover::describe_with(self.transport, self.local, &self.handles)
    }
}

/// Returns the name of a transport protocol in records.
pub(super) fn transport_name(transport: Transport) -> &'static str {
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
            transport: transport_name(self.transport).to_owned(),
            address: self.local.to_string(),
            cookie: listener.cookie,
            process: listener.process,
            command: listener.command.clone(),
            choices: counts.chosen,
            connections: counts.connections,
            moves: 0,
            share: None,
            open: Some(counts.open),
            queue: (!is_closed).then_some(listener.queue),
        })
    }
}

/// What [`detach`] found.
#[derive(Debug)]
pub(super) struct Detached {
    /// The groups with another program, which stays.
    pub(super) others: BTreeSet<u64>,
    /// Whether each socket could be examined.
    pub(super) is_complete: bool,
}

/// Detaches the programs from all groups of these sockets that have one of them; a socket is a list of its handles.
pub(super) fn detach(
    learner: &Learner,
    sockets: &[Vec<Handle>],
    programs: &BTreeSet<u32>,
) -> Result<Detached, AcceptError> {
    let mut seen = BTreeSet::new();
    let mut detached = Detached { others: BTreeSet::new(), is_complete: true };
    for handles in sockets {
        let socket = match duplicate(handles) {
            Ok(Some(socket)) => socket,
            Ok(None) => continue,
            // No descriptor is left.
            Err(_) => {
                detached.is_complete = false;
                continue;
            }
        };
        let found = learner.learn(socket.as_fd())?;
        let Some(group) = found.group.filter(|group| seen.insert(*group)) else { continue };
        match found.program {
            Some(program) if programs.contains(&program.id) => {
                // An error: the group has lost its program since.
                let _ = option::detach_group_selector(socket.as_fd());
            }
            Some(_) => _ = detached.others.insert(group),
            None => {}
        }
    }
    Ok(detached)
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

// A process that detaches the selectors when this process has ended, in any way.
//
// A group keeps its selector when the process that attached the selector is killed. Without a heartbeat the selector leaves the
// choice to the kernel's hash, but it stays attached; the guard removes it as well.

/// The line that ends a text.
const END: &str = ".";

/// A descriptor of a process that refers to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle {
    pub(super) process: u32,
    pub(super) descriptor: i32,
    pub(super) cookie: u64,
}

impl Handle {
    /// Returns whether the process has ended or has closed the descriptor.
    pub(super) fn is_stale(&self) -> bool {
        fs::symlink_metadata(format!("/proc/{}/fd/{}", self.process, self.descriptor)).is_err()
    }

    /// Duplicates the descriptor. `None` if it does not refer to the socket any more. The caller must close the duplicate at once:
    /// the server's own close() does not close the socket as long as the duplicate exists.
    pub(super) fn duplicate(&self) -> io::Result<Option<OwnedFd>> {
        let socket = Pidfd::of_process(self.process)?.duplicate(self.descriptor)?;
        Ok((option::cookie(socket.as_fd()).ok() == Some(self.cookie)).then_some(socket))
    }
}

/// The programs and the addresses that the guard needs to find the groups with selectors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Attached {
    /// Ids of the selectors' programs.
    pub(super) programs: BTreeSet<u32>,
    /// The addresses of the server. The sockets there are listed at the end, since a group may have others by then.
    pub(super) addresses: BTreeSet<(Transport, SocketAddr)>,
}

/// Starts the guard, before this process has a second thread and before it holds BPF objects.
pub(super) fn guard(target: &AcceptTarget) -> io::Result<Guard> {
    Guard::start(c"fourtuple-guard", |pipe| watch(target, pipe))
}

/// Reads until the pipe ends, and detaches the selectors that are attached then, but no program that the server attached meanwhile.
fn watch(target: &AcceptTarget, pipe: PipeReader) -> i32 {
    if let AcceptTarget::Process(process) = target {
        // A process that is gone has no namespace, and this process reports that.
        let Ok(namespace) = File::open(format!("/proc/{process}/ns/net")) else { return 1 };
        if netns::enter(namespace.as_fd()).is_err() {
            return 1;
        }
    }
    let attached = Attached::last(BufReader::new(pipe));
    if attached.programs.is_empty() {
        return 0;
    }
    // Loaded only now: until then the guard holds nothing of BPF.
    let Ok(learner) = Learner::load() else { return 1 };
    let Ok(members) = discover::members(&attached.addresses) else { return 1 };
    let sockets: Vec<Vec<Handle>> = discover::handles(&members).into_values().collect();
    i32::from(detach(&learner, &sockets, &attached.programs).is_err())
}

impl Attached {
    pub(super) fn text(&self) -> String {
        let programs = self.programs.iter().map(|program| format!("{program}\n"));
        let addresses = self.addresses.iter();
        let addresses =
            addresses.map(|(transport, address)| format!("{} {address}\n", transport_name(*transport)));
        programs.chain(addresses).chain([format!("{END}\n")]).collect()
    }

    /// Returns the last complete text.
    fn last(lines: impl BufRead) -> Attached {
        let (mut complete, mut next) = (Attached::default(), Attached::default());
        for line in lines.lines().map_while(Result::ok) {
            if line == END {
                complete = std::mem::take(&mut next);
            } else if let Ok(program) = line.parse() {
                next.programs.insert(program);
            } else if let Some(address) = parse(&line) {
                next.addresses.insert(address);
            }
        }
        complete
    }
}

fn parse(line: &str) -> Option<(Transport, SocketAddr)> {
    let (name, address) = line.split_once(' ')?;
    let transport =
        [Transport::Tcp, Transport::Udp].into_iter().find(|transport| transport_name(*transport) == name)?;
    Some((transport, address.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_complete_text_counts() {
        let attached = Attached {
            programs: [7, 9].into(),
            addresses: [
                (Transport::Tcp, "127.0.0.1:80".parse().unwrap()),
                (Transport::Udp, "[fe80::1%3]:53".parse().unwrap()),
            ]
            .into(),
        };
        let text = attached.text();
        assert_eq!(Attached::last(text.as_bytes()), attached);
        let cut = format!("{text}8\nudp 127.0.0.1:81\n");
        assert_eq!(Attached::last(cut.as_bytes()), attached, "an incomplete text does not count");
        assert_eq!(Attached::last(format!("{cut}.\n.\n").as_bytes()), Attached::default());
        assert_eq!(Attached::last("word\nsctp 1.1.1.1:1\n.\n".as_bytes()), Attached::default());
    }
}
