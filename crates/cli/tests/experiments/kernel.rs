//! Faults of parts of the kernel that many programs share: connection tracking and SNAT, locks, and failures that no other rule explains.

use std::fs;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::program::situation::{
    Daemon, SERVER, actions, diagnose, diagnose_during, diagnose_for, diagnose_until, diagnose_with, do_now,
    experiment, failed_requests, findings, finds, first, nginx, paste, traced, unbound, until_found,
    verdicts, wait_for,
};
use crate::program::{TempDir, binary, list, number, run, text, until};
use crate::row;
use fourtuple_syscalls::{device, netns};
use fourtuple_testing::process::Python;
use fourtuple_testing::set_sysctl;
use serde_json::Value;

/// A second network namespace.
struct Beside(OwnedFd);

impl Beside {
    fn new() -> Beside {
        let made = thread::spawn(|| {
            netns::enter_new()?;
            netns::current()
        });
        Beside(made.join().expect("the thread does not panic").expect("a namespace"))
    }

    /// Runs `what` on this thread within the namespace; processes that it starts stay there.
    fn run<T>(&self, what: impl FnOnce() -> T) -> T {
        let home = netns::current().expect("procfs");
        netns::enter(self.0.as_fd()).expect("our namespace");
        let result = what();
        netns::enter(home.as_fd()).expect("our namespace");
        result
    }

    /// Connects the namespaces: the device `name` here has the address 10.`net`.0.1/24, the device `eth0` there has 10.`net`.0.2/24.
    fn connect(&self, name: &str, net: u8) {
        let bring_up = |name, last| {
            device::add_address(name, [10, net, 0, last].into(), 24).expect("an address");
            device::set_up(name).expect("a device");
        };
        device::make_pair(name, "eth0", self.0.as_fd()).expect("veth");
        bring_up(name, 1);
        self.run(|| bring_up("eth0", 2));
    }

    /// Drops what arrives there and matches.
    fn firewall(&self, packets: &str) {
        self.run(|| drop_packets("input", packets));
    }

    /// Connects the namespaces, and starts nginx at 10.40.0.2:[`SERVER`] in the other one.
    fn serve(&self, temp: &TempDir) -> Daemon {
        self.connect("srv", 40);
        self.run(|| {
            let servers = format!("server {{ listen 10.40.0.2:{SERVER} backlog=4096; return 200 ok; }}");
            let server = nginx(temp, "server", 0, None, &servers);
            wait_for("10.40.0.2", SERVER);
            server
        })
    }
}

/// A gateway between a pod and a server (flannel#1001, moby#31117): all connections of the pod have 100 source ports.
#[test]
fn a_gateway_without_snat_ports_is_named() {
    experiment(&["nginx", "nft", "python3"], |temp| {
        let masquerade = |ports: &str| {
            paste(&format!(
                "nft 'flush chain ip nat post; add rule ip nat post oifname srv ip protocol tcp masquerade to :{ports}'"
            ));
        };
        let (pod, far) = (Beside::new(), Beside::new());
        pod.connect("pod", 30);
        pod.run(|| paste("ip route add default via 10.30.0.1"));
        set_sysctl("net.ipv4.ip_forward", "1");
        paste("nft 'add table ip nat; add chain ip nat post { type nat hook postrouting priority 100 ; }'");
        masquerade("30000-30099");
        let _server = far.serve(temp);
        let mut client = pod.run(Python::start);
        client.run(&format!(
            "def dial(number, timeout):\n  failed = 0\n  for _ in range(number):\n    try: \
             held.append(socket.create_connection(('10.40.0.2', {SERVER}), timeout=timeout))\n    \
             except TimeoutError: failed += 1\n  return failed"
        ));
        assert_eq!(client.number("print(dial(100, 60))"), 0);
        let before = client.number("print(dial(8, 0.3))");
        client.run(
            "import threading\ngoing = True\ndef repeat():\n  while going: dial(1, 0.1)\n\
             thread = threading.Thread(target=repeat); thread.start()",
        );
        let record = diagnose_until(temp, "N02", &["SNAT has no port left"], || {
            thread::sleep(Duration::from_millis(10));
        });
        client.run("going = False; thread.join()");
        let finding =
            first(&record, "N02", &["10.40.0.1 → 10.40.0.2:4000 uses 100 of the 100 tcp ports 30000-30099"]);
        let advice = actions(finding, "now");
        assert!(advice[1].contains("`masquerade to :1024-65535`"), "{advice:?}");
        masquerade("1024-65535");
        let after = client.number("print(dial(8, 60))");
        row(
            finding,
            "a gateway with 100 ports for SNAT, all in use (moby#31117)",
            "nftables",
            &format!("{before} of 8 connections fail"),
            "masquerade to :1024-65535",
            &format!("{after} fail"),
        );
        assert_eq!((before, after), (8, 0));
        assert!(!finds(&diagnose(temp), "N02"));
    });
}

