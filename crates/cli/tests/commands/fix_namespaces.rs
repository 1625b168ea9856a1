//! `fourtuple fix ports` with several network namespaces, changed routes and additional source addresses; `--container` with a container of an OCI runtime, which has a network namespace, a PID namespace and a cgroup of its own.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_fix::{Estimate, Pace, Ports};
use fourtuple_syscalls::seccomp::{self, Facility, FailingCall};
use fourtuple_syscalls::{Errno, child, device, netns, resource};
use fourtuple_testing::{listener, set_sysctl, skip};
use serde_json::json;

use crate::program::fixing::{Cgroup, Client, attached, attached_by, record_of};
use crate::program::situation::{actions, first};
use crate::program::{self, TempDir, fourtuple, in_own_namespace, is_root, list, number, run, text};

const LOW: u16 = 20_000;
const PORTS: u16 = 300;

fn set_range(low: u16, ports: u16) {
    set_sysctl("net.ipv4.ip_local_port_range", &format!("{low} {}", low + ports - 1));
}

#[test]
fn namespaces_under_a_cgroup_have_their_own_ranges() {
    in_own_namespace(|test| {
        let Some(cgroup) = Cgroup::new(test, "namespaces") else { return };
        set_range(LOW, PORTS);
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let Some(mut here) = Client::start(test, &cgroup) else { return };
        // Two more namespaces with ranges of other sizes: one from before the start, one that appears later.
        let start = |low: u16, ports: u16| {
            let started = thread::scope(|scope| {
                let start = || {
                    netns::enter_new().unwrap();
                    set_range(low, ports);
                    let (listener, destination) = listener("127.0.0.1", 4096);
                    Client::start(test, &cgroup).map(|client| (client, listener, destination))
                };
                scope.spawn(start).join().unwrap()
            });
            started.expect("python3 has started before")
        };
        let (mut there, _second, elsewhere) = start(40_000, 2 * PORTS);
        // The destination of an open connection is known from the start.
        let first = here.connect("127.0.0.1", destination.port(), 1).1;
        let second = there.connect("127.0.0.1", elsewhere.port(), 1).1;
        let Some(fix) = attached(test, &cgroup.flags("--json --past 1%")) else { return };
        let (mut later, _third, new) = start(50_000, PORTS / 2);
        // The new namespace is known after its first connect. The search of the kernel takes ports of the first parity as long as
        // there are any, and a drawn port has any parity.
        let mut connected = later.connect("127.0.0.1", new.port(), PORTS / 15).1;
        for attempt in 1.. {
            connected.extend(later.connect("127.0.0.1", new.port(), 1).1);
            if connected.iter().any(|port| port % 2 == 1) {
                break;
            }
            assert!(connected.len() < usize::from(PORTS) / 4 - 5, "the namespace is not noticed");
            // The attempts are few: the waits become longer, a minute in all.
            thread::sleep(Duration::from_millis(50) * attempt);
        }
        for (client, destination, low, ports, before) in [
            (&mut here, destination, LOW, PORTS, first),
            (&mut there, elsewhere, 40_000, 2 * PORTS, second),
            (&mut later, new, 50_000, PORTS / 2, connected),
        ] {
            let (failed, mut found) =
                client.connect("127.0.0.1", destination.port(), ports - before.len() as u16);
            found.extend(before);
            found.sort_unstable();
            assert_eq!((failed, found), (0, (low..low + ports).collect()), "every port once");
        }
        let record = record_of(fix);
        let ranges: BTreeSet<(u64, u64)> = list(&record, "/results/namespaces")
            .iter()
            .map(|namespace| (number(namespace, "low"), number(namespace, "high")))
            .collect();
        assert_eq!(ranges, [(20_000, 20_299), (40_000, 40_599), (50_000, 50_149)].into(), "{record:#}");
        let drawn: Vec<u64> =
            list(&record, "/results/tuples").iter().map(|tuple| number(tuple, "drawn")).collect();
        assert!(drawn.len() == 3 && drawn.iter().all(|drawn| *drawn > 0), "{record:#}");
    });
}

