//! The common part of the tracing programs: how they are loaded and attached, and how they count. The counterpart in C is
//! `counting.h`.

use std::fs::{self, File};
use std::io::{self, Read};
use std::mem;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, PoisonError};

use aya::maps::{Array, HashMap, Map, MapData};
use aya::programs::links::FdLink;
use aya::programs::{
    BtfTracePoint, CgroupAttachMode, CgroupSockAddr, FEntry, FExit, Iter, PerfEvent, Program, ProgramError,
    RawTracePoint,
};
use aya::{Btf, Ebpf, EbpfLoader, Pod};
use fourtuple_syscalls::{Errno, procfs};

use crate::call;
use crate::error::BpfError;

const LOAD: &str = "bpf(BPF_PROG_LOAD)";
const ATTACH: &str = "bpf(BPF_RAW_TRACEPOINT_OPEN)";
const TRAMPOLINES: &str = "fentry and fexit (CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS)";

/// Octaves of the histograms, which reach 2^36 ns (69 s).
pub const OCTAVES: u32 = 36;
/// Histograms of totals have 2^5 steps per octave.
pub const FINE_BITS: u32 = 5;
/// Histograms of a table row have 2^3 steps per octave.
pub const COARSE_BITS: u32 = 3;
const FINE: usize = ((OCTAVES - FINE_BITS + 1) << FINE_BITS) as usize;
pub(crate) const COARSE: usize = ((OCTAVES - COARSE_BITS + 1) << COARSE_BITS) as usize;

/// A histogram of times, counted in the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Times {
    /// Number of measured intervals.
    pub count: u64,
    /// Sum of the times, in nanoseconds.
    pub sum_ns: u64,
    /// Maximum time, in nanoseconds.
    pub max_ns: u64,
    /// Number of times by length: [`FINE_BITS`].
    pub buckets: [u64; FINE],
}

const _: () = assert!(mem::size_of::<Times>() == 24 + 8 * FINE);

// SAFETY: integers and an array of them without holes, in the layout of the map's values.
unsafe impl Pod for Times {}

impl Default for Times {
    fn default() -> Times {
        Times { count: 0, sum_ns: 0, max_ns: 0, buckets: [0; FINE] }
    }
}

impl Times {
    /// Adds another histogram, for example of another processor.
    pub fn add(&mut self, other: &Times) {
        self.count += other.count;
        self.sum_ns += other.sum_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
        self.buckets.iter_mut().zip(&other.buckets).for_each(|(mine, theirs)| *mine += theirs);
    }
}

/// Programs of one object. They are detached when this value is dropped or the process ends.
pub(crate) struct Programs {
    name: &'static str,
    types: &'static Btf,
    object: Ebpf,
    links: Vec<FdLink>,
}

impl Programs {
    /// Reads the object and creates its maps; attaches nothing.
    pub(crate) fn load(name: &'static str, object: &[u8]) -> Result<Programs, BpfError> {
        Programs::load_sized(name, object, &[])
    }

    /// Does the same as [`Programs::load`], with other maximum numbers of entries for some maps.
    pub(crate) fn load_sized(
        name: &'static str,
        object: &[u8],
        sizes: &[(&str, u32)],
    ) -> Result<Programs, BpfError> {
        let Kernel { types, loader } = Kernel::get()?;
        let loaded = if sizes.is_empty() {
            loader.lock().unwrap_or_else(PoisonError::into_inner).load(object)
        } else {
            let mut own = EbpfLoader::new();
            for (map, size) in sizes {
                own.map_max_entries(map, *size);
            }
            own.btf(Some(types)).load(object)
        };
        let object = loaded.map_err(|error| failure(name, "bpf(BPF_MAP_CREATE)", &error))?;
        Ok(Programs { name, types, object, links: Vec::new() })
    }

    /// Takes one of the maps out of the object, with its type. The caller must keep it until all programs are attached.
    pub(crate) fn map<M: TryFrom<Map>>(&mut self, map: &str) -> Result<M, BpfError> {
        let what =
            || BpfError::Object { program: self.name, what: format!("no map {map} of the expected kind") };
        M::try_from(self.object.take_map(map).ok_or_else(what)?).map_err(|_| what())
    }

