//! Faults of listeners and of groups of sockets, as servers have them by their configuration.

use std::fs;
use std::net::UdpSocket;
use std::process::Command;
use std::thread;
use std::time::Duration;

use fourtuple_testing::accept_queue::tcp_counter;
use fourtuple_testing::process::Python;
use fourtuple_testing::{in_namespace, set_sysctl};
use serde_json::Value;

use crate::accept::stop;
use crate::program::situation::{
    Daemon, PROXY, actions, behind, diagnose, diagnose_during, diagnose_until, do_now, experiment, finds,
    first, has, nginx, nginx_config, paste, paste_first, set_range, traced, verdicts, wait_for,
};
use crate::program::{TempDir, queues, run, text, until};
use crate::row;

/// Calls for a client that opens connections.
const CLIENT: &str = "\
import threading, http.client
def begin(source, number, port=4020):
  made = []
  for _ in range(number):
    s = socket.socket(); s.bind((source, 0)); s.setblocking(False); s.connect_ex(('127.0.0.1', port)); made.append(s)
  held.extend(made)
  return made
def established(sockets):
  return sum(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1 for s in sockets)
def get():
  c = http.client.HTTPConnection('127.0.0.1', 4020, timeout=60); began = time.monotonic(); c.request('GET', '/'); c.getresponse().read(); c.close()
  return time.monotonic() - began
def up():
  # A worker of a server that ends resets the connections of its queue.
  while True:
    try: return get()
    except (OSError, http.client.HTTPException): time.sleep(0.1)
def slowest(number):
  took = []
  threads = [threading.Thread(target=lambda: took.append(get())) for _ in range(number)]
  for t in threads: t.start()
  for t in threads: t.join()
  return max(took)";

fn client() -> Python {
    let mut client = Python::start();
    client.run(CLIENT);
    client
}

fn redis(temp: &TempDir, setting: &str, number: u32) -> Daemon {
    let (setting, number) = (format!("--{setting}"), number.to_string());
    let temp = temp.path().to_str().expect("UTF-8");
    let words = [
        "redis-server",
        "--port",
        "4020",
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        temp,
        &setting,
        &number,
    ];
    let server = Daemon::start(None, &words);
    wait_for("127.0.0.1", PROXY);
    until("redis accepts", || queues(PROXY) == [0]);
    server
}

/// Sends a slow command to redis, and a burst of connections while redis is busy. Returns once redis has accepted what was queued.
const BURST: &str = "\
def burst(number):
  s = socket.create_connection(('127.0.0.1', 4020)); s.sendall(b'EVAL \"local x = 0; for i = 1, 3000000 do x = x + i end; return x\" 0\\r\\n')
  made = begin('127.0.0.1', number)
  s.recv(100); s.sendall(b'PING\\r\\n'); s.recv(100); s.close()
  for m in made: m.close(); held.remove(m)
  time.sleep(0.02)";

#[test]
fn bursts_that_redis_drops_are_named() {
    experiment(&["redis-server", "python3"], |temp| {
        let mut client = client();
        client.run(BURST);
        let server = redis(temp, "tcp-backlog", 16);
        let drops = |client: &mut Python| {
            let begun = tcp_counter("ListenDrops");
            client.run("burst(60)");
            tcp_counter("ListenDrops") - begun
        };
        // The command may be over before a client that a busy host has held up connects.
        let before = (0..10).map(|_| drops(&mut client)).find(|dropped| *dropped > 0).unwrap_or(0);
        // The queue is full (A01) while redis is busy: a pause, so that it is not at each reading.
        let record = diagnose_until(temp, "A02", &[" SYNs and ACKs in "], || {
            client.run("burst(60); time.sleep(0.1)");
        });
        let finding = first(&record, "A02", &[]);
        assert!(text(finding, "verdict").contains(&format!("redis-server[{}]", server.pid())), "{finding:#}");
        server.end();
        let _server = redis(temp, "tcp-backlog", 511);
        let after = drops(&mut client);
        row(
            finding,
            "a burst of 60 connections during a slow command, `tcp-backlog 16`",
            "redis",
            &format!("{before} SYNs dropped"),
            "tcp-backlog 511",
            &format!("{after} dropped"),
        );
        assert!(before > 0 && after == 0, "{before} {after}");
    });
}

