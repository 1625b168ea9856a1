use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::panic;
use std::process::{self, Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fourtuple_record::format_time;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{Endpoint, child, netns, procfs, schedule, sock_diag, unix_diag};

use crate::compare::CompareError;
use crate::load::{Load, Scheme};

/// The time between two checks whether a server listens, or whether a process has ended.
pub(crate) const POLL: Duration = Duration::from_millis(2);

/// The time from SIGINT to SIGKILL for a server, and the longest time for the output of a server that has ended.
const GRACE: Duration = Duration::from_secs(2);

/// Bytes of a server's last output on stderr that an error quotes.
const QUOTED: usize = 400;

/// The command line of a server that each trial of a load starts.
#[derive(Clone, Debug)]
pub struct ServerCommand {
    /// The flag that gave the command: `--server` or `--server-b`.
    pub flag: &'static str,
    /// The command as typed.
    pub text: String,
    /// The program: the running `fourtuple` for `serve ...`, else a path or a name in PATH.
    pub program: OsString,
    /// The arguments of the program.
    pub arguments: Vec<String>,
}

impl ServerCommand {
    /// Starts the server on the CPUs and in the network namespace of the calling thread. It ends with this thread.
    pub(crate) fn start(&self) -> Result<RunningServer, CompareError> {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // In a process group of its own the server does not get the terminal's SIGINT, and does not end before the load.
        command.process_group(0);
        child::end_with_this_thread(&mut command);
        let mut child = command.spawn().map_err(|error| self.spawn_error(error))?;
        match child.stderr.take().map(StderrTail::read).expect("stderr is piped") {
            Ok(stderr) => Ok(RunningServer { child, stderr }),
            Err(error) => {
                // Without a reader the server would block on a full pipe.
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Returns an error of the command line, or of the environment if memory or processes are exhausted (ENOMEM, EAGAIN).
    fn spawn_error(&self, error: io::Error) -> CompareError {
        use std::io::ErrorKind::{OutOfMemory, WouldBlock};
        if matches!(error.kind(), WouldBlock | OutOfMemory) {
            return CompareError::Call { what: format!("cannot start '{}'", self.text), error };
        }
        let message = format!("invalid value '{}' for '{}': cannot start it: {error}", self.text, self.flag);
        CompareError::Usage(message)
    }
}

/// A server process. Dropping it sends SIGINT, and SIGKILL after a grace period.
pub(crate) struct RunningServer {
    child: Child,
    stderr: StderrTail,
}

impl RunningServer {
    /// Returns the exit status if the server has ended.
    pub(crate) fn exit_status(&mut self) -> Result<Option<ExitStatus>, CompareError> {
        self.child.try_wait().map_err(CompareError::call("cannot wait for a server"))
    }

    /// Returns the last output on stderr as the end of a sentence: `; it said: ...`.
    pub(crate) fn last_words(&mut self) -> String {
        // Output may still be in the pipe after the server has ended.
        let has_ended = matches!(self.child.try_wait(), Ok(Some(_)));
        let (begun, longest) = (Instant::now(), if has_ended { GRACE } else { Duration::from_millis(100) });
        while !self.stderr.reader.is_finished() && begun.elapsed() < longest {
            thread::sleep(POLL);
        }
        let last = self.stderr.last.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&last);
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        if lines.is_empty() {
            "; it said nothing".to_owned()
        } else {
            format!("; it said: {}", lines.join(" "))
        }
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        let begun = Instant::now();
        // After `wait` the process id may belong to another process, so only a running child gets the signal.
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = child::interrupt(self.child.id());
        }
        while matches!(self.child.try_wait(), Ok(None)) {
            if begun.elapsed() >= GRACE {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            thread::sleep(POLL);
        }
    }
}

/// The end of a server's output on stderr, which a thread reads.
struct StderrTail {
    last: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl StderrTail {
    /// Starts a thread that reads until the pipe closes, so that the server never blocks on a full pipe.
    fn read(mut pipe: ChildStderr) -> Result<StderrTail, CompareError> {
        let last = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&last);
        // The pipe closes when the last process that inherited it ends; `NamespaceCleanup` ends all of them.
        let reader = thread::Builder::new().spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut buffer) {
                let mut last = kept.lock().unwrap_or_else(PoisonError::into_inner);
                last.extend_from_slice(&buffer[..count]);
                let old = last.len().saturating_sub(QUOTED);
                last.drain(..old);
            }
        });
        let reader =
            reader.map_err(CompareError::call("cannot start a thread to read the output of a server"))?;
        Ok(StderrTail { last, reader })
    }
}

