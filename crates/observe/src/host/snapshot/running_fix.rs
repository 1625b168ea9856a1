//! Runs of `fourtuple fix ports` and `fix accept` on this host, by their command lines, and the fixes of a `fourtuple guard`, by its answer.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::iter;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fourtuple_record::snapshot::{Listener, Owner, RunningFix, Tuple, UnixListener};
use fourtuple_record::{GuardAction, GuardResults};
use fourtuple_syscalls::procfs;
use fourtuple_syscalls::unix_socket::Peer;
use serde_json::json;

use crate::host::guard;
use crate::host::snapshot::processes::Stat;
use crate::host::snapshot::sums::is_large;

/// A running `fix ports`.
#[derive(Debug, PartialEq)]
struct Fix {
    running: RunningFix,
    /// Part of the path of its cgroup.
    cgroup: String,
    /// The value of `--to`.
    to: Option<String>,
}

/// Adds to the tuples with a quarter of `ports` or more the `fix ports` that works on their new connections.
pub(super) fn add(tuples: &mut [Tuple], ports: u32, root: &Path) {
    if !tuples.iter().any(|tuple| is_large(tuple, ports)) {
        return;
    }
    let fixes = read(root);
    if fixes.is_empty() {
        return;
    }
    // Sockets in TIME_WAIT have no process: the other sources of the destination tell.
    let holders: Vec<(SocketAddr, String)> = tuples
        .iter()
        .flat_map(|tuple| tuple.owners.iter().map(|owner| (tuple.destination, cgroup(root, owner.pid))))
        .filter_map(|(destination, cgroup)| Some((destination, cgroup?)))
        .collect();
    for tuple in tuples.iter_mut().filter(|tuple| is_large(tuple, ports)) {
        let holds = |fix: &&Fix| {
            let mut of_tuple =
                holders.iter().filter(|(destination, _)| *destination == tuple.destination).peekable();
            // Without any process, a fix for just this destination.
            let is_unknown = of_tuple.peek().is_none() && fix.to.is_some();
            is_unknown || of_tuple.any(|(_, cgroup)| is_within(cgroup, &fix.cgroup))
        };
        let matches = |fix: &&Fix| fix.to.as_ref().is_none_or(|to| is_to(to, tuple.destination));
        tuple.fix = fixes.iter().filter(matches).find(holds).map(|fix| fix.running.clone());
    }
}

/// A running `fix accept`, which a guard starts, too.
#[derive(Debug, PartialEq)]
pub(super) struct Selector {
    pid: u32,
    /// The value of `--listen`.
    listen: Option<String>,
    /// The value of `--pid`.
    target: Option<u32>,
}

/// Returns the `fix accept` that run here, if several workers serve a listener.
pub(super) fn selectors(listeners: &[Listener], unix: &[UnixListener], root: &Path) -> Vec<Selector> {
    let mut places = BTreeMap::<(SocketAddr, u32), u32>::new();
    for listener in listeners {
        *places.entry((listener.address, listener.interface)).or_default() += 1;
    }
    let are_several = |owners: &[Owner]| owners.len() > 1;
    let has_workers = places.values().any(|members| *members > 1)
        || listeners.iter().any(|listener| are_several(&listener.owners))
        || unix.iter().any(|listener| are_several(&listener.owners));
    let selectors = || commands(root).filter_map(|(pid, line)| selector(root, pid, &line));
    if has_workers { selectors().collect() } else { Vec::new() }
}

/// Adds to the listeners the `fix accept` that chooses among their workers.
pub(super) fn add_to_listeners(
    listeners: &mut [Listener],
    unix: &mut [UnixListener],
    selectors: &[Selector],
    root: &Path,
) {
    let find = |place: &str, owners: &[Owner]| {
        let mut of_listener = selectors.iter().filter(|selector| match selector.target {
            Some(target) => owners.iter().any(|owner| descends(root, owner.pid, target)),
            None => selector.listen.as_deref() == Some(place),
        });
        of_listener.next().map(|selector| selector.pid)
    };
    for listener in listeners {
        listener.fix = find(&listener.address.to_string(), &listener.owners);
    }
    for listener in unix {
        listener.fix = find(&format!("unix:{}", listener.path), &listener.owners);
    }
}