/// A server at its limit accepts and closes: connect() succeeds, and no queue and no counter of failures grows.
#[test]
fn a_server_that_turns_connections_away_is_named() {
    let test = "listeners::a_server_that_turns_connections_away_is_named";
    experiment(&["redis-server", "python3"], |temp| {
        let server = redis(temp, "maxclients", 10);
        let mut client = Python::start();
        client.run(
            "def ask(s):\n  try: s.sendall(b'PING\\r\\n'); return s.recv(100) == b'+PONG\\r\\n'\n  except OSError: return False\n\
             def dial(): return socket.create_connection(('127.0.0.1', 4020))\n\
             def fill():\n  global pool\n  while True:\n    pool = [dial() for _ in range(10)]\n    \
             if all([ask(s) for s in pool]): return\n    for s in pool: s.close()\n\
             def once():\n  with dial() as s: return ask(s)\n\
             fill()",
        );
        let served = |client: &mut Python| client.number("print(sum(once() for _ in range(20)))");
        let before = 20 - served(&mut client);
        if !traced(test, &diagnose(temp), "X01") {
            return;
        }
        // On a busy host fewer than five connections may fall into a short diagnosis.
        let name = format!("redis-server[{}] closed ", server.pid());
        let record = diagnose_until(temp, "X01", &[&name], || _ = served(&mut client));
        let finding = first(&record, "X01", &[&name, "at 127.0.0.1:4020 without having read from them"]);
        // 10, and those that are about to be closed: a reading takes a while.
        let evidence = finding["evidence"].to_string();
        let has_open = |number: u32| evidence.contains(&format!("; {number} connections are"));
        assert!((10..20).any(has_open), "{evidence}");
        assert!(actions(finding, "proper")[0].contains(": `maxclients`, if its log names"), "{finding:#}");
        server.end();
        let _server = redis(temp, "maxclients", 1000);
        client.run("fill()");
        let after = 20 - served(&mut client);
        row(
            finding,
            "10 connections are open, `maxclients 10`",
            "redis",
            &format!("{before} of 20 connections get no answer"),
            "maxclients 1000",
            &format!("{after} get none"),
        );
        assert_eq!((before, after), (20, 0));
        let after = diagnose_during(temp, || _ = served(&mut client));
        assert!(!finds(&after, "X01"), "{:#?}", verdicts(&after));
    });
}

/// A server with a port of the range: a connection of another program has it, because connect() chose it.
#[test]
fn a_connection_that_has_the_port_of_a_server_is_named() {
    let test = "listeners::a_connection_that_has_the_port_of_a_server_is_named";
    experiment(&["nginx", "python3"], |temp| {
        // One port that connect() chooses first, and another one.
        set_range(20_000, 20_001);
        let mut client = Python::start();
        client.run(
            "l = socket.socket(); l.bind(('127.0.0.1', 4000)); l.listen(5)\n\
             def dial():\n  c = socket.socket(); c.connect(('127.0.0.1', 4000)); return c\nc = dial()",
        );
        let port = client.number("print(c.getsockname()[1])");
        let servers = format!("server {{ listen 127.0.0.1:{port}; return 200 ok; }}");
        let config = nginx_config(temp, "late", 0, &servers);
        let start = || run(Command::new("nginx").args(["-c", &config])).code == 0;
        let verdict = ["bind() of nginx", &format!("to 127.0.0.1:{port} failed with EADDRINUSE")];
        let record = diagnose_until(temp, "X01", &verdict, || assert!(!start()));
        if !traced(test, &record, "X01") {
            return;
        }
        let finding = first(&record, "X01", &verdict);
        let evidence = finding["evidence"][0].to_string();
        let holder = format!(
            "a connection of python3[{}], 127.0.0.1:{port} to 127.0.0.1:4000 (established), has the port",
            client.pid()
        );
        assert!(evidence.contains(&holder), "{evidence}");
        let cure = do_now(finding);
        assert_eq!(cure, format!("sysctl -w net.ipv4.ip_local_reserved_ports={port}"));
        paste(&cure);
        client.run("c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\\1\\0\\0\\0\\0\\0\\0\\0'); c.close(); c = dial()");
        let _server = nginx(temp, "server", 0, None, &servers);
        wait_for("127.0.0.1", u16::try_from(port).expect("a port"));
        row(
            finding,
            "a connection has the port of a server that starts, which is a port of the range",
            "nginx",
            "nginx does not start",
            "sysctl -w net.ipv4.ip_local_reserved_ports=PORT",
            "it starts once the connection has ended",
        );
    });
}

