//! Faults of servers that only a change of the server removes: `doctor` names the cause first, and the change that it advises removes it.

use std::env;
use std::fs;
use std::io::Read;
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::program;
use crate::program::fixing::Cgroup;
use crate::program::situation::{
    Daemon, PROXY, actions, diagnose, diagnose_during, diagnose_until, experiment, finds, first, text_of,
    unbound, verdicts, wait_for,
};
use crate::program::{TempDir, binary, children, list, queues, run, stat, text, until};
use crate::row;
use fourtuple_testing::process::Python;
use fourtuple_testing::set_sysctl;
use serde_json::Value;

/// Starts four workers that wait with EPOLLEXCLUSIVE, in the order of their process IDs. Each has a listener of its own if `own` is true.
fn start_workers(server: &mut Python, own: bool) {
    let open = "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); \
                s.bind(('127.0.0.1', 4020)); s.listen(500); s.setblocking(False)";
    if !own {
        server.run(open);
    }
    let open = if own { open } else { "pass" };
    server.run(&format!(
        "for _ in range(4):\n  ready, done = os.pipe()\n  if os.fork() == 0:\n    os.close(0); {open}\n    \
         ep = select.epoll(); ep.register(s.fileno(), select.EPOLLIN | select.EPOLLEXCLUSIVE); os.write(done, b'x')\n    \
         while True:\n      ep.poll()\n      try: held.append(s.accept())\n      except BlockingIOError: pass\n  \
         os.read(ready, 1); os.close(ready); os.close(done)"
    ));
}

/// Connects whenever all processes of a server sleep. The kernel wakes one of them when the connection is in the queue.
fn trickle(server: &Python, number: usize) -> Vec<TcpStream> {
    let workers = [vec![server.pid()], children(server.pid())].concat();
    let is_idle = |worker: &u32| stat(*worker).is_some_and(|(state, _)| state == 'S');
    let connect = |_| {
        while !workers.iter().all(is_idle) {
            thread::sleep(Duration::from_millis(1));
        }
        fourtuple_testing::connect(([127, 0, 0, 1], PROXY).into())
    };
    (0..number).map(connect).collect()
}

#[test]
fn a_ladder_of_workers_is_named_and_reuseport_helps() {
    experiment(&["python3"], |temp| {
        // What a worker has not accepted yet has no owner.
        let accepted = || queues(PROXY).iter().all(|queue| *queue == 0);
        let mut server = Python::start();
        start_workers(&mut server, false);
        let clients = trickle(&server, 80);
        until("the workers have accepted all", accepted);
        let record = diagnose(temp);
        let finding =
            first(&record, "B02", &["the 4 workers of python3 share the listener at port 4020", "80 in all"]);
        assert_eq!(actions(finding, "now"), ["fourtuple trace accept --port 4020 --for 10s"]);
        let advice = actions(finding, "proper");
        assert!(advice[0].starts_with("setsockopt(SO_REUSEPORT) before bind()"), "{advice:?}");
        let jain = |record: &Value| {
            let services = &record["results"]["snapshot"]["connections"]["seen"]["services"];
            let workers =
                services.as_array().unwrap().iter().find(|service| service["port"] == PROXY).unwrap();
            let shares: Vec<f64> = workers["workers"]
                .as_array()
                .unwrap()
                .iter()
                .map(|worker| worker["sockets"].as_f64().unwrap())
                .collect();
            let (sum, squares) =
                (shares.iter().sum::<f64>(), shares.iter().map(|share| share * share).sum::<f64>());
            sum * sum / (4.0 * squares)
        };
        let before = jain(&record);
        drop((server, clients));
        let mut server = Python::start();
        start_workers(&mut server, true);
        let _clients = trickle(&server, 80);
        until("the workers have accepted all", accepted);
        let record = diagnose(temp);
        let after = jain(&record);
        row(
            finding,
            "4 workers with EPOLLEXCLUSIVE on one listener",
            "python3",
            &format!("Jain's index of the connections {before:.2}"),
            &advice[0],
            &format!("{after:.2}"),
        );
        assert!(!finds(&record, "B02") && after > before, "{before} {after}");
    });
}

