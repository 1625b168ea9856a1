//! The links from the flags or from a file.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::path::Path;
use std::time::Duration;

use fourtuple::spread::{DeviceName, DeviceNameError, FlowKey, Selector, SelectorParseError, SlotRule};
use fourtuple_forward::bfd::{Timers, TimersError};
use fourtuple_forward::{Link, Peer, Prefix, Routes, Rule};
use fourtuple_record::{ForwardBfdTimers, ForwardLink};
use fourtuple_syscalls::{device, errno_name, route};
use serde::Deserialize;

use crate::exit::UsageError;
use crate::{input, units};

/// Maximum accepted limit of clients, of one plane or of all planes.
pub(super) const MAX_CLIENTS: u32 = 1_000_000;

/// Maximum size of a receive queue in bytes. The kernel doubles the value and stores it in an int.
pub(super) const MAX_RECEIVE_BUFFER: u32 = 1 << 30;

/// The contents of a configuration file. Flags override the file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct File {
    pub(super) planes: Option<u32>,
    pub(super) plane: Option<String>,
    pub(super) pin: Option<bool>,
    pub(super) clients_total: Option<u32>,
    pub(super) share: Option<bool>,
    pub(super) receive_buffer: Option<u32>,
    #[serde(default, rename = "link")]
    pub(super) links: Vec<LinkText>,
}

/// The settings of one link as text, from a file or from the flags.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct LinkText {
    pub(super) listen: String,
    pub(super) to: Option<String>,
    #[serde(default)]
    pub(super) routes: Vec<String>,
    pub(super) key: Option<String>,
    pub(super) spread: Option<String>,
    #[serde(default, rename = "return")]
    pub(super) replies: bool,
    pub(super) idle: Option<String>,
    pub(super) clients: Option<u32>,
    pub(super) bfd: Option<String>,
    pub(super) bfd_in_band: Option<String>,
    pub(super) bfd_interval: Option<String>,
    pub(super) bfd_receive_interval: Option<String>,
    pub(super) bfd_multiplier: Option<u32>,
}

#[derive(Clone, Debug)]
pub(super) struct ParsedLink {
    pub(super) link: Link,
    pub(super) record: ForwardLink,
}

pub(super) fn read(path: &Path) -> Result<File, UsageError> {
    let refuse =
        |why: String| UsageError(format!("invalid value '{}' for '--config': {why}", path.display()));
    let text = input::settings(path).map_err(|error| refuse(error.to_string()))?;
    parse(&text).map_err(refuse)
}

pub(super) fn parse(text: &str) -> Result<File, String> {
    let file: File = toml::from_str(text).map_err(|error| input::toml_error(text, &error))?;
    if file.links.is_empty() {
        return Err("no [[link]]".to_owned());
    }
    Ok(file)
}