    /// Writes the settings of the programs: the only entry of the map of this name.
    pub(crate) fn set<V: Pod>(&mut self, map: &str, settings: V) -> Result<(), BpfError> {
        let what =
            || BpfError::Object { program: self.name, what: format!("no map {map} of the expected kind") };
        // The map stays with the object, because the programs need it when they are loaded.
        let found = self.object.map_mut(map).ok_or_else(what)?;
        let mut array: Array<&mut MapData, V> = found.try_into().map_err(|_| what())?;
        array.set(0, settings, 0).map_err(|error| failure(self.name, "bpf(BPF_MAP_UPDATE_ELEM)", &error))
    }

    /// Attaches one of the programs to a tracepoint, typed by BTF.
    pub(crate) fn attach(&mut self, program: &'static str, tracepoint: &'static str) -> Result<(), BpfError> {
        let (name, found, btf) = self.program(program)?;
        let found: &mut BtfTracePoint = found.try_into().map_err(|_| no_program(name, program))?;
        found.load(tracepoint, btf).map_err(|error| refusal(name, program, tracepoint, error))?;
        let link = found.attach().map_err(|error| failure(name, ATTACH, &error))?;
        let link = found.take_link(link).map_err(|error| failure(name, ATTACH, &error))?;
        self.links.push(link.into());
        Ok(())
    }

    /// Loads one of the programs as an iterator over objects of the kernel, which writes nothing.
    pub(crate) fn iterator(
        &mut self,
        program: &'static str,
        objects: &'static str,
    ) -> Result<Passes, BpfError> {
        let (name, found, btf) = self.program(program)?;
        let found: &mut Iter = found.try_into().map_err(|_| no_program(name, program))?;
        found.load(objects, btf).map_err(|error| refusal(name, program, objects, error))?;
        let program = found.fd().map_err(|error| failure(name, LOAD, &error))?;
        let link = call::link_iterator(program.as_fd());
        Ok(Passes(link.map_err(|error| BpfError::of("bpf(BPF_LINK_CREATE)", error))?))
    }

    /// Loads one of the programs for `call::run`, without attaching it.
    pub(crate) fn runnable(&mut self, program: &'static str) -> Result<OwnedFd, BpfError> {
        let name = self.name;
        let what = || BpfError::Object { program: name, what: format!("no program {program} to be run") };
        let found = self.object.program_mut(program).ok_or_else(what)?;
        let found: &mut RawTracePoint = found.try_into().map_err(|_| what())?;
        found.load().map_err(|error| refusal(name, program, program, error))?;
        let program = found.fd().map_err(|error| failure(name, LOAD, &error))?;
        program.as_fd().try_clone_to_owned().map_err(|error| BpfError::of("fcntl(F_DUPFD_CLOEXEC)", error))
    }

    /// Attaches one of the programs to the entry of a kernel function (fentry).
    pub(crate) fn attach_entry(
        &mut self,
        program: &'static str,
        function: &'static str,
    ) -> Result<(), BpfError> {
        let may_trace = !self.links.is_empty();
        let (name, found, btf) = self.program(program)?;
        let found: &mut FEntry = found.try_into().map_err(|_| no_program(name, program))?;
        found
            .load(function, btf)
            .map_err(|error| no_trampoline(refusal(name, program, function, error), may_trace))?;
        let link = found.attach().map_err(|error| no_trampoline(failure(name, ATTACH, &error), may_trace))?;
        let link = found.take_link(link).map_err(|error| failure(name, ATTACH, &error))?;
        self.links.push(link.into());
        Ok(())
    }

    /// Attaches one of the programs to the return of a kernel function (fexit).
    pub(crate) fn attach_exit(
        &mut self,
        program: &'static str,
        function: &'static str,
    ) -> Result<(), BpfError> {
        let may_trace = !self.links.is_empty();
        let (name, found, btf) = self.program(program)?;
        let found: &mut FExit = found.try_into().map_err(|_| no_program(name, program))?;
        found
            .load(function, btf)
            .map_err(|error| no_trampoline(refusal(name, program, function, error), may_trace))?;
        let link = found.attach().map_err(|error| no_trampoline(failure(name, ATTACH, &error), may_trace))?;
        let link = found.take_link(link).map_err(|error| failure(name, ATTACH, &error))?;
        self.links.push(link.into());
        Ok(())
    }

    /// Attaches one of the programs to a cgroup (version 2), beside the programs that are attached there already.
    pub(crate) fn attach_cgroup(
        &mut self,
        program: &'static str,
        cgroup: BorrowedFd<'_>,
    ) -> Result<(), BpfError> {
        const ATTACH: &str = "bpf(BPF_LINK_CREATE)";
        let (name, found) = self.load_for_cgroup(program)?;
        // A link allows further programs by itself and takes no flag for it (cgroup_bpf_link_attach).
        let link =
            found.attach(cgroup, CgroupAttachMode::Single).map_err(|error| failure(name, ATTACH, &error))?;
        let link = found.take_link(link).map_err(|error| failure(name, ATTACH, &error))?;
        self.links.push(link.try_into().map_err(|error| failure(name, ATTACH, &error))?);
        Ok(())
    }

