//! A process that detaches the selectors when this process has ended, in any way.
//!
//! A group keeps its selector when the process that attached the selector is killed. Without a heartbeat the selector leaves the
//! choice to the kernel's hash, but it stays attached; the guard removes it as well.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_bpf::fix_accept::Learner;
use fourtuple_syscalls::fork::{self, Process};
use fourtuple_syscalls::pidfd::Pidfd;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{netns, option};

use crate::accept::settings::AcceptTarget;
use crate::accept::{discover, group};

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

pub(super) struct Guard {
    process: Process,
    pipe: PipeWriter,
}

impl Guard {
    /// Starts the guard, before this process has a second thread and before it holds BPF objects.
    pub(super) fn start(target: AcceptTarget) -> io::Result<Guard> {
        let (process, pipe) = fork::run_beside(c"fourtuple-guard", |pipe| watch(target, pipe))?;
        Ok(Guard { process, pipe })
    }

    /// Replaces what the guard knows.
    pub(super) fn tell(&mut self, attached: &Attached) -> io::Result<()> {
        self.pipe.write_all(attached.text().as_bytes())
    }

    /// Ends the guard.
    pub(super) fn end(mut self) {
        // The guard may have been killed.
        let _ = self.tell(&Attached::default());
        drop(self.pipe);
        let _ = self.process.wait();
    }
}

/// Reads until the pipe ends, and detaches the selectors that are attached then, but no program that the server attached meanwhile.
fn watch(target: AcceptTarget, pipe: PipeReader) -> i32 {
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
    i32::from(group::detach(&learner, &sockets, &attached.programs).is_err())
}

impl Attached {
    fn text(&self) -> String {
        let programs = self.programs.iter().map(|program| format!("{program}\n"));
        let addresses = self.addresses.iter();
        let addresses =
            addresses.map(|(transport, address)| format!("{} {address}\n", group::transport(*transport)));
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
    let transport = [Transport::Tcp, Transport::Udp]
        .into_iter()
        .find(|transport| group::transport(*transport) == name)?;
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