/// Parses the settings of one link. `name` returns the name of a setting for errors: `--to`, or `to of link 2`.
pub(super) fn parse_link(text: &LinkText, name: &dyn Fn(&str) -> String) -> Result<ParsedLink, UsageError> {
    let refuse = |field: &str, value: &str, why: &str| {
        // Strings of a file may contain line breaks, error messages must not.
        let value: String = value.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        UsageError(format!("invalid value '{value}' for '{}': {why}", name(field)))
    };
    let address = |field: &str, value: &str| -> Result<SocketAddr, UsageError> {
        socket_address(value).map_err(|why| refuse(field, value, &why))
    };
    let listen = address("listen", &text.listen)?;
    let default = text.to.as_deref().map(|to| address("to", to)).transpose()?;
    let spread = match &text.spread {
        None => Selector::Hash,
        Some(spread) => spread
            .parse()
            .map_err(|error: SelectorParseError| refuse("spread", spread, &error.to_string()))?,
    };
    if let (true, Selector::XdpSourcePort { .. }) = (text.replies, spread) {
        let why = "it rewrites source ports, so that replies do not reach the sender: take another \
                   one, or do without return";
        return Err(refuse("spread", &spread.to_string(), why));
    }
    let key = match (&text.key, spread) {
        (Some(key), _) => Some(key_of(key).ok_or_else(|| {
            refuse("key", key, "expected OFFSET:WIDTH or OFFSET:WIDTH:MASK, WIDTH 1, 2 or 4 bytes")
        })?),
        (None, Selector::Key(key) | Selector::Map(SlotRule::Key(key))) => Some(key),
        (None, _) => None,
    };
    let rules = text
        .routes
        .iter()
        .map(|text| rule(text).map_err(|why| refuse("route", text, &why)))
        .collect::<Result<Vec<_>, _>>()?;
    if default.is_none() && rules.is_empty() {
        return Err(UsageError(format!(
            "nothing says where packets go: give '{}' or '{}'",
            name("to"),
            name("route")
        )));
    }
    let routes = Routes::new(default, &rules, key)
        .map_err(|error| refuse("route", &text.routes.join(" "), &error.to_string()))?;
    if let Some(hop) = routes.hops().find(|hop| hop.port() == 0) {
        let field = if default == Some(hop) { "to" } else { "route" };
        return Err(refuse(field, &hop.to_string(), "a next hop has a port from 1 to 65535"));
    }
    let is_broadcast = |hop: &SocketAddr| route::is_broadcast(hop.ip()).unwrap_or(false);
    if let Some(hop) = routes.hops().find(is_broadcast) {
        let field = if default == Some(hop) { "to" } else { "route" };
        let why = "a broadcast address: a next hop is one host, and the kernel refuses to send (EACCES)";
        return Err(refuse(field, &hop.to_string(), why));
    }
    let clients = text.clients.unwrap_or(4096);
    if !(1..=MAX_CLIENTS).contains(&clients) {
        return Err(refuse("clients", &clients.to_string(), &format!("expected 1 to {MAX_CLIENTS}")));
    }
    let idle = match &text.idle {
        None => Duration::from_secs(60),
        Some(idle) => units::duration(idle).map_err(|why| refuse("idle", idle, &why))?,
    };
    let bfd =
        text.bfd.as_deref().map(|text| peer(text).map_err(|why| refuse("bfd", text, &why))).transpose()?;
    let in_band = text.bfd_in_band.as_deref();
    let in_band = in_band
        .map(|text| in_band_peer(text, listen).map_err(|why| refuse("bfd-in-band", text, &why)))
        .transpose()?;
    if bfd.is_some() && in_band.is_some() {
        let message = format!("'{}' and '{}': a link has one session", name("bfd"), name("bfd-in-band"));
        return Err(UsageError(message));
    }
    let timers = timers(text, &refuse)?;
    let bfd = match bfd.or(in_band) {
        None if text.bfd_interval.is_some()
            || text.bfd_receive_interval.is_some()
            || text.bfd_multiplier.is_some() =>
        {
            let message =
                format!("timers of BFD need a session: give '{}' or '{}'", name("bfd"), name("bfd-in-band"));
            return Err(UsageError(message));
        }
        peer => peer.map(|peer| Peer { timers, ..peer }),
    };
    let link = Link { listen, routes, spread, replies: text.replies, idle, clients: clients as usize, bfd };
    let record = ForwardLink {
        listen: listen.to_string(),
        to: default.map(|to| to.to_string()),
        routes: text.routes.clone(),
        key: key.map(|key| Selector::Key(key).to_string().replacen("flow:", "", 1)),
        spread: spread.to_string(),
        replies: text.replies,
        idle_ns: units::nanoseconds(idle),
        clients,
        bfd: text.bfd.clone(),
        bfd_in_band: text.bfd_in_band.clone(),
        bfd_timers: bfd.map(|_| ForwardBfdTimers {
            interval_ns: units::nanoseconds(timers.desired_min_tx()),
            receive_interval_ns: units::nanoseconds(timers.required_min_rx()),
            multiplier: timers.detect_mult(),
        }),
    };
    Ok(ParsedLink { link, record })
}

