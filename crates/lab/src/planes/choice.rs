//! Chooses the cells to run.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use fourtuple_forward::{Forward, Link, PlaneKind};

use crate::planes::settings::{Planes, Spec, SpreadBy};
use crate::{LabError, Namespace};

/// Payloads that fill the MTUs of the published figure: 1500 and 3000.
const FULL: [u32; 2] = [1472, 2972];
/// Approximate time that the published router spent on a packet besides moving it: 1.3 Gbit/s of 1500 bytes on one plane.
const AS_PUBLISHED: Duration = Duration::from_micros(6);
/// CPU time per packet, from none to the time of a route look-up and a signature.
const WORKS: [Duration; 3] = [Duration::ZERO, AS_PUBLISHED, Duration::from_micros(20)];
const PLANES: [u32; 3] = [1, 2, 4];

impl Planes {
    /// Returns whether any list was given.
    pub(super) fn has_lists(&self) -> bool {
        let Planes { kinds, planes, bytes, spreads, flows, work, .. } = self;
        [kinds.len(), planes.len(), bytes.len(), spreads.len(), flows.len(), work.len()] != [0; 6]
    }

    /// Returns the cells with these kinds of plane, each once.
    pub(super) fn cells(&self, kinds: &[PlaneKind]) -> Vec<Spec> {
        let cells = if self.has_lists() { self.every_combination(kinds) } else { default_cells(kinds) };
        in_order(cells.into_iter())
    }

    fn every_combination(&self, kinds: &[PlaneKind]) -> Vec<Spec> {
        let kinds = if self.kinds.is_empty() { kinds.to_vec() } else { self.kinds.clone() };
        let (planes, bytes) = (or(&self.planes, &PLANES), or(&self.bytes, &[64]));
        let (spreads, flows) = (or(&self.spreads, &[SpreadBy::Flow]), or(&self.flows, &[1]));
        let works = or(&self.work, &[Duration::ZERO]);
        let mut cells = Vec::new();
        // Cells that are compared most often run next to each other: packets of one length and work.
        for &bytes in &bytes {
            for &work in &works {
                for &kind in &kinds {
                    for &spread in &spreads {
                        for &flows in &flows {
                            cells.extend(planes.iter().map(|&planes| Spec {
                                kind,
                                planes,
                                bytes,
                                spread,
                                flows,
                                work,
                            }));
                        }
                    }
                }
            }
        }
        cells
    }
}

/// Returns the default cells: cost of a packet by plane kind, distribution over planes, gain from planes, and the published figure.
fn default_cells(kinds: &[PlaneKind]) -> Vec<Spec> {
    let mut cells = Vec::new();
    let cell = |kind, planes, bytes| Spec {
        kind,
        planes,
        bytes,
        spread: SpreadBy::Flow,
        flows: 1,
        work: Duration::ZERO,
    };
    for bytes in [64, 1400] {
        cells.extend(kinds.iter().map(|kind| cell(*kind, 1, bytes)));
    }
    let batched = PlaneKind::Batched;
    for flows in [1, 64] {
        for spread in [SpreadBy::Hash, SpreadBy::Random, SpreadBy::Flow] {
            cells.push(Spec { spread, flows, ..cell(batched, 4, 64) });
        }
    }
    for work in WORKS {
        cells.extend(PLANES.iter().map(|planes| Spec { work, ..cell(batched, *planes, 64) }));
    }
    for bytes in FULL {
        let one_by_one = PlaneKind::OneByOne;
        cells.extend(
            PLANES.iter().map(|planes| Spec { work: AS_PUBLISHED, ..cell(one_by_one, *planes, bytes) }),
        );
    }
    cells
}

fn or<T: Copy>(given: &[T], others: &[T]) -> Vec<T> {
    if given.is_empty() { others.to_vec() } else { given.to_vec() }
}

/// Removes duplicates, keeping the first of each.
pub(super) fn in_order<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut left = Vec::new();
    for value in values {
        if !left.contains(&value) {
            left.push(value);
        }
    }
    left
}

/// Starts a forwarder of this kind and ends it, to check that the host supports the kind.
pub(super) fn probe(kind: PlaneKind) -> Result<(), LabError> {
    Namespace::run(|_| {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let link = Link::new(any, SocketAddr::from((Ipv4Addr::LOCALHOST, 9)));
        Forward { kind, ..Forward::new(link, 1) }.start()?.drain()?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planes::settings::NetworkKind;

    fn nothing_given() -> Planes {
        Planes {
            kinds: Vec::new(),
            planes: Vec::new(),
            bytes: Vec::new(),
            spreads: Vec::new(),
            flows: Vec::new(),
            work: Vec::new(),
            packets: 1000,
            repeats: 1,
            over: NetworkKind::Veth,
            seed: 1,
        }
    }

    #[test]
    fn default_cells_include_their_reference_cells() {
        let cells = nothing_given().cells(&PlaneKind::ALL);
        assert_eq!(cells.len(), in_order(cells.iter().copied()).len(), "no cell occurs twice");
        for spec in &cells {
            let of_one = Spec { planes: 1, ..*spec };
            assert!(cells.contains(&of_one) || spec.spread != SpreadBy::Flow || spec.flows > 1, "{spec:?}");
        }
        for mtu in [1500, 3000] {
            assert!(cells.iter().any(|spec| spec.mtu() == mtu && spec.bytes + 28 == mtu));
        }
    }

    #[test]
    fn lists_are_combined() {
        let some = Planes { bytes: vec![64, 9000, 64], spreads: SpreadBy::ALL.to_vec(), ..nothing_given() };
        let kinds = [PlaneKind::Batched, PlaneKind::Offload];
        assert_eq!(some.cells(&kinds).len(), 2 * 4 * 2 * 3);
        let one = Planes {
            kinds: vec![PlaneKind::Offload],
            planes: vec![10],
            work: vec![Duration::from_micros(6)],
            ..nothing_given()
        };
        let [cell] = one.cells(&kinds)[..] else { panic!("one combination") };
        assert_eq!((cell.kind, cell.planes, cell.bytes, cell.mtu()), (PlaneKind::Offload, 10, 64, 1500));
        assert_eq!(Spec { bytes: 9000, ..cell }.mtu(), 9028);
    }
}