/// The addresses at which a load expects its server: on loopback, or a Unix socket's path.
#[derive(Debug)]
pub struct ServerAddress {
    pub(crate) endpoints: Vec<Endpoint>,
    transport: Transport,
    /// Number of addresses that need a listener.
    needed: usize,
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.endpoints.iter().map(ToString::to_string).collect();
        formatter.write_str(&all.join(" or "))
    }
}

impl ServerAddress {
    /// Resolves the target of a load.
    ///
    /// # Errors
    /// A text for the user if the target's name does not resolve, or if the address is outside of loopback: the network
    /// namespace of a trial has no other device.
    pub(crate) fn of(load: &Load) -> Result<ServerAddress, String> {
        let target = &load.target;
        let endpoints = load.resolve().map_err(|error| error.to_string())?;
        let transport = if target.scheme() == Scheme::Udp { Transport::Udp } else { Transport::Tcp };
        let is_elsewhere =
            |address: SocketAddr| !address.ip().is_loopback() && !address.ip().is_unspecified();
        match endpoints.iter().filter_map(Endpoint::inet).any(is_elsewhere) {
            true => Err(format!(
                "'{target}' with '--server': each trial has a network namespace of its own, with loopback and nothing \
                 else; expected a target in 127.0.0.0/8, [::1] or unix:/PATH"
            )),
            false => Ok(ServerAddress {
                needed: if load.all_addresses { endpoints.len() } else { 1 },
                endpoints,
                transport,
            }),
        }
    }

    /// Returns whether a socket of the calling thread's network namespace listens on one of the addresses, or on each if the load
    /// goes to all. A UDP socket listens when it is bound and not connected.
    pub(crate) fn has_listener(&self) -> Result<bool, CompareError> {
        let mut found = 0;
        for endpoint in &self.endpoints {
            found += usize::from(self.listens(endpoint)?);
        }
        Ok(found >= self.needed)
    }

    fn listens(&self, endpoint: &Endpoint) -> Result<bool, CompareError> {
        let found = match (endpoint, self.transport) {
            (Endpoint::Unix(path), _) => {
                // `None` until the server has created the path; all namespaces share the file system.
                let queue = unix_diag::listener(path)
                    .map_err(CompareError::call("cannot ask the kernel for listeners (unix_diag)"))?;
                return Ok(queue.is_some());
            }
            (Endpoint::Inet(target), Transport::Tcp) => tcp_listener(*target),
            (Endpoint::Inet(target), Transport::Udp) => udp_socket(*target),
        };
        found.map_err(CompareError::call("cannot ask the kernel for listeners (sock_diag)"))
    }
}

fn tcp_listener(target: SocketAddr) -> io::Result<bool> {
    let mut found = false;
    sock_diag::each_listener(|listener| {
        found |= receives(listener.local, listener.ipv6_only, target);
    })?;
    Ok(found)
}

fn udp_socket(target: SocketAddr) -> io::Result<bool> {
    let mut found = false;
    // The peer of a socket that is not connected is the unspecified address with port 0.
    for destination in [SocketAddr::from(([0; 4], 0)), SocketAddr::from(([0; 16], 0))] {
        let filter = sock_diag::Filter {
            transport: Transport::Udp,
            source: None,
            source_port: Some(target.port()),
            destination,
        };
        sock_diag::each(&filter, |entry| found |= receives(entry.local, false, target))?;
    }
    Ok(found)
}

