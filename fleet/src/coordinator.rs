//! The coordinator: plans a run, starts its workers at the same time, and merges their intervals.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_nats::{Client, HeaderMap};
use fourtuple_record::{Host, LoadRecord, LoadSettings, Saved, Second, ServeSettings};
use fourtuple_syscalls::resource;
use futures_util::future::join_all;
use tokio::runtime::Runtime;
use tokio::time::Instant;

use crate::FleetError;
use crate::follow::Follow;
use crate::nats::{Connection, discover, jetstream, publish, random_name, require_stream, runtime};
use crate::overview::{HostReply, remark_early_end};
use crate::protocol::{
    AgentInfo, ClockEstimate, EXCHANGES, Envelope, Exchange, MAX_REQUEST, Plan, PlannedWorker, Reply,
    Request, Ticket, agent_subject, is_token, mismatch, plan_subject,
};
use crate::request::LoadRequest;
use crate::split;

/// Time in which agents answer a discovery.
pub(crate) const DISCOVERY: Duration = Duration::from_millis(1500);

/// Time between the request to start and the start, without round trips.
const LEAD: Duration = Duration::from_secs(1);

/// Time in which a process is ready, and beyond its deadline in which its record arrives.
const SERVER_READY: Duration = Duration::from_secs(15);

/// Maximum number of messages that wait in a subscription: the replies of all agents, and a fetch of the stream.
const MAX_QUEUED: usize = 65_536;

/// Time between two requests for a process.
const SERVER_ASKED: Duration = Duration::from_secs(1);

/// Which agents take part.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Labels that an agent must have.
    pub labels: Vec<(String, String)>,
    /// Number of workers; `None`: all agents.
    pub workers: Option<u32>,
}

/// A run on the fleet.
#[derive(Clone, Debug)]
pub struct FleetLoad {
    /// The workers.
    pub selection: Selection,
    /// The load of all workers together.
    pub request: LoadRequest,
    /// Maximum start error, the bound of the clock included, of a valid run.
    pub most_skew: Duration,
    /// Time after the start at which workers stop by themselves.
    pub deadline: Duration,
    /// Start, RFC 3339 in UTC.
    pub started: String,
    /// The host of the coordinator, for the record.
    pub host: Host,
    /// Whether to record a log of histograms.
    pub log: bool,
}

#[derive(Clone, Debug)]
pub struct FleetProgress<'a> {
    pub run: &'a str,
    /// Time since the start.
    pub elapsed: Duration,
    /// The last second that all workers have completed.
    pub last: Option<&'a Second>,
    pub operations: u64,
    /// Operations that failed.
    pub errors: u64,
    /// Each worker: name, last second, whether it is lost.
    pub hosts: Vec<(&'a str, Option<&'a Second>, bool)>,
    /// Whether NATS is reachable.
    pub connected: bool,
}

/// The outcome of a run.
pub struct FleetOutcome {
    pub run: String,
    pub record: LoadRecord,
    /// The log of histograms, if it was requested.
    pub log: Option<String>,
}

/// A connection to the fleet.
pub struct Coordinator {
    runtime: Runtime,
    client: Client,
}

impl Coordinator {
    /// Connects to NATS.
    ///
    /// # Errors
    ///
    /// [`FleetError::Connect`], [`FleetError::Credentials`]
    pub fn connect(connection: &Connection) -> Result<Coordinator, FleetError> {
        let runtime = runtime()?;
        let client = runtime.block_on(connection.open("fourtuple fleet", MAX_QUEUED))?;
        Ok(Coordinator { runtime, client })
    }

    /// Returns the agents that answer.
    ///
    /// # Errors
    ///
    /// [`FleetError::Nats`]
    pub fn agents(&self) -> Result<Vec<AgentInfo>, FleetError> {
        self.runtime.block_on(discover(&self.client, DISCOVERY))
    }

