//! Runs of `fourtuple fix ports` on this host, by their command lines.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use fourtuple_record::snapshot::{RunningFix, Tuple};
use fourtuple_syscalls::procfs;

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

fn read(root: &Path) -> Vec<Fix> {
    let fix = |pid: u32| {
        let name = fs::read(root.join(format!("proc/{pid}/comm"))).ok()?;
        if name.trim_ascii() != b"fourtuple" {
            return None;
        }
        let line = fs::read_to_string(root.join(format!("proc/{pid}/cmdline"))).ok()?;
        parse(root, pid, &line.split('\0').collect::<Vec<_>>())
    };
    procfs::processes(root).filter_map(fix).collect()
}

fn parse(root: &Path, pid: u32, words: &[&str]) -> Option<Fix> {
    let at = words.windows(2).position(|pair| pair == ["fix", "ports"])?;
    let flags = &words[at + 2..];
    if flags.contains(&"--dry-run") {
        return None;
    }
    let value = |flag: &str| {
        let place = flags.iter().position(|word| word.split('=').next() == Some(flag))?;
        let joined = flags[place].split_once('=').map(|(_, value)| value);
        joined.or_else(|| flags.get(place + 1).copied()).map(str::to_owned)
    };
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
    Some(Fix { running: RunningFix { pid, source: value("--source") }, cgroup, to: value("--to") })
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
    use super::*;

    #[test]
    fn a_fix_is_known_by_its_command() {
        let root = Path::new("/nonexistent");
        let fix = |line: &str| parse(root, 7, &line.split(' ').collect::<Vec<_>>());
        let expected = Fix {
            running: RunningFix { pid: 7, source: Some("10.0.0.0/24".to_owned()) },
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