/// On a host with containers: `doctor` on the host, whose own network namespace is well.
#[test]
fn a_container_without_ports_is_named_on_its_host() {
    let test = "kernel::a_container_without_ports_is_named_on_its_host";
    experiment(&["unshare", "python3"], |temp| {
        let thresholds = temp.file("thresholds.toml", "P03 = 1\n");
        let client = temp.file(
            "client.py",
            "import socket, time\nserver = socket.create_server(('127.0.0.1', 4000), backlog=99)\nheld = []\nwhile True:\n  \
             try: held.append(socket.create_connection(('127.0.0.1', 4000)))\n  except OSError: open('failed', 'w').close(); time.sleep(0.01)\n",
        );
        let begin = "in another network namespace ";
        // A host is where process 1 is. On a busy one the client may not run during a diagnosis.
        let script = format!(
            "unshare -n sh -c 'ip link set lo up; sysctl -qw net.ipv4.ip_local_port_range=\"20000 20019\"; exec python3 {client}' & \
             until [ -e failed ]; do sleep 0.1; done; for turn in 1 2 3 4 5; do \
             {} doctor --for 1s --json --thresholds {thresholds} > record; grep -q '{begin}' record && break; done; cat record",
            binary().display()
        );
        let mut host = Command::new("unshare");
        let host = host.current_dir(temp.path());
        let ended = run(host.args(["-n", "-p", "-f", "--mount-proc", "--kill-child", "sh", "-c", &script]));
        let record = ended.json();
        if !traced(test, &record, "X01") {
            return;
        }
        assert_eq!(number(&record["results"]["snapshot"], "other_namespaces"), 1);
        let finding = first(&record, "X01", &[begin, " connect() of python3[", "failed with EADDRNOTAVAIL"]);
        let command = do_now(finding);
        assert!(command.contains("doctor --pid "), "{command}");
    });
}

/// Drops what matches in a chain of the namespace, until `nft delete table ip firewall`.
fn drop_packets(chain: &str, packets: &str) {
    paste(&format!(
        "nft 'add table ip firewall; add chain ip firewall it {{ type filter hook {chain} priority 0 ; }}; \
         add rule ip firewall it {packets} drop'"
    ));
}

/// A client that opens four connections, until a SYN of each was sent again, and counts those without an answer.
fn dialler() -> Python {
    let mut client = Python::start();
    client.run(&format!(
        "import errno, time\ndef dial(to):\n  global sockets, server\n  sockets, server = [socket.socket() for _ in range(4)], (to, {SERVER})\n  \
         for it in sockets: it.setblocking(False); it.connect_ex(server)\n  end = time.monotonic() + 60\n  \
         while time.monotonic() < end and not all(map(resent, sockets)): time.sleep(0.05)\n\
         def resent(it): return it.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)[2]\n\
         def waiting(): return sum(it.connect_ex(server) != errno.EISCONN for it in sockets)"
    ));
    client
}

/// Code of a client: four open connections, a request with a header on some of them, and the number of those without an answer.
fn asking(to: &str) -> String {
    format!(
        "import select\nsockets = [socket.create_connection(('{to}', {SERVER})) for _ in range(4)]\n\
         def ask(header, begin=0, end=4):\n  \
         for it in sockets[begin:end]: it.sendall(('GET / HTTP/1.1\\r\\nHost: x\\r\\n' + header + '\\r\\n').encode())\n\
         def waiting(): return 4 - len(select.select(sockets, [], [], 0)[0])"
    )
}

/// Diagnoses until the data of all four connections was sent again often enough.
fn unacknowledged(temp: &TempDir) -> Value {
    let mut record = Value::Null;
    until("the data was sent again three times", || {
        record = diagnose(temp);
        let is_all =
            |verdict: &String| verdict.contains("4 connections") && verdict.contains("no acknowledgement");
        verdicts(&record).iter().any(is_all)
    });
    record
}

/// Mends a fault for which four requests of [`asking`] wait, and makes the row of (fault, program, cure).
fn answered(temp: &TempDir, client: &mut Python, finding: &Value, texts: [&str; 3], mend: impl FnOnce()) {
    let before = client.number("print(waiting())");
    mend();
    until("all requests are answered", || client.number("print(waiting())") == 0);
    let [fault, program, cure] = texts;
    row(finding, fault, program, &format!("{before} of 4 requests wait"), cure, "0 wait");
    assert_eq!(before, 4);
    assert!(!finds(&diagnose(temp), "X01"));
}

