//! A fault in the network namespace of a test: programs that cause the fault, the diagnosis, and the command that it names.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddrV4, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;

use fourtuple_syscalls::{child, device};
use fourtuple_testing::process::until_expected;
use fourtuple_testing::{in_namespace_of, set_sysctl, skip, test_of};
use serde_json::Value;

use super::fixing::Cgroup;
use super::{TempDir, binary, fourtuple, list, run, stat, text, until};

/// The port of a server behind a proxy, and the port of a proxy.
pub(crate) const SERVER: u16 = 4_000;
pub(crate) const PROXY: u16 = 4_020;

/// Runs a closure of a test in a network namespace of its own, with a directory, if all programs are in PATH.
pub(crate) fn experiment<F: FnOnce(&TempDir) + Send + 'static>(programs: &'static [&'static str], run: F) {
    let test = test_of(&run);
    in_namespace_of(test.clone(), move || {
        if has(&test, programs) {
            run(&TempDir::new());
        }
    });
}

/// Returns whether all programs are in PATH; reports the test as skipped otherwise.
pub(crate) fn has(test: &str, programs: &[&str]) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let is_absent = |program: &&&str| !env::split_paths(&path).any(|place| place.join(program).exists());
    let Some(program) = programs.iter().find(is_absent) else { return true };
    let need = if matches!(*program, "python3" | "envoy") { program } else { "programs" };
    skip(test, need, &format!("{program} is not in PATH"));
    false
}

/// Returns the name of php-fpm, which may have a version; reports the test as skipped without it.
pub(crate) fn php_fpm(test: &str) -> Option<&'static str> {
    let path = env::var_os("PATH").unwrap_or_default();
    let is_there = |name: &&str| env::split_paths(&path).any(|place| place.join(name).exists());
    let found = ["php-fpm", "php-fpm8.2", "php-fpm8.4"].into_iter().find(is_there);
    found.or_else(|| has(test, &["php-fpm"]).then_some("php-fpm"))
}

/// Sets the port range of the namespace, and adds the addresses 10.0.0.1 to 10.0.0.4: connect() takes no TIME_WAIT socket of theirs
/// again, as it does for loopback addresses.
pub(crate) fn set_range(low: u16, high: u16) {
    set_sysctl("net.ipv4.ip_local_port_range", &format!("{low} {high}"));
    for last in 1..=4 {
        device::add_address("lo", [10, 0, 0, last].into(), 24).expect("an address");
    }
}

/// Runs `doctor` in the namespace and returns its record. P03 has another threshold, because the ranges of tests are small on purpose.
pub(crate) fn diagnose(temp: &TempDir) -> Value {
    diagnose_with(temp, "P03 = 1\n")
}

/// Runs `doctor` while the test does something again and again.
pub(crate) fn diagnose_during(temp: &TempDir, mut repeated: impl FnMut()) -> Value {
    thread::scope(|scope| {
        let diagnosis = scope.spawn(|| diagnose(temp));
        while !diagnosis.is_finished() {
            repeated();
        }
        diagnosis.join().expect("a diagnosis")
    })
}

/// Runs `doctor` while the test does something again and again, until a rule has a finding with all parts.
pub(crate) fn diagnose_until(temp: &TempDir, id: &str, parts: &[&str], mut repeated: impl FnMut()) -> Value {
    until_found(id, parts, || diagnose_during(temp, &mut repeated))
}

/// Diagnoses until a rule has a finding whose texts have all parts, or not for 30 times. On a busy host a program may do nothing between the two
/// readings. A rule that cannot be checked is not waited for.
pub(crate) fn until_found(id: &str, parts: &[&str], diagnose: impl FnMut() -> Value) -> Value {
    until_expected(30, diagnose, |record| is_found(record, id, parts))
}

/// Returns whether a rule has a finding whose texts have all parts, or could not be checked.
pub(crate) fn is_found(record: &Value, id: &str, parts: &[&str]) -> bool {
    let has_parts = |finding: &Value| {
        let said = finding.to_string();
        finding["id"] == id && parts.iter().all(|part| said.contains(part))
    };
    is_unchecked(record, id) || findings(record).any(has_parts)
}

/// Runs `doctor` with these thresholds.
pub(crate) fn diagnose_with(temp: &TempDir, thresholds: &str) -> Value {
    diagnose_for(temp, "500ms", thresholds)
}

