//! Which spinlocks of the kernel are waited for and from where, on a live system, and who sleeps until a socket has no
//! owner. What kind of lock it was, the stacks tell.

use std::fmt;
use std::mem;

use aya::maps::{Array, HashMap, MapData, MapError, StackTraceMap};
use aya::{Pod, include_bytes_aligned};

use crate::error::BpfError;
use crate::filter::{HAS_CGROUP, HAS_NAME, HAS_PROCESS, flag};
use crate::tracing::{self, COARSE, Programs, thread_name_bytes};

const NAME: &str = "lock_waits";

/// Whose waits are looked at: all that match everything that is set. A softirq counts as the task that it interrupts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Process, as this process's PID namespace numbers it.
    pub process: Option<u32>,
    /// Name of the thread that waits (comm), of which the kernel keeps 15 bytes.
    pub name: Option<String>,
    /// Id of a cgroup (version 2), which is the inode of its directory; those below it count as well.
    pub cgroup: Option<u64>,
    /// Where the function `__lock_sock` begins, and where it has ended; absent: sleeps are not looked at, and switches of
    /// tasks are not traced.
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
}

/// A lock, and a path on which it was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct WaitKey {
    /// Its address; 0: it was slept for, and is not known.
    pub lock: u64,
    /// Number of the stack ([`LockWaits::stack`]); negative: it was lost.
    pub stack: i32,
    hole: u32,
}

/// Waits for one lock on one path.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Wait {
    /// How many.
    pub waits: u64,
    /// How long they took together, in nanoseconds.
    pub wait_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// `hash_mix` of the network namespace of the task that waited first.
    pub mix: u32,
    hole: u32,
}

/// Waits on one path by time: [`COARSE_BITS`](crate::tracing::COARSE_BITS).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Path {
    /// Counts by bucket.
    pub buckets: [u32; COARSE],
}

/// TCP's hash tables, as `struct inet_hashinfo` has them. All zero until a socket has changed its state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Tables {
    /// Address of the buckets of local ports; 0: not known.
    pub bhash: u64,
    /// Address of the buckets of local ports and addresses (since Linux 6.1); 0: there are none.
    pub bhash2: u64,
    /// Address of the locks of connections; a network namespace may have others.
    pub ehash_locks: u64,
    /// Address of the buckets of listeners.
    pub lhash2: u64,
    /// Buckets of `bhash`, and of `bhash2`: a power of two.
    pub bhash_size: u32,
    /// Locks of `ehash_locks`, less one.
    pub ehash_locks_mask: u32,
    /// Buckets of `lhash2`, less one.
    pub lhash2_mask: u32,
    /// Size of a bucket of `bhash` and `bhash2`.
    pub bucket_bytes: u32,
    /// Size of a lock of `ehash_locks`.
    pub lock_bytes: u32,
    /// Size of a bucket of `lhash2`.
    pub listen_bytes: u32,
}

/// Sums over all that was wanted.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Totals {
    /// Waits for which the maps had no room; nothing else is known of them.
    pub lost_waits: u64,
    /// Waits that were counted without their path.
    pub lost_stacks: u64,
    /// Waits whose end was not seen.
    pub lost_nested: u64,
    asleep: u64,
    /// Connections opened: established ones of everybody, or the calls of connect() of those who are wanted.
    pub opened: u64,
    /// Connections of listeners, of everybody.
    pub accepted: u64,
    /// Connections that those who are wanted began to close.
    pub closed: u64,
    /// Where the hash tables are.
    pub tables: Tables,
}

// As in lock_waits.bpf.c.
const _: () = assert!(mem::size_of::<Settings>() == 64 && mem::offset_of!(Settings, name) == 48);
const _: () = assert!(mem::size_of::<WaitKey>() == 16 && mem::offset_of!(WaitKey, stack) == 8);
const _: () = assert!(mem::size_of::<Wait>() == 32 && mem::offset_of!(Wait, mix) == 24);
const _: () = assert!(mem::size_of::<Path>() == 4 * COARSE);
const _: () = assert!(mem::size_of::<Tables>() == 56 && mem::offset_of!(Tables, bucket_bytes) == 44);
const _: () = assert!(mem::size_of::<Totals>() == 112 && mem::offset_of!(Totals, tables) == 56);

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