/// Programs give up long before connect() fails with ETIMEDOUT: no call has an errno, and of few connections no counter is unusual.
#[test]
fn a_server_that_answers_no_syn_is_named() {
    experiment(&["nginx", "nft", "python3"], |temp| {
        let far = Beside::new();
        let _server = far.serve(temp);
        far.firewall(&format!("tcp dport {SERVER}"));
        let mut client = dialler();
        client.run("dial('10.40.0.2')");
        let before = client.number("print(waiting())");
        let record = diagnose(temp);
        let finding = first(
            &record,
            "X01",
            &["unexplained: 4 connections of python3[", &format!("to 10.40.0.2:{SERVER} get no answer")],
        );
        let evidence = finding["evidence"].to_string();
        assert!(
            evidence.contains("possible: the host is down, or a firewall drops the packets"),
            "{evidence}"
        );
        // Nobody has looked at the queues of another host.
        assert!(evidence.contains("possible: the accept queue of the server is full"), "{evidence}");
        let cure = format!("accept port {SERVER} in the firewall there");
        assert!(actions(finding, "proper")[0].contains(&cure), "{finding}");
        far.run(|| _ = paste("nft delete table ip firewall"));
        until("all are connected", || client.number("print(waiting())") == 0);
        row(
            finding,
            "a firewall that drops the SYNs of four connections",
            "nftables",
            &format!("{before} of 4 connections wait"),
            &cure,
            "0 wait",
        );
        assert_eq!(before, 4);
        assert!(!finds(&diagnose(temp), "X01"));
    });
}

/// A firewall of this host: connect() returns no error for a SYN that a rule drops, on its way out or in.
#[test]
fn a_firewall_of_this_host_is_told_from_one_of_another() {
    experiment(&["nginx", "nft", "python3"], |temp| {
        let far = Beside::new();
        let _far_server = far.serve(temp);
        let servers = format!("server {{ listen 10.40.0.1:{SERVER}; return 200 ok; }}");
        let server = nginx(temp, "near", 0, None, &servers);
        wait_for("10.40.0.1", SERVER);
        let mut client = dialler();
        let nginx = format!("nginx[{}]", server.pid());
        for (chain, to, cause, cure) in [
            (
                "output",
                "10.40.0.2",
                "a firewall rule of this host drops the packets (output chain".to_owned(),
                "accept the destination in the output chain".to_owned(),
            ),
            (
                "input",
                "10.40.0.1",
                format!("{nginx} listens at 10.40.0.1:{SERVER} on this host and has got none of the SYNs"),
                format!("accept port {SERVER} in the input chain"),
            ),
        ] {
            drop_packets(chain, &format!("ip daddr {to} tcp dport {SERVER}"));
            client.run(&format!("dial('{to}')"));
            let before = client.number("print(waiting())");
            let record = diagnose(temp);
            let calls = format!("4 connections of python3[{}] to {to}:{SERVER} get no answer", client.pid());
            let finding = first(&record, "X01", &[&calls]);
            assert!(!text(finding, "verdict").contains("unexplained"), "{finding:#}");
            let evidence = finding["evidence"].to_string();
            assert!(evidence.contains(&format!("the cause here: {cause}")), "{evidence}");
            assert!(actions(finding, "proper")[0].contains(&cure), "{finding}");
            let of_x01 = findings(&record).filter(|finding| finding["id"] == "X01").count();
            assert_eq!(of_x01, 1, "no counter beside it: {:#?}", verdicts(&record));
            paste("nft delete table ip firewall");
            until("all are connected", || client.number("print(waiting())") == 0);
            row(
                finding,
                &format!("a rule of this host's own {chain} chain that drops the SYNs of four connections"),
                "nftables",
                &format!("{before} of 4 connections wait"),
                &cure,
                "0 wait",
            );
            assert_eq!(before, 4);
        }
    });
}