    /// Loads one of the programs for connect() of a cgroup, unless it is loaded.
    pub(crate) fn load_for_cgroup(
        &mut self,
        program: &'static str,
    ) -> Result<(&'static str, &mut CgroupSockAddr), BpfError> {
        let (name, found, _) = self.program(program)?;
        let found: &mut CgroupSockAddr = found.try_into().map_err(|_| no_program(name, program))?;
        // A program that has been detached is still loaded.
        if found.fd().is_err() {
            found
                .load()
                .map_err(|error| refusal(name, program, "program for connect() of a cgroup", error))?;
        }
        Ok((name, found))
    }

    fn program(&mut self, program: &'static str) -> Result<(&'static str, &mut Program, &Btf), BpfError> {
        let found = self.object.program_mut(program).ok_or_else(|| no_program(self.name, program))?;
        Ok((self.name, found, self.types))
    }

    /// Loads one of the programs for perf events. The caller attaches it.
    pub(crate) fn perf_event(&mut self, program: &'static str) -> Result<&mut PerfEvent, BpfError> {
        let name = self.name;
        let what =
            || BpfError::Object { program: name, what: format!("no program {program} for perf events") };
        let found = self.object.program_mut(program).ok_or_else(what)?;
        let found: &mut PerfEvent = found.try_into().map_err(|_| what())?;
        found.load().map_err(|error| refusal(name, program, "program for perf events", error))?;
        Ok(found)
    }

    /// Returns the number of events that a program missed because it was already running on that processor
    /// (`recursion_misses`). The programs were loaded for this value only, so their counters started at 0.
    pub(crate) fn missed(&self) -> Result<u64, BpfError> {
        let mut missed = 0;
        for (_, program) in self.object.programs() {
            // A program that was not loaded has no descriptor.
            let Ok(descriptor) = program.fd() else { continue };
            let of_program = call::recursion_misses(descriptor.as_fd());
            missed += of_program.map_err(|error| BpfError::of("bpf(BPF_OBJ_GET_INFO_BY_FD)", error))?;
        }
        Ok(missed)
    }

    /// Detaches all programs in reverse order of attaching; their counts stay readable.
    pub(crate) fn detach(&mut self) {
        while self.links.pop().is_some() {}
    }
}

/// What loads the objects of this process, with the type information of the running kernel. Each parsing of that information takes 14 MB and some 50 ms,
/// and [`EbpfLoader::new`] parses it too: all objects share one of each, which are kept until the process ends.
struct Kernel {
    types: &'static Btf,
    loader: Mutex<EbpfLoader<'static>>,
}

impl Kernel {
    /// An error is not kept: the next call tries again.
    fn get() -> Result<&'static Kernel, BpfError> {
        static SHARED: Mutex<Option<&'static Kernel>> = Mutex::new(None);
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = *shared {
            return Ok(kernel);
        }
        let mut loader = EbpfLoader::new();
        // Before the second parsing, so that there are never two copies.
        loader.btf(None);
        let types = Btf::from_sys_fs().map_err(|error| BpfError::Absent {
            call: "open(/sys/kernel/btf/vmlinux)",
            what: "type information (CONFIG_DEBUG_INFO_BTF); no tracing program can be fitted to it without, and the \
                   kernels of the large distributions have it",
            source: io_error(&error).unwrap_or_else(|| io::Error::from(Errno::ENOENT)),
        })?;
        let types: &Btf = Box::leak(Box::new(types));
        loader.btf(Some(types));
        Ok(shared.insert(Box::leak(Box::new(Kernel { types, loader: Mutex::new(loader) }))))
    }
}

fn no_program(name: &'static str, program: &'static str) -> BpfError {
    BpfError::Object { program: name, what: format!("no program {program} of the expected kind") }
}

/// An iterator that writes nothing.
pub(crate) struct Passes(OwnedFd);