/// A job in the background, a debugger or a person has stopped it: more workers would be stopped, too.
#[test]
fn a_server_that_a_signal_has_stopped_is_named() {
    experiment(&["redis-server", "python3"], |temp| {
        let mut client = client();
        let server = redis(temp, "tcp-backlog", 511);
        stop(server.pid());
        client.run("begin('127.0.0.1', 20)");
        let record = diagnose(temp);
        let finding = first(&record, "A07", &[]);
        assert!(finding["evidence"].to_string().contains("is stopped by a signal (state T)"), "{finding:#}");
        let before = queues(PROXY)[0];
        let cure = do_now(finding);
        assert_eq!(cure, format!("kill -CONT {}", server.pid()));
        paste(&cure);
        until("redis accepts", || queues(PROXY) == [0]);
        row(
            finding,
            "a server that a signal has stopped",
            "redis",
            &format!("{before} connections wait"),
            "kill -CONT PID",
            "0 wait",
        );
        assert_eq!(before, 20);
    });
}

/// The other worker accepts, and no queue grows: the clients of the stopped one wait on connections that they have.
#[test]
fn a_worker_that_reads_none_of_its_connections_is_named() {
    experiment(&["nginx", "python3"], |temp| {
        let servers = "server { listen 127.0.0.1:4020 reuseport; keepalive_timeout 600; return 200 $pid; }";
        let server = nginx(temp, "web", 2, None, servers);
        until("2 workers", || crate::program::children(server.pid()).len() == 2);
        wait_for("127.0.0.1", PROXY);
        let mut client = client();
        client.run(
            "import collections, select\n\
             kept = [http.client.HTTPConnection('127.0.0.1', 4020, timeout=60) for _ in range(40)]\n\
             def ask():\n  for c in kept: c.request('GET', '/')\n\
             def waiting(): return len(kept) - len(select.select([c.sock for c in kept], [], [], 0)[0])\n\
             ask(); pids = collections.Counter(int(c.getresponse().read()) for c in kept)",
        );
        let worker = client.number("print(pids.most_common(1)[0][0])");
        let number = client.number("print(pids.most_common(1)[0][1])");
        stop(u32::try_from(worker).expect("a process"));
        client.run("ask()");
        until("the other worker has answered", || client.number("print(waiting())") == number);
        // Data counts as not read after a second: all of it, or the number would be another one.
        client.run("time.sleep(1.1)");
        let verdict =
            format!("{number} connections of nginx[{worker}] at port 4020 have data that it has not read");
        let record = diagnose_until(temp, "X01", &[&verdict], || thread::sleep(Duration::from_millis(10)));
        let finding = first(&record, "X01", &[&verdict]);
        assert!(finding["evidence"].to_string().contains("is stopped by a signal (state T)"), "{finding:#}");
        let before = client.number("print(waiting())");
        let cure = do_now(finding);
        assert_eq!(cure, format!("kill -CONT {worker}"));
        paste(&cure);
        until("all are answered", || client.number("print(waiting())") == 0);
        row(
            finding,
            "a stopped worker with open connections",
            "nginx",
            &format!("{before} of 40 requests wait"),
            "kill -CONT PID",
            "0 wait",
        );
        assert_eq!(before, number);
        assert!(!finds(&diagnose(temp), "X01"));
    });
}

/// A server that has ended left its listener to a program that it had started: clients are accepted by the kernel and never served.
#[test]
fn a_listener_that_a_child_has_inherited_is_named() {
    experiment(&["python3", "sleep"], |temp| {
        let mut server = Python::start();
        let child = server.number(
            "import os, subprocess\ns = socket.socket(); s.bind(('127.0.0.1', 4020)); s.listen(8); os.set_inheritable(s.fileno(), True)\n\
             print(subprocess.Popen(['sleep', '600'], close_fds=False, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).pid)",
        );
        drop(server);
        let mut client = client();
        client.run("begin('127.0.0.1', 20)");
        // On a busy machine the kernel handles the SYNs later, in a thread of its own.
        until("the queue is full", || queues(PROXY) == [9]);
        let record = diagnose(temp);
        let finding = first(&record, "A01", &["wait for sleep["]);
        let cure = format!("kill {child}");
        let advice = &actions(finding, "proper")[0];
        assert!(advice.contains(&cure), "{advice}");
        paste(&cure);
        until("the listener is closed", || queues(PROXY).is_empty());
        row(
            finding,
            "a listener that a program has inherited from a server that ended",
            "sleep",
            "9 connections wait for ever",
            "kill PID",
            "refused at once",
        );
    });
}

