//! Requests that an agent refuses; each refusal is in its log.

use crate::program::{TempDir, fourtuple, number, run};
use crate::{LocalFleet, Process, RawClient, TARGET, fleet, with_fleet};
use fourtuple_testing::in_namespace;
use serde_json::{Value, json};

#[test]
fn a_target_outside_allow_target_is_refused() {
    with_fleet(|local| {
        let (a, b) = (local.agent("a", ""), local.agent("b", "--allow-target 127.0.0.2/32"));
        let refused = |target: &str, workers: u32| {
            let ended =
                run(&mut fourtuple(&format!("fleet load --workers {workers} -- load {target} --for 1s")));
            assert_eq!(ended.code, 3, "{ended:?}");
            ended.line().to_owned()
        };
        let line = refused("tcp://192.0.2.1:9", 1);
        assert!(line.contains("a: the target 192.0.2.1 is outside --allow-target"), "{line}");
        a.until_said("refused prepare: the target 192.0.2.1");
        // One refusal refuses the run, and names the host.
        let line = refused(TARGET, 2);
        assert!(line.contains("b: the target 127.0.0.1 is outside --allow-target"), "{line}");
        b.until_said("refused prepare: the target 127.0.0.1");
        let line = refused("unix:/run/docker.sock", 1);
        assert!(line.contains("/run/docker.sock"), "{line}");
        assert!(!a.has_said("accepted start") && !b.has_said("accepted start"));
    });
}

#[test]
fn commands_outside_allow_are_refused() {
    with_fleet(|local| {
        let a = local.agent("a", "--allow load,doctor");
        let serve = "serve -- serve crr --listen 127.0.0.1:4001 --for 30s";
        for (line, command) in [(serve, "serve"), ("plan", "plan"), ("lab ports", "lab")] {
            let ended = run(&mut fourtuple(&format!("fleet {line}")));
            assert_eq!(ended.code, 3, "{ended:?}");
            assert!(ended.stdout.contains(&format!("--allow {command}")), "{ended:?}");
            a.until_said(&format!("start it with --allow {command}"));
        }
        assert!(std::net::TcpStream::connect("127.0.0.1:4001").is_err(), "nothing listens");
    });
}

#[test]
fn servers_listen_within_allow_target_only() {
    with_fleet(|local| {
        let a = local.agent("a", "");
        for listen in ["0.0.0.0:4001", "192.0.2.1:4001", "[::]:4001"] {
            let ended = run(&mut fourtuple(&format!("fleet serve -- serve crr --listen {listen} --for 30s")));
            assert_eq!(ended.code, 3, "{ended:?}");
            assert!(ended.stdout.contains("outside --allow-target"), "{ended:?}");
        }
        a.until_said("refused serve: the target 0.0.0.0 is outside --allow-target");
        let mut client = RawClient::connect();
        let agent = client.agent();
        let session = client.session(&agent);
        // What the command line cannot express is refused by the agent too.
        let mut settings = json!({
            "listen": "127.0.0.1:4001", "protocol": "crr", "workers": 1, "close": "client", "service": "0s", "spin": false,
            "stall_length_ns": null, "backlog": 1, "defer_accept": false, "pin": false, "for_ns": null, "seed": 1
        });
        let mut sequence = 0;
        let mut refused = |settings: &serde_json::Value, says: &str| {
            sequence += 1;
            let request = json!({ "kind": "serve", "settings": settings });
            let (header, _) = client.ask(&agent, &session, sequence, request);
            assert!(header.contains(says), "{header}");
        };
        refused(&settings, "needs a deadline");
        settings["for_ns"] = 1_000_000_000.into();
        settings["listen"] = "unix:/tmp/x".into();
        refused(&settings, "listens on no such address");
        settings["listen"] = "127.0.0.1:4001".into();
        settings["protocol"] = "--html=/tmp/x".into();
        refused(&settings, "the setting protocol is invalid");
    });
}

