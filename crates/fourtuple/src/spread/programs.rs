//! The selectors that are eBPF programs.

#[cfg(feature = "bpf")]
pub(super) use built::Programs;
#[cfg(not(feature = "bpf"))]
pub(super) use not_built::Programs;

#[cfg(feature = "bpf")]
mod built {
    use std::net::SocketAddr;
    use std::os::fd::BorrowedFd;

    use fourtuple_bpf::{
        BpfError, Chooser, Control, Counted, CpuMap, GroupMap, Mode, ModeRequest, SourcePort,
    };

    use crate::spread::UdpGroupError;
    use crate::spread::group::XdpReport;
    use crate::spread::selector::{ControlFilter, CpuOrder, FlowKey, Selector, SlotRule};

    /// The eBPF programs of a group.
    #[derive(Debug)]
    pub(in crate::spread) struct Programs {
        spread: Selector,
        map: Option<GroupMap>,
        packets: Option<Packets>,
    }

    /// An XDP program at a device, which handles packets before the sockets.
    #[derive(Debug)]
    enum Packets {
        SourcePort(SourcePort),
        CpuMap(CpuMap),
    }

    impl Programs {
        pub(in crate::spread) const SLOTS: usize = GroupMap::SLOTS;

        /// Loads the program that uses a table, if a rule is given.
        pub(in crate::spread) fn load(
            spread: Selector,
            rule: Option<SlotRule>,
            control: Option<&ControlFilter>,
        ) -> Result<Programs, UdpGroupError> {
            let control = control.map(|filter| match *filter {
                ControlFilter::Bytes { key: FlowKey { offset, width, mask }, value } => {
                    Control::Bytes { offset, width, mask, value }
                }
                ControlFilter::Hops(hops) => Control::Hops(hops),
                ControlFilter::SourcePort(port) => Control::SourcePort(port),
                ControlFilter::Neighbour { key: FlowKey { offset, width, mask }, value } => {
                    Control::Neighbour { offset, width, mask, value }
                }
            });
            let map = rule
                .map(|rule| GroupMap::load(chooser(rule), control))
                .transpose()
                .map_err(|error| failure(spread, error))?;
            Ok(Programs { spread, map, packets: None })
        }

        fn failed(&self) -> impl Fn(BpfError) -> UdpGroupError {
            let spread = self.spread;
            move |error| failure(spread, error)
        }

        fn map(&self) -> Result<&GroupMap, UdpGroupError> {
            self.map.as_ref().ok_or(UdpGroupError::Fixed { selector: self.spread })
        }

        pub(in crate::spread) fn attach(&self, socket: BorrowedFd<'_>) -> Result<(), UdpGroupError> {
            self.map()?.attach(socket).map_err(self.failed())
        }

        /// Attaches the XDP program of the selector to the device that receives packets for `address`.
        pub(in crate::spread) fn attach_to_device(
            &mut self,
            address: SocketAddr,
            device: u32,
            members: usize,
        ) -> Result<(), UdpGroupError> {
            self.packets = match self.spread {
                Selector::XdpSourcePort { ports, .. } => Some(Packets::SourcePort(
                    SourcePort::attach(address, ports, device, ModeRequest::Either).map_err(self.failed())?,
                )),
                Selector::Cpumap { cpus, order, .. } => {
                    let cpus = cpus.map_or_else(|| processors().min(members as u32), u32::from);
                    let by = match order {
                        CpuOrder::Turn => Chooser::Hash,
                        CpuOrder::Random => Chooser::Random,
                        CpuOrder::Key(FlowKey { offset, width, mask }) => {
                            Chooser::Key { offset, width, mask }
                        }
                    };
                    Some(Packets::CpuMap(
                        CpuMap::attach(address, cpus, by, device, ModeRequest::Either)
                            .map_err(self.failed())?,
                    ))
                }
                _ => None,
            };
            Ok(())
        }

        pub(in crate::spread) fn seat(
            &self,
            seat: usize,
            socket: BorrowedFd<'_>,
        ) -> Result<(), UdpGroupError> {
            self.map()?.seat(seat, socket).map_err(self.failed())
        }

        pub(in crate::spread) fn seat_control(&self, socket: BorrowedFd<'_>) -> Result<(), UdpGroupError> {
            self.map()?.seat_control(socket).map_err(self.failed())
        }

