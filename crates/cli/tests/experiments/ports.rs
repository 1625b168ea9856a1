//! Faults of source ports, rebuilt from reports to projects: the first line of `doctor` names the cause, and its first command removes it.
//!
//! `FOURTUPLE_WRITE=1 cargo test --test experiments ports::` writes the rows of docs/doctor.md.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::chown;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::program::fixing::Cgroup;
use crate::program::situation::{
    Daemon, Fix, PROXY, SERVER, actions, cpu_ns, diagnose, diagnose_until, do_now, envoy_proxy, experiment,
    failed_requests, finds, first, has, nginx, paste, paste_first, set_range, wait_for,
};
use crate::program::{TempDir, binary, children, fourtuple, in_own_namespace, queues, until};
use crate::row;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{child, device, resource};
use fourtuple_testing::process::Python;
use fourtuple_testing::{in_namespace, keep_time_wait, process, set_sysctl, skip};
use serde_json::Value;

/// Traefik and nginx without keep-alive to the server (traefik#13123): the proxy closes first, and its ports are in TIME_WAIT.
#[test]
fn the_fix_of_an_exhausted_proxy_ends_its_errors() {
    in_own_namespace(|test| {
        let Some(cgroup) = Cgroup::new(test, "loop") else { return };
        exhaust_a_proxy(test, Some(cgroup), 0);
    });
}

/// The same in the cgroup of the test, which is the root cgroup on hosts without systemd, with a worker of a master process.
#[test]
fn the_fix_of_an_exhausted_proxy_needs_no_cgroup() {
    in_namespace(|| exhaust_a_proxy("ports::the_fix_of_an_exhausted_proxy_needs_no_cgroup", None, 1));
}

/// Runs `doctor` while a client sends requests, until it has seen the process connect and no port free: those of which TIME_WAIT ends are free
/// for a moment.
fn diagnose_during_requests(temp: &TempDir, url: &str, process: &str) -> Value {
    diagnose_until(temp, "P01", &["uses 200 of 200 ports", process], || {
        failed_requests(url, 20);
    })
}

fn exhaust_a_proxy(test: &str, cgroup: Option<Cgroup>, workers: u32) {
    if !has(test, &["nginx", "curl"]) {
        return;
    }
    set_range(20_000, 20_199);
    keep_time_wait();
    // As many sources as the rate of the test needs to last, on a fast machine too.
    for last in 5..=64 {
        device::add_address("lo", [10, 0, 0, last].into(), 24).unwrap();
    }
    let temp = TempDir::new();
    let server = format!("server {{ listen 10.0.0.2:{SERVER}; return 200 ok; }}");
    let _server = nginx(&temp, "server", 0, None, &server);
    wait_for("10.0.0.2", SERVER);
    // The proxy asks the server to keep connections, but has no pool of its own: the proxy closes first.
    let proxy = format!(
        "server {{ listen 127.0.0.1:{PROXY}; location / {{ proxy_pass http://10.0.0.2:{SERVER}; \
         proxy_http_version 1.1; proxy_set_header Connection keep-alive; }} }}"
    );
    let proxy = nginx(&temp, "proxy", workers, cgroup, &proxy);
    wait_for("127.0.0.1", PROXY);
    // The master listens before it has workers.
    let worker = || if workers == 0 { Some(proxy.pid()) } else { children(proxy.pid()).first().copied() };
    until("nginx has a worker", || worker().is_some());
    let worker = worker().expect("seen above");
    let cgroup_of = || std::fs::read_to_string(format!("/proc/{worker}/cgroup")).expect("procfs");
    let before_fix = cgroup_of();
    let url = format!("http://127.0.0.1:{PROXY}/");
    failed_requests(&url, 200);
    let before = failed_requests(&url, 100);
    assert!(before > 90, "{before} of 100 requests failed");
    let nginx = format!("nginx[{worker}]");
    let record = diagnose_during_requests(&temp, &url, &nginx);
    let tuple = format!("10.0.0.1 → 10.0.0.2:{SERVER} uses ");
    let finding = first(&record, "P01", &[&tuple, "in TIME_WAIT", &nginx]);
    let command = "sysctl -w net.ipv4.tcp_tw_reuse=1";
    let sources = format!("fourtuple fix ports --pid {worker} --source 10.0.0.0/24 --to 10.0.0.2:{SERVER}");
    let now = actions(finding, "now");
    // The rate of the run decides: the sysctl frees 200 ports a second, the sources have 213 a second.
    assert!(now[0] == command || now[0] == sources, "{finding:#}");
    // It helps for as many connections as the source has ports.
    let Some(fix) = Fix::paste(test, &sources) else { return };
    assert_eq!(failed_requests(&url, 100), 0);
    drop(fix);
    assert_eq!(cgroup_of(), before_fix, "the proxy is where it was");
    paste(command);
    until("ports in TIME_WAIT are used again", || failed_requests(&url, 1) == 0);
    let after = crate::settings::after_reuse(|| failed_requests(&url, 100) as u64);
    row(
        finding,
        "a proxy that closes its server connections first (traefik#13123)",
        "nginx",
        &format!("{before} of 100 requests fail"),
        command,
        &format!("{after} fail"),
    );
    assert_eq!(after, 0, "{}", std::fs::read_to_string(temp.join("proxy/error.log")).expect("a log"));
}