#[test]
fn replayed_requests_are_refused() {
    with_fleet(|local| {
        let a = local.agent("a", "");
        let mut client = RawClient::connect();
        let agent = client.agent();
        let session = client.session(&agent);
        let stop = json!({ "kind": "stop", "run": "r" });
        let (header, _) = client.ask(&agent, &session, 1, stop.clone());
        assert!(header.contains("the run r is not here"), "{header}");
        let (header, _) = client.ask(&agent, &session, 1, stop.clone());
        assert!(header.contains("replay"), "{header}");
        a.until_said("refused request: request 1 of the session was accepted before");
        let (header, _) = client.ask(&agent, "0123", 1, stop);
        assert!(header.contains("no session"), "{header}");
        a.until_said("the agent has no session \"0123\"");
    });
}

#[test]
fn oversized_and_malformed_messages_are_refused() {
    with_fleet(|local| {
        let a = local.agent("a", "");
        let mut client = RawClient::connect();
        let agent = client.agent();
        let (header, _) = client.request(&format!("{agent}.request"), &vec![b'x'; 300_000]);
        assert!(header.contains("300000 bytes is too large"), "{header}");
        a.until_said("refused request: a request of 300000 bytes");
        let session = client.session(&agent);
        let shell = json!({ "kind": "shell", "command": "id" });
        let (header, _) = client.ask(&agent, &session, 1, shell);
        assert!(header.contains("invalid"), "{header}");
        a.until_said("refused request: the request is invalid");
        for run in ["../../etc/x", "a.b", ""] {
            let session = client.session(&agent);
            let request = json!({ "kind": "resend", "run": run, "slot": 0, "from": 0 });
            let (header, _) = client.ask(&agent, &session, 1, request);
            assert!(header.contains("is not the name of a run"), "{header}");
        }
        // The agent still answers.
        assert_eq!(client.session(&agent).len(), 32);
    });
}

/// Returns the settings of a load as a request has them.
fn load_settings() -> Value {
    json!({
        "target": TARGET, "address": "", "workload": "crr", "arrival": "closed", "rate_per_s": null, "connections": 1,
        "pause_ns": 0, "close_every": 1, "hold": 0, "operations": null, "for_ns": 1_000_000_000, "timeout_ns": 1_000_000_000,
        "threshold_ns": null, "engine": "epoll", "threads": 1, "pinned": false, "strategy": "kernel-default", "sources": null,
        "close": "client", "request_bytes": 1, "response_bytes": 1, "method": "", "separate_ack": false, "anyway": true, "seed": 1
    })
}

/// Returns the request to prepare a run.
fn prepare(run: &str, settings: &Value) -> Value {
    let load = json!({ "settings": settings, "headers": [], "body": "", "insecure": false });
    json!({ "kind": "prepare", "run": run, "slot": 0, "load": load })
}

/// Returns the request to start a run `ahead_s` seconds from now by the clock of this host, which is the agent's.
fn start(run: &str, ahead_s: i64, deadline_ns: u64) -> Value {
    let now = fourtuple_syscalls::resource::monotonic_time().as_nanos() as i64;
    let at = now.saturating_add(ahead_s.saturating_mul(1_000_000_000));
    json!({ "kind": "start", "run": run, "at_ns": at, "deadline_ns": deadline_ns, "started": "2026-01-01T00:00:00Z" })
}