        pub(in crate::spread) fn leave(&self, seat: usize) -> Result<(), UdpGroupError> {
            self.map()?.leave(seat).map_err(self.failed())
        }

        pub(in crate::spread) fn choose(&self, rule: SlotRule) -> Result<(), UdpGroupError> {
            self.map()?.choose(chooser(rule));
            Ok(())
        }

        pub(in crate::spread) fn give(&self, slot: usize, seat: usize) -> Result<(), UdpGroupError> {
            self.map()?.give(slot, seat).map_err(self.failed())
        }

        pub(in crate::spread) fn strays(&self) -> u64 {
            self.map.as_ref().map_or(0, GroupMap::strays)
        }

        /// Returns the BPF link that keeps the program attached to the device.
        pub(in crate::spread) fn link(&self) -> Option<BorrowedFd<'_>> {
            self.packets.as_ref().map(|packets| match packets {
                Packets::SourcePort(program) => program.link(),
                Packets::CpuMap(program) => program.link(),
            })
        }

        pub(in crate::spread) fn at_device(&self) -> Option<XdpReport> {
            let (mode, Counted { changed, passed }) = match self.packets.as_ref()? {
                Packets::SourcePort(program) => (program.mode(), program.counted()),
                Packets::CpuMap(program) => (program.mode(), program.counted()),
            };
            Some(XdpReport { native: mode == Mode::Native, changed, passed })
        }
    }

    fn failure(selector: Selector, error: BpfError) -> UdpGroupError {
        match error {
            BpfError::NotPermitted { call, source } => {
                UdpGroupError::NotPermitted { selector, call, needs: BpfError::NEEDS, error: source }
            }
            BpfError::Absent { what, source, .. } => {
                UdpGroupError::Absent { selector, what, error: Some(source) }
            }
            other => UdpGroupError::Bpf { selector, error: other.into() },
        }
    }

    fn chooser(rule: SlotRule) -> Chooser {
        match rule {
            SlotRule::Hash => Chooser::Hash,
            SlotRule::Random => Chooser::Random,
            SlotRule::Cpu => Chooser::Processor,
            SlotRule::Key(FlowKey { offset, width, mask }) => Chooser::Key { offset, width, mask },
        }
    }

    /// Returns the number of CPUs that this process may use.
    fn processors() -> u32 {
        std::thread::available_parallelism().map_or(1, |processors| processors.get() as u32)
    }
}

/// A build without the feature `bpf` has no eBPF program of a group.
#[cfg(not(feature = "bpf"))]
mod not_built {
    use std::net::SocketAddr;
    use std::os::fd::BorrowedFd;

    use crate::spread::UdpGroupError;
    use crate::spread::group::XdpReport;
    use crate::spread::selector::{ControlFilter, Selector, SlotRule};

    type Done = Result<(), UdpGroupError>;

    #[derive(Debug)]
    pub(in crate::spread) enum Programs {}

    impl Programs {
        pub(in crate::spread) const SLOTS: usize = 1;

        pub(in crate::spread) fn load(
            selector: Selector,
            _: Option<SlotRule>,
            _: Option<&ControlFilter>,
        ) -> Result<Programs, UdpGroupError> {
            Err(UdpGroupError::NotBuilt { selector, feature: "bpf" })
        }

        pub(in crate::spread) fn attach(&self, _: BorrowedFd<'_>) -> Done {
            match *self {}
        }
        pub(in crate::spread) fn attach_to_device(&mut self, _: SocketAddr, _: u32, _: usize) -> Done {
            match *self {}
        }
        pub(in crate::spread) fn seat(&self, _: usize, _: BorrowedFd<'_>) -> Done {
            match *self {}
        }
        pub(in crate::spread) fn seat_control(&self, _: BorrowedFd<'_>) -> Done {
            match *self {}
        }
        pub(in crate::spread) fn leave(&self, _: usize) -> Done {
            match *self {}
        }
        pub(in crate::spread) fn choose(&self, _: SlotRule) -> Done {
            match *self {}
        }
        pub(in crate::spread) fn give(&self, _: usize, _: usize) -> Done {
            match *self {}
        }
        pub(in crate::spread) fn strays(&self) -> u64 {
            match *self {}
        }
        pub(in crate::spread) fn link(&self) -> Option<BorrowedFd<'_>> {
            match *self {}
        }
        pub(in crate::spread) fn at_device(&self) -> Option<XdpReport> {
            match *self {}
        }
    }
}
