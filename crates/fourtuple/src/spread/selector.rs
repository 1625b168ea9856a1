//! Selectors, the rules that choose the socket of a packet; filters for control packets; and both as classic BPF.

use std::fmt;
use std::mem;
use std::str::FromStr;

use fourtuple_syscalls::option::Instruction;

/// The rule that chooses the socket of a group for each packet.
///
/// ```
/// use fourtuple::spread::{CpuOrder, FlowKey, Selector, SlotRule};
///
/// let selector: Selector = "flow:4:4".parse()?;
/// assert_eq!(selector, Selector::Key(FlowKey::whole(4, 4)));
/// assert_eq!((selector.name(), selector.needs_bpf()), ("flow", false));
/// assert_eq!(Selector::Map(SlotRule::Cpu).to_string(), "map:cpu");
/// let cpumap = Selector::Cpumap { cpus: Some(2), order: CpuOrder::Random, device: "eth0".parse().ok() };
/// assert_eq!("cpumap:2:random@eth0".parse(), Ok(cpumap));
///
/// println!("one of {}", Selector::help());
/// for selector in Selector::ALL {
///     println!("{selector}");
/// }
/// # Ok::<(), fourtuple::spread::SelectorParseError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Selector {
    /// The kernel's hash of the 4-tuple. Packets with the same 4-tuple reach the same socket.
    Hash,
    /// A random number modulo the number of sockets (classic BPF). The distribution is even, and packets of a flow are reordered.
    Random,
    /// A number in the payload modulo the number of sockets (classic BPF). The distribution is even with many flows, and each flow stays
    /// in order. Packets that are too short go to the first socket.
    Key(FlowKey),
    /// The number of the CPU that handles the packet, modulo the number of sockets (classic BPF).
    Cpu,
    /// A table indexed by one of these rules (eBPF). Rule, weights and members can change under traffic. Needs the feature `bpf`,
    /// CAP_BPF and CAP_NET_ADMIN.
    Map(SlotRule),
    /// An XDP program rewrites the source port of each packet to a random port of a range, and the kernel's hash then distributes the
    /// packets. For receivers that cannot be changed. A receiver sees one peer for each port, and replies do not reach the sender.
    /// Needs the same as [`Selector::Map`].
    XdpSourcePort {
        /// The number of ports, 1 to 16,384. With few ports, some sockets get no packets.
        ports: u16,
        /// The device that receives the packets; `None`: the device that has the group's address.
        device: Option<DeviceName>,
    },
    /// An XDP program redirects packets to CPUs before the network stack handles them, and the packets of each CPU go to a socket as with
    /// [`Selector::Cpu`]. This distributes the work of the network stack too. Needs the same as [`Selector::Map`].
    Cpumap {
        /// The number of CPUs, from CPU 0; `None`: the number of sockets or of CPUs, the smaller of both.
        cpus: Option<u16>,
        /// The rule that chooses the CPU.
        order: CpuOrder,
        /// The device that receives the packets; `None`: the device that has the group's address.
        device: Option<DeviceName>,
    },
}

/// The rule that chooses the slot in the table of [`Selector::Map`].
///
/// Example: [`Selector`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SlotRule {
    /// Like [`Selector::Hash`].
    Hash,
    /// Like [`Selector::Random`].
    #[default]
    Random,
    /// Like [`Selector::Key`].
    Key(FlowKey),
    /// Like [`Selector::Cpu`].
    Cpu,
}

/// The rule that chooses the CPU of a packet with [`Selector::Cpumap`].
///
/// Example: [`Selector`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CpuOrder {
    /// Each CPU in turn.
    #[default]
    Turn,
    /// A random CPU.
    Random,
    /// The number in the payload modulo the number of CPUs. Each flow stays in order.
    Key(FlowKey),
}

/// An error in the text of a selector.
///
/// ```
/// use fourtuple::spread::Selector;
///
/// let error = "fastest".parse::<Selector>().unwrap_err();
/// assert!(error.to_string().ends_with(&Selector::expected()));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a way to spread packets: expected {}", Selector::expected())]
pub struct SelectorParseError {
    text: String,
}

/// Maximum number of ports of [`Selector::XdpSourcePort`]: 49152 to 65535.
pub(super) const MAX_PORTS: u16 = 16_384;

