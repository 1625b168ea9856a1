//! Selectors: the rules that choose the socket of a packet.

use std::fmt;
use std::mem;
use std::str::FromStr;

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
#[error("{text:?} is no name of a network device: expected 1 to {} bytes without / and blanks", IFNAMSIZ - 1)]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_writing_and_parsing() {
        for text in [
            "hash",
            "random",
            "cpu",
            "flow:4:4",
            "flow:0:2:0xff0",
            "map:hash",
            "map:random",
            "map:cpu",
            "map:flow:4:1",
            "map:flow:4:1:0xf",
            "xdp:64",
            "xdp:16384@veth0",
            "cpumap",
            "cpumap@eth0",
            "cpumap:4",
            "cpumap:4:random@eth0",
            "cpumap:flow:0:4",
            "cpumap:2:flow:0:4:0xff@eth0",
        ] {
            assert_eq!(text.parse::<Selector>().unwrap().to_string(), text);
        }
        for selector in Selector::ALL {
            assert_eq!(selector.to_string().parse(), Ok(selector));
        }
        assert_eq!("map".parse(), Ok(Selector::Map(SlotRule::Random)));
    }

    #[test]
    fn unknown_selectors_are_refused_with_the_known_names() {
        for text in [
            "",
            "flow",
            "flow:4",
            "flow:4:3",
            "flow:4:1:0x1ff",
            "flow:4:4:0",
            "flow:4:4:1:1",
            "flow:-1:4",
            "map:",
            "map:map",
            "maps",
            "map@lo",
            "hash@lo",
            "xdp",
            "xdp:",
            "xdp:0",
            "xdp:16385",
            "xdp:64@",
            "xdp:64@a/b",
            "cpumap:",
            "cpumap:0",
            "cpumap:2:",
            "cpumap:2:hash",
            "cpumap:flow:16384:4",
            "cpumap2",
        ] {
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
}