#[test]
fn a_backlog_that_somaxconn_cuts_is_named() {
    experiment(&["redis-server", "python3"], |temp| {
        set_sysctl("net.core.somaxconn", "16");
        let mut client = client();
        let mut server = redis(temp, "tcp-backlog", 511);
        let waiting = |server: &Daemon, client: &mut Python, least: u64| {
            stop(server.pid());
            client.run("made = begin('127.0.0.1', 40)\ntime.sleep(0.2)");
            until("the connections have their places", || queues(PROXY)[0] >= least);
            queues(PROXY)[0]
        };
        let before = waiting(&server, &mut client, 17);
        let record = diagnose(temp);
        let finding = &behind(&record, "A04", "A01");
        let command = paste_first(finding);
        server.end();
        client.run("for s in held: s.close()\nheld.clear()");
        server = redis(temp, "tcp-backlog", 511);
        let after = waiting(&server, &mut client, 40);
        row(
            finding,
            "net.core.somaxconn = 16, `tcp-backlog 511`, process stopped",
            "redis",
            &format!("{before} of 40 connections have a place"),
            &command,
            &format!("{after} have one after a restart"),
        );
        assert!(before == 17 && after == 40, "{before} {after}");
    });
}

/// A server whose SYN-ACKs to 127.0.0.9 a firewall drops, with SYN cookies off: handshakes stay in its SYN queue.
fn half_open(test: &str, id: &str, backlog: u32, fault: &str) {
    if !has(test, &["nginx", "nft", "python3"]) {
        return;
    }
    set_sysctl("net.ipv4.tcp_syncookies", "0");
    set_sysctl("net.ipv4.tcp_no_metrics_save", "1");
    set_sysctl("net.ipv4.tcp_max_syn_backlog", "64");
    paste(
        "nft 'add table ip t; add chain ip t out { type filter hook output priority 0; }; \
         add rule ip t out ip daddr 127.0.0.9 tcp sport 4020 drop'",
    );
    let temp = TempDir::new();
    let servers = format!("server {{ listen 127.0.0.1:4020 backlog={backlog}; return 200 ok; }}");
    let _server = nginx(&temp, "web", 0, None, &servers);
    wait_for("127.0.0.1", PROXY);
    let mut client = client();
    client.run("begin('127.0.0.9', 100)");
    let dropped = ["the SYN queue is full and SYN cookies are off"];
    let record = diagnose_until(&temp, id, &dropped, || {
        // Closed at once: a diagnosis on a busy host takes longer than the limit on descriptors allows.
        client.run("for s in begin('127.0.0.9', 5): s.close()\ntime.sleep(0.02)");
    });
    let finding = first(&record, id, &[]);
    // Handshakes in a full queue end after 6 s, later ones after 1 s, many at the same time (reqsk_timer_handler): others take their places
    // first. On a busy host a second may pass between the two lines.
    let attempts = "for _ in range(5):\n  begin('127.0.0.9', 100)\n  made = begin('127.0.0.8', 10); time.sleep(0.3)\n  \
                    number = established(made)\n  if not number: break\nprint(number)";
    let before = 10 - client.number(attempts);
    let command = paste_first(finding);
    // The kernel sends the SYNs again after a second.
    let mut after = 10;
    until("the connections are established", || {
        after = 10 - client.number("print(established(made))");
        after == 0
    });
    row(
        finding,
        fault,
        "nginx",
        &format!("{before} of 10 other connections wait"),
        &command,
        &format!("{after} wait"),
    );
    assert_eq!((before, after), (10, 0));
}

#[test]
fn a_full_syn_queue_is_named() {
    in_namespace(|| {
        half_open(
            "listeners::a_full_syn_queue_is_named",
            "A05",
            16,
            "a firewall drops the SYN-ACKs to 100 clients, net.ipv4.tcp_syncookies = 0, `backlog=16`",
        );
    });
}

