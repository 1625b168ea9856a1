//! The agent: a NATS service that performs the requests of a coordinator on this host.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use async_nats::service::{self, ServiceExt};
use async_nats::{Client, connection};
use fourtuple_bench::load::Prepared;
use fourtuple_record::{Host, SCHEMA, printable};
use fourtuple_syscalls::resource;
use futures_util::StreamExt;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::FleetError;
use crate::children::Children;
use crate::nats::{Connection, binary_digest, discover, random_name, runtime};
use crate::permission::{Permission, Permissions};
use crate::protocol::{
    AgentInfo, Envelope, MAX_AHEAD, MAX_REQUEST, MAX_RUN, Reply, Request, SERVICE, Sessions, agent_subject,
    is_token,
};
use crate::request::LoadRequest;
use crate::worker::{self, JournalReader, Outbox, Worker};

/// Time in which another agent of the same name answers.
const NAME_WAIT: Duration = Duration::from_millis(500);

/// Time between two looks at the stop flag.
const LOOK: Duration = Duration::from_millis(50);

/// Time between two looks after which the agent was stopped meanwhile, and requests may be waiting for it.
const PAUSE: Duration = Duration::from_secs(1);

/// Time that an agent has after its end to publish the last messages.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Maximum length of a time in RFC 3339 with nanoseconds and an offset.
const MAX_STARTED: usize = 35;

/// The name of a request to prepare a load, in the log.
const PREPARE: &str = "prepare";

/// The name of a request for a process, in the log.
const ASK: &str = "ask";

/// Maximum number of loads that threads prepare at a time: each may wait for a name server.
const MAX_PREPARING: usize = 4;

/// Maximum number of runs whose messages wait for NATS.
const MAX_PUBLISHERS: usize = 8;

/// Maximum number of journals that are published again at a time. A further one ends the oldest.
const MAX_RESENDS: usize = 4;

/// Maximum number of requests that wait in memory; a message of NATS has up to 1 MiB.
const MAX_QUEUED: usize = 256;

/// Number of lines about requests that may follow at once, and the number of further ones in a second.
const MAX_LINES: f64 = 200.0;
const LINES_PER_S: f64 = 10.0;

/// Maximum length of a line about a request, and of the reason in a reply, in characters.
const MAX_REASON: usize = 1_000;

/// The settings of an agent.
pub struct Agent {
    /// How to connect to NATS.
    pub connection: Connection,
    /// Name of this host.
    pub name: String,
    /// Labels by which a coordinator selects agents.
    pub labels: Vec<(String, String)>,
    /// The accepted commands and targets.
    pub permissions: Permissions,
    /// Directory for the results of runs.
    pub directory: PathBuf,
    pub host: Host,
    /// The program that performs doctor, lab and trace.
    pub program: PathBuf,
}

/// A prepared or running load.
struct Job {
    run: String,
    slot: u32,
    anyway: bool,
    sources: Option<String>,
    prepared: Arc<Prepared>,
    stop: Arc<AtomicBool>,
    /// Set when the run has ended.
    ended: Arc<AtomicBool>,
    started: bool,
}

impl Job {
    fn is_running(&self) -> bool {
        self.started && !self.ended.load(Ordering::Relaxed)
    }
}

/// A job and the reply to its coordinator, or the reason why there is none.
type Preparation = Result<(Box<Job>, Reply), String>;

struct State {
    agent: Agent,
    client: Client,
    sessions: Sessions,
    job: Option<Job>,
    /// For loads that threads have prepared.
    prepared: UnboundedSender<(service::Request, Preparation)>,
    children: Children,
    /// Number of loads that threads prepare.
    preparing: usize,
    /// Tasks that publish the messages of runs.
    publishers: Vec<JoinHandle<()>>,
    /// Tasks that publish the messages of a run and a slot again, the oldest first.
    resends: Vec<((String, u32), JoinHandle<()>)>,
    log: fn(&str),
    lines: Arc<Mutex<Lines>>,
}

/// The lines of the log about requests. A client may send any number of requests, so that their lines are limited.
struct Lines {
    log: fn(&str),
    left: f64,
    at: Instant,
    omitted: u64,
}