#[test]
fn a_changed_route_changes_the_source() {
    in_own_namespace(|test| {
        let Some(cgroup) = Cgroup::new(test, "route") else { return };
        set_range(LOW, PORTS);
        let address = |last: u8| IpAddr::from([10, 0, 0, last]);
        // All addresses of a prefix of loopback are local, and its address is their source.
        device::add_address("lo", address(1), 24).unwrap();
        let (_listener, destination) = listener("10.0.0.200", 4096);
        let Some(mut client) = Client::start(test, &cgroup) else { return };
        // The destination of an open connection is known from the start.
        assert_eq!(client.connect("10.0.0.200", destination.port(), 1).0, 0);
        let Some(fix) = attached(test, &cgroup.flags("--json --past 5%")) else { return };
        let mut connect = |number: u16| {
            let (failed, ports) = client.connect("10.0.0.200", destination.port(), number);
            assert_eq!(failed, 0);
            (client.source(), ports)
        };
        assert_eq!(connect(PORTS / 3).0, "10.0.0.1");
        device::remove_address("lo", address(1), 24).unwrap();
        device::add_address("lo", address(3), 24).unwrap();
        // The first connects may still have the previous address, which the kernel accepts as it is within the new prefix, or are left
        // alone: then the search of the kernel takes ports of the first parity, and a drawn port has any parity.
        // There are 10 ports for each attempt: the waits become longer, a minute in all.
        let is_drawn = |(source, ports): (String, Vec<u16>)| {
            source == "10.0.0.3" && ports.iter().any(|port| port % 2 == 1)
        };
        let mut attempt = 0;
        while !is_drawn(connect(10)) {
            attempt += 1;
            assert!(attempt < 19, "the route is not noticed");
            thread::sleep(Duration::from_millis(350) * attempt);
        }
        let record = record_of(fix);
        let drawn = |source: &str| {
            let tuples = list(&record, "/results/tuples");
            let tuple = tuples.iter().find(|tuple| text(tuple, "source") == source);
            tuple.map_or(0, |tuple| number(tuple, "drawn"))
        };
        assert!(drawn("10.0.0.1") > 0 && drawn("10.0.0.3") > 0, "{record:#}");
    });
}

#[test]
fn more_sources_give_more_connections() {
    in_own_namespace(|test| {
        let Some(cgroup) = Cgroup::new(test, "sources") else { return };
        set_range(LOW, PORTS);
        resource::raise_descriptor_limit().unwrap();
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let Some(mut client) = Client::start(test, &cgroup) else { return };
        // The destination of an open connection is known from the start.
        assert_eq!(client.connect("127.0.0.1", destination.port(), 1).0, 0);
        let Some(fix) = attached(test, &cgroup.flags("--json --source 127.0.0.8/30")) else { return };
        let (failed, ports) = client.connect("127.0.0.1", destination.port(), 3 * PORTS - 1);
        assert_eq!((failed, ports.len()), (0, usize::from(3 * PORTS - 1)), "every port of three sources");
        let record = record_of(fix);
        assert!(number(&record["results"], "spread") > 0, "{record:#}");
        let sources: BTreeSet<&str> =
            list(&record, "/results/tuples").iter().map(|tuple| text(tuple, "source")).collect();
        assert!(sources.is_superset(&["127.0.0.9", "127.0.0.10"].into()), "{record:#}");
    });
}

#[test]
fn a_cgroup_may_have_more_processes_than_there_are_descriptors() {
    in_own_namespace(|test| {
        let Some(cgroup) = Cgroup::new(test, "processes") else { return };
        set_range(LOW, PORTS);
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let Some(mut client) = Client::start(test, &cgroup) else { return };
        let mut others: Vec<Child> =
            (0..150).map(|_| Command::new("sleep").arg("600").spawn().expect("sleep starts")).collect();
        for other in &others {
            fs::write(cgroup.0.join("cgroup.procs"), other.id().to_string()).unwrap();
        }
        let mut command = fourtuple(&cgroup.flags("--json --past 1%"));
        child::limit_descriptors(&mut command, 100);
        let fix = attached_by(test, &mut command);
        if let Some(fix) = fix {
            // Each connect looks up one port at random: of few in use it may find none for a long time.
            client.connect("127.0.0.1", destination.port(), PORTS / 5);
            // A drawn port has any parity; the search of the kernel takes ports of one parity first, half of the range.
            // The attempts are few: the waits become longer, a minute in all.
            let is_drawn = (1..=30).any(|attempt| {
                thread::sleep(Duration::from_millis(130) * attempt);
                client.connect("127.0.0.1", destination.port(), 2).1.iter().any(|port| port % 2 == 1)
            });
            assert!(is_drawn);
            let record = record_of(fix);
            assert!(number(&record["results"], "drawn") > 0, "{record:#}");
        }
        for other in &mut others {
            other.kill().unwrap();
            other.wait().unwrap();
        }
    });
}

