//! Sockets that share an address.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{device, membarrier};

use crate::spread::classic::{self, By};
use crate::spread::control::ControlFilter;
use crate::spread::device::Device;
use crate::spread::error::SpreadError;
use crate::spread::programs::Programs;
use crate::spread::selector::{Rule, Spread};
use crate::spread::table::Table;

/// More sockets than this no one can pin to processors.
pub(super) const MOST: usize = 1024;

/// UDP sockets bound to one address, among which a [`Spread`] chooses.
///
/// None of them may be connected: that ends the balancing, see [`Group::connected`]. Any
/// process of the same user that binds to the address with SO_REUSEPORT becomes a member as well; with [`Spread::Map`] it
/// gets nothing.
#[derive(Debug)]
pub struct Group {
    address: SocketAddr,
    spread: Spread,
    /// By seat; those that have left are gone.
    members: Vec<Option<OwnedFd>>,
    control: Option<OwnedFd>,
    programs: Option<Programs>,
    live: Option<Live>,
    /// What keeps the program at a device that another process has put there.
    link: Option<OwnedFd>,
}

/// What can be changed of a group with [`Spread::Map`].
#[derive(Debug)]
struct Live {
    weights: Vec<u32>,
    table: Table,
}

/// What the program at the device of a group did: [`Spread::XdpSourcePort`], [`Spread::Cpumap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtDevice {
    /// Whether it is in the device's driver (native), and not in the kernel behind it (generic, SKB mode).
    pub native: bool,
    /// Packets that were given another port, or given to a processor.
    pub changed: u64,
    /// Packets that it let pass as they were: those of others, fragments, IPv6 with extension headers.
    pub passed: u64,
}

/// Who chooses among the sockets.
enum Selector {
    Kernel,
    Classic(By),
    /// The table, by this rule.
    Table(Rule),
}

impl Group {
    /// Opens and binds `members` non-blocking sockets; port 0 is any. The selector is attached to the first when it is still
    /// alone, so that no packet is spread by anything else, and the kernel never has to exchange it under traffic.
    ///
    /// # Errors
    ///
    /// [`SpreadError`]: EADDRINUSE when others have the address without SO_REUSEPORT, or as another user.
    pub fn open(address: SocketAddr, members: usize, spread: &Spread) -> Result<Group, SpreadError> {
        Group::open_whole(address, members, spread, None)
    }

    /// The same with a socket more, [`Group::control`], to which control packets go and no others.
    ///
    /// # Errors
    ///
    /// As [`Group::open`]. [`SpreadError::NoControl`]: with [`Spread::Hash`], for which nothing but a table can leave a socket
    /// out; and by source port behind [`Spread::XdpSourcePort`].
    pub fn open_with_control(
        address: SocketAddr,
        members: usize,
        spread: &Spread,
        filter: &ControlFilter,
    ) -> Result<Group, SpreadError> {
        Group::open_whole(address, members, spread, Some(filter))
    }

    fn open_whole(
        address: SocketAddr,
        members: usize,
        spread: &Spread,
        filter: Option<&ControlFilter>,
    ) -> Result<Group, SpreadError> {
        if !(1..=MOST).contains(&members) {
            return Err(SpreadError::Members { members });
        }
        let selector = selector(spread, filter)?;
        let programs = match (&selector, spread) {
            (Selector::Table(rule), _) => Some(Programs::load(*spread, Some(*rule), filter)?),
            (_, Spread::XdpSourcePort { .. } | Spread::Cpumap { .. }) => {
                Some(Programs::load(*spread, None, None)?)
            }
            _ => None,
        };
        let mut group = Group {
            address,
            spread: *spread,
            members: Vec::new(),
            control: None,
            programs,
            live: None,
            link: None,
        };
        let has_table = matches!(selector, Selector::Table(_));
        for seat in 0..members {
            let member = group.socket()?;
            if seat == 0 {
                group.attach(&member, &selector, members, filter)?;
            }
            group.bind(&member)?;
            if let (true, Some(programs)) = (has_table, &group.programs) {
                programs.seat(seat, member.as_fd())?;
            }
            group.members.push(Some(member));
            if seat == 0 {
                group.attach_to_device(members)?;
            }
        }
        if filter.is_some() {
            let control = group.socket()?;
            group.bind(&control)?;
            if let (true, Some(programs)) = (has_table, &group.programs) {
                programs.seat_control(control.as_fd())?;
            }
            group.control = Some(control);
        }
        if let (true, Some(programs)) = (has_table, &group.programs) {
            let table = Table::even(Programs::SLOTS, members);
            table.iter().for_each(|(slot, seat)| programs.give(slot, seat));
            if matches!(spread, Spread::Map(_)) {
                group.live = Some(Live { weights: vec![1; members], table });
            }
        }
        Ok(group)
    }