/// Runs `doctor` with this time between its readings.
pub(crate) fn diagnose_for(temp: &TempDir, time: &str, thresholds: &str) -> Value {
    let thresholds = temp.file("thresholds.toml", thresholds);
    let flags = format!("doctor --for {time} --json --thresholds {thresholds}");
    let ended = run(&mut fourtuple(&flags));
    assert!([0, 1].contains(&ended.code) && ended.stderr.is_empty(), "{ended:?}");
    let record = ended.json();
    let findings = list(&record, "/results/findings");
    assert_eq!(ended.code == 1, !findings.is_empty(), "{findings:#?}");
    record
}

/// Returns the ids and verdicts of the findings.
pub(crate) fn verdicts(record: &Value) -> Vec<String> {
    let line = |finding: &Value| format!("{} {}", text(finding, "id"), text(finding, "verdict"));
    list(record, "/results/findings").iter().map(line).collect()
}

/// Returns the findings without those of counters of the whole host.
pub(crate) fn findings(record: &Value) -> impl Iterator<Item = &Value> {
    list(record, "/results/findings").iter().filter(|finding| !is_of_host(text(finding, "verdict")))
}

/// Returns whether a text names a counter of the whole host, not of a network namespace: other tests raise these.
pub(crate) fn is_of_host(text: &str) -> bool {
    ["softnet.", "rt_cache.", "arp_cache.", "ndisc_cache."].iter().any(|name| text.contains(name))
}

/// Returns whether a rule has a finding.
pub(crate) fn finds(record: &Value, id: &str) -> bool {
    findings(record).any(|finding| finding["id"] == id)
}

/// Returns whether a rule was checked that needs a trace; reports the test as skipped otherwise.
pub(crate) fn traced(test: &str, record: &Value, id: &str) -> bool {
    if is_unchecked(record, id) {
        skip(test, "bpf", &record["results"]["unchecked"].to_string());
        return false;
    }
    true
}

fn is_unchecked(record: &Value, id: &str) -> bool {
    record["results"]["unchecked"].to_string().contains(&format!("\"{id}\""))
}

/// Rules about waits, which other tests on the host cause: threads that wait for a processor accept late, search long and keep locks.
const OF_HASTE: [&str; 4] = ["A07", "L01", "L03", "P09"];

/// Returns the first finding, which must be of this rule and name all parts. Other findings that a busy host makes may precede it.
#[track_caller]
pub(crate) fn first<'a>(record: &'a Value, id: &str, parts: &[&str]) -> &'a Value {
    let all = verdicts(record);
    let finding = findings(record)
        .find(|finding| finding["id"] == id || !OF_HASTE.contains(&text(finding, "id")))
        .unwrap_or_else(|| {
            panic!("no finding of {id}: {all:#?}; not checked: {:#}", record["results"]["unchecked"])
        });
    assert_eq!(text(finding, "id"), id, "{all:#?}");
    for part in parts {
        assert!(text(finding, "verdict").contains(part), "{part:?} in {all:#?}");
    }
    finding
}

/// Returns the finding of a rule that comes after that of another one, which is the cause or more severe, and must be the first.
#[track_caller]
pub(crate) fn behind(record: &Value, id: &str, other: &str) -> Value {
    first(record, other, &[]);
    let mut findings = list(record, "/results/findings").iter();
    let found = findings.find(|finding| finding["id"] == id).cloned();
    let mut found = found.unwrap_or_else(|| {
        panic!("no {id}: {:#?}; not checked: {:#}", verdicts(record), record["results"]["unchecked"])
    });
    found["behind"] = other.into();
    found
}

/// Returns the first command of "do now".
#[track_caller]
pub(crate) fn do_now(finding: &Value) -> String {
    let first = list(finding, "/now").first().unwrap_or_else(|| panic!("nothing to do now: {finding:#}"));
    assert_eq!(first["is_command"], true, "{finding:#}");
    action(first)
}

/// Returns the action of an advice, in which the program under test has its name: `shell` finds it.
fn action(advice: &Value) -> String {
    text(advice, "action").replace(&binary().display().to_string(), "fourtuple")
}

/// Returns the actions of "do now" or "do properly".
pub(crate) fn actions(finding: &Value, list_name: &str) -> Vec<String> {
    let list = list(finding, &format!("/{list_name}"));
    list.iter().map(action).collect()
}

/// Returns a shell that runs a command as `doctor` printed it; `fourtuple` is the program under test.
fn shell(command: &str) -> Command {
    let own = Path::new(env!("CARGO_BIN_EXE_fourtuple")).parent().expect("a directory");
    let mut path = vec![own.to_owned()];
    path.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).env("PATH", env::join_paths(path).expect("a PATH")).stdin(Stdio::null());
    shell
}