/// Ends a fix and requires that it chose a free port, or a source, for at least so many connects, nearly all that it saw. The rate of a run
/// decides which of both `doctor` proposes.
#[track_caller]
pub(crate) fn require_drawn(fix: Fix, least: u64) {
    let results = fix.end();
    let [connects, drawn, spread] =
        ["connects", "drawn", "spread"].map(|name| results[name].as_u64().expect("a number"));
    assert!(connects >= least && (drawn + spread) * 10 > connects * 9, "{results:#}");
}

/// Opens connections to a proxy at several addresses, so that the ports of the clients are not exhausted first.
fn clients(number: usize) -> Vec<TcpStream> {
    (0..number)
        .map(|index| TcpStream::connect((format!("127.0.1.{}", index % 20 + 1), PROXY)).unwrap())
        .collect()
}

/// The CPU time of connect() rises at half of the range (haproxy#2050).
#[test]
fn haproxy_past_half_of_the_range_is_named_and_fixed() {
    let test = "ports::haproxy_past_half_of_the_range_is_named_and_fixed";
    experiment(&["haproxy"], |temp| {
        let Some(cgroup) = Cgroup::new(test, "half") else { return };
        resource::raise_descriptor_limit().unwrap();
        set_range(20_000, 23_999);
        set_sysctl("net.core.somaxconn", "65535");
        let address: SocketAddr = format!("10.0.0.2:{SERVER}").parse().unwrap();
        // The queue holds the server side of the connections.
        let sink = socket::open(Transport::Tcp, address, false).unwrap();
        socket::bind(sink.as_fd(), address).unwrap();
        socket::listen(sink.as_fd(), 65_535).unwrap();
        let config = temp.file(
            "haproxy.cfg",
            &format!(
                "global\n    nbthread 1\n    maxconn 4000\ndefaults\n    mode tcp\n    timeout client 10m\n    timeout connect 60s\n    \
                 timeout server 10m\nlisten front\n    bind *:{PROXY} backlog 4000\n    server one {address}\n"
            ),
        );
        let haproxy = Daemon::start(Some(cgroup), &["haproxy", "-db", "-f", &config]);
        wait_for("127.0.0.1", PROXY);
        let opened = |more: usize| {
            let (began, all) = (cpu_ns(haproxy.pid()), queues(SERVER)[0] + more as u64);
            let held = clients(more);
            until("haproxy has connected", || queues(SERVER)[0] >= all);
            (held, (cpu_ns(haproxy.pid()) - began) as f64 / more as f64 / 1e3)
        };
        let (_held, free) = opened(1_900);
        let (_more, before) = opened(300);
        let record = diagnose(temp);
        let name = format!("haproxy[{}]", haproxy.pid());
        let tuple = format!("10.0.0.1 → {address} uses ");
        let finding = first(&record, "P02", &[&tuple, " of 2,000 even ports", &name]);
        let command = do_now(finding);
        assert_eq!(command, format!("fourtuple fix ports --pid {} --to {address}", haproxy.pid()));
        let Some(fix) = Fix::paste(test, &command) else { return };
        let (_last, after) = opened(300);
        row(
            finding,
            "more than half of the range in use (haproxy#2050)",
            "haproxy",
            &format!("{before:.0} us of CPU time per connection ({free:.0} us below half)"),
            &command,
            &format!("{after:.0} us"),
        );
        // The kernel no longer searches: the ports are drawn from the free ones.
        require_drawn(fix, 300);
    });
}

