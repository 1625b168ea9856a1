//! `fourtuple export`: bounded labels, a real Prometheus, and the live page in a browser.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::program;
use crate::program::{Running, TempDir, fourtuple, in_own_namespace, run, until};
use fourtuple_syscalls::{option, socket};
use fourtuple_testing::{in_namespace, set_sysctl, skip};
use serde_json::Value;

/// Starts the exporter in the namespace of this thread and waits for its first reading.
fn export(address: &str, flags: &str) -> Running {
    let arguments = format!("export --listen {address} --every 200ms {flags}");
    let exporter = Running::start(&mut fourtuple(&arguments));
    until("the endpoint answers", || TcpStream::connect(address).is_ok());
    // The endpoint answers before the programs are attached, and says nothing yet.
    until("it has read", || get(address, "/metrics").contains("fourtuple_accept_queue_length"));
    exporter
}

/// Sends SIGINT, as Ctrl-C does.
fn interrupt(process: u32) {
    let killed = Command::new("kill").args(["-INT", &process.to_string()]).status();
    assert!(killed.is_ok_and(|status| status.success()));
}

/// Returns the body of a response.
fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(program::DEADLINE)).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split_once("\r\n\r\n").expect("a response has a body").1.to_owned()
}

/// Connections to several destinations, and the listener that holds their other ends.
struct Traffic {
    _listener: TcpListener,
    _streams: Vec<TcpStream>,
}

fn traffic(destinations: u8) -> Traffic {
    let listener = TcpListener::bind("0.0.0.0:80").unwrap();
    let streams = (1..=destinations)
        .flat_map(|number| {
            // The first destinations have the most connections.
            (0..=destinations - number)
                .map(move |_| TcpStream::connect(SocketAddr::from(([127, 0, 1, number], 80))).unwrap())
        })
        .collect();
    Traffic { _listener: listener, _streams: streams }
}

#[test]
fn labels_are_bounded_and_the_rest_is_other() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20999");
        let _traffic = traffic(12);
        // A snapshot lists 100 tuples.
        let _further = TcpListener::bind("0.0.0.0:81").unwrap();
        let _small: Vec<TcpStream> = (1..=100)
            .map(|number| TcpStream::connect((Ipv4Addr::new(127, 0, 2, number), 81)).unwrap())
            .collect();
        let address = "127.0.0.1:4900";
        let mut exporter = export(address, "--no-trace --destinations 3");
        let mut text = String::new();
        let other =
            "fourtuple_ports_used{destination=\"other\",source=\"other\",state=\"established\"} 145\n";
        // A reading may see the connection of this test to the exporter, too.
        until("all connections are counted", || {
            text = get(address, "/metrics");
            let first = "fourtuple_ports_available{destination=\"127.0.1.1:80\",source=\"127.0.0.1\"} 988\n";
            let queue = "fourtuple_accept_queue_length{listener=\"0.0.0.0:80\"} 78\n";
            [first, other, queue].iter().all(|line| text.contains(line))
        });
        let used: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("fourtuple_ports_used{") && line.contains("established"))
            .collect();
        assert_eq!(used.len(), 4, "{text}");
        assert!(text.contains("fourtuple_unchecked_rules{id=\"P07\"} 1\n"), "nothing is traced: {text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
        interrupt(exporter.id());
        let ended = exporter.end();
        assert_eq!(ended.code, 0, "{ended:?}");
        assert!(ended.stderr.contains("http://127.0.0.1:4900/metrics"), "{ended:?}");
    });
}

/// The alert on exhausted ports is on this metric.
#[test]
fn a_held_port_is_not_available() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20199");
        let _held = TcpListener::bind("127.0.0.9:20050").unwrap();
        let (_listener, to) = fourtuple_testing::listener("127.0.0.1", 400);
        let streams: Vec<TcpStream> = std::iter::from_fn(|| TcpStream::connect(to).ok()).collect();
        assert_eq!(streams.len(), 199);
        let address = "127.0.0.1:4900";
        let _exporter = export(address, "--no-trace");
        let line = format!("fourtuple_ports_available{{destination=\"{to}\",source=\"127.0.0.1\"}} 0\n");
        until("no port is available", || get(address, "/metrics").contains(&line));
    });
}