/// A tunnel whose ICMP messages a firewall drops: the handshake succeeds, and no packet of full size arrives.
#[test]
fn a_path_that_drops_large_packets_is_named_and_probing_helps() {
    experiment(&["nginx", "nft", "python3"], |temp| {
        let far = Beside::new();
        let _server = far.serve(temp);
        // A peer that does not read: its window is zero, and the kernel probes it again and again.
        let silent = far.run(|| TcpListener::bind("10.40.0.2:4001").unwrap());
        let mut client = Python::start();
        client.run(
            "full = [socket.create_connection(('10.40.0.2', 4001)) for _ in range(2)]\n\
             for it in full:\n  it.setblocking(False)\n  try:\n    while True: it.send(b'x' * 65536)\n  \
             except BlockingIOError: pass\nimport time; time.sleep(3)",
        );
        assert!(!finds(&diagnose(temp), "X01"));
        far.firewall("meta length > 1400");
        client.run(&asking("10.40.0.2"));
        client.run("ask('X: ' + 'x' * 3000 + '\\r\\n')");
        let record = unacknowledged(temp);
        let finding = first(
            &record,
            "X01",
            &[
                "unexplained: 4 connections of python3[",
                &format!("to 10.40.0.2:{SERVER} get no acknowledgement"),
            ],
        );
        let advice = &actions(finding, "proper")[0];
        assert!(
            advice.contains("ping -M do -s 1472 10.40.0.2")
                && advice.ends_with("net.ipv4.tcp_mtu_probing=1`"),
            "{advice}"
        );
        assert!(!verdicts(&record).iter().any(|verdict| verdict.contains(":4001")), "{record}");
        drop(silent);
        let texts = [
            "a path that drops packets above 1,400 bytes, and ICMP",
            "nftables",
            "net.ipv4.tcp_mtu_probing=1",
        ];
        answered(temp, &mut client, finding, texts, || set_sysctl("net.ipv4.tcp_mtu_probing", "1"));
    });
}

/// The other end of such a path: the requests arrive, and no client gets an answer. Half of them are left behind by the server, which has
/// closed the connection.
#[test]
fn answers_that_no_client_acknowledges_are_named() {
    experiment(&["nginx", "nft", "python3"], |temp| {
        let far = Beside::new();
        far.connect("srv", 40);
        let answer = "x".repeat(3_000);
        let servers = format!("server {{ listen 10.40.0.1:{SERVER}; return 200 {answer}; }}");
        let _server = nginx(temp, "near", 0, None, &servers);
        wait_for("10.40.0.1", SERVER);
        far.firewall("meta length > 1400");
        let mut client = far.run(Python::start);
        client.run(&asking("10.40.0.1"));
        client.run("ask('', 2); ask('Connection: close\\r\\n', 0, 2)");
        let record = unacknowledged(temp);
        let verdict =
            ["unexplained: 4 connections of nginx[", "get no acknowledgement from clients such as 10.40.0.2"];
        let finding = first(&record, "X01", &verdict);
        let evidence = finding["evidence"].to_string();
        assert!(evidence.contains("the handshakes are complete, and of 4 connections no data"), "{evidence}");
        let cure = "net.ipv4.tcp_mtu_probing=1";
        assert!(actions(finding, "proper")[0].ends_with(&format!("{cure}`")), "{finding}");
        let texts = ["clients behind a path that drops packets above 1,400 bytes, and ICMP", "nginx", cure];
        answered(temp, &mut client, finding, texts, || set_sysctl("net.ipv4.tcp_mtu_probing", "1"));
    });
}

/// A rule that begins while connections are open: the kernel has never sent what they write next, and counts no retransmission.
#[test]
fn a_firewall_of_this_host_that_stops_open_connections_is_named() {
    experiment(&["nginx", "nft", "python3"], |temp| {
        let far = Beside::new();
        let _far_server = far.serve(temp);
        let servers = format!("server {{ listen 10.40.0.1:{SERVER}; return 200 ok; }}");
        let server = nginx(temp, "near", 0, None, &servers);
        wait_for("10.40.0.1", SERVER);
        for (way, to, mut client) in
            [("dport", "10.40.0.2", Python::start()), ("sport", "10.40.0.1", far.run(Python::start))]
        {
            client.run(&asking(to));
            client.run("ask('')");
            until("all requests are answered", || client.number("print(waiting())") == 0);
            client.run("for it in sockets: it.recv(65536)");
            drop_packets("output", &format!("ip daddr 10.40.0.2 tcp {way} {SERVER}"));
            client.run("ask('')");
            let record = unacknowledged(temp);
            let what = match way {
                "dport" => [
                    format!("4 connections of python3[{}] to", client.pid()),
                    format!("{to}:{SERVER} get no"),
                ],
                _ => [
                    format!("4 connections of nginx[{}]", server.pid()),
                    "from clients such as 10.40.0.2".to_owned(),
                ],
            };
            let finding = first(&record, "X01", &what.each_ref().map(|text| &**text));
            assert!(!text(finding, "verdict").contains("unexplained"), "{finding:#}");
            let evidence = finding["evidence"].to_string();
            assert!(
                evidence.contains("the cause here: a firewall rule of this host drops the packets"),
                "{evidence}"
            );
            let cure = "accept the destination in the output chain";
            assert_eq!(actions(finding, "proper"), [format!("{cure} (systemd: `IPAddressAllow=`)")]);
            let whose = if way == "dport" { "to a server" } else { "of a server" };
            let fault = format!(
                "a rule of this host's own output chain that drops the packets of four open connections {whose}"
            );
            let texts = [&*fault, "nftables", cure];
            answered(temp, &mut client, finding, texts, || _ = paste("nft delete table ip firewall"));
        }
    });
}

