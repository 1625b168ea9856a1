//! Links, of the flags or of a file.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use fourtuple::spread::{Key, Rule as SpreadRule, Spread, SpreadTextError};
use fourtuple_forward::{Link, Peer, Prefix, Routes, Rule};
use fourtuple_record::ForwardLink;
use serde::Deserialize;

use crate::exit::UsageError;
use crate::units;

/// The most clients of a plane that may be asked for.
pub(super) const MOST_CLIENTS: u32 = 1_000_000;

/// What a file may say. What the command line says as well counts more there.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct File {
    pub(super) planes: Option<u32>,
    pub(super) plane: Option<String>,
    pub(super) pin: Option<bool>,
    #[serde(default, rename = "link")]
    pub(super) links: Vec<LinkText>,
}

/// One link in words, as in a file; the flags of the command line make one as well.
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
}

/// A link as it was understood.
#[derive(Clone, Debug)]
pub(super) struct Understood {
    pub(super) link: Link,
    pub(super) record: ForwardLink,
}

pub(super) fn read(path: &Path) -> Result<File, UsageError> {
    let refuse =
        |why: String| UsageError(format!("invalid value '{}' for '--config': {why}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
    parse(&text).map_err(refuse)
}

fn parse(text: &str) -> Result<File, String> {
    let file: File = toml::from_str(text).map_err(|error| in_one_line(text, &error))?;
    if file.links.is_empty() {
        return Err("no [[link]]".to_owned());
    }
    Ok(file)
}

/// Where and what, without the picture of the place.
fn in_one_line(text: &str, error: &toml::de::Error) -> String {
    let line = error.span().map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
    let message = error.message().replace('\n', " ");
    line.map_or(message.clone(), |line| format!("line {line}: {message}"))
}

/// `name` says where the value stands: `--to`, or `to of link 2`.
pub(super) fn understand(text: &LinkText, name: &dyn Fn(&str) -> String) -> Result<Understood, UsageError> {
    let refuse = |field: &str, value: &str, why: &str| {
        // Strings of a file may have more than one line, what is said of them has not.
        let value: String = value.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        UsageError(format!("invalid value '{value}' for '{}': {why}", name(field)))
    };
    let address = |field: &str, value: &str| -> Result<SocketAddr, UsageError> {
        value.parse().map_err(|_| {
            refuse(field, value, "expected ADDRESS:PORT or [ADDRESS]:PORT, such as 192.0.2.1:4000")
        })
    };
    let listen = address("listen", &text.listen)?;
    let default = text.to.as_deref().map(|to| address("to", to)).transpose()?;
    let spread = match &text.spread {
        None => Spread::Hash,
        Some(spread) => {
            spread.parse().map_err(|error: SpreadTextError| refuse("spread", spread, &error.to_string()))?
        }
    };
    if let (true, Spread::XdpSourcePort { .. }) = (text.replies, spread) {
        let why = "it gives packets source ports that nobody has, so that what goes back to them does not arrive: take another \
                   one, or do without return";
        return Err(refuse("spread", &spread.to_string(), why));
    }
    let key = match (&text.key, spread) {
        (Some(key), _) => Some(key_of(key).ok_or_else(|| {
            refuse("key", key, "expected OFFSET:WIDTH or OFFSET:WIDTH:MASK, WIDTH 1, 2 or 4 bytes")
        })?),
        (None, Spread::Key(key) | Spread::Map(SpreadRule::Key(key))) => Some(key),
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
    let clients = text.clients.unwrap_or(4096);
    if !(1..=MOST_CLIENTS).contains(&clients) {
        return Err(refuse("clients", &clients.to_string(), &format!("expected 1 to {MOST_CLIENTS}")));
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
    let link = Link {
        listen,
        routes,
        spread,
        replies: text.replies,
        idle,
        clients: clients as usize,
        bfd: bfd.or(in_band),
    };
    let record = ForwardLink {
        listen: listen.to_string(),
        to: default.map(|to| to.to_string()),
        routes: text.routes.clone(),
        key: key.map(|key| Spread::Key(key).to_string().replacen("flow:", "", 1)),
        spread: spread.to_string(),
        replies: text.replies,
        idle_ns: u64::try_from(idle.as_nanos()).unwrap_or(u64::MAX),
        clients,
        bfd: text.bfd.clone(),
        bfd_in_band: text.bfd_in_band.clone(),
    };
    Ok(Understood { link, record })
}

/// `192.0.2.1`, or `192.0.2.1@192.0.2.2` from an address of this host
fn peer(text: &str) -> Result<Peer, String> {
    let expected = || {
        "expected the address of the peer, such as 192.0.2.1, or PEER@LOCAL with the address here".to_owned()
    };
    let (peer, local) = match text.split_once('@') {
        Some((peer, local)) => (peer, Some(local)),
        None => (text, None),
    };
    let address: IpAddr = peer.parse().map_err(|_| expected())?;
    let local: Option<IpAddr> = local.map(str::parse).transpose().map_err(|_| expected())?;
    if local == Some(address) {
        return Err("both ends have the same address".to_owned());
    }
    if local.is_some_and(|local| local.is_ipv4() != address.is_ipv4()) {
        return Err("one end is IPv4, the other IPv6".to_owned());
    }
    Ok(Peer { local, ..Peer::new(address) })
}

/// `192.0.2.1:4000`
fn in_band_peer(text: &str, listen: SocketAddr) -> Result<Peer, String> {
    let peer: SocketAddr = text.parse().map_err(|_| {
        "expected the peer's address and the port of its data, such as 192.0.2.1:4000".to_owned()
    })?;
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

fn key_of(text: &str) -> Option<Key> {
    match format!("flow:{text}").parse() {
        Ok(Spread::Key(key)) => Some(key),
        _ => None,
    }
}

/// `10.0.0.0/8=192.0.2.1:4000` or `7=192.0.2.1:4000`
fn rule(text: &str) -> Result<Rule, String> {
    let expected = || {
        "expected PREFIX=ADDRESS:PORT, such as 10.0.0.0/8=192.0.2.1:4000, or KEY=ADDRESS:PORT, such as 7=192.0.2.1:4000".to_owned()
    };
    let (what, hop) = text.split_once('=').ok_or_else(expected)?;
    let hop = hop.parse().map_err(|_| expected())?;
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
mod noise;

#[cfg(test)]
mod tests {
    use super::*;

    fn named(field: &str) -> String {
        format!("--{field}")
    }

    fn text(listen: &str, to: &str) -> LinkText {
        LinkText {
            listen: listen.to_owned(),
            to: Some(to.to_owned()),
            routes: Vec::new(),
            key: None,
            spread: None,
            replies: false,
            idle: None,
            clients: None,
            bfd: None,
            bfd_in_band: None,
        }
    }

    #[test]
    fn a_session_is_among_the_data_or_apart_from_them() {
        let whole =
            "[[link]]\nlisten = \"127.0.0.1:1\"\nto = \"127.0.0.1:2\"\nbfd-in-band = \"127.0.0.2:1\"\n";
        let file: File = toml::from_str(whole).unwrap();
        let link = understand(&file.links[0], &named).unwrap();
        assert_eq!(link.link.bfd, Some(Peer::in_band(([127, 0, 0, 2], 1).into())));
        assert_eq!(link.record.bfd_in_band.as_deref(), Some("127.0.0.2:1"));
        let apart = LinkText { bfd: Some("127.0.0.2".into()), ..text("127.0.0.1:1", "127.0.0.1:2") };
        assert_eq!(understand(&apart, &named).unwrap().link.bfd.unwrap().in_band, None);
    }

    #[test]
    fn a_file_is_read_and_its_mistakes_are_found() {
        let whole = "planes = 2\nplane = \"batched\"\npin = true\n[[link]]\nlisten = \"0.0.0.0:1\"\nto = \"127.0.0.1:2\"\nreturn = true\nroutes = [\"7=127.0.0.1:3\"]\nspread = \"flow:4:4\"\nidle = \"5s\"\n";
        let file: File = toml::from_str(whole).unwrap();
        let link = understand(&file.links[0], &named).unwrap();
        assert!(link.link.replies && link.link.routes.are_by_key());
        assert_eq!(link.record.key.as_deref(), Some("4:4"));
        assert_eq!(link.record.idle_ns, 5_000_000_000);
        for (wrong, line) in [("planes = 2\nplan = 3\n", 2), ("[[link]]\nlisten = 3\n", 2), ("x", 1)] {
            let error = toml::from_str::<File>(wrong).unwrap_err();
            assert!(in_one_line(wrong, &error).starts_with(&format!("line {line}: ")), "{error}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_value() {
        let mistakes = [
            (text("nowhere", "127.0.0.1:1"), "'nowhere' for '--listen'"),
            (text("127.0.0.1:1", "there"), "'there' for '--to'"),
            (text("127.0.0.1:1", "127.0.0.1:0"), "'127.0.0.1:0' for '--to'"),
            (
                LinkText {
                    routes: vec!["1.0.0.0/8=127.0.0.1:0".into()],
                    ..text("127.0.0.1:1", "127.0.0.1:2")
                },
                "'127.0.0.1:0' for '--route'",
            ),
            (LinkText { clients: Some(0), ..text("127.0.0.1:1", "127.0.0.1:2") }, "'0' for '--clients'"),
            (text("a\nb", "127.0.0.1:1"), "'a b' for '--listen'"),
            (
                LinkText { spread: Some("even".into()), ..text("127.0.0.1:1", "127.0.0.1:2") },
                "'even' for '--spread'",
            ),
            (LinkText { key: Some("4".into()), ..text("127.0.0.1:1", "127.0.0.1:2") }, "'4' for '--key'"),
            (
                LinkText { routes: vec!["7".into()], ..text("127.0.0.1:1", "127.0.0.1:2") },
                "'7' for '--route'",
            ),
            (
                LinkText { routes: vec!["7=127.0.0.1:3".into()], ..text("127.0.0.1:1", "127.0.0.1:2") },
                "where it is",
            ),
            (LinkText { idle: Some("5".into()), ..text("127.0.0.1:1", "127.0.0.1:2") }, "'5' for '--idle'"),
            (LinkText { bfd: Some("x".into()), ..text("127.0.0.1:1", "127.0.0.1:2") }, "'x' for '--bfd'"),
            (
                LinkText { bfd: Some("::1@127.0.0.1".into()), ..text("127.0.0.1:1", "127.0.0.1:2") },
                "one end is IPv4",
            ),
            (
                LinkText { bfd_in_band: Some("127.0.0.2".into()), ..text("127.0.0.1:1", "127.0.0.1:2") },
                "'127.0.0.2' for '--bfd-in-band'",
            ),
            (
                LinkText { bfd_in_band: Some("127.0.0.1:1".into()), ..text("127.0.0.1:1", "127.0.0.1:2") },
                "the same address",
            ),
            (
                LinkText { bfd_in_band: Some("[::1]:1".into()), ..text("127.0.0.1:1", "127.0.0.1:2") },
                "one end is IPv4",
            ),
            (
                LinkText {
                    bfd: Some("127.0.0.2".into()),
                    bfd_in_band: Some("127.0.0.2:1".into()),
                    ..text("127.0.0.1:1", "127.0.0.1:2")
                },
                "one session",
            ),
            (LinkText { to: None, ..text("127.0.0.1:1", "") }, "nothing says where"),
        ];
        for (link, expected) in mistakes {
            let UsageError(message) = understand(&link, &named).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
    }
}