/// Returns the processes of this program, with their command lines.
fn commands(root: &Path) -> impl Iterator<Item = (u32, String)> {
    procfs::processes(root).filter_map(move |pid| {
        let name = fs::read(root.join(format!("proc/{pid}/comm"))).ok()?;
        // A guard starts its `fix accept` as /proc/self/exe.
        let is_own = [&b"fourtuple"[..], b"exe"].contains(&name.trim_ascii());
        let line = is_own.then(|| fs::read_to_string(root.join(format!("proc/{pid}/cmdline"))))?;
        Some((pid, line.ok()?))
    })
}

fn selector(root: &Path, pid: u32, line: &str) -> Option<Selector> {
    let words: Vec<&str> = line.split('\0').collect();
    let at = words.windows(2).position(|pair| pair == ["fix", "accept"])?;
    let flags = &words[at + 2..];
    let target = value(flags, "--pid").map(|target| target.parse::<u32>()).transpose().ok()?;
    if flags.contains(&"--dry-run") || is_elsewhere(root, target.unwrap_or(pid)) {
        return None;
    }
    Some(Selector { pid, listen: value(flags, "--listen"), target })
}

/// Returns whether a process is `ancestor`, or descends from it.
fn descends(root: &Path, pid: u32, ancestor: u32) -> bool {
    /// Numbers of processes may be used again meanwhile, so that the way upwards need not end.
    const MAX_DEPTH: usize = 64;
    let parent = |pid: &u32| Stat::read(root, *pid).map(|stat| stat.parent).filter(|parent| *parent != 0);
    iter::successors(Some(pid), parent).take(MAX_DEPTH).any(|pid| pid == ancestor)
}

fn read(root: &Path) -> Vec<Fix> {
    let mut asked = BTreeSet::new();
    let mut fixes = Vec::new();
    // Two guards that ask each other would wait for each other.
    let is_guard = |line: String| guard_socket(&line.split('\0').collect::<Vec<_>>()).is_some();
    let asks = !fs::read_to_string(root.join("proc/self/cmdline")).is_ok_and(is_guard);
    for (pid, line) in commands(root) {
        let words: Vec<&str> = line.split('\0').collect();
        fixes.extend(parse(root, pid, &words));
        if let Some(socket) = guard_socket(&words).filter(|_| asks) {
            fixes.extend(of_guard(root, pid, &socket, &mut asked));
        }
    }
    fixes
}

/// Returns the value of a flag.
fn value(flags: &[&str], flag: &str) -> Option<String> {
    let place = flags.iter().position(|word| word.split('=').next() == Some(flag))?;
    let joined = flags[place].split_once('=').map(|(_, value)| value);
    joined.or_else(|| flags.get(place + 1).copied()).map(str::to_owned)
}

fn parse(root: &Path, pid: u32, words: &[&str]) -> Option<Fix> {
    let at = words.windows(2).position(|pair| pair == ["fix", "ports"])?;
    let flags = &words[at + 2..];
    if flags.contains(&"--dry-run") {
        return None;
    }
    let value = |flag| value(flags, flag);
    let cgroup = match (value("--pid"), value("--cgroup"), value("--unit"), value("--container")) {
        (Some(target), ..) => {
            let target = target.parse().ok()?;
            if is_elsewhere(root, target) {
                return None;
            }
            cgroup(root, target)?
        }
        (_, Some(path), ..) => {
            let path = path.trim_start_matches("/sys/fs/cgroup").trim_start_matches("/unified");
            path.trim_end_matches('/').to_owned()
        }
        (_, _, Some(unit), _) if unit.contains('.') => format!("/{unit}"),
        (_, _, Some(unit), _) => format!("/{unit}.service"),
        (.., Some(container)) => container,
        _ => return None,
    };
    let running = RunningFix { pid, source: value("--source"), guard: false };
    Some(Fix { running, cgroup, to: value("--to") })
}

/// Returns the path of the socket of a `fourtuple guard`; `None` for another command, and for one that asks a guard.
fn guard_socket(words: &[&str]) -> Option<PathBuf> {
    let [_, "guard", flags @ ..] = words else { return None };
    if flags.first().is_some_and(|word| ["status", "pause", "resume"].contains(word)) {
        return None;
    }
    Some(value(flags, "--socket").map_or_else(|| guard::SOCKET.into(), PathBuf::from))
}

