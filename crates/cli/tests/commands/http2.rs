//! `fourtuple load --http2` against real servers: what it counts is what they log.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::program::situation::{Daemon, envoy, has, nginx, wait_for};
use crate::program::{Running, TempDir, fourtuple, list, loaded, number, run, text, unanswered, until};
use fourtuple_syscalls::child;
use fourtuple_testing::in_namespace;
use fourtuple_testing::process::until_expected;
use serde_json::Value;

const PORT: u16 = 4_000;

/// Writes a certificate for 127.0.0.1 and its key, and returns their paths.
fn certificate(temp: &TempDir) -> (String, String) {
    let key = rcgen::KeyPair::generate().unwrap();
    let parameters = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
    let certificate = parameters.self_signed(&key).unwrap();
    (temp.file("cert.pem", &certificate.pem()), temp.file("key.pem", &key.serialize_pem()))
}

/// nginx with HTTP/2, which ends connections after 100 requests with GOAWAY, and its access log.
struct Nginx {
    _daemon: Daemon,
    log: String,
}

impl Nginx {
    fn start(temp: &TempDir, streams: u32) -> Nginx {
        let (certificate, key) = certificate(temp);
        let log = temp.join("access.log");
        let server = format!(
            "server {{\naccess_log {log};\nlisten 127.0.0.1:{PORT} ssl http2;\nssl_certificate {certificate};\n\
             ssl_certificate_key {key};\nkeepalive_requests 100;\nhttp2_max_concurrent_streams {streams};\n\
             location / {{ return 200 'ok'; }}\nlocation /missing {{ return 404; }}\n}}\n"
        );
        let daemon = nginx(temp, "nginx", 0, None, &server);
        wait_for("127.0.0.1", PORT);
        Nginx { _daemon: daemon, log }
    }

    /// Returns the number of requests since the last call, once there are as many as expected: nginx writes a line after the
    /// response.
    fn requests(&self, expected: u64) -> u64 {
        let lines = || fs::read_to_string(&self.log).unwrap();
        until("nginx has logged all requests", || lines().lines().count() as u64 >= expected);
        let lines = lines();
        fs::write(&self.log, "").unwrap();
        assert!(lines.lines().all(|line| line.contains("HTTP/2.0")), "{lines}");
        lines.lines().count() as u64
    }
}

fn http2(record: &Value, field: &str) -> u64 {
    number(&record["results"]["http2"], field)
}

#[test]
fn requests_equal_the_log_of_nginx() {
    in_namespace(|| {
        if !has("http2::requests_equal_the_log_of_nginx", &["nginx"]) {
            return;
        }
        let temp = TempDir::new();
        let nginx = Nginx::start(&temp, 16);
        for (flags, asked, connections) in [
            ("--connections 1 --streams 8", 950, 10),
            ("--connections 4 --streams 30", 2000, 20),
            ("--connections 3 --streams 5 --close-every 40", 600, 15),
            ("--connections 2 --streams 10 --rate 2000/s --arrival even", 1000, 10),
            ("--connections 4 --streams 2 --threads 2", 500, 5),
        ] {
            let line = format!(
                "load https://127.0.0.1:{PORT}/ --insecure --http2 {flags} --operations {asked} --for 60s --json"
            );
            let record = loaded(&mut fourtuple(&line));
            let results = &record["results"];
            let operations = number(results, "operations");
            assert_eq!((operations, nginx.requests(asked)), (asked, asked), "{flags}: {results:#}");
            assert_eq!((&results["errors"], text(results, "engine")), (&serde_json::json!({}), "h2"));
            // Those that were open last may have served less.
            let range = connections..=2 * connections + 8;
            assert!(range.contains(&number(results, "connections")), "{flags}: {results:#}");
            assert!(http2(&record, "server_limit") == 16 && http2(&record, "most_streams") <= 16);
            // A connection that nginx ends after 100 requests has a GOAWAY.
            assert!(flags.contains("close-every") || http2(&record, "goaways") > 0, "{flags}: {results:#}");
        }
        let line = format!("load https://127.0.0.1:{PORT}/missing --insecure --http2 --operations 50 --json");
        let record = run(&mut fourtuple(&line)).json();
        assert_eq!(number(&record["results"]["errors"], "status-404"), 50);
        assert_eq!(nginx.requests(50), 50);
        let lines = "{\"path\": \"/a\"}\n{\"method\": \"PUT\", \"path\": \"/b\", \"body\": \"0123456789\"}\n{\"path\": \"/c\"}\n";
        let file = temp.file("list", lines);
        let line = format!(
            "load https://127.0.0.1:{PORT}/ --insecure --http2 --streams 7 --requests {file} --operations 330 --json"
        );
        let record = loaded(&mut fourtuple(&line));
        let counts = list(&record["results"], "/requests");
        let counts: Vec<u64> = counts.iter().map(|one| number(one, "responses")).collect();
        assert_eq!(counts, [110; 3], "{record:#}");
        until("nginx has logged all requests", || lines_with(&nginx.log, "HTTP/2.0") == 330);
        let logged = ["\"GET /a ", "\"PUT /b ", "\"GET /c "].map(|words| lines_with(&nginx.log, words));
        assert_eq!(logged, [110; 3]);
    });
}