impl Passes {
    /// Runs the program for each object, in the calling thread's namespaces.
    pub(crate) fn run(&self) -> Result<(), BpfError> {
        let pass = call::iterate(self.0.as_fd());
        let mut pass = File::from(pass.map_err(|error| BpfError::of("bpf(BPF_ITER_CREATE)", error))?);
        loop {
            match pass.read(&mut [0; 64]) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                // EAGAIN: the kernel has looked at many objects without output and lets other tasks run (bpf_seq_read).
                Err(error) if matches!(Errno::of(&error), Some(Errno::EINTR | Errno::EAGAIN)) => {}
                Err(error) => return Err(BpfError::of("read() of a BPF iterator", error)),
            }
        }
    }
}

/// Returns the reason why a program was not attached to a function. `may_trace`: this process has attached to a tracepoint.
fn no_trampoline(error: BpfError, may_trace: bool) -> BpfError {
    match error {
        // The kernel may load the program even so. Then ftrace does not know the function, the kernel has no ftrace, or
        // another program has changed the call.
        BpfError::Call { call, source }
            if matches!(Errno::of(&source), Some(Errno::ENOTSUPP | Errno::EINVAL | Errno::EBUSY)) =>
        {
            BpfError::Absent { call, what: TRAMPOLINES, source }
        }
        BpfError::NotPermitted { call, source } if may_trace => {
            BpfError::Barred { call, what: TRAMPOLINES, source }
        }
        other => other,
    }
}

/// Returns the reason why a program was not loaded.
fn refusal(
    name: &'static str,
    program: &'static str,
    tracepoint: &'static str,
    error: ProgramError,
) -> BpfError {
    match error {
        ProgramError::Btf(_) => {
            BpfError::Absent { call: LOAD, what: tracepoint, source: io::Error::from(Errno::ENOENT) }
        }
        ProgramError::LoadError { io_error, verifier_log } => {
            let log = verifier_log.to_string();
            // Without CAP_PERFMON the verifier forbids pointer arithmetic that speculation could misuse.
            let needs_permission =
                Errno::of(&io_error) == Some(Errno::EPERM) || log.contains("prohibited for !root");
            if log.trim().is_empty() || needs_permission {
                return BpfError::of(LOAD, io_error);
            }
            let from = log.char_indices().rev().nth(600).map_or(0, |(at, _)| at);
            BpfError::Refused { program, source: io_error, log: log[from..].trim().to_owned() }
        }
        other => failure(name, LOAD, &other),
    }
}

/// Returns the only value of an array.
pub(crate) fn value<V: Pod>(name: &'static str, array: &Array<MapData, V>) -> Result<V, BpfError> {
    array.get(&0, 0).map_err(|error| failure(name, "bpf(BPF_MAP_LOOKUP_ELEM)", &error))
}

/// Returns all entries of a map, in no particular order.
pub(crate) fn entries<K: Pod, V: Pod>(
    name: &'static str,
    map: &HashMap<MapData, K, V>,
) -> Result<Vec<(K, V)>, BpfError> {
    let entries: Result<Vec<_>, _> = map.iter().collect();
    entries.map_err(|error| failure(name, "bpf(BPF_MAP_GET_NEXT_KEY)", &error))
}

/// Converts aya's error by the errno of its innermost source.
pub(crate) fn failure(
    name: &'static str,
    call: &'static str,
    error: &(dyn std::error::Error + 'static),
) -> BpfError {
    match io_error(error) {
        Some(source) => BpfError::of(call, source),
        None => BpfError::Object { program: name, what: error.to_string() },
    }
}

fn io_error(error: &(dyn std::error::Error + 'static)) -> Option<io::Error> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let errno = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        if let Some(errno) = errno {
            return Some(io::Error::from_raw_os_error(errno));
        }
        cause = error.source();
    }
    None
}

/// Returns CLOCK_MONOTONIC, the clock that the programs read as well.
pub(crate) fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec. The clock is there on every kernel.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns device and inode of this process's PID namespace, in which the programs report process ids.
pub(crate) fn pid_namespace() -> (u64, u64) {
    fs::metadata("/proc/self/ns/pid").map_or((0, 0), |namespace| (namespace.dev(), namespace.ino()))
}

/// Converts the 16 bytes of an address in the programs' structs.
pub(crate) fn address(bytes: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(bytes).to_canonical()
}