/// connect() takes all of the CPU time under TIME_WAIT (haproxy#1520). HAProxy resets its own server connections now: a Python client closes
/// first here.
#[test]
fn a_search_among_time_wait_is_named_and_fixed() {
    let test = "ports::a_search_among_time_wait_is_named_and_fixed";
    experiment(&["nginx", "python3"], |temp| {
        let Some(cgroup) = Cgroup::new(test, "wait") else { return };
        set_range(20_000, 23_999);
        keep_time_wait();
        let server = format!("server {{ listen 10.0.0.2:{SERVER} backlog=4096; return 200 ok; }}");
        let _server = nginx(temp, "server", 0, None, &server);
        wait_for("10.0.0.2", SERVER);
        let mut client = Python::start();
        std::fs::write(cgroup.0.join("cgroup.procs"), client.pid().to_string()).unwrap();
        client.run(&format!(
            "def churn(number):\n  began = time.thread_time_ns()\n  for _ in range(number):\n    \
             s = socket.create_connection(('10.0.0.2', {SERVER})); s.close()\n  return (time.thread_time_ns() - began) // number // 1000"
        ));
        let begun = Instant::now();
        client.run("churn(2050)");
        let before = client.number("print(churn(100))");
        // Another thread of the client connects during the diagnosis.
        client.run(
            "import threading\ngoing = True\ndef more():\n  while going: churn(1); time.sleep(0.02)\n\
             thread = threading.Thread(target=more); thread.start()",
        );
        let (tuple, name) = (format!("10.0.0.1 → 10.0.0.2:{SERVER} uses "), format!("[{}]", client.pid()));
        let verdict = [&*tuple, &*name];
        let record = diagnose_until(temp, "P02", &verdict, || thread::sleep(Duration::from_millis(10)));
        client.run("going = False; thread.join()");
        let finding = first(&record, "P02", &verdict);
        let command = do_now(finding);
        let Some(fix) = Fix::paste(test, &command) else { return };
        // The first samples of the fix may find less than a quarter of the ports in use: 1 of 10 connects may proceed unchanged.
        let after = client.number("print(churn(300))");
        row(
            finding,
            "connect() among TIME_WAIT sockets (haproxy#1520)",
            "python3",
            &format!("{before} us of CPU time per connection"),
            &command,
            &format!("{after} us"),
        );
        // On a machine that is busy enough the first sockets have left TIME_WAIT, and draws would shorten nothing.
        if begun.elapsed() < Duration::from_secs(50) {
            require_drawn(fix, 300);
        }
    });
}

