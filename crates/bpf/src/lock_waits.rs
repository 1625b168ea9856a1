//! Traces on a live system which spinlocks of the kernel tasks wait for and from where, and which tasks sleep until a socket
//! has no owner. The stacks show the kind of lock.

use std::fmt;
use std::mem;

use aya::maps::{Array, HashMap, MapData, MapError};
use aya::{Pod, include_bytes_aligned};

use crate::error::BpfError;
use crate::filter::TaskFilter;
use crate::tracing::{self, COARSE, Programs};

const NAME: &str = "lock_waits";

/// Maximum number of paths with separate counts.
pub const PATHS: usize = 4096;
/// Maximum number of pairs of lock and path with separate counts.
pub const LOCKS: usize = 16_384;
/// Maximum number of functions in a path; the innermost functions are kept.
const FRAMES: usize = 96;
/// The value of [`WaitKey::path`] for an unknown stack.
pub const NO_PATH: u64 = 0;

/// A filter of tasks, and where they sleep. A softirq counts as the task that it interrupts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LockFilter {
    pub tasks: TaskFilter,
    /// Start and end address of the function `__lock_sock`. Without them, sleeps are not counted and context switches are not
    /// traced.
    pub lock_sock: Option<(u64, u64)>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Settings {
    cgroup: u64,
    namespace_device: u64,
    namespace_inode: u64,
    sleep_from: u64,
    sleep_to: u64,
    flags: u32,
    process: u32,
    name: [u8; 16],
    network: u32,
    hole: u32,
}

/// A lock and a path on which tasks waited for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct WaitKey {
    /// Address of the lock; 0 for a sleep, whose lock is not known.
    pub lock: u64,
    /// Hash of the stack for [`LockWaits::path`], or [`NO_PATH`] if the stack was lost.
    pub path: u64,
}

/// Waits for one lock on one path.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Wait {
    pub waits: u64,
    /// Total time of the waits, in nanoseconds.
    pub wait_ns: u64,
    /// Maximum wait, in nanoseconds.
    pub max_ns: u64,
    /// `hash_mix` of the network namespace of the task that waited first.
    pub mix: u32,
    hole: u32,
}

/// A stack, and the waits on it by time.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Path {
    depth: u64,
    frames: [u64; FRAMES],
    /// Waits by time: [`COARSE_BITS`](crate::tracing::COARSE_BITS).
    pub buckets: [u32; COARSE],
}

impl Path {
    /// Returns the return addresses, the innermost first. The first addresses belong to the tracing itself.
    pub fn frames(&self) -> &[u64] {
        &self.frames[..FRAMES.min(self.depth as usize)]
    }
}

/// TCP's hash tables, as `struct inet_hashinfo` has them. All zero until a socket has changed its state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Tables {
    /// Address of the buckets of local ports; 0: not known.
    pub bhash: u64,
    /// Address of the buckets of local ports and addresses (since Linux 6.1); 0 on older kernels.
    pub bhash2: u64,
    /// Address of the locks of connections; a network namespace may have its own table.
    pub ehash_locks: u64,
    /// Address of the buckets of listeners.
    pub lhash2: u64,
    /// Number of buckets of `bhash` and `bhash2`, a power of two.
    pub bhash_size: u32,
    /// Number of locks of `ehash_locks`, minus one.
    pub ehash_locks_mask: u32,
    /// Number of buckets of `lhash2`, minus one.
    pub lhash2_mask: u32,
    /// Size of a bucket of `bhash` and `bhash2`.
    pub bucket_bytes: u32,
    /// Size of a lock of `ehash_locks`.
    pub lock_bytes: u32,
    /// Size of a bucket of `lhash2`.
    pub listen_bytes: u32,
}

/// Sums over all waits that the filter selects.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Totals {
    /// Waits that were not counted because the maps were full.
    pub lost_waits: u64,
    /// Waits that were counted without a path because the map of paths was full.
    pub lost_paths: u64,
    /// Waits that were counted without a path because the stack could not be read.
    pub lost_stacks: u64,
    /// Waits that were not counted because the processor was changing the map at the time.
    pub lost_busy: u64,
    /// Waits for which the end was not seen.
    pub lost_nested: u64,
    asleep: u64,
    /// Connections opened: all established connections of the host, or calls of connect() by the tasks that the filter selects.
    pub opened: u64,
    /// Connections of all listeners of the host.
    pub accepted: u64,
    /// Connections that the selected tasks closed first or in answer to a FIN.
    pub closed: u64,
    /// Addresses of the hash tables.
    pub tables: Tables,
}

// The layouts must equal the layouts in lock_waits.bpf.c.
const _: () = assert!(mem::size_of::<Settings>() == 72 && mem::offset_of!(Settings, network) == 64);
const _: () = assert!(mem::size_of::<WaitKey>() == 16 && mem::offset_of!(WaitKey, path) == 8);
const _: () = assert!(mem::size_of::<Wait>() == 32 && mem::offset_of!(Wait, mix) == 24);
const _: () = assert!(mem::size_of::<Path>() == 8 + 8 * FRAMES + 4 * COARSE);
const _: () = assert!(mem::size_of::<Tables>() == 56 && mem::offset_of!(Tables, bucket_bytes) == 44);
const _: () = assert!(mem::size_of::<Totals>() == 128 && mem::offset_of!(Totals, tables) == 72);