/// Only the trace of connect() sees these failures; the exporter reports each in the reading after it.
#[test]
fn connects_that_find_no_port_are_a_finding() {
    in_own_namespace(|test| {
        let namespace = fs::metadata("/proc/thread-self/ns/net").unwrap().ino() as u32;
        if let Err(reason) = fourtuple_observe::trace::Survey::attach(namespace).times().search {
            return skip(test, "bpf", &reason);
        }
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
        let (listener, to) = fourtuple_testing::listener("127.0.0.1", 64);
        let address = "127.0.0.1:4900";
        let mut exporter = export(address, "");
        let found = || get(address, "/metrics").contains("fourtuple_findings{id=\"P07\"");
        assert!(!found());
        // `export` checks the same rules as `doctor`.
        let unchecked =
            |id| get(address, "/metrics").contains(&format!("fourtuple_unchecked_rules{{id=\"{id}\"}}"));
        for id in ["A07", "L03", "P07", "P09"] {
            assert!(!unchecked(id), "{id}");
        }
        let locks = fourtuple_observe::trace::Survey::attach(namespace).window().locks;
        assert_eq!(unchecked("L01"), locks.is_err(), "{locks:?}");
        until("P07 is found", || {
            let open: Vec<TcpStream> = (0..8).map_while(|_| TcpStream::connect(to).ok()).collect();
            let is_full = TcpStream::connect(to).is_err();
            // The ports are free before they are looked at: of ports that stay in use P01 says the same, and P07 is silent.
            for stream in &open {
                option::set_reset_on_close(stream.as_fd()).unwrap();
                drop(socket::accept_nonblocking(listener.as_fd()).unwrap());
            }
            drop(open);
            is_full && found()
        });
        // Without further failures, the finding ends.
        until("P07 is over", || !found());
        exporter.kill();
    });
}

#[test]
fn symptoms_without_an_explanation_are_counted() {
    in_namespace(|| {
        let address = "127.0.0.1:4900";
        let _exporter = export(address, "--no-trace");
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        let metric = "fourtuple_unexplained_events";
        let start = format!("{metric}_total{{process=\"\",symptom=\"Udp.NoPorts\"}} ");
        let number = || {
            let text = get(address, "/metrics");
            let line = text.lines().find_map(|line| line.strip_prefix(&start))?;
            assert!(text.contains(&format!("# HELP {metric} ")), "{text}");
            assert!(text.contains(&format!("# TYPE {metric} counter\n")), "{text}");
            Some(line.parse::<u64>().expect("a number"))
        };
        assert_eq!(number(), None);
        let mut first = None;
        until("datagrams without a port are counted, and then more of them", || {
            // More than 50 a second, and no socket has the port.
            (0..200).for_each(|_| drop(sender.send_to(b"?", "127.0.0.1:9")));
            let now = number();
            first = first.or(now);
            now > first
        });
    });
}

#[test]
fn a_taken_address_is_one_line() {
    in_namespace(|| {
        let _taken = TcpListener::bind("127.0.0.1:4901").unwrap();
        let ended = run(&mut fourtuple("export --listen 127.0.0.1:4901 --no-trace"));
        assert_eq!(ended.code, 4, "{ended:?}");
        assert!(ended.line().contains("--listen 127.0.0.1:4901"), "{ended:?}");
    });
}

/// The directory of files for other programs.
fn contrib() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib"))
}

#[test]
fn promtool_accepts_the_alert_rules() {
    for arguments in [["check", "rules", "fourtuple.rules.yml"], ["test", "rules", "fourtuple.test.yml"]] {
        let mut promtool = Command::new("promtool");
        let output = promtool.current_dir(contrib().join("prometheus")).args(arguments).output();
        let Ok(output) = output else {
            return skip("promtool_accepts_the_alert_rules", "programs", "no promtool");
        };
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && said.contains("SUCCESS"), "{arguments:?}: {said}");
    }
}

