mod mutated;

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
        bfd_interval: None,
        bfd_receive_interval: None,
        bfd_multiplier: None,
    }
}

#[test]
fn sessions_have_devices_and_timers() {
    let with_bfd = |bfd: &str| LinkText { bfd: Some(bfd.into()), ..text("127.0.0.1:1", "127.0.0.1:2") };
    let peer = |text: &LinkText| parse_link(text, &named).unwrap().link.bfd.unwrap();
    let on_device = peer(&with_bfd("fe80::1%eth0@fe80::2"));
    assert_eq!(on_device.device.unwrap().name(), "eth0");
    assert_eq!((on_device.address, on_device.local), ("fe80::1".parse().unwrap(), "fe80::2".parse().ok()));
    assert_eq!(peer(&with_bfd("192.0.2.1")).timers, Timers::default());
    let ms = Duration::from_millis;
    let timed =
        LinkText { bfd_interval: Some("50ms".into()), bfd_multiplier: Some(5), ..with_bfd("192.0.2.1%eth0") };
    assert_eq!(peer(&timed).timers, Timers::new(ms(50), ms(50), 5).unwrap());
    let recorded = parse_link(&timed, &named).unwrap().record.bfd_timers.unwrap();
    assert_eq!((recorded.interval_ns, recorded.multiplier), (50_000_000, 5));
    let slower = LinkText { bfd_receive_interval: Some("1s".into()), ..timed };
    assert_eq!(peer(&slower).timers, Timers::new(ms(50), ms(1000), 5).unwrap());
}

#[test]
fn a_session_is_in_band_or_at_its_own_port() {
    let whole = "[[link]]\nlisten = \"127.0.0.1:1\"\nto = \"127.0.0.1:2\"\nbfd-in-band = \"127.0.0.2:1\"\n";
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
    let mistakes = [
        (text("nowhere", "127.0.0.1:1"), "'nowhere' for '--listen'"),
        (text("127.0.0.1:1", "there"), "'there' for '--to'"),
        (text("127.0.0.1:1", "127.0.0.1:0"), "'127.0.0.1:0' for '--to'"),
        (
            LinkText { routes: vec!["1.0.0.0/8=127.0.0.1:0".into()], ..text("127.0.0.1:1", "127.0.0.1:2") },
            "'127.0.0.1:0' for '--route'",
        ),
        (LinkText { clients: Some(0), ..text("127.0.0.1:1", "127.0.0.1:2") }, "'0' for '--clients'"),
        (text("a\nb", "127.0.0.1:1"), "'a b' for '--listen'"),
        (
            LinkText { spread: Some("even".into()), ..text("127.0.0.1:1", "127.0.0.1:2") },
            "'even' for '--spread'",
        ),
        (LinkText { key: Some("4".into()), ..text("127.0.0.1:1", "127.0.0.1:2") }, "'4' for '--key'"),
        (LinkText { routes: vec!["7".into()], ..text("127.0.0.1:1", "127.0.0.1:2") }, "'7' for '--route'"),
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
        (LinkText { bfd: Some("fe80::1".into()), ..text("127.0.0.1:1", "127.0.0.1:2") }, "needs its device"),
        (
            LinkText { bfd: Some("fe80::1%a/b".into()), ..text("127.0.0.1:1", "127.0.0.1:2") },
            "is not the name of a network device",
        ),
        (
            LinkText { bfd_interval: Some("50ms".into()), ..text("127.0.0.1:1", "127.0.0.1:2") },
            "need a session",
        ),
        (
            LinkText {
                bfd: Some("127.0.0.2".into()),
                bfd_multiplier: Some(256),
                ..text("127.0.0.1:1", "127.0.0.1:2")
            },
            "'256' for '--bfd-multiplier'",
        ),
        (
            LinkText {
                bfd: Some("127.0.0.2".into()),
                bfd_interval: Some("5000s".into()),
                ..text("127.0.0.1:1", "127.0.0.1:2")
            },
            "'5000s' for '--bfd-interval'",
        ),
        (LinkText { to: None, ..text("127.0.0.1:1", "") }, "nothing says where"),
    ];
    for (link, expected) in mistakes {
        let UsageError(message) = parse_link(&link, &named).unwrap_err();
        assert!(message.contains(expected), "{message}");
    }
}
