//! A nats-server, and the plan of a run whose messages a test publishes.
#![allow(dead_code, reason = "every test file uses its own part")]

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use fourtuple_fleet::interval::WorkerEnd;
use fourtuple_fleet::nats::Connection;
use fourtuple_fleet::protocol::ClockEstimate;
use fourtuple_fleet::protocol::{AgentInfo, Plan, PlannedWorker};
use fourtuple_record::{LoadRecord, SCHEMA};
use fourtuple_syscalls::child;

/// Returns the connection to the server of the test.
pub(crate) fn connection() -> Connection {
    Connection { url: "nats://127.0.0.1:4222".to_owned(), credentials: None, nkey: None, ca: None }
}

/// Returns the end of the run of a worker.
pub(crate) fn end(record: Option<LoadRecord>, intervals: u64) -> WorkerEnd {
    WorkerEnd { record, failed: None, start_error_ns: 0, intervals, dropped: 0 }
}

/// Returns the plan of a run long ago.
pub(crate) fn plan(run: &str, workers: u32, record: &LoadRecord) -> Plan {
    let worker = |slot| PlannedWorker {
        agent: AgentInfo {
            name: format!("host-{slot}"),
            instance: format!("i{slot}"),
            labels: BTreeMap::new(),
            binary: "b".to_owned(),
            schema: SCHEMA.to_owned(),
            allow: "load".to_owned(),
            kernel: "6.1".to_owned(),
            cpus: 2,
        },
        settings: record.settings.clone(),
        clock: ClockEstimate { offset_ns: 5, rtt_ns: 200_000, bound_ns: 100_000 },
    };
    Plan {
        run: run.to_owned(),
        started: "2026-01-01T00:00:00Z".to_owned(),
        started_ns: 0,
        settings: record.settings.clone(),
        deadline_ns: 700_000_000_000,
        most_skew_ns: 250_000_000,
        host: record.host.clone(),
        workers: (0..workers).map(worker).collect(),
    }
}

/// A nats-server with JetStream, which ends with the test.
pub(crate) struct NatsServer {
    child: Child,
    store: PathBuf,
}

impl NatsServer {
    /// Starts the server with its files in a directory of this name; `None`: it is not in PATH.
    pub(crate) fn start(name: &str) -> Option<NatsServer> {
        let store = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-jetstream"));
        let _ = fs::remove_dir_all(&store);
        // Debian has it in a directory that is not in the PATH of every user.
        let command = ["nats-server", "/usr/sbin/nats-server"].into_iter().find_map(|program| {
            let mut command = Command::new(program);
            command.args(["-a", "127.0.0.1", "-p", "4222", "-js", "-sd"]).arg(&store);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            child::end_with_this_thread(&mut command);
            command.spawn().ok()
        });
        let server = NatsServer { child: command?, store };
        while TcpStream::connect("127.0.0.1:4222").is_err() {
            thread::sleep(Duration::from_millis(20));
        }
        Some(server)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.store);
    }
}
