//! The servers that an agent runs for coordinators. A server ends at its deadline, when its coordinator stops it, and when its
//! coordinator no longer asks for it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_record::ServeSettings;
use fourtuple_syscalls::child;
use tokio::sync::oneshot;

use crate::permission::Permissions;
use crate::protocol::Reply;

/// Time between two requests for a server, after which its coordinator counts as gone. Coordinators ask every second.
const LEASE: Duration = Duration::from_secs(10);

/// Maximum number of servers of an agent.
const MOST: usize = 16;

/// The beginning of the line that a server prints when it is ready.
const READY: &str = "listening on ";

#[derive(Default)]
pub(crate) struct Servers(BTreeMap<String, Server>);

struct Server {
    state: Arc<Mutex<State>>,
    listen: String,
    asked: Instant,
    stopped: bool,
}

enum State {
    /// The process, which is not waited for before the next state: its number is not given to another one.
    Running(u32),
    Ended(Reply),
}

impl Servers {
    /// Starts a server. The receiver gets the reply when it is ready, or has failed.
    pub(crate) fn start(
        &mut self,
        name: String,
        program: &Path,
        settings: &ServeSettings,
        permissions: &Permissions,
    ) -> Result<oneshot::Receiver<Reply>, String> {
        let arguments = arguments(settings, permissions)?;
        if self.0.len() >= MOST {
            return Err(format!("the agent has {MOST} servers at present"));
        }
        let mut command = Command::new(program);
        command.args(&arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        child::end_with_this_thread(&mut command);
        let (sender, ready) = oneshot::channel();
        let state = Arc::new(Mutex::new(State::Ended(Reply::Refused {
            reason: "the server has not started".to_owned(),
        })));
        let (of_thread, server) = (Arc::clone(&state), name.clone());
        // The process ends with its thread, which therefore starts it.
        let run = move || {
            let mut process = match command.spawn() {
                Ok(process) => process,
                Err(error) => {
                    let _ = sender.send(Reply::Refused { reason: format!("cannot run serve: {error}") });
                    return;
                }
            };
            set(&of_thread, State::Running(process.id()));
            let first = first_line(&mut process);
            let _ = sender.send(match first.strip_prefix(READY) {
                Some(listen) => Reply::Serving { server, listen: listen.to_owned() },
                None => Reply::Refused { reason: first.clone() },
            });
            let mut record = Vec::new();
            if let Some(mut stdout) = process.stdout.take() {
                let _ = stdout.read_to_end(&mut record);
            }
            let reply = match serde_json::from_slice(&record) {
                Ok(record) => Reply::Record { record },
                Err(_) => Reply::Refused { reason: "the server ended without a record".to_owned() },
            };
            set(&of_thread, State::Ended(reply));
            let _ = process.wait();
        };
        let begun = thread::Builder::new().name("serve".to_owned()).spawn(run);
        begun.map_err(|error| format!("cannot create a thread: {error}"))?;
        let listen = settings.listen.clone();
        self.0.insert(name, Server { state, listen, asked: Instant::now(), stopped: false });
        Ok(ready)
    }

    /// Returns the record of a server that has ended, or that it serves. Stops it if `stop` is set.
    pub(crate) fn ask(&mut self, name: &str, stop: bool) -> Reply {
        let Some(server) = self.0.get_mut(name) else {
            return Reply::Refused { reason: format!("there is no server {name:?}") };
        };
        server.asked = Instant::now();
        if stop {
            server.stop();
        }
        let ended = match &*lock(&server.state) {
            State::Running(_) => None,
            State::Ended(reply) => Some(reply.clone()),
        };
        match ended {
            None => Reply::Serving { server: name.to_owned(), listen: server.listen.clone() },
            Some(reply) => {
                self.0.remove(name);
                reply
            }
        }
    }

    /// Stops the servers of coordinators that are gone. No coordinator counts as gone unless the agent was `listening`: while NATS is
    /// unreachable, and after a pause of the agent.
    pub(crate) fn stop_abandoned(&mut self, listening: bool) {
        for server in self.0.values_mut() {
            if !listening {
                server.asked = Instant::now();
            } else if server.asked.elapsed() > LEASE {
                server.stop();
            }
        }
        self.0.retain(|_, server| {
            server.asked.elapsed() <= LEASE || matches!(*lock(&server.state), State::Running(_))
        });
    }
}

impl Server {
    fn stop(&mut self) {
        if let State::Running(process) = *lock(&self.state)
            && !std::mem::replace(&mut self.stopped, true)
        {
            // It has ended by itself if this fails.
            let _ = child::terminate(process);
        }
    }
}

fn lock(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn set(state: &Mutex<State>, to: State) {
    *lock(state) = to;
}

/// Reads the line with which a server says that it is ready, or why it is not.
fn first_line(process: &mut Child) -> String {
    let mut line = String::new();
    if let Some(stderr) = process.stderr.take() {
        let mut stderr = BufReader::new(stderr);
        let _ = stderr.read_line(&mut line);
        // A later write of the server must not fail.
        process.stderr = Some(stderr.into_inner());
    }
    line.trim_end().trim_start_matches("fourtuple: ").to_owned()
}

/// Returns the command line of typed settings. Each value is part of one argument, and the command checks it.
fn arguments(settings: &ServeSettings, permissions: &Permissions) -> Result<Vec<String>, String> {
    let protocol = &settings.protocol;
    if protocol.is_empty() || !protocol.bytes().all(|byte| byte.is_ascii_lowercase()) {
        return Err(format!("the setting protocol is invalid: {protocol:?}"));
    }
    let listen: std::net::SocketAddr = settings
        .listen
        .parse()
        .map_err(|_| format!("an agent listens on no such address: {}", settings.listen))?;
    permissions.target(&listen.into()).map_err(|error| error.to_string())?;
    let Some(for_ns) = settings.for_ns else { return Err("a server needs a deadline: --for".to_owned()) };
    let mut arguments = vec!["serve".to_owned(), protocol.clone(), "--json".to_owned()];
    let mut set = |flag: &str, value: &dyn std::fmt::Display| arguments.push(format!("--{flag}={value}"));
    set("listen", &listen);
    set("workers", &settings.workers);
    set("for", &format!("{for_ns}ns"));
    set("close", &settings.close);
    set("service", &settings.service);
    set("backlog", &settings.backlog);
    set("seed", &settings.seed);
    if let Some(policy) = &settings.policy {
        set("policy", policy);
    }
    if let Some(bytes) = settings.request_bytes {
        set("request", &bytes);
    }
    if let Some(bytes) = settings.response_bytes {
        set(if protocol == "http" { "body" } else { "response" }, &bytes);
    }
    if let Some(every) = settings.close_every.filter(|_| settings.close != "client") {
        set("close-every", &every);
    }
    if let Some(idle) = settings.idle_ns {
        set("idle", &format!("{idle}ns"));
    }
    if let (Some(at), Some(length)) = (settings.stall_at_ns, settings.stall_length_ns) {
        set("stall", &format!("{at}ns:{length}ns"));
    }
    let flags = [(settings.spin, "--spin"), (settings.pin, "--pin")];
    arguments.extend(flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag.to_owned()));
    Ok(arguments)
}