// SAFETY: integers and arrays of them without holes, in the layout of the map's values.
unsafe impl Pod for Settings {}
// SAFETY: as above.
unsafe impl Pod for WaitKey {}
// SAFETY: as above.
unsafe impl Pod for Wait {}
// SAFETY: as above.
unsafe impl Pod for Path {}
// SAFETY: as above.
unsafe impl Pod for Totals {}

impl LockFilter {
    fn settings(&self, pid_namespace: (u64, u64)) -> Settings {
        let tasks = self.tasks.settings(pid_namespace);
        let (sleep_from, sleep_to) = self.lock_sock.unwrap_or_default();
        // The compiled program has the addresses among the other fields.
        Settings {
            cgroup: tasks.cgroup,
            namespace_device: tasks.namespace_device,
            namespace_inode: tasks.namespace_inode,
            sleep_from,
            sleep_to,
            flags: tasks.flags,
            process: tasks.process,
            name: tasks.name,
            network: tasks.network,
            hole: 0,
        }
    }
}

/// The attached programs for lock contention. They are detached when this value is dropped or the process ends.
pub struct LockWaits {
    programs: Programs,
    sums: Array<MapData, Totals>,
    waits: HashMap<MapData, WaitKey, Wait>,
    paths: HashMap<MapData, u64, Path>,
}

impl LockWaits {
    /// The instrument: BTF-typed tracepoints.
    pub const TIER: &str = "tp_btf";

    /// Loads the programs and attaches them. Waits in progress are not counted.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_PERFMON, [`BpfError::Absent`] on a kernel without BTF or without
    /// one of the tracepoints (the lock contention tracepoints need Linux 5.19), [`BpfError::Refused`] if the verifier rejects
    /// a program.
    pub fn attach(wanted: &LockFilter) -> Result<LockWaits, BpfError> {
        LockWaits::attach_with_paths(wanted, PATHS as u32)
    }

    /// Does the same as [`LockWaits::attach`], with another limit than [`PATHS`]. Waits without a path take one of the `paths`.
    ///
    /// # Errors
    ///
    /// The errors of [`LockWaits::attach`].
    pub fn attach_with_paths(wanted: &LockFilter, paths: u32) -> Result<LockWaits, BpfError> {
        let object = include_bytes_aligned!("lock_waits.o");
        let mut programs = Programs::load_sized(NAME, object, &[("paths", paths)])?;
        programs.set("settings", wanted.settings(tracing::pid_namespace()))?;
        let mut waits = LockWaits {
            sums: programs.map("sums")?,
            waits: programs.map("waits")?,
            paths: programs.map("paths")?,
            programs,
        };
        // Waits whose path is lost still have a histogram.
        let unknown = Path { depth: 0, frames: [0; FRAMES], buckets: [0; COARSE] };
        let made = waits.paths.insert(NO_PATH, unknown, 0);
        made.map_err(|error| tracing::failure(NAME, "bpf(BPF_MAP_UPDATE_ELEM)", &error))?;
        // The program at the start of a wait is attached last and detached first.
        let programs = &mut waits.programs;
        programs.attach("set_state", "inet_sock_set_state")?;
        if wanted.lock_sock.is_some() {
            programs.attach("task_switched", "sched_switch")?;
        }
        programs.attach("spin_ends", "contention_end")?;
        programs.attach("spin_begins", "contention_begin")?;
        Ok(waits)
    }

    /// Detaches the programs; their counts stay readable. A wait in progress is no longer counted.
    pub fn detach(&mut self) {
        self.programs.detach();
    }

    /// Returns the current sums.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn totals(&self) -> Result<Totals, BpfError> {
        tracing::value(NAME, &self.sums)
    }

    /// Returns all waits by lock and path, in no particular order.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn waits(&self) -> Result<Vec<(WaitKey, Wait)>, BpfError> {
        tracing::entries(NAME, &self.waits)
    }

    /// Removes the counts of a lock and a path, which the next wait adds again. A wait in progress is then not counted.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn forget(&mut self, key: &WaitKey) -> Result<(), BpfError> {
        let removed = self.waits.remove(key);
        removed.map_err(|error| tracing::failure(NAME, "bpf(BPF_MAP_DELETE_ELEM)", &error))
    }

    /// Returns the path with this hash ([`WaitKey::path`]), or `None` if the map has none.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn path(&self, hash: u64) -> Result<Option<Path>, BpfError> {
        match self.paths.get(&hash, 0) {
            Ok(path) => Ok(Some(path)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(tracing::failure(NAME, "bpf(BPF_MAP_LOOKUP_ELEM)", &error)),
        }
    }

    /// Returns the number of events that a program missed because it was already running on that processor.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn missed(&self) -> Result<u64, BpfError> {
        self.programs.missed()
    }
}

impl fmt::Debug for LockWaits {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("LockWaits").finish_non_exhaustive()
    }
}
