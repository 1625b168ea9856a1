//! A process that detaches the selectors when this process has ended, in any way.
//!
//! A group keeps its selector when the process that attached the selector is killed. Without a heartbeat the selector leaves the
//! choice to the kernel's hash, but it stays attached; the guard removes it as well.

use std::fs;
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Write};
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_syscalls::fork::{self, Process};
use fourtuple_syscalls::option;
use fourtuple_syscalls::pidfd::Pidfd;

/// The line that ends a list.
const END: &str = ".";

/// A descriptor of a process that refers to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle {
    pub(super) process: u32,
    pub(super) descriptor: i32,
    /// Cookie of the socket.
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

/// The guard process.
pub(super) struct Guard {
    process: Process,
    pipe: PipeWriter,
}

impl Guard {
    /// Starts the guard, before this process has a second thread and before it holds BPF objects.
    pub(super) fn start() -> io::Result<Guard> {
        let (process, pipe) = fork::run_beside(c"fourtuple-guard", watch)?;
        Ok(Guard { process, pipe })
    }

    /// Replaces the list of groups with a selector. A group is a list of its sockets.
    pub(super) fn tell(&mut self, groups: &[Vec<Handle>]) -> io::Result<()> {
        self.pipe.write_all(list(groups).as_bytes())
    }

    /// Ends the guard.
    pub(super) fn end(mut self) {
        // The guard may have been killed.
        let _ = self.tell(&[]);
        drop(self.pipe);
        let _ = self.process.wait();
    }
}

fn list(groups: &[Vec<Handle>]) -> String {
    let mut text = String::new();
    for (number, group) in groups.iter().enumerate() {
        for Handle { process, descriptor, cookie } in group {
            text.push_str(&format!("{number} {process} {descriptor} {cookie}\n"));
        }
    }
    text.push_str(END);
    text.push('\n');
    text
}

/// Reads lists until the pipe ends, and detaches the selectors of the last complete list.
fn watch(pipe: PipeReader) -> i32 {
    for group in last(BufReader::new(pipe)) {
        // One socket stands for the group.
        let detached = |handle: &Handle| {
            let socket = handle.duplicate().ok().flatten();
            socket.is_some_and(|socket| option::detach_group_selector(socket.as_fd()).is_ok())
        };
        group.iter().any(detached);
    }
    0
}

/// Returns the last complete list of groups.
fn last(lines: impl BufRead) -> Vec<Vec<Handle>> {
    let (mut complete, mut next) = (Vec::new(), Vec::new());
    for line in lines.lines().map_while(Result::ok) {
        if line == END {
            complete = std::mem::take(&mut next);
        } else if let Some((group, handle)) = parse(&line) {
            if next.len() <= group {
                next.resize_with(group + 1, Vec::new);
            }
            next[group].push(handle);
        }
    }
    complete
}

fn parse(line: &str) -> Option<(usize, Handle)> {
    let mut words = line.split(' ');
    let group = words.next()?.parse().ok().filter(|group| *group < fourtuple_bpf::fix_accept::LISTENERS)?;
    let (process, descriptor) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    Some((group, Handle { process, descriptor, cookie: words.next()?.parse().ok()? }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_complete_list_counts() {
        let handle = |process| Handle { process, descriptor: 7, cookie: 99 };
        let groups = vec![vec![handle(1), handle(2)], vec![handle(3)]];
        let text = list(&groups);
        assert_eq!(last(text.as_bytes()), groups);
        let cut = format!("{text}0 9 9 9\n");
        assert_eq!(last(cut.as_bytes()), groups, "an incomplete list does not count");
        assert!(last(format!("{cut}.\n.\n").as_bytes()).is_empty());
        assert!(last("word\n5000 1 1 1\n.\n".as_bytes()).is_empty());
    }
}