    /// Of sockets that are open already.
    pub(super) fn of(
        address: SocketAddr,
        spread: Spread,
        members: Vec<OwnedFd>,
        control: Option<OwnedFd>,
        link: Option<OwnedFd>,
    ) -> Group {
        let members = members.into_iter().map(Some).collect();
        Group { address, spread, members, control, programs: None, live: None, link }
    }

    fn failure(&self, call: &'static str) -> impl Fn(io::Error) -> SpreadError {
        let address = self.address;
        move |source| SpreadError::Call { call, address, source }
    }

    fn socket(&self) -> Result<OwnedFd, SpreadError> {
        let socket = socket::open(Transport::Udp, self.address, true).map_err(self.failure("socket()"))?;
        match option::set_reuse_port(socket.as_fd()).map_err(self.failure("setsockopt(SO_REUSEPORT)"))? {
            Answer::Done => Ok(socket),
            Answer::Absent => Err(SpreadError::Absent { spread: self.spread, what: "SO_REUSEPORT" }),
        }
    }

    fn bind(&mut self, socket: &OwnedFd) -> Result<(), SpreadError> {
        socket::bind(socket.as_fd(), self.address).map_err(self.failure("bind()"))?;
        self.address = socket::local_address(socket.as_fd()).map_err(self.failure("getsockname()"))?;
        Ok(())
    }

    /// Before bind(): the group comes into being with its selector.
    fn attach(
        &self,
        first: &OwnedFd,
        selector: &Selector,
        members: usize,
        filter: Option<&ControlFilter>,
    ) -> Result<(), SpreadError> {
        let by = match (selector, &self.programs) {
            (Selector::Table(_), Some(programs)) => return programs.attach(first.as_fd()),
            (Selector::Classic(by), _) => *by,
            _ => return Ok(()),
        };
        const CALL: &str = "setsockopt(SO_ATTACH_REUSEPORT_CBPF)";
        let program = classic::program(by, members as u32, filter);
        match option::attach_group_selector(first.as_fd(), &program).map_err(self.failure(CALL))? {
            Answer::Done => Ok(()),
            Answer::Absent => {
                Err(SpreadError::Absent { spread: self.spread, what: "SO_ATTACH_REUSEPORT_CBPF" })
            }
        }
    }

    /// After the first bind(), which says the port: until there is another socket, nothing is spread anyway.
    fn attach_to_device(&mut self, members: usize) -> Result<(), SpreadError> {
        let (Spread::XdpSourcePort { device, .. } | Spread::Cpumap { device, .. }) = self.spread else {
            return Ok(());
        };
        let device = self.device(device)?;
        match &mut self.programs {
            Some(programs) => programs.attach_to_device(self.address, device, members),
            None => Ok(()),
        }
    }

    /// The index of the device that packets come to.
    fn device(&self, name: Option<Device>) -> Result<u32, SpreadError> {
        let (spread, address) = (self.spread, self.address);
        if let Some(device) = name {
            return device::index(device.name()).map_err(|source| SpreadError::NoDevice {
                spread,
                device,
                source,
            });
        }
        device::with_address(address.ip())
            .map_err(self.failure("RTM_GETADDR"))?
            .ok_or(SpreadError::WhichDevice { spread, address })
    }

