//! The agent: a NATS service that performs the requests of a coordinator on this host.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use async_nats::Client;
use async_nats::connection;
use async_nats::service::{self, ServiceExt};
use fourtuple_load::Prepared;
use fourtuple_record::{Host, SCHEMA};
use fourtuple_syscalls::{child, resource};
use futures_util::StreamExt;
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::error::FleetError;
use crate::journal;
use crate::nats::{Connection, binary_digest, discover, random_name, runtime};
use crate::permission::{Permission, Permissions};
use crate::protocol::{
    AgentInfo, Envelope, MAX_AHEAD, MAX_REQUEST, MAX_RUN, Reply, Request, SERVICE, agent_subject, is_token,
};
use crate::request::LoadRequest;
use crate::servers::Servers;
use crate::session::Sessions;
use crate::worker::{self, Outbox, Worker};

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

/// The name of a request for a server, in the log.
const SERVING: &str = "serving";

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
    /// The host, for records.
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
    servers: Servers,
    log: fn(&str),
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
            binary: binary_digest()?,
            schema: SCHEMA.to_owned(),
            allow: self.permissions.command_names(),
            kernel: self.host.kernel.clone(),
            cpus: self.host.cpus,
        };
        let client = self.connection.open(&format!("fourtuple agent {}", self.name)).await?;
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
            servers: Servers::default(),
            log,
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
            state.servers.stop_abandoned(connected && looked.elapsed() < PAUSE);
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
            Ok(accepted) => {
                let name = kind(&accepted);
                (name, self.perform(accepted))
            }
            Err(reason) => ("request", Performed::Now(Reply::Refused { reason })),
        };
        let log = self.log;
        match reply {
            Performed::Now(reply) => respond(&request, name, &reply, log).await,
            Performed::Later(reply) => {
                tokio::spawn(async move {
                    let lost =
                        |_| Reply::Refused { reason: "the thread of the request has ended".to_owned() };
                    let reply = reply.await.unwrap_or_else(lost);
                    respond(&request, name, &reply, log).await;
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
        let kept = self.require_idle().and(prepared).map(|(job, reply)| {
            self.job = Some(*job);
            reply
        });
        let reply = kept.unwrap_or_else(|reason| Reply::Refused { reason });
        respond(&request, PREPARE, &reply, self.log).await;
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

    fn perform(&mut self, request: Request) -> Performed {
        let permission = match &request {
            Request::Doctor => Permission::Doctor,
            Request::LabPorts { .. } => Permission::Lab,
            Request::TraceConnect { .. } => Permission::Trace,
            Request::Serve { .. } | Request::Serving { .. } => Permission::Serve,
            Request::Plan { .. } => Permission::Plan,
            _ => Permission::Load,
        };
        if let Err(error) = self.agent.permissions.command(permission) {
            return Performed::refused(error.to_string());
        }
        match request {
            Request::Prepare { run, slot, load } => self.prepare(run, slot, *load),
            Request::Start { run, at_ns, deadline_ns, started } => {
                self.start(&run, at_ns, deadline_ns, started)
            }
            Request::Stop { run } => self.stop(&run),
            Request::Resend { run, slot, from } => self.resend(&run, slot, from),
            Request::Doctor
            | Request::LabPorts { .. }
            | Request::TraceConnect { .. }
            | Request::Plan { .. } => self.command(&request.command().unwrap_or_default()),
            Request::Serve { settings } => {
                let Ok(name) = random_name() else {
                    return Performed::refused("cannot draw random bytes".to_owned());
                };
                let Agent { program, permissions, .. } = &self.agent;
                match self.servers.start(name, program, &settings, permissions) {
                    Ok(ready) => Performed::Later(ready),
                    Err(reason) => Performed::refused(reason),
                }
            }
            Request::Serving { server, stop } => Performed::Now(self.servers.ask(&server, stop)),
        }
    }

    fn prepare(&mut self, run: String, slot: u32, request: LoadRequest) -> Performed {
        if !is_token(&run) {
            return Performed::refused(format!("{run:?} is not the name of a run"));
        }
        if let Err(reason) = self.require_idle() {
            return Performed::refused(reason);
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
        match begin {
            Ok(_) => Performed::Prepare(ready),
            Err(error) => Performed::refused(format!("cannot create a thread: {error}")),
        }
    }

    fn start(&mut self, run: &str, at_ns: i64, deadline_ns: u64, started: String) -> Performed {
        let Some(job) = self.job.as_mut().filter(|job| job.run == run) else {
            return Performed::refused(format!("the run {run} is not prepared here"));
        };
        if job.started {
            return Performed::refused(format!("the run {run} has started already"));
        }
        let now_ns = resource::monotonic_time().as_nanos() as i64;
        let away = fourtuple_record::format_duration(at_ns.abs_diff(now_ns));
        if at_ns <= now_ns {
            return Performed::refused(format!(
                "the start of the run {run} passed {away} before the request arrived"
            ));
        }
        let (ahead, deadline) =
            (Duration::from_nanos(at_ns.abs_diff(now_ns)), Duration::from_nanos(deadline_ns));
        if ahead > MAX_AHEAD {
            let most = fourtuple_record::format_time(MAX_AHEAD);
            return Performed::refused(format!("the start of the run {run} is {away} away: at most {most}"));
        }
        if deadline > MAX_RUN {
            let (length, most) =
                (fourtuple_record::format_time(deadline), fourtuple_record::format_time(MAX_RUN));
            return Performed::refused(format!("the deadline of the run {run} is {length}: at most {most}"));
        }
        if started.len() > MAX_STARTED {
            return Performed::refused(format!("the start of the run {run} is no time in RFC 3339"));
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
        match worker.start(outbox, self.log) {
            Ok(()) => {
                job.started = true;
                tokio::spawn(worker::publish(self.client.clone(), queue, self.log));
                Performed::Now(Reply::Done)
            }
            Err(reason) => Performed::refused(reason),
        }
    }

    fn stop(&mut self, run: &str) -> Performed {
        match self.job.as_ref().filter(|job| job.run == run) {
            Some(job) => {
                job.stop.store(true, Ordering::Relaxed);
                Performed::Now(Reply::Done)
            }
            None => Performed::refused(format!("the run {run} is not here")),
        }
    }

    fn resend(&self, run: &str, slot: u32, from: u64) -> Performed {
        if !is_token(run) {
            return Performed::refused(format!("{run:?} is not the name of a run"));
        }
        let messages = match journal::read(&self.agent.directory, run, slot) {
            Ok(messages) => messages,
            Err(error) => {
                return Performed::refused(format!(
                    "the run {run}, slot {slot}, is not on this host: {error}"
                ));
            }
        };
        let (outbox, queue) = Outbox::new(run, slot);
        let mut count = 0;
        for (sequence, message) in messages.into_iter().enumerate().skip(from as usize) {
            outbox.add(sequence as u64, message);
            count += 1;
        }
        tokio::spawn(worker::publish(self.client.clone(), queue, self.log));
        Performed::Now(Reply::Resending { messages: count })
    }

    /// Runs a command of this program and replies with its record. The arguments come from typed settings; there is no shell.
    fn command(&self, arguments: &[String]) -> Performed {
        let mut command = Command::new(&self.agent.program);
        command.args(arguments).args(["--json", "--quiet"]).stdin(Stdio::null());
        child::end_with_this_thread(&mut command);
        let (sender, reply) = oneshot::channel();
        let text = arguments.join(" ");
        let run = move || {
            let reply = match command.output() {
                Err(error) => Reply::Refused { reason: format!("cannot run {text}: {error}") },
                Ok(output) => match serde_json::from_slice::<Value>(&output.stdout) {
                    Ok(record) => Reply::Record { record },
                    Err(_) => {
                        let said = String::from_utf8_lossy(&output.stderr);
                        Reply::Refused { reason: format!("{text}: {}", said.trim()) }
                    }
                },
            };
            let _ = sender.send(reply);
        };
        match thread::Builder::new().name("command".to_owned()).spawn(run) {
            Ok(_) => Performed::Later(reply),
            Err(error) => Performed::refused(format!("cannot create a thread: {error}")),
        }
    }
}

/// The outcome of a request.
enum Performed {
    /// The reply is there.
    Now(Reply),
    /// A thread makes the reply, and the agent takes other requests meanwhile.
    Later(oneshot::Receiver<Reply>),
    /// A thread prepares a load, which can wait for a name server, and the agent takes other requests meanwhile.
    Prepare(oneshot::Receiver<Preparation>),
}

impl Performed {
    fn refused(reason: String) -> Performed {
        Performed::Now(Reply::Refused { reason })
    }
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
        Request::Serving { .. } => SERVING,
    }
}

/// Sends a reply and logs it. A refusal counts as an error in the statistics of the service.
async fn respond(request: &service::Request, name: &str, reply: &Reply, log: fn(&str)) {
    match reply {
        Reply::Refused { reason } => log(&format!("refused {name}: {reason}")),
        Reply::Prepared { refusal: Some(refusal), .. } => log(&format!("refused {name}: {refusal}")),
        // A coordinator asks every second.
        _ if name == SERVING => {}
        _ => log(&format!("accepted {name}")),
    }
    let bytes = serde_json::to_vec(reply).expect("a reply has string keys");
    let sent = match reply {
        Reply::Refused { reason } => {
            // A header is one line.
            let status = reason.lines().collect::<Vec<_>>().join(" ");
            request.respond(Err(service::error::Error { status, code: 403 })).await
        }
        _ => request.respond(Ok(bytes.into())).await,
    };
    if let Err(error) = sent {
        log(&format!("cannot reply to {name}: {error}"));
    }
}