/// Sends queries to Unbound while `doctor` reads, with `has_drops` until it has seen some, and returns the record and the drops of the socket.
fn flood(temp: &TempDir, client: &mut Python, buffer: &str, has_drops: bool) -> (Value, u32, u64) {
    let server = unbound(temp, "127.0.0.1", 5300, buffer);
    // A query for a.example, class IN, type A. A burst begins when Unbound has read the burst before. The burst has the same with the bit QR, which Unbound reads and does not answer: the answers
    // would fill the queue of the client.
    client.run(
        "u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.connect(('127.0.0.1', 5300)); u.settimeout(0.2)\n\
         query = bytes.fromhex('123401000001000000000000') + b'\\x01a\\x07example\\x00\\x00\\x01\\x00\\x01'\n\
         def ask():\n  try: u.send(query); return len(u.recv(512)) > 12\n  except OSError: return False\n\
         mute = query[:2] + b'\\x81' + query[3:]\n\
         def waits():\n  rows = [line.split() for line in open('/proc/self/net/udp')]\n  \
         return any(int(row[4].split(':')[1], 16) for row in rows if row[1].endswith(':14B4'))\n\
         def burst():\n  while waits(): time.sleep(0.01)\n  for _ in range(2000):\n    try: u.send(mute)\n    except OSError: pass",
    );
    until("Unbound answers", || client.run("print(ask())") == "True");
    let burst = || _ = client.run("burst(); time.sleep(0.1)");
    let record = match has_drops {
        true => diagnose_until(temp, "U01", &[], burst),
        false => diagnose_during(temp, burst),
    };
    let sockets = record["results"]["snapshot"]["udp"]["seen"]["sockets"].as_array().unwrap();
    let socket = sockets.iter().find(|socket| socket["local"] == "127.0.0.1:5300");
    // The snapshot lists sockets with drops or a queue.
    let drops = socket.map_or(0, |socket| socket["drops"]["during"].as_u64().unwrap());
    let pid = server.pid();
    (record, pid, drops)
}

#[test]
fn drops_of_unbound_are_named_and_a_buffer_helps() {
    experiment(&["unbound", "python3"], |temp| {
        let mut client = Python::start();
        let (record, pid, before) = flood(temp, &mut client, "4096", true);
        let name = format!("unbound[{pid}]");
        let finding = first(&record, "U01", &["the UDP socket 127.0.0.1:5300 of", &name, "dropped"]);
        let now = actions(finding, "now");
        assert!(now[0].contains("a greater SO_RCVBUF, up to ") && now[0].contains("`so-rcvbuf`"), "{now:?}");
        assert_eq!(text_of(finding, "/now/0/is_command"), "false");
        let (record, _, after) = flood(temp, &mut client, "4m", false);
        row(
            finding,
            "a receive buffer of 4 KiB (`so-rcvbuf: 4096`)",
            "unbound",
            &format!("{before} datagrams dropped in 0.5 s"),
            "so-rcvbuf: 4m",
            &format!("{after} dropped"),
        );
        assert!(before > 0 && !finds(&record, "U01"), "{before} before, {after} after");
    });
}

/// The kernel knows the age of a CLOSE_WAIT socket only by the silence of the peer, and the rule wants a minute.
#[test]
fn a_leak_of_close_wait_is_named_and_a_restart_helps() {
    experiment(&["python3"], |temp| {
        let start = || {
            let mut server = Python::start();
            server.run("s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('127.0.0.1', 4020)); s.listen(500)");
            server
        };
        // A client whose last ACK comes while its socket is in use sends RST after 60 s (tcp_rcv_state_process), with a longer time none.
        set_sysctl("net.ipv4.tcp_fin_timeout", "300");
        let mut server = start();
        drop(trickle(&server, 100));
        server.run("for _ in range(100): held.append(s.accept())");
        // On a busy machine a FIN arrives later than its connection, as a retransmission, and its last one later still.
        let closed = "print(sum(row.split()[3] == '08' for row in open('/proc/thread-self/net/tcp')))";
        until("all are in CLOSE_WAIT", || server.number(closed) == 100);
        thread::sleep(Duration::from_secs(61));
        let name = format!("python3[{}] has not closed 100 connections", server.pid());
        let mut record = diagnose(temp);
        for _ in 0..6 {
            if verdicts(&record).iter().any(|verdict| verdict.contains(&name)) {
                break;
            }
            thread::sleep(Duration::from_secs(5));
            record = diagnose(temp);
        }
        let finding = first(&record, "T07", &[&name, "CLOSE_WAIT"]);
        let now = actions(finding, "now");
        assert_eq!(
            now,
            [
                format!("ss -tnp state close-wait | grep pid={},", server.pid()),
                "restart the process".to_owned()
            ]
        );
        let listed = program::situation::paste(&now[0]).lines().count();
        drop(server);
        let _server = start();
        let after = diagnose(temp);
        row(
            finding,
            "a service that does not close connections",
            "python3",
            &format!("{listed} sockets in CLOSE_WAIT"),
            &now[1],
            "0",
        );
        assert_eq!(listed, 100);
        assert!(!finds(&after, "T07"));
    });
}

/// A server whose child accepts too, with the listener of its parent. It answers with the text of a file at its start.
const SERVER: &str = "\
import os, socket, sys
version = open(sys.argv[2], 'rb').read()
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(64)
os.fork()
while True:
    c, _ = s.accept(); c.sendall(version); c.close()
";

/// systemd as the first process of a PID namespace. It would raise fs.file-max, which is of the whole host.
const BOOT: &str = "mount --make-rprivate / && mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && \
                    mount -t tmpfs tmpfs /run && mount -t cgroup2 none /sys/fs/cgroup && \
                    exec systemd --system --unit=test.target --log-target=null --show-status=0";

