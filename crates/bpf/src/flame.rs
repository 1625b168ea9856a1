//! Samples where processes run in the kernel: a clock event of each processor counts their stacks in the kernel.

use std::collections::HashMap as Table;
use std::collections::hash_map::Entry;
use std::fmt;
use std::mem;

use aya::maps::{Array, HashMap, MapData, MapError, StackTraceMap};
use aya::programs::perf_event::{
    PerfEventConfig, PerfEventLink, PerfEventScope, SamplePolicy, SoftwareEvent,
};
use aya::util::online_cpus;
use aya::{Pod, include_bytes_aligned};

use crate::error::BpfError;
use crate::filter::TaskFilter;
use crate::tracing::{self, Programs, thread_name};

const NAME: &str = "flame";
const OPEN: &str = "perf_event_open(PERF_COUNT_SW_CPU_CLOCK)";

/// Samples per second and processor. The number is not round, so that samples are not in step with periodic work.
pub const SAMPLES_PER_S: u64 = 997;

/// A thread's name and process, its innermost function, and the index of its callers in the map of stacks.
#[derive(Clone, Copy)]
#[repr(C)]
struct Place {
    name: [u8; 16],
    /// Innermost address; 0: the sample is from user space.
    innermost: u64,
    process: u32,
    callers: u32,
}

/// Value of `callers` for a stack without callers.
const NO_CALLERS: u32 = u32::MAX;
/// Value of `callers` for a stack whose slot another stack had.
const NO_ROOM: u32 = u32::MAX - 1;

// The layout must equal the layout in flame.bpf.c.
const _: () = assert!(mem::size_of::<Place>() == 32 && mem::offset_of!(Place, callers) == 28);

// SAFETY: integers and arrays of them without holes, in the layout of the map's values.
unsafe impl Pod for Place {}

/// The samples of threads with one name and process in one stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stack {
    /// Name of the thread.
    pub name: String,
    /// Process id in this process's PID namespace if the process is in it, otherwise in the initial one.
    pub process: u32,
    /// Return addresses in the kernel, innermost first. Empty: the sample is from user space. `None`: the map was full.
    pub frames: Option<Vec<u64>>,
    pub samples: u64,
}

/// The sampling program, attached to the clock of every online processor. It is detached when this value is dropped or the
/// process ends.
pub struct Flame {
    // Declared first, so that the links are dropped before the program.
    links: Vec<PerfEventLink>,
    lost: Array<MapData, u64>,
    counts: HashMap<MapData, Place, u64>,
    stacks: StackTraceMap<MapData>,
    _programs: Programs,
}

impl Flame {
    /// Loads the program and attaches it.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_PERFMON, [`BpfError::Absent`] on a kernel without BTF,
    /// [`BpfError::Refused`] if the verifier rejects the program.
    pub fn attach(sampled: &TaskFilter) -> Result<Flame, BpfError> {
        let mut programs = Programs::load(NAME, include_bytes_aligned!("flame.o"))?;
        programs.set("settings", sampled.settings(tracing::pid_namespace()))?;
        let (lost, counts, stacks) =
            (programs.map("lost")?, programs.map("counts")?, programs.map("stacks")?);
        let mut links = Vec::new();
        let program = programs.perf_event("sample")?;
        let processors = online_cpus().map_err(|(call, source)| BpfError::Call { call, source })?;
        for cpu in processors {
            let link = program
                .attach(
                    PerfEventConfig::Software(SoftwareEvent::CpuClock),
                    PerfEventScope::AllProcessesOneCpu { cpu },
                    SamplePolicy::Frequency(SAMPLES_PER_S),
                    false,
                )
                .and_then(|link| program.take_link(link))
                .map_err(|error| tracing::failure(NAME, OPEN, &error))?;
            links.push(link);
        }
        Ok(Flame { links, lost, counts, stacks, _programs: programs })
    }

    /// Detaches the program; its counts stay readable.
    pub fn detach(&mut self) {
        self.links.clear();
    }

    /// Returns the number of samples that were not counted because the map was full.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn lost(&self) -> Result<u64, BpfError> {
        tracing::value(NAME, &self.lost)
    }

    /// Returns all samples by thread and stack, in no particular order.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn stacks(&self) -> Result<Vec<Stack>, BpfError> {
        let mut known: Table<u32, Option<Vec<u64>>> = Table::new();
        let mut stacks = Vec::new();
        for count in self.counts.iter() {
            let (place, samples) =
                count.map_err(|error| tracing::failure(NAME, "bpf(BPF_MAP_GET_NEXT_KEY)", &error))?;
            let callers = match known.entry(place.callers) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(unknown) => unknown.insert(self.callers(place.callers)?),
            };
            let innermost = (place.innermost != 0).then_some(place.innermost);
            let frames = callers
                .as_ref()
                .map(|callers| innermost.into_iter().chain(callers.iter().copied()).collect());
            let (name, process) = (thread_name(&place.name), place.process);
            stacks.push(Stack { name, process, frames, samples });
        }
        Ok(stacks)
    }

    fn callers(&self, stack: u32) -> Result<Option<Vec<u64>>, BpfError> {
        match stack {
            NO_CALLERS => return Ok(Some(Vec::new())),
            NO_ROOM => return Ok(None),
            _ => {}
        }
        match self.stacks.get(&stack, 0) {
            Ok(trace) => Ok(Some(trace.frames().iter().map(|frame| frame.ip).collect())),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(tracing::failure(NAME, "bpf(BPF_MAP_LOOKUP_ELEM)", &error)),
        }
    }
}

impl fmt::Debug for Flame {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Flame").finish_non_exhaustive()
    }
}
