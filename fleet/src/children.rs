//! The processes that an agent runs for coordinators: servers, and commands such as doctor. Each ends at its deadline, when its
//! coordinator stops it, and when its coordinator no longer asks for it.

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
use crate::protocol::{Reply, Request};

/// Time between two requests for a process, after which its coordinator counts as gone. Coordinators ask every second.
const LEASE: Duration = Duration::from_secs(10);

/// Time from the request to end until a process is killed.
const GRACE: Duration = Duration::from_secs(10);

/// Maximum number of servers of an agent.
const MAX_SERVERS: usize = 16;

/// Maximum number of commands of an agent at a time.
const MAX_COMMANDS: usize = 4;

/// The beginning of the line that a server prints when it is ready.
const READY: &str = "listening on ";

#[derive(Default)]
pub(crate) struct Children(BTreeMap<String, Entry>);

struct Entry {
    state: Arc<Mutex<State>>,
    /// The address of a server; `None` for a command.
    listen: Option<String>,
    asked: Instant,
    /// The time at which it must have ended by itself.
    deadline: Option<Instant>,
    /// The time since when it is to end.
    stopped: Option<Instant>,
}

enum State {
    /// The process, which is not waited for before the next state: its number is not given to another one.
    Running(u32),
    Ended(Reply),
}

impl Children {
    /// Starts a server. The receiver gets the reply when it is ready, or has failed.
    pub(crate) fn serve(
        &mut self,
        name: String,
        program: &Path,
        settings: &ServeSettings,
        permissions: &Permissions,
    ) -> Result<oneshot::Receiver<Reply>, String> {
        let arguments = arguments(settings, permissions)?;
        let servers = self.0.values().filter(|entry| entry.listen.is_some()).count();
        if servers >= MAX_SERVERS {
            return Err(format!("the agent has {MAX_SERVERS} servers at present"));
        }
        let entry = Entry::new(Some(settings.listen.clone()), None);
        self.start(name, program, &arguments, entry, |name, process, ready| {
            let first = first_line(process);
            let _ = ready.send(match first.strip_prefix(READY) {
                Some(listen) => Reply::Running { child: name, listen: Some(listen.to_owned()) },
                None => Reply::Refused { reason: first.clone() },
            });
            let none = || Reply::Refused { reason: "the server ended without a record".to_owned() };
            record(process).unwrap_or_else(none)
        })
    }

    /// Starts the command of a request. The arguments come from typed settings; there is no shell.
    pub(crate) fn command(
        &mut self,
        name: String,
        program: &Path,
        request: &Request,
    ) -> Result<oneshot::Receiver<Reply>, String> {
        let (Some(mut arguments), Some(limit)) = (request.command(), request.limit()?) else {
            return Err("the request has no command".to_owned());
        };
        let commands = self.0.values().filter(|entry| entry.listen.is_none()).count();
        if commands >= MAX_COMMANDS {
            return Err(format!("the agent performs {MAX_COMMANDS} commands at present"));
        }
        let text = arguments.join(" ");
        arguments.extend(["--json".to_owned(), "--quiet".to_owned()]);
        let entry = Entry::new(None, Some(Instant::now() + limit));
        self.start(name, program, &arguments, entry, move |name, process, ready| {
            let _ = ready.send(Reply::Running { child: name, listen: None });
            let mut stderr = process.stderr.take();
            // Read at the same time: a command that cannot write to one of them does not end.
            let said = thread::Builder::new().name("stderr".to_owned()).spawn(move || {
                let mut said = Vec::new();
                stderr.as_mut().map(|stderr| stderr.read_to_end(&mut said));
                String::from_utf8_lossy(&said).into_owned()
            });
            let record = record(process);
            let said = said.ok().and_then(|said| said.join().ok()).unwrap_or_default();
            let why = if said.is_empty() { "it ended without a record" } else { said.trim() };
            record.unwrap_or_else(|| Reply::Refused { reason: format!("{text}: {why}") })
        })
    }