/// Maximum offset in the payload that the BPF verifier accepts for the program of [`Selector::Cpumap`].
pub(super) const FARTHEST_KEY: u16 = 0x3fff;

/// The properties of one kind of selector. Parsing, errors, checks and the test matrix derive from it.
struct Row {
    /// A selector of this kind with usual parameters.
    selector: Selector,
    /// The text before the parameters.
    name: &'static str,
    /// The accepted texts, for errors.
    syntax: &'static str,
    /// The text of a help.
    help: &'static str,
    /// Whether it needs eBPF.
    bpf: bool,
    /// Reads the parameters: the text behind `name:`, if any, and the device behind `@`.
    read: fn(Option<&str>, Option<DeviceName>) -> Option<Selector>,
}

const TABLE: [Row; 7] = [
    Row {
        selector: Selector::Hash,
        name: "hash",
        syntax: "hash",
        help: "hash (of the 4-tuple)",
        bpf: false,
        read: |parameters, device| without_parameters(Selector::Hash, parameters, device),
    },
    Row {
        selector: Selector::Random,
        name: "random",
        syntax: "random",
        help: "random",
        bpf: false,
        read: |parameters, device| without_parameters(Selector::Random, parameters, device),
    },
    Row {
        selector: Selector::Key(FlowKey { offset: 0, width: 4, mask: u32::MAX }),
        name: "flow",
        syntax: "flow:OFFSET:WIDTH or flow:OFFSET:WIDTH:MASK (WIDTH 1, 2 or 4 bytes)",
        help: "flow:OFFSET:WIDTH (a number in the payload)",
        bpf: false,
        read: |parameters, device| without_device(FlowKey::read(parameters?).map(Selector::Key), device),
    },
    Row {
        selector: Selector::Cpu,
        name: "cpu",
        syntax: "cpu",
        help: "cpu",
        bpf: false,
        read: |parameters, device| without_parameters(Selector::Cpu, parameters, device),
    },
    Row {
        selector: Selector::Map(SlotRule::Random),
        name: "map",
        syntax: "map or map:RULE (RULE hash, random, cpu or flow:...)",
        help: "map:RULE",
        bpf: true,
        read: |parameters, device| {
            let rule = parameters.map_or(Some(SlotRule::default()), SlotRule::read);
            without_device(rule.map(Selector::Map), device)
        },
    },
    Row {
        selector: Selector::XdpSourcePort { ports: 64, device: None },
        name: "xdp",
        syntax: "xdp:PORTS (1 to 16384) or xdp:PORTS@DEVICE",
        help: "xdp:PORTS@DEVICE",
        bpf: true,
        read: |parameters, device| Some(Selector::XdpSourcePort { ports: parameters?.parse().ok()?, device }),
    },
    Row {
        selector: Selector::Cpumap { cpus: None, order: CpuOrder::Turn, device: None },
        name: "cpumap",
        syntax: "cpumap, cpumap:CPUS, cpumap:CPUS:ORDER (ORDER random or flow:...), each with @DEVICE or without",
        help: "cpumap:CPUS@DEVICE",
        bpf: true,
        read: |parameters, device| {
            let (cpus, order) = parameters.map_or(Some((None, CpuOrder::Turn)), read_cpumap)?;
            Some(Selector::Cpumap { cpus, order, device })
        },
    },
];

fn without_device(selector: Option<Selector>, device: Option<DeviceName>) -> Option<Selector> {
    selector.filter(|_| device.is_none())
}

fn without_parameters(
    selector: Selector,
    parameters: Option<&str>,
    device: Option<DeviceName>,
) -> Option<Selector> {
    (parameters.is_none() && device.is_none()).then_some(selector)
}

/// Reads `CPUS`, `CPUS:ORDER` or `ORDER`.
fn read_cpumap(text: &str) -> Option<(Option<u16>, CpuOrder)> {
    if !text.starts_with(|letter: char| letter.is_ascii_digit()) {
        return Some((None, CpuOrder::read(text)?));
    }
    match text.split_once(':') {
        Some((cpus, order)) => Some((Some(cpus.parse().ok()?), CpuOrder::read(order)?)),
        None => Some((Some(text.parse().ok()?), CpuOrder::Turn)),
    }
}