/// Runs a command of a finding to its end.
#[track_caller]
pub(crate) fn paste(command: &str) -> String {
    let Output { status, stdout, stderr } = shell(command).output().expect("sh starts");
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command}: {stdout}{stderr}");
    stdout.into_owned()
}

/// Runs the first command of "do now" to its end, and returns it.
#[track_caller]
pub(crate) fn paste_first(finding: &Value) -> String {
    let command = do_now(finding);
    paste(&command);
    command
}

/// A running `fourtuple fix`, ended with SIGTERM.
pub(crate) struct Fix(Child);

impl Fix {
    /// Starts `fourtuple fix ...` of a finding and waits until it is attached; `None` after a skip.
    pub(crate) fn paste(test: &str, command: &str) -> Option<Fix> {
        assert!(command.starts_with("fourtuple fix "), "{command}");
        let mut shell = shell(&format!("exec {command} --json"));
        let mut child = shell.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("sh starts");
        let mut line = String::new();
        BufReader::new(child.stderr.as_mut().expect("a pipe")).read_line(&mut line).expect("UTF-8");
        if line.starts_with("fixing ") {
            return Some(Fix(child));
        }
        assert_eq!(child.wait().expect("our child").code(), Some(4), "{command}: {line}");
        skip(test, "bpf", line.trim_end());
        None
    }

    /// Ends the fix and returns the results of its record.
    pub(crate) fn end(mut self) -> Value {
        child::terminate(self.0.id()).expect("our child");
        let record: Value =
            serde_json::from_reader(self.0.stdout.take().expect("a pipe")).expect("a record on stdout");
        record["results"].clone()
    }
}

impl Drop for Fix {
    fn drop(&mut self) {
        let _ = child::terminate(self.0.id());
        let _ = self.0.wait();
    }
}

/// A server program in a cgroup of its own. It and its children are killed on drop.
pub(crate) struct Daemon {
    child: Child,
    /// Removed after the processes.
    _cgroup: Option<Cgroup>,
}

impl Daemon {
    /// Starts a program within a cgroup, so that `fourtuple fix ports --pid` concerns no other program.
    pub(crate) fn start(cgroup: Option<Cgroup>, words: &[&str]) -> Daemon {
        let enter = "test -z \"$0\" || echo $$ > \"$0\"/cgroup.procs && exec \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", enter]);
        match &cgroup {
            Some(cgroup) => command.arg(&cgroup.0),
            None => command.arg(""),
        };
        command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap_or_else(|error| panic!("{words:?}: {error}"));
        Daemon { child, _cgroup: cgroup }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends the program and waits for its end.
    pub(crate) fn end(mut self) {
        self.kill();
    }

    fn kill(&mut self) {
        let workers = super::children(self.child.id());
        // The master comes first: it would replace a worker that ends.
        for process in [self.child.id()].iter().chain(&workers) {
            let _ = child::kill(*process);
        }
        let _ = self.child.wait();
        // Orphaned workers are reaped by another process.
        until("the workers end", || {
            workers.iter().all(|worker| stat(*worker).is_none_or(|(state, _)| state == 'Z'))
        });
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts nginx with the blocks of its `http` section. With `workers` of 0 it has no master process.
pub(crate) fn nginx(
    temp: &TempDir,
    name: &str,
    workers: u32,
    cgroup: Option<Cgroup>,
    servers: &str,
) -> Daemon {
    let config = nginx_config(temp, name, workers, servers);
    Daemon::start(cgroup, &["nginx", "-c", &config])
}

/// nginx would close what is idle for a minute, which a busy host may need for a diagnosis.
const WAITS: &str = "client_header_timeout 10m;\nkeepalive_timeout 10m;\n";

/// Writes a configuration of nginx and returns its path.
pub(crate) fn nginx_config(temp: &TempDir, name: &str, workers: u32, servers: &str) -> String {
    let directory = temp.join(name);
    fs::create_dir_all(&directory).expect("a directory");
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {directory};\n"))
        .concat();
    let master =
        if workers == 0 { "master_process off;".to_owned() } else { format!("worker_processes {workers};") };
    let text = format!(
        "daemon off;\nuser root;\n{master}\npid {directory}/pid;\nerror_log {directory}/error.log;\n\
         events {{ worker_connections 8192; }}\nhttp {{\naccess_log off;\n{WAITS}{temporary}{servers}\n}}\n"
    );
    temp.file(&format!("{name}/nginx.conf"), &text)
}

/// A configuration of Envoy with an HTTP listener.
const ENVOY: &str = r#"
admin: { address: { socket_address: { address: 127.0.0.1, port_value: ADMIN } } }
static_resources:
  listeners:
  - name: front
    address: { socket_address: { address: 127.0.0.1, port_value: PORT } }
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: front
          http_filters:
          - name: envoy.filters.http.router
            typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }
          route_config:
            virtual_hosts:
            - { name: all, domains: ["*"], routes: [{ match: { prefix: "/" }, ROUTE }] }
  CLUSTERS
