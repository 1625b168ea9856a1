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
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
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
        idle_ns: nanos(idle),
        clients,
        bfd: text.bfd.clone(),
        bfd_in_band: text.bfd_in_band.clone(),
        bfd_timers: bfd.map(|_| ForwardBfdTimers {
            interval_ns: nanos(timers.desired_min_tx()),
            receive_interval_ns: nanos(timers.required_min_rx()),
            multiplier: timers.detect_mult(),
        }),
    };
    Ok(ParsedLink { link, record })
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
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
mod tests;
