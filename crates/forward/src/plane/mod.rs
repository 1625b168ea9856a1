//! The ways to move packets: one file for each, one row of [`ROWS`] for each.

mod batched;
pub(crate) mod interface;
pub(crate) mod kind;
mod offload;
mod one_by_one;
mod sending;
mod uring;

use std::str::FromStr;

use interface::Plane;
pub use kind::PlaneKind;

use crate::error::ForwardError;

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
        open: || Box::new(one_by_one::OneByOne::new()),
    },
    Row {
        kind: PlaneKind::Batched,
        name: "batched",
        description: "",
        offloads: false,
        probe: || Ok(()),
        open: || Box::new(batched::Batched::new()),
    },
    Row {
        kind: PlaneKind::Offload,
        name: "offload",
        description: "UDP_GRO and UDP_SEGMENT",
        offloads: true,
        probe: || Ok(()),
        open: || Box::new(offload::offload()),
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