impl SlotRule {
    fn read(text: &str) -> Option<SlotRule> {
        Some(match text {
            "hash" => SlotRule::Hash,
            "random" => SlotRule::Random,
            "cpu" => SlotRule::Cpu,
            _ => SlotRule::Key(FlowKey::read(text.strip_prefix("flow:")?)?),
        })
    }
}

impl CpuOrder {
    fn read(text: &str) -> Option<CpuOrder> {
        match SlotRule::read(text)? {
            SlotRule::Random => Some(CpuOrder::Random),
            SlotRule::Key(key) => Some(CpuOrder::Key(key)),
            SlotRule::Hash | SlotRule::Cpu => None,
        }
    }
}

impl Selector {
    /// One selector of each kind with usual parameters, in the order of the table.
    pub const ALL: [Selector; TABLE.len()] = {
        let mut all = [Selector::Hash; TABLE.len()];
        let mut index = 0;
        while index < all.len() {
            all[index] = TABLE[index].selector;
            index += 1;
        }
        all
    };

    fn row(&self) -> &'static Row {
        const ROWS: &[Row] = &TABLE;
        let is_same = |row: &&Row| mem::discriminant(&row.selector) == mem::discriminant(self);
        ROWS.iter().find(is_same).expect("every selector has a row")
    }

    /// Returns the text before the parameters, such as `flow` for `flow:0:4`.
    pub fn name(&self) -> &'static str {
        self.row().name
    }

    /// Returns the accepted texts, for error messages. Example: [`SelectorParseError`].
    pub fn expected() -> String {
        TABLE.map(|row| row.syntax).join(", ")
    }

    /// Returns the texts of all selectors for a help.
    pub fn help() -> String {
        let texts = |bpf| {
            let rows = TABLE.iter().filter(|row| row.bpf == bpf);
            rows.map(|row| row.help).collect::<Vec<_>>().join(", ")
        };
        format!("{}; with BPF {}", texts(false), texts(true))
    }

    /// Returns whether the selector needs the feature `bpf`, CAP_BPF and CAP_NET_ADMIN.
    pub fn needs_bpf(&self) -> bool {
        self.row().bpf
    }

    /// Returns the device of a selector with a program at a device; within, `None` means the device with the group's address.
    pub(super) fn device(&self) -> Option<Option<DeviceName>> {
        match *self {
            Selector::XdpSourcePort { device, .. } | Selector::Cpumap { device, .. } => Some(device),
            _ => None,
        }
    }

    /// Returns the fault in the parameters of the selector, if any.
    pub(super) fn fault(&self) -> Option<&'static str> {
        let bad_key = |key: &FlowKey| !key.is_sound();
        match self {
            Selector::Key(key) | Selector::Map(SlotRule::Key(key)) if bad_key(key) => {
                Some("a key has 1, 2 or 4 bytes, of which some bits count")
            }
            Selector::XdpSourcePort { ports, .. } if !(1..=MAX_PORTS).contains(ports) => {
                Some("1 to 16384 ports can be had")
            }
            Selector::Cpumap { cpus: Some(0), .. } => Some("1 processor at least must be there"),
            Selector::Cpumap { order: CpuOrder::Key(key), .. }
                if bad_key(key) || key.offset > FARTHEST_KEY =>
            {
                Some("a key has 1, 2 or 4 bytes, of which some bits count, within the first 16 KiB")
            }
            _ => None,
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parameters = match self {
            Selector::Key(key) => format!(":{key}"),
            Selector::Map(rule) => format!(":{rule}"),
            Selector::XdpSourcePort { ports, .. } => format!(":{ports}"),
            Selector::Cpumap { cpus, order, .. } => {
                let cpus = cpus.map_or(String::new(), |cpus| format!(":{cpus}"));
                match order {
                    CpuOrder::Turn => cpus,
                    CpuOrder::Random => format!("{cpus}:random"),
                    CpuOrder::Key(key) => format!("{cpus}:flow:{key}"),
                }
            }
            _ => String::new(),
        };
        let device = self.device().flatten().map_or(String::new(), |device| format!("@{device}"));
        formatter.pad(&format!("{}{parameters}{device}", self.name()))
    }
}