/// Returns the number of operations of the warm-up, or of those of all steps of a ramp.
fn warm_up(results: &Value) -> u64 {
    let steps = results["steps"].as_array().into_iter().flatten();
    let of_steps = steps.filter_map(|step| step["warm_up_operations"].as_u64()).sum::<u64>();
    of_steps + results["warm_up"]["operations"].as_u64().unwrap_or(0)
}

/// The parts of a run are those of HTTP/1: the warm-up, the steps of a ramp, and a row for each second.
#[test]
fn the_parts_of_a_run_add_up_to_the_log_of_nginx() {
    in_namespace(|| {
        if !has("http2::the_parts_of_a_run_add_up_to_the_log_of_nginx", &["nginx"]) {
            return;
        }
        let temp = TempDir::new();
        let nginx = Nginx::start(&temp, 16);
        let rows = temp.join("rows.csv");
        let load = |flags: &str| {
            let target =
                format!("load https://127.0.0.1:{PORT}/ --insecure --http2 --connections 2 --streams 5");
            let once = || {
                fs::write(&nginx.log, "").unwrap();
                let ended = run(&mut fourtuple(&format!("{target} {flags} --json")));
                assert!([0, 3].contains(&ended.code), "{ended:?}");
                ended.json()
            };
            // The warm-up may be over before the first answer.
            let is_warm = |record: &Value| !flags.contains("--warm-up") || warm_up(&record["results"]) > 0;
            let record = until_expected(20, once, |record| unanswered(record) == 0 && is_warm(record));
            assert_eq!(record["results"]["errors"], serde_json::json!({}), "{record:#}");
            record["results"].clone()
        };
        let results = load("--warm-up 300ms --operations 400");
        let warm_up = number(&results["warm_up"], "operations");
        assert!(number(&results, "operations") == 400 && warm_up > 0, "{results:#}");
        assert_eq!(nginx.requests(400 + warm_up), 400 + warm_up, "{results:#}");

        let results = load("--ramp 100/s..400/s:3 --warm-up 100ms --for 500ms");
        let steps = list(&results, "/steps");
        let of = |field: &str| steps.iter().map(|step| number(step, field)).sum::<u64>();
        let done = of("operations") + of("warm_up_operations");
        assert!(!steps.is_empty() && of("warm_up_operations") > 0, "{results:#}");
        assert_eq!(nginx.requests(done), done, "{results:#}");

        let results = load(&format!("--rate 300/s --for 2500ms --csv {rows}"));
        let text = fs::read_to_string(&rows).unwrap();
        let operations =
            text.lines().skip(1).map(|row| row.split(',').nth(1).unwrap().parse::<u64>().unwrap());
        let operations: u64 = operations.sum();
        assert_eq!((operations, nginx.requests(operations)), (number(&results, "operations"), operations));
    });
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts nghttpd without TLS, which prints each frame.
fn nghttpd(temp: &TempDir) -> (Killed, String) {
    temp.file("index.html", "ok");
    let log = temp.join("log");
    let mut command = Command::new("nghttpd");
    command.args(["--no-tls", "-v", "-d"]).arg(temp.path()).arg(PORT.to_string());
    let output = fs::File::create(&log).unwrap();
    let child = command.stdin(Stdio::null()).stdout(output).stderr(Stdio::null()).spawn().unwrap();
    let killed = Killed(child);
    wait_for("127.0.0.1", PORT);
    (killed, log)
}

fn lines_with(log: &str, words: &str) -> usize {
    let text = fs::read(Path::new(log)).unwrap();
    String::from_utf8_lossy(&text).lines().filter(|line| line.contains(words)).count()
}

#[test]
fn requests_equal_the_frames_of_nghttpd() {
    in_namespace(|| {
        if !has("http2::requests_equal_the_frames_of_nghttpd", &["nghttpd"]) {
            return;
        }
        let temp = TempDir::new();
        let (_server, log) = nghttpd(&temp);
        let mut before = 0;
        for flags in
            ["--connections 2 --streams 20", "--connections 1 --streams 3 --rate 1000/s", "--close-every 7"]
        {
            let target = format!("http://127.0.0.1:{PORT}/index.html");
            let line = format!("load {target} --http2 {flags} --operations 300 --for 60s --json");
            let record = loaded(&mut fourtuple(&line));
            assert_eq!(number(&record["results"], "operations"), 300);
            until("nghttpd has printed all requests", || lines_with(&log, ":method: GET") >= before + 300);
            before += 300;
            assert_eq!(lines_with(&log, ":method: GET"), before, "{flags}");
        }
    });
}

/// Returns a counter of Envoy's statistics.
fn statistic(name: &str) -> u64 {
    let url = format!("http://127.0.0.1:{}/stats?filter=http.front.{name}$", PORT + 1);
    let output = Command::new("curl").args(["-s", &url]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let value = text.trim().rsplit(' ').next().and_then(|number| number.parse().ok());
    value.unwrap_or_else(|| panic!("{name}: {text}"))
}

#[test]
fn requests_equal_the_statistics_of_envoy() {
    in_namespace(|| {
        if !has("http2::requests_equal_the_statistics_of_envoy", &["envoy", "curl"]) {
            return;
        }
        let temp = TempDir::new();
        let _envoy = envoy(&temp, PORT, 2);
        // The connection that waited for the listener counts too.
        let counts =
            || ["downstream_rq_2xx", "downstream_rq_http2_total", "downstream_cx_http2_total"].map(statistic);
        for flags in [
            "--connections 2 --streams 20",
            "--connections 1 --streams 3 --rate 1000/s",
            "--connections 2 --streams 5 --close-every 50",
        ] {
            let before = counts();
            let line =
                format!("load http://127.0.0.1:{PORT}/ --http2 {flags} --operations 300 --for 60s --json");
            let record = loaded(&mut fourtuple(&line));
            let results = &record["results"];
            assert_eq!(number(results, "operations"), 300);
            let connections = number(results, "connections");
            let expected = [before[0] + 300, before[1] + 300, before[2] + connections];
            until("Envoy has counted all requests", || counts()[0] >= expected[0]);
            assert_eq!(counts(), expected, "{flags}: {results:#}");
        }
    });
}

#[test]
fn sigint_keeps_what_was_measured() {
    in_namespace(|| {
        if !has("http2::sigint_keeps_what_was_measured", &["nginx"]) {
            return;
        }
        let temp = TempDir::new();
        let nginx = Nginx::start(&temp, 16);
        let line = format!(
            "load https://127.0.0.1:{PORT}/ --insecure --http2 --connections 2 --streams 4 --for 60s --json"
        );
        let mut running = Running::start(&mut fourtuple(&line));
        until("it has sent requests", || fs::metadata(&nginx.log).is_ok_and(|log| log.len() > 10_000));
        child::interrupt(running.id()).unwrap();
        let ended = running.end();
        assert_eq!(ended.code, 3, "{ended:?}");
        let record = ended.json();
        assert_eq!(list(&record, "/validity")[0]["id"], "interrupted");
        let operations = number(&record["results"], "operations");
        // At most one request of each stream is without its response.
        let logged = nginx.requests(operations);
        assert!(operations > 50 && (operations..=operations + 8).contains(&logged), "{operations}, {logged}");
    });
}

#[test]
fn ports_are_those_of_connections() {
    in_namespace(|| {
        if !has("http2::ports_are_those_of_connections", &["nginx"]) {
            return;
        }
        fourtuple_testing::set_sysctl("net.ipv4.ip_local_port_range", "50000 50007");
        let temp = TempDir::new();
        let _nginx = Nginx::start(&temp, 128);
        // 160 requests at a time do not fit into 8 ports, and on two connections they do.
        let target = format!("https://127.0.0.1:{PORT}/");
        let flags = "--insecure --operations 160 --source 127.0.0.2 --strategy full-range --json";
        let line = format!("load {target} {flags} --http2 --connections 2 --streams 80");
        let record = loaded(&mut fourtuple(&line));
        let ports = &record["results"]["ports"];
        assert!(number(ports, "needed") <= 4 && number(ports, "used") <= 4, "{ports:#}");
        let ended = run(&mut fourtuple(&format!("load {target} {flags} --connections 160")));
        assert_eq!(ended.code, 3, "{ended:?}");
        assert!(ended.line().contains("160"), "{ended:?}");
    });
}