/// A route that goes while connections are open: what they write next does not leave the host, and no firewall is to blame.
#[test]
fn a_route_that_is_lost_is_told_from_a_firewall() {
    experiment(&["nginx", "python3"], |temp| {
        let far = Beside::new();
        let _server = far.serve(temp);
        let mut client = Python::start();
        client.run(&asking("10.40.0.2"));
        paste("ip route add unreachable 10.40.0.2");
        client.run("ask('')");
        let record = unacknowledged(temp);
        let verdict = format!("4 connections of python3[{}] to 10.40.0.2:{SERVER} get no", client.pid());
        let finding = first(&record, "X01", &[&verdict]);
        let evidence = finding["evidence"].to_string();
        assert!(evidence.contains("the cause here: no route leads to 10.40.0.2 any more"), "{evidence}");
        assert!(!evidence.contains("firewall"), "{evidence}");
        let cure = "ip route del unreachable 10.40.0.2";
        let fault = "a route of type `unreachable` to the server of four open connections";
        answered(temp, &mut client, finding, [fault, "python3", cure], || _ = paste(cure));
    });
}

/// A crawler connects to 60 hosts in turn: no host alone fails more often than one that is down.
#[test]
fn a_program_that_reaches_none_of_many_hosts_is_named() {
    experiment(&["nginx", "nft", "python3"], |temp| {
        let far = Beside::new();
        far.connect("srv", 40);
        let _server = far.run(|| {
            paste("ip route add local 10.50.0.0/24 dev lo");
            let server =
                nginx(temp, "far", 0, None, &format!("server {{ listen {SERVER}; return 200 ok; }}"));
            wait_for("10.40.0.2", SERVER);
            server
        });
        let mut client = Python::start();
        client.run(&format!(
            "import time\ndef crawl(wait):\n  n = 0\n  for host in range(1, 61):\n    s = socket.socket(); s.settimeout(wait)\n    \
             n += s.connect_ex((f'10.50.0.{{host}}', {SERVER})) != 0; s.close(); time.sleep(0.02)\n  return n"
        ));
        let mut named = |verdict: &str, fault: &str, program: &str, cure: &str, mend: &dyn Fn()| {
            let parts = [" addresses such as 10.50.0.", verdict];
            let record = diagnose_until(temp, "X01", &parts, || _ = client.run("before = crawl(0.02)"));
            let finding = first(&record, "X01", &parts);
            let before = client.number("print(before)");
            mend();
            let after = client.number("print(crawl(20))");
            let fail = |number| format!("{number} of 60 connects fail");
            row(finding, fault, program, &fail(before), cure, &fail(after));
            assert_eq!((before, after), (60, 0));
            finding.clone()
        };
        let cure = "ip route add default via 10.40.0.2";
        let fault = "a crawler of 60 hosts without a default route";
        let finding = named("failed with ENETUNREACH", fault, "python3", cure, &|| _ = paste(cure));
        let evidence = finding["evidence"].to_string();
        assert!(evidence.contains("the cause here: there is no route to 10.50.0."), "{finding:#}");
        assert!(actions(&finding, "proper")[0].contains("with `default` for all addresses"), "{finding:#}");
        far.firewall(&format!("tcp dport {SERVER}"));
        let fault = "a firewall that drops the SYNs of a crawler, which waits for 20 ms, to each of 60 hosts";
        named("got no answer", fault, "nftables", "the rule is deleted", &|| {
            far.run(|| _ = paste("nft delete table ip firewall"));
        });
    });
}

/// The server of a load balancer with direct return, without the address that clients use: no socket sees the packets.
#[test]
fn packets_for_an_address_that_the_host_lacks_are_named() {
    experiment(&["nginx", "python3"], |temp| {
        let far = Beside::new();
        far.connect("srv", 40);
        let _server = nginx(temp, "near", 0, None, &format!("server {{ listen {SERVER}; return 200 ok; }}"));
        wait_for("10.40.0.1", SERVER);
        far.run(|| paste("ip route add 10.41.0.1 via 10.40.0.1"));
        let mut client = far.run(Python::start);
        client.run(&format!(
            "import time\ndef answered(wait):\n  n = 0\n  for _ in range(20):\n    \
             s = socket.socket(); s.settimeout(wait)\n    n += s.connect_ex(('10.41.0.1', {SERVER})) == 0; s.close()\n  return n"
        ));
        let verdict = ["Ip.InAddrErrors grew by "];
        let record = diagnose_until(temp, "X01", &verdict, || _ = client.run("before = answered(0.05)"));
        let finding = first(&record, "X01", &verdict);
        let cure = "ip address add 10.41.0.1/32 dev lo";
        assert!(
            actions(finding, "proper")[0].starts_with("`ip address add ADDRESS/32 dev lo`"),
            "{finding:#}"
        );
        let before = client.number("print(before)");
        paste(cure);
        let after = client.number("print(answered(20))");
        row(
            finding,
            "a server behind a load balancer with direct return lacks the address of the service",
            "nginx",
            &format!("{} of 20 connections fail", 20 - before),
            cure,
            &format!("{} fail", 20 - after),
        );
        assert_eq!((before, after), (0, 20));
        let after = diagnose_during(temp, || _ = client.run("answered(20)"));
        assert!(!finds(&after, "X01"), "{:#?}", verdicts(&after));
    });
}