/// Returns what a guard fixes in the network namespace of this thread. `asked` has the sockets of guards that were asked already: a guard
/// and its children have the same command line.
fn of_guard(root: &Path, pid: u32, socket: &Path, asked: &mut BTreeSet<(u64, u64)>) -> Vec<Fix> {
    /// A guard answers between two readings, which take milliseconds, on a busy host longer.
    const LIMIT: Duration = Duration::from_secs(2);
    // A process of another user may have any name, and send this process to any socket.
    let is_ours = |owner: fs::Metadata| Peer { process: pid, user: owner.uid() }.is_root_or_own();
    if !fs::metadata(root.join(format!("proc/{pid}"))).is_ok_and(is_ours) {
        return Vec::new();
    }
    // A guard in a container has another root directory.
    let path = match socket.strip_prefix("/") {
        Ok(path) => root.join(format!("proc/{pid}/root")).join(path),
        Err(_) => root.join(format!("proc/{pid}/cwd")).join(socket),
    };
    let Ok(file) = fs::metadata(&path) else { return Vec::new() };
    let Some(namespace) = own_namespace(root) else { return Vec::new() };
    if !asked.insert((file.dev(), file.ino())) {
        return Vec::new();
    }
    let Ok(answer) = guard::ask(&path, &json!({ "do": "status" }), LIMIT) else { return Vec::new() };
    let pid = if answer.peer.process == 0 { pid } else { answer.peer.process };
    let fixes = serde_json::from_value::<GuardResults>(answer.value).map(|results| results.fixes);
    let of_this_namespace = fixes.unwrap_or_default().into_iter().filter(|fix| fix.namespace == namespace);
    of_this_namespace
        .filter(|fix| fix.action == GuardAction::FixPorts)
        .map(|fix| Fix {
            running: RunningFix { pid, source: fix.source, guard: true },
            cgroup: fix.target.trim_end_matches('/').to_owned(),
            to: fix.to,
        })
        .collect()
}

/// Returns the inode of the network namespace of this thread.
fn own_namespace(root: &Path) -> Option<u32> {
    let link = fs::read_link(root.join("proc/thread-self/ns/net")).ok()?;
    link.to_str()?.strip_prefix("net:[")?.strip_suffix(']')?.parse().ok()
}

/// Returns whether a process is in another network namespace than this one: the same destination is not the same there.
fn is_elsewhere(root: &Path, pid: u32) -> bool {
    let namespace = |process: &str| fs::read_link(root.join(format!("proc/{process}/ns/net"))).ok();
    matches!((namespace(&pid.to_string()), namespace("thread-self")), (Some(its), Some(own)) if its != own)
}

/// Returns the path of the cgroup (version 2) of a process.
fn cgroup(root: &Path, pid: u32) -> Option<String> {
    let lines = fs::read_to_string(root.join(format!("proc/{pid}/cgroup"))).ok()?;
    lines.lines().find_map(|line| line.strip_prefix("0::")).map(|path| path.trim_end_matches('/').to_owned())
}

/// Returns whether a cgroup is `part`, or below it. A part that is not a whole path names a unit or a container.
fn is_within(cgroup: &str, part: &str) -> bool {
    let ends = |rest: &str| rest.is_empty() || rest.starts_with('/');
    cgroup.strip_prefix(part).is_some_and(ends)
        || !part.is_empty()
            && cgroup.split_once(part).is_some_and(|(_, rest)| !part.starts_with('/') || ends(rest))
}