impl Lines {
    fn new(log: fn(&str)) -> Lines {
        Lines { log, left: MAX_LINES, at: Instant::now(), omitted: 0 }
    }

    fn add(&mut self, line: &str) {
        let earned = self.at.elapsed().as_secs_f64() * LINES_PER_S;
        (self.at, self.left) = (Instant::now(), (self.left + earned).min(MAX_LINES));
        if self.left < 1.0 {
            self.omitted += 1;
            return;
        }
        self.left -= 1.0;
        if let omitted @ 1.. = std::mem::take(&mut self.omitted) {
            (self.log)(&format!("left out {omitted} lines about requests"));
        }
        (self.log)(line);
    }
}

impl Agent {
    /// Serves requests until `stop` is set. `log` gets a line for each request and each refusal.
    ///
    /// # Errors
    ///
    /// [`FleetError`] if the agent cannot start. Later errors are logged: the agent connects to NATS again.
    pub fn run(self, stop: &AtomicBool, log: fn(&str)) -> Result<(), FleetError> {
        if !is_token(&self.name) {
            return Err(FleetError::Setting(format!(
                "invalid value '{}' for '--name': expected letters, digits, - and _, at most 64",
                self.name
            )));
        }
        let runtime = runtime()?;
        let result = runtime.block_on(self.serve(stop, log));
        // A connection that is gone does not delay the end.
        runtime.shutdown_timeout(Duration::from_millis(100));
        result
    }

    async fn serve(self, stop: &AtomicBool, log: fn(&str)) -> Result<(), FleetError> {
        let instance = random_name()?;
        let info = AgentInfo {
            name: self.name.clone(),
            instance: instance.clone(),
            labels: self.labels.iter().cloned().collect(),
            binary: binary_digest(&self.program)?,
            schema: SCHEMA.to_owned(),
            allow: self.permissions.command_names(),
            kernel: self.host.kernel.clone(),
            cpus: self.host.cpus,
        };
        let client = self.connection.open(&format!("fourtuple agent {}", self.name), MAX_QUEUED).await?;
        let service = client
            .service_builder()
            .description("performs measurements on this host")
            .metadata(info.to_metadata().into_iter().collect::<HashMap<_, _>>())
            .start(SERVICE, env!("CARGO_PKG_VERSION"))
            .await
            .map_err(FleetError::nats("start the service"))?;
        let group = service.group(agent_subject(&instance));
        let refused = || FleetError::nats("add an endpoint of the service");
        let mut clock = group.endpoint("clock").await.map_err(refused())?;
        let mut session = group.endpoint("session").await.map_err(refused())?;
        let mut requests = group.endpoint("request").await.map_err(refused())?;
        // The service answers already, so that at least one of two agents that start at the same time sees the second name.
        let taken = discover(&client, NAME_WAIT).await?;
        if taken.iter().any(|other| other.name == self.name && other.instance != instance) {
            return Err(FleetError::NameTaken { name: self.name });
        }
        log(&format!("agent {} is ready ({})", self.name, self.connection.shown_url()));
        let (prepared, mut preparations) = unbounded_channel();
        let mut state = State {
            agent: self,
            client: client.clone(),
            sessions: Sessions::default(),
            job: None,
            prepared,
            children: Children::default(),
            preparing: 0,
            publishers: Vec::new(),
            resends: Vec::new(),
            log,
            lines: Arc::new(Mutex::new(Lines::new(log))),
        };
        let mut looked = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            tokio::select! {
                Some(request) = clock.next() => answer_clock(&request).await,
                Some(request) = session.next() => state.open_session(&request).await,
                Some(request) = requests.next() => state.handle(request).await,
                Some((request, prepared)) = preparations.recv() => state.keep(request, prepared).await,
                () = tokio::time::sleep(LOOK) => {}
            }
            let connected = client.connection_state() == connection::State::Connected;
            state.children.stop_abandoned(connected && looked.elapsed() < PAUSE);
            looked = Instant::now();
        }
        if let Some(job) = state.job.filter(Job::is_running) {
            job.stop.store(true, Ordering::Relaxed);
            let until = Instant::now() + LAST_WORDS;
            while !job.ended.load(Ordering::Relaxed) && Instant::now() < until {
                tokio::time::sleep(LOOK).await;
            }
        }
        let _ = tokio::time::timeout(LAST_WORDS, client.flush()).await;
        Ok(())
    }
}

