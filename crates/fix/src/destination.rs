//! Destinations as users write them: `192.0.2.0/24:443`, `[2001:db8::/32]:443`.

use std::net::IpAddr;

use fourtuple_bpf::fix_ports::DestinationFilter;
use ipnet::IpNet;

/// The text is not a destination.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a destination: expected an address or a prefix and a port, such as 192.0.2.0/24:443, 192.0.2.1:443 or \
     [2001:db8::/32]:443; the port * means every port"
)]
pub struct DestinationError(String);

/// Parses a prefix or an address, and a port or `*`.
///
/// # Errors
///
/// [`DestinationError`], also for port 0.
pub fn parse_destination(text: &str) -> Result<DestinationFilter, DestinationError> {
    parse(text).ok_or_else(|| DestinationError(text.to_owned()))
}

fn parse(text: &str) -> Option<DestinationFilter> {
    let (prefix, port) = text.rsplit_once(':')?;
    let port = match port {
        "*" => None,
        number => Some(number.parse().ok().filter(|port| *port != 0)?),
    };
    let (prefix, is_bracketed) = match prefix.strip_prefix('[') {
        Some(inner) => (inner.strip_suffix(']')?, true),
        None => (prefix, false),
    };
    let (address, length) = match prefix.parse::<IpNet>() {
        Ok(net) => (net.addr(), net.prefix_len()),
        Err(_) => {
            let address: IpAddr = prefix.parse().ok()?;
            (address, if address.is_ipv4() { 32 } else { 128 })
        }
    };
    // Without brackets the last group of an IPv6 address would be the port.
    (address.is_ipv6() == is_bracketed).then_some(DestinationFilter { address, length, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_is_a_prefix_and_a_port() {
        let parsed =
            |text: &str| parse(text).map(|filter| (filter.address.to_string(), filter.length, filter.port));
        assert_eq!(parsed("192.0.2.0/24:443"), Some(("192.0.2.0".into(), 24, Some(443))));
        assert_eq!(parsed("192.0.2.1:443"), Some(("192.0.2.1".into(), 32, Some(443))));
        assert_eq!(parsed("0.0.0.0/0:*"), Some(("0.0.0.0".into(), 0, None)));
        assert_eq!(parsed("[2001:db8::/32]:443"), Some(("2001:db8::".into(), 32, Some(443))));
        assert_eq!(parsed("[::1]:*"), Some(("::1".into(), 128, None)));
        for text in [
            "",
            "192.0.2.1",
            "192.0.2.1:0",
            "192.0.2.1:65536",
            "192.0.2.0/33:1",
            "::1:443",
            "[192.0.2.1]:1",
            "host:80",
        ] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }
}
