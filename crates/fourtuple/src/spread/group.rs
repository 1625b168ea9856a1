//! A group of UDP sockets with one address (SO_REUSEPORT).

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use fourtuple_syscalls::option::{self, Answer, Instruction};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{datagram, device};

use crate::spread::UdpGroupError;
use crate::spread::programs::Programs;
use crate::spread::selector::{self, By, ControlFilter, DeviceName, Selector, SlotRule};

/// Maximum number of sockets of a group.
pub(super) const MAX_MEMBERS: usize = 1024;

/// UDP sockets bound to one address, among which a [`Selector`] chooses.
///
/// No socket of the group may be connected: a connected socket ends the balancing, see [`UdpGroup::connected`]. A process of the same
/// user that binds to the address with SO_REUSEPORT becomes a member too; with [`Selector::Map`] such a member gets no packets.
///
/// ```
/// use std::net::UdpSocket;
/// use fourtuple::spread::{Selector, UdpGroup};
///
/// let group = UdpGroup::open("127.0.0.1:0".parse()?, 2, &Selector::Random)?;
/// assert_eq!((group.len(), group.is_empty(), group.spread()), (2, false, Selector::Random));
/// let workers = [group.member_socket(0)?, group.member_socket(1)?]; // non-blocking, one for each thread
///
/// // The packets of one sender reach both workers. By the kernel's hash, one worker would get all of them.
/// let sender = UdpSocket::bind("127.0.0.1:0")?;
/// for _ in 0..100 {
///     sender.send_to(b"x", group.address())?;
/// }
/// for worker in &workers {
/// #   worker.set_nonblocking(false)?; // a busy kernel delivers the packets later
///     worker.recv(&mut [0; 1])?;
/// }
/// assert_eq!(group.connected()?, None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A group with [`Selector::Map`] can change under traffic (feature `bpf`, CAP_BPF and CAP_NET_ADMIN):
///
/// ```no_run
/// use std::net::UdpSocket;
/// use fourtuple::spread::{FlowKey, Selector, SlotRule, UdpGroup};
///
/// let mut group = UdpGroup::open("0.0.0.0:4000".parse()?, 4, &Selector::Map(SlotRule::Hash))?;
/// group.choose(SlotRule::Key(FlowKey::whole(4, 4)))?; // by a number in the payload
/// group.steer(&[2, 1, 1, 1])?; // member 0 gets two fifths of the slots
/// let added = group.join()?;
/// println!("member {added} gets packets");
///
/// let left = UdpSocket::from(group.leave(0)?);
/// while let Ok(length) = left.recv(&mut [0; 2048]) {
///     println!("a packet of {length} bytes that arrived before member 0 left");
/// }
/// assert_eq!(group.strays(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct UdpGroup {
    address: SocketAddr,
    spread: Selector,
    /// Members by number; `None` for a member that has left.
    members: Vec<Option<OwnedFd>>,
    control: Option<OwnedFd>,
    /// The filter by which members refuse control packets.
    filter: Option<ControlFilter>,
    programs: Option<Programs>,
    live: Option<Live>,
    /// The BPF link that keeps the program of another process attached to a device.
    link: Option<OwnedFd>,
}

/// The slots and weights of a group with [`Selector::Map`].
#[derive(Debug)]
struct Live {
    weights: Vec<u32>,
    table: Table,
}

/// The counters of the XDP program of a group with [`Selector::XdpSourcePort`] or [`Selector::Cpumap`].
///
/// Example: [`UdpGroup::at_device`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct XdpReport {
    /// Whether the program runs in the driver of the device (native mode) instead of the network stack (generic or SKB mode).
    pub native: bool,
    /// Packets whose source port was rewritten, or that were redirected to a CPU.
    pub changed: u64,
    /// Packets passed unchanged: packets for other sockets, fragments, IPv6 packets with extension headers.
    pub passed: u64,
}

