//! The texts of `fourtuple fix --print` for given numbers of a host.
#![forbid(unsafe_code)]

use std::env;
use std::fs;
use std::path::Path;

use fourtuple_fix::print::{PortRangeOption, Program, Snapshot};

/// Returns the numbers of a host with two source addresses.
fn host() -> Snapshot {
    Snapshot {
        kernel: "6.18.0".to_owned(),
        cpus: 4,
        low: 32_768,
        high: 60_999,
        reserved: vec![(9_000, 9_099), (50_000, 50_000)],
        listeners: Some(vec![22, 5_432, 9_100, 40_000]),
        time_wait_reuse: 2,
        timestamps: 1,
        time_wait_limit: Some(262_144),
        option: PortRangeOption::Linear,
        destination: Some("192.0.2.7:443".parse().unwrap()),
        prefix: Some("10.0.0.8/30".parse().unwrap()),
        sources: vec!["10.0.0.9".parse().unwrap(), "10.0.0.10".parse().unwrap()],
        unit: Some("nginx".to_owned()),
        program: "/usr/bin/fourtuple".to_owned(),
    }
}

/// Returns the numbers of a host of which little is known.
fn sparse() -> Snapshot {
    Snapshot {
        cpus: 1,
        reserved: Vec::new(),
        listeners: None,
        time_wait_reuse: 0,
        timestamps: 0,
        time_wait_limit: None,
        option: PortRangeOption::Absent,
        destination: None,
        prefix: None,
        sources: Vec::new(),
        unit: None,
        ..host()
    }
}

fn text(name: &str, snapshot: &Snapshot) -> String {
    Program::named(name).unwrap().text(snapshot)
}

/// Compares each text with its file. `FOURTUPLE_WRITE=1` writes the files.
#[test]
fn the_texts_are_as_in_their_files() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/print");
    for program in Program::ALL {
        let path = directory.join(format!("{}.txt", program.name));
        let text = program.text(&host());
        if env::var_os("FOURTUPLE_WRITE").is_some() {
            fs::write(&path, &text).unwrap();
        }
        let expected =
            fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(text, expected, "{}", path.display());
    }
}

#[test]
fn every_placeholder_is_filled() {
    let ipv6 = Snapshot {
        destination: Some("[2001:db8::7]:443".parse().unwrap()),
        prefix: Some("2001:db8:1::/126".parse().unwrap()),
        sources: vec!["2001:db8:1::1".parse().unwrap()],
        option: PortRangeOption::Parity,
        ..host()
    };
    for snapshot in [host(), sparse(), ipv6] {
        for program in Program::ALL {
            let text = program.text(&snapshot);
            // A template unit of systemd is called NAME@, and Python has decorators.
            let left = text.split_whitespace().find(|word| word.matches('@').count() > 1);
            assert_eq!(left, None, "{}: {text}", program.name);
            assert!(text.ends_with('\n') && !text.contains("\n\n\n\n"), "{}: {text}", program.name);
            let trailing = text.lines().find(|line| line.ends_with([' ', '\t']));
            assert_eq!(trailing, None, "{}", program.name);
        }
    }
}

#[test]
fn ipv6_addresses_are_written_as_each_program_reads_them() {
    let snapshot = Snapshot {
        destination: Some("[2001:db8::7]:443".parse().unwrap()),
        prefix: Some("2001:db8:1::/126".parse().unwrap()),
        sources: vec!["2001:db8:1::1".parse().unwrap()],
        ..host()
    };
    for (name, words) in [
        ("nginx", "server [2001:db8::7]:443;"),
        ("nginx", "proxy_bind 2001:db8:1::1;"),
        ("haproxy", "server source-1 [2001:db8::7]:443 source [2001:db8:1::1]:50001-60999 "),
        ("envoy", "address: \"2001:db8::7\", port_value: 443"),
        ("systemd", "--source 2001:db8:1::/126 --to [2001:db8::7]:443"),
    ] {
        let text = text(name, &snapshot);
        assert!(text.contains(words), "{name}: {text}");
    }
}

#[test]
fn haproxy_gets_ports_without_reserved_ones_and_listeners() {
    let range = |snapshot: &Snapshot| {
        let text = text("haproxy", snapshot);
        let line = text.lines().find(|line| line.contains("source 10.0.0.9:")).unwrap().to_owned();
        line.split("10.0.0.9:").nth(1).unwrap().split(' ').next().unwrap().to_owned()
    };
    // Blocks of 7,232, 9,999 and 10,999 ports.
    assert_eq!(range(&host()), "50001-60999");
    let crowded = Snapshot { listeners: Some(vec![55_000]), ..host() };
    assert_eq!(range(&crowded), "32768-49999");
    let full = Snapshot { low: 65_535, high: 65_535, listeners: Some(Vec::new()), ..host() };
    assert_eq!(range(&full), "65535-65535", "the last port does not overflow");
}

#[test]
fn sysctl_keeps_reserved_ports_and_adds_listeners() {
    let text = text("sysctl", &host());
    // Port 22 is below the range, and 9100 follows the block before.
    assert!(text.contains("\nnet.ipv4.ip_local_reserved_ports = 5432,9000-9100,40000,50000\n"), "{text}");
    assert!(
        text.contains("\nnet.ipv4.tcp_tw_reuse = 1\n") && text.contains("\n# net.ipv4.tcp_max_tw_buckets")
    );
    let sparse = self::text("sysctl", &sparse());
    assert!(sparse.contains("\n# net.ipv4.ip_local_reserved_ports = 8080\n"), "{sparse}");
    assert!(sparse.contains("\n# net.ipv4.tcp_tw_reuse = 1\n"), "timestamps are off: {sparse}");
    assert!(sparse.contains("\nnet.ipv4.tcp_max_tw_buckets = 262144\n"), "{sparse}");
    assert!(sparse.contains("no sock_diag"), "{sparse}");
}

#[test]
fn the_option_is_set_only_where_it_shortens_the_search() {
    for (name, setting) in [
        ("envoy", "name: 51"),
        ("go", "ipLocalPortRange, -0x10000"),
        ("python", "(socket.SOL_IP, 51,"),
        ("netty", "LOCAL_PORT_RANGE, 0xFFFF0000"),
    ] {
        assert!(text(name, &host()).contains(setting), "{name}");
        for option in [PortRangeOption::Parity, PortRangeOption::Absent] {
            let text = text(name, &Snapshot { option, ..host() });
            assert!(!text.contains(setting), "{name}: {text}");
            assert!(text.contains("IP_LOCAL_PORT_RANGE is not set"), "{name}: {text}");
        }
    }
}

#[test]
fn sources_of_a_prefix_are_bound_and_the_route_is_not() {
    let route = Snapshot { prefix: None, sources: vec!["10.0.0.9".parse().unwrap()], ..host() };
    for name in ["nginx", "go", "python", "netty"] {
        assert!(text(name, &host()).contains("10.0.0.10"), "{name}");
        assert!(!text(name, &route).contains("10.0.0.9"), "{name}");
    }
    // A port range of HAProxy needs an address.
    assert!(text("haproxy", &route).contains("source 10.0.0.9:"));
}

#[test]
fn a_unit_without_a_name_is_a_template() {
    let named = text("systemd", &host());
    assert!(
        named.contains("BindsTo=nginx.service\n") && named.contains("/fourtuple-nginx.service\n"),
        "{named}"
    );
    let template = text("systemd", &sparse());
    assert!(template.contains("--unit %i.service\n") && template.contains("/fourtuple-fix-ports@.service\n"));
}
