//! The ports that connect() may choose.

use std::path::Path;

use fourtuple_record::snapshot::EphemeralPorts;

use crate::snapshot::reading::text;

pub(super) fn read(root: &Path) -> Result<EphemeralPorts, String> {
    let range = text(root, "proc/sys/net/ipv4/ip_local_port_range")?;
    // A kernel without the list reserves nothing.
    let reserved = text(root, "proc/sys/net/ipv4/ip_local_reserved_ports").unwrap_or_default();
    parse(&range, &reserved).ok_or_else(|| format!("net.ipv4.ip_local_port_range holds {:?}", range.trim()))
}

fn parse(range: &str, reserved: &str) -> Option<EphemeralPorts> {
    let mut bounds = range.split_whitespace().map(|bound| bound.parse().ok());
    let (low, high) = (bounds.next()??, bounds.next()??);
    let reserved = reserved.trim().split(',').filter_map(span).collect();
    (low <= high && low > 0).then_some(EphemeralPorts { low, high, reserved })
}

/// Parses `8080` or `9000-9100`.
fn span(text: &str) -> Option<(u16, u16)> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some((first.trim().parse().ok()?, last.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_ports_are_not_usable() {
        let ports = parse("20000\t20099\n", "8080,20010-20019,20050\n").unwrap();
        assert_eq!((ports.range(), ports.usable()), (100, 89));
        let overlapping = parse("20000\t20099\n", "19990-20004,20003-20010,20005,20090-20200").unwrap();
        assert_eq!(
            overlapping.usable(),
            (20_000..=20_099).filter(|port| overlapping.contains(*port)).count() as u32
        );
        assert!(ports.contains(20_009) && !ports.contains(20_010) && !ports.contains(8080));
        assert!(parse("1024", "").is_none() && parse("2 1", "").is_none());
    }
}