/// Policy routing without a way back to the clients: their SYNs are dropped although no queue is full.
#[test]
fn clients_without_a_route_back_are_named() {
    experiment(&["nginx", "ip", "python3"], |temp| {
        let _server = nginx(temp, "web", 0, None, "server { listen 127.0.0.1:4020; return 200 ok; }");
        wait_for("127.0.0.1", PROXY);
        paste("ip rule add pref 10 lookup local && ip rule del pref 0");
        paste("ip rule add pref 5 from 127.0.0.1 to 127.0.0.9 ipproto tcp sport 4020 unreachable");
        let mut client = client();
        let record = diagnose_until(temp, "A03", &[" SYNs and ACKs were dropped"], || {
            client.run("for s in begin('127.0.0.9', 2): s.close()\ntime.sleep(0.02)");
        });
        let finding = first(&record, "A03", &[]);
        assert!(actions(finding, "proper")[0].contains("ip route get"), "{finding:#}");
        client.run("made = begin('127.0.0.9', 10)");
        let before = 10 - client.number("time.sleep(0.3); print(established(made))");
        let cure = "ip rule del pref 5";
        paste(cure);
        let mut after = 10;
        until("the connections are established", || {
            after = 10 - client.number("print(established(made))");
            after == 0
        });
        row(
            finding,
            "policy routing without a route back to the clients",
            "nginx",
            &format!("{before} of 10 connections wait"),
            cure,
            &format!("{after} wait"),
        );
        assert_eq!((before, after), (10, 0));
    });
}

/// Starts gunicorn with one worker whose requests take 0.2 s.
fn slow_server(temp: &TempDir, threads: &str) -> Daemon {
    temp.file(
        "slow.py",
        "import time\ndef app(environ, start):\n    time.sleep(0.2)\n    \
         start('200 OK', [('Content-Length', '2')])\n    return [b'ok']\n",
    );
    let directory = temp.path().to_str().expect("UTF-8");
    let address = "127.0.0.1:4020";
    let words =
        ["gunicorn", "-w", "1", "--threads", threads, "-b", address, "--chdir", directory, "slow:app"];
    let server = Daemon::start(None, &words);
    wait_for("127.0.0.1", PROXY);
    server
}

/// Asks gunicorn with few threads on many connections until there is a finding, and again with a thread for each of the requests at a time.
fn delayed(
    temp: &TempDir,
    threads: u32,
    clients: u32,
    requests: u32,
    fault: &str,
    found: impl FnOnce(&Value) -> Value,
) {
    let server = slow_server(temp, &threads.to_string());
    let mut client = client();
    client.run("up()");
    let seconds = |text: &str| text.trim().parse::<f64>().expect("seconds");
    // A client that a busy host holds up begins a request when others have ended, or gets an answer late: a few tries.
    let slowest = |client: &mut Python, is_meant: &dyn Fn(f64) -> bool| {
        let mut took = String::new();
        for _ in 0..5 {
            took = client.run(&format!("print(f'{{slowest({requests}):.1f}}')"));
            if is_meant(seconds(&took)) {
                break;
            }
        }
        took
    };
    let least = 0.75 * 0.2 * f64::from(requests) / f64::from(threads);
    let before = slowest(&mut client, &|took| took > least);
    client.run(&format!(
        "going = True\ndef repeat():\n  while going:\n    try: get()\n    except (OSError, http.client.HTTPException): pass\n\
         threads = [threading.Thread(target=repeat) for _ in range({clients})]\nfor t in threads: t.start()"
    ));
    let (id, verdict) = match threads {
        1 => ("A07", "have waited at least"),
        _ => ("X01", "have data that it has not read"),
    };
    let record = diagnose_until(temp, id, &[verdict], || thread::sleep(Duration::from_millis(10)));
    client.run("going = False");
    // Requests that wait end with the server.
    server.end();
    client.run("for t in threads: t.join()");
    let finding = found(&record);
    let proper = actions(&finding, "proper");
    assert!(proper.iter().any(|action| action.contains("more `--workers` or `--threads`")), "{finding:#}");
    let _server = slow_server(temp, &requests.to_string());
    client.run("up()");
    let after = slowest(&mut client, &|took| took < seconds(&before));
    row(
        &finding,
        fault,
        "gunicorn",
        &format!("the last of {requests} requests takes {} s", before.trim()),
        &format!("gunicorn --threads {requests}"),
        &format!("{} s", after.trim()),
    );
    assert!(seconds(&before) > least && seconds(&after) < seconds(&before), "{before} {after}");
}

