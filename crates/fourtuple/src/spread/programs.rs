//! Selectors that are programs of the kernel's own kind (eBPF). `programs_absent` is their twin in a build without them.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use fourtuple_bpf::{BpfError, Chooser, Control, Counted, CpuMap, GroupMap, Mode, SourcePort, Wish};

use crate::spread::control::ControlFilter;
use crate::spread::error::SpreadError;
use crate::spread::group::AtDevice;
use crate::spread::key::Key;
use crate::spread::selector::{Order, Rule, Spread};

/// What a group has of them.
#[derive(Debug)]
pub(super) struct Programs {
    spread: Spread,
    map: Option<GroupMap>,
    packets: Option<Packets>,
}

/// At a device, before the sockets.
#[derive(Debug)]
enum Packets {
    SourcePort(SourcePort),
    CpuMap(CpuMap),
}

impl Programs {
    pub(super) const SLOTS: usize = GroupMap::SLOTS;

    /// With a rule, loads the program that goes by a table.
    pub(super) fn load(
        spread: Spread,
        rule: Option<Rule>,
        control: Option<&ControlFilter>,
    ) -> Result<Programs, SpreadError> {
        let control = control.map(|filter| match *filter {
            ControlFilter::Bytes { key: Key { offset, width, mask }, value } => {
                Control::Bytes { offset, width, mask, value }
            }
            ControlFilter::Hops(hops) => Control::Hops(hops),
            ControlFilter::SourcePort(port) => Control::SourcePort(port),
            ControlFilter::Neighbour { key: Key { offset, width, mask }, value } => {
                Control::Neighbour { offset, width, mask, value }
            }
        });
        let map = rule
            .map(|rule| GroupMap::load(chooser(rule), control))
            .transpose()
            .map_err(|source| SpreadError::Bpf { spread, source })?;
        Ok(Programs { spread, map, packets: None })
    }

    fn failed(&self) -> impl Fn(BpfError) -> SpreadError {
        let spread = self.spread;
        move |source| SpreadError::Bpf { spread, source }
    }

    fn map(&self) -> Result<&GroupMap, SpreadError> {
        self.map.as_ref().ok_or(SpreadError::Fixed { spread: self.spread })
    }

    pub(super) fn attach(&self, socket: BorrowedFd<'_>) -> Result<(), SpreadError> {
        self.map()?.attach(socket).map_err(self.failed())
    }

    /// Where packets to `address` come from now on.
    pub(super) fn attach_to_device(
        &mut self,
        address: SocketAddr,
        device: u32,
        members: usize,
    ) -> Result<(), SpreadError> {
        self.packets = match self.spread {
            Spread::XdpSourcePort { ports, .. } => Some(Packets::SourcePort(
                SourcePort::attach(address, ports, device, Wish::Either).map_err(self.failed())?,
            )),
            Spread::Cpumap { cpus, order, .. } => {
                let cpus = cpus.map_or_else(|| processors().min(members as u32), u32::from);
                let by = match order {
                    Order::Turn => Chooser::Hash,
                    Order::Random => Chooser::Random,
                    Order::Key(Key { offset, width, mask }) => Chooser::Key { offset, width, mask },
                };
                Some(Packets::CpuMap(
                    CpuMap::attach(address, cpus, by, device, Wish::Either).map_err(self.failed())?,
                ))
            }
            _ => None,
        };
        Ok(())
    }

    pub(super) fn seat(&self, seat: usize, socket: BorrowedFd<'_>) -> Result<(), SpreadError> {
        self.map()?.seat(seat, socket).map_err(self.failed())
    }

    pub(super) fn seat_control(&self, socket: BorrowedFd<'_>) -> Result<(), SpreadError> {
        self.map()?.seat_control(socket).map_err(self.failed())
    }

    pub(super) fn leave(&self, seat: usize) -> Result<(), SpreadError> {
        self.map()?.leave(seat).map_err(self.failed())
    }

    pub(super) fn choose(&self, rule: Rule) -> Result<(), SpreadError> {
        self.map()?.choose(chooser(rule));
        Ok(())
    }

    pub(super) fn give(&self, slot: usize, seat: usize) {
        if let Some(map) = &self.map {
            map.give(slot, seat);
        }
    }

    pub(super) fn strays(&self) -> u64 {
        self.map.as_ref().map_or(0, GroupMap::strays)
    }

    /// What keeps the program at the device there.
    pub(super) fn link(&self) -> Option<BorrowedFd<'_>> {
        self.packets.as_ref().map(|packets| match packets {
            Packets::SourcePort(program) => program.link(),
            Packets::CpuMap(program) => program.link(),
        })
    }

    pub(super) fn at_device(&self) -> Option<AtDevice> {
        let (mode, Counted { changed, passed }) = match self.packets.as_ref()? {
            Packets::SourcePort(program) => (program.mode(), program.counted()),
            Packets::CpuMap(program) => (program.mode(), program.counted()),
        };
        Some(AtDevice { native: mode == Mode::Native, changed, passed })
    }
}

fn chooser(rule: Rule) -> Chooser {
    match rule {
        Rule::Hash => Chooser::Hash,
        Rule::Random => Chooser::Random,
        Rule::Cpu => Chooser::Processor,
        Rule::Key(Key { offset, width, mask }) => Chooser::Key { offset, width, mask },
    }
}

/// How many this process may use: which, the kernel does not ask.
fn processors() -> u32 {
    std::thread::available_parallelism().map_or(1, |processors| processors.get() as u32)
}
