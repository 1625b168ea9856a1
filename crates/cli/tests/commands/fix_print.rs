//! `fourtuple fix --print`: the programs run with their settings, or read them.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::program;
use crate::program::fixing::Cgroup;
use crate::program::fixing::{Client, attached_by, record_of};
use crate::program::servers::Backend;
use crate::program::situation::{self, envoy_with};
use crate::program::{
    DEADLINE, Limited, TempDir, capabilities, fourtuple, in_own_namespace, refused, run, until,
};
use fourtuple_fix::print::Program;
use fourtuple_testing::{in_namespace, set_sysctl, skip};
use serde_json::{Value, json};

/// The prefix of loopback with the source addresses of the texts.
const SOURCES: [&str; 2] = ["127.0.0.9", "127.0.0.10"];
const PREFIX: &str = "127.0.0.8/30";
const LOW: u16 = 20_000;
const HIGH: u16 = 29_999;

/// Returns the text for a program, with more flags.
fn print(program: &str, flags: &str) -> String {
    let ended = run(&mut fourtuple(&format!("fix --print {program} {flags}")));
    ended.require_silence();
    ended.stdout
}

fn print_for(program: &str, backend: &Backend) -> String {
    print(program, &format!("--to {} --source {PREFIX}", backend.address))
}

/// Returns whether a command of the host runs; else reports a skipped test.
fn has(test: &str, command: &str, arguments: &[&str]) -> bool {
    let mut started = Command::new(command);
    match started.args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).stdin(Stdio::null()).status() {
        Ok(status) if status.success() => true,
        result => {
            skip(test, "programs", &format!("{command} {}: {result:?}", arguments.join(" ")));
            false
        }
    }
}

/// Runs a command and returns its output, which has to succeed.
#[track_caller]
fn output(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {out}{err}");
    format!("{out}{err}")
}

/// A server program, killed on drop.
struct Daemon(Child);