impl fmt::Display for SlotRule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SlotRule::Hash => formatter.pad("hash"),
            SlotRule::Random => formatter.pad("random"),
            SlotRule::Cpu => formatter.pad("cpu"),
            SlotRule::Key(key) => formatter.pad(&format!("flow:{key}")),
        }
    }
}

impl FromStr for Selector {
    type Err = SelectorParseError;

    fn from_str(text: &str) -> Result<Selector, SelectorParseError> {
        read(text)
            .filter(|spread| spread.fault().is_none())
            .ok_or_else(|| SelectorParseError { text: text.to_owned() })
    }
}

fn read(text: &str) -> Option<Selector> {
    let (text, device) = match text.split_once('@') {
        Some((text, device)) => (text, Some(device.parse().ok()?)),
        None => (text, None),
    };
    let (name, parameters) = match text.split_once(':') {
        Some((name, parameters)) => (name, Some(parameters)),
        None => (text, None),
    };
    let row = TABLE.into_iter().find(|row| row.name == name)?;
    (row.read)(parameters, device)
}

/// The size of a device name with its terminating zero byte.
const IFNAMSIZ: usize = 16;

/// The name of a network device.
///
/// ```
/// use fourtuple::spread::DeviceName;
///
/// assert_eq!("eth0".parse::<DeviceName>()?.name(), "eth0");
/// assert!("a name longer than 15 bytes".parse::<DeviceName>().is_err());
/// # Ok::<(), fourtuple::spread::DeviceNameError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceName([u8; IFNAMSIZ]);

/// An error in the text of a device name.
///
/// Example: [`DeviceName`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not the name of a network device: expected 1 to {} bytes without / and blanks", IFNAMSIZ - 1)]
pub struct DeviceNameError {
    text: String,
}

impl DeviceName {
    /// Returns the name.
    pub fn name(&self) -> &str {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(IFNAMSIZ);
        std::str::from_utf8(&self.0[..end]).unwrap_or_default()
    }
}

impl FromStr for DeviceName {
    type Err = DeviceNameError;

    /// Checks the name by the rules of the kernel's `dev_valid_name`.
    fn from_str(text: &str) -> Result<DeviceName, DeviceNameError> {
        let is_odd =
            |letter: char| letter == '/' || letter == ':' || letter == '\0' || letter.is_whitespace();
        if text.is_empty() || text.len() >= IFNAMSIZ || text == "." || text == ".." || text.contains(is_odd) {
            return Err(DeviceNameError { text: text.to_owned() });
        }
        let mut name = [0; IFNAMSIZ];
        name[..text.len()].copy_from_slice(text.as_bytes());
        Ok(DeviceName(name))
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl fmt::Debug for DeviceName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "DeviceName({:?})", self.name())
    }
}

/// The position of a big-endian number in the payload that identifies a flow within the 4-tuple.
///
/// ```
/// use fourtuple::spread::FlowKey;
///
/// let packet = [0, 0, 0x0a, 0xbc];
/// assert_eq!(FlowKey::whole(2, 2).of(&packet), Some(0x0abc));
/// assert_eq!(FlowKey { offset: 2, width: 2, mask: 0xff }.of(&packet), Some(0xbc));
/// assert_eq!(FlowKey::whole(2, 4).of(&packet), None); // too short
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_structs, reason = "callers fill in all fields")]
pub struct FlowKey {
    /// The offset in bytes from the start of the payload.
    pub offset: u16,
    /// The length: 1, 2 or 4 bytes.
    pub width: u8,
    /// The mask of significant bits.
    pub mask: u32,
}

impl FlowKey {
    /// Returns a key with all bits of `width` bytes.
    pub fn whole(offset: u16, width: u8) -> FlowKey {
        FlowKey { offset, width, mask: FlowKey::widest(width) }
    }

    pub(super) fn widest(width: u8) -> u32 {
        match width {
            1 => 0xff,
            2 => 0xffff,
            _ => u32::MAX,
        }
    }

    /// Returns the number in this payload; `None` when the payload is too short.
    pub fn of(&self, payload: &[u8]) -> Option<u32> {
        let start = usize::from(self.offset);
        let bytes = payload.get(start..start + usize::from(self.width))?;
        Some(bytes.iter().fold(0, |number, byte| number << 8 | u32::from(*byte)) & self.mask)
    }