/// gunicorn with threads accepts at once, so that no queue grows: the requests wait in the connections.
#[test]
fn requests_that_wait_for_a_thread_are_named() {
    experiment(&["gunicorn", "python3"], |temp| {
        // On a busy host the readings of doctor are seconds apart: 80 requests wait for 8 s.
        delayed(temp, 2, 80, 30, "requests of 0.2 s in one worker with two threads", |record| {
            let verdict = ["connections of gunicorn[", "at port 4020 have data that it has not"];
            let finding = first(record, "X01", &verdict);
            assert!(!text(finding, "verdict").contains("unexplained"), "{finding:#}");
            finding.clone()
        });
    });
}

#[test]
fn requests_that_one_blocking_worker_delays_are_named() {
    experiment(&["gunicorn", "python3"], |temp| {
        let fault = "requests of 0.2 s in one worker with one thread";
        // Each of 40 requests waits for 8 s: from one reading of doctor to the next on a busy host, too.
        delayed(temp, 1, 40, 20, fault, |record| first(record, "A07", &[]).clone());
    });
}

#[test]
fn connections_that_stay_on_one_worker_are_named() {
    experiment(&["nginx", "python3"], |temp| {
        let servers = "server { listen 127.0.0.1:4020 reuseport; keepalive_timeout 600; keepalive_requests 100000; return 200 $pid; }";
        let server = nginx(temp, "web", 4, None, servers);
        until("4 workers", || crate::program::children(server.pid()).len() == 4);
        wait_for("127.0.0.1", PROXY);
        let mut client = client();
        // Of the connections of a day those to the third worker are still open, and a few others.
        client.run(
            "import collections\ndef worker(c): c.request('GET', '/'); return int(c.getresponse().read())\n\
             def open(number):\n  made = [http.client.HTTPConnection('127.0.0.1', 4020, timeout=60) for _ in range(number)]\n  \
             return [(worker(c), c) for c in made]\n\
             def jain():\n  n = list(collections.Counter(p for p, c in kept).values()); return sum(n) ** 2 / (4 * sum(x * x for x in n))\n\
             def thin(made):\n  \
             third = sorted({p for p, c in made})[2]; seen = collections.Counter(); kept = []\n  \
             for p, c in made:\n    \
             seen[p] += 1\n    \
             if p == third or seen[p] <= 3: kept.append((p, c))\n    \
             else: c.close()\n  \
             return kept\n\
             kept = thin(open(300))",
        );
        let kept = client.number("print(len(kept))");
        let is_open = |row: &&str| {
            let words: Vec<&str> = row.split_whitespace().collect();
            words[1].ends_with(":0FB4") && ["01", "08"].contains(&words[3])
        };
        until("nginx has closed the others, too", || {
            let table = fs::read_to_string("/proc/thread-self/net/tcp").expect("procfs");
            table.lines().skip(1).filter(is_open).count() as u64 == kept
        });
        let before = client.run("print(f'{jain():.2f}')");
        let record = diagnose(temp);
        let finding = first(&record, "B01", &[]);
        client.run("n = len(kept)\nfor p, c in kept: c.close()\nkept = open(n)");
        let after = client.run("print(f'{jain():.2f}')");
        row(
            finding,
            "long connections, most of them left on one of 4 workers",
            "nginx",
            &format!("Jain's index of the connections {before}"),
            "keepalive_requests 1000",
            &format!("{after} after the clients have connected again"),
        );
        let index = |text: &str| text.trim().parse::<f64>().expect("an index");
        assert!(index(&before) < 0.7 && index(&after) > index(&before), "{before} {after}");
        assert!(!finds(&diagnose(temp), "B01"));
    });
}

/// Its queue holds the packets of minutes, and nothing is dropped.
#[test]
fn a_udp_server_that_a_signal_has_stopped_is_named() {
    experiment(&["python3"], |temp| {
        let mut server = Python::start();
        server.run("u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', 5140))");
        stop(server.pid());
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        for _ in 0..20 {
            client.send_to(&[7; 100], "127.0.0.1:5140").unwrap();
        }
        let record = diagnose(temp);
        let verdict = format!("the UDP socket 127.0.0.1:5140 of python3[{}] has ", server.pid());
        let finding = first(&record, "X01", &[&verdict]);
        assert!(!text(finding, "verdict").contains("unexplained"), "{finding:#}");
        let cure = do_now(finding);
        assert_eq!(cure, format!("kill -CONT {}", server.pid()));
        paste(&cure);
        // The kernel may have dropped a datagram while other tests flood the queue of its processor.
        let after = server.number(
            "u.setblocking(False)\nn = 0\ntry:\n  while u.recv(100): n += 1\nexcept BlockingIOError: print(n)",
        );
        row(
            finding,
            "a UDP server that a signal has stopped",
            "python3",
            "20 of 20 datagrams wait",
            "kill -CONT PID",
            &format!("{} wait", 20 - after),
        );
        assert!(after > 0);
        assert!(!finds(&diagnose(temp), "X01"));
    });
}