#[test]
fn requests_out_of_range_occupy_no_agent() {
    with_fleet(|local| {
        let _a = local.agent("a", "");
        let mut client = RawClient::connect();
        let agent = client.agent();
        let session = client.session(&agent);
        let mut sequence = 0;
        let mut ask = |request: Value| {
            sequence += 1;
            client.ask(&agent, &session, sequence, request).0
        };
        for (field, flag) in [("request_bytes", "request"), ("threads", "threads"), ("timeout_ns", "timeout")]
        {
            let mut settings = load_settings();
            settings[field] = (u64::MAX / 2).into();
            let header = ask(prepare("r", &settings));
            assert!(header.contains(&format!("for '--{flag}'")), "{header}");
        }
        assert_eq!(ask(prepare("r", &load_settings())), "");
        let century = 100 * 365 * 86_400;
        for (request, says) in [
            (start("r", century, 1), "at most"),
            (start("r", i64::MAX, 1), "at most"),
            (start("r", i64::MIN, 1), "passed"),
            (start("r", 1, u64::MAX), "deadline"),
        ] {
            let header = ask(request);
            assert!(header.contains(says), "{header}");
        }
        // The agent takes the run of another coordinator.
        let (_, record) = fleet(&format!("load --workers 1 -- load {TARGET} --operations 5"));
        assert_eq!(number(&record["results"], "operations"), 5);
        for run in ["*", ">", "a.b", ""] {
            let mut command = fourtuple("fleet collect");
            let ended = crate::program::run(command.arg(run));
            assert_eq!(ended.code, 2, "{ended:?}");
            assert!(ended.line().contains("for 'RUN'"), "{ended:?}");
        }
        let long = format!("fleet load --workers 1 --deadline 200h -- load {TARGET} --operations 5");
        assert!(run(&mut fourtuple(&long)).line().contains("at most 7d00h"));
    });
}

/// Returns the value of a line of /proc/PID/status, such as `VmRSS`.
fn status(process: u32, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).expect("procfs");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).expect("a number")
}