    /// Parses `OFFSET:WIDTH` or `OFFSET:WIDTH:MASK`.
    pub(super) fn read(text: &str) -> Option<FlowKey> {
        let mut words = text.split(':');
        let offset = words.next()?.parse().ok()?;
        let width = words.next()?.parse().ok().filter(|width| [1, 2, 4].contains(width))?;
        let mask = match words.next() {
            None => FlowKey::widest(width),
            Some(mask) => number(mask)?,
        };
        let key = FlowKey { offset, width, mask };
        (words.next().is_none() && key.is_sound()).then_some(key)
    }

    /// Returns whether width and mask are valid.
    pub(super) fn is_sound(&self) -> bool {
        [1, 2, 4].contains(&self.width) && self.mask != 0 && self.mask <= FlowKey::widest(self.width)
    }
}

impl fmt::Display for FlowKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.offset, self.width)?;
        if self.mask != FlowKey::widest(self.width) {
            write!(formatter, ":{:#x}", self.mask)?;
        }
        Ok(())
    }
}

/// Parses a decimal number, or a hexadecimal number with `0x`.
pub(super) fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// A filter for the control packets of a group, which the kernel delivers to a separate socket, so that they neither wait behind data
/// nor are dropped with data.
///
/// ```
/// use fourtuple::spread::{ControlFilter, FlowKey};
///
/// let filter: ControlFilter = "bytes:0:1=0xff".parse()?;
/// assert_eq!(filter, ControlFilter::Bytes { key: FlowKey::whole(0, 1), value: 0xff });
/// assert!(filter.finds(&[0xff, 1, 2], None, 40_000) && !filter.finds(b"data", None, 40_000));
///
/// assert!(ControlFilter::Hops(255).finds(b"data", Some(255), 40_000));
/// # Ok::<(), fourtuple::spread::ControlFilterParseError>(())
/// ```
///
/// Example of a group: [`UdpGroup::open_with_control`](crate::spread::UdpGroup::open_with_control).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ControlFilter {
    /// Matches packets with this value at a position in the payload.
    Bytes {
        /// The position, width and mask.
        key: FlowKey,
        /// The value after the mask.
        value: u32,
    },
    /// Matches packets that arrive with this TTL or hop limit. Only a neighbour can send packets that arrive with 255 (GTSM, RFC 5082).
    Hops(u8),
    /// Matches packets with this source port.
    SourcePort(u16),
    /// Matches packets with this value at a position in the payload that arrive with TTL or hop limit 255, which only a neighbour can
    /// send (GTSM, RFC 5082). Data with the same value match only if a neighbour sends them with 255 too.
    Neighbour {
        /// The position, width and mask.
        key: FlowKey,
        /// The value after the mask.
        value: u32,
    },
}

/// The TTL or hop limit that a packet cannot have after a router has forwarded it.
pub(super) const NEIGHBOUR: u8 = 255;

/// An error in the text of a filter.
///
/// ```
/// use fourtuple::spread::ControlFilter;
///
/// let error = "ttl=256".parse::<ControlFilter>().unwrap_err();
/// assert!(error.to_string().ends_with(ControlFilter::EXPECTED));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a way to tell control packets: expected {}", ControlFilter::EXPECTED)]
pub struct ControlFilterParseError {
    text: String,
}

impl ControlFilter {
    /// The accepted texts, for error messages. Example: [`ControlFilterParseError`].
    pub const EXPECTED: &str = "bytes:OFFSET:WIDTH=VALUE or bytes:OFFSET:WIDTH:MASK=VALUE (WIDTH 1, 2 or 4 bytes), \
                                neighbour:OFFSET:WIDTH... (the same with a TTL of 255), ttl=HOPS, or port=SOURCE-PORT";

    /// Returns whether the filter matches a packet, with the same result as in the kernel. `hops` is the TTL or hop limit on arrival;
    /// `None` if the socket does not report it.
    pub fn finds(&self, payload: &[u8], hops: Option<u8>, source_port: u16) -> bool {
        match self {
            ControlFilter::Bytes { key, value } => key.of(payload) == Some(*value),
            ControlFilter::Hops(expected) => hops == Some(*expected),
            ControlFilter::SourcePort(port) => source_port == *port,
            ControlFilter::Neighbour { key, value } => {
                hops == Some(NEIGHBOUR) && key.of(payload) == Some(*value)
            }
        }
    }

