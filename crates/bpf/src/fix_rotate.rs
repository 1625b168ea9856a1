//! Events of listeners that several workers share: who accepts, and whose registration with epoll(7) changes.

use std::fmt;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use aya::maps::{Array, HashMap, MapData, RingBuf};
use aya::{Pod, include_bytes_aligned};
use fourtuple_syscalls::epoll::Registration;
use fourtuple_syscalls::socket;

use crate::error::BpfError;
use crate::tracing::{self, Programs, failure, pid_namespace};

const NAME: &str = "fix_rotate";

#[derive(Clone, Copy)]
#[repr(C)]
struct Wanted {
    namespace_device: u64,
    namespace_inode: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Event {
    cookie: u64,
    data: u64,
    events: u32,
    thread: u32,
    process: u32,
    operation: u32,
    epoll: i32,
    descriptor: i32,
}

// The layouts must equal the layouts in fix_rotate.bpf.c.
const _: () = assert!(mem::size_of::<Event>() == 40 && mem::offset_of!(Event, descriptor) == 36);

// SAFETY: integers without holes, in the layout of the map's values.
unsafe impl Pod for Wanted {}

/// An event of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerEvent {
    /// Cookie of the listener.
    pub cookie: u64,
    /// Process id in this process's PID namespace if the process is in it, otherwise in the initial one; so is a thread.
    pub process: u32,
    pub what: What,
}

/// A successful call of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// accept(2) or accept4(2) by this thread.
    Accepted { thread: u32 },
    /// EPOLL_CTL_ADD or EPOLL_CTL_MOD of the listener, in the epoll instance of this descriptor.
    Added { epoll: i32, registration: Registration },
    /// EPOLL_CTL_DEL of the listener.
    Removed { epoll: i32 },
}

/// The attached program, which is detached when this value is dropped or the process ends.
pub struct FixRotate {
    programs: Programs,
    watched: HashMap<MapData, u64, u32>,
    lost: Array<MapData, u64>,
    ring: RingBuf<MapData>,
}

impl FixRotate {
    /// Loads the program and attaches it.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_PERFMON, [`BpfError::Absent`] on a kernel without BTF or without the tracepoint
    /// raw_syscalls:sys_exit.
    pub fn attach() -> Result<FixRotate, BpfError> {
        let mut programs = Programs::load(NAME, include_bytes_aligned!("fix_rotate.o"))?;
        let (namespace_device, namespace_inode) = pid_namespace();
        programs.set("settings", Wanted { namespace_device, namespace_inode })?;
        let (watched, lost, ring) = (programs.map("watched")?, programs.map("lost")?, programs.map("ring")?);
        programs.attach("call_ended", "sys_exit")?;
        Ok(FixRotate { programs, watched, lost, ring })
    }

    /// Begins to report the events of a listener, by its cookie.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`], with E2BIG for more than 1,024 listeners.
    pub fn watch(&mut self, cookie: u64) -> Result<(), BpfError> {
        let added = self.watched.insert(cookie, 0, 0);
        added.map_err(|error| failure(NAME, "bpf(BPF_MAP_UPDATE_ELEM)", &error))
    }

    /// Ends the reports of a listener.
    pub fn forget(&mut self, cookie: u64) {
        // ENOENT: it was not watched.
        let _ = self.watched.remove(&cookie);
    }

    /// Waits for an event; false if `timeout` expires first.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if poll(2) fails.
    pub fn wait(&self, timeout: Duration) -> Result<bool, BpfError> {
        // SAFETY: the ring owns the descriptor and outlives the call.
        let ring = unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) };
        socket::wait_readable(ring, Some(timeout)).map_err(|error: io::Error| BpfError::of("poll", error))
    }

    /// Returns the next event, if there is one.
    pub fn next_event(&mut self) -> Option<ListenerEvent> {
        let item = self.ring.next()?;
        if item.len() < mem::size_of::<Event>() {
            return None;
        }
        // SAFETY: the bytes are one Event, which may have any alignment and consists of integers.
        let event = unsafe { item.as_ptr().cast::<Event>().read_unaligned() };
        let Event { cookie, data, events, thread, process, operation, epoll, descriptor } = event;
        let what = match operation as i32 {
            0 => What::Accepted { thread },
            libc::EPOLL_CTL_DEL => What::Removed { epoll },
            _ => What::Added { epoll, registration: Registration { descriptor, events, data } },
        };
        Some(ListenerEvent { cookie, process, what })
    }

    /// Returns the number of events for which the ring was full, and of system calls of any kind that were not examined, because the
    /// program already ran on that processor.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn missed(&self) -> Result<u64, BpfError> {
        Ok(tracing::value(NAME, &self.lost)? + self.programs.missed()?)
    }
}

impl fmt::Debug for FixRotate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("FixRotate").finish_non_exhaustive()
    }
}