    /// Address and port of all of them.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it was opened with; of [`Spread::Map`] the rule may be another one by now.
    pub fn spread(&self) -> Spread {
        self.spread
    }

    /// How many members there are, without the control socket.
    pub fn len(&self) -> usize {
        self.members.iter().flatten().count()
    }

    /// Whether there is none, which [`Group::open`] rules out.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A descriptor of member `index`, in the order of binding, which the selector's numbers mean.
    ///
    /// # Errors
    ///
    /// EMFILE; InvalidInput for one that has left, and beyond the last.
    pub fn member(&self, index: usize) -> io::Result<OwnedFd> {
        match self.members.get(index) {
            Some(Some(member)) => member.try_clone(),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Whether control packets go to a socket of their own.
    pub fn has_control(&self) -> bool {
        self.control.is_some()
    }

    /// A descriptor of the socket that control packets go to.
    ///
    /// # Errors
    ///
    /// EMFILE; InvalidInput when the group has none.
    pub fn control(&self) -> io::Result<OwnedFd> {
        match &self.control {
            Some(control) => control.try_clone(),
            None => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// The first member that somebody has connected. All packets of its peer then go to it, whatever the selector says, and
    /// the others' shares may be uneven (`reuseport_has_conns`).
    ///
    /// # Errors
    ///
    /// [`SpreadError::Call`]
    pub fn connected(&self) -> Result<Option<usize>, SpreadError> {
        for (index, member) in self.members.iter().enumerate() {
            let Some(member) = member else { continue };
            if socket::has_peer(member.as_fd()).map_err(self.failure("getpeername()"))? {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// What keeps the program at the device there, with [`Spread::XdpSourcePort`] and [`Spread::Cpumap`]: a descriptor for
    /// whoever takes the group over.
    pub fn link(&self) -> Option<BorrowedFd<'_>> {
        let link = self.link.as_ref().map(AsFd::as_fd);
        link.or_else(|| self.programs.as_ref()?.link())
    }

    /// What the program at the device did, where there is one.
    pub fn at_device(&self) -> Option<AtDevice> {
        self.programs.as_ref()?.at_device()
    }

    /// With [`Spread::Map`]: packets that met only closed sockets in its table, so that the kernel's hash chose. 0 as long as
    /// members are not closed but by [`Group::leave`].
    pub fn strays(&self) -> u64 {
        self.programs.as_ref().map_or(0, Programs::strays)
    }

    fn live(&mut self) -> Result<(&mut Live, &Programs), SpreadError> {
        match (&mut self.live, &self.programs) {
            (Some(live), Some(programs)) => Ok((live, programs)),
            _ => Err(SpreadError::Fixed { spread: self.spread }),
        }
    }

    /// Chooses by another rule, from the next packet on.
    ///
    /// # Errors
    ///
    /// [`SpreadError::Fixed`] without [`Spread::Map`]; [`SpreadError::Impossible`] for a key that is none.
    pub fn choose(&mut self, rule: Rule) -> Result<(), SpreadError> {
        if let Some(why) = Spread::Map(rule).fault() {
            return Err(SpreadError::Impossible { spread: Spread::Map(rule), why });
        }
        self.live()?.1.choose(rule)
    }

    /// Gives each member a share of the slots, from the next packet on. Slots move one by one, and only those that must: a
    /// flow whose slot stays, stays. A weight below 1/8192 of the sum may be none.
    ///
    /// # Errors
    ///
    /// [`SpreadError::Fixed`] without [`Spread::Map`]. [`SpreadError::Weights`]: one for every seat, also 0 for those that
    /// have left, and some of them not 0.
    pub fn steer(&mut self, weights: &[u32]) -> Result<(), SpreadError> {
        self.live()?;
        let members = self.members.len();
        let gone = |seat: usize| self.members[seat].is_none();
        let why = if weights.len() != members {
            Some("there must be one for each")
        } else if weights.iter().all(|weight| *weight == 0) {
            Some("somebody must get something")
        } else if weights.iter().enumerate().any(|(seat, weight)| *weight > 0 && gone(seat)) {
            Some("a member that has left gets nothing")
        } else {
            None
        };
        if let Some(why) = why {
            return Err(SpreadError::Weights { given: weights.to_vec(), members, why });
        }
        let (live, programs) = self.live()?;
        for (slot, seat) in live.table.steer(weights) {
            programs.give(slot, seat);
        }
        live.weights = weights.to_vec();
        Ok(())
    }

    /// A new member, with as much weight as the others have on the average: its number, which is that of one that has left
    /// where there is one. It gets packets when this returns.
    ///
    /// # Errors
    ///
    /// [`SpreadError::Fixed`] without [`Spread::Map`]; [`SpreadError::Members`]; and as [`Group::open`].
    pub fn join(&mut self) -> Result<usize, SpreadError> {
        let mut weights = self.live()?.0.weights.clone();
        let seat = self.members.iter().position(Option::is_none).unwrap_or(self.members.len());
        if seat == MOST {
            return Err(SpreadError::Members { members: MOST + 1 });
        }
        let socket = self.socket()?;
        self.bind(&socket)?;
        self.live()?.1.seat(seat, socket.as_fd())?;
        let sum: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
        let share = u32::try_from(sum / self.len() as u64).unwrap_or(u32::MAX).max(1);
        if seat == self.members.len() {
            self.members.push(Some(socket));
            weights.push(share);
        } else {
            self.members[seat] = Some(socket);
            weights[seat] = share;
        }
        self.steer(&weights)?;
        Ok(seat)
    }

    /// A member leaves: its slots go to the others, and when this returns, no packet can come any more. What waits in its
    /// queue is to be read from the socket that this gives; once that says WouldBlock it may be closed, and nothing is lost.
    /// A plain close() loses what is in the queue.
    ///
    /// # Errors
    ///
    /// [`SpreadError::Fixed`] without [`Spread::Map`]; [`SpreadError::NoMember`]; [`SpreadError::Weights`] when nobody would be
    /// left who gets something. [`SpreadError::Call`], with EINVAL where the kernel cannot wait for packets under way
    /// (nohz_full): then the member has not left, and gets nothing.
    pub fn leave(&mut self, index: usize) -> Result<OwnedFd, SpreadError> {
        let mut weights = self.live()?.0.weights.clone();
        if !matches!(self.members.get(index), Some(Some(_))) {
            return Err(SpreadError::NoMember { index });
        }
        weights[index] = 0;
        self.steer(&weights)?;
        membarrier::wait_for_packets_under_way().map_err(self.failure("membarrier()"))?;
        self.live()?.1.leave(index)?;
        self.members[index].take().ok_or(SpreadError::NoMember { index })
    }
}

/// Who chooses, or why nobody can.
fn selector(spread: &Spread, filter: Option<&ControlFilter>) -> Result<Selector, SpreadError> {
    let spread = *spread;
    if let Some(why) = spread.fault() {
        return Err(SpreadError::Impossible { spread, why });
    }
    if let Some(filter) = filter {
        let why = match (spread, filter) {
            (_, filter) if !filter.is_sound() => Some("no packet is like that"),
            (Spread::Hash, _) => Some("the hash is over all sockets; map:hash can leave one out"),
            (Spread::XdpSourcePort { .. }, ControlFilter::SourcePort(_)) => {
                Some("the packets have another source port before they are looked at")
            }
            _ => None,
        };
        if let Some(why) = why {
            return Err(SpreadError::NoControl { spread, filter: *filter, why });
        }
    }
    Ok(match (spread, filter) {
        (Spread::Hash, _) | (Spread::XdpSourcePort { .. }, None) => Selector::Kernel,
        (Spread::XdpSourcePort { .. }, Some(_)) => Selector::Table(Rule::Hash),
        (Spread::Random, _) => Selector::Classic(By::Random),
        (Spread::Key(key), _) => Selector::Classic(By::Key(key)),
        (Spread::Cpu | Spread::Cpumap { .. }, _) => Selector::Classic(By::Cpu),
        (Spread::Map(rule), _) => Selector::Table(rule),
    })
}
