//! `--container` with a container of an OCI runtime, which has a network namespace, a PID namespace and a cgroup of its own.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use crate::program;
use crate::program::fixing::{Client, attached, record_of};
use crate::program::situation::{actions, first};
use crate::program::{Room, fourtuple, is_root, run};
use fourtuple_testing::skip;
use serde_json::json;

/// The runtimes that the test knows; they have the same commands. crun 1.8 refuses hosts with cgroups of both versions if version 2 has a
/// controller.
const RUNTIMES: [&str; 2] = ["runc", "crun"];
const PORT: u16 = 4_000;
const PORTS: u16 = 300;
/// Precedes the client: a server in the network namespace of the container.
const SERVER: &str =
    "import socket\nserver = socket.socket()\nserver.bind(('127.0.0.1', 4000))\nserver.listen(4096)\n";

/// A running container with a client and a server. It runs the programs of the host.
struct Container {
    runtime: &'static str,
    id: String,
    client: Option<Client>,
    room: Room,
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
        let room = Room::new();
        // As long as the IDs of Docker, Podman and containerd.
        let id = format!("{:08x}{:056x}", std::process::id(), 0xfeed);
        let mut container = Container { runtime, id, client: None, room };
        container.write_bundle();
        let mut command = container.command("run");
        command.arg("--bundle").arg(container.room.path()).arg(&container.id);
        container.client = Client::of(command);
        if container.client.is_none() {
            skip(test, "container", &format!("{runtime} cannot run python3; its error is above"));
            return None;
        }
        Some(container)
    }

    fn write_bundle(&self) {
        let root = self.room.path().join("rootfs");
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
        fs::write(self.room.path().join("config.json"), config.to_string()).unwrap();
    }

    /// Returns a command of the runtime, whose state is in the directory of the test.
    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.runtime);
        command.arg("--root").arg(self.room.path().join("state")).arg(name);
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
    let test = "container::doctor_and_fix_find_a_container_by_its_id";
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
