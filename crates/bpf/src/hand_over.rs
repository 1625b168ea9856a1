//! A group of listeners whose members close without a reset of the connections in their accept queues.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::call;
use crate::error::BpfError;
use crate::object::Program;

/// A program that leaves the choice to the kernel's hash and moves the connections of a closed listener to other listeners of
/// its group. Without it, or the sysctl `net.ipv4.tcp_migrate_req`, the kernel resets these connections
/// (`inet_csk_listen_stop`).
#[derive(Debug)]
pub struct HandOver {
    program: OwnedFd,
}

impl HandOver {
    /// Loads the program into the kernel.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_NET_ADMIN, [`BpfError::Absent`] before Linux 5.14.
    pub fn load() -> Result<HandOver, BpfError> {
        let program = Program::read("hand_over", include_bytes!("hand_over.o"))?.load(&[])?;
        Ok(HandOver { program })
    }

    /// Attaches the program to the SO_REUSEPORT group of a TCP socket. One call per group suffices: the group keeps the program
    /// while it has members.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`], with EINVAL for a socket without SO_REUSEPORT.
    pub fn attach(&self, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
        call::attach(socket, self.program.as_fd())
            .map_err(|source| BpfError::of("setsockopt(SO_ATTACH_REUSEPORT_EBPF)", source))
    }
}