/// Answers with the monotonic clock of this host. The request needs no session, because it changes nothing.
async fn answer_clock(request: &service::Request) {
    let now = resource::monotonic_time().as_nanos().to_string();
    // The requester is gone if this fails.
    let _ = request.respond(Ok(now.into())).await;
}

impl State {
    async fn open_session(&mut self, request: &service::Request) {
        let Ok(name) = random_name() else { return };
        self.sessions.open(name.clone());
        let _ = request.respond(Ok(name.into())).await;
    }

    async fn handle(&mut self, request: service::Request) {
        let (name, reply) = match self.accept(&request.message.payload) {
            Ok(accepted) => (kind(&accepted), self.perform(accepted)),
            Err(reason) => ("request", Err(reason)),
        };
        let lines = Arc::clone(&self.lines);
        match reply.unwrap_or_else(|reason| Performed::Now(Reply::Refused { reason })) {
            Performed::Now(reply) => respond(&request, name, &reply, &lines).await,
            Performed::Later(reply) => {
                tokio::spawn(async move {
                    let lost =
                        |_| Reply::Refused { reason: "the thread of the request has ended".to_owned() };
                    let reply = reply.await.unwrap_or_else(lost);
                    respond(&request, name, &reply, &lines).await;
                });
            }
            Performed::Prepare(ready) => {
                let prepared = self.prepared.clone();
                tokio::spawn(async move {
                    let lost = |_| Err("the thread of the request has ended".to_owned());
                    let _ = prepared.send((request, ready.await.unwrap_or_else(lost)));
                });
            }
        }
    }

    /// Keeps a prepared job, which replaces a job that never started, and replies to its coordinator.
    async fn keep(&mut self, request: service::Request, prepared: Preparation) {
        self.preparing -= 1;
        let kept = self.require_idle().and(prepared).map(|(job, reply)| {
            self.job = Some(*job);
            reply
        });
        let reply = kept.unwrap_or_else(|reason| Reply::Refused { reason });
        respond(&request, PREPARE, &reply, &self.lines).await;
    }

    /// Returns an error if the agent performs a run.
    fn require_idle(&self) -> Result<(), String> {
        match self.job.as_ref().filter(|job| job.is_running()) {
            Some(job) => Err(format!("the agent performs the run {} at present", job.run)),
            None => Ok(()),
        }
    }

    /// Reads a request and checks its session.
    fn accept(&mut self, payload: &[u8]) -> Result<Request, String> {
        if payload.len() > MAX_REQUEST {
            return Err(format!("a request of {} bytes is too large: at most {MAX_REQUEST}", payload.len()));
        }
        let envelope: Envelope =
            serde_json::from_slice(payload).map_err(|error| format!("the request is invalid: {error}"))?;
        self.sessions.accept(&envelope.ticket).map_err(|error| error.to_string())?;
        Ok(envelope.request)
    }

    fn perform(&mut self, request: Request) -> Result<Performed, String> {
        let permission = match &request {
            Request::Doctor => Permission::Doctor,
            Request::LabPorts { .. } => Permission::Lab,
            Request::TraceConnect { .. } => Permission::Trace,
            Request::Serve { .. } => Permission::Serve,
            Request::Plan { .. } => Permission::Plan,
            _ => Permission::Load,
        };
        // The client knows the random name of a process that was permitted.
        if !matches!(request, Request::Ask { .. }) {
            self.agent.permissions.command(permission).map_err(|error| error.to_string())?;
        }
        let done = |()| Performed::Now(Reply::Done);
        match request {
            Request::Prepare { run, slot, load } => self.prepare(run, slot, *load),
            Request::Start { run, at_ns, deadline_ns, started } => {
                self.start(&run, at_ns, deadline_ns, started).map(done)
            }
            Request::Stop { run } => self.stop(&run).map(done),
            Request::Resend { run, slot, from } => self.resend(&run, slot, from).map(done),
            Request::Ask { child, stop } => Ok(Performed::Now(self.children.ask(&child, stop))),
            request => {
                let name = random_name().map_err(|_| "cannot draw random bytes")?;
                let Agent { program, permissions, .. } = &self.agent;
                let started = match &request {
                    Request::Serve { settings } => self.children.serve(name, program, settings, permissions),
                    request => self.children.command(name, program, request),
                };
                started.map(Performed::Later)
            }
        }
    }

