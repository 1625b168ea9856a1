//! Names what a process lacks whose call of bpf(2) fails with EPERM.

use std::fs;
use std::os::unix::fs::MetadataExt;

use fourtuple_syscalls::privileges::{self, CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON, CAP_SYS_ADMIN};

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
