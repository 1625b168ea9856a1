//! Healthy programs under honest load, with reloads, forks and log rotation: no rule has a finding.

use std::env;
use std::fs;
use std::os::unix::fs::chown;
use std::process::Command;
use std::time::{Duration, Instant};

use fourtuple_testing::process::Python;
use fourtuple_testing::skip;

use crate::program::situation::{
    Daemon, experiment, has, is_of_host, nginx_config, php_fpm, verdicts, wait_for,
};
use crate::program::{TempDir, fourtuple, run, stat, until};

/// Requests on kept connections and on fresh ones, 20 in a second to each server, and children that end soon.
const LOAD: &str = "\
import http.client, struct, subprocess, threading
going, failures, done = True, [], 0
def get(connection):
  global done
  connection.request('GET', '/'); answer = connection.getresponse(); answer.read()
  if answer.status != 200: failures.append((connection.port, answer.status))
  done += 1
def load(port):
  kept, turn = None, 0
  while going:
    try:
      if turn % 10 == 0:
        if kept: kept.close()
        kept = http.client.HTTPConnection('127.0.0.1', port, timeout=60)
      get(kept)
      fresh = http.client.HTTPConnection('127.0.0.1', port, timeout=60)
      get(fresh); fresh.close()
    except Exception as error:
      # A server that reloads may close a kept connection.
      kept = None; turn = -1
      if not isinstance(error, (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)): failures.append((port, repr(error)))
    turn += 1; time.sleep(0.1)
def ping(port):
  s = socket.create_connection(('127.0.0.1', port))
  while going: s.sendall(b'PING\\r\\n'); s.recv(100); time.sleep(0.02)
def message(kind, body): return kind + struct.pack('!i', len(body) + 4) + body
def query(port, user, database, text):
  while going:
    s = socket.create_connection(('127.0.0.1', port))
    s.sendall(message(b'', f'\\0\\3\\0\\0user\\0{user}\\0database\\0{database}\\0\\0'.encode()))
    for turn in range(20):
      answer = b''
      # ReadyForQuery ends an answer.
      while answer[-6:-1] != b'Z\\0\\0\\0\\5':
        part = s.recv(4096)
        if not part or part[:1] == b'E': failures.append((port, str(answer + part))); return
        answer += part
      s.sendall(message(b'Q', text.encode() + b'\\0')); time.sleep(0.05)
    s.sendall(message(b'X', b'')); s.close()
def fork():
  while going: subprocess.run(['true']); time.sleep(0.2)
def begin(ports, pings, pools):
  for port in ports: threading.Thread(target=load, args=(port,), daemon=True).start()
  for port in pings: threading.Thread(target=ping, args=(port,), daemon=True).start()
  for pool in pools: threading.Thread(target=query, args=pool, daemon=True).start()
  threading.Thread(target=fork, daemon=True).start()";