/// A restart by systemd ends the main process only (`KillMode=process`), and a child of the former one goes on with its listener. Instances of a
/// template are not copies; a copy that was started by hand is one.
#[test]
fn a_copy_that_a_restart_left_is_named() {
    let test = "services::a_copy_that_a_restart_left_is_named";
    experiment(&["systemd", "systemctl", "systemd-run", "unshare", "nsenter", "setsid", "python3"], |temp| {
        let Some(cgroup) = Cgroup::new(test, "systemd") else { return };
        let (script, version) = (temp.file("server.py", SERVER), temp.file("version", "old"));
        let serve = |port: u16| format!("python3 {script} {port} {version}");
        let unit = |name: &str, text: &str| {
            temp.file(&format!("units/{name}"), &format!("[Unit]\nDefaultDependencies=no\n{text}"))
        };
        fs::create_dir(temp.join("units")).unwrap();
        unit("test.target", "");
        for (name, port) in [("web", 4_000), ("web@", 4_001), ("hand", 4_002)] {
            unit(
                &format!("{name}.service"),
                &format!("[Service]\nExecStart=/usr/bin/env {}\nKillMode=process\n", serve(port)),
            );
        }
        let path = format!("PATH={}", env::var("PATH").unwrap());
        let units = format!("SYSTEMD_UNIT_PATH={}", temp.join("units"));
        let apart = [
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount",
            "--cgroup",
            "--ipc",
            "--uts",
            "--mount-proc",
        ];
        let environment = ["env", "-i", &path, &units, "container=lxc", "sh", "-c", BOOT];
        let host = Daemon::start(Some(cgroup), &[&apart[..], &environment[..]].concat());
        let init = || children(host.pid()).first().copied();
        until("systemd starts", || init().is_some());
        let init = init().expect("seen above").to_string();
        let inside = |words: &[&str]| {
            let mut command = Command::new("nsenter");
            command.args(["-t", &init, "-p", "-m", "-C"]).args(words);
            command
        };
        let start = ["systemctl", "start", "web", "web@1", "web@2", "hand"];
        until("systemd starts the servers", || run(&mut inside(&start)).code == 0);
        for port in 4_000..=4_002 {
            wait_for("127.0.0.1", port);
        }
        let diagnose = || {
            let program = binary();
            let doctor = [program.to_str().unwrap(), "doctor", "--for", "500ms", "--no-trace", "--json"];
            let record = run(&mut inside(&doctor)).json();
            let found = list(&record, "/results/findings").iter().filter(|finding| finding["id"] == "U03");
            found.cloned().collect::<Vec<_>>()
        };
        assert_eq!(diagnose(), [Value::Null; 0], "instances of a template, and each with a child");
        // Copies are 10 s older.
        thread::sleep(Duration::from_millis(10_500));
        temp.file("version", "new");
        let ended = run(&mut inside(&["systemctl", "restart", "web", "web@2"]));
        assert_eq!(ended.code, 0, "{ended:?}");
        let by_hand = [
            "systemd-run",
            "--quiet",
            "--scope",
            "setsid",
            "--fork",
            "sh",
            "-c",
            &format!("exec {} > /dev/null 2>&1", serve(4_002)),
        ];
        let ended = run(&mut inside(&by_hand));
        assert_eq!(ended.code, 0, "{ended:?}");
        until("the new servers listen", || {
            (4_000..=4_002).all(|port| queues(port).len() == if port == 4_001 { 3 } else { 2 })
        });
        let found = diagnose();
        let addresses: Vec<&str> =
            found.iter().map(|finding| text(finding, "verdict").split(" at ").nth(1).unwrap()).collect();
        let of = |port: u16| {
            addresses.iter().filter(|address| address.starts_with(&format!("TCP 127.0.0.1:{port}, "))).count()
        };
        assert_eq!([4_000, 4_001, 4_002].map(of), [1, 1, 1], "{found:#?}");
        let finding =
            found.iter().find(|finding| text(finding, "verdict").contains(":4000, ")).expect("counted above");
        assert!(finding["evidence"].to_string().contains("both children of systemd"), "{finding:#}");
        // The copy that somebody started is the one to end, although it is younger.
        let copy =
            found.iter().find(|finding| text(finding, "verdict").contains(":4002, ")).expect("counted above");
        let number = text(copy, "verdict").split(['[', ']']).nth(1).expect("a process");
        let ended = run(&mut inside(&["cat", &format!("/proc/{number}/cgroup")]));
        assert!(ended.stdout.contains("/run-"), "{copy:#} {ended:?}");
        let old_answers = || {
            let answer = |_| {
                let mut text = String::new();
                TcpStream::connect(("127.0.0.1", 4_000)).unwrap().read_to_string(&mut text).unwrap();
                text
            };
            (0..60).map(answer).filter(|text| text == "old").count()
        };
        let before = old_answers();
        let kill =
            actions(finding, "now").into_iter().find(|action| action.contains("kill ")).expect("a command");
        let ended = run(&mut inside(&["sh", "-c", &kill]));
        assert_eq!(ended.code, 0, "{ended:?}");
        until("its listener is gone", || queues(4_000).len() == 1);
        let after = old_answers();
        row(
            finding,
            "a restart by systemd leaves a child of the former process (KillMode=process)",
            "python3",
            &format!("{before} of 60 answers are of the former process"),
            &kill,
            &format!("{after} are"),
        );
        assert!(before > 10 && after == 0, "{before} {after}");
    });
}