    /// Performs a request on the selected agents at the same time, until `wait` is over or `stop` is set. Returns the record of each,
    /// or the reason why there is none.
    ///
    /// # Errors
    ///
    /// [`FleetError::TooFew`], [`FleetError::Refused`] if two agents have the same name
    pub fn on_each(
        &self,
        selection: &Selection,
        request: &Request,
        wait: Duration,
        stop: &AtomicBool,
    ) -> Result<Vec<HostReply>, FleetError> {
        let replies = self.runtime.block_on(self.each(selection, request, wait, stop, |_, _| ()))?;
        Ok(replies.into_iter().map(|(agent, reply, _)| (agent, record_of(reply))).collect())
    }

    /// Runs a server on each of the selected agents until its deadline, or until `stop` is set. Calls `ready` with the address of
    /// each. Returns the record of each, or the reason why there is none.
    ///
    /// # Errors
    ///
    /// [`FleetError::TooFew`], [`FleetError::Refused`] if two agents have the same name
    pub fn serve(
        &self,
        selection: &Selection,
        settings: &ServeSettings,
        stop: &AtomicBool,
        ready: impl FnMut(&AgentInfo, &str),
    ) -> Result<Vec<HostReply>, FleetError> {
        let length = Duration::from_nanos(settings.for_ns.unwrap_or(0));
        let request = Request::Serve { settings: Box::new(settings.clone()) };
        let replies = self.runtime.block_on(self.each(selection, &request, length, stop, ready))?;
        let record = |(agent, reply, by_itself): (AgentInfo, Reply, bool)| {
            let record = record_of(reply);
            (agent, record.map(|record| if by_itself { remark_early_end(record) } else { record }))
        };
        Ok(replies.into_iter().map(record).collect())
    }

    /// Starts a process on each of the selected agents, and asks for it until it has ended. Returns the last reply of each agent, and
    /// whether its process ended before `stop` was set.
    async fn each(
        &self,
        selection: &Selection,
        request: &Request,
        length: Duration,
        stop: &AtomicBool,
        mut ready: impl FnMut(&AgentInfo, &str),
    ) -> Result<Vec<(AgentInfo, Reply, bool)>, FleetError> {
        let agents = select(discover(&self.client, DISCOVERY).await?, selection)?;
        let sessions = join_all(agents.iter().map(|agent| Session::open(&self.client, agent))).await;
        let started = join_all(sessions.iter().map(|session| async {
            match session {
                Ok(session) => answer(session.ask(request.clone(), SERVER_READY).await),
                Err(error) => Reply::Refused { reason: error.to_string() },
            }
        }));
        let mut replies = started.await;
        let mut by_itself = vec![false; replies.len()];
        for (agent, reply) in agents.iter().zip(&replies) {
            if let Reply::Running { listen: Some(listen), .. } = reply {
                ready(agent, listen);
            }
        }
        let begun = Instant::now();
        let deadline = begun + length + SERVER_READY;
        while replies.iter().any(|reply| matches!(reply, Reply::Running { .. })) {
            // In short steps, because a stop must not wait for a second, and most commands end within it.
            let steps = if begun.elapsed() < SERVER_ASKED { 2 } else { 10 };
            for _ in 0..steps {
                if !stop.load(Ordering::Relaxed) {
                    tokio::time::sleep(SERVER_ASKED / 10).await;
                }
            }
            let is_over = Instant::now() >= deadline;
            let stop = stop.load(Ordering::Relaxed);
            let asked = join_all(sessions.iter().zip(replies).map(async |(session, reply)| {
                let (Ok(session), Reply::Running { child, .. }) = (session, &reply) else {
                    return reply;
                };
                let request = Request::Ask { child: child.clone(), stop: stop || is_over };
                match session.ask(request, SERVER_ASKED).await {
                    // NATS may come back; the process ends at its deadline in any case.
                    Err(FleetError::NoAnswer(_)) if !is_over && !stop => reply,
                    Ok(Reply::Running { .. }) if Instant::now() >= deadline + SERVER_READY => {
                        Reply::Refused { reason: "the process does not end".to_owned() }
                    }
                    answered => answer(answered),
                }
            }));
            replies = asked.await;
            if stop {
                tokio::time::sleep(SERVER_ASKED / 10).await;
            } else {
                by_itself = replies.iter().map(|reply| matches!(reply, Reply::Record { .. })).collect();
            }
        }
        Ok(agents
            .into_iter()
            .zip(replies)
            .zip(by_itself)
            .map(|((agent, reply), by_itself)| (agent, reply, by_itself))
            .collect())
    }