    /// Returns whether any packet can match the filter.
    pub(super) fn is_sound(&self) -> bool {
        match self {
            ControlFilter::Bytes { key, value } | ControlFilter::Neighbour { key, value } => {
                key.is_sound() && value & !key.mask == 0
            }
            ControlFilter::Hops(_) => true,
            ControlFilter::SourcePort(port) => *port != 0,
        }
    }
}

impl fmt::Display for ControlFilter {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ControlFilter::Bytes { key, value } => formatter.pad(&format!("bytes:{key}={value:#x}")),
            ControlFilter::Hops(hops) => formatter.pad(&format!("ttl={hops}")),
            ControlFilter::SourcePort(port) => formatter.pad(&format!("port={port}")),
            ControlFilter::Neighbour { key, value } => formatter.pad(&format!("neighbour:{key}={value:#x}")),
        }
    }
}

impl FromStr for ControlFilter {
    type Err = ControlFilterParseError;

    fn from_str(text: &str) -> Result<ControlFilter, ControlFilterParseError> {
        let read = || {
            let (what, value) = text.split_once('=')?;
            let filter = match what.split_once(':') {
                Some(("bytes", key)) => {
                    ControlFilter::Bytes { key: FlowKey::read(key)?, value: number(value)? }
                }
                Some(("neighbour", key)) => {
                    ControlFilter::Neighbour { key: FlowKey::read(key)?, value: number(value)? }
                }
                None if what == "ttl" => ControlFilter::Hops(value.parse().ok()?),
                None if what == "port" => ControlFilter::SourcePort(value.parse().ok()?),
                _ => return None,
            };
            filter.is_sound().then_some(filter)
        };
        read().ok_or_else(|| ControlFilterParseError { text: text.to_owned() })
    }
}

// Selectors as classic BPF (SO_ATTACH_REUSEPORT_CBPF), which needs no privilege. A program reads a packet from its payload on, and the
// headers through SKF_NET_OFF.

// include/uapi/linux/bpf_common.h and filter.h
const LOAD_WORD: u16 = 0x20;
const LOAD_HALF: u16 = 0x28;
const LOAD_BYTE: u16 = 0x30;
const LOAD_HALF_FROM_X: u16 = 0x48;
const LOAD_LENGTH: u16 = 0x80;
const AND: u16 = 0x54;
const SHIFT_LEFT: u16 = 0x64;
const SHIFT_RIGHT: u16 = 0x74;
const MODULO: u16 = 0x94;
const TO_X: u16 = 0x07;
const JUMP: u16 = 0x05;
const IF_EQUAL: u16 = 0x15;
const IF_AT_LEAST: u16 = 0x35;
const GIVE: u16 = 0x06;
const GIVE_A: u16 = 0x16;
/// The offset of loads that return ancillary data instead of packet data (SKF_AD_OFF).
const ANCILLARY: u32 = -0x1000_i32 as u32;
const CPU: u32 = ANCILLARY + 36;
const RANDOM: u32 = ANCILLARY + 56;
/// The offset of loads from the IP header on (SKF_NET_OFF).
const NETWORK: u32 = -0x10_0000_i32 as u32;
/// The protocol number of UDP.
const UDP: u32 = 17;
const UDP_HEADER: u16 = 8;
/// The return values of a socket filter: the number of bytes to keep.
const REFUSE: u32 = 0;
const KEEP_ALL: u32 = u32::MAX;

/// The selectors that classic BPF supports.
#[derive(Clone, Copy, Debug)]
pub(super) enum By {
    Random,
    Cpu,
    Key(FlowKey),
}

/// Returns the program for a group of `members` sockets. Packets that match the filter go to the socket with the index `members`.
pub(super) fn program(by: By, members: u32, control: Option<&ControlFilter>) -> Vec<Instruction> {
    let mut program = control.map_or(Vec::new(), |filter| find(filter, members));
    match by {
        By::Random => program.push((LOAD_WORD, 0, 0, RANDOM)),
        By::Cpu => program.push((LOAD_WORD, 0, 0, CPU)),
        By::Key(key) => program.extend(load(&key)),
    }
    program.push((MODULO, 0, 0, members));
    program.push((GIVE_A, 0, 0, 0));
    program
}

