//! What a trace does not see: waits without a tracepoint, programs of 32 bits, and events that were lost.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use fourtuple_bpf::filter::TaskFilter;
use fourtuple_record::Remark;
use fourtuple_record::snapshot::Owner;
use fourtuple_syscalls::procfs;

use crate::trace::scope::is_selected;

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
        Coverage {
            virtual_machine: has_hypervisor(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
            realtime: is_realtime(),
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
        spot(self.realtime, REALTIME);
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
        spot(!self.symbols, WITHOUT_SYMBOLS);
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

    /// Returns the blind spot that has most waits, if there is one: a trace without a class then says nothing.
    pub(crate) fn hides_most_waits(&self) -> Option<&'static str> {
        match self {
            Coverage { symbols: false, .. } => Some(WITHOUT_SYMBOLS),
            Coverage { realtime: true, .. } => Some(REALTIME),
            _ => None,
        }
    }
}

const REALTIME: &str = "PREEMPT_RT: spinlocks of this kernel sleep, and these sleeps are not counted";
const WITHOUT_SYMBOLS: &str = "the kernel's addresses are hidden (kernel.kptr_restrict): only locks in TCP's hash tables have a class, and waits have no path";

pub(crate) fn is_realtime() -> bool {
    fs::read_to_string("/sys/kernel/realtime").is_ok_and(|text| text.trim() == "1")
}

/// Reads the flag from /proc/cpuinfo of x86. Other architectures have neither the flag nor spinlocks for guests.
fn has_hypervisor(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|line| line.split_ascii_whitespace().any(|flag| flag == "hypervisor"))
}

// Programs of 32 bits. Their system calls have other numbers (compat system calls), which the programs at system calls leave out.

/// Maximum number of processes that are listed.
const MAX_LISTED: usize = 20;

/// The beginning of an ELF file of class ELFCLASS32 (elf(5)). Programs of the x32 ABI have this class too.
const ELF_32_BIT: &[u8; 5] = b"\x7fELF\x01";

/// Returns the processes with a program of 32 bits that a filter selects, the lowest number first. Processes that have ended are missing.
pub(crate) fn processes_of_32_bits(wanted: &TaskFilter) -> Vec<Owner> {
    processes_in(Path::new("/"), wanted)
}

fn processes_in(root: &Path, wanted: &TaskFilter) -> Vec<Owner> {
    let mut found: Vec<Owner> = match wanted.process {
        Some(process) => of_32_bits(root, process, wanted).into_iter().collect(),
        None => procfs::processes(root).filter_map(|process| of_32_bits(root, process, wanted)).collect(),
    };
    found.sort_by_key(|owner| owner.pid);
    found.truncate(MAX_LISTED);
    found
}

/// Returns a process if its program has 32 bits and the filter selects it.
fn of_32_bits(root: &Path, pid: u32, wanted: &TaskFilter) -> Option<Owner> {
    let process = root.join("proc").join(pid.to_string());
    let mut head = [0; ELF_32_BIT.len()];
    File::open(process.join("exe")).ok()?.read_exact(&mut head).ok()?;
    let is_wanted = head == *ELF_32_BIT
        && is_selected(root, pid, wanted)
        && wanted.network.is_none_or(|network| {
            fs::metadata(process.join("ns/net")).is_ok_and(|file| file.ino() as u32 == network)
        });
    is_wanted.then(|| Owner { pid, name: procfs::name(root, pid).unwrap_or_default(), sockets: 0 })
}

/// Returns the remark that the calls of these processes are missing.
pub(crate) fn remark_of_32_bits(processes: &[Owner]) -> Option<Remark> {
    let names: Vec<String> = processes.iter().map(|owner| format!("{}[{}]", owner.name, owner.pid)).collect();
    let message = format!("system calls of programs of 32 bits are not seen: {}", names.join(", "));
    (!names.is_empty()).then(|| Remark::new("calls-unseen", message))
}

// Events that a trace lost, and whether their number makes the run invalid.

/// A run stays valid while it lost at most one event in this many counted events.
const TOLERATED: u64 = 100;

/// Describes events for which the kernel did not run a program (`recursion_misses`).
pub(crate) const MISSED: &str = "events were not seen: the kernel does not run a BPF program that is already running on \
                                 the same processor (recursion_misses)";