/// Returns whether a value of `--to` includes a destination: 192.0.2.0/24:443, 192.0.2.1:*, [2001:db8::/32]:443.
fn is_to(to: &str, destination: SocketAddr) -> bool {
    let Some((prefix, port)) = to.rsplit_once(':') else { return false };
    let prefix = prefix.trim_start_matches('[').trim_end_matches(']');
    let (address, length) = prefix.split_once('/').unwrap_or((prefix, "128"));
    let bits = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
        IpAddr::V6(v6) => v6.to_bits(),
    };
    let (Ok(address), Ok(length)) = (address.parse::<IpAddr>(), length.parse::<u32>()) else { return false };
    if address.is_ipv4() != destination.is_ipv4() {
        return false;
    }
    let length = if address.is_ipv4() && prefix.contains('/') { length.saturating_add(96) } else { length };
    let mask = u128::MAX.checked_shl(128 - length.min(128)).unwrap_or(0);
    (port == "*" || port.parse() == Ok(destination.port()))
        && bits(address) & mask == bits(destination.ip()) & mask
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net;
    use std::thread;

    use fourtuple_record::{GuardEffect, GuardFix, GuardState, GuardTotals};

    use super::*;

    #[test]
    fn a_fix_is_known_by_its_command() {
        let root = Path::new("/nonexistent");
        let fix = |line: &str| parse(root, 7, &line.split(' ').collect::<Vec<_>>());
        let expected = Fix {
            running: RunningFix { pid: 7, source: Some("10.0.0.0/24".to_owned()), guard: false },
            cgroup: "/nginx.service".to_owned(),
            to: None,
        };
        assert_eq!(fix("/bin/fourtuple fix ports --unit nginx --source=10.0.0.0/24"), Some(expected));
        assert_eq!(
            fix("fourtuple fix ports --cgroup /sys/fs/cgroup/a/ --to 10.0.0.2:80").unwrap().cgroup,
            "/a"
        );
        for other in
            ["fourtuple fix accept --pid 1", "fourtuple fix ports --cgroup /a --dry-run", "fourtuple"]
        {
            assert_eq!(fix(other), None, "{other}");
        }
        let socket = |line: &str| guard_socket(&line.split(' ').collect::<Vec<_>>());
        assert_eq!(socket("/bin/fourtuple guard --quiet "), Some(guard::SOCKET.into()));
        assert_eq!(socket("fourtuple guard --socket=/run/g --quiet"), Some("/run/g".into()));
        for other in
            ["fourtuple guard status --socket /run/g", "fourtuple guard pause", "fourtuple explain guard"]
        {
            assert_eq!(socket(other), None, "{other}");
        }
        let within = ["/a", "/a/b", "/system.slice/nginx.service", "/docker/0123456789ab"].map(|cgroup| {
            [is_within(cgroup, "/a"), is_within(cgroup, "/nginx.service"), is_within(cgroup, "012345")]
        });
        assert_eq!(
            within,
            [[true, false, false], [true, false, false], [false, true, false], [false, false, true]]
        );
        assert!(is_within("", "") && is_within("/a", ""), "the root cgroup has all");
        assert!(!is_within("/ab", "/a"));
    }

    #[test]
    fn a_fix_of_another_namespace_is_not_ours() {
        let root = std::env::temp_dir().join(format!("fourtuple-running-fix-{}", std::process::id()));
        for (process, namespace) in [("thread-self", "net:[1]"), ("5", "net:[1]"), ("6", "net:[2]")] {
            fs::create_dir_all(root.join(format!("proc/{process}/ns"))).unwrap();
            fs::write(root.join(format!("proc/{process}/cgroup")), "0::/\n").unwrap();
            std::os::unix::fs::symlink(namespace, root.join(format!("proc/{process}/ns/net"))).unwrap();
        }
        let known = |target: &str| parse(&root, 7, &["fourtuple", "fix", "ports", "--pid", target]).is_some();
        let found = (known("5"), known("6"));
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, (true, false));
    }

    #[test]
    fn listeners_know_the_fix_of_their_workers() {
        let root = std::env::temp_dir().join(format!("fourtuple-running-accept-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let process = |pid: &str, namespace: &str, parent: u32, line: &str| {
            let directory = root.join("proc").join(pid);
            fs::create_dir_all(directory.join("ns")).unwrap();
            std::os::unix::fs::symlink(namespace, directory.join("ns/net")).unwrap();
            let (name, _) = line.split_once(' ').unwrap_or((line, ""));
            fs::write(directory.join("comm"), format!("{}\n", name.rsplit('/').next().unwrap())).unwrap();
            fs::write(directory.join("cmdline"), line.replace(' ', "\0")).unwrap();
            let rest = "0 ".repeat(20);
            fs::write(directory.join("stat"), format!("{pid} (a) S {parent} {pid} {rest}")).unwrap();
        };
        let listener = |port, pids: &[u32]| Listener {
            address: ([127, 0, 0, 1], port).into(),
            owners: pids.iter().map(|&pid| Owner { pid, ..Owner::default() }).collect(),
            ..Listener::default()
        };
        let of_unix = UnixListener { path: "/run/web".to_owned(), ..UnixListener::default() };
        let found = || {
            let mut tcp = [listener(80, &[21, 22]), listener(81, &[31]), listener(82, &[40])];
            let mut unix = [of_unix.clone()];
            let selectors = selectors(&tcp, &unix, &root);
            add_to_listeners(&mut tcp, &mut unix, &selectors, &root);
            (tcp.map(|listener| listener.fix), unix.map(|listener| listener.fix))
        };
        process("thread-self", "net:[1]", 0, "doctor");
        for (pid, parent) in [("20", 1), ("21", 20), ("22", 20), ("31", 1), ("40", 1)] {
            process(pid, "net:[1]", parent, "nginx");
        }
        assert_eq!(found(), ([None; 3], [None]));
        process("7", "net:[1]", 1, "/bin/fourtuple fix accept --pid 20");
        process(
            "8",
            "net:[1]",
            1,
            "/proc/self/exe fix accept --select least-busy --json --listen 127.0.0.1:81",
        );
        process("9", "net:[1]", 1, "fourtuple fix accept --select rotate --listen=unix:/run/web");
        process("10", "net:[2]", 1, "fourtuple fix accept --listen 127.0.0.1:82");
        process("11", "net:[1]", 1, "fourtuple fix accept --listen 127.0.0.1:82 --dry-run");
        process("12", "net:[1]", 1, "other fix accept --listen 127.0.0.1:82");
        let fixed = found();
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(fixed, ([Some(7), Some(8), None], [Some(9)]));
    }

    #[test]
    fn a_guard_tells_its_fixes() {
        let root = std::env::temp_dir().join(format!("fourtuple-guard-fix-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        for directory in ["proc/5", "proc/thread-self/ns", "container/run"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        std::os::unix::fs::symlink(root.join("container"), root.join("proc/5/root")).unwrap();
        std::os::unix::fs::symlink("net:[7]", root.join("proc/thread-self/ns/net")).unwrap();
        let fix = |namespace, action| GuardFix {
            action,
            target: "/nginx.service".to_owned(),
            to: Some("10.0.0.2:80".to_owned()),
            namespace,
            pid: None,
            source: None,
            since_ns: 0,
            reason: String::new(),
            effect: GuardEffect::Pending,
            connects: 0,
            drawn: 0,
            fallbacks: 0,
            saved_ns: None,
        };
        let (ports, accept) = (GuardAction::FixPorts, GuardAction::FixAccept);
        let results = GuardResults {
            state: GuardState::Active,
            uptime_ns: 0,
            policy: None,
            paused_for_ns: None,
            every_ns: 0,
            namespaces: 2,
            fixes: vec![fix(8, ports), fix(7, accept), fix(7, ports)],
            totals: GuardTotals::default(),
            events: Vec::new(),
        };
        let answer = format!("{}\n", json!({ "ok": results }));
        let ask = |_| {
            let path = root.join("container/run/g");
            let _ = fs::remove_file(&path);
            let listener = net::UnixListener::bind(path).unwrap();
            let answer = answer.clone();
            let guard = thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 64]).unwrap();
                let _ = stream.write_all(answer.as_bytes());
            });
            let mut asked = BTreeSet::new();
            let found = of_guard(&root, 5, Path::new("/run/g"), &mut asked);
            guard.join().unwrap();
            (found, asked)
        };
        // On a busy host the thread of the guard may not run for the time that is left for an answer.
        let answered = (0..10).map(ask).find(|(found, _)| !found.is_empty());
        let (found, mut asked) = answered.expect("an answer in time");
        // A child of the guard has the same command line.
        let again = of_guard(&root, 5, Path::new("/run/g"), &mut asked);
        fs::remove_dir_all(&root).unwrap();
        let expected = Fix {
            running: RunningFix { pid: std::process::id(), source: None, guard: true },
            cgroup: "/nginx.service".to_owned(),
            to: Some("10.0.0.2:80".to_owned()),
        };
        assert_eq!((found, again), (vec![expected], Vec::new()));
    }

    #[test]
    fn a_destination_is_in_a_prefix() {
        let to = |to: &str, destination: &str| is_to(to, destination.parse().unwrap());
        assert!(to("192.0.2.0/24:443", "192.0.2.9:443") && to("192.0.2.1:*", "192.0.2.1:80"));
        assert!(!to("192.0.2.0/24:443", "192.0.3.9:443") && !to("192.0.2.0/24:443", "192.0.2.9:80"));
        assert!(to("[2001:db8::/32]:443", "[2001:db8::7]:443") && !to("0.0.0.0/0:443", "[::1]:443"));
        // A process may have any text as its command line.
        assert!(!to("192.0.2.0/4294967295:443", "192.0.2.9:443"));
        assert!(to("0.0.0.0/0:*", "192.0.2.9:443") && !to("192.0.2.1:80", "192.0.2.2:80"));
    }
}
