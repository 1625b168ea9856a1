//! No rule has a finding behind nginx and HAProxy as they are usually set up, while they serve requests.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use fourtuple_observe::doctor::{Limits, diagnose};
use fourtuple_observe::host::snapshot::Reader;
use fourtuple_record::Finding;
use fourtuple_syscalls::child;
use fourtuple_testing::{in_namespace, process, skip};

use crate::scene::{NEAR, add_addresses};

const BACKEND: u16 = 8_000;
const PROXY: u16 = 8_001;

/// A program and a directory, which end with the test.
struct Program {
    child: Child,
    directory: PathBuf,
}

impl Drop for Program {
    fn drop(&mut self) {
        // nginx passes SIGTERM on to its workers; SIGKILL would leave them.
        process::status(Command::new("kill").arg(self.child.id().to_string())).unwrap();
        self.child.wait().unwrap();
        fs::remove_dir_all(&self.directory).unwrap();
    }
}

/// Starts a program with a configuration file and waits for its port; `None` if the program is not installed.
fn start(name: &str, test: &str, port: u16, configuration: &str, arguments: &[&str]) -> Option<Program> {
    let directory =
        std::env::temp_dir().join(format!("fourtuple-honest-{test}-{port}-{}", std::process::id()));
    fs::create_dir_all(directory.join("logs")).unwrap();
    let file = directory.join("configuration");
    fs::write(&file, configuration).unwrap();
    let mut command = Command::new(name);
    command.current_dir(&directory).args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
    let Ok(child) = process::start(&mut command) else {
        fs::remove_dir_all(&directory).unwrap();
        return None;
    };
    let program = Program { child, directory };
    crate::scene::until(name, || TcpStream::connect((NEAR, port)).ok());
    Some(program)
}

fn nginx(test: &str, port: u16, servers: &str) -> Option<Program> {
    let configuration = format!(
        "user root; worker_processes 2; pid logs/pid; error_log logs/error; daemon off;\n\
         events {{ worker_connections 2000; }}\n\
         http {{ access_log off; client_body_temp_path logs/a; proxy_temp_path logs/b; fastcgi_temp_path logs/c;\n\
         uwsgi_temp_path logs/d; scgi_temp_path logs/e;\n{servers}\n}}"
    );
    start("nginx", test, port, &configuration, &["-p", ".", "-c", "configuration"])
}

fn backend(test: &str) -> Option<Program> {
    nginx(test, BACKEND, &format!("server {{ listen {NEAR}:{BACKEND}; location / {{ return 200 ok; }} }}"))
}

/// Checks that no rule has a finding behind `proxy`, started after its backend; skips the test `name` without the programs.
fn serves(name: &str, directory: &str, proxy: impl FnOnce() -> Option<Program>) {
    add_addresses();
    let Some(_backend) = backend(directory) else { return skip(name, "programs", MISSING) };
    let Some(_proxy) = proxy() else { return skip(name, "programs", MISSING) };
    if !serves_without_a_finding() {
        skip(name, "programs", MISSING);
    }
}

/// Returns whether a process has a handler of SIGINT, signal 2. The signal ends one that has none yet.
fn handles_interrupts(process: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    u64::from_str_radix(caught.trim(), 16).unwrap() & 1 << 1 != 0
}

/// Requests pages and diagnoses an interval in the middle. Returns false if wrk is not installed.
fn serves_without_a_finding() -> bool {
    let url = format!("http://{NEAR}:{PROXY}/");
    let mut wrk = Command::new("wrk");
    wrk.args(["-t", "1", "-c", "50", "-d", "600s", &url]).stdout(Stdio::piped());
    child::end_with_this_thread(&mut wrk);
    let Ok(wrk) = process::start(&mut wrk) else { return false };
    crate::scene::until("wrk runs", || handles_interrupts(wrk.id()).then_some(()));
    let mut reader = Reader::new(Path::new("/"));
    thread::sleep(Duration::from_millis(500));
    crate::scene::read(&mut reader);
    let mut intervals = 0;
    let (snapshot, findings) = loop {
        thread::sleep(Duration::from_millis(1_000));
        let snapshot = crate::scene::read(&mut reader);
        let findings = diagnose(&snapshot, &Limits::default()).findings;
        intervals += 1;
        // Connections and requests do wait for a server that gets no processor for a second, but not in each interval.
        let may_be_true = |finding: &Finding| ["A07", "X01"].contains(&finding.id.as_str());
        if findings.is_empty() || intervals == 5 || !findings.iter().all(may_be_true) {
            break (snapshot, findings);
        }
    };
    // The readings may take longer than any time that wrk could run for.
    child::interrupt(wrk.id()).unwrap();
    let output = wrk.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("Requests/sec"), "{text}");
    assert!(findings.is_empty(), "{findings:#?}\n{text}");
    let tuples = &snapshot.connections.seen().unwrap().tuples;
    assert!(tuples.iter().any(|tuple| tuple.destination.port() == PROXY), "{tuples:#?}");
    true
}

const MISSING: &str = "nginx, HAProxy or wrk is not installed";

#[test]
fn nginx_with_kept_connections_has_no_finding() {
    in_namespace(|| {
        let servers = format!(
            "upstream backend {{ server {NEAR}:{BACKEND}; keepalive 64; }}\n\
             server {{ listen {NEAR}:{PROXY}; location / {{ proxy_pass http://backend; proxy_http_version 1.1; \
             proxy_set_header Connection \"\"; }} }}"
        );
        serves("nginx_with_kept_connections_has_no_finding", "kept", || nginx("kept", PROXY, &servers));
    });
}

#[test]
fn nginx_with_a_connection_per_request_has_no_finding() {
    in_namespace(|| {
        let servers = format!(
            "server {{ listen {NEAR}:{PROXY}; location / {{ proxy_pass http://{NEAR}:{BACKEND}; }} }}"
        );
        let name = "nginx_with_a_connection_per_request_has_no_finding";
        serves(name, "each", || nginx("each", PROXY, &servers));
    });
}

#[test]
fn haproxy_has_no_finding() {
    in_namespace(|| {
        let configuration = format!(
            "global\n maxconn 2000\ndefaults\n mode http\n timeout connect 5s\n timeout client 30s\n timeout server 30s\n\
             frontend front\n bind {NEAR}:{PROXY}\n default_backend back\n\
             backend back\n server one {NEAR}:{BACKEND}\n"
        );
        let arguments = ["-db", "-f", "configuration"];
        let proxy = || start("haproxy", "haproxy", PROXY, &configuration, &arguments);
        serves("haproxy_has_no_finding", "haproxy", proxy);
    });
}