/// Returns the socket filter (SO_ATTACH_FILTER) by which a member refuses control packets.
pub(super) fn without_control(filter: &ControlFilter) -> Vec<Instruction> {
    let mut program = find(&behind_udp_header(filter), REFUSE);
    program.push((GIVE, 0, 0, KEEP_ALL));
    program
}

/// Returns the socket filter by which the control socket refuses data packets.
pub(super) fn only_control(filter: &ControlFilter) -> Vec<Instruction> {
    let mut program = find(&behind_udp_header(filter), KEEP_ALL);
    program.push((GIVE, 0, 0, REFUSE));
    program
}

/// Returns the filter with the offsets of a socket filter, which reads a packet from the UDP header on.
fn behind_udp_header(filter: &ControlFilter) -> ControlFilter {
    let behind_header = |key: FlowKey| FlowKey { offset: key.offset.saturating_add(UDP_HEADER), ..key };
    match *filter {
        ControlFilter::Bytes { key, value } => ControlFilter::Bytes { key: behind_header(key), value },
        ControlFilter::Neighbour { key, value } => {
            ControlFilter::Neighbour { key: behind_header(key), value }
        }
        ControlFilter::Hops(_) | ControlFilter::SourcePort(_) => *filter,
    }
}

/// Returns the instructions that load a key. A load beyond the end of the packet ends the program with 0, the first socket.
fn load(key: &FlowKey) -> [Instruction; 2] {
    let code = match key.width {
        1 => LOAD_BYTE,
        2 => LOAD_HALF,
        _ => LOAD_WORD,
    };
    [(code, 0, 0, u32::from(key.offset)), (AND, 0, 0, key.mask)]
}

/// Returns the instructions that load the TTL or hop limit. The first 4 bits are the IP version: an IPv6 socket receives both.
fn hops_left() -> [Instruction; 6] {
    [
        (LOAD_BYTE, 0, 0, NETWORK),
        (SHIFT_RIGHT, 0, 0, 4),
        (IF_EQUAL, 0, 2, 4),
        (LOAD_BYTE, 0, 0, NETWORK + 8),
        (JUMP, 0, 0, 1),
        (LOAD_BYTE, 0, 0, NETWORK + 7),
    ]
}

