//! What can go wrong with a BPF program.

use std::io;

use fourtuple_syscalls::errno_name;

/// Why a program was not loaded or not attached, or a map not changed.
#[derive(Debug, thiserror::Error)]
pub enum BpfError {
    /// EPERM or EACCES: this process may not.
    #[error("{call}: {} ({source}); {}", errno_name(source), BpfError::NEEDS)]
    NotPermitted {
        /// The call, with the command of bpf(2).
        call: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// EPERM or EACCES for a process that was allowed the like of it: no right of its own is missing.
    #[error(
        "{call}: {} ({source}): this host refuses {what} even to who may attach to tracepoints (lockdown, or \
             another security module)",
        errno_name(source)
    )]
    Barred {
        /// The call, with the command of bpf(2).
        call: &'static str,
        /// What is refused.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// This kernel has not got it.
    #[error("{call}: {} ({source}): this kernel has no {what}", errno_name(source))]
    Absent {
        /// The call, with the command of bpf(2).
        call: &'static str,
        /// What is missing, with the release that brought it.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel's verifier does not believe that the program is harmless.
    #[error("BPF_PROG_LOAD: {}: the verifier refuses {program}: {log}", errno_name(source))]
    Refused {
        /// The program's name.
        program: &'static str,
        /// What the kernel said at first.
        source: io::Error,
        /// The end of the verifier's log.
        log: String,
    },
    /// Any other failure.
    #[error("{call}: {} ({source})", errno_name(source))]
    Call {
        /// The call, with the command of bpf(2).
        call: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// A seat that is not there.
    #[error("seat {seat}: there are {seats}")]
    NoSuchSeat {
        /// The one asked for.
        seat: usize,
        /// How many there are.
        seats: usize,
    },
    /// A number of seats that no group can have.
    #[error("{seats} seats: 1 to {} can be had", crate::SEATS)]
    Seats {
        /// How many were asked for.
        seats: usize,
    },
    /// The device has an XDP program already, and can have one.
    #[error(
        "{call}: {} ({source}): the device has an XDP program already (ip link shows it)",
        errno_name(source)
    )]
    Busy {
        /// The call, with the command of bpf(2).
        call: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// More processors than this machine has.
    #[error("{call}: {} ({source}): this machine has not got {wanted} processors", errno_name(source))]
    Processors {
        /// How many were asked for.
        wanted: u32,
        /// The call, with the command of bpf(2).
        call: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// An object of this crate is not what it should be, which its tests rule out.
    #[error("the object of {program}: {what}")]
    Object {
        /// The program's name.
        program: &'static str,
        /// What is wrong with it.
        what: String,
    },
}

impl BpfError {
    /// Which permission it takes, for whoever is told [`BpfError::NotPermitted`].
    pub const NEEDS: &str = "BPF needs CAP_BPF and CAP_NET_ADMIN (to trace: CAP_PERFMON) in the initial user \
                             namespace, and a seccomp filter that lets bpf(2) pass; kernel.unprivileged_bpf_disabled=0 is not enough";

    /// The error of a call whose failures mean a missing right or anything else.
    pub(crate) fn of(call: &'static str, source: io::Error) -> BpfError {
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => BpfError::NotPermitted { call, source },
            Some(libc::ENOSYS) => BpfError::Absent { call, what: "bpf(2)", source },
            _ => BpfError::Call { call, source },
        }
    }

    /// The same, where EINVAL (E2BIG: a longer attribute than it knows) says that the kernel does not know the thing.
    pub(crate) fn or_absent(call: &'static str, what: &'static str, source: io::Error) -> BpfError {
        match source.raw_os_error() {
            Some(libc::EINVAL | libc::E2BIG | libc::ENOPROTOOPT) => BpfError::Absent { call, what, source },
            _ => BpfError::of(call, source),
        }
    }
}