/// Numbers of lost events, each with its meaning.
#[derive(Clone, Debug)]
pub(crate) struct Losses(Vec<(u64, &'static str)>);

/// The losses of a run as remarks if they make the run invalid, else as notes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Judgement {
    pub(crate) validity: Vec<Remark>,
    pub(crate) notes: Vec<String>,
}

impl Losses {
    pub(crate) fn new(all: impl IntoIterator<Item = (u64, &'static str)>) -> Losses {
        Losses(all.into_iter().filter(|(number, _)| *number > 0).collect())
    }

    pub(crate) fn sum(&self) -> u64 {
        self.0.iter().map(|(number, _)| number).sum()
    }

    /// Decides by the number of counted events whether the losses make the run invalid.
    pub(crate) fn judge(&self, counted: u64) -> Judgement {
        let lines = self.0.iter().map(|(number, meaning)| format!("{number} {meaning}"));
        if self.sum() > counted / TOLERATED {
            let remarks = lines.map(|line| Remark::new("events-lost", line));
            Judgement { validity: remarks.collect(), notes: Vec::new() }
        } else {
            let notes = lines.map(|line| format!("{line}; {counted} were counted"));
            Judgement { validity: Vec::new(), notes: notes.collect() }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

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
        assert_eq!(coverage.hides_most_waits(), None);
        assert_eq!(Coverage { realtime: true, ..coverage }.hides_most_waits(), Some(REALTIME));
        assert_eq!(Coverage::default().hides_most_waits(), Some(WITHOUT_SYMBOLS));
    }

    #[test]
    fn a_hypervisor_sets_a_processor_flag() {
        assert!(has_hypervisor("processor: 0\nflags\t\t: fpu hypervisor lahf_lm\n"));
        assert!(!has_hypervisor("flags: fpu\nbugs: hypervisor\n"));
    }

    /// A directory with a /proc, which is removed at the end.
    struct Root(PathBuf);

    impl Root {
        fn new() -> Root {
            let path = std::env::temp_dir().join(format!("fourtuple-compat-{}", std::process::id()));
            let root = Root(path);
            root.write(
                "self/mountinfo",
                &format!("1 1 0:1 / {}/cgroup rw - cgroup2 none rw", root.0.display()),
            );
            root
        }

        fn write(&self, name: &str, text: &str) {
            let path = self.0.join("proc").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn process(&self, pid: u32, class: char, name: &str) {
            self.write(&format!("{pid}/exe"), &format!("\x7fELF{class}\u{1}"));
            for file in ["comm", &format!("task/{pid}/comm")] {
                self.write(&format!("{pid}/{file}"), &format!("{name}\n"));
            }
            self.write(&format!("{pid}/ns/net"), "");
            self.write(&format!("{pid}/cgroup"), "0::/web/game\n");
        }

        fn found(&self, wanted: &TaskFilter) -> Vec<u32> {
            processes_in(&self.0, wanted).iter().map(|owner| owner.pid).collect()
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn programs_of_32_bits_that_a_filter_selects_are_found() {
        let root = Root::new();
        root.process(12, '\u{1}', "game");
        root.process(7, '\u{1}', "steam");
        root.process(9, '\u{2}', "game");
        root.write("3/exe", "");
        let all = TaskFilter::default();
        let by_name = |name: &str| TaskFilter { name: Some(name.to_owned()), ..all.clone() };
        let by_process = |process| TaskFilter { process: Some(process), ..all.clone() };
        assert_eq!(root.found(&all), [7, 12]);
        assert_eq!((root.found(&by_name("game")), root.found(&by_name("sh"))), (vec![12], vec![]));
        assert_eq!((root.found(&by_process(12)), root.found(&by_process(9))), (vec![12], vec![]));
        let inode = |path: &str| fs::metadata(root.0.join(path)).unwrap().ino();
        let by_network = |network| TaskFilter { network: Some(network), ..all.clone() };
        assert_eq!(root.found(&by_network(inode("proc/7/ns/net") as u32)), [7]);
        for directory in ["cgroup/web/game", "cgroup/other"] {
            fs::create_dir_all(root.0.join(directory)).unwrap();
        }
        let in_cgroup = |path| root.found(&TaskFilter { cgroup: Some(inode(path)), ..all.clone() });
        assert_eq!((in_cgroup("cgroup/web"), in_cgroup("cgroup/other")), (vec![7, 12], vec![]));
        let said = remark_of_32_bits(&processes_in(&root.0, &all)).unwrap().message;
        assert_eq!(said, "system calls of programs of 32 bits are not seen: steam[7], game[12]");
        assert_eq!(remark_of_32_bits(&[]), None);
    }

    #[test]
    fn a_run_stays_valid_up_to_1_percent_losses() {
        let losses = Losses::new([(2, "waits were not counted"), (0, "others")]);
        assert_eq!(losses.sum(), 2);
        let judged = losses.judge(200);
        assert_eq!(judged.notes, ["2 waits were not counted; 200 were counted"]);
        assert_eq!(judged.validity, []);
    }

    #[test]
    fn more_than_1_percent_losses_make_a_run_invalid() {
        let losses = Losses::new([(2, "waits were not counted"), (1, "had no path")]);
        let judged = losses.judge(299);
        assert_eq!(judged.notes, [""; 0]);
        let messages: Vec<_> = judged.validity.iter().map(|remark| remark.message.as_str()).collect();
        assert_eq!(messages, ["2 waits were not counted", "1 had no path"]);
        assert!(judged.validity.iter().all(|remark| remark.id == "events-lost"));
    }

    #[test]
    fn without_losses_there_are_no_remarks() {
        assert_eq!(Losses::new([(0, "waits")]).judge(0), Judgement::default());
    }
}
