//! The ways to move packets: one file for each, one row of [`ROWS`] for each.

mod sending;
mod uring;

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::str::FromStr;

use crate::error::ForwardError;
use crate::path::Path;
use crate::plane::sending::Batched;

/// One way to move packets. To add a plane: a variant of [`PlaneKind`], a file and a row.
struct Row {
    kind: PlaneKind,
    /// The name on the command line and in records.
    name: &'static str,
    /// The text of the help, if the name does not suffice.
    description: &'static str,
    /// Whether the sockets use UDP_GRO and UDP_SEGMENT.
    offloads: bool,
    /// Checks that the kernel has and permits the required calls.
    probe: fn() -> Result<(), ForwardError>,
    open: fn() -> Box<dyn Plane>,
}

/// In the order of the variants of [`PlaneKind`].
const ROWS: [Row; 4] = [
    Row {
        kind: PlaneKind::OneByOne,
        name: "one-by-one",
        description: "",
        offloads: false,
        probe: || Ok(()),
        open: || Box::new(sending::OneByOne::new()),
    },
    Row {
        kind: PlaneKind::Batched,
        name: "batched",
        description: "",
        offloads: false,
        probe: || Ok(()),
        open: || Box::new(sending::Batched::new()),
    },
    Row {
        kind: PlaneKind::Offload,
        name: "offload",
        description: "UDP_GRO and UDP_SEGMENT",
        offloads: true,
        probe: || Ok(()),
        open: || Box::new(offload()),
    },
    Row {
        kind: PlaneKind::Uring,
        name: "uring",
        description: "offload, with receive by io_uring",
        offloads: true,
        probe: uring::probe,
        open: || Box::new(uring::Uring::new()),
    },
];

impl PlaneKind {
    /// All kinds, in the order of the table.
    pub const ALL: [PlaneKind; ROWS.len()] = {
        let mut all = [PlaneKind::OneByOne; ROWS.len()];
        let mut row = 0;
        while row < all.len() {
            all[row] = ROWS[row].kind;
            assert!(all[row] as usize == row, "the rows are in the order of the variants");
            row += 1;
        }
        all
    };

    fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    /// Returns the name on the command line and in records.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the names with their descriptions, for a help text.
    pub fn descriptions() -> String {
        let words = |row: &Row| match row.description {
            "" => row.name.to_owned(),
            text => format!("{} ({text})", row.name),
        };
        ROWS.iter().map(words).collect::<Vec<_>>().join(", ")
    }

    /// Checks that this kernel has and permits the calls that this kind needs. Sends no packet.
    ///
    /// # Errors
    ///
    /// [`ForwardError::NotPermitted`] and [`ForwardError::Absent`] for kinds that need io_uring; [`ForwardError::Call`].
    pub fn probe(self) -> Result<(), ForwardError> {
        (self.row().probe)()
    }

    /// Returns whether the sockets of this kind use UDP_GRO on receive and UDP_SEGMENT on send.
    pub(crate) fn offloads(self) -> bool {
        self.row().offloads
    }

    pub(crate) fn plane(self) -> Box<dyn Plane> {
        (self.row().open)()
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

/// The ways to move packets. Their names, requirements and constructors are in the table of `plane/mod.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaneKind {
    /// One system call each to wait, to receive and to send, for every packet.
    OneByOne,
    /// recvmmsg(2) and sendmmsg(2): up to 64 packets with one call.
    Batched,
    /// Like `Batched`, with UDP_GRO on receive and UDP_SEGMENT on send: the network stack handles one large buffer instead of
    /// many packets of one length.
    Offload,
    /// Like `Offload`, but io_uring receives: one multishot recvmsg request for all packets, into a ring of buffers provided to the
    /// kernel.
    Uring,
}

impl fmt::Display for PlaneKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// Moves packets. One thread owns a plane and the sockets of its ports.
pub(crate) trait Plane: Send {
    /// Takes the listening socket of port `number`, and returns the descriptor that becomes readable when packets can be forwarded.
    fn watch<'a>(&'a mut self, number: usize, listener: BorrowedFd<'a>) -> io::Result<BorrowedFd<'a>> {
        let _ = number;
        Ok(listener)
    }

    /// Forwards up to one batch of the messages that wait at `listener`. Returns their number.
    ///
    /// # Errors
    ///
    /// The kernel refuses to receive and would refuse again: the plane must end.
    fn forward(&mut self, number: usize, listener: BorrowedFd<'_>, path: &mut Path) -> io::Result<usize>;

    /// Forwards the packets that the plane has received from port `number` and still holds, before another plane takes the socket.
    fn release(&mut self, number: usize, listener: BorrowedFd<'_>, path: &mut Path) {
        let _ = (number, listener, path);
    }

    /// Returns up to one batch of replies from the next hop of target `index` to its client.
    ///
    /// # Errors
    ///
    /// The same errors as [`Plane::forward`].
    fn give_back(&mut self, listener: BorrowedFd<'_>, index: usize, path: &mut Path) -> io::Result<()>;
}

/// Bytes for each message: UDP_GRO coalesces up to 64 KiB. An odd number of cache lines, see `batched.rs`.
const ROOM: usize = 1025 * 64;

/// Like `Batched`, with UDP_GRO on receive and UDP_SEGMENT on send: the stack handles one large buffer instead of many packets. The
/// sockets have the options ([`crate::PlaneKind`]); this plane has buffers for such messages.
fn offload() -> Batched {
    Batched::with_room(ROOM)
}