/// The programs that run, and the ports of their clients.
#[derive(Default)]
struct Programs {
    daemons: Vec<Daemon>,
    /// Processes that load their configuration again when they get this signal.
    reloads: Vec<(u32, &'static str)>,
    nginx: Option<u32>,
    apache: Option<u32>,
    /// The server of PostgreSQL. It removes its shared memory when it gets SIGINT.
    database: Option<u32>,
    http: Vec<u16>,
    pings: Vec<u16>,
    /// Port, user, database and query of each client that speaks the protocol of PostgreSQL.
    pools: Vec<(u16, &'static str, &'static str, &'static str)>,
}

/// Starts each program that is installed; reports the others as skipped.
fn start(test: &str, temp: &TempDir) -> Programs {
    let mut all = Programs::default();
    let Programs { daemons, reloads, nginx, apache, database, http, pings, pools } = &mut all;
    let path = |name: &str| temp.join(name);
    let mut begin = |words: &[&str], port: u16| {
        daemons.push(Daemon::start(None, words));
        wait_for("127.0.0.1", port);
        daemons.last().expect("pushed above").pid()
    };
    fs::create_dir_all(path("www")).expect("a directory");
    temp.file("www/index.html", "ok");
    temp.file("www/index.php", "<?php echo 'ok';");
    let fpm = php_fpm(test);
    if let Some(fpm) = fpm {
        let text = format!(
            "[global]\ndaemonize = no\nerror_log = {}\n[www]\nuser = root\nlisten = 127.0.0.1:9000\npm = static\npm.max_children = 4\n",
            path("fpm.log")
        );
        begin(&[fpm, "-R", "-y", &temp.file("fpm.conf", &text)], 9_000);
    }
    if has(test, &["nginx"]) {
        let php = format!(
            "server {{ listen 127.0.0.1:8005; location / {{ fastcgi_pass 127.0.0.1:9000; fastcgi_param REQUEST_METHOD GET;\n\
             fastcgi_param SCRIPT_FILENAME {}; }} }}",
            path("www/index.php")
        );
        let servers = format!(
            "server {{ listen 127.0.0.1:8000; access_log {}; return 200 ok; }}\n{}",
            path("access.log"),
            if fpm.is_some() { php.as_str() } else { "" }
        );
        let config = nginx_config(temp, "nginx", 2, &servers);
        let master = begin(&["nginx", "-c", &config], 8_000);
        *nginx = Some(master);
        reloads.push((master, "-HUP"));
        http.extend([8_000].into_iter().chain(fpm.map(|_| 8_005)));
        if has(test, &["haproxy"]) {
            let text = "defaults\n mode http\n timeout connect 5s\n timeout client 30s\n timeout server 30s\n\
                        frontend front\n bind 127.0.0.1:8001\n default_backend back\nbackend back\n server one 127.0.0.1:8000\n";
            begin(&["haproxy", "-db", "-f", &temp.file("haproxy.cfg", text)], 8_001);
            http.push(8_001);
        }
    }
    if has(test, &["redis-server"]) {
        begin(
            &["redis-server", "--port", "8002", "--bind", "127.0.0.1", "--save", "", "--dir", &path("www")],
            8_002,
        );
        pings.push(8_002);
    }
    if has(test, &["node"]) {
        let server = "require('http').createServer((q, s) => s.end('ok')).listen(8003, '127.0.0.1')";
        begin(&["node", "-e", server], 8_003);
        http.push(8_003);
    }
    if has(test, &["gunicorn"]) {
        temp.file(
            "app.py",
            "def app(environ, start):\n    start('200 OK', [('Content-Length', '2')])\n    return [b'ok']\n",
        );
        let arbiter = begin(
            &[
                "gunicorn",
                "-w",
                "2",
                "-b",
                "127.0.0.1:8004",
                "--chdir",
                temp.path().to_str().expect("UTF-8"),
                "app:app",
            ],
            8_004,
        );
        reloads.push((arbiter, "-HUP"));
        http.push(8_004);
    }
    if has(test, &["apache2"]) {
        let modules = "/usr/lib/apache2/modules";
        let text = format!(
            "ServerRoot {0}\nServerName localhost\nPidFile {0}/apache.pid\nListen 127.0.0.1:8006\nErrorLog {0}/apache.log\nDefaultRuntimeDir {0}\n\
             Mutex file:{0}\nLoadModule mpm_event_module {modules}/mod_mpm_event.so\nLoadModule authz_core_module {modules}/mod_authz_core.so\n\
             LoadModule dir_module {modules}/mod_dir.so\nDirectoryIndex index.html\nUser www-data\nGroup www-data\nDocumentRoot {0}/www\n",
            temp.path().display()
        );
        let parent = begin(&["apache2", "-f", &temp.file("apache.conf", &text), "-DFOREGROUND"], 8_006);
        *apache = Some(parent);
        // A graceful restart.
        reloads.push((parent, "-USR1"));
        http.push(8_006);
    }
    // PostgreSQL refuses to run as root, and root in a user namespace has no other user.
    let as_other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let run_as_other = |words: &[&str]| {
        let ran = Command::new(as_other[0]).args(&as_other[1..]).args(words).output().expect("setpriv");
        assert!(ran.status.success(), "{words:?}: {}", String::from_utf8_lossy(&ran.stderr));
    };
    let others = Command::new(as_other[0]).args(&as_other[1..]).arg("true").output();
    let may_change_user = others.is_ok_and(|ran| ran.status.success());
    let postgres = may_change_user.then(postgresql).flatten();
    if let Some(programs) = &postgres {
        let data = path("data");
        fs::create_dir(&data).expect("a directory");
        chown(&data, Some(65_534), Some(65_534)).expect("root changes owners");
        run_as_other(&[
            &format!("{programs}/initdb"),
            "--no-sync",
            "-A",
            "trust",
            "-U",
            "tester",
            "-D",
            &data,
        ]);
        temp.file("pg.conf", "port = 8008\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = ''\ndynamic_shared_memory_type = mmap\nfsync = off\n");
        let (server, config) = (format!("{programs}/postgres"), format!("config_file={}", path("pg.conf")));
        let words = [&as_other[..], &[&server, "-D", &data, "-c", &config]].concat();
        let postmaster = begin(&words, 8_008);
        *database = Some(postmaster);
        reloads.push((postmaster, "-HUP"));
        pools.push((8_008, "tester", "postgres", "SELECT 1"));
    } else {
        skip(test, "programs", "no postgres, or no right to run it as another user");
    }
    if has(test, &["pgbouncer"]) {
        let server = postgres.as_ref().map_or("", |_| "postgres = host=127.0.0.1 port=8008 user=tester\n");
        let text = format!(
            "[databases]\n{server}[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = 8007\nunix_socket_dir =\n\
             auth_type = any\nadmin_users = admin\n"
        );
        let pooler = begin(&["pgbouncer", "-q", "-u", "www-data", &temp.file("pgbouncer.ini", &text)], 8_007);
        reloads.push((pooler, "-HUP"));
        pools.push((8_007, "admin", "pgbouncer", "SHOW VERSION"));
        pools.extend(postgres.map(|_| (8_007, "tester", "postgres", "SELECT 1")));
    }
    if nginx.is_some() && may_change_user && has(test, &["squid"]) {
        let logs = path("squid");
        fs::create_dir(&logs).expect("a directory");
        chown(&logs, Some(65_534), Some(65_534)).expect("root changes owners");
        // A worker of nginx that a reload ends closes the connections that squid has kept: a request that is under way then gets 502.
        let text = format!(
            "server_persistent_connections off\nhttp_port 127.0.0.1:8009 accel defaultsite=127.0.0.1 no-vhost\ncache_peer 127.0.0.1 parent 8000 0 no-query originserver\n\
             http_access allow all\ncache deny all\npid_filename none\nvisible_hostname localhost\npinger_enable off\n\
             netdb_filename none\ncoredump_dir {logs}\ncache_log {logs}/cache.log\naccess_log stdio:{logs}/access.log\n"
        );
        let config = temp.file("squid.conf", &text);
        let squid = begin(&[&as_other[..], &["squid", "-N", "-f", &config]].concat(), 8_009);
        // The log is rotated.
        reloads.push((squid, "-USR1"));
        http.push(8_009);
    }
    all
}

/// Returns the directory of the programs of PostgreSQL, which Debian keeps outside of PATH.
fn postgresql() -> Option<String> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
    let directories = versions.map(|version| version.expect("an entry").path().join("bin"));
    let newest = directories.filter(|directory| directory.join("postgres").exists()).max()?;
    newest.to_str().map(str::to_owned)
}

fn send(signal: &str, process: u32) {
    let sent = Command::new("kill").args([signal, &process.to_string()]).status().expect("kill");
    assert!(sent.success(), "kill {signal} {process}");
}

#[test]
fn healthy_programs_have_no_finding() {
    let test = "soak::healthy_programs_have_no_finding";
    experiment(&["python3"], |temp| {
        let set = env::var("FOURTUPLE_SOAK").ok();
        let alone = set.is_some();
        let seconds = set.map_or(40, |text| text.parse().expect("seconds in FOURTUPLE_SOAK"));
        let Programs { daemons: _daemons, reloads, nginx, apache, database, http, pings, pools } =
            start(test, temp);
        let mut client = Python::start();
        client.run(LOAD);
        client.run(&format!("begin({http:?}, {pings:?}, {pools:?})"));
        // A long soak is alone on the host and has the limits of the product. A short one has neighbours: a thread may wait for a processor for
        // seconds, also within a search for a port.
        let beside = |limits: &'static str| if alone { limits } else { "A07 = 10000\nP09 = 100000\n" };
        let thresholds = temp.file("thresholds.toml", beside(""));
        // After a graceful restart Apache starts children when a second has passed without the end of an old one: connections do wait.
        let restarting = temp.file("restarting.toml", beside("A07 = 2000\n"));
        // As long as A07 allows beside others, a worker that waits for a processor may leave data unread.
        let is_short = |verdict: &str| {
            let age = verdict.rsplit_once(" that it has not read for up to ");
            let age = age.and_then(|(_, age)| age.strip_suffix(" s")?.parse::<f64>().ok());
            age.is_some_and(|age| age < 10.0)
        };
        let (begun, mut found, mut turns, mut reloaded) = (Instant::now(), Vec::new(), 0, None);
        while begun.elapsed() < Duration::from_secs(seconds) {
            let limits = if reloaded.is_some() && reloaded == apache { &restarting } else { &thresholds };
            let ended = run(&mut fourtuple(&format!("doctor --for 2s --json --thresholds {limits}")));
            assert!([0, 1].contains(&ended.code), "{ended:?}");
            found.extend(
                verdicts(&ended.json())
                    .into_iter()
                    // These counters are of the whole host, and other tests flood it.
                    .filter(|verdict| alone || !is_of_host(verdict) && !is_short(verdict))
                    .map(|verdict| format!("after {:?}: {verdict}", begun.elapsed())),
            );
            turns += 1;
            if let Some(master) = nginx {
                let log = temp.join("access.log");
                let _ = fs::rename(&log, format!("{log}.1"));
                // nginx opens the log again.
                send("-USR1", master);
            }
            // Each program loads its configuration again from time to time.
            let reload = reloads.get(turns % (2 * reloads.len().max(1)));
            if let Some((process, signal)) = reload {
                send(signal, *process);
            }
            reloaded = reload.map(|(process, _)| *process);
        }
        let failures = client.run("going = False\nprint(json.dumps([done, len(failures), failures[:5]]))");
        if let Some(server) = database {
            send("-INT", server);
            until("PostgreSQL ends", || stat(server).is_none_or(|(state, _)| state == 'Z'));
        }
        assert!(found.is_empty(), "{turns} diagnoses: {found:#?}\n{failures}");
        assert!(failures.contains(", 0, []]"), "{failures}");
        assert!(client.number("print(done)") > 100, "{failures}");
    });
}