/// The first address of a name does not answer: a client that tries the second one 200 ms later closes the first socket, and no call fails.
#[test]
fn an_address_that_is_given_up_for_another_is_named() {
    let test = "kernel::an_address_that_is_given_up_for_another_is_named";
    experiment(&["nginx", "curl", "nft"], |temp| {
        let servers =
            format!("server {{ listen 127.0.0.1:{SERVER}; listen [::1]:{SERVER}; return 200 ok; }}");
        let _server = nginx(temp, "server", 0, None, &servers);
        wait_for("127.0.0.1", SERVER);
        paste(&format!(
            "nft 'add table ip6 firewall; add chain ip6 firewall arrives {{ type filter hook input priority 0 ; }}; \
             add rule ip6 firewall arrives tcp dport {SERVER} drop'"
        ));
        let resolve = format!("api.example:{SERVER}:[::1],127.0.0.1");
        let url = format!("http://api.example:{SERVER}/");
        // Several at a time: on a slow host one after the other would be too few for a finding.
        let request = || {
            thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| run(Command::new("curl").args(["-s", "--resolve", &resolve, &url])));
                }
            });
        };
        let of_curl =
            ["of connect() of curl", &format!("to [::1]:{SERVER} got no answer until the program closed")];
        let instead = format!("it then uses 127.0.0.1:{SERVER}: ");
        let record = diagnose_until(temp, "X01", &[of_curl[0], of_curl[1], &instead], request);
        if !traced(test, &record, "X01") {
            return;
        }
        let finding = first(&record, "X01", &of_curl);
        let evidence = finding["evidence"].to_string();
        assert!(evidence.contains(&instead), "{evidence}");
        let cure = format!("accept port {SERVER} in the input chain");
        assert_eq!(actions(finding, "proper")[0], cure, "{finding}");
        paste("nft delete table ip6 firewall");
        row(
            finding,
            "a firewall that drops the SYNs of one of two addresses",
            "curl",
            "each connection begins 200 ms later",
            &cure,
            "at once",
        );
        let after = diagnose_during(temp, request);
        assert!(!finds(&after, "X01"), "{:#?}", verdicts(&after));
    });
}