    /// Starts a process whose thread calls `run`, which sends the first reply and returns the last one.
    fn start(
        &mut self,
        name: String,
        program: &Path,
        arguments: &[String],
        entry: Entry,
        run: impl FnOnce(String, &mut Child, oneshot::Sender<Reply>) -> Reply + Send + 'static,
    ) -> Result<oneshot::Receiver<Reply>, String> {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        child::end_with_this_thread(&mut command);
        let (sender, ready) = oneshot::channel();
        let (state, of_thread) = (Arc::clone(&entry.state), name.clone());
        // The process ends with its thread, which therefore starts it.
        let body = move || {
            let mut process = match command.spawn() {
                Ok(process) => process,
                Err(error) => {
                    let _ = sender.send(Reply::Refused { reason: format!("cannot run a command: {error}") });
                    return;
                }
            };
            set(&state, State::Running(process.id()));
            let last = run(of_thread, &mut process, sender);
            set(&state, State::Ended(last));
            let _ = process.wait();
        };
        let begun = thread::Builder::new().name("child".to_owned()).spawn(body);
        begun.map_err(|error| format!("cannot create a thread: {error}"))?;
        self.0.insert(name, entry);
        Ok(ready)
    }

    /// Returns the record of a process that has ended, or that it runs. Stops it if `stop` is set.
    pub(crate) fn ask(&mut self, name: &str, stop: bool) -> Reply {
        let Some(entry) = self.0.get_mut(name) else {
            return Reply::Refused { reason: format!("there is no process {name:?}") };
        };
        entry.asked = Instant::now();
        if stop {
            entry.stop();
        }
        let ended = match &*lock(&entry.state) {
            State::Running(_) => None,
            State::Ended(reply) => Some(reply.clone()),
        };
        match ended {
            None => Reply::Running { child: name.to_owned(), listen: entry.listen.clone() },
            Some(reply) => {
                self.0.remove(name);
                reply
            }
        }
    }

    /// Stops the processes of coordinators that are gone, and commands after their deadline. No coordinator counts as gone unless
    /// the agent was `listening`: while NATS is unreachable, and after a pause of the agent.
    pub(crate) fn stop_abandoned(&mut self, listening: bool) {
        for entry in self.0.values_mut() {
            if !listening {
                entry.asked = Instant::now();
            }
            let is_late = entry.deadline.is_some_and(|deadline| Instant::now() > deadline);
            if is_late || entry.asked.elapsed() > LEASE || entry.stopped.is_some() {
                entry.stop();
            }
        }
        self.0.retain(|_, entry| {
            entry.asked.elapsed() <= LEASE || matches!(*lock(&entry.state), State::Running(_))
        });
    }
}

impl Entry {
    fn new(listen: Option<String>, deadline: Option<Instant>) -> Entry {
        let state = State::Ended(Reply::Refused { reason: "the process has not started".to_owned() });
        let state = Arc::new(Mutex::new(state));
        Entry { state, listen, asked: Instant::now(), deadline, stopped: None }
    }

    /// Asks the process to end, once, and kills it after [`GRACE`].
    fn stop(&mut self) {
        // The lock is held: the process is not waited for meanwhile, so that its number is not given to another one.
        let state = lock(&self.state);
        let State::Running(process) = *state else { return };
        // It has ended by itself if these fail.
        let _ = match self.stopped {
            None => child::terminate(process),
            Some(since) if since.elapsed() > GRACE => child::kill(process),
            Some(_) => Ok(()),
        };
        self.stopped.get_or_insert_with(Instant::now);
    }
}

fn lock(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn set(state: &Mutex<State>, to: State) {
    *lock(state) = to;
}

/// Reads stdout until its end, and returns the record in it.
fn record(process: &mut Child) -> Option<Reply> {
    let mut printed = Vec::new();
    let _ = process.stdout.take()?.read_to_end(&mut printed);
    Some(Reply::Record { record: serde_json::from_slice(&printed).ok()? })
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