/// 10,000 requests of every kind, most of them hostile, without a wait for the replies: memory, processes, threads and log are
/// bounded, and the agent then performs the run of another coordinator.
#[test]
fn hostile_requests_leave_the_agent_bounded() {
    with_fleet(|local| {
        // A journal of 200 MiB, which takes no space on the disk.
        std::fs::create_dir_all(local.directory.path().join("a")).expect("our own directory");
        for slot in 0..12 {
            let path = local.directory.path().join(format!("a/r-{slot}.journal"));
            let journal = std::fs::File::create(path).expect("our own directory");
            for at in 0..200 {
                let at = at * ((1 << 20) + 4);
                std::os::unix::fs::FileExt::write_all_at(&journal, &(1_u32 << 20).to_le_bytes(), at).unwrap();
            }
            journal.set_len(200 * ((1 << 20) + 4)).unwrap();
        }
        let agent = local.agent("a", "");
        let mut client = RawClient::connect();
        let name = client.agent();
        let session = client.session(&name);
        let (before, begun) = (status(agent.id(), "VmRSS"), std::time::Instant::now());
        let escape = "\u{1b}]0;OWNED\u{7}\u{1b}[2J\r\nfourtuple agent: accepted load";
        let serve = json!({
            "listen": "127.0.0.1:0", "protocol": "crr", "workers": 1, "close": "client", "service": "0s", "spin": false,
            "backlog": 1, "defer_accept": false, "pin": false, "for_ns": u64::MAX, "seed": 1
        });
        let with = |base: &Value, field: &str, value: Value| {
            let mut changed = base.clone();
            changed[field] = value;
            changed
        };
        let settings = load_settings();
        let requests = [
            json!({ "kind": "doctor" }),
            json!({ "kind": "lab-ports", "repeats": u32::MAX, "first": 0, "last": 65535 }),
            json!({ "kind": "lab-ports", "repeats": 1, "first": 20000, "last": 20063 }),
            json!({ "kind": "trace-connect", "for_ns": 1_u64 << 62 }),
            json!({ "kind": "trace-connect", "for_ns": 3_600_000_000_000_u64 }),
            json!({ "kind": "plan", "rate_per_s": 1e308, "hold_ns": u64::MAX, "sources": u64::MAX, "destinations": u64::MAX }),
            json!({ "kind": "plan", "rate_per_s": 1e6, "hold_ns": 1, "sources": 1_000_000, "destinations": 1_000_000 }),
            json!({ "kind": "serve", "settings": serve }),
            json!({ "kind": "serve", "settings": with(&serve, "listen", escape.into()) }),
            json!({ "kind": "serve", "settings": with(&serve, "workers", u32::MAX.into()) }),
            json!({ "kind": "serve", "settings": with(&serve, "response_bytes", u32::MAX.into()) }),
            json!({ "kind": "ask", "child": escape, "stop": true }),
            json!({ "kind": "resend", "run": "r", "slot": 0, "from": 0 }),
            json!({ "kind": "resend", "run": "r", "slot": 1, "from": u64::MAX }),
            json!({ "kind": "resend", "run": escape, "slot": 1, "from": 0 }),
            json!({ "kind": "stop", "run": escape }),
            json!({ "kind": escape }),
            start("r", 1, 1_000_000_000),
            start("r", 3_000_000_000, u64::MAX),
            start(escape, 1, 1),
            prepare("r", &settings),
            prepare("r", &with(&settings, "request_bytes", (1_u64 << 50).into())),
            prepare("r", &with(&settings, "connections", u64::MAX.into())),
            prepare("r", &with(&settings, "threads", 1024.into())),
            prepare("r", &with(&settings, "target", escape.into())),
            prepare("r", &with(&settings, "target", "x".repeat(100_000).into())),
        ];
        let mut most = [0; 2];
        let total = 10_000;
        for number in 0..total {
            let request = &requests[number % requests.len()];
            let mut request = request.clone();
            if request["kind"] == "resend" && request["slot"] == 0 {
                request["slot"] = (number / requests.len() % 12).into();
            }
            let envelope =
                json!({ "ticket": { "session": session, "sequence": number + 1 }, "request": request });
            let payload = envelope.to_string();
            // A cut request is malformed, and a third of the requests have no session.
            let payload = if number % 31 == 0 { &payload[..payload.len() / 2] } else { &payload };
            client.send(&format!("{name}.request"), payload.as_bytes());
            if number % 3 == 0 {
                client.send(&format!("{name}.session"), b"");
            }
            if number % 100 == 99 {
                // It is refused at once, behind the requests before it. No more of them wait than the agent keeps.
                client.request(&format!("{name}.request"), b"");
                let children = crate::runs::children(agent.id()).len() as u64;
                most = [most[0].max(children), most[1].max(status(agent.id(), "Threads"))];
            }
        }
        drop(client);
        let [children, threads] = most;
        let (peak, log) = (status(agent.id(), "VmHWM"), agent.said());
        let lines = log.lines().count();
        eprintln!(
            "{total} requests in {:.1?}: RSS {before} kB before, {peak} kB at most; {children} processes and {threads} \
             threads at most; a log of {lines} lines, {} bytes",
            begun.elapsed(),
            log.len()
        );
        assert!(children <= 16 + 4, "{children} processes");
        assert!(threads <= 64, "{threads} threads");
        assert!(peak < before + 75_000, "{peak} kB, {before} kB before");
        // At most 200 lines at once and 10 a second, each with a line about those that were left out, of at most 500 bytes on average.
        let permitted = 220 + 20 * (begun.elapsed().as_secs() as usize + 1);
        assert!(lines < permitted && log.len() < 500 * permitted, "{lines} lines, {} bytes", log.len());
        assert!(log.chars().all(|letter| letter == '\n' || !letter.is_control()), "a control character");
        let forged = log.lines().find(|line| line.starts_with("fourtuple agent: accepted load"));
        assert_eq!(forged, None);
        // The processes have no coordinator, so they end, and the agent takes other requests.
        // On a busy machine the last of them begin late, and each has a lease of 10 s.
        let begun = std::time::Instant::now();
        while !crate::runs::children(agent.id()).is_empty() {
            assert!(begun.elapsed() < std::time::Duration::from_secs(300), "processes remain");
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        let (_, record) = fleet(&format!("load --workers 1 -- load {TARGET} --operations 5"));
        assert_eq!(number(&record["results"], "operations"), 5);
        let (_, record) = fleet("doctor");
        assert!(record["results"]["hosts"][0]["record"].is_object(), "{record:#}");
    });
}

#[test]
fn a_name_is_taken_once() {
    with_fleet(|local| {
        let _a = local.agent("a", "");
        let mut second = Process::start(local.agent_command("a", ""));
        second.until_said("the name a is taken");
        assert_eq!(second.code(), Some(2));
    });
}

#[test]
fn wrong_credentials_are_refused() {
    in_namespace(|| {
        let users = "authorization { users = [ { user: fleet, password: right } ] }";
        let Some(local) = LocalFleet::start_with("security::wrong_credentials_are_refused", users) else {
            return;
        };
        let _a = local.agent("a", "--nats nats://fleet:right@127.0.0.1:4222");
        for url in ["nats://fleet:wrong@127.0.0.1:4222", "nats://127.0.0.1:4222"] {
            let mut refused = Process::start(local.agent_command("b", &format!("--nats {url}")));
            refused.until_said("cannot connect to NATS");
            assert_eq!(refused.code(), Some(4));
            let ended = run(&mut fourtuple(&format!("fleet agents --nats {url}")));
            let why = "cannot connect to NATS at nats://127.0.0.1:4222: authorization violation";
            assert!(ended.code == 4 && ended.line().contains(why), "{ended:?}");
            assert!(!ended.line().contains("wrong"), "an error shows no password: {ended:?}");
        }
        local.nats.until_said("authentication error");
        let ended = run(&mut fourtuple("fleet agents --nats nats://fleet:right@127.0.0.1:4222"));
        assert!(ended.code == 0 && ended.stdout.contains("\na "), "{ended:?}");
    });
}

/// Why NATS refuses a user.
const UNKNOWN_USER: &str = "authorization violation";

/// Asserts that `flags` connect an agent and a coordinator, and that neither connects with one of `wrong`, for the reason beside it.
fn require_access(local: &LocalFleet, flags: &str, wrong: &[(String, &str)]) {
    for (flags, why) in wrong {
        let mut refused = Process::start(local.agent_command("b", flags));
        refused.until_said("cannot connect to NATS");
        assert!(refused.has_said(why), "{flags}: {why}: {}", refused.said());
        assert_eq!(refused.code(), Some(4), "{flags}");
        let ended = run(&mut fourtuple(&format!("fleet agents {flags}")));
        assert!(ended.code == 4 && ended.line().contains("cannot connect to NATS"), "{flags}: {ended:?}");
        assert!(ended.line().contains(why), "{flags}: {ended:?}");
    }
    let _a = local.agent("a", flags);
    let ended = run(&mut fourtuple(&format!("fleet agents {flags}")));
    assert!(ended.code == 0 && ended.stdout.contains("\na "), "{ended:?}");
    // Results pass through JetStream with the same rights.
    let load = format!("fleet load {flags} --workers 1 -- load {TARGET} --operations 5 --json --quiet");
    let ended = run(&mut fourtuple(&load));
    assert_eq!((ended.code, number(&ended.json()["results"], "operations")), (0, 5), "{ended:?}");
}

#[test]
fn credentials_of_a_user_are_checked() {
    in_namespace(|| {
        let operator = include_str!("nats/operator.conf");
        let test = "security::credentials_of_a_user_are_checked";
        let Some(local) = LocalFleet::start_with(test, operator) else { return };
        let user = local.directory.file("user.creds", include_str!("nats/user.creds"));
        // Signed by an account that the operator did not sign.
        let other = local.directory.file("other.creds", include_str!("nats/other.creds"));
        let wrong = [format!("--creds {other}"), String::new()].map(|flags| (flags, UNKNOWN_USER));
        require_access(&local, &format!("--creds {user}"), &wrong);
    });
}

#[test]
fn nkeys_are_checked() {
    in_namespace(|| {
        let users = format!("authorization {{ users = [ {{ nkey: {NKEY} }} ] }}");
        let Some(local) = LocalFleet::start_with("security::nkeys_are_checked", &users) else { return };
        let user = local.directory.file("user.nk", include_str!("nats/user.nk"));
        let other = local.directory.file("other.nk", include_str!("nats/other.nk"));
        let wrong = [format!("--nkey {other}"), String::new()].map(|flags| (flags, UNKNOWN_USER));
        require_access(&local, &format!("--nkey {user}"), &wrong);
    });
}

/// The public key of `user.nk`.
const NKEY: &str = "UB6GFGOXOM4YYKCD6FF5Z575O55ATC5GYZCIBMGE74ZPEC357FGDN25W";

/// Writes an authority, and a certificate of it for 127.0.0.1. Returns the configuration of nats-server and the authority.
fn certificates(directory: &TempDir, name: &str) -> (String, String) {
    let key = || rcgen::KeyPair::generate().expect("a key");
    let mut authority = rcgen::CertificateParams::new([]).expect("no names");
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let own_key = key();
    let own = authority.self_signed(&own_key).expect("a certificate");
    let issuer = rcgen::Issuer::new(authority, own_key);
    let server_key = key();
    let server = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).expect("an address");
    let server = server.signed_by(&server_key, &issuer).expect("a certificate");
    let certificate = directory.file(&format!("{name}.pem"), &server.pem());
    let private = directory.file(&format!("{name}.key"), &server_key.serialize_pem());
    let authority = directory.file(&format!("{name}-authority.pem"), &own.pem());
    (format!("tls {{ cert_file: \"{certificate}\", key_file: \"{private}\" }}"), authority)
}