/// EAGAIN of pthread_create() and EMFILE of socket() leave a destination unknown: they do not end the fix, and are not a missing route.
#[test]
fn a_fix_without_threads_or_sockets_continues() {
    in_own_namespace(|test| {
        set_range(LOW, PORTS);
        for (name, address, exhaust) in [
            ("threads", "127.0.0.2", (|| seccomp::refuse(Facility::Threads)) as fn() -> _),
            ("sockets", "127.0.0.3", || seccomp::fail(FailingCall::Socket, Errno::EMFILE)),
        ] {
            let (_listener, destination) = listener(address, 4096);
            let Some(cgroup) = Cgroup::new(test, name) else { return };
            let Some(mut client) = Client::start(test, &cgroup) else { return };
            let ports = Ports {
                spares: false,
                cgroup: cgroup.0.clone(),
                past: 0.01,
                source: None,
                destination: None,
                time: None,
                dry_run: false,
                estimate: Estimate::Never,
                pace: Pace::LIVE,
            };
            let stop = AtomicBool::new(false);
            let (reports, progress) = mpsc::channel();
            let (seen, outcome) = thread::scope(|scope| {
                let run = || {
                    // The filter holds for this thread and for those that it starts.
                    let mut exhaust = Some(exhaust);
                    ports.run(
                        &stop,
                        || (),
                        move |_| {
                            exhaust.take().map_or(Ok(()), |exhaust| exhaust()).unwrap();
                            let _ = reports.send(());
                        },
                    )
                };
                let fix = scope.spawn(run);
                // Ten reports take two seconds: the namespace and unknown destinations are read again meanwhile.
                let seen = progress.iter().take(10).inspect(|()| {
                    client.connect(address, destination.port(), 1);
                });
                let seen = seen.count();
                stop.store(true, Ordering::Relaxed);
                (seen, fix.join().unwrap())
            });
            let left = match outcome {
                Err(error) if seen == 0 => return skip(test, "bpf", &error.to_string()),
                outcome => outcome.unwrap_or_else(|error| panic!("{name}: {error}")).results.left,
            };
            assert_eq!(left.into_iter().collect::<Vec<_>>(), [("source-unknown".to_owned(), 10)], "{name}");
        }
    });
}

/// Prints how many ports a program outside of the cgroup gets for another destination, and how long its connect() takes.
#[test]
#[ignore = "a measurement of about a minute on an idle machine"]
fn effect_on_programs_outside() {
    const WIDE: u16 = 18_000;
    for (name, is_fixed) in [("bare", false), ("fixed", true), ("fixed", true), ("bare", false)] {
        thread::scope(|scope| scope.spawn(|| outside(name, is_fixed, WIDE)).join().unwrap());
    }
}

fn outside(name: &str, is_fixed: bool, ports: u16) {
    use std::os::fd::AsFd;

    use fourtuple_syscalls::socket::{self, Transport};

    let test = "fix_namespaces::effect_on_programs_outside";
    netns::enter_new().unwrap();
    set_range(LOW, ports);
    set_sysctl("net.core.somaxconn", "65535");
    resource::raise_descriptor_limit().unwrap();
    let Some(cgroup) = Cgroup::new(test, "outside") else { return };
    let (_first, inside) = listener("127.0.0.1", 65_535);
    let (_second, other) = listener("127.0.0.1", 65_535);
    let Some(mut client) = Client::start(test, &cgroup) else { return };
    let fix = is_fixed.then(|| attached(test, &cgroup.flags("--json --past 1%")).expect("BPF"));
    assert_eq!(client.connect("127.0.0.1", inside.port(), ports / 2).0, 0);
    let mut held = Vec::new();
    let mut times = Vec::new();
    for _ in 0..ports {
        let socket = socket::open(Transport::Tcp, other, false).unwrap();
        let began = Instant::now();
        let connected = socket::connect(socket.as_fd(), other);
        times.push(began.elapsed().as_nanos() as f64 / 1e3);
        match connected {
            Ok(_) => held.push(socket),
            Err(_) => break,
        }
    }
    let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len() as f64;
    println!(
        "{name}: outside the cgroup {} of {ports} ports for another destination; connect() {:.0} us in the first 1,000, {:.0} us in the last 1,000",
        held.len(),
        mean(&times[..1_000]),
        mean(&times[times.len() - 1_000..]),
    );
    if let Some(fix) = fix {
        println!("  drawn inside: {}", record_of(fix)["results"]["drawn"]);
    }
}

/// The runtimes that the test knows; they have the same commands. crun 1.8 refuses hosts with cgroups of both versions if version 2 has a
/// controller.
const RUNTIMES: [&str; 2] = ["runc", "crun"];
const PORT: u16 = 4_000;
/// Precedes the client: a server in the network namespace of the container.
const SERVER: &str =
    "import socket\nserver = socket.socket()\nserver.bind(('127.0.0.1', 4000))\nserver.listen(4096)\n";

