//! Errors of loading, attaching and using BPF programs.

use std::io;

use fourtuple_syscalls::{Errno, errno_name};

use crate::permission;

/// The reason why a program was not loaded or attached, or a map not changed.
#[derive(Debug, thiserror::Error)]
pub enum BpfError {
    /// EPERM or EACCES: this process lacks the permission. The message names what the calling thread lacks.
    #[error("{call}: {}; {}", errno_name(source), permission::missing())]
    NotPermitted {
        /// The call, with the command of bpf(2).
        call: &'static str,
        /// The error from the kernel.
        source: io::Error,
    },
    /// EPERM or EACCES for a process that has all capabilities for the call.
    #[error(
        "{call}: {}: this host refuses {what} even to a process that may attach to tracepoints (lockdown, or \
             another security module)",
        errno_name(source)
    )]
    Barred {
        /// The call, with the command of bpf(2).
        call: &'static str,
        /// The refused operation.
        what: &'static str,
        /// The error from the kernel.
        source: io::Error,
    },
    /// This kernel does not have the feature.
    #[error("{call}: {}: this kernel has no {what}", errno_name(source))]
    Absent {
        /// The call, with the command of bpf(2).
        call: &'static str,
        /// The missing feature, with the release that introduced it.
        what: &'static str,
        /// The error from the kernel.
        source: io::Error,
    },
    /// The kernel's verifier rejects the program.
    #[error("BPF_PROG_LOAD: {}: the verifier refuses {program}: {log}", errno_name(source))]
    Refused {
        program: &'static str,
        /// The error of the first attempt to load.
        source: io::Error,
        /// The end of the verifier's log.
        log: String,
    },
    /// Any other failed call.
    #[error("{call}: {}", errno_name(source))]
    Call {
        /// The call, with the command of bpf(2).
        call: &'static str,
        /// The error from the kernel.
        source: io::Error,
    },
    /// A seat number out of range.
    #[error("seat {seat}: there are {seats}")]
    NoSuchSeat { seat: usize, seats: usize },
    /// A number of seats outside the range of a group.
    #[error("{seats} seats: 1 to {} can be had", crate::SEATS)]
    Seats {
        /// The requested number of seats.
        seats: usize,
    },
    /// The device already has an XDP program, and it supports only one.
    #[error("{call}: {}: the device has an XDP program already (ip link shows it)", errno_name(source))]
    Busy {
        /// The call, with the command of bpf(2).
        call: &'static str,
        /// The error from the kernel.
        source: io::Error,
    },
    /// More processors than this machine has.
    #[error("{call}: {}: this machine has not got {wanted} processors", errno_name(source))]
    Processors {
        /// The requested number of processors.
        wanted: u32,
        /// The call, with the command of bpf(2).
        call: &'static str,
        /// The error from the kernel.
        source: io::Error,
    },
    /// An object file of this crate is invalid, which the tests of the crate rule out.
    #[error("the object of {program}: {what}")]
    Object {
        program: &'static str,
        /// The defect of the object file.
        what: String,
    },
}

impl BpfError {
    /// The permissions that BPF needs, for errors that do not ask what the process lacks.
    pub const NEEDS: &str = "BPF needs CAP_BPF and CAP_NET_ADMIN (to trace and to fix ports: CAP_PERFMON) in the initial user \
                             namespace, and a seccomp filter that lets bpf(2) pass; kernel.unprivileged_bpf_disabled=0 permits socket filters only";

    /// Maps the error of a call to a missing permission, a missing bpf(2), or any other failure.
    pub(crate) fn of(call: &'static str, source: io::Error) -> BpfError {
        match Errno::of(&source) {
            Some(Errno::EPERM | Errno::EACCES) => BpfError::NotPermitted { call, source },
            Some(Errno::ENOSYS) => BpfError::Absent { call, what: "bpf(2)", source },
            _ => BpfError::Call { call, source },
        }
    }

    /// Like [`BpfError::of`], for calls that return EINVAL if the kernel lacks the feature (E2BIG: it knows a shorter attribute).
    pub(crate) fn or_absent(call: &'static str, what: &'static str, source: io::Error) -> BpfError {
        match Errno::of(&source) {
            Some(Errno::EINVAL | Errno::E2BIG | Errno::ENOPROTOOPT) => {
                BpfError::Absent { call, what, source }
            }
            _ => BpfError::of(call, source),
        }
    }
}
