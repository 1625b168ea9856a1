use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::process::{self, Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Parser;
use fourtuple_lab::Namespace;
use fourtuple_load::{Scheme, Target};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{Endpoint, child, schedule, sock_diag, unix_diag};

use super::words;
use crate::exit::UsageError;
use crate::{Arguments, Command as Subcommand, one_line};

/// How often it is looked whether a server listens, or has ended.
const LOOK: Duration = Duration::from_millis(2);

/// How long a server may take to end after SIGINT.
const GRACE: Duration = Duration::from_secs(2);

/// How much of what a server wrote last is quoted.
const QUOTED: usize = 400;

/// How a server is started: `serve ...` is ours, anything else a program by its path or by PATH.
#[derive(Clone)]
pub(super) struct Server {
    flag: &'static str,
    /// As typed.
    pub(super) text: String,
    program: OsString,
    words: Vec<String>,
}

impl Server {
    /// Reads a command, and refuses what cannot be a server before anything runs.
    pub(super) fn read(flag: &'static str, text: &str) -> anyhow::Result<Server> {
        let refuse = |why: String| {
            anyhow::Error::from(UsageError(format!("invalid value '{text}' for '{flag}': {why}")))
        };
        let mut words = words::split(text).map_err(refuse)?;
        if words.first().is_some_and(|word| word == "fourtuple") {
            words.remove(0);
            if words.first().is_none_or(|word| word != "serve") {
                return Err(refuse("of fourtuple, serve alone is a server".to_owned()));
            }
        }
        let program = match words.first().map(String::as_str) {
            None => return Err(refuse("expected serve ..., or a program and its arguments".to_owned())),
            Some("serve") => {
                let line = ["fourtuple".to_owned()].into_iter().chain(words.iter().cloned());
                let arguments = Arguments::try_parse_from(line).map_err(|error| {
                    refuse(if error.use_stderr() {
                        one_line(&error)
                    } else {
                        "there is nothing to serve".to_owned()
                    })
                })?;
                if let Subcommand::Serve(serve) = &arguments.command {
                    serve.check().map_err(|error| refuse(crate::exit::message(&error)))?;
                }
                env::current_exe().context("cannot find this program")?.into_os_string()
            }
            Some(_) => words.remove(0).into(),
        };
        Ok(Server { flag, text: text.to_owned(), program, words })
    }

    fn start(&self) -> anyhow::Result<Running> {
        let mut command = Command::new(&self.program);
        command.args(&self.words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // A group of its own: Ctrl-C on a terminal must not end it before the load.
        command.process_group(0);
        child::end_with_this_thread(&mut command);
        let mut child = command.spawn().map_err(|error| {
            UsageError(format!("invalid value '{}' for '{}': cannot start it: {error}", self.text, self.flag))
        })?;
        let stderr = child.stderr.take().map(Stderr::read).expect("it was asked for");
        Ok(Running { child, stderr })
    }
}

/// Where a load finds its server: an address of its own namespace's loopback, or a path.
pub(super) struct Place {
    endpoint: Endpoint,
    transport: Transport,
}

impl Place {
    /// # Errors
    /// In words: what is not within a namespace that has loopback and nothing else.
    pub(super) fn of(target: &Target) -> Result<Place, String> {
        let endpoint =
            target.resolve().map_err(|error| format!("{target}: the name does not resolve: {error}"))?;
        let transport = if target.scheme() == Scheme::Udp { Transport::Udp } else { Transport::Tcp };
        match endpoint.inet().map(|address| address.ip()) {
            Some(ip) if !ip.is_loopback() && !ip.is_unspecified() => Err(format!(
                "'{target}' with '--server': each trial has a network namespace of its own, with loopback and nothing \
                 else; expected a target in 127.0.0.0/8, [::1] or unix:/PATH"
            )),
            _ => Ok(Place { endpoint, transport }),
        }
    }

    /// Whether somebody listens there, in the calling thread's namespace.
    fn is_listened_on(&self) -> anyhow::Result<bool> {
        let mut found = false;
        match (&self.endpoint, self.transport) {
            (Endpoint::Unix(path), _) => {
                // Without the path nobody listens there yet; the namespace of files is everybody's.
                return match path.exists().then(|| unix_diag::listener(path)) {
                    Some(Ok(queue)) => Ok(queue.is_some()),
                    Some(Err(_)) | None => Ok(false),
                };
            }
            (Endpoint::Inet(target), Transport::Tcp) => sock_diag::each_listener(|listener| {
                found |= takes(listener.local, listener.only_ipv6, *target);
            }),
            (Endpoint::Inet(target), Transport::Udp) => {
                // Sockets that are bound and not connected.
                [SocketAddr::from(([0; 4], 0)), SocketAddr::from(([0; 16], 0))].into_iter().try_for_each(
                    |destination| {
                        let port = Some(target.port());
                        let transport = Transport::Udp;
                        let filter =
                            sock_diag::Filter { transport, source: None, source_port: port, destination };
                        sock_diag::each(&filter, |entry| found |= takes(entry.local, false, *target))
                    },
                )
            }
        }
        .context("cannot ask the kernel who listens (sock_diag)")?;
        Ok(found)
    }
}

/// Whether a socket at `local` gets what is sent to `target`.
fn takes(local: SocketAddr, only_ipv6: bool, target: SocketAddr) -> bool {
    let everywhere = match local.ip() {
        IpAddr::V4(ip) => ip.is_unspecified() && target.is_ipv4(),
        IpAddr::V6(ip) => ip.is_unspecified() && (target.is_ipv6() || !only_ipv6),
    };
    // The unspecified address as a destination is loopback (ip_route_output_key_hash_rcu, ip6_datagram_connect).
    local.port() == target.port()
        && (everywhere
            || local.ip() == target.ip()
            || (target.ip().is_unspecified() && local.ip().is_loopback()))
}

/// CPUs of the server and of the client: the last and the first half of those that this process may use.
pub(super) struct Halves {
    server: Vec<usize>,
    client: Vec<usize>,
}

impl Halves {
    pub(super) fn of_this_process() -> anyhow::Result<Halves> {
        let mut client = schedule::allowed_cpus().context("cannot read which CPUs may be used")?;
        if client.len() < 2 {
            bail!("'--pin' keeps client and server apart, and this process may use one CPU only");
        }
        let server = client.split_off(client.len() / 2);
        Ok(Halves { server, client })
    }
}

/// Where the trials of a side take place.
pub(super) struct Arena<'a> {
    pub(super) server: &'a Server,
    pub(super) place: &'a Place,
    pub(super) patience: Duration,
    pub(super) cpus: Option<&'a Halves>,
}

/// What came of a trial in an arena.
pub(super) enum Held<R> {
    Done(R),
    /// The server did not live as long as the trial; what it said.
    WithoutServer(String),
    /// It was told to stop before the trial began.
    Interrupted,
}

impl Arena<'_> {
    /// Makes a network namespace, starts the server in it, waits until it listens and holds the trial there. Whichever way
    /// that ends, nothing in the namespace goes on.
    pub(super) fn hold<R: Send>(
        &self,
        name: &str,
        stop: &AtomicBool,
        trial: impl FnOnce() -> anyhow::Result<R> + Send,
    ) -> anyhow::Result<Held<R>> {
        Namespace::run(|_| Ok(self.within(name, stop, trial)))?
    }

    fn within<R>(
        &self,
        name: &str,
        stop: &AtomicBool,
        trial: impl FnOnce() -> anyhow::Result<R>,
    ) -> anyhow::Result<Held<R>> {
        // Ends after the server does: variables are dropped last to first.
        let _sweep = Sweep;
        // What is started has the CPUs and the namespace of the thread that starts it.
        self.pin(|cpus| &cpus.server)?;
        let mut running = self.server.start()?;
        self.pin(|cpus| &cpus.client)?;
        let begun = Instant::now();
        while !self.place.is_listened_on()? {
            let place = &self.place.endpoint;
            if stop.load(Ordering::Relaxed) {
                return Ok(Held::Interrupted);
            }
            if let Some(status) = running.ended()? {
                let said = running.said();
                bail!(
                    "the server of {name}, '{}', ended ({status}) before it listened on {place}{said}",
                    self.server.text
                );
            }
            if begun.elapsed() >= self.patience {
                let patience = self.patience.as_secs_f64();
                let said = running.said();
                bail!(
                    "the server of {name}, '{}', does not listen on {place} after {patience} s (--server-wait){said}",
                    self.server.text
                );
            }
            thread::sleep(LOOK);
        }
        let result = trial()?;
        Ok(match running.ended()? {
            Some(status) if !stop.load(Ordering::Relaxed) => Held::WithoutServer(format!(
                "its server ended ({status}) before the load did{}",
                running.said()
            )),
            _ => Held::Done(result),
        })
    }

    fn pin(&self, half: impl Fn(&Halves) -> &Vec<usize>) -> anyhow::Result<()> {
        let Some(cpus) = self.cpus else { return Ok(()) };
        schedule::pin_among(half(cpus)).context("cannot keep to some CPUs (--pin)")
    }
}

