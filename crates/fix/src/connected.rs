//! The destinations of the connections that exist, from the text of /proc/net/tcp and /proc/net/tcp6 (proc_pid_net(5)).

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fourtuple_bpf::fix_ports::NamespacePorts;

/// The greatest number of destinations.
const DESTINATIONS: usize = 1_000;

/// Returns the remote addresses of connections whose local port is in the range, the most frequent first.
pub(crate) fn destinations(lines: impl Iterator<Item = String>, ports: &NamespacePorts) -> Vec<IpAddr> {
    let mut counts: HashMap<IpAddr, u64> = HashMap::new();
    for (local_port, remote) in lines.filter_map(|line| connection(&line)) {
        if (ports.low..=ports.high).contains(&local_port) && !remote.is_unspecified() {
            *counts.entry(remote).or_default() += 1;
        }
    }
    let mut found: Vec<(IpAddr, u64)> = counts.into_iter().collect();
    found.sort_by_key(|(address, count)| (std::cmp::Reverse(*count), *address));
    found.into_iter().map(|(address, _)| address).take(DESTINATIONS).collect()
}

/// Returns the local port and the remote address of a line.
fn connection(line: &str) -> Option<(u16, IpAddr)> {
    let mut fields = line.split_whitespace().skip(1);
    let (_, local_port) = fields.next()?.split_once(':')?;
    let (remote, _) = fields.next()?.split_once(':')?;
    Some((u16::from_str_radix(local_port, 16).ok()?, address(remote)?))
}

/// Each group of eight digits is a 32-bit number in the byte order of this machine.
fn address(digits: &str) -> Option<IpAddr> {
    let word = |at: usize| u32::from_str_radix(digits.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    match digits.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let bytes = [word(0)?, word(8)?, word(16)?, word(24)?].concat();
            Some(Ipv6Addr::from(*bytes.first_chunk::<16>()?).to_canonical())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_from_the_range_have_destinations() {
        let lines = "  sl  local_address rem_address   st\n\
             0: 0100007F:0FA0 00000000:0000 0A 0\n\
             1: 0100007F:4E20 0200007F:0FA0 01 0\n\
             2: 0100007F:4E21 0300007F:0FA0 06 0\n\
             3: 0100007F:4E22 0300007F:0FA0 01 0\n\
             4: 0100007F:0FA0 0400007F:4E20 01 0\n\
             5: 00000000000000000000000001000000:4E23 00000000000000000000000001000000:0FA0 01 0\n\
             6: 0000000000000000FFFF00000100007F:4E24 0000000000000000FFFF00000500007F:0FA0 01 0\n";
        let ports = NamespacePorts {
            low: 20_000,
            high: 20_099,
            reserved: Vec::new(),
            time_wait_reuse: 0,
            has_sources: false,
        };
        let found: Vec<String> =
            destinations(lines.lines().map(str::to_owned), &ports).iter().map(IpAddr::to_string).collect();
        assert_eq!(found, ["127.0.0.3", "127.0.0.2", "127.0.0.5", "::1"]);
    }
}