/// Returns whether the kernel delivers packets for `target` to a socket that is bound to `local`.
fn receives(local: SocketAddr, ipv6_only: bool, target: SocketAddr) -> bool {
    let is_wildcard = match local.ip() {
        IpAddr::V4(ip) => ip.is_unspecified() && target.is_ipv4(),
        IpAddr::V6(ip) => ip.is_unspecified() && (target.is_ipv6() || !ipv6_only),
    };
    // The kernel sends what is addressed to the unspecified address to loopback (ip_route_output_key_hash_rcu,
    // ip6_datagram_connect).
    local.port() == target.port()
        && (is_wildcard
            || local.ip() == target.ip()
            || (target.ip().is_unspecified() && local.ip().is_loopback()))
}

/// The servers of both sides, and how trials run beside them.
#[derive(Debug)]
pub struct Servers {
    /// The commands of A's and B's server.
    pub commands: [ServerCommand; 2],
    /// The addresses to which the loads of A and B connect.
    pub addresses: [ServerAddress; 2],
    /// Maximum time until a server listens.
    pub wait: Duration,
    /// The CPUs of client and server; `None` leaves placement to the kernel.
    pub cpus: Option<CpuSplit>,
}

impl Servers {
    /// Returns the testbed of side 0 (A) or 1 (B).
    pub(crate) fn testbed(&self, side: usize) -> Testbed<'_> {
        Testbed {
            server: &self.commands[side],
            address: &self.addresses[side],
            wait: self.wait,
            cpus: self.cpus.as_ref(),
        }
    }
}

/// The CPUs of the client and of the server: the first and the second half of the CPUs that this process may use.
#[derive(Debug)]
pub struct CpuSplit {
    client: Vec<usize>,
    server: Vec<usize>,
}

impl CpuSplit {
    /// Splits the CPUs of the calling thread (sched_getaffinity(2)).
    ///
    /// # Errors
    /// [`CompareError::Environment`] if the thread may use one CPU only; [`CompareError::Call`] if the kernel does not
    /// tell.
    pub fn of_this_process() -> Result<CpuSplit, CompareError> {
        let mut client = schedule::allowed_cpus()
            .map_err(CompareError::call("cannot read which CPUs this process may use"))?;
        if client.len() < 2 {
            let message = "'--pin' keeps client and server apart, and this process may use one CPU only";
            return Err(CompareError::Environment(message.to_owned()));
        }
        let server = client.split_off(client.len() / 2);
        Ok(CpuSplit { client, server })
    }
}

/// A network namespace with a server in it, made for one trial.
pub(crate) struct Testbed<'a> {
    server: &'a ServerCommand,
    address: &'a ServerAddress,
    wait: Duration,
    cpus: Option<&'a CpuSplit>,
}

/// The end of a trial in a testbed.
pub(crate) enum TestbedOutcome<R> {
    /// The trial ended, and its server still ran.
    Done(R),
    /// The server ended before the trial did; the text says how.
    ServerEnded(String),
    /// The stop flag was set before the trial began.
    Interrupted,
}

