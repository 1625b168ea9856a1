//! A diagnosis with every part of a snapshot, a reading of the live page, and a diagnosis that sees nothing.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use fourtuple_record::snapshot::*;
use fourtuple_record::*;

use super::record;

pub(crate) fn owner(pid: u32, name: &str, sockets: u32) -> Owner {
    Owner { pid, name: name.into(), sockets }
}

fn states(states: &[(&str, u64)]) -> BTreeMap<String, u64> {
    states.iter().map(|(name, number)| ((*name).into(), *number)).collect()
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

const COUNTER: Counter = Counter { total: 120, during: 3 };

fn connections() -> Connections {
    let envoy = || vec![owner(812, "envoy", 563)];
    Connections {
        age_ns: 0,
        processes_by: "bpf".into(),
        processes_hidden: 0,
        states: states(&[("established", 1_063), ("time-wait", 27_668), ("close-wait", 70)]),
        tuples: vec![
            Tuple {
                source: address("10.0.0.9:0").ip(),
                destination: address("10.1.2.3:443"),
                in_use: 28_231,
                low_parity: 14_116,
                states: states(&[("established", 563), ("time-wait", 27_668)]),
                closes_per_s: 465.0,
                closed_last_s: 12,
                closing_ns: 9_900_000_000,
                growth_per_s: 0.5,
                time_wait_plain: Some(3),
                idle: Some(IdleTimes { median_ns: 4_000_000_000, longest_ns: 61_000_000_000 }),
                fix: Some(RunningFix { pid: 4_711, source: Some("10.0.0.0/24".into()), guard: false }),
                owners: envoy(),
            },
            Tuple {
                source: address("[::1]:0").ip(),
                destination: address("[::1]:5432"),
                in_use: 12,
                low_parity: 12,
                states: states(&[("established", 12)]),
                closes_per_s: 0.0,
                closed_last_s: 0,
                closing_ns: 0,
                growth_per_s: -0.5,
                time_wait_plain: None,
                idle: None,
                fix: None,
                owners: Vec::new(),
            },
        ],
        tuples_left_out: 7,
        tuples_left_out_states: states(&[("established", 40)]),
        sources: vec![Source {
            address: address("10.0.0.9:0").ip(),
            in_use: 28_231,
            low_parity: 14_116,
            destinations: 3,
            owners: envoy(),
        }],
        held: vec![
            HeldPort {
                port: 40_000,
                address: address("0.0.0.0:0").ip(),
                kind: "listening".into(),
                owner: Some(owner(1_204, "metrics", 1)),
            },
            HeldPort {
                port: 41_000,
                address: address("127.0.0.1:0").ip(),
                kind: "bound".into(),
                owner: None,
            },
        ],
        held_udp_hidden: Some("sock_diag(7): ENOENT".into()),
        held_left_out: 0,
        held_tcp: 2,
        held_tcp_low_parity: 2,
        held_bound: 1,
        held_udp: 0,
        udp_holder: None,
        services: vec![Service {
            port: 80,
            states: states(&[("established", 500)]),
            closes_per_s: 0.1,
            workers: vec![owner(901, "nginx", 400), owner(902, "nginx", 100)],
        }],
        left: Vec::new(),
        services_left_out: 3,
        self_connected: vec![SelfConnected {
            address: address("127.0.0.1:35432"),
            owner: Some(owner(90, "probe", 1)),
        }],
        unanswered: vec![
            Unanswered {
                destination: address("10.0.0.77:443"),
                established: false,
                sockets: 3,
                retransmits: 7,
                unsent: 1,
                none_acknowledged: 0,
                route: Some("unicast".into()),
                service: None,
                owner: Some(owner(815, "crawler", 3)),
            },
            Unanswered {
                destination: address("192.0.2.7:40962"),
                service: Some(8080),
                established: true,
                sockets: 12,
                retransmits: 60,
                unsent: 0,
                none_acknowledged: 9,
                route: None,
                owner: Some(owner(901, "nginx", 12)),
            },
        ],
        unread: vec![Unread {
            port: 8080,
            owner: owner(902, "nginx", 34),
            short: 33,
            oldest_ns: 3_100_000_000,
            sent_ns: 3_200_000_000,
        }],
        unix_close_wait: vec![UnixCloseWait {
            owner: owner(903, "php-fpm8.2", 60),
            path: "/run/php/php-fpm.sock".to_owned(),
            settled: 55,
            settled_ns: 2_000_000_000,
        }],
        close_wait: vec![CloseWait {
            owner: owner(77, "python3", 70),
            remote: address("10.4.0.2:51320"),
            oldest_ns: 7_260_000_000_000,
            settled: 65,
            old: 61,
        }],
    }
}

fn listener() -> Listener {
    Listener {
        address: address("0.0.0.0:80"),
        interface: 0,
        cookie: 4_101,
        waiting: 300,
        waiting_before: 290,
        standing: 12,
        given_up: 2,
        waited_ns: 42_000_000_000,
        backlog: 511,
        handshakes: 2,
        handshakes_resent: 1,
        resent_to: Some([192, 0, 2, 7].into()),
        drops: Some(COUNTER),
        owners: vec![owner(901, "nginx", 1), owner(902, "nginx", 1)],
        mptcp: false,
        ipv6_only: false,
        fix: Some(5_120),
    }
}

fn udp() -> UdpSockets {
    let socket = UdpSocketView {
        local: address("0.0.0.0:53"),
        remote: None,
        interface: 0,
        cookie: 99,
        queued_bytes: 212_992,
        limit_bytes: Some(212_992),
        drops: Some(COUNTER),
        user: 104,
        owners: vec![owner(640, "unbound", 1)],
    };
    let connected = UdpSocketView {
        remote: Some(address("10.0.0.53:53")),
        cookie: 100,
        limit_bytes: None,
        drops: None,
        ..socket.clone()
    };
    let server = address("10.0.0.53:53");
    let queries = vec![UnansweredQueries { server, sockets: 2, owner: Some(owner(812, "envoy", 2)) }];
    UdpSockets { total: 40, sockets: vec![socket, connected], left_out: 0, queries }
}

fn process() -> Process {
    Process {
        pid: 812,
        name: "envoy".into(),
        descriptors: 602,
        descriptor_limit: Some(1_024),
        descriptor_ceiling: Some(524_288),
        parent_name: Some("systemd".to_owned()),
        executable: Some("/usr/sbin/nginx (deleted)".to_owned()),
        cgroup: Some("/system.slice/nginx.service".to_owned()),
        command_line: Some("/usr/sbin/nginx -g daemon off;".to_owned()),
        waits_in: Some("ep_poll".to_owned()),
        parent: 1,
        group: 812,
        state: 'S',
        started_ns: 3_600_000_000_000,
        cpu_ns: Some(310_000_000),
    }
}

fn traced() -> Traced {
    Traced {
        connects: vec![TracedConnects {
            processes: 1,
            owner: owner(812, "envoy", 1_000),
            destination: address("10.1.2.3:443"),
            searches: 930,
            search_mean_ns: 1_200_000,
            search_p99_ns: 4_600_000,
            given_port: 2,
            established: 8,
            failed: 1,
        }],
        search_p99_ns: Some(4_600_000),
        searches: 930,
        search_ns: 1_116_000_000,
        established: 8,
    }
}

/// Calls that found no port.
pub(crate) fn failed_call() -> FailedCall {
    FailedCall {
        call: "connect".into(),
        errno: "EADDRNOTAVAIL".into(),
        protocol: "tcp".into(),
        owner: owner(812, "envoy", 68),
        processes: 1,
        address: Some("10.1.2.3:443".into()),
        addresses: 1,
        before_search: false,
        failed: 68,
        namespace: 4_026_531_840,
        range: None,
        route: Some("unicast".to_owned()),
        holder: Some(PortHolder {
            owner: Some(owner(77, "curl", 1)),
            local: "127.0.0.1:40000".parse().unwrap(),
            remote: Some("127.0.0.1:9000".parse().unwrap()),
            state: "established".to_owned(),
        }),
        running_ns: Some(86_400_000_000_000),
        causes: Vec::new(),
    }
}

fn locks() -> TracedLocks {
    let wait = LockWaits { waits: 40, waited_ns: 90_000 };
    TracedLocks { interval_ns: 2_000_000_000, classes: BTreeMap::from([("bhash".into(), wait)]) }
}

fn snapshot() -> Snapshot {
    let range = "net.ipv4.ip_local_port_range";
    Snapshot {
        interval_ns: 2_000_000_000,
        processors: 2,
        other_namespaces: 3,
        sysctls: BTreeMap::from([(range.into(), "32768 60999".into())]),
        configured: Part::Seen(vec![ConfiguredSysctl {
            file: "/etc/sysctl.conf".into(),
            line: 12,
            name: "net.ipv4.tcp_tw_recycle".into(),
            value: "1".into(),
        }]),
        ports: Part::Seen(EphemeralPorts { low: 32_768, high: 60_999, reserved: vec![(40_000, 40_009)] }),
        search: Part::Seen(PortSearch { default: "parity".into(), option: "linear".into() }),
        connections: Part::Seen(connections()),
        listeners: Part::Seen(vec![listener()]),
        unix_listeners: Part::Seen(vec![UnixListener {
            path: "/run/php/php-fpm.sock".to_owned(),
            cookie: 4_102,
            waiting: 9,
            waiting_before: 8,
            standing: 7,
            given_up: 2,
            backlog: 8,
            owners: vec![owner(903, "php-fpm8.2", 1)],
            workers: vec![owner(903, "php-fpm8.2", 1)],
            clients: vec![owner(812, "nginx", 7)],
            fix: None,
        }]),
        udp: Part::Seen(udp()),
        processes: Part::Seen(vec![process()]),
        counters: Part::Seen(BTreeMap::from([("TcpExt.ListenDrops".into(), COUNTER)])),
        memory: Part::Seen(TcpMemory {
            time_wait: 27_668,
            pages: 900,
            limits_pages: [187_000, 249_000, 374_000],
            ..TcpMemory::default()
        }),
        conntrack: Part::Seen(Conntrack {
            translated: Some(vec![Translated {
                source: address("192.0.2.1:0").ip(),
                destination: address("198.51.100.7:443"),
                protocol: "tcp".into(),
                ports: 900,
                low: 30_000,
                high: 30_999,
                closed: 12,
            }]),
            count: 30_000,
            limit: 262_144,
            counters: BTreeMap::from([("drop".into(), COUNTER)]),
        }),
        addresses: Part::Seen(vec![LocalAddress {
            address: address("10.0.0.9:0").ip(),
            prefix: 24,
            tentative: false,
            device: Some("eth0".to_owned()),
        }]),
        lost_sources: Part::Seen(vec![address("10.0.0.77:0").ip()]),
        traced: Part::Seen(traced()),
        accepts: Part::Seen(TracedAccepts {
            accepts: 840,
            wait_p99_ns: Some(31_000_000),
            turned_away: vec![TurnedAway { listener: 77, accepts: 40, closed: 12 }],
        }),
        locks: Part::Seen(locks()),
        failures: Part::Seen(Failures {
            calls: vec![failed_call()],
            left_out: 2,
            processes_32_bit: vec![owner(77, "game", 0)],
            elsewhere: vec![FailedElsewhere { pid: 900, calls: vec![failed_call()] }],
        }),
    }
}

fn advice(action: &str, is_command: bool) -> Advice {
    Advice {
        action: action.into(),
        is_command,
        effect: "64,512 ports instead of 28,232".into(),
        condition: is_command.then(|| "a server that is down now may need 3306 (mysql)".into()),
        proof: if is_command { Proof::Calculation } else { Proof::None },
        remains: is_command.then_some(Severity::Notice),
        needs_root: is_command,
        until: is_command.then(|| "the next boot".into()),
        undo: is_command.then(|| "sysctl -w net.ipv4.ip_local_port_range=\"32768 60999\"".into()),
        lasting: None,
    }
}

/// A host whose ports are exhausted.
pub(crate) fn doctor() -> DoctorRecord {
    let settings = DoctorSettings {
        pid: Some(812),
        netns: None,
        container: None,
        to: Some("10.1.2.3:443".into()),
        for_ns: 2_000_000_000,
        thresholds: BTreeMap::from([("P01".into(), 80.0)]),
    };
    let finding = |id: &str, severity, verdict: &str| Finding {
        id: id.into(),
        severity,
        subject: "10.0.0.9 → 10.1.2.3:443".into(),
        verdict: verdict.into(),
        evidence: vec!["the default search looks at the ports of one parity first".into()],
        now: vec![advice("fourtuple fix ports --pid 812 --source 10.0.0.0/28", true)],
        proper: vec![advice("keep connections open, and use them again", false)],
        same_cause_as: (id == "P02").then_some(0),
    };
    let full = "10.0.0.9 → 10.1.2.3:443 uses 28,231 of 28,232 ports, 98% of them in TIME_WAIT; envoy[812] closed 4,650 connections in the last 10 s, 12 in the last \
                second; at most 470/s can last";
    let results = DoctorResults {
        findings: vec![
            finding("P01", Severity::Critical, full),
            finding("P02", Severity::Warning, "connect() searches half of the range"),
            finding("T05", Severity::Notice, "net.ipv4.tcp_tw_recycle has not existed since Linux 4.12"),
        ],
        checked: vec!["P01".into(), "P02".into(), "T05".into()],
        unchecked: vec![Unchecked {
            id: "A07".into(),
            title: "connections wait long for accept()".into(),
            reason: "nothing was traced".into(),
        }],
        snapshot: snapshot(),
        history: None,
    };
    record("doctor", settings, results)
}

/// A reading of the live page, without a finding.
pub(crate) fn live_doctor() -> DoctorRecord {
    let mut record = doctor();
    record.settings = DoctorSettings {
        pid: None,
        netns: Some("/run/netns/blue".into()),
        container: Some("8a2f64c0b1d9".into()),
        to: None,
        ..record.settings
    };
    record.results.findings.clear();
    let moment = |at: u64, in_use: u32| Moment {
        at_ns: at * 1_000_000_000,
        in_use: vec![in_use, 12],
        time_wait: u64::from(in_use) - 500,
        queued: at,
    };
    record.results.history = Some(History {
        tuples: vec!["10.0.0.9 → 10.1.2.3:443".into(), "::1 → [::1]:5432".into()],
        moments: (0..60).map(|at| moment(at, 20_000 + 130 * at as u32)).collect(),
    });
    record
}

/// A diagnosis without the right to see anything.
pub(crate) fn blind_doctor() -> DoctorRecord {
    let mut record = doctor();
    record.results.findings.clear();
    record.results.snapshot = Snapshot { interval_ns: 0, processors: 1, ..Snapshot::default() };
    record
}

/// Texts that a terminal or a browser would execute, and the largest numbers.
pub(crate) fn hostile_doctor() -> DoctorRecord {
    let mut record = live_doctor();
    record.results.findings = doctor().results.findings;
    let finding = &mut record.results.findings[0];
    finding.verdict = "</script><b>\u{1b}[31m".into();
    finding.now = vec![advice("\u{1b}]0;x\u{7}</script>", true)];
    if let Part::Seen(connections) = &mut record.results.snapshot.connections {
        connections.tuples[0].owners = vec![owner(u32::MAX, "</script>\u{1b}[31m", u32::MAX)];
        connections.tuples[0].closes_per_s = f64::MAX;
        connections.tuples[0].states = states(&[("</script>", u64::MAX), ("time-wait", u64::MAX)]);
    }
    if let Some(history) = &mut record.results.history {
        history.tuples[0] = "</script><b>".into();
        history.moments.truncate(1);
        history.moments[0].time_wait = u64::MAX;
    }
    record
}