/// Envoy with `max_requests_per_connection: 1`. Its threads that connect are called wrk:worker_0 and wrk:worker_1.
#[test]
fn envoy_is_named_by_its_process_and_reuse_helps() {
    experiment(&["envoy", "nginx", "curl"], |temp| {
        set_range(20_000, 20_199);
        keep_time_wait();
        let server = format!("server {{ listen 10.0.0.2:{SERVER}; return 200 ok; }}");
        let _server = nginx(temp, "server", 0, None, &server);
        wait_for("10.0.0.2", SERVER);
        let proxy = envoy_proxy(temp, PROXY, format!("10.0.0.2:{SERVER}").parse().unwrap());
        let url = format!("http://127.0.0.1:{PROXY}/");
        failed_requests(&url, 200);
        let before = failed_requests(&url, 100);
        assert!(before > 90, "{before} of 100 requests failed");
        let envoy = format!("envoy[{}]", proxy.pid());
        let record = diagnose_during_requests(temp, &url, &envoy);
        let tuple = format!("10.0.0.1 → 10.0.0.2:{SERVER} uses ");
        let finding = first(&record, "P01", &[&tuple, "in TIME_WAIT", &envoy]);
        let said = record.to_string();
        assert!(said.contains("fix --print envoy") && !said.contains("wrk:worker"), "{record:#}");
        let command = paste_first(finding);
        until("ports in TIME_WAIT are used again", || failed_requests(&url, 1) == 0);
        let after = crate::settings::after_reuse(|| failed_requests(&url, 100) as u64);
        row(
            finding,
            "a proxy with a connection for each request (`max_requests_per_connection: 1`)",
            "Envoy",
            &format!("{before} of 100 requests fail"),
            &command,
            &format!("{after} fail"),
        );
        assert_eq!(after, 0);
    });
}

/// bind() to a source address without IP_BIND_ADDRESS_NO_PORT (envoy#44747; later versions of Envoy set it): a Python client makes the same
/// calls.
#[test]
fn bind_before_connect_is_named_and_the_range_helps() {
    experiment(&["nginx", "python3"], |temp| {
        set_range(20_000, 20_399);
        let servers: String = (0..4)
            .map(|index| format!("server {{ listen 10.0.0.2:{}; return 200 ok; }}\n", SERVER + index))
            .collect();
        let _server = nginx(temp, "server", 0, None, &servers);
        wait_for("10.0.0.2", SERVER + 3);
        let mut client = Python::start();
        client.run(&format!(
            "def dial(number):\n  failed = 0\n  for index in range(number):\n    s = socket.socket()\n    try:\n      \
             s.bind(('10.0.0.1', 0)); s.connect(('10.0.0.2', {SERVER} + index % 4)); held.append(s)\n    \
             except OSError: failed += 1\n  return failed"
        ));
        client.run("dial(400)");
        // Each destination has 100 of 400 ports in use.
        assert_eq!(client.number("print(dial(100))"), 100);
        let record = diagnose(temp);
        let finding =
            first(&record, "P08", &[&format!("[{}]", client.pid()), "10.0.0.1", "IP_BIND_ADDRESS_NO_PORT"]);
        assert!(actions(finding, "proper").iter().any(|action| action.contains("IP_BIND_ADDRESS_NO_PORT")));
        let command = paste_first(finding);
        let after = client.number("print(dial(100))");
        row(
            finding,
            "bind() before connect() without IP_BIND_ADDRESS_NO_PORT (envoy#44747)",
            "python3",
            "100 of 100 bind() fail at a quarter of the ports per destination",
            &command,
            &format!("{after} fail"),
        );
        assert_eq!(after, 0);
        assert!(!finds(&diagnose(temp), "P08"));
    });
}

/// Servers that leave the close to squid, which closes after each answer, and a client of squid.
const PEERS: &str = "\
def serve(address):
  listener = socket.create_server((address, 4000), backlog=1024)
  def answer():
    while True:
      s, _ = listener.accept(); s.recv(65536); s.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok'); s.recv(1); s.close()
  threading.Thread(target=answer, daemon=True).start()
import threading
for last in (2, 3, 4): serve(f'10.0.0.{last}')
port = 30000
def failed(number):
  global port
  failures = 0
  for _ in range(number):
    # A port outside of the range: connect() passes over the ports that squid has bound.
    port += 1
    s = socket.create_connection(('127.0.0.1', 4020), timeout=60, source_address=('127.0.0.1', port))
    s.sendall(b'GET / HTTP/1.1\\r\\nHost: a\\r\\nConnection: close\\r\\n\\r\\n')
    answer = s.recv(100); s.close(); failures += answer.split(b' ')[1:2] != [b'200']
  return failures";