/// A running container with a client and a server. It runs the programs of the host.
struct Container {
    runtime: &'static str,
    id: String,
    client: Option<Client>,
    temp: TempDir,
}

impl Container {
    /// Returns `None` after a skip.
    fn start(test: &str) -> Option<Container> {
        if !is_root() {
            skip(test, "container", "a runtime without root needs cgroups that its user may change");
            return None;
        }
        let path = env::var_os("PATH").unwrap_or_default();
        let exists = |name: &&str| env::split_paths(&path).any(|place| place.join(name).exists());
        let Some(runtime) = RUNTIMES.into_iter().find(exists) else {
            skip(test, "container", "neither runc nor crun is in PATH");
            return None;
        };
        let temp = TempDir::new();
        // As long as the IDs of Docker, Podman and containerd.
        let id = format!("{:08x}{:056x}", std::process::id(), 0xfeed);
        let mut container = Container { runtime, id, client: None, temp };
        container.write_bundle();
        let mut command = container.command("run");
        command.arg("--bundle").arg(container.temp.path()).arg(&container.id);
        container.client = Client::of(command);
        if container.client.is_none() {
            skip(test, "container", &format!("{runtime} cannot run python3; its error is above"));
            return None;
        }
        Some(container)
    }

    fn write_bundle(&self) {
        let root = self.temp.path().join("rootfs");
        for directory in ["usr", "proc", "dev"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        for (link, target) in [("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")] {
            symlink(target, root.join(link)).unwrap();
        }
        let config = json!({
            "ociVersion": "1.0.2",
            "process": {
                "user": { "uid": 0, "gid": 0 },
                "args": ["python3", "-c", format!("{SERVER}{}", program::fixing::CLIENT)],
                "env": ["PATH=/usr/local/bin:/usr/bin"],
                "cwd": "/",
            },
            "root": { "path": "rootfs", "readonly": true },
            "mounts": [
                { "destination": "/usr", "type": "none", "source": "/usr", "options": ["rbind", "ro"] },
                { "destination": "/proc", "type": "proc", "source": "proc" },
                { "destination": "/dev", "type": "tmpfs", "source": "tmpfs" },
            ],
            "linux": {
                "cgroupsPath": format!("/{}", self.id),
                "namespaces": [
                    { "type": "pid" }, { "type": "network" }, { "type": "mount" }, { "type": "ipc" }, { "type": "uts" },
                ],
                "sysctl": { "net.ipv4.ip_local_port_range": format!("20000 {}", 20_000 + PORTS - 1) },
            },
        });
        fs::write(self.temp.path().join("config.json"), config.to_string()).unwrap();
    }

    /// Returns a command of the runtime, whose state is in the directory of the test.
    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.runtime);
        command.arg("--root").arg(self.temp.path().join("state")).arg(name);
        command
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.command("delete").arg("--force").arg(&self.id).output();
    }
}

#[test]
fn doctor_and_fix_find_a_container_by_its_id() {
    let test = "fix_namespaces::doctor_and_fix_find_a_container_by_its_id";
    let Some(mut container) = Container::start(test) else { return };
    let id = container.id[..12].to_owned();
    let client = container.client.as_mut().unwrap();
    assert_eq!(client.connect("127.0.0.1", PORT, PORTS / 3).0, 0);
    let fix = format!("fix ports --container {id} --past 1% --to 127.0.0.1:{PORT} --json");
    if let Some(fix) = attached(test, &fix) {
        assert_eq!(client.connect("127.0.0.1", PORT, PORTS / 3).0, 0);
        let record = record_of(fix);
        assert!(record["results"]["drawn"].as_u64().unwrap() > 50, "{record}");
    }
    client.connect("127.0.0.1", PORT, PORTS);
    let ended = run(&mut fourtuple(&format!("doctor --for 100ms --json --container {id}")));
    assert_eq!((ended.code, ended.stderr.as_str()), (1, ""), "{ended:?}");
    let record = ended.json();
    let tuple = format!("127.0.0.1 → 127.0.0.1:{PORT} uses {PORTS} of {PORTS} ports");
    let now = actions(first(&record, "P01", &[&tuple, "python3["]), "now");
    assert!(
        now.iter().any(|action| action.contains("nsenter --target ") && action.contains("--net sysctl")),
        "{now:?}"
    );
    // The record of the namespace of this process is another.
    let ended = run(&mut fourtuple("doctor --for 100ms --json --no-trace"));
    assert!(!ended.stdout.contains(&tuple), "{ended:?}");
}