/// Returns instructions that end the program with `control` for packets that match the filter, and continue otherwise. The two middle
/// numbers of a jump are the instructions to skip if the condition is true, and if it is false.
fn find(filter: &ControlFilter, control: u32) -> Vec<Instruction> {
    match filter {
        ControlFilter::Bytes { key, value } => {
            let [first, second] = load(key);
            vec![
                (LOAD_LENGTH, 0, 0, 0),
                (IF_AT_LEAST, 0, 4, u32::from(key.offset) + u32::from(key.width)),
                first,
                second,
                (IF_EQUAL, 0, 1, *value),
                (GIVE, 0, 0, control),
            ]
        }
        ControlFilter::Hops(hops) => {
            let mut found = hops_left().to_vec();
            found.extend([(IF_EQUAL, 0, 1, u32::from(*hops)), (GIVE, 0, 0, control)]);
            found
        }
        ControlFilter::Neighbour { key, value } => {
            let rest = find(&ControlFilter::Bytes { key: *key, value: *value }, control);
            let mut found = hops_left().to_vec();
            found.push((IF_EQUAL, 0, rest.len() as u8, u32::from(NEIGHBOUR)));
            found.extend(rest);
            found
        }
        // The IPv4 header has its length field; the IPv6 header is assumed to have no extension headers.
        ControlFilter::SourcePort(port) => vec![
            (LOAD_BYTE, 0, 0, NETWORK),
            (SHIFT_RIGHT, 0, 0, 4),
            (IF_EQUAL, 0, 6, 4),
            (LOAD_BYTE, 0, 0, NETWORK),
            (AND, 0, 0, 0x0f),
            (SHIFT_LEFT, 0, 0, 2),
            (TO_X, 0, 0, 0),
            (LOAD_HALF_FROM_X, 0, 0, NETWORK),
            (JUMP, 0, 0, 3),
            (LOAD_BYTE, 0, 0, NETWORK + 6),
            (IF_EQUAL, 0, 3, UDP),
            (LOAD_HALF, 0, 0, NETWORK + 40),
            (IF_EQUAL, 0, 1, u32::from(*port)),
            (GIVE, 0, 0, control),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_writing_and_parsing() {
        let texts = "hash random cpu flow:4:4 flow:0:2:0xff0 map:hash map:random map:cpu map:flow:4:1 \
                     map:flow:4:1:0xf xdp:64 xdp:16384@veth0 cpumap cpumap@eth0 cpumap:4 cpumap:4:random@eth0 \
                     cpumap:flow:0:4 cpumap:2:flow:0:4:0xff@eth0";
        for text in texts.split(' ') {
            assert_eq!(text.parse::<Selector>().unwrap().to_string(), text);
        }
        for selector in Selector::ALL {
            assert_eq!(selector.to_string().parse(), Ok(selector));
        }
        assert_eq!("map".parse(), Ok(Selector::Map(SlotRule::Random)));
    }

    #[test]
    fn unknown_selectors_are_refused_with_the_known_names() {
        let texts = "flow flow:4 flow:4:3 flow:4:1:0x1ff flow:4:4:0 flow:4:4:1:1 flow:-1:4 map: map:map maps \
                     map@lo hash@lo xdp xdp: xdp:0 xdp:16385 xdp:64@ xdp:64@a/b cpumap: cpumap:0 cpumap:2: \
                     cpumap:2:hash cpumap:flow:16384:4 cpumap2";
        for text in texts.split(' ').chain([""]) {
            let error = text.parse::<Selector>().unwrap_err();
            assert!(error.to_string().contains("flow:OFFSET:WIDTH"), "{error}");
        }
    }

    #[test]
    fn names_equal_the_names_of_the_kernel() {
        for name in ["lo", "veth0", "a.b-c_d", "fifteen-bytes--"] {
            assert_eq!(name.parse::<DeviceName>().unwrap().name(), name);
        }
        for name in ["", ".", "..", "a b", "a/b", "eth0:1", "sixteen-bytes---"] {
            assert!(name.parse::<DeviceName>().is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_key_is_read_from_the_wire() {
        let key = FlowKey { offset: 2, width: 2, mask: 0xfff };
        assert_eq!(key.of(&[0, 0, 0xab, 0xcd, 0]), Some(0xbcd));
        assert_eq!(key.of(&[0, 0, 0xab]), None);
        assert_eq!(FlowKey::whole(0, 4).of(&[1, 2, 3, 4]), Some(0x0102_0304));
    }

    #[test]
    fn filters_survive_writing_and_parsing() {
        for text in ["bytes:0:1=0xff", "bytes:4:4:0xf0=0x10", "neighbour:0:2=0x7", "ttl=255", "port=3784"] {
            assert_eq!(text.parse::<ControlFilter>().unwrap().to_string(), text);
        }
        for text in ["", "ttl", "ttl=256", "port=0", "bytes:0:1=256", "bytes:0:1:0xf=0x10", "bytes:0:3=1"] {
            let error = text.parse::<ControlFilter>().unwrap_err();
            assert!(error.to_string().contains("ttl=HOPS"), "{error}");
        }
        assert!("neighbour:0:1=256".parse::<ControlFilter>().is_err());
    }

    #[test]
    fn packets_match_as_in_the_kernel() {
        let finds = |filter: &str, payload: &[u8], hops, port| {
            filter.parse::<ControlFilter>().unwrap().finds(payload, hops, port)
        };
        assert!(finds("bytes:1:2=0x102", &[0, 1, 2], None, 0));
        assert!(!finds("bytes:1:2=0x102", &[0, 1], None, 0));
        assert!(finds("neighbour:0:1:0xe0=0x20", &[0x3f], Some(255), 0));
        assert!(!finds("neighbour:0:1:0xe0=0x20", &[0x3f], Some(254), 0));
        assert!(!finds("neighbour:0:1:0xe0=0x20", &[0x3f], None, 0));
        assert!(!finds("neighbour:0:1:0xe0=0x20", &[0x40], Some(255), 0));
        assert!(finds("ttl=1", &[], Some(1), 0) && !finds("ttl=1", &[], Some(2), 0));
        assert!(finds("port=7", &[], None, 7) && !finds("port=7", &[], None, 8));
    }
}