    fn prepare(&mut self, run: String, slot: u32, request: LoadRequest) -> Result<Performed, String> {
        if !is_token(&run) {
            return Err(format!("{run:?} is not the name of a run"));
        }
        self.require_idle()?;
        if self.preparing == MAX_PREPARING {
            return Err(format!("the agent prepares {MAX_PREPARING} loads at present"));
        }
        let (permissions, host) = (self.agent.permissions.clone(), self.agent.host.clone());
        let prepare = move || -> Preparation {
            let load = request.load().map_err(|error| error.to_string())?;
            // A target that is not permitted gets no probe and no preflight. The run uses the addresses that are checked here.
            let addresses = load.resolve().map_err(|error| error.to_string())?;
            for address in &addresses {
                permissions.target(address).map_err(|error| error.to_string())?;
            }
            let prepared = Prepared::at(load, addresses).map_err(|error| error.to_string())?;
            let (sources, anyway) = (request.settings.sources.clone(), request.settings.anyway);
            let warnings = prepared.findings().iter().map(ToString::to_string).collect();
            let reply = Reply::Prepared {
                settings: Box::new(prepared.settings(sources.as_deref(), anyway)),
                refusal: prepared.refusal(),
                warnings,
                host,
            };
            let job = Job {
                run,
                slot,
                anyway,
                sources,
                prepared: Arc::new(prepared),
                stop: Arc::default(),
                ended: Arc::default(),
                started: false,
            };
            Ok((Box::new(job), reply))
        };
        let (sender, ready) = oneshot::channel();
        let begin = thread::Builder::new().name("prepare".to_owned()).spawn(move || {
            let _ = sender.send(prepare());
        });
        begin.map_err(|error| format!("cannot create a thread: {error}"))?;
        self.preparing += 1;
        Ok(Performed::Prepare(ready))
    }

    fn start(&mut self, run: &str, at_ns: i64, deadline_ns: u64, started: String) -> Result<(), String> {
        self.require_publisher()?;
        let Some(job) = self.job.as_mut().filter(|job| job.run == run) else {
            return Err(format!("the run {run} is not prepared here"));
        };
        if job.started {
            return Err(format!("the run {run} has started already"));
        }
        let now_ns = resource::monotonic_time().as_nanos() as i64;
        let away = fourtuple_record::format_duration(at_ns.abs_diff(now_ns));
        if at_ns <= now_ns {
            return Err(format!("the start of the run {run} passed {away} before the request arrived"));
        }
        let (ahead, deadline) =
            (Duration::from_nanos(at_ns.abs_diff(now_ns)), Duration::from_nanos(deadline_ns));
        if ahead > MAX_AHEAD {
            let most = fourtuple_record::format_time(MAX_AHEAD);
            return Err(format!("the start of the run {run} is {away} away: at most {most}"));
        }
        if deadline > MAX_RUN {
            let (length, most) =
                (fourtuple_record::format_time(deadline), fourtuple_record::format_time(MAX_RUN));
            return Err(format!("the deadline of the run {run} is {length}: at most {most}"));
        }
        if started.len() > MAX_STARTED {
            return Err(format!("the start of the run {run} is not a time in RFC 3339"));
        }
        let worker = Worker {
            run: run.to_owned(),
            slot: job.slot,
            directory: self.agent.directory.clone(),
            prepared: Arc::clone(&job.prepared),
            sources: job.sources.clone(),
            anyway: job.anyway,
            host: self.agent.host.clone(),
            started,
            ahead,
            deadline,
            stop: Arc::clone(&job.stop),
            ended: Arc::clone(&job.ended),
        };
        let (outbox, queue) = Outbox::new(run, job.slot);
        worker.start(outbox, self.log)?;
        job.started = true;
        self.publishers.push(tokio::spawn(worker::publish(self.client.clone(), queue, self.log)));
        Ok(())
    }