/// The mechanism that chooses the socket of a packet.
enum Chooser {
    Kernel,
    Classic(By),
    /// A table of slots, indexed by this rule.
    Table(SlotRule),
}

impl UdpGroup {
    /// Opens and binds `members` non-blocking sockets. With port 0 the kernel chooses a port. The selector is attached to the first
    /// socket before the others are bound, so that no packet is distributed by another rule.
    ///
    /// # Errors
    ///
    /// [`UdpGroupError`]: EADDRINUSE when a socket without SO_REUSEPORT, or of another user, has the address.
    pub fn open(address: SocketAddr, members: usize, spread: &Selector) -> Result<UdpGroup, UdpGroupError> {
        UdpGroup::open_whole(address, members, spread, None)
    }

    /// Like [`UdpGroup::open`], with one more socket ([`UdpGroup::control`]) that receives only the control packets.
    ///
    /// From before bind(2), members have a socket filter (SO_ATTACH_FILTER) against control packets, and the control socket has one
    /// against data. A packet that the kernel gives to the wrong socket is dropped and counted in the drops of this socket: a control
    /// packet that arrives before the control socket is bound, or data for which the kernel's hash chose ([`UdpGroup::strays`]).
    ///
    /// # Errors
    ///
    /// The same errors as [`UdpGroup::open`]. [`UdpGroupError::NoControl`] with [`Selector::Hash`], whose hash covers all sockets of the group,
    /// and for a filter by source port with [`Selector::XdpSourcePort`], which rewrites that port.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::net::UdpSocket;
    /// use fourtuple::spread::{Selector, UdpGroup};
    ///
    /// let heartbeat = "bytes:0:1=0xff".parse()?; // control packets begin with this byte
    /// let group = UdpGroup::open_with_control("127.0.0.1:0".parse()?, 2, &Selector::Random, &heartbeat)?;
    /// assert!(group.has_control());
    ///
    /// let sender = UdpSocket::bind("127.0.0.1:0")?;
    /// sender.send_to(b"data", group.address())?;
    /// sender.send_to(&[0xff], group.address())?;
    /// let control = UdpSocket::from(group.control()?);
    /// assert_eq!(control.recv(&mut [0; 8])?, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open_with_control(
        address: SocketAddr,
        members: usize,
        spread: &Selector,
        filter: &ControlFilter,
    ) -> Result<UdpGroup, UdpGroupError> {
        UdpGroup::open_whole(address, members, spread, Some(filter))
    }

    fn open_whole(
        address: SocketAddr,
        members: usize,
        spread: &Selector,
        filter: Option<&ControlFilter>,
    ) -> Result<UdpGroup, UdpGroupError> {
        if !(1..=MAX_MEMBERS).contains(&members) {
            return Err(UdpGroupError::Members { members });
        }
        let chooser = chooser(spread, filter)?;
        let programs = match &chooser {
            Chooser::Table(rule) => Some(Programs::load(*spread, Some(*rule), filter)?),
            _ if spread.needs_bpf() => Some(Programs::load(*spread, None, None)?),
            _ => None,
        };
        let mut group = UdpGroup {
            address,
            spread: *spread,
            members: Vec::new(),
            control: None,
            filter: filter.copied(),
            programs,
            live: None,
            link: None,
        };
        let has_table = matches!(chooser, Chooser::Table(_));
        for seat in 0..members {
            let member = group.open_member()?;
            if seat == 0 {
                group.attach(&member, &chooser, members, filter)?;
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
        if let (true, Some(programs)) = (has_table, &group.programs) {
            let table = Table::even(Programs::SLOTS, members);
            table.iter().try_for_each(|(slot, seat)| programs.give(slot, seat))?;
            if matches!(spread, Selector::Map(_)) {
                group.live = Some(Live { weights: vec![1; members], table });
            }
        }
        // The control socket is bound last: before members have their slots, the kernel's hash would give it data.
        if let Some(filter) = filter {
            let control = group.filtered_socket(&selector::only_control(filter))?;
            group.bind(&control)?;
            if let (true, Some(programs)) = (has_table, &group.programs) {
                programs.seat_control(control.as_fd())?;
            }
            group.control = Some(control);
        }
        Ok(group)
    }

    fn failure(&self, call: &'static str) -> impl Fn(io::Error) -> UdpGroupError {
        let address = self.address;
        move |error| UdpGroupError::Call { call, address, error }
    }

    fn socket(&self) -> Result<OwnedFd, UdpGroupError> {
        socket::open(Transport::Udp, self.address, true).map_err(self.failure("socket()"))
    }

    fn set_reuse_port(&self, socket: &OwnedFd) -> Result<(), UdpGroupError> {
        match option::set_reuse_port(socket.as_fd()).map_err(self.failure("setsockopt(SO_REUSEPORT)"))? {
            Answer::Done => Ok(()),
            Answer::Absent => {
                Err(UdpGroupError::Absent { selector: self.spread, what: "SO_REUSEPORT", error: None })
            }
        }
    }

    fn open_member(&self) -> Result<OwnedFd, UdpGroupError> {
        match &self.filter {
            Some(filter) => self.filtered_socket(&selector::without_control(filter)),
            None => self.socket(),
        }
    }

    fn filtered_socket(&self, filter: &[Instruction]) -> Result<OwnedFd, UdpGroupError> {
        let socket = self.socket()?;
        option::attach_filter(socket.as_fd(), filter)
            .map_err(self.failure("setsockopt(SO_ATTACH_FILTER)"))?;
        Ok(socket)
    }

    fn bind(&mut self, socket: &OwnedFd) -> Result<(), UdpGroupError> {
        // With SO_REUSEPORT and without a selector, bind(2) to port 0 may choose the port of another group of this user
        // (udp_lib_lport_inuse).
        let kernel_chooses = self.address.port() == 0;
        if !kernel_chooses {
            self.set_reuse_port(socket)?;
        }
        socket::bind(socket.as_fd(), self.address).map_err(self.failure("bind()"))?;
        self.address = socket::local_address(socket.as_fd()).map_err(self.failure("getsockname()"))?;
        if kernel_chooses {
            self.set_reuse_port(socket)?;
        }
        Ok(())
    }

    /// Attaches the selector before bind(2): the group starts with it.
    fn attach(
        &self,
        first: &OwnedFd,
        chooser: &Chooser,
        members: usize,
        filter: Option<&ControlFilter>,
    ) -> Result<(), UdpGroupError> {
        if matches!(chooser, Chooser::Kernel) {
            return Ok(());
        }
        self.set_reuse_port(first)?;
        let by = match (chooser, &self.programs) {
            (Chooser::Table(_), Some(programs)) => return programs.attach(first.as_fd()),
            (Chooser::Classic(by), _) => *by,
            _ => return Ok(()),
        };
        const CALL: &str = "setsockopt(SO_ATTACH_REUSEPORT_CBPF)";
        let program = selector::program(by, members as u32, filter);
        match option::attach_group_selector(first.as_fd(), &program).map_err(self.failure(CALL))? {
            Answer::Done => Ok(()),
            Answer::Absent => Err(UdpGroupError::Absent {
                selector: self.spread,
                what: "SO_ATTACH_REUSEPORT_CBPF",
                error: None,
            }),
        }
    }

    /// Attaches the program to the device after the first bind(2), which determines the port. With one socket there is no choice yet.
    fn attach_to_device(&mut self, members: usize) -> Result<(), UdpGroupError> {
        let Some(device) = self.spread.device() else { return Ok(()) };
        let device = self.device(device)?;
        match &mut self.programs {
            Some(programs) => programs.attach_to_device(self.address, device, members),
            None => Ok(()),
        }
    }

    /// Returns the index of the device that receives the packets.
    fn device(&self, name: Option<DeviceName>) -> Result<u32, UdpGroupError> {
        let (spread, address) = (self.spread, self.address);
        if let Some(device) = name {
            return device::index(device.name()).map_err(|error| UdpGroupError::NoDevice {
                selector: spread,
                device,
                error,
            });
        }
        device::with_address(address.ip())
            .map_err(self.failure("RTM_GETADDR"))?
            .ok_or(UdpGroupError::WhichDevice { selector: spread, address })
    }

    /// Returns the address and port of the group.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the selector of [`UdpGroup::open`]. A later change of the rule of [`Selector::Map`] is not included.
    pub fn spread(&self) -> Selector {
        self.spread
    }

    /// Returns the number of members, without the control socket.
    pub fn len(&self) -> usize {
        self.members.iter().flatten().count()
    }

    /// Returns whether the group has no member, which [`UdpGroup::open`] excludes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a duplicate descriptor of member `index`. Indices are in the order of bind(2), as the selector counts them.
    ///
    /// # Errors
    ///
    /// EMFILE; `InvalidInput` when the member has left or does not exist.
    pub fn member(&self, index: usize) -> io::Result<OwnedFd> {
        match self.members.get(index) {
            Some(Some(member)) => member.try_clone(),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Returns whether the group has a control socket.
    pub fn has_control(&self) -> bool {
        self.control.is_some()
    }

    /// Returns a duplicate descriptor of the control socket.
    ///
    /// # Errors
    ///
    /// EMFILE; `InvalidInput` when the group has no control socket.
    pub fn control(&self) -> io::Result<OwnedFd> {
        match &self.control {
            Some(control) => control.try_clone(),
            None => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Returns [`member`](UdpGroup::member) as a non-blocking socket of the standard library, which `tokio::net::UdpSocket::from_std` takes.
    ///
    /// # Errors
    ///
    /// The errors of [`member`](UdpGroup::member).
    pub fn member_socket(&self, index: usize) -> io::Result<UdpSocket> {
        self.member(index).map(UdpSocket::from)
    }

    /// Returns the first connected member, if any. The kernel then delivers all packets of its peer to it regardless of the selector, and
    /// the distribution over the other members may be uneven (`reuseport_has_conns`).
    ///
    /// # Errors
    ///
    /// [`UdpGroupError::Call`]
    pub fn connected(&self) -> Result<Option<usize>, UdpGroupError> {
        for (index, member) in self.members.iter().enumerate() {
            let Some(member) = member else { continue };
            if socket::has_peer(member.as_fd()).map_err(self.failure("getpeername()"))? {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// Returns the BPF link that keeps the program of [`Selector::XdpSourcePort`] or [`Selector::Cpumap`] attached to its device: a
    /// process that takes the group over needs it.
    pub fn link(&self) -> Option<BorrowedFd<'_>> {
        let link = self.link.as_ref().map(AsFd::as_fd);
        link.or_else(|| self.programs.as_ref()?.link())
    }

    /// Returns the counters of the XDP program, if the group has one.
    ///
    /// ```no_run
    /// use fourtuple::spread::UdpGroup;
    ///
    /// let group = UdpGroup::open("192.0.2.1:4000".parse()?, 4, &"xdp:64@eth0".parse()?)?;
    /// if let Some(report) = group.at_device() {
    ///     let mode = if report.native { "native" } else { "generic" };
    ///     println!("{mode} XDP: {} packets changed, {} passed", report.changed, report.passed);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn at_device(&self) -> Option<XdpReport> {
        self.programs.as_ref()?.at_device()
    }

    /// Returns the number of packets for which the table of [`Selector::Map`] had only closed sockets, so that the kernel's hash chose. It
    /// is 0 if members are closed only after [`UdpGroup::leave`].
    pub fn strays(&self) -> u64 {
        self.programs.as_ref().map_or(0, Programs::strays)
    }

    fn live(&mut self) -> Result<(&mut Live, &Programs), UdpGroupError> {
        match (&mut self.live, &self.programs) {
            (Some(live), Some(programs)) => Ok((live, programs)),
            _ => Err(UdpGroupError::Fixed { selector: self.spread }),
        }
    }

    /// Replaces the rule of [`Selector::Map`]. The next packet uses the new rule.
    ///
    /// # Errors
    ///
    /// [`UdpGroupError::Fixed`] without [`Selector::Map`]; [`UdpGroupError::Impossible`] for an invalid key.
    pub fn choose(&mut self, rule: SlotRule) -> Result<(), UdpGroupError> {
        if let Some(why) = Selector::Map(rule).fault() {
            return Err(UdpGroupError::Impossible { selector: Selector::Map(rule), why });
        }
        self.live()?.1.choose(rule)
    }

    /// Divides the slots among members by weight. The next packet uses the new slots. Only as many slots move as necessary, and a flow
    /// whose slot does not move keeps its member. A weight below 1/8192 of the sum may get no slot.
    ///
    /// # Errors
    ///
    /// [`UdpGroupError::Fixed`] without [`Selector::Map`]. [`UdpGroupError::Weights`] unless there is one weight for each member, 0 for
    /// each member that has left, and a sum above 0.
    pub fn steer(&mut self, weights: &[u32]) -> Result<(), UdpGroupError> {
        self.live()?;
        let members = self.members.len();
        let gone = |seat: usize| self.members[seat].is_none();
        let why = if weights.len() != members {
            Some("there must be one for each")
        } else if weights.iter().all(|weight| *weight == 0) {
            Some("one weight at least must be above 0")
        } else if weights.iter().enumerate().any(|(seat, weight)| *weight > 0 && gone(seat)) {
            Some("a member that has left gets nothing")
        } else {
            None
        };
        if let Some(why) = why {
            return Err(UdpGroupError::Weights { given: weights.to_vec(), members, why });
        }
        let (live, programs) = self.live()?;
        for (slot, seat) in live.table.steer(weights) {
            programs.give(slot, seat)?;
        }
        live.weights = weights.to_vec();
        Ok(())
    }

    /// Adds a member with the average weight of the other members, and returns its number: the number of a member that has left, if any.
    /// The member receives packets when this call returns.
    ///
    /// # Errors
    ///
    /// [`UdpGroupError::Fixed`] without [`Selector::Map`]; [`UdpGroupError::Members`]; and the errors of [`UdpGroup::open`].
    pub fn join(&mut self) -> Result<usize, UdpGroupError> {
        let mut weights = self.live()?.0.weights.clone();
        let seat = self.members.iter().position(Option::is_none).unwrap_or(self.members.len());
        if seat == MAX_MEMBERS {
            return Err(UdpGroupError::Members { members: MAX_MEMBERS + 1 });
        }
        let socket = self.open_member()?;
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

    /// Removes a member. Its slots move to the other members, and no packet reaches its socket after this call returns. The caller reads
    /// the remaining packets from the returned socket until `WouldBlock`, then closes it: no packet is lost. A close(2) without this
    /// call loses the packets in the receive queue. The returned socket cannot send; the other members have the same address.
    ///
    /// # Errors
    ///
    /// [`UdpGroupError::Fixed`] without [`Selector::Map`]; [`UdpGroupError::NoMember`]; [`UdpGroupError::Weights`] when no other
    /// member has weight. [`UdpGroupError::Call`] with EINVAL where the kernel cannot wait for packets in progress (nohz_full): the member
    /// then stays in the group, without slots.
    pub fn leave(&mut self, index: usize) -> Result<OwnedFd, UdpGroupError> {
        let mut weights = self.live()?.0.weights.clone();
        if !matches!(self.members.get(index), Some(Some(_))) {
            return Err(UdpGroupError::NoMember { index });
        }
        weights[index] = 0;
        self.steer(&weights)?;
        datagram::wait_for_packets_in_flight().map_err(self.failure("membarrier()"))?;
        self.live()?.1.leave(index)?;
        let member = self.members[index].take().ok_or(UdpGroupError::NoMember { index })?;
        // close(2) leaves the group before it leaves the hash table of sockets. A lookup that finds the socket in between takes this
        // socket without asking for the choice of the group (reuseport_select_sock), and its packet would be lost.
        if option::set_unreachable(member.as_fd()).is_ok() {
            datagram::wait_for_packets_in_flight().map_err(self.failure("membarrier()"))?;
        }
        Ok(member)
    }
}

/// Returns the mechanism for a selector and filter, or the reason why there is none.
fn chooser(spread: &Selector, filter: Option<&ControlFilter>) -> Result<Chooser, UdpGroupError> {
    let spread = *spread;
    if let Some(why) = spread.fault() {
        return Err(UdpGroupError::Impossible { selector: spread, why });
    }
    if let Some(filter) = filter {
        let why = match (spread, filter) {
            (_, filter) if !filter.is_sound() => Some("no packet is like that"),
            (Selector::Hash, _) => Some("the hash is over all sockets; map:hash can leave one out"),
            (Selector::XdpSourcePort { .. }, ControlFilter::SourcePort(_)) => {
                Some("the packets have another source port before they are looked at")
            }
            _ => None,
        };
        if let Some(why) = why {
            return Err(UdpGroupError::NoControl { selector: spread, filter: *filter, why });
        }
    }
    Ok(match (spread, filter) {
        (Selector::Hash, _) | (Selector::XdpSourcePort { .. }, None) => Chooser::Kernel,
        (Selector::XdpSourcePort { .. }, Some(_)) => Chooser::Table(SlotRule::Hash),
        (Selector::Random, _) => Chooser::Classic(By::Random),
        (Selector::Key(key), _) => Chooser::Classic(By::Key(key)),
        (Selector::Cpu | Selector::Cpumap { .. }, _) => Chooser::Classic(By::Cpu),
        (Selector::Map(rule), _) => Chooser::Table(rule),
    })
}

impl UdpGroup {
    /// Returns a group of sockets that another process has opened, in the order of its members. The selector stays in force, since the
    /// kernel keeps it while one of the sockets is open. `control` and `link` are the results of [`UdpGroup::control`] and
    /// [`UdpGroup::link`] in the other process. The group cannot be changed ([`UdpGroupError::Fixed`], even with [`Selector::Map`]), and
    /// [`UdpGroup::at_device`] returns `None`.
    ///
    /// # Errors
    ///
    /// [`UdpGroupError::Members`]; [`UdpGroupError::NotOne`] when the sockets are not all bound to one address, or when
    /// the selector has a program at a device and `link` is missing.
    ///
    /// # Examples
    ///
    /// ```
    /// use fourtuple::spread::{Selector, UdpGroup};
    ///
    /// let group = UdpGroup::open("127.0.0.1:0".parse()?, 2, &Selector::Random)?;
    /// let members = vec![group.member(0)?, group.member(1)?]; // sent to the other process (SCM_RIGHTS of unix(7))
    /// let link = group.link().map(|link| link.try_clone_to_owned()).transpose()?;
    ///
    /// let adopted = UdpGroup::adopt(Selector::Random, members, None, link)?; // in the other process
    /// drop(group);
    /// assert_eq!((adopted.len(), adopted.has_control()), (2, false));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn adopt(
        spread: Selector,
        members: Vec<OwnedFd>,
        control: Option<OwnedFd>,
        link: Option<OwnedFd>,
    ) -> Result<UdpGroup, UdpGroupError> {
        if !(1..=MAX_MEMBERS).contains(&members.len()) {
            return Err(UdpGroupError::Members { members: members.len() });
        }
        let mut first: Option<SocketAddr> = None;
        for member in members.iter().chain(&control) {
            // Fails for a descriptor that is not an IP socket.
            let address = socket::local_address(member.as_fd()).map_err(|error| UdpGroupError::NotOne {
                selector: spread,
                why: "a member is not a UDP socket",
                error: Some(error),
            })?;
            if *first.get_or_insert(address) != address {
                return Err(UdpGroupError::NotOne {
                    selector: spread,
                    why: "its members are bound to different addresses",
                    error: None,
                });
            }
        }
        let Some(address) = first else { return Err(UdpGroupError::Members { members: 0 }) };
        if spread.device().is_some() && link.is_none() {
            return Err(UdpGroupError::NotOne {
                selector: spread,
                why: "the link of its program at the device is missing",
                error: None,
            });
        }
        let members = members.into_iter().map(Some).collect();
        Ok(UdpGroup { address, spread, members, control, filter: None, programs: None, live: None, link })
    }
}

/// The step between visited slots. It is odd, so that steps modulo a power of two visit every slot, and large, so that consecutive
/// visits are far apart.
const STRIDE: usize = 2531;

/// The member of each slot.
#[derive(Debug)]
pub(super) struct Table {
    owner: Vec<usize>,
}

impl Table {
    /// Returns a table in which slots go to members in turn. The distribution is even for flows with small numbers too.
    pub(super) fn even(slots: usize, seats: usize) -> Table {
        Table { owner: (0..slots).map(|slot| slot % seats).collect() }
    }

    /// Returns all pairs of slot and member.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.owner.iter().copied().enumerate()
    }

    /// Divides the slots by weight with the fewest moves, and returns each moved slot with its new member. The sum of the weights must not
    /// be 0.
    pub(super) fn steer(&mut self, weights: &[u32]) -> Vec<(usize, usize)> {
        let quotas = quotas(self.owner.len(), weights);
        let mut has = vec![0_usize; weights.len()];
        for owner in &self.owner {
            if let Some(has) = has.get_mut(*owner) {
                *has += 1;
            }
        }
        let mut moved = Vec::new();
        let mut slot = 0;
        for _ in 0..self.owner.len() {
            slot = (slot + STRIDE) % self.owner.len();
            let from = self.owner[slot];
            if has.get(from).is_some_and(|has| *has <= quotas[from]) {
                continue;
            }
            // Picks the member with the fewest slots relative to its share. There is one while another member has too many.
            let lacks = |seat: &usize| quotas[*seat].saturating_sub(has[*seat]);
            let Some(to) = (0..weights.len()).rev().max_by_key(lacks).filter(|seat| lacks(seat) > 0) else {
                break;
            };
            if let Some(has) = has.get_mut(from) {
                *has -= 1;
            }
            has[to] += 1;
            self.owner[slot] = to;
            moved.push((slot, to));
        }
        moved
    }
}

/// Returns the number of slots of each member by weight. Slots left by rounding go to the largest remainders.
fn quotas(slots: usize, weights: &[u32]) -> Vec<usize> {
    let sum: u128 = weights.iter().map(|weight| u128::from(*weight)).sum::<u128>().max(1);
    let exact = |weight: u32| slots as u128 * u128::from(weight);
    let mut quotas: Vec<usize> = weights.iter().map(|weight| (exact(*weight) / sum) as usize).collect();
    let mut by_rest: Vec<usize> = (0..weights.len()).collect();
    by_rest.sort_by_key(|seat| std::cmp::Reverse(exact(weights[*seat]) % sum));
    let left = slots - quotas.iter().sum::<usize>().min(slots);
    for seat in by_rest.into_iter().take(left) {
        quotas[seat] += 1;
    }
    quotas
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use fourtuple_testing::process::until;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_adopted_group_keeps_its_selector() {
        let group = UdpGroup::open("127.0.0.1:0".parse().unwrap(), 3, &Selector::Random).unwrap();
        let (address, members) = (group.address(), (0..3).map(|seat| group.member(seat).unwrap()).collect());
        let adopted = UdpGroup::adopt(Selector::Random, members, None, None).unwrap();
        assert!(!adopted.has_control());
        drop(group);
        assert_eq!((adopted.address(), adopted.len()), (address, 3));
        // The selector is still in force: packets of one 4-tuple reach all members.
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        for _ in 0..200 {
            sender.send_to(b"x", address).unwrap();
        }
        // On a busy machine the kernel delivers the packets in a thread of its own.
        for seat in 0..3 {
            until("a packet", || socket::has_something(adopted.member(seat).unwrap().as_fd()));
        }
    }

    #[test]
    fn sockets_that_form_no_group_are_refused() {
        let socket = || OwnedFd::from(UdpSocket::bind("127.0.0.1:0").unwrap());
        assert!(matches!(
            UdpGroup::adopt(Selector::Hash, Vec::new(), None, None),
            Err(UdpGroupError::Members { members: 0 })
        ));
        let strangers = [(vec![socket(), socket()], None), (vec![socket()], Some(socket()))];
        for (members, control) in strangers {
            let strangers = UdpGroup::adopt(Selector::Hash, members, control, None);
            assert!(matches!(strangers, Err(UdpGroupError::NotOne { .. })));
        }
        let unlinked = UdpGroup::adopt("xdp:64".parse().unwrap(), vec![socket()], None, None);
        assert!(matches!(unlinked, Err(UdpGroupError::NotOne { .. })));
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(matches!(
            UdpGroup::adopt(Selector::Hash, vec![file], None, None),
            Err(UdpGroupError::NotOne { .. })
        ));
    }

    fn held(table: &Table, seats: usize) -> Vec<usize> {
        (0..seats).map(|seat| table.iter().filter(|(_, owner)| *owner == seat).count()).collect()
    }

    #[test]
    fn a_joining_member_gets_slots_of_each_member() {
        let mut table = Table::even(4096, 3);
        let moved = table.steer(&[1, 1, 1, 1]);
        assert_eq!(moved.len(), 1024);
        assert!(moved.iter().all(|(_, to)| *to == 3));
        assert_eq!(held(&table, 4), [1024; 4]);
        // Checks the first slots too, which are the only used slots when flows are few.
        let low = table.iter().take(64).filter(|(_, owner)| *owner == 3).count();
        assert!((8..=24).contains(&low), "{low}");
    }

    #[test]
    fn the_slots_of_a_leaving_member_go_to_all_members() {
        let mut table = Table::even(4096, 4);
        let moved = table.steer(&[1, 0, 1, 1]);
        assert_eq!(moved.len(), 1024);
        assert_eq!(held(&table, 4), [1366, 0, 1365, 1365]);
    }

    #[test]
    fn weights_are_slots() {
        let mut table = Table::even(4096, 3);
        table.steer(&[1, 2, 5]);
        assert_eq!(held(&table, 3), [512, 1024, 2560]);
        table.steer(&[0, 0, 7]);
        assert_eq!(held(&table, 3), [0, 0, 4096]);
    }

    proptest! {
        #[test]
        fn slots_are_divided_by_weight(
            before in prop::collection::vec(0..=u32::MAX, 1..40),
            after in prop::collection::vec(0..=u32::MAX, 1..40),
        ) {
            prop_assume!(before.iter().any(|weight| *weight > 0) && after.iter().any(|weight| *weight > 0));
            let mut table = Table::even(4096, before.len());
            table.steer(&before);
            // The number of members only grows.
            let mut after = after;
            after.resize(after.len().max(before.len()), 0);
            let old = held(&table, after.len());
            let moved = table.steer(&after);
            let new = held(&table, after.len());
            prop_assert_eq!(new.iter().sum::<usize>(), 4096);
            let sum: f64 = after.iter().map(|weight| f64::from(*weight)).sum();
            for (weight, slots) in after.iter().zip(&new) {
                prop_assert!((f64::from(*weight) / sum * 4096.0 - *slots as f64).abs() <= 1.0);
            }
            let least: usize = new.iter().zip(&old).map(|(new, old)| new.saturating_sub(*old)).sum();
            prop_assert_eq!(moved.len(), least);
        }
    }
}