/// tcp_outgoing_address of squid: bind() to an address without IP_BIND_ADDRESS_NO_PORT. As root `run` takes the way `cgroup`, which leaves these
/// sockets alone, says so while squid runs, and names the command that covers them.
#[test]
fn squid_with_a_source_address_is_named_and_run_covers_it() {
    let test = "ports::squid_with_a_source_address_is_named_and_run_covers_it";
    experiment(&["squid", "python3"], |temp| {
        set_range(20_000, 20_199);
        keep_time_wait();
        let mut peers = Python::start();
        peers.run(PEERS);
        let mut failed = |number: u32| peers.number(&format!("print(failed({number}))"));
        let logs = temp.join("squid");
        fs::create_dir(&logs).unwrap();
        chown(&logs, Some(65_534), Some(65_534)).unwrap();
        let servers: String = (2..=4)
            .map(|last| {
                format!("cache_peer 10.0.0.{last} parent {SERVER} 0 no-query originserver round-robin\n")
            })
            .collect();
        let text = format!(
            "http_port 127.0.0.1:{PROXY} accel defaultsite=127.0.0.1 no-vhost\n{servers}tcp_outgoing_address 10.0.0.1\n\
             http_access allow all\ncache deny all\nserver_persistent_connections off\npid_filename none\n\
             cache_effective_user nobody\nvisible_hostname localhost\npinger_enable off\nnetdb_filename none\n\
             shutdown_lifetime 0 seconds\ncoredump_dir {logs}\ncache_log {logs}/cache.log\naccess_log none\n"
        );
        let config = temp.file("squid.conf", &text);
        let start = |flags: &str| {
            let mut command = fourtuple(&format!("run {flags} -- squid -N -f {config}"));
            let mut child = process::start(command.stdout(Stdio::null()).stderr(Stdio::piped())).unwrap();
            let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
            let way = lines.next().expect("the way, or why none fits");
            (Ending(child), lines, way)
        };
        let (running, mut lines, way) = start("");
        if !way.ends_with(" runs via cgroup") {
            return skip(test, "bpf", &way);
        }
        wait_for("127.0.0.1", PROXY);
        let begun = Instant::now();
        // On a machine that is busy enough the first ports have left TIME_WAIT.
        let is_late = || begun.elapsed() > Duration::from_secs(50);
        let before = failed(300);
        assert!((90..=110).contains(&before) || before > 0 && is_late(), "{before} of 300 requests failed");
        // While squid runs.
        let said = lines.next().unwrap();
        let (connects, remedy) =
            said.split_once(" of sockets that it had bound proceeded unchanged: ").expect(&said);
        assert!(connects.starts_with("fourtuple: squid: ") && connects.contains(" connect"), "{said}");
        let way = "run --via bound";
        assert_eq!(remedy, format!("`{} {way}` covers sockets bound to port 0", binary().display()));
        let verdict = ["squid[", "10.0.0.1", "IP_BIND_ADDRESS_NO_PORT", "have 200 of 200 ports"];
        // Not "a process (perhaps squid[812])", as after a reading in which squid made no call.
        let named = [&verdict[..], &["\"verdict\":\"squid["]].concat();
        let record = diagnose_until(temp, "P08", &named, || _ = failed(20));
        let finding = first(&record, "P08", &verdict);
        assert!(finding["verdict"].as_str().unwrap().starts_with("squid["), "{finding:#}");
        let cure = format!("{way} -- ");
        assert!(actions(finding, "proper").iter().any(|action| action.contains(&cure)), "{finding:#}");
        drop(running);
        let total = lines.last().unwrap_or(said);
        let words = total.strip_prefix("fourtuple: squid: ").and_then(|words| words.split_once(' '));
        let number: u64 = words.and_then(|(number, _)| number.parse().ok()).expect(&total);
        assert!((190..300).contains(&number) || number >= 300 && is_late(), "about 200 connects: {total}");

        // connect() passes over ports in TIME_WAIT that bind() took, for 60 s: the second run has as many others.
        set_sysctl("net.ipv4.ip_local_port_range", "21000 21199");
        let json = temp.join("record.json");
        let (running, lines, way) = start(&format!("--via bound --json {json}"));
        if !way.contains(" runs via ") {
            return skip(test, "ip_local_port_range", &way);
        }
        wait_for("127.0.0.1", PROXY);
        let after = failed(300);
        drop(running);
        assert_eq!(lines.collect::<Vec<_>>(), [""; 0]);
        let run: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
        // squid also probes its servers.
        let bound = run["results"]["bound"].as_u64().unwrap();
        assert!(bound >= 300 && after == 0, "{after} of 300 requests failed: {run:#}");
        row(
            finding,
            "tcp_outgoing_address: bind() before connect() without IP_BIND_ADDRESS_NO_PORT",
            "squid",
            &format!("{before} of 300 requests fail, at a third of the ports per server"),
            "fourtuple run --via bound -- squid -N",
            &format!("{after} fail"),
        );
    });
}