    fn stop(&self, run: &str) -> Result<(), String> {
        let job = self.job.as_ref().filter(|job| job.run == run);
        job.ok_or_else(|| format!("the run {run} is not here"))?.stop.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn resend(&mut self, run: &str, slot: u32, from: u64) -> Result<(), String> {
        if !is_token(run) {
            return Err(format!("{run:?} is not the name of a run"));
        }
        let journal = JournalReader::open(&self.agent.directory, run, slot)
            .map_err(|error| format!("the run {run}, slot {slot}, is not on this host: {error}"))?;
        // A coordinator that asks again gets what it asks for now, and not all that it asked for before.
        let key = (run.to_owned(), slot);
        self.resends.retain(|(_, task)| !task.is_finished());
        let same = self.resends.iter().position(|(of, _)| *of == key);
        if let Some(ended) = same.or_else(|| (self.resends.len() >= MAX_RESENDS).then_some(0)) {
            self.resends.remove(ended).1.abort();
        }
        let task = worker::publish_again(self.client.clone(), journal, (run.to_owned(), slot, from));
        self.resends.push((key, tokio::spawn(task)));
        Ok(())
    }

    /// Returns an error if too many runs wait for NATS.
    fn require_publisher(&mut self) -> Result<(), String> {
        self.publishers.retain(|task| !task.is_finished());
        match self.publishers.len() {
            MAX_PUBLISHERS => Err(format!("the results of {MAX_PUBLISHERS} runs wait for NATS at present")),
            _ => Ok(()),
        }
    }
}

/// The outcome of a request.
enum Performed {
    Now(Reply),
    /// A thread makes the reply, and the agent takes other requests meanwhile.
    Later(oneshot::Receiver<Reply>),
    /// A thread prepares a load, which can wait for a name server, and the agent takes other requests meanwhile.
    Prepare(oneshot::Receiver<Preparation>),
}

/// Returns the name of a request for the log.
fn kind(request: &Request) -> &'static str {
    match request {
        Request::Prepare { .. } => PREPARE,
        Request::Start { .. } => "start",
        Request::Stop { .. } => "stop",
        Request::Resend { .. } => "resend",
        Request::Doctor => "doctor",
        Request::LabPorts { .. } => "lab ports",
        Request::TraceConnect { .. } => "trace connect",
        Request::Plan { .. } => "plan",
        Request::Serve { .. } => "serve",
        Request::Ask { .. } => ASK,
    }
}

/// Returns the beginning of a reason, which may contain text of a request, as one line.
fn one_line(reason: &str) -> String {
    let beginning: String = reason.chars().take(MAX_REASON).collect();
    let more = if beginning.len() < reason.len() { "..." } else { "" };
    printable(&beginning) + more
}

/// Sends a reply and logs it. A refusal counts as an error in the statistics of the service.
async fn respond(request: &service::Request, name: &str, reply: &Reply, lines: &Mutex<Lines>) {
    let log = |line: &str| lines.lock().unwrap_or_else(PoisonError::into_inner).add(line);
    match reply {
        Reply::Refused { reason } => log(&format!("refused {name}: {}", one_line(reason))),
        Reply::Prepared { refusal: Some(refusal), .. } => {
            log(&format!("refused {name}: {}", one_line(refusal)))
        }
        // A coordinator asks every second.
        _ if name == ASK => {}
        _ => log(&format!("accepted {name}")),
    }
    let bytes = serde_json::to_vec(reply).expect("a reply has string keys");
    let sent = match reply {
        Reply::Refused { reason } => {
            // A header is one line.
            request.respond(Err(service::error::Error { status: one_line(reason), code: 403 })).await
        }
        _ => request.respond(Ok(bytes.into())).await,
    };
    if let Err(error) = sent {
        log(&format!("cannot reply to {name}: {error}"));
    }
}