    /// Waits until agents with these names answer. Returns false if one has not answered within `wait`, or `stop` is set.
    ///
    /// # Errors
    ///
    /// [`FleetError::Nats`]
    pub fn wait_for(&self, names: &[String], wait: Duration, stop: &AtomicBool) -> Result<bool, FleetError> {
        const ROUND: Duration = Duration::from_millis(300);
        let until = Instant::now() + wait;
        loop {
            let agents = self.runtime.block_on(discover(&self.client, ROUND))?;
            if names.iter().all(|name| agents.iter().any(|agent| agent.name == *name)) {
                return Ok(true);
            } else if Instant::now() >= until || stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
        }
    }

    /// Performs a run on the fleet. Setting `stop` stops all workers and keeps what was measured.
    ///
    /// # Errors
    ///
    /// [`FleetError`] if the run does not start, or if NATS is unreachable until after its deadline.
    pub fn load(
        &self,
        load: &FleetLoad,
        stop: &AtomicBool,
        progress: impl FnMut(&FleetProgress<'_>),
    ) -> Result<FleetOutcome, FleetError> {
        self.runtime.block_on(self.run(load, stop, progress))
    }

    /// Fetches a run that ended, or continues to follow one that another coordinator started.
    ///
    /// # Errors
    ///
    /// [`FleetError::NoRun`], [`FleetError::Gone`]
    pub fn collect(
        &self,
        run: &str,
        log: bool,
        stop: &AtomicBool,
        progress: impl FnMut(&FleetProgress<'_>),
    ) -> Result<FleetOutcome, FleetError> {
        self.runtime.block_on(async {
            let context = jetstream(&self.client);
            let stream = require_stream(&context).await?;
            // A name with a wildcard would find any run.
            if !is_token(run) {
                return Err(FleetError::Setting(format!(
                    "invalid value {run:?} for 'RUN': expected the name that fleet load printed"
                )));
            }
            let none = || FleetError::NoRun { run: run.to_owned() };
            let message =
                stream.get_last_raw_message_by_subject(&plan_subject(run)).await.map_err(|_| none())?;
            let plan = Plan::decode(run, &message.payload).ok_or_else(none)?;
            let since = started_at(plan.started_ns);
            let follow = Follow { plan: &plan, client: &self.client, context, collecting: true, log };
            follow.until_the_end(since, stop, progress).await
        })
    }

    async fn run(
        &self,
        load: &FleetLoad,
        stop: &AtomicBool,
        progress: impl FnMut(&FleetProgress<'_>),
    ) -> Result<FleetOutcome, FleetError> {
        let context = jetstream(&self.client);
        require_stream(&context).await?;
        let run = random_name()?[..12].to_owned();
        let agents = select(discover(&self.client, DISCOVERY).await?, &load.selection)?;
        if let Some(why) = mismatch(&agents) {
            return Err(FleetError::Refused(why));
        }
        let slots = agents.len() as u32;
        let whole = &load.request.settings;
        let parts: Vec<LoadSettings> =
            (0..slots).map(|slot| split::settings(whole, &run, slot, slots)).collect::<Result<_, _>>()?;
        let sessions = all(agents.iter().map(|agent| Session::open(&self.client, agent))).await?;
        let prepared = all(sessions.iter().zip(&parts).enumerate().map(|(slot, (session, settings))| {
            let load = LoadRequest { settings: settings.clone(), ..load.request.clone() };
            let request = Request::Prepare { run: run.clone(), slot: slot as u32, load: Box::new(load) };
            prepare(session, request, whole)
        }))
        .await?;
        let clocks = all(sessions.iter().map(Session::clock)).await?;
        let workers: Vec<PlannedWorker> = agents
            .iter()
            .zip(prepared)
            .zip(&clocks)
            .map(|((agent, settings), clock)| PlannedWorker { agent: agent.clone(), settings, clock: *clock })
            .collect();
        let lead = lead(&workers);
        let plan = Plan {
            run: run.clone(),
            started: load.started.clone(),
            started_ns: (since_epoch() + lead).as_nanos() as u64,
            settings: whole.clone(),
            deadline_ns: load.deadline.as_nanos() as u64,
            most_skew_ns: load.most_skew.as_nanos() as u64,
            host: load.host.clone(),
            workers,
        };
        publish(&context, plan_subject(&run), serde_json::to_vec(&plan).expect("string keys")).await?;
        if stop.load(Ordering::Relaxed) {
            return Err(FleetError::Refused("stopped before the start".to_owned()));
        }
        // The barrier: every worker has the start before it is due, or none starts.
        let at = resource::monotonic_time().as_nanos() as i64 + lead.as_nanos() as i64;
        let begun = Instant::now() + lead;
        let started = all(sessions.iter().zip(&clocks).map(|(session, clock)| {
            let request = Request::Start {
                run: run.clone(),
                at_ns: clock.to_remote(at),
                deadline_ns: plan.deadline_ns,
                started: plan.started.clone(),
            };
            session.ask(request, lead)
        }))
        .await;
        if let Err(error) = started {
            stop_all(&sessions, &run).await;
            return Err(error);
        }
        let follow = Follow { plan: &plan, client: &self.client, context, collecting: false, log: load.log };
        follow.until_the_end(begun, stop, progress).await
    }
}

/// Returns an error as a refusal.
fn answer(reply: Result<Reply, FleetError>) -> Reply {
    reply.unwrap_or_else(|error| Reply::Refused { reason: error.to_string() })
}

fn record_of(reply: Reply) -> Result<Saved, String> {
    match reply {
        Reply::Record { record } => Saved::from_value(record).map_err(|error| error.to_string()),
        Reply::Refused { reason } => Err(reason),
        _ => Err("its reply is not a record".to_owned()),
    }
}

/// Returns the time from the request to start until the start.
pub(crate) fn lead(workers: &[PlannedWorker]) -> Duration {
    let slowest = workers.iter().map(|worker| worker.clock.rtt_ns).max().unwrap_or(0);
    LEAD + Duration::from_nanos(slowest) * 4
}

fn since_epoch() -> Duration {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
}

/// Returns the start of a run by the wall clock of this host, to collect the run. The wall clock of the first coordinator may
/// differ, so the start decides on no loss.
fn started_at(started_ns: u64) -> Instant {
    let elapsed = since_epoch().saturating_sub(Duration::from_nanos(started_ns));
    Instant::now().checked_sub(elapsed).unwrap_or_else(Instant::now)
}

/// Runs the futures at the same time and returns the first error.
async fn all<T, F: Future<Output = Result<T, FleetError>>>(
    futures: impl IntoIterator<Item = F>,
) -> Result<Vec<T>, FleetError> {
    join_all(futures).await.into_iter().collect()
}

/// Returns the agents of a selection, by name.
fn select(agents: Vec<AgentInfo>, selection: &Selection) -> Result<Vec<AgentInfo>, FleetError> {
    let fits = |agent: &AgentInfo| {
        selection.labels.iter().all(|(key, value)| agent.labels.get(key).is_some_and(|found| found == value))
    };
    let mut agents: Vec<AgentInfo> = agents.into_iter().filter(fits).collect();
    if let Some(pair) = agents.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(FleetError::Refused(format!(
            "two agents have the name {}: stop one of them, or give it another --name",
            pair[0].name
        )));
    }
    let wanted = selection.workers.unwrap_or_else(|| agents.len().max(1) as u32);
    if agents.len() < wanted as usize {
        let names = agents.iter().map(|agent| agent.name.as_str()).collect::<Vec<_>>().join(", ");
        let names = if names.is_empty() { "none".to_owned() } else { names };
        return Err(FleetError::TooFew { found: agents.len(), wanted, names });
    }
    agents.truncate(wanted as usize);
    Ok(agents)
}

/// Prepares a worker, and returns its settings as it understood them.
async fn prepare(
    session: &Session<'_>,
    request: Request,
    whole: &LoadSettings,
) -> Result<LoadSettings, FleetError> {
    let refused = |reason: String| FleetError::Refused(format!("{}: {reason}", session.agent.name));
    match session.ask(request, Duration::from_secs(15)).await? {
        Reply::Prepared { refusal: Some(refusal), .. } if !whole.anyway => {
            Err(refused(format!("{refusal}; --anyway runs it nevertheless")))
        }
        Reply::Prepared { settings, .. } if !split::same_load(whole, &settings) => Err(refused(
            "it understands other settings than were sent: use the same version on all hosts".into(),
        )),
        Reply::Prepared { settings, .. } => Ok(*settings),
        Reply::Refused { reason } => Err(refused(reason)),
        _ => Err(refused("its reply does not fit the request".to_owned())),
    }
}

/// Stops all workers. A worker that does not answer stops at its deadline.
async fn stop_all(sessions: &[Session<'_>], run: &str) {
    let stop = |session| Session::ask(session, Request::Stop { run: run.to_owned() }, Duration::from_secs(1));
    join_all(sessions.iter().map(stop)).await;
}

/// A session with an agent.
pub(crate) struct Session<'a> {
    client: &'a Client,
    pub(crate) agent: &'a AgentInfo,
    name: String,
    sequence: AtomicU64,
}

impl<'a> Session<'a> {
    pub(crate) async fn open(client: &'a Client, agent: &'a AgentInfo) -> Result<Session<'a>, FleetError> {
        let subject = format!("{}.session", agent_subject(&agent.instance));
        let reply = client.request(subject, "".into()).await;
        let reply =
            reply.map_err(|error| FleetError::Refused(format!("{}: no answer: {error}", agent.name)))?;
        let name = String::from_utf8_lossy(&reply.payload).into_owned();
        Ok(Session { client, agent, name, sequence: AtomicU64::new(0) })
    }

    /// Sends a request and waits for its reply.
    pub(crate) async fn ask(&self, request: Request, wait: Duration) -> Result<Reply, FleetError> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed) + 1;
        let ticket = Ticket { session: self.name.clone(), sequence };
        let envelope = serde_json::to_vec(&Envelope { ticket, request }).expect("a request has string keys");
        if envelope.len() > MAX_REQUEST {
            return Err(FleetError::Setting(format!(
                "a request to an agent would have {} bytes: expected a body, or --requests, with which it has at most {MAX_REQUEST}",
                envelope.len()
            )));
        }
        let subject = format!("{}.request", agent_subject(&self.agent.instance));
        let name = &self.agent.name;
        let no_answer = |reason: String| FleetError::NoAnswer(format!("{name}: {reason}"));
        let request = async_nats::Request::new().payload(envelope.into()).timeout(Some(wait));
        let message = self.client.send_request(subject, request).await;
        let message = message.map_err(|error| no_answer(format!("no answer: {error}")))?;
        if let Some(reason) = service_error(message.headers.as_ref()) {
            return Err(FleetError::Refused(format!("{name}: {reason}")));
        }
        serde_json::from_slice(&message.payload)
            .map_err(|error| no_answer(format!("its reply is invalid: {error}")))
    }

    /// Estimates the offset of the agent's clock.
    pub(crate) async fn clock(&self) -> Result<ClockEstimate, FleetError> {
        let subject = format!("{}.clock", agent_subject(&self.agent.instance));
        let now = || resource::monotonic_time().as_nanos() as i64;
        let mut exchanges = Vec::with_capacity(EXCHANGES);
        for _ in 0..EXCHANGES {
            let sent = now();
            // A lost exchange is left out.
            let Ok(reply) = self.client.request(subject.clone(), "".into()).await else { continue };
            let received = now();
            let answered = std::str::from_utf8(&reply.payload).ok().and_then(|text| text.parse().ok());
            exchanges.extend(answered.map(|answered| Exchange { sent, answered, received }));
        }
        let none = || FleetError::Refused(format!("{}: its clock does not answer", self.agent.name));
        ClockEstimate::of(&exchanges).ok_or_else(none)
    }
}

fn service_error(headers: Option<&HeaderMap>) -> Option<String> {
    let status = headers?.get(async_nats::service::NATS_SERVICE_ERROR)?;
    Some(status.as_str().to_owned())
}
