//! A group of listeners whose members leave without resetting what waits in their queues.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::call;
use crate::error::BpfError;
use crate::object::Program;

/// A program that leaves the choice to the kernel's hash, and gives the connections of a listener that is closed to the
/// other ones of its group: without it, or the sysctl `net.ipv4.tcp_migrate_req`, the kernel resets them
/// (`inet_csk_listen_stop`).
#[derive(Debug)]
pub struct HandOver {
    program: OwnedFd,
}

impl HandOver {
    /// Gives the program to the kernel.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_NET_ADMIN, [`BpfError::Absent`] before Linux 5.14.
    pub fn load() -> Result<HandOver, BpfError> {
        let program = Program::read("hand_over", include_bytes!("hand_over.o"))?.load(&[])?;
        Ok(HandOver { program })
    }

    /// Makes it the program of the group that a TCP socket with SO_REUSEPORT belongs to. Once for a group, which keeps it
    /// as long as it has members.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`], with EINVAL for a socket without SO_REUSEPORT.
    pub fn attach(&self, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
        call::attach(socket, self.program.as_fd())
            .map_err(|source| BpfError::of("setsockopt(SO_ATTACH_REUSEPORT_EBPF)", source))
    }
}