/// A program of `fourtuple run`, which passes SIGTERM on to it.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = child::terminate(self.0.id());
        let _ = self.0.wait();
    }
}

/// A server whose port is inside of the range, as NodePorts are (kubernetes#138272).
#[test]
fn a_server_inside_of_the_range_keeps_its_port() {
    experiment(&["nginx", "python3"], |temp| {
        // connect() begins with the even ports.
        const INSIDE: u16 = 20_101;
        set_range(20_000, 20_199);
        let server = format!("server {{ listen 127.0.0.1:{SERVER}; return 200 ok; }}");
        let _server = nginx(temp, "server", 0, None, &server);
        wait_for("127.0.0.1", SERVER);
        let exposed = format!("server {{ listen 127.0.0.1:{INSIDE}; return 200 ok; }}");
        let start = || {
            let started = nginx(temp, "exposed", 0, None, &exposed);
            wait_for("127.0.0.1", INSIDE);
            started
        };
        // Fills the range and binds as a restarted server does; prints how often bind() fails.
        let restarts = |client: &mut Python| {
            client.number(&format!(
                "failed = 0\nimport subprocess\nfor _ in range(5):\n  while True:\n    s = socket.socket()\n    \
                 try: s.connect(('127.0.0.1', {SERVER})); held.append(s)\n    except OSError: break\n  \
                 test = socket.socket()\n  test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n  \
                 try: test.bind(('127.0.0.1', {INSIDE}))\n  except OSError: failed += 1\n  test.close()\nprint(failed)"
            ))
        };
        let dial =
            format!("for _ in range(120): held.append(socket.create_connection(('127.0.0.1', {SERVER})))");
        let mut client = Python::start();
        let running = start();
        client.run(&dial);
        let pid = running.pid();
        let record = diagnose(temp);
        running.end();
        let before = restarts(&mut client);
        assert_eq!(before, 5);
        // RST instead of TIME_WAIT, which would keep the port for 60 s.
        client.run(
            "import struct\nfor s in held: s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); s.close()\n\
             held.clear()",
        );
        let finding = first(&record, "P05", &[&format!("nginx[{pid}] ({INSIDE})"), "EADDRINUSE"]);
        let command = paste_first(finding);
        let running = start();
        client.run(&dial);
        running.end();
        let after = restarts(&mut client);
        let _running = start();
        row(
            finding,
            "a server on a port inside of the range, as NodePorts are (kubernetes#138272)",
            "nginx",
            &format!("{before} of 5 restarts fail with EADDRINUSE"),
            &command,
            &format!("{after} fail"),
        );
        assert_eq!(after, 0);
    });
}
