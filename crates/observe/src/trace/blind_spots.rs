//! Waits that the contention tracepoints do not show on this host.

use std::fs;

/// Facts about the host and the trace that decide which waits the trace can see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Coverage {
    /// The host is a virtual machine.
    pub(crate) virtual_machine: bool,
    /// Spinlocks sleep (PREEMPT_RT).
    pub(crate) realtime: bool,
    /// The trace saw a wait for a spinlock.
    pub(crate) spun: bool,
    /// The trace saw a wait in the paravirtual slow path.
    pub(crate) paravirtual: bool,
    /// The addresses of the kernel's functions are known.
    pub(crate) symbols: bool,
    /// Sleeps in `__lock_sock` are counted.
    pub(crate) sleeps: bool,
    /// The trace is restricted to some tasks.
    pub(crate) filtered: bool,
    /// The addresses of TCP's hash tables are known.
    pub(crate) tables: bool,
    /// Each bucket of the table of local ports holds one port.
    pub(crate) bucket_per_port: bool,
}

impl Coverage {
    /// Reads the facts about the host.
    pub(crate) fn of_host() -> Coverage {
        let text = |path| fs::read_to_string(path).unwrap_or_default();
        Coverage {
            virtual_machine: has_hypervisor(&text("/proc/cpuinfo")),
            realtime: text("/sys/kernel/realtime").trim() == "1",
            ..Coverage::default()
        }
    }

    /// Returns one sentence for each kind of wait that the trace did not see.
    pub(crate) fn blind_spots(&self) -> Vec<String> {
        let mut spots = Vec::new();
        let mut spot = |applies: bool, words: &str| {
            if applies {
                spots.push(words.to_owned());
            }
        };
        spot(self.realtime, "PREEMPT_RT: spinlocks of this kernel sleep, and these sleeps are not counted");
        spot(
            self.spun && self.paravirtual,
            "this kernel has paravirtual spinlocks: every waiter is seen, and its time includes the time during which the \
             hypervisor had descheduled the processor",
        );
        spot(
            self.spun && !self.paravirtual,
            "the first waiter of a queued spinlock is not seen (it spins on the pending bit); only further waiters are",
        );
        spot(
            !self.spun && self.virtual_machine,
            "no wait for a spinlock was seen in a virtual machine: without paravirtual spinlocks the kernel spins by \
             test-and-set (virt_spin_lock), which no tracepoint shows",
        );
        spot(
            !self.spun && !self.virtual_machine,
            "the first waiter of a queued spinlock is never seen (it spins on the pending bit): with two processors or two \
             threads no waiter is seen",
        );
        spot(
            !self.symbols,
            "the kernel's addresses are hidden (kernel.kptr_restrict): only locks in TCP's hash tables have a class, and \
             waits have no path",
        );
        spot(
            !self.sleeps,
            "sleeps until a socket has no owner (__lock_sock) are not counted: the address of __lock_sock is unknown",
        );
        spot(!self.tables, "the addresses of TCP's hash tables are unknown: no wait is assigned to a port");
        spot(
            self.tables && !self.bucket_per_port,
            "the table of local ports has fewer buckets than ports: a port stands for all ports that share its bucket",
        );
        spot(
            self.filtered,
            "a softirq counts as the task that it interrupts: some waits belong to other tasks, and some waits of the traced \
             tasks are missing",
        );
        spot(
            true,
            "a packet for a socket that has an owner goes to the socket's backlog; that is not counted as a wait",
        );
        spots
    }
}

/// Reads the flag from /proc/cpuinfo of x86. Other architectures have neither the flag nor spinlocks for guests.
fn has_hypervisor(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|line| line.split_ascii_whitespace().any(|flag| flag == "hypervisor"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(coverage: Coverage, words: &str) -> bool {
        coverage.blind_spots().iter().any(|spot| spot.contains(words))
    }

    #[test]
    fn observed_waits_decide_which_blind_spot_applies() {
        let seen = Coverage { spun: true, virtual_machine: true, symbols: true, ..Coverage::default() };
        assert!(says(seen, "pending bit") && !says(seen, "paravirtual") && !says(seen, "virt_spin_lock"));
        let stopped = Coverage { paravirtual: true, ..seen };
        assert!(says(stopped, "paravirtual") && !says(stopped, "pending bit"));
        let nothing = Coverage { spun: false, ..seen };
        assert!(says(nothing, "virt_spin_lock"));
        let metal = Coverage { virtual_machine: false, ..nothing };
        assert!(says(metal, "pending bit") && !says(metal, "virt_spin_lock"));
    }

    #[test]
    fn missing_facts_are_named() {
        assert!(says(Coverage::default(), "kptr_restrict") && says(Coverage::default(), "__lock_sock"));
        let coverage = Coverage { tables: true, symbols: true, sleeps: true, ..Coverage::default() };
        assert!(
            says(coverage, "fewer buckets")
                && !says(coverage, "kptr_restrict")
                && !says(coverage, "interrupts")
        );
        assert!(says(Coverage { filtered: true, realtime: true, ..coverage }, "PREEMPT_RT"));
    }

    #[test]
    fn a_hypervisor_sets_a_processor_flag() {
        assert!(has_hypervisor("processor: 0\nflags\t\t: fpu hypervisor lahf_lm\n"));
        assert!(!has_hypervisor("flags: fpu\nbugs: hypervisor\n"));
    }
}