impl Daemon {
    fn start(command: &mut Command) -> Daemon {
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Daemon(command.spawn().expect("the program starts"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a request over a new connection; waits until the server listens.
fn get(address: SocketAddr) -> String {
    let begun = Instant::now();
    let mut stream = loop {
        match TcpStream::connect(address) {
            Ok(stream) => break stream,
            Err(error) => assert!(begun.elapsed() < DEADLINE, "{address}: {error}"),
        }
        thread::sleep(Duration::from_millis(10));
    };
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: fourtuple\r\nConnection: close\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

/// Requires that a proxy uses each source address, and only these.
fn require_sources(backend: &Backend, proxy: SocketAddr) -> Vec<SocketAddr> {
    for _ in 0..40 {
        let response = get(proxy);
        assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    }
    let peers = backend.peers();
    let sources: BTreeSet<IpAddr> = peers.iter().map(SocketAddr::ip).collect();
    assert_eq!(sources, SOURCES.map(|source| source.parse().unwrap()).into(), "{peers:?}");
    peers
}

/// Starts nginx with the printed file.
fn nginx(temp: &TempDir, backend: &Backend) -> Daemon {
    temp.file("fourtuple.conf", &print_for("nginx", backend));
    let config = temp.file(
        "nginx.conf",
        &format!(
            "daemon off;\nmaster_process off;\npid {0}/pid;\nerror_log {0}/error.log;\nevents {{}}\nhttp {{\naccess_log off;\n\
             client_body_temp_path {0};\nproxy_temp_path {0};\nfastcgi_temp_path {0};\nuwsgi_temp_path {0};\n\
             scgi_temp_path {0};\ninclude {0}/fourtuple.conf;\n}}\n",
            temp.path().display()
        ),
    );
    output(Command::new("nginx").args(["-t", "-q", "-c", &config]));
    Daemon::start(Command::new("nginx").args(["-c", &config]))
}

#[test]
fn nginx_connects_from_each_source_and_keeps_connections() {
    in_namespace(|| {
        if !has("fix_print::nginx_connects_from_each_source_and_keeps_connections", "nginx", &["-v"]) {
            return;
        }
        let (temp, proxy) = (TempDir::new(), SocketAddr::from(([127, 0, 0, 1], 8080)));
        let closing = Backend::start(false);
        let running = nginx(&temp, &closing);
        require_sources(&closing, proxy);
        drop(running);
        let keeping = Backend::start(true);
        let _running = nginx(&temp, &keeping);
        (0..10).for_each(|_| assert!(get(proxy).starts_with("HTTP/1.1 200")));
        // Each request is complete before the next one begins.
        assert_eq!(keeping.peers().len(), 1, "one connection serves all requests");
    });
}

#[test]
fn haproxy_binds_to_each_source_within_the_range() {
    in_own_namespace(|test| {
        if !has(test, "haproxy", &["-v"]) {
            return;
        }
        set_sysctl("net.ipv4.ip_local_port_range", &format!("{LOW} {HIGH}"));
        let (temp, backend) = (TempDir::new(), Backend::start(false));
        let text = print_for("haproxy", &backend);
        let front = "global\n    maxconn 1000\ndefaults\n    timeout client 60s\n\
                     frontend front\n    mode http\n    bind 127.0.0.1:8080\n    default_backend fourtuple\n";
        let config = temp.file("haproxy.cfg", &format!("{front}{text}"));
        let said = output(Command::new("haproxy").args(["-c", "-f", &config]));
        assert!(!said.to_lowercase().contains("warning"), "{said}");
        // From now on the kernel would choose other ports.
        set_sysctl("net.ipv4.ip_local_port_range", "40000 40999");
        let _running = Daemon::start(Command::new("haproxy").args(["-db", "-f", &config]));
        let peers = require_sources(&backend, SocketAddr::from(([127, 0, 0, 1], 8080)));
        assert!(peers.iter().all(|peer| (LOW..=HIGH).contains(&peer.port())), "{peers:?}");
    });
}

#[test]
fn haproxy_ignores_a_range_without_an_address() {
    in_namespace(|| {
        if !has("fix_print::haproxy_ignores_a_range_without_an_address", "haproxy", &["-v"]) {
            return;
        }
        set_sysctl("net.ipv4.ip_local_port_range", "40000 40999");
        let (temp, backend) = (TempDir::new(), Backend::start(false));
        let config = temp.file(
            "haproxy.cfg",
            &format!(
                "defaults\n    mode http\n    timeout client 60s\n    timeout connect 60s\n    timeout server 60s\n\
                 listen front\n    bind 127.0.0.1:8080\n    server one {} source 0.0.0.0:{LOW}-{HIGH}\n",
                backend.address
            ),
        );
        let _running = Daemon::start(Command::new("haproxy").args(["-db", "-f", &config]));
        assert!(get(SocketAddr::from(([127, 0, 0, 1], 8080))).starts_with("HTTP/1.1 200"));
        let peers = backend.peers();
        assert!(
            peers.iter().all(|peer| (40_000..=40_999).contains(&peer.port())),
            "as the text says: {peers:?}"
        );
    });
}

/// Calls both functions of the printed package; prints the option of a socket and the source of each connection.
const GO_MAIN: &str = r#"package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"syscall"

	"example/sourceports"
	"net"
	"net/http"
)

func main() {
	for i := 0; i < 32; i++ {
		connection, err := sourceports.DialContext(context.Background(), "tcp", os.Args[1])
		if err != nil {
			panic(err)
		}
		defer connection.Close()
		raw, _ := connection.(*net.TCPConn).SyscallConn()
		raw.Control(func(fd uintptr) {
			noPort, _ := syscall.GetsockoptInt(int(fd), syscall.SOL_IP, 24)
			window, _ := syscall.GetsockoptInt(int(fd), syscall.SOL_IP, 51)
			fmt.Println(connection.LocalAddr(), noPort, uint32(window))
		})
	}
	client := http.Client{Transport: sourceports.Transport()}
	for i := 0; i < 4; i++ {
		response, err := client.Get("http://" + os.Args[1] + "/")
		if err != nil {
			panic(err)
		}
		io.Copy(io.Discard, response.Body)
		response.Body.Close()
	}
}
"#;

/// Requires lines `address noport range`: sources in turn, both options, and ports of both parities.
fn require_options(text: &str, is_linear: bool) {
    let mut sources = BTreeSet::new();
    let mut parities = BTreeSet::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let address: SocketAddr = words[0].parse().unwrap_or_else(|_| panic!("{text}"));
        sources.insert(address.ip().to_string());
        parities.insert(address.port() % 2);
        assert_eq!(words[1], "1", "IP_BIND_ADDRESS_NO_PORT: {text}");
        if is_linear {
            assert_eq!(words[2], 0xFFFF_0000_u32.to_string(), "IP_LOCAL_PORT_RANGE: {text}");
        }
    }
    assert_eq!(sources, SOURCES.map(str::to_owned).into(), "{text}");
    // By parity, all ports of one parity come first.
    assert!(!is_linear || parities.len() == 2, "{text}");
}

#[test]
fn go_dials_with_the_options_from_each_source() {
    in_own_namespace(|test| {
        let go = if Path::new("/usr/local/go/bin/go").exists() { "/usr/local/go/bin/go" } else { "go" };
        if !has(test, go, &["version"]) {
            return;
        }
        let (temp, backend) = (TempDir::new(), Backend::start(true));
        let text = print_for("go", &backend);
        fs::create_dir(temp.join("sourceports")).unwrap();
        let package = temp.file("sourceports/sourceports.go", &text);
        temp.file("go.mod", "module example\n\ngo 1.19\n");
        temp.file("main.go", GO_MAIN);
        let gofmt = Path::new(go).with_file_name("gofmt");
        let unformatted =
            output(Command::new(if gofmt.exists() { gofmt } else { "gofmt".into() }).args(["-l", &package]));
        assert_eq!(unformatted, "", "{text}");
        let go = |arguments: &[&str]| {
            let mut command = Command::new(go);
            command
                .args(arguments)
                .current_dir(temp.path())
                .env("GOFLAGS", "")
                .env("GOPROXY", "off")
                .env("CGO_ENABLED", "0");
            output(command.env("GOTOOLCHAIN", "local"))
        };
        go(&["vet", "./sourceports"]);
        go(&["build", "-o", "dial", "."]);
        let said = output(Command::new(temp.join("dial")).arg(backend.address.to_string()));
        require_options(&said, text.contains("ipLocalPortRange, -0x10000"));
        let mut peers = Vec::new();
        until("the backend has accepted all", || {
            peers.extend(backend.peers());
            peers.len() > 32
        });
        assert_eq!(peers.len(), 32 + 1, "four requests share a connection");
    });
}

/// Connects by each way of the printed module that is installed.
const PYTHON_MAIN: &str = r#"
import asyncio, socket, sys
import setting

host, port = sys.argv[1].rsplit(":", 1)
held = []

def report(connected):
    option = lambda number: int.from_bytes(connected.getsockopt(socket.SOL_IP, number, 4), "little")
    print("%s:%d %d %d" % (*connected.getsockname(), option(24), option(51)))
    held.append(connected)

for _ in range(16):
    connected = setting.open_socket()
    connected.connect((host, int(port)))
    report(connected)

async def by_asyncio():
    for _ in range(16):
        reader, writer = await setting.open_connection(host, int(port))
        report(writer.get_extra_info("socket"))
        held.append(writer)

asyncio.run(by_asyncio())

try:
    import urllib3
except ImportError:
    print("without urllib3", file=sys.stderr)
else:
    pool = setting.urllib3_pool()
    for _ in range(3):
        assert pool.request("GET", "http://" + sys.argv[1] + "/").data == b"ok\n"
try:
    import requests
except ImportError:
    print("without requests", file=sys.stderr)
else:
    session = setting.requests_session()
    for _ in range(3):
        assert session.get("http://" + sys.argv[1] + "/").text == "ok\n"
try:
    import aiohttp
except ImportError:
    print("without aiohttp", file=sys.stderr)
else:
    async def by_aiohttp():
        async with aiohttp.ClientSession(connector=setting.aiohttp_connector()) as session:
            for _ in range(3):
                async with session.get("http://" + sys.argv[1] + "/") as response:
                    assert await response.text() == "ok\n"
    asyncio.run(by_aiohttp())
"#;

#[test]
fn python_connects_with_the_options_from_each_source() {
    in_own_namespace(|test| {
        if !has(test, "python3", &["-c", ""]) {
            return;
        }
        let (temp, backend) = (TempDir::new(), Backend::start(true));
        let text = print_for("python", &backend);
        temp.file("setting.py", &text);
        let main = temp.file("main.py", PYTHON_MAIN);
        let said =
            output(Command::new("python3").args(["-W", "ignore", "-B", &main, &backend.address.to_string()]));
        let (lines, absent): (Vec<&str>, Vec<&str>) =
            said.lines().partition(|line| !line.starts_with("without "));
        require_options(&lines.join("\n"), text.contains("(socket.SOL_IP, 51,"));
        let mut peers = Vec::new();
        until("the backend has accepted all", || {
            peers.extend(backend.peers());
            peers.len() >= 32 + 3 - absent.len()
        });
        assert_eq!(peers.len(), 32 + 3 - absent.len(), "one connection for each client library: {said}");
        let sources = SOURCES.map(|source| source.parse::<IpAddr>().unwrap());
        assert!(peers.iter().all(|peer| sources.contains(&peer.ip())), "{peers:?}");
    });
}

/// Reads YAML with the parser of Python.
fn yaml(test: &str, text: &str) -> Option<Value> {
    const READ: &str = "import json, sys, yaml; print(json.dumps(yaml.safe_load(open(sys.argv[1]))))";
    let python = "/usr/bin/python3";
    if !has(test, python, &["-c", "import yaml"]) {
        return None;
    }
    let temp = TempDir::new();
    let read = output(Command::new(python).args(["-c", READ, &temp.file("text.yaml", text)]));
    Some(serde_json::from_str(&read).unwrap())
}

#[test]
fn envoy_gets_a_cluster_for_each_source() {
    in_namespace(|| {
        let text = print("envoy", &format!("--to 192.0.2.7:443 --source {PREFIX}"));
        let Some(config) = yaml("fix_print::envoy_gets_a_cluster_for_each_source", &text) else { return };
        let clusters = config["static_resources"]["clusters"].as_array().unwrap();
        for (cluster, source) in clusters.iter().zip(SOURCES) {
            let bind = &cluster["upstream_bind_config"];
            assert_eq!(bind["source_address"]["address"], source);
            let first = &bind["socket_options"][0];
            assert_eq!(
                (&first["level"], &first["name"], &first["int_value"]),
                (&0.into(), &24.into(), &1.into())
            );
            assert_eq!(first["state"], "STATE_PREBIND");
            let endpoint = &cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"];
            assert_eq!(endpoint["address"]["socket_address"]["port_value"], 443);
        }
        assert_eq!(clusters.len(), SOURCES.len());
    });
}

/// Envoy with the printed clusters, to which it sends one request after the other at random.
#[test]
fn envoy_connects_from_each_source() {
    in_own_namespace(|test| {
        if !situation::has(test, &["envoy"]) {
            return;
        }
        let (temp, backend, port) = (TempDir::new(), Backend::start(false), 8080);
        let text = print_for("envoy", &backend);
        let Some(mut config) = yaml(test, &text) else { return };
        let clusters = config["static_resources"]["clusters"].as_array().unwrap();
        let names: Vec<Value> =
            clusters.iter().map(|cluster| json!({ "name": cluster["name"], "weight": 1 })).collect();
        let types = "type.googleapis.com/envoy.extensions.filters";
        let route =
            json!({ "match": { "prefix": "/" }, "route": { "weighted_clusters": { "clusters": names } } });
        let manager = json!({
            "@type": format!("{types}.network.http_connection_manager.v3.HttpConnectionManager"),
            "stat_prefix": "front",
            "http_filters": [{
                "name": "envoy.filters.http.router",
                "typed_config": { "@type": format!("{types}.http.router.v3.Router") },
            }],
            "route_config": { "virtual_hosts": [{ "name": "all", "domains": ["*"], "routes": [route] }] },
        });
        let name = "envoy.filters.network.http_connection_manager";
        config["static_resources"]["listeners"] = json!([{
            "name": "front",
            "address": { "socket_address": { "address": "127.0.0.1", "port_value": port } },
            "filter_chains": [{ "filters": [{ "name": name, "typed_config": manager }] }],
        }]);
        let _envoy = envoy_with(&temp.file("envoy.json", &config.to_string()), port, 1);
        let peers = require_sources(&backend, SocketAddr::from(([127, 0, 0, 1], port)));
        // Without IP_LOCAL_PORT_RANGE connect() takes ports of one parity as long as half of them are free.
        let odd = peers.iter().filter(|peer| peer.port() % 2 == 1).count();
        assert!(!text.contains("name: 51") || (1..peers.len()).contains(&odd), "{peers:?}");
    });
}

#[test]
fn kubernetes_gets_safe_sysctls_of_a_pod() {
    let text = print("kubernetes", "");
    let Some(pod) = yaml("fix_print::kubernetes_gets_safe_sysctls_of_a_pod", &text) else { return };
    assert_eq!((&pod["apiVersion"], &pod["kind"]), (&"v1".into(), &"Pod".into()));
    let sysctls = pod["spec"]["securityContext"]["sysctls"].as_array().unwrap();
    let names: Vec<&str> = sysctls.iter().map(|sysctl| sysctl["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports"]);
    // A value that is not a string is an error for Kubernetes.
    assert!(sysctls.iter().all(|sysctl| sysctl["value"].is_string()), "{text}");
}

#[test]
fn the_sysctls_can_be_applied() {
    in_namespace(|| {
        if !has("fix_print::the_sysctls_can_be_applied", "sysctl", &["--version"]) {
            return;
        }
        let backend = Backend::start(true);
        // Outside of the default range, which has the port of the backend.
        set_sysctl("net.ipv4.ip_local_reserved_ports", "9000-9099,9200");
        let temp = TempDir::new();
        output(Command::new("sysctl").args(["-p", &temp.file("90-fourtuple.conf", &print("sysctl", ""))]));
        let read = |name: &str| {
            let text = fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap();
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(read("ip_local_port_range"), "1024 65535");
        assert_eq!(read("tcp_tw_reuse"), "1");
        let mut blocks = ["9000-9099".to_owned(), "9200".to_owned(), backend.address.port().to_string()];
        blocks.sort_by_key(|block| block.split('-').next().unwrap().parse::<u16>().unwrap());
        assert_eq!(read("ip_local_reserved_ports"), blocks.join(","));
    });
}

#[test]
fn systemd_accepts_the_unit() {
    if !has("fix_print::systemd_accepts_the_unit", "systemd-analyze", &["--version"]) {
        return;
    }
    let temp = TempDir::new();
    let service = "[Service]\nExecStart=/bin/true\n";
    temp.file("fourtuple-test-web.service", service);
    for (flags, name) in [
        (
            "--unit fourtuple-test-web --source 127.0.0.8/30 --to 192.0.2.7:443",
            "fourtuple-fourtuple-test-web.service",
        ),
        ("", "fourtuple-fix-ports@fourtuple-test-web.service"),
    ] {
        let unit = print("systemd", flags);
        assert!(unit.contains(&format!("ExecStart={}", env!("CARGO_BIN_EXE_fourtuple"))), "{unit}");
        let path = temp.file(name, &unit);
        let said = output(
            Command::new("systemd-analyze")
                .args(["verify", "--man=no", &path])
                .env("SYSTEMD_UNIT_PATH", format!("{}:", temp.path().display())),
        );
        // A word that systemd does not know is a warning.
        assert!(!said.contains(name), "{said}");
    }
}

#[test]
fn the_capabilities_of_the_unit_are_enough() {
    in_own_namespace(|test| {
        if !program::is_root() || !has(test, "setpriv", &["--version"]) {
            return;
        }
        let Some(cgroup) = Cgroup::new(test, "capabilities") else { return };
        let itself = run(&mut fourtuple(&cgroup.flags("--for 1ms --json --quiet")));
        if itself.code == 4 {
            return skip(test, "bpf", itself.line());
        }
        let unit = print("systemd", "");
        let line = unit.lines().find_map(|line| line.strip_prefix("AmbientCapabilities=")).unwrap();
        let names = capabilities(line);
        let limited = Limited::new();
        let flags = cgroup.flags("--for 1ms --json --quiet");
        let ended = |capabilities: &[String]| run(&mut limited.command(capabilities, &flags));
        let all = ended(&names);
        assert_eq!(all.code, 0, "{all:?}");
        // The addresses and ports of the own network namespace are known without CAP_SYS_ADMIN.
        let (_listener, destination) = fourtuple_testing::listener("127.0.0.1", 64);
        let Some(mut client) = Client::start(test, &cgroup) else { return };
        // A destination with a connection is known at the start.
        client.connect("127.0.0.1", destination.port(), 1);
        let fixing = &mut limited.command(&names, &cgroup.flags("--json"));
        let Some(child) = attached_by(test, fixing) else { return };
        assert_eq!(client.connect("127.0.0.1", destination.port(), 20).0, 0);
        let record = record_of(child);
        assert_eq!(record["results"]["left"], serde_json::json!({ "below": 20 }), "{record:#}");
        drop(client);
        for (index, without) in names.iter().enumerate() {
            let mut fewer = names.clone();
            fewer.remove(index);
            let refused = ended(&fewer);
            assert_eq!(refused.code, 4, "without {without}: {refused:?}");
            let missing = format!("lacks CAP_{}", without.trim_start_matches('+').to_uppercase());
            assert!(refused.line().contains(&missing), "without {without}: {refused:?}");
        }
    });
}

#[test]
fn every_program_is_in_the_help_and_prints() {
    let help = run(&mut fourtuple("fix --help")).stdout;
    for program in Program::ALL {
        assert!(help.contains(&format!("- {}:", program.name)), "{help}");
        let text = print(program.name, "");
        assert!(text.lines().count() > 10, "{text}");
    }
}

#[test]
fn bad_flags_are_refused_in_one_line() {
    for (flags, words) in [
        ("--print", "--print"),
        ("--print apache", "nginx, haproxy, envoy, kubernetes, systemd, sysctl, go, python, netty"),
        ("--to 192.0.2.1:443", "--print"),
        ("--print nginx --to localhost", "--to"),
        ("--print nginx --source 192.0.2.0/33", "is not a prefix"),
        ("--print nginx --source 203.0.113.0/30", "no address of it is local"),
        ("--print nginx --source ::1 --to 192.0.2.1:443", "IP version"),
        ("--print nginx --unit nginx", "'--unit' has no effect with '--print nginx'"),
        ("--print sysctl --to 192.0.2.1:443", "'--to' has no effect with '--print sysctl'"),
        ("--print systemd --unit a%b", "is not the name of a unit"),
        ("--print nginx ports --pid 1", "ports"),
    ] {
        refused(&mut fourtuple(&format!("fix {flags}")), &[words]);
    }
}
