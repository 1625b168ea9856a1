//! What the tracepoints of contention do not show, on this host.

use std::fs;

/// What was found out about the host and by the trace itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sight {
    /// A hypervisor is below.
    pub(crate) virtual_machine: bool,
    /// Spinlocks sleep (PREEMPT_RT).
    pub(crate) realtime: bool,
    /// There was any wait for a spinlock.
    pub(crate) spun: bool,
    /// One of them was in the paravirtual slow path.
    pub(crate) paravirtual: bool,
    /// Where functions are is known.
    pub(crate) symbols: bool,
    /// Sleeps in `__lock_sock` are counted.
    pub(crate) sleeps: bool,
    /// Only waits of some tasks are wanted.
    pub(crate) filtered: bool,
    /// Where TCP's tables are is known.
    pub(crate) tables: bool,
    /// A bucket of local ports is for one port alone.
    pub(crate) bucket_each: bool,
}

impl Sight {
    /// What the host says of itself.
    pub(crate) fn of_host() -> Sight {
        let text = |path| fs::read_to_string(path).unwrap_or_default();
        Sight {
            virtual_machine: has_hypervisor(&text("/proc/cpuinfo")),
            realtime: text("/sys/kernel/realtime").trim() == "1",
            ..Sight::default()
        }
    }

    /// In words, for people.
    pub(crate) fn blind_spots(&self) -> Vec<String> {
        let mut spots = Vec::new();
        let mut spot = |applies: bool, words: &str| {
            if applies {
                spots.push(words.to_owned());
            }
        };
        spot(self.realtime, "PREEMPT_RT: spinlocks of this kernel sleep, and such waits are not counted");
        spot(
            self.spun && self.paravirtual,
            "paravirtual spinlocks are at work: every waiter is seen, and its time has that in it during which the \
             hypervisor had stopped the processor",
        );
        spot(
            self.spun && !self.paravirtual,
            "the first who waits for a queued spinlock is not seen (it spins on the pending bit): only those behind it",
        );
        spot(
            !self.spun && self.virtual_machine,
            "not one wait for a spinlock was seen, in a virtual machine: without paravirtual spinlocks its kernel spins \
             by test-and-set (virt_spin_lock), which no tracepoint shows",
        );
        spot(
            !self.spun && !self.virtual_machine,
            "the first who waits for a queued spinlock is never seen (it spins on the pending bit): with two processors \
             or two threads that is everybody",
        );
        spot(
            !self.symbols,
            "the kernel's addresses are hidden (kernel.kptr_restrict): only locks in TCP's hash tables are told from \
             others, and there are no paths",
        );
        spot(
            !self.sleeps,
            "sleeping for the owner of a socket (__lock_sock) is not counted: where it is, is not known",
        );
        spot(!self.tables, "where TCP's hash tables are is not known: no wait is given to a port");
        spot(
            self.tables && !self.bucket_each,
            "there are fewer buckets than ports: a port stands for all that share its bucket",
        );
        spot(
            self.filtered,
            "a softirq counts as the task that it interrupts: some waits are other people's, and some of these are missing",
        );
        spot(
            true,
            "a packet that comes while its socket has an owner does not wait: it goes to the backlog, which is no wait",
        );
        spots
    }
}

/// Of x86; others have no such line, and no spinlocks of their own for guests either.
fn has_hypervisor(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|line| line.split_ascii_whitespace().any(|flag| flag == "hypervisor"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(sight: Sight, words: &str) -> bool {
        sight.blind_spots().iter().any(|spot| spot.contains(words))
    }

    #[test]
    fn what_was_seen_decides_and_not_what_the_host_is_called() {
        let seen = Sight { spun: true, virtual_machine: true, symbols: true, ..Sight::default() };
        assert!(says(seen, "pending bit") && !says(seen, "paravirtual") && !says(seen, "virt_spin_lock"));
        let stopped = Sight { paravirtual: true, ..seen };
        assert!(says(stopped, "paravirtual") && !says(stopped, "pending bit"));
        let nothing = Sight { spun: false, ..seen };
        assert!(says(nothing, "virt_spin_lock"));
        let metal = Sight { virtual_machine: false, ..nothing };
        assert!(says(metal, "pending bit") && !says(metal, "virt_spin_lock"));
    }

    #[test]
    fn what_is_missing_is_named() {
        assert!(says(Sight::default(), "kptr_restrict") && says(Sight::default(), "__lock_sock"));
        let sight = Sight { tables: true, symbols: true, sleeps: true, ..Sight::default() };
        assert!(says(sight, "fewer buckets") && !says(sight, "kptr_restrict") && !says(sight, "interrupts"));
        assert!(says(Sight { filtered: true, realtime: true, ..sight }, "PREEMPT_RT"));
    }

    #[test]
    fn a_hypervisor_is_a_flag_of_the_processor() {
        assert!(has_hypervisor("processor: 0\nflags\t\t: fpu hypervisor lahf_lm\n"));
        assert!(!has_hypervisor("flags: fpu\nbugs: hypervisor\n"));
    }
}