/// Returns the timers of the BFD session, with the values of [`Timers::default`] for settings that are absent.
fn timers(text: &LinkText, refuse: &dyn Fn(&str, &str, &str) -> UsageError) -> Result<Timers, UsageError> {
    let default = Timers::default();
    let interval = |field: &str, value: &Option<String>, default: Duration| match value {
        None => Ok(default),
        Some(value) => units::duration(value).map_err(|why| refuse(field, value, &why)),
    };
    let send = interval("bfd-interval", &text.bfd_interval, default.desired_min_tx())?;
    let receive = interval("bfd-receive-interval", &text.bfd_receive_interval, send)?;
    let multiplier = text.bfd_multiplier.unwrap_or(default.detect_mult().into());
    let multiplier = u8::try_from(multiplier)
        .map_err(|_| refuse("bfd-multiplier", &multiplier.to_string(), "expected 1 to 255"))?;
    Timers::new(send, receive, multiplier).map_err(|error| {
        let (field, value) = match error {
            TimersError::DesiredMinTx(time) => ("bfd-interval", format!("{time:?}")),
            TimersError::RequiredMinRx(time) => ("bfd-receive-interval", format!("{time:?}")),
            TimersError::DetectMult => ("bfd-multiplier", multiplier.to_string()),
        };
        refuse(field, &value, &error.to_string())
    })
}

/// Parses `192.0.2.1`, `192.0.2.1@192.0.2.2` with a local address, or `fe80::1%eth0` with a device.
fn peer(text: &str) -> Result<Peer, String> {
    let expected = || {
        "expected the address of the peer, such as 192.0.2.1 or fe80::1%eth0 (on that device), or PEER@LOCAL with the address \
         here"
            .to_owned()
    };
    let (peer, local) = match text.split_once('@') {
        Some((peer, local)) => (peer, Some(local)),
        None => (text, None),
    };
    let (peer, device) = match peer.split_once('%') {
        Some((peer, name)) => {
            let device: DeviceName = name.parse().map_err(|error: DeviceNameError| error.to_string())?;
            (peer, Some(device))
        }
        None => (peer, None),
    };
    let address: IpAddr = peer.parse().map_err(|_| expected())?;
    let local: Option<IpAddr> = local.map(str::parse).transpose().map_err(|_| expected())?;
    if local == Some(address) {
        return Err("both ends have the same address".to_owned());
    }
    if local.is_some_and(|local| local.is_ipv4() != address.is_ipv4()) {
        return Err("one end is IPv4, the other IPv6".to_owned());
    }
    let is_link_local = |ip: IpAddr| matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
    if device.is_none() && (is_link_local(address) || local.is_some_and(is_link_local)) {
        return Err("a link-local address needs its device, such as fe80::1%eth0".to_owned());
    }
    Ok(Peer { local, device, ..Peer::new(address) })
}

/// Parses `192.0.2.1:4000`, `[2001:db8::1]:4000` or, with the name or the number of a device, `[fe80::1%eth0]:4000`.
fn socket_address(text: &str) -> Result<SocketAddr, String> {
    let expected = || {
        "expected ADDRESS:PORT, [ADDRESS]:PORT or [ADDRESS%DEVICE]:PORT, such as 192.0.2.1:4000".to_owned()
    };
    if let Ok(address) = text.parse::<SocketAddr>() {
        return match address {
            SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0 => Err(format!(
                "a link-local address needs its device, such as [{}%eth0]:{}",
                v6.ip(),
                v6.port()
            )),
            address => Ok(address),
        };
    }
    let (inside, port) =
        text.strip_prefix('[').and_then(|rest| rest.rsplit_once("]:")).ok_or_else(expected)?;
    let (ip, name) = inside.split_once('%').ok_or_else(expected)?;
    let name: DeviceName = name.parse().map_err(|error: DeviceNameError| error.to_string())?;
    let (ip, port) = (ip.parse().map_err(|_| expected())?, port.parse().map_err(|_| expected())?);
    let scope = device::index(&name.to_string())
        .map_err(|error| format!("the device {name}: {}", errno_name(&error)))?;
    Ok(SocketAddrV6::new(ip, port, 0, scope).into())
}