impl Wanted {
    fn settings(&self, namespace: (u64, u64)) -> Settings {
        let (sleep_from, sleep_to) = self.lock_sock.unwrap_or_default();
        Settings {
            cgroup: self.cgroup.unwrap_or_default(),
            namespace_device: namespace.0,
            namespace_inode: namespace.1,
            sleep_from,
            sleep_to,
            flags: flag(self.process.is_some(), HAS_PROCESS)
                | flag(self.name.is_some(), HAS_NAME)
                | flag(self.cgroup.is_some(), HAS_CGROUP),
            process: self.process.unwrap_or_default(),
            name: thread_name_bytes(self.name.as_deref().unwrap_or_default()),
        }
    }
}

/// Programs on contention, attached. They go with this value, and with the process.
pub struct LockWaits {
    programs: Programs,
    sums: Array<MapData, Totals>,
    waits: HashMap<MapData, WaitKey, Wait>,
    paths: HashMap<MapData, i32, Path>,
    stacks: StackTraceMap<MapData>,
}

impl LockWaits {
    /// How the kernel is asked: BTF-typed tracepoints.
    pub const TIER: &str = "tp_btf";

    /// Loads the programs and attaches them. Waits that are under way are not looked at.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_PERFMON, [`BpfError::Absent`] on a kernel without BTF or without
    /// one of the tracepoints (those of contention came with Linux 5.19), [`BpfError::Refused`] when the verifier does not
    /// take a program.
    pub fn attach(wanted: &Wanted) -> Result<LockWaits, BpfError> {
        let mut programs = Programs::load(NAME, include_bytes_aligned!("lock_waits.o"))?;
        programs.set("settings", wanted.settings(tracing::pid_namespace()))?;
        let mut waits = LockWaits {
            sums: programs.map("sums")?,
            waits: programs.map("waits")?,
            paths: programs.map("paths")?,
            stacks: programs.map("stacks")?,
            programs,
        };
        // What begins a wait comes last, and goes first.
        let programs = &mut waits.programs;
        programs.attach("set_state", "inet_sock_set_state")?;
        if wanted.lock_sock.is_some() {
            programs.attach("task_switched", "sched_switch")?;
        }
        programs.attach("spin_ends", "contention_end")?;
        programs.attach("spin_begins", "contention_begin")?;
        Ok(waits)
    }

    /// Takes the programs off; what they counted stays. A wait that is under way is not counted any more.
    pub fn detach(&mut self) {
        self.programs.detach();
    }

    /// The sums as they are now.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] of bpf(2), which nothing explains.
    pub fn totals(&self) -> Result<Totals, BpfError> {
        self.sums.get(&0, 0).map_err(|error| tracing::failure(NAME, "bpf(BPF_MAP_LOOKUP_ELEM)", &error))
    }

    /// All waits by lock and path, in no order.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] of bpf(2), which nothing explains.
    pub fn waits(&self) -> Result<Vec<(WaitKey, Wait)>, BpfError> {
        let waits: Result<Vec<_>, _> = self.waits.iter().collect();
        waits.map_err(|error| tracing::failure(NAME, "bpf(BPF_MAP_GET_NEXT_KEY)", &error))
    }

    /// Waits on a path by time; `None` if there was no room for it.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] of bpf(2), which nothing explains.
    pub fn path(&self, stack: i32) -> Result<Option<Path>, BpfError> {
        found(self.paths.get(&stack, 0))
    }

    /// Return addresses of a stack, the innermost first; those of the tracing itself are the first of them. Empty if it is
    /// not there.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] of bpf(2), which nothing explains.
    pub fn stack(&self, stack: i32) -> Result<Vec<u64>, BpfError> {
        let Ok(number) = u32::try_from(stack) else { return Ok(Vec::new()) };
        let stack = found(self.stacks.get(&number, 0))?;
        Ok(stack.map_or_else(Vec::new, |stack| stack.frames().iter().map(|frame| frame.ip).collect()))
    }
}

fn found<T>(looked: Result<T, MapError>) -> Result<Option<T>, BpfError> {
    match looked {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) => Err(tracing::failure(NAME, "bpf(BPF_MAP_LOOKUP_ELEM)", &error)),
    }
}

impl fmt::Debug for LockWaits {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("LockWaits").finish_non_exhaustive()
    }
}