#[test]
fn certificates_of_nats_are_checked() {
    in_namespace(|| {
        let directory = TempDir::new();
        let (server, authority) = certificates(&directory, "nats");
        let (_, other) = certificates(&directory, "other");
        let users = format!("{server}\nauthorization {{ users = [ {{ nkey: {NKEY} }} ] }}");
        let test = "security::certificates_of_nats_are_checked";
        let Some(local) = LocalFleet::start_with(test, &users) else { return };
        let user = local.directory.file("user.nk", include_str!("nats/user.nk"));
        let flags = |nats: &str| format!("--nkey {user} --nats {nats}://127.0.0.1:4222");
        let wrong = [
            // An authority of the same name with another key, and no authority.
            (format!("{} --nats-ca {other}", flags("tls")), "invalid peer certificate: BadSignature"),
            (flags("tls"), "UnknownIssuer"),
            (flags("nats"), "UnknownIssuer"),
            // The authority is known, the user is not.
            (format!("--nats tls://127.0.0.1:4222 --nats-ca {authority}"), UNKNOWN_USER),
        ];
        require_access(&local, &format!("{} --nats-ca {authority}", flags("tls")), &wrong);
    });
}

#[test]
fn a_server_without_tls_is_refused() {
    with_fleet(|local| {
        let (_, authority) = certificates(&local.directory, "nats");
        for flags in ["--nats tls://127.0.0.1:4222".to_owned(), format!("--nats-ca {authority}")] {
            let ended = run(&mut fourtuple(&format!("fleet agents {flags}")));
            assert!(ended.code == 4 && ended.line().contains("cannot connect to NATS"), "{flags}: {ended:?}");
            // The server answers the first message of TLS with text.
            assert!(ended.line().contains("InvalidContentType"), "{flags}: {ended:?}");
        }
        let _a = local.agent("a", "");
        let ended = run(&mut fourtuple("fleet agents"));
        assert!(ended.code == 0 && ended.stdout.contains("\na "), "without TLS it answers: {ended:?}");
    });
}
