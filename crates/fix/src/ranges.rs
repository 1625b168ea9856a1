//! Parses the sysctls that say which source ports connect() may choose.

use fourtuple_bpf::fix_ports::NamespacePorts;
use fourtuple_record::snapshot::EphemeralPorts;

/// Reads net.ipv4.ip_local_port_range, net.ipv4.ip_local_reserved_ports and net.ipv4.tcp_tw_reuse. `None` if the range is no
/// range; a missing list reserves nothing, and without net.ipv4.tcp_tw_reuse no TIME_WAIT socket is reused.
pub(crate) fn ports(range: &str, reserved: &str, time_wait_reuse: &str) -> Option<NamespacePorts> {
    let EphemeralPorts { low, high, reserved } = EphemeralPorts::parse(range, reserved)?;
    let time_wait_reuse = time_wait_reuse.trim().parse().unwrap_or(0);
    Some(NamespacePorts { low, high, reserved, time_wait_reuse, has_sources: false })
}

/// Returns the number of ports of the range that are not reserved.
pub(crate) fn usable(ports: &NamespacePorts) -> u32 {
    EphemeralPorts { low: ports.low, high: ports.high, reserved: ports.reserved.clone() }.usable()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sysctls_are_a_range_without_reserved_ports() {
        let ports = ports("20000\t20099\n", "8080,20010-20019,20050\n", "2\n").unwrap();
        assert_eq!((ports.low, ports.high, ports.time_wait_reuse), (20_000, 20_099, 2));
        assert_eq!(ports.reserved, [(8_080, 8_080), (20_010, 20_019), (20_050, 20_050)]);
        assert_eq!(usable(&ports), 100 - 11);
    }

    #[test]
    fn a_missing_list_reserves_nothing() {
        let ports = ports("1024 65535", "\n", "").unwrap();
        assert_eq!((ports.reserved.len(), ports.time_wait_reuse, usable(&ports)), (0, 0, 64_512));
        assert!(super::ports("", "", "").is_none());
        assert!(super::ports("2 1", "", "").is_none());
    }
}