/// Parses `192.0.2.1:4000`.
fn in_band_peer(text: &str, listen: SocketAddr) -> Result<Peer, String> {
    let peer = socket_address(text)?;
    if peer.port() == 0 {
        return Err("a peer has a port from 1 to 65535".to_owned());
    }
    if peer == listen {
        return Err("both ends have the same address".to_owned());
    }
    if peer.is_ipv4() != listen.is_ipv4() {
        return Err("one end is IPv4, the other IPv6".to_owned());
    }
    Ok(Peer::in_band(peer))
}

fn key_of(text: &str) -> Option<FlowKey> {
    match format!("flow:{text}").parse() {
        Ok(Selector::Key(key)) => Some(key),
        _ => None,
    }
}

/// Parses `10.0.0.0/8=192.0.2.1:4000` or `7=192.0.2.1:4000`.
fn rule(text: &str) -> Result<Rule, String> {
    let expected = || {
        "expected PREFIX=ADDRESS:PORT, such as 10.0.0.0/8=192.0.2.1:4000, or KEY=ADDRESS:PORT, such as 7=192.0.2.1:4000".to_owned()
    };
    let (what, hop) = text.split_once('=').ok_or_else(expected)?;
    let hop = socket_address(hop)?;
    if what.contains('/') {
        return Ok(Rule::Destination(what.parse::<Prefix>()?, hop));
    }
    let key = match what.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => what.parse(),
    };
    Ok(Rule::Key(key.map_err(|_| expected())?, hop))
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;

    use super::*;

    fn named(field: &str) -> String {
        format!("--{field}")
    }

    fn text(listen: &str, to: &str) -> LinkText {
        LinkText { listen: listen.to_owned(), to: Some(to.to_owned()), ..LinkText::default() }
    }

    #[test]
    fn sessions_have_devices_and_timers() {
        let with_bfd = |bfd: &str| LinkText { bfd: Some(bfd.into()), ..text("127.0.0.1:1", "127.0.0.1:2") };
        let peer = |text: &LinkText| parse_link(text, &named).unwrap().link.bfd.unwrap();
        let on_device = peer(&with_bfd("fe80::1%eth0@fe80::2"));
        assert_eq!(on_device.device.unwrap().name(), "eth0");
        assert_eq!(
            (on_device.address, on_device.local),
            ("fe80::1".parse().unwrap(), "fe80::2".parse().ok())
        );
        assert_eq!(peer(&with_bfd("192.0.2.1")).timers, Timers::default());
        let ms = Duration::from_millis;
        let timed = LinkText {
            bfd_interval: Some("50ms".into()),
            bfd_multiplier: Some(5),
            ..with_bfd("192.0.2.1%eth0")
        };
        assert_eq!(peer(&timed).timers, Timers::new(ms(50), ms(50), 5).unwrap());
        let recorded = parse_link(&timed, &named).unwrap().record.bfd_timers.unwrap();
        assert_eq!((recorded.interval_ns, recorded.multiplier), (50_000_000, 5));
        let slower = LinkText { bfd_receive_interval: Some("1s".into()), ..timed };
        assert_eq!(peer(&slower).timers, Timers::new(ms(50), ms(1000), 5).unwrap());
    }

    #[test]
    fn a_session_is_in_band_or_at_its_own_port() {
        let whole =
            "[[link]]\nlisten = \"127.0.0.1:1\"\nto = \"127.0.0.1:2\"\nbfd-in-band = \"127.0.0.2:1\"\n";
        let file: File = toml::from_str(whole).unwrap();
        let link = parse_link(&file.links[0], &named).unwrap();
        assert_eq!(link.link.bfd, Some(Peer::in_band(([127, 0, 0, 2], 1).into())));
        assert_eq!(link.record.bfd_in_band.as_deref(), Some("127.0.0.2:1"));
        let apart = LinkText { bfd: Some("127.0.0.2".into()), ..text("127.0.0.1:1", "127.0.0.1:2") };
        assert_eq!(parse_link(&apart, &named).unwrap().link.bfd.unwrap().in_band, None);
    }

    #[test]
    fn a_file_is_parsed_and_its_errors_are_named() {
        let whole = "planes = 2\nplane = \"batched\"\npin = true\n[[link]]\nlisten = \"0.0.0.0:1\"\nto = \"127.0.0.1:2\"\nreturn = true\nroutes = [\"7=127.0.0.1:3\"]\nspread = \"flow:4:4\"\nidle = \"5s\"\n";
        let file: File = toml::from_str(whole).unwrap();
        let link = parse_link(&file.links[0], &named).unwrap();
        assert!(link.link.replies && link.link.routes.are_by_key());
        assert_eq!(link.record.key.as_deref(), Some("4:4"));
        assert_eq!(link.record.idle_ns, 5_000_000_000);
        for (wrong, line) in [("planes = 2\nplan = 3\n", 2), ("[[link]]\nlisten = 3\n", 2), ("x", 1)] {
            let error = toml::from_str::<File>(wrong).unwrap_err();
            assert!(input::toml_error(wrong, &error).starts_with(&format!("line {line}: ")), "{error}");
        }
    }

    #[test]
    fn zones_are_devices_by_name_or_number() {
        let index = fourtuple_syscalls::device::index("lo").unwrap();
        let by_number = format!("[fe80::2%{index}]:4001");
        for to in ["[fe80::2%lo]:4001", by_number.as_str()] {
            let routed = LinkText {
                routes: vec![format!("7={to}")],
                key: Some("0:1".into()),
                ..text("[fe80::1%lo]:4000", to)
            };
            let link = parse_link(&routed, &named).unwrap().link;
            let scope = |address: SocketAddr| match address {
                SocketAddr::V6(v6) => v6.scope_id(),
                SocketAddr::V4(_) => 0,
            };
            assert_eq!(scope(link.listen), index);
            assert!(link.routes.hops().all(|hop| scope(hop) == index && hop.port() == 4001), "{to}");
        }
        let error = |listen: &str, to: &str| parse_link(&text(listen, to), &named).unwrap_err().0;
        for (listen, to, part) in [
            ("[fe80::1%nodevice]:1", "[::1]:2", "the device nodevice: ENODEV"),
            ("[fe80::1]:1", "[::1]:2", "needs its device"),
            ("[::]:1", "[fe80::1]:2", "needs its device"),
            ("[::]:1", "[fe80::1%lo:2", "[ADDRESS%DEVICE]:PORT"),
            ("0.0.0.0:1", "255.255.255.255:2", "a broadcast address"),
        ] {
            assert!(error(listen, to).contains(part), "{}", error(listen, to));
        }
    }

    #[test]
    fn errors_name_the_setting_and_its_value() {
        let with = |change: fn(&mut LinkText)| {
            let mut link = text("127.0.0.1:1", "127.0.0.1:2");
            change(&mut link);
            link
        };
        let mistakes = [
            (text("nowhere", "127.0.0.1:1"), "'nowhere' for '--listen'"),
            (text("127.0.0.1:1", "there"), "'there' for '--to'"),
            (text("127.0.0.1:1", "127.0.0.1:0"), "'127.0.0.1:0' for '--to'"),
            (with(|link| link.routes = vec!["1.0.0.0/8=127.0.0.1:0".into()]), "'127.0.0.1:0' for '--route'"),
            (with(|link| link.clients = Some(0)), "'0' for '--clients'"),
            (text("a\nb", "127.0.0.1:1"), "'a b' for '--listen'"),
            (with(|link| link.spread = Some("even".into())), "'even' for '--spread'"),
            (with(|link| link.key = Some("4".into())), "'4' for '--key'"),
            (with(|link| link.routes = vec!["7".into()]), "'7' for '--route'"),
            (with(|link| link.routes = vec!["7=127.0.0.1:3".into()]), "where it is"),
            (with(|link| link.idle = Some("5".into())), "'5' for '--idle'"),
            (with(|link| link.bfd = Some("x".into())), "'x' for '--bfd'"),
            (with(|link| link.bfd = Some("::1@127.0.0.1".into())), "one end is IPv4"),
            (with(|link| link.bfd_in_band = Some("127.0.0.2".into())), "'127.0.0.2' for '--bfd-in-band'"),
            (with(|link| link.bfd_in_band = Some("127.0.0.1:1".into())), "the same address"),
            (with(|link| link.bfd_in_band = Some("[::1]:1".into())), "one end is IPv4"),
            (
                with(|link| {
                    (link.bfd, link.bfd_in_band) = (Some("127.0.0.2".into()), Some("127.0.0.2:1".into()))
                }),
                "one session",
            ),
            (with(|link| link.bfd = Some("fe80::1".into())), "needs its device"),
            (with(|link| link.bfd = Some("fe80::1%a/b".into())), "is not the name of a network device"),
            (with(|link| link.bfd_interval = Some("50ms".into())), "need a session"),
            (
                with(|link| (link.bfd, link.bfd_multiplier) = (Some("127.0.0.2".into()), Some(256))),
                "'256' for '--bfd-multiplier'",
            ),
            (
                with(|link| (link.bfd, link.bfd_interval) = (Some("127.0.0.2".into()), Some("5000s".into()))),
                "'5000s' for '--bfd-interval'",
            ),
            (LinkText { to: None, ..text("127.0.0.1:1", "") }, "nothing says where"),
        ];
        for (link, expected) in mistakes {
            let UsageError(message) = parse_link(&link, &named).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
    }

    // Mutated configuration files: the parser accepts each file or refuses it with one line that names the field.

    const WHOLE: &str = r#"planes = 4
plane = "offload"
pin = true
[[link]]
listen = "0.0.0.0:4000"
to = "192.0.2.1:4000"
spread = "flow:4:4:0xff"
routes = ["7=192.0.2.2:4000", "0x10=[2001:db8::1%3]:4000"]
bfd = "192.0.2.1@192.0.2.7"
return = true
idle = "30s"
clients = 10000
[[link]]
listen = "[::]:5000"
to = "192.0.2.9:5000"
routes = ["10.0.0.0/8=192.0.2.2:1", "2001:db8::/32=[::1]:2"]
key = "4:4"
"#;

    /// Fragments of valid and of invalid field values.
    #[rustfmt::skip]
    const PIECES: [&str; 44] = [
        "", "0", "1", "4", "7", "8", "10", "255", "256", "4000", "65535", "65536", "4294967296",
        "18446744073709551616", "-1", "0x", "0xff", "1e99", ".", ":", "::", "/", "=", "@", "%", ",", " ",
        "[", "]", "127.0.0.1", "0.0.0.0/0", "[::1]:1", "::ffff:1.2.3.4", "flow", "random", "map:", "xdp:",
        "cpumap", "s", "ns", "lo", "\n", "\0", "\u{1d11e}\u{fffd}",
    ];

    fn mutated(random: &mut Rng, sample: &str) -> String {
        // A valid value with fragments inserted or removed, or a value made of fragments only.
        let mut characters: Vec<char> =
            if random.u8(..4) == 0 { Vec::new() } else { sample.chars().collect() };
        for _ in 0..random.usize(1..5) {
            let at = random.usize(..=characters.len());
            match random.u8(..3) {
                0 if at < characters.len() => drop(characters.remove(at)),
                1 if at < characters.len() => characters.truncate(at),
                _ => drop(characters.splice(at..at, PIECES[random.usize(..PIECES.len())].chars())),
            }
        }
        characters.into_iter().collect()
    }

    fn valid() -> LinkText {
        let mut link = parse(WHOLE).unwrap().links.remove(0);
        link.routes = vec!["7=192.0.2.2:4000".to_owned()];
        link
    }

    /// One field holds a mutated value and all other fields are valid: each error names the mutated field.
    #[test]
    fn an_error_names_the_mutated_field() {
        type Put = fn(&mut LinkText, String);
        let fields: [(&str, &str, Put); 7] = [
            ("listen", "0.0.0.0:4000", |link, text| link.listen = text),
            ("to", "[2001:db8::1%3]:4000", |link, text| link.to = Some(text)),
            ("route", "0x10=192.0.2.2:4000", |link, text| link.routes.push(text)),
            ("key", "4:4:0xff00", |link, text| link.key = Some(text)),
            ("spread", "cpumap:2:flow:4:4@lo", |link, text| link.spread = Some(text)),
            ("idle", "1.5ms", |link, text| link.idle = Some(text)),
            ("bfd", "2001:db8::1@2001:db8::2", |link, text| link.bfd = Some(text)),
        ];
        let mut random = Rng::with_seed(4000);
        for (field, sample, put) in fields {
            let (mut understood, mut refused) = (0, 0);
            for _ in 0..20_000 {
                let mut link = valid();
                link.key = Some("4:4".to_owned());
                let value = mutated(&mut random, sample);
                put(&mut link, value.clone());
                match parse_link(&link, &|field| format!("{field} of link 1")) {
                    Ok(_) => understood += 1,
                    Err(UsageError(message)) => {
                        refused += 1;
                        assert!(
                            message.contains(&format!("for '{field} of link 1': ")),
                            "{value:?}: {message}"
                        );
                        assert!(!message.contains(char::is_control), "{value:?}: {message:?}");
                    }
                }
            }
            assert!(
                understood > 100 && refused > 1_000,
                "{field}: {understood} understood, {refused} refused"
            );
        }
    }

    /// The text that a parsed `--spread` value prints as parses to the same value.
    #[test]
    fn a_parsed_spread_prints_as_valid_text() {
        let mut random = Rng::with_seed(64);
        let samples = ["flow:4:4", "map:flow:0:2:0xff", "xdp:64@lo", "cpumap:2:random@lo", "random"];
        let mut understood = 0;
        for round in 0..50_000 {
            let text = mutated(&mut random, samples[round % samples.len()]);
            let Ok(spread) = text.parse::<Selector>() else { continue };
            understood += 1;
            assert_eq!(spread.to_string().parse(), Ok(spread), "{text:?}");
        }
        assert!(understood > 1_000, "{understood}");
    }

    /// Mutated files: bytes and lines removed, duplicated or moved.
    #[test]
    fn a_mutated_file_parses_or_fails_with_one_line() {
        let mut random = Rng::with_seed(42);
        let (mut understood, mut refused) = (0, 0);
        for round in 0..20_000 {
            let mut lines: Vec<String> = WHOLE.lines().map(str::to_owned).collect();
            for _ in 0..random.usize(1..4) {
                let at = random.usize(..lines.len());
                match random.u8(..4) {
                    0 => drop(lines.remove(at)),
                    1 => {
                        let line = lines.remove(at);
                        lines.insert(random.usize(..=lines.len()), line);
                    }
                    _ => lines[at] = mutated(&mut random, &lines[at]),
                }
            }
            let content = lines.join(if round % 3 == 0 { "\r\n" } else { "\n" });
            let read = parse(&content).and_then(|file| {
                let links = file.links.iter().enumerate();
                let name = |number: usize| move |field: &str| format!("{field} of link {}", number + 1);
                let links =
                    links.map(|(number, link)| parse_link(link, &name(number)).map_err(|error| error.0));
                links.collect::<Result<Vec<_>, _>>()
            });
            match read {
                Ok(_) => understood += 1,
                Err(message) => {
                    refused += 1;
                    let says_where = message.starts_with("line ") || message.contains(" of link ");
                    assert!(says_where || message == "no [[link]]", "{content}\n{message}");
                    assert!(!message.contains(char::is_control), "{content}\n{message:?}");
                }
            }
        }
        assert!(understood > 1_000 && refused > 1_000, "{understood} understood, {refused} refused");
    }
}