/// Returns the 16 bytes of an address, IPv4 as ::ffff:a.b.c.d.
pub(crate) fn address_bytes(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// Converts the name of a process or thread, of which the kernel keeps 15 bytes.
pub(crate) fn thread_name(bytes: &[u8; 16]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    procfs::program(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

/// Returns the name of a thread as the kernel has it, cut to 15 bytes.
pub(crate) fn thread_name_bytes(name: &str) -> [u8; 16] {
    let mut bytes = [0; 16];
    let length = name.len().min(15);
    bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
    bytes
}

/// A tier of instrument. Reports name the tier beside every number that it measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Stable tracepoints, typed by BTF, whose names do not change between kernels.
    TpBtf,
    /// Entry and return of the function itself (fentry, fexit; Linux 5.5, CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS),
    /// which a kernel may rename.
    Fexit,
}

impl Tier {
    /// All tiers, in the order in which they are tried.
    pub const ALL: [Tier; 2] = [Tier::TpBtf, Tier::Fexit];

    /// Returns the name in records.
    pub fn name(self) -> &'static str {
        match self {
            Tier::TpBtf => "tp_btf",
            Tier::Fexit => "fexit",
        }
    }
}

#[cfg(test)]
mod tests {
    use aya::maps::PerCpuArray;
    use aya::programs::ProgramError;
    use aya::{BtfError, include_bytes_aligned};
    use fourtuple_testing::skip;

    use super::*;

    /// The same struct is in recursion.bpf.c.
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Counts {
        runs: u64,
        nested: u64,
        inside: u64,
    }

    // SAFETY: integers without holes, in the layout of the map's values.
    unsafe impl Pod for Counts {}

    #[test]
    fn a_missing_tracepoint_is_named() {
        let missing = BtfError::UnknownBtfTypeName { type_name: "btf_trace_fib_table_lookup".to_owned() };
        let error = refusal("connect_search", "route_lookup", "fib_table_lookup", ProgramError::Btf(missing));
        assert!(matches!(error, BpfError::Absent { what: "fib_table_lookup", .. }), "{error:?}");
    }

    #[test]
    fn a_function_that_cannot_be_attached_to_is_absent() {
        for errno in [Errno::ENOTSUPP, Errno::EINVAL, Errno::EBUSY] {
            let error = no_trampoline(BpfError::of(ATTACH, errno.into()), true);
            assert!(matches!(error, BpfError::Absent { what: TRAMPOLINES, .. }), "{error:?}");
        }
        let error = no_trampoline(BpfError::of(ATTACH, Errno::ENOMEM.into()), true);
        assert!(matches!(error, BpfError::Call { .. }), "{error:?}");
    }

    #[test]
    fn a_refusal_is_a_missing_permission_unless_others_attached() {
        let error = no_trampoline(BpfError::of(LOAD, Errno::EPERM.into()), false);
        assert!(matches!(error, BpfError::NotPermitted { .. }), "{error:?}");
        let error = no_trampoline(BpfError::of(LOAD, Errno::EPERM.into()), true);
        assert!(matches!(error, BpfError::Barred { .. }), "{error:?}");
    }
    /// Each page fault in the kernel runs a program that causes another one.
    #[test]
    fn events_within_a_run_of_the_program_are_missed() {
        let test = "tracing::tests::events_within_a_run_of_the_program_are_missed";
        let attached = || {
            let mut programs = Programs::load("recursion", include_bytes_aligned!("recursion.o"))?;
            let counted: PerCpuArray<MapData, Counts> = programs.map("counted")?;
            programs.attach("fault", "page_fault_kernel")?;
            Ok((programs, counted))
        };
        let (mut programs, counted) = match attached() {
            Err(error @ BpfError::NotPermitted { .. }) => return skip(test, "bpf", &error.to_string()),
            // arm64 has no such tracepoint.
            Err(error @ BpfError::Absent { .. }) => {
                return skip(test, "recursion-misses", &error.to_string());
            }
            attached => attached.unwrap(),
        };
        for _ in 0..1_000 {
            // SAFETY: the kernel writes to user memory with a check of the address, where this process has no memory.
            assert_eq!(unsafe { libc::syscall(libc::SYS_uname, mem::align_of::<u64>()) }, -1);
        }
        programs.detach();
        let (mut runs, mut nested, mut processors) = (0, 0, 0);
        for counts in counted.get(&0, 0).unwrap().iter() {
            processors += 1;
            runs += counts.runs;
            nested += counts.nested;
        }
        let missed = programs.missed().unwrap();
        assert!(runs >= 1_000, "{runs} runs");
        if nested > 0 && missed == 0 {
            return skip(test, "recursion-misses", "this kernel runs a program within itself");
        }
        // One fault may be more than one event, as on 6.12. A run for another process may have been before its fault at the detach.
        assert!(missed + processors >= runs, "{runs} runs, {missed} missed");
        assert_eq!(nested, 0);
    }
}
