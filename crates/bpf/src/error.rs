//! Errors of loading, attaching and using BPF programs.

use std::os::unix::fs::MetadataExt;
use std::{fs, io};

use fourtuple_syscalls::privileges::{self, CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON, CAP_SYS_ADMIN};
use fourtuple_syscalls::{Errno, errno_name};

/// The reason why a program was not loaded or attached, or a map not changed.
#[derive(Debug, thiserror::Error)]
pub enum BpfError {
    /// EPERM or EACCES: this process lacks the permission. The message names what the calling thread lacks.
    #[error("{call}: {}; {}", errno_name(source), missing())]
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

// Names what a process lacks whose call of bpf(2) fails with EPERM.

/// Inode of the initial user namespace (PROC_USER_INIT_INO).
const INITIAL: u64 = 0xeffffffd;
const NEEDED: [(u32, &str); 3] = [
    (CAP_BPF, "CAP_BPF"),
    (CAP_PERFMON, "CAP_PERFMON (to trace, and to fix)"),
    (CAP_NET_ADMIN, "CAP_NET_ADMIN (for everything but traces)"),
];

/// Returns what the calling thread lacks, for the end of an error message.
pub(crate) fn missing() -> String {
    let lacks = |capability| !privileges::has(capability) && !privileges::has(CAP_SYS_ADMIN);
    let lacking: Vec<&str> =
        NEEDED.into_iter().filter(|(capability, _)| lacks(*capability)).map(|(_, name)| name).collect();
    // Without /proc the namespace is not known; most processes are in the initial one.
    let namespace = fs::metadata("/proc/thread-self/ns/user").map_or(INITIAL, |namespace| namespace.ino());
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:")).unwrap_or_default();
    words(&lacking, namespace == INITIAL, mode.trim() == "2")
}

fn words(lacking: &[&str], is_initial: bool, has_filter: bool) -> String {
    const UNPRIVILEGED: &str = "kernel.unprivileged_bpf_disabled=0 permits socket filters only";
    const ALL: &str = "CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN";
    let filter = if has_filter { "; its seccomp filter may refuse bpf(2) as well" } else { "" };
    if !is_initial {
        return format!(
            "this process is in a user namespace, and BPF needs {ALL} in the initial one; {UNPRIVILEGED}{filter}"
        );
    }
    match (lacking, has_filter) {
        ([], true) => format!("this process has {ALL}, so its seccomp filter refuses bpf(2)"),
        ([], false) => format!(
            "this process has {ALL}, so lockdown (/sys/kernel/security/lockdown) or another security module refuses bpf(2)"
        ),
        ([one], _) => format!("this process lacks {one}; {UNPRIVILEGED}{filter}"),
        ([others @ .., last], _) => {
            format!("this process lacks {} and {last}; {UNPRIVILEGED}{filter}", others.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_has_its_sentence() {
        let of = |lacking: &[&str], is_initial, has_filter| words(lacking, is_initial, has_filter);
        assert!(of(&["CAP_BPF"], true, false).starts_with("this process lacks CAP_BPF; kernel.unprivileged"));
        assert!(of(&["A", "B", "C"], true, false).starts_with("this process lacks A, B and C; "));
        assert!(of(&["A"], true, true).ends_with("; its seccomp filter may refuse bpf(2) as well"));
        assert!(
            of(&[], false, false).starts_with("this process is in a user namespace, and BPF needs CAP_BPF")
        );
        assert!(of(&[], true, true).ends_with("so its seccomp filter refuses bpf(2)"));
        assert!(of(&[], true, false).contains("lockdown"));
    }
}