impl Testbed<'_> {
    /// Makes a network namespace, starts the server in it, waits until the server listens and runs the trial there. All
    /// processes of the namespace have ended on return, also after an error.
    pub(crate) fn run<R: Send>(
        &self,
        side: &str,
        stop: &AtomicBool,
        trial: impl FnOnce() -> Result<R, CompareError> + Send,
    ) -> Result<TestbedOutcome<R>, CompareError> {
        thread::scope(|scope| {
            let thread = thread::Builder::new()
                .spawn_scoped(scope, || {
                    netns::enter_new().map_err(CompareError::Namespace)?;
                    self.run_in_this_namespace(side, stop, trial)
                })
                .map_err(CompareError::call("start a thread"))?;
            thread.join().unwrap_or_else(|payload| panic::resume_unwind(payload))
        })
    }

    fn run_in_this_namespace<R>(
        &self,
        side: &str,
        stop: &AtomicBool,
        trial: impl FnOnce() -> Result<R, CompareError>,
    ) -> Result<TestbedOutcome<R>, CompareError> {
        // Declared first, so that it is dropped after the server has ended.
        let _cleanup = NamespaceCleanup;
        // A child process inherits the CPUs and the namespace of the thread that starts it.
        self.pin(|cpus| &cpus.server)?;
        let mut server = self.server.start()?;
        self.pin(|cpus| &cpus.client)?;
        let begun = Instant::now();
        while !self.address.has_listener()? {
            let address = self.address.to_string();
            let command = &self.server.text;
            if stop.load(Ordering::Relaxed) {
                return Ok(TestbedOutcome::Interrupted);
            }
            if let Some(status) = server.exit_status()? {
                let said = server.last_words();
                return Err(CompareError::Environment(format!(
                    "the server of {side}, '{command}', ended ({status}) before it listened on {address}{said}"
                )));
            }
            if begun.elapsed() >= self.wait {
                let wait = format_time(self.wait);
                let said = server.last_words();
                return Err(CompareError::Environment(format!(
                    "the server of {side}, '{command}', does not listen on {address} after {wait} (--server-wait){said}"
                )));
            }
            thread::sleep(POLL);
        }
        let result = trial()?;
        Ok(match server.exit_status()? {
            Some(status) if !stop.load(Ordering::Relaxed) => TestbedOutcome::ServerEnded(format!(
                "its server ended ({status}) before the load did{}",
                server.last_words()
            )),
            _ => TestbedOutcome::Done(result),
        })
    }

    fn pin(&self, half: impl Fn(&CpuSplit) -> &Vec<usize>) -> Result<(), CompareError> {
        let Some(cpus) = self.cpus else { return Ok(()) };
        schedule::pin_among(half(cpus)).map_err(CompareError::call("cannot keep to some CPUs (--pin)"))
    }
}

/// Kills every other process in the calling thread's network namespace when dropped: children of the server that the
/// server did not end.
struct NamespaceCleanup;

impl Drop for NamespaceCleanup {
    fn drop(&mut self) {
        const MAX_WAIT: Duration = Duration::from_secs(1);
        let Ok(own) = fs::read_link("/proc/thread-self/ns/net") else { return };
        let begun = Instant::now();
        // Repeated: a process may fork between the listing of /proc and its SIGKILL.
        while begun.elapsed() < MAX_WAIT {
            let is_inside = |id: &u32| {
                *id != process::id()
                    && fs::read_link(format!("/proc/{id}/ns/net")).is_ok_and(|found| found == own)
            };
            let inside: Vec<u32> = procfs::processes("/").filter(is_inside).collect();
            if inside.is_empty() {
                return;
            }
            for id in inside {
                let _ = child::kill(id);
            }
            thread::sleep(POLL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Workload;

    #[test]
    fn wildcard_and_loopback_sockets_receive() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        for (local, ipv6_only, target, expected) in [
            ("127.0.0.1:80", false, "127.0.0.1:80", true),
            ("127.0.0.1:80", false, "127.0.0.1:81", false),
            ("127.0.0.2:80", false, "127.0.0.1:80", false),
            ("0.0.0.0:80", false, "127.0.0.1:80", true),
            ("0.0.0.0:80", false, "[::1]:80", false),
            ("[::]:80", false, "127.0.0.1:80", true),
            ("[::]:80", true, "127.0.0.1:80", false),
            ("[::]:80", true, "[::1]:80", true),
            ("127.0.0.1:80", false, "0.0.0.0:80", true),
        ] {
            assert_eq!(receives(address(local), ipv6_only, address(target)), expected, "{local} {target}");
        }
    }

    #[test]
    fn addresses_outside_of_loopback_are_refused() {
        for (target, accepted) in [
            ("tcp://127.0.0.9:1", true),
            ("udp://[::1]:1", true),
            ("unix:/run/x", true),
            ("http://192.0.2.1", false),
        ] {
            let load = Load::new(target.parse().unwrap(), Workload::Connect);
            assert_eq!(ServerAddress::of(&load).is_ok(), accepted, "{target}");
        }
    }
}
