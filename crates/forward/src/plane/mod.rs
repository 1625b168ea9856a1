//! How a plane moves packets: a file each.

mod batched;
mod offload;
mod one_by_one;
mod sending;
mod uring;

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::str::FromStr;

use crate::error::ForwardError;
use crate::path::Path;

/// The ways to move packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaneKind {
    /// One system call each to wait, to receive and to send, for every packet: as most programs do.
    OneByOne,
    /// recvmmsg(2) and sendmmsg(2): up to 64 packets with a call each.
    Batched,
    /// The same, with UDP_GRO in and UDP_SEGMENT out: packets of one length become one message, which goes through the
    /// network stack once.
    Offload,
    /// As `Offload`, but io_uring receives: one request for all packets (multishot recvmsg), into buffers that the kernel takes
    /// from a ring of them.
    Uring,
}

impl PlaneKind {
    /// All of them.
    pub const ALL: [PlaneKind; 4] =
        [PlaneKind::OneByOne, PlaneKind::Batched, PlaneKind::Offload, PlaneKind::Uring];

    /// As on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            PlaneKind::OneByOne => "one-by-one",
            PlaneKind::Batched => "batched",
            PlaneKind::Offload => "offload",
            PlaneKind::Uring => "uring",
        }
    }

    /// Whether it can be had here: found by trying, with no packet.
    ///
    /// # Errors
    ///
    /// [`ForwardError::NotPermitted`], [`ForwardError::Absent`]: only of those that need io_uring. [`ForwardError::Call`]
    pub fn try_out(self) -> Result<(), ForwardError> {
        match self {
            PlaneKind::OneByOne | PlaneKind::Batched | PlaneKind::Offload => Ok(()),
            PlaneKind::Uring => uring::try_out(),
        }
    }

    /// Whether it wants datagrams of one sender put together when they are received (UDP_GRO), and cut when they are sent.
    pub(crate) fn offloads(self) -> bool {
        matches!(self, PlaneKind::Offload | PlaneKind::Uring)
    }

    pub(crate) fn plane(self) -> Box<dyn Plane> {
        match self {
            PlaneKind::OneByOne => Box::new(one_by_one::OneByOne::new()),
            PlaneKind::Batched => Box::new(batched::Batched::new()),
            PlaneKind::Offload => Box::new(offload::offload()),
            PlaneKind::Uring => Box::new(uring::Uring::new()),
        }
    }
}

impl fmt::Display for PlaneKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl FromStr for PlaneKind {
    type Err = String;

    fn from_str(text: &str) -> Result<PlaneKind, String> {
        let found = PlaneKind::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| {
            let names: Vec<_> = PlaneKind::ALL.iter().map(|kind| kind.name()).collect();
            format!("{text:?} is not a way to move packets: expected {}", names.join(", "))
        })
    }
}

/// Moves packets; belongs to one thread.
pub(crate) trait Plane: Send {
    /// What is readable when there is something to forward of port `number`, whose socket this is from now on.
    fn watch<'a>(&'a mut self, number: usize, listener: BorrowedFd<'a>) -> io::Result<BorrowedFd<'a>> {
        let _ = number;
        Ok(listener)
    }

    /// Sends on what waits at `listener`, up to a batch. False when nothing was there.
    fn forward(&mut self, number: usize, listener: BorrowedFd<'_>, path: &mut Path) -> bool;

    /// Sends on what it has received from port `number` and still keeps, since the socket is to be another's.
    fn release(&mut self, number: usize, listener: BorrowedFd<'_>, path: &mut Path) {
        let _ = (number, listener, path);
    }

    /// Sends what came back from target `index` to its client, up to a batch.
    fn give_back(&mut self, listener: BorrowedFd<'_>, index: usize, path: &mut Path);
}