/// A firewall between a host and its DNS server: no call fails for 10 seconds, and no counter grows.
#[test]
fn dns_queries_without_an_answer_are_named() {
    experiment(&["unbound", "getent", "unshare", "nft", "python3"], |temp| {
        let far = Beside::new();
        far.connect("far", 40);
        let server = far.run(|| unbound(temp, "10.40.0.2", 53, "64k"));
        let resolv = temp.file("resolv.conf", "nameserver 10.40.0.2\n");
        // One question, and others for as long as the file exists: a diagnosis may begin later than getent gives up.
        let asking = temp.join("asking");
        let script = format!(
            "mount --bind {resolv} /etc/resolv.conf && until getent ahostsv4 a.example || [ ! -e {asking} ]; do :; done"
        );
        let look_up = || {
            let mut command = Command::new("unshare");
            command.args(["-m", "sh", "-c", &script]);
            command
        };
        until("Unbound answers", || run(&mut look_up()).stdout.contains("10.0.0.1 "));
        // A forwarder keeps sockets that have had their answers.
        let mut idle = Python::start();
        idle.run(
            "query = bytes.fromhex('123401000001000000000000') + b'\\x01a\\x07example\\x00\\x00\\x01\\x00\\x01'\n\
             u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.connect(('10.40.0.2', 53)); u.settimeout(5)\n\
             def ask():\n  u.send(query)\n  try: return len(u.recv(512)) > 12\n  except TimeoutError: return False",
        );
        // The kernel may drop a packet while other tests flood the queue of its processor.
        until("the forwarder has an answer", || idle.run("print(ask())") == "True");
        far.firewall("udp dport 53");
        let queries = || {
            let sockets = fs::read_to_string("/proc/thread-self/net/udp").expect("procfs");
            sockets
                .lines()
                .filter(|line| line.split_whitespace().nth(2).is_some_and(|to| to.ends_with(":0035")))
                .count()
        };
        let during = |what: &str| {
            temp.file("asking", "");
            let waiting = look_up().stdout(Stdio::piped()).spawn().expect("unshare");
            // Beside that of the forwarder.
            until("getent has sent its query", || queries() == 2);
            // getent sends from another socket now and then.
            let again = || diagnose_for(temp, "2s", "P03 = 1\n");
            let record = until_found("X01", &["DNS query of getent"], again);
            fs::remove_file(&asking).expect("our file");
            let answers = waiting.wait_with_output().expect("a child").stdout;
            assert_eq!(String::from_utf8_lossy(&answers), "", "{what}");
            record
        };
        let record = during("a firewall drops the query");
        let of_getent =
            ["unexplained: 1 DNS query of getent[", "to 10.40.0.2:53 has had no answer for a second"];
        let finding = first(&record, "X01", &of_getent);
        assert_eq!(actions(finding, "now")[0], "dig +tries=1 +time=2 @10.40.0.2 -p 53 .");
        let cure = "accept UDP port 53 in the firewall";
        assert!(actions(finding, "proper")[0].starts_with(cure), "{finding}");
        far.run(|| _ = paste("nft delete table ip firewall"));
        row(
            finding,
            "a firewall that drops the queries to the DNS server",
            "getent",
            "a name takes 10 s, and is not found",
            cure,
            "found at once",
        );
        until("Unbound answers", || run(&mut look_up()).stdout.contains("10.0.0.1 "));
        assert!(!finds(&diagnose_for(temp, "2s", "P03 = 1\n"), "X01"));
        drop(server);
        // The server of this host, which does not read.
        let mut server = Python::start();
        device::add_address("lo", [10, 41, 0, 2].into(), 32).expect("an address");
        fs::write(&resolv, "nameserver 10.41.0.2\n").expect("a file");
        server.run("s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('10.41.0.2', 53))");
        let record = during("the server does not read");
        let finding = first(&record, "X01", &["1 DNS query of getent[", "to 10.41.0.2:53"]);
        let evidence = finding["evidence"].to_string();
        let owner = format!("10.41.0.2:53 is a socket of python3[{}], whose queue holds", server.pid());
        assert!(
            evidence.contains(&owner) && !text(finding, "verdict").contains("unexplained"),
            "{finding:#}"
        );
    });
}

/// The same firewall from the side of the server: its SYN-ACKs are not answered, and no server is down.
#[test]
fn clients_that_answer_no_syn_ack_are_named() {
    experiment(&["nginx", "nft", "python3"], |temp| {
        let far = Beside::new();
        far.connect("far", 40);
        let _server = nginx(
            temp,
            "server",
            0,
            None,
            &format!("server {{ listen 10.40.0.1:{SERVER} backlog=4096; return 200 ok; }}"),
        );
        wait_for("10.40.0.1", SERVER);
        far.firewall("tcp flags & (syn|ack) == (syn|ack)");
        let mut client = far.run(Python::start);
        client.run(&format!(
            "import time\nsockets = []\ndef dial():\n  it = socket.socket(); it.setblocking(False); it.connect_ex(('10.40.0.1', {SERVER}))\n  \
             sockets.append(it); del sockets[:-500]\nfor _ in range(40): dial(); time.sleep(0.05)"
        ));
        // The kernel sends SYN-ACKs again after 1 s, 3 s and 7 s: no second is without one while clients come. The queue is never full (A05).
        let verdict = ["TcpExt.TCPSynRetrans grew by "];
        let record = diagnose_until(temp, "X01", &verdict, || _ = client.run("dial()\ntime.sleep(0.05)"));
        let finding = first(&record, "X01", &verdict);
        assert!(!text(finding, "verdict").contains("unexplained"), "{finding:#}");
        let evidence = finding["evidence"][0].to_string();
        for part in [
            "at 10.40.0.1:4000 of nginx[",
            "] clients such as 10.40.0.2 have not answered the SYN-ACK: ",
            " handshakes in progress",
        ] {
            assert!(evidence.contains(part), "{evidence}");
        }
        assert_eq!(do_now(finding), format!("ss -tno state syn-recv sport = :{SERVER}"));
    });
}