#[test]
fn prometheus_scrapes_metrics_and_loads_the_rules() {
    let name = "prometheus_scrapes_metrics_and_loads_the_rules";
    if Command::new("prometheus").arg("--version").output().is_err() {
        return skip(name, "programs", "no prometheus");
    }
    in_namespace(|| {
        let _traffic = traffic(2);
        let _exporter = export("127.0.0.1:4902", "--no-trace");
        let temp = TempDir::new();
        let rules = contrib().join("prometheus/fourtuple.rules.yml");
        let config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\nrule_files: [{}]\n\
             scrape_configs: [{{job_name: fourtuple, static_configs: [{{targets: ['127.0.0.1:4902']}}]}}]\n",
            fs::canonicalize(rules).unwrap().display()
        );
        let mut prometheus = Command::new("prometheus");
        prometheus
            .arg(format!("--config.file={}", temp.file("prometheus.yml", &config)))
            .arg(format!("--storage.tsdb.path={}", temp.join("data")))
            .arg("--web.listen-address=127.0.0.1:4903")
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let _prometheus = Running::start(&mut prometheus);
        until("prometheus answers", || TcpStream::connect("127.0.0.1:4903").is_ok());
        let mut answer = Value::Null;
        until("prometheus has scraped", || {
            let query = "/api/v1/query?query=fourtuple_accept_queue_length";
            answer = serde_json::from_str(&get("127.0.0.1:4903", query)).unwrap_or_default();
            answer["data"]["result"][0]["value"][1] == "3"
        });
        assert_eq!(answer["data"]["result"][0]["metric"]["listener"], "0.0.0.0:80");
        // It may scrape before it has loaded the rules.
        let mut rules = Value::Null;
        until("prometheus has rules", || {
            rules = serde_json::from_str(&get("127.0.0.1:4903", "/api/v1/rules")).unwrap();
            rules["data"]["groups"][0]["rules"].is_array()
        });
        assert_eq!(rules["data"]["groups"][0]["rules"].as_array().map(Vec::len), Some(7), "{rules}");
        // A busy machine may delay the latest answer beyond the time of a scrape.
        until("a scrape has no error", || {
            let targets = get("127.0.0.1:4903", "/api/v1/targets");
            serde_json::from_str::<Value>(&targets).unwrap()["data"]["activeTargets"][0]["lastError"] == ""
        });
    });
}

#[test]
fn the_dashboard_uses_metrics_that_exist() {
    let text = fs::read_to_string(contrib().join("grafana/fourtuple.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(dashboard["panels"].as_array().map(Vec::len), Some(8));
    let source = include_str!("../../src/commands/export.rs");
    let names = text.split("fourtuple_").skip(1).map(|rest| {
        let end = rest.find(|letter: char| !letter.is_ascii_lowercase() && letter != '_');
        rest[..end.unwrap_or(rest.len())].trim_end_matches("_bucket")
    });
    for name in names {
        assert!(source.contains(&format!("\"{name}\"")), "no metric {name}");
    }
}

/// What the browser of the next test has asked for.
#[derive(Default)]
struct Asked {
    done: AtomicBool,
    end: AtomicBool,
}

/// Answers the browser of the next test: `/outer` is a page with the live page in a frame of the width of a phone, `/wait` is answered
/// after a request for `/done`, and every other request goes to the exporter; after a request for `/end` there are no events any more, as
/// if it had ended. The browser sees one origin, so that the outer page may read the frame.
fn front(address: SocketAddr, exporter: &'static str) {
    let listener = TcpListener::bind(address).unwrap();
    let asked = Arc::new(Asked::default());
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let asked = Arc::clone(&asked);
            thread::spawn(move || answer(stream, exporter, &asked));
        }
    });
}