/// A server that was started; it ends with this.
struct Running {
    child: Child,
    stderr: Stderr,
}

/// What a server says, of which the end is kept.
struct Stderr {
    last: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Stderr {
    /// Reads on, so that a server never waits for room in the pipe.
    fn read(mut pipe: ChildStderr) -> Stderr {
        let last = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&last);
        // Ends with the last process that has the pipe, and Sweep leaves none.
        let reader = thread::spawn(move || {
            let mut room = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut room) {
                let mut last = kept.lock().unwrap_or_else(PoisonError::into_inner);
                last.extend_from_slice(&room[..count]);
                let old = last.len().saturating_sub(QUOTED);
                last.drain(..old);
            }
        });
        Stderr { last, reader }
    }
}

impl Running {
    /// How it ended, if it has.
    fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        self.child.try_wait().context("cannot wait for a server")
    }

    /// The end of what it wrote on stderr, as the end of a sentence.
    fn said(&self) -> String {
        // What it wrote last may still be on its way.
        let begun = Instant::now();
        while !self.stderr.reader.is_finished() && begun.elapsed() < Duration::from_millis(100) {
            thread::sleep(LOOK);
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

impl Drop for Running {
    fn drop(&mut self) {
        let begun = Instant::now();
        // Reaped already, it has no number any more that a signal could be sent to.
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = child::interrupt(self.child.id());
        }
        while matches!(self.child.try_wait(), Ok(None)) {
            if begun.elapsed() >= GRACE {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            thread::sleep(LOOK);
        }
    }
}

/// Ends what is left in the calling thread's network namespace: what a server has started and not ended.
struct Sweep;

impl Drop for Sweep {
    fn drop(&mut self) {
        const PATIENCE: Duration = Duration::from_secs(1);
        let Ok(own) = fs::read_link("/proc/thread-self/ns/net") else { return };
        let begun = Instant::now();
        // Several times: what is ended may have started another in between.
        while begun.elapsed() < PATIENCE {
            let Ok(processes) = fs::read_dir("/proc") else { return };
            let numbers = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
            let is_within = |process: &u32| {
                *process != process::id()
                    && fs::read_link(format!("/proc/{process}/ns/net")).is_ok_and(|found| found == own)
            };
            let left: Vec<u32> = numbers.filter(is_within).collect();
            if left.is_empty() {
                return;
            }
            for process in left {
                let _ = child::kill(process);
            }
            thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_gets_what_is_sent() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        for (local, only_ipv6, target, gets) in [
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
            assert_eq!(takes(address(local), only_ipv6, address(target)), gets, "{local} {target}");
        }
    }

    #[test]
    fn a_server_is_ours_or_a_program() {
        let ours = Server::read("--server", "fourtuple serve crr --listen 127.0.0.1:80").unwrap();
        assert_eq!(ours.program, env::current_exe().unwrap());
        assert_eq!(ours.words, ["serve", "crr", "--listen", "127.0.0.1:80"]);
        let other = Server::read("--server", "./server --port '8 0'").unwrap();
        assert_eq!(
            (other.program.to_str(), &other.words[..]),
            (Some("./server"), &["--port".to_owned(), "8 0".to_owned()][..])
        );
        for (text, says) in [
            ("", "expected serve"),
            ("fourtuple", "serve alone"),
            ("fourtuple load tcp://127.0.0.1:80", "serve alone"),
            ("serve crr", "--listen"),
            ("serve --help", "nothing to serve"),
            ("serve crr --listen 127.0.0.1:80 --spin", "--service"),
            ("nginx 'x", "not closed"),
        ] {
            let error = Server::read("--server-b", text).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains("--server-b"), "{error:?}");
        }
    }

    #[test]
    fn a_place_is_within_the_namespace() {
        for (target, within) in [
            ("tcp://127.0.0.9:1", true),
            ("udp://[::1]:1", true),
            ("unix:/run/x", true),
            ("http://192.0.2.1", false),
        ] {
            assert_eq!(Place::of(&target.parse().unwrap()).is_ok(), within, "{target}");
        }
    }
}