/// A proxy to `[::1]` on a host without IPv6: connect() fails before a packet is sent, and no counter of the kernel has it.
#[test]
fn a_failure_without_a_rule_is_named_and_its_cause_helps() {
    let test = "kernel::a_failure_without_a_rule_is_named_and_its_cause_helps";
    experiment(&["nginx", "curl"], |temp| {
        set_sysctl("net.ipv6.conf.all.disable_ipv6", "1");
        let servers = format!(
            "server {{ listen [::]:{SERVER}; return 200 ok; }}\n\
             server {{ listen 127.0.0.1:4020; location / {{ proxy_pass http://[::1]:{SERVER}; }} }}"
        );
        let proxy = nginx(temp, "proxy", 0, None, &servers);
        wait_for("127.0.0.1", 4_020);
        let failed = || failed_requests("http://127.0.0.1:4020/", 100);
        let before = failed();
        let verdict =
            format!("connect() of nginx[{}] to [::1]:{SERVER} failed with EADDRNOTAVAIL", proxy.pid());
        let record = diagnose_until(temp, "X01", &[&verdict], || _ = failed());
        if !traced(test, &record, "X01") {
            return;
        }
        let finding = first(&record, "X01", &[&verdict]);
        let evidence = finding["evidence"].to_string();
        assert!(evidence.contains("the cause here: the host has no IPv6 address"), "{evidence}");
        assert!(evidence.contains("net.ipv6.conf.all.disable_ipv6 is 1"), "{evidence}");
        let cure = do_now(finding);
        assert_eq!(cure, "sysctl -w net.ipv6.conf.lo.disable_ipv6=0");
        paste(&cure);
        let after = failed();
        row(
            finding,
            "a proxy to [::1] with net.ipv6.conf.all.disable_ipv6 = 1",
            "nginx",
            &format!("{before} of 100 requests fail"),
            &cure,
            &format!("{after} fail"),
        );
        assert_eq!((before, after), (100, 0));
        assert!(!finds(&diagnose(temp), "X01"));
    });
}

/// Returns the time of waits for locks of a class in each second, in ms.
fn waits_ms(record: &Value, class: &str) -> u64 {
    let locks = &record["results"]["snapshot"]["locks"]["seen"];
    let waited_ns = locks["classes"].get(class).map_or(0, |waits| number(waits, "waited_ns"));
    waited_ns * 1_000 / number(locks, "interval_ns").max(1)
}

/// 12 processes send on one socket: each waits for its owner, also while the owner waits for a processor. Two processors suffice, because
/// the waiters sleep.
#[test]
fn senders_that_share_a_connection_are_named() {
    let test = "kernel::senders_that_share_a_connection_are_named";
    experiment(&["python3"], |temp| {
        let mut server = Python::start();
        server.run(
            "import threading\ns = socket.socket(); s.bind(('127.0.0.1', 4000)); s.listen(64)\n\
             def drain(one):\n  temp = bytearray(1 << 20)\n  while one.recv_into(temp): pass\n\
             def serve():\n  while True: threading.Thread(target=drain, args=(s.accept()[0],), daemon=True).start()\n\
             threading.Thread(target=serve, daemon=True).start()",
        );
        let mut client = Python::start();
        client.run(
            "def begin(shared):\n  first = socket.create_connection(('127.0.0.1', 4000))\n  workers = []\n  for _ in range(12):\n    \
             worker = os.fork()\n    if worker == 0:\n      one = first if shared else socket.create_connection(('127.0.0.1', 4000))\n      \
             while True: one.sendall(b'x' * 4000)\n    workers.append(worker)\n  return workers\n\
             def end(workers):\n  for worker in workers: os.kill(worker, signal.SIGKILL); os.waitpid(worker, 0)",
        );
        // The limit of the product: waits of other programs of the host may add to these.
        let mut diagnose_senders = |shared: &str| {
            client.run(&format!("workers = begin({shared})"));
            let record = diagnose_with(temp, "P03 = 1\n");
            client.run("end(workers)");
            record
        };
        let mut record = diagnose_senders("True");
        if !traced(test, &record, "L01") {
            return;
        }
        let class = "socket owner";
        // The locks are those of the whole host: another class may have a finding too, by other tests.
        let is_wanted = |finding: &&Value| finding["id"] == "L01" && finding["subject"] == class;
        for _ in 0..5 {
            if list(&record, "/results/findings").iter().any(|finding| is_wanted(&finding)) {
                break;
            }
            record = diagnose_senders("True");
        }
        let found = list(&record, "/results/findings").iter().find(is_wanted);
        let finding = found.unwrap_or_else(|| panic!("{:?}", verdicts(&record)));
        let advice = actions(finding, "proper");
        assert_eq!(advice, ["one thread for each connection"]);
        let cured = diagnose_senders("False");
        let (before, after) = (waits_ms(&record, class), waits_ms(&cured, class));
        row(
            finding,
            "12 processes send on one connection",
            "python3",
            &format!("{before} ms of waits for the socket in a second"),
            &advice[0],
            &format!("{after} ms"),
        );
        assert!(after * 10 < before, "{before} {after}");
    });
}