/// The image delays the end of the load, and so the output of the browser. After its first update the page in the frame has a zoomed
/// chart and an open list; two updates later the outer page looks whether they are still there, and then takes the server away.
const OUTER: &str = "<!DOCTYPE html><html><body><iframe src=\"/\" width=\"360\" height=\"800\"></iframe><img src=\"/wait\"><script>\
    const root = document.documentElement, page = () => document.querySelector('iframe').contentDocument;\
    const frame = () => page()?.documentElement, updates = () => Number(frame()?.dataset.updates ?? 0);\
    const once = (is, then) => is() ? then() : setTimeout(() => once(is, then), 20);\
    once(() => updates() >= 1, () => {\
        const figures = [...page().querySelectorAll('figure[data-chart]')], list = page().querySelector('article details');\
        const [first, second] = figures.map((figure) => figure.querySelector('.u-over')), box = first.getBoundingClientRect();\
        const middle = { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2 };\
        first.dispatchEvent(new WheelEvent('wheel', { ...middle, deltaY: -400, ctrlKey: true, bubbles: true, cancelable: true }));\
        list.open = true;\
        const before = updates();\
        once(() => updates() >= before + 2, () => {\
            const is = (figure) => figure.isConnected && figure.hasAttribute('data-zoomed');\
            root.setAttribute('zoomed', figures.map(is).join(' '));\
            root.setAttribute('kept', [list.isConnected && list.open, second.isConnected].join(' '));\
            root.setAttribute('axes', page().querySelector('.u-wrap').getAttribute('aria-label'));\
            const said = page().querySelector('main > [role=status]'), finding = page().querySelector('.finding').textContent;\
            root.setAttribute('said', [said.ariaLive, said.textContent.slice(0, 8) === finding.slice(0, 8)].join(' '));\
            for (const a of frame().attributes) root.setAttribute('in-' + a.name, a.value);\
            fetch('/end');\
            once(() => frame().hasAttribute('data-stale'), () => {\
                root.setAttribute('lost', frame().querySelector('.live').textContent); fetch('/done'); });\
        });\
    });</script></body></html>";

fn answer(mut stream: TcpStream, exporter: &str, asked: &Asked) {
    let mut head = String::new();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    while !head.ends_with("\r\n\r\n") {
        if !matches!(reader.read_line(&mut head), Ok(length) if length > 0) {
            return;
        }
    }
    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
    match path.as_str() {
        "/wait" => until("the page has had its updates", || asked.done.load(Ordering::Relaxed)),
        "/done" => asked.done.store(true, Ordering::Relaxed),
        "/end" => asked.end.store(true, Ordering::Relaxed),
        _ => {}
    }
    if ["/wait", "/done", "/end", "/outer"].contains(&path.as_str()) {
        let length = OUTER.len();
        let _ = write!(
            stream,
            "HTTP/1.0 200 OK\r\nContent-Type: text/html\r\nContent-Length: {length}\r\n\r\n{OUTER}"
        );
        return;
    }
    let mut behind = TcpStream::connect(exporter).unwrap();
    // The browser closes the stream of events when it ends.
    let _ = write!(behind, "GET {path} HTTP/1.0\r\n\r\n");
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = behind.read(&mut buffer) {
        let has_ended = path == "/events" && asked.end.load(Ordering::Relaxed);
        if has_ended || stream.write_all(&buffer[..length]).is_err() {
            return;
        }
    }
}

#[test]
fn the_live_page_updates_itself_in_a_browser() {
    let test = "the_live_page_updates_itself_in_a_browser";
    in_namespace(move || {
        let _traffic = traffic(6);
        let _exporter = export("127.0.0.1:4904", "--no-trace");
        front(([127, 0, 0, 1], 4905).into(), "127.0.0.1:4904");
        let temp = TempDir::new();
        let output = Command::new("chromium")
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"])
            .args(["--disable-background-networking", "--disable-component-update"])
            .arg(format!("--user-data-dir={}", temp.join("profile")))
            .args(["--dump-dom", "http://127.0.0.1:4905/outer"])
            .stderr(Stdio::null())
            .output();
        let Ok(output) = output else { return skip(test, "chromium", "no chromium in PATH") };
        let dom = String::from_utf8_lossy(&output.stdout);
        let attributes = &dom[dom.find("<html").expect("a document")..];
        let attributes = &attributes[..attributes.find('>').unwrap()];
        assert!(attributes.contains("in-data-updates=\""), "the page had no updates: {attributes}");
        for wrong in ["in-data-errors", "in-data-overflow", "in-data-stale"] {
            assert!(!attributes.contains(wrong), "{attributes}");
        }
        assert!(attributes.contains("in-data-drawn=\"2\""), "{attributes}");
        assert!(attributes.contains("lost=\"The server has not answered since "), "{attributes}");
        // The second chart was not zoomed, and shows all of the longer time.
        for kept in ["zoomed=\"true false\"", "kept=\"true true\"", "said=\"polite true\""] {
            assert!(attributes.contains(kept), "{kept}: {attributes}");
        }
        assert!(attributes.contains("axes=\"ports in use against time of day ("), "{attributes}");
        let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert!(get("127.0.0.1:4904", "/").contains(&format!("on <strong>{}</strong>", name.trim())));
    });
}