"#;

/// A cluster of one server, to which each request has a connection.
const CLUSTER: &str = r#"clusters:
  - name: server
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        common_http_protocol_options: { max_requests_per_connection: 1 }
        explicit_http_config: { http_protocol_options: {} }
    load_assignment:
      cluster_name: server
      endpoints: [{ lb_endpoints: [{ endpoint: { address: { socket_address: { address: ADDRESS, port_value: SERVER } } } }] }]
"#;

fn envoy_config(temp: &TempDir, port: u16, route: &str, clusters: &str) -> String {
    let listener = ENVOY.replace("PORT", &port.to_string()).replace("ADMIN", &(port + 1).to_string());
    temp.file("envoy.yaml", &listener.replace("ROUTE", route).replace("CLUSTERS", clusters))
}

/// Starts Envoy with `workers` workers that answer `ok` on `port`, and its statistics on the next port, and waits until it listens.
pub(crate) fn envoy(temp: &TempDir, port: u16, workers: usize) -> Daemon {
    let route = "direct_response: { status: 200, body: { inline_string: ok } }";
    envoy_with(&envoy_config(temp, port, route, ""), port, workers)
}

/// Starts Envoy as a proxy of a server, with a connection for each request, and waits until it listens.
pub(crate) fn envoy_proxy(temp: &TempDir, port: u16, server: SocketAddrV4) -> Daemon {
    let cluster =
        CLUSTER.replace("ADDRESS", &server.ip().to_string()).replace("SERVER", &server.port().to_string());
    envoy_with(&envoy_config(temp, port, "route: { cluster: server }", &cluster), port, 2)
}

/// Starts Envoy with a configuration, and waits until it listens.
pub(crate) fn envoy_with(config: &str, port: u16, workers: usize) -> Daemon {
    let workers = workers.to_string();
    let words = ["envoy", "-c", config, "--concurrency", &workers, "--disable-hot-restart", "-l", "off"];
    let daemon = Daemon::start(None, &words);
    wait_for("127.0.0.1", port);
    daemon
}

/// Starts Unbound, which knows the address 10.0.0.1 of `a.example`, at a port.
pub(crate) fn unbound(temp: &TempDir, address: &str, port: u16, buffer: &str) -> Daemon {
    let (log, directory) = (temp.join("log"), temp.path().display());
    let config = temp.file(
        "unbound.conf",
        &format!(
            "server:\n  interface: {address}@{port}\n  access-control: 0.0.0.0/0 allow\n  do-tcp: no\n  do-daemonize: no\n  num-threads: 1\n  \
             so-rcvbuf: {buffer}\n  chroot: \"\"\n  username: \"\"\n  directory: \"{directory}\"\n  pidfile: \"\"\n  use-syslog: no\n  \
             logfile: \"{log}\"\n  module-config: \"iterator\"\n  local-data: \"a.example. A 10.0.0.1\"\nremote-control:\n  \
             control-enable: no\n"
        ),
    );
    Daemon::start(None, &["unbound", "-c", &config])
}

/// Waits until a server listens.
pub(crate) fn wait_for(address: &str, port: u16) {
    until("the server listens", || TcpStream::connect((address, port)).is_ok());
}

/// Sends requests with curl, each on a connection of its own to the server; returns the number of responses other than 200.
pub(crate) fn failed_requests(url: &str, requests: u32) -> usize {
    let flags = ["-s", "-o", "/dev/null", "--max-time", "60", "-w", "%{http_code}\n"];
    let output = Command::new("curl").args(flags).arg(format!("{url}[1-{requests}]")).output().expect("curl");
    let codes = String::from_utf8(output.stdout).expect("UTF-8");
    assert_eq!(codes.lines().count(), requests as usize, "{codes}");
    codes.lines().filter(|code| *code != "200").count()
}

/// Returns the CPU time of the first thread of a process in ns (/proc/PID/schedstat).
pub(crate) fn cpu_ns(process: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{process}/schedstat")).expect("procfs");
    text.split(' ').next().and_then(|number| number.parse().ok()).expect("a number")
}

/// Returns the value at a pointer as text.
pub(crate) fn text_of(value: &Value, pointer: &str) -> String {
    value.pointer(pointer).unwrap_or_else(|| panic!("no {pointer} in {value:#}")).to_string()
}