#[test]
fn a_connected_socket_of_a_udp_group_is_named() {
    experiment(&["python3"], |temp| {
        let mut server = Python::start();
        server.run(
            "def bound(peer=None):\n  \
             s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n  \
             s.bind(('127.0.0.1', 4030)); s.setblocking(False)\n  \
             if peer: s.connect(peer)\n  \
             return s\n\
             group = [bound() for _ in range(3)] + [bound(('127.0.0.1', 4031))]\n\
             def received():\n  n = []\n  for s in group:\n    n.append(0)\n    try:\n      while s.recv(10): n[-1] += 1\n    \
             except BlockingIOError: pass\n  return n\n\
             def arrived():\n  n = [0] * 4; end = time.monotonic() + 5\n  \
             while sum(n) < 100 and time.monotonic() < end: time.sleep(0.01); n = [a + b for a, b in zip(n, received())]\n  return n",
        );
        let mut peer = Python::start();
        peer.run(
            "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('127.0.0.1', 4031))\n\
             def send(number):\n  for _ in range(number): s.sendto(b'x', ('127.0.0.1', 4030))",
        );
        let record = diagnose(temp);
        let finding = first(&record, "U02", &[]);
        assert!(text(finding, "verdict").contains(&format!("python3[{}]", server.pid())), "{finding:#}");
        // The kernel may drop a datagram while other tests flood the queue of its processor: then all are sent again.
        let mut send = |server: &mut Python| {
            until("100 datagrams arrive", || {
                server.run("received()");
                peer.run("send(100)");
                server.number("n = arrived()\nprint(sum(n))") == 100
            });
        };
        send(&mut server);
        let before = server.number("print(n[3])");
        // A socket that sends by sendto() instead of connect(), and a group by packet instead of by 4-tuple would spread these too.
        server.run("group.pop().close(); group.append(bound())");
        send(&mut server);
        let after = server.number("print(sum(number > 0 for number in n))");
        row(
            finding,
            "one of 4 sockets of a UDP group is connected to a peer",
            "python3",
            &format!("{before} of 100 datagrams reach the connected socket"),
            "sendto() and recvfrom() instead of connect()",
            &format!("the hash chooses {after} socket"),
        );
        assert_eq!((before, after), (100, 1));
        assert!(!finds(&diagnose(temp), "U02"));
    });
}

#[test]
fn a_foreign_member_of_a_group_is_named() {
    experiment(&["nginx", "python3"], |temp| {
        let _server =
            nginx(temp, "web", 1, None, "server { listen 127.0.0.1:4020 reuseport; return 200 ok; }");
        wait_for("127.0.0.1", PROXY);
        let mut foreign = Python::start();
        foreign.run(
            "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); s.bind(('127.0.0.1', 4020)); s.listen(100)",
        );
        let record = diagnose(temp);
        let finding = first(&record, "U03", &[]);
        let mut client = client();
        client.run(
            "def unanswered(number, wait):\n  made = [socket.create_connection(('127.0.0.1', 4020)) for _ in range(number)]\n  \
             for s in made: s.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n'); s.settimeout(wait)\n  n = 0\n  for s in made:\n    \
             try: n += not s.recv(100)\n    except OSError: n += 1\n  return n",
        );
        let before = client.number("print(unanswered(60, 0.2))");
        let kill =
            actions(finding, "now").into_iter().find(|action| action.contains("kill ")).expect("a command");
        assert!(kill.ends_with(&format!("kill {}", foreign.pid())), "{kill}");
        paste(&kill);
        until("the listener is gone", || queues(PROXY).len() == 1);
        let after = client.number("print(unanswered(60, 20))");
        row(
            finding,
            "a second program listens at the address with SO_REUSEPORT",
            "nginx",
            &format!("{before} of 60 requests get no answer"),
            &kill,
            &format!("{after} get none"),
        );
        assert!(before > 10 && after == 0, "{before} {after}");
    });
}
