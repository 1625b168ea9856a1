//! The connection to NATS.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use async_nats::jetstream::{self, Context, stream};
use async_nats::service::Info;
use async_nats::{Client, ConnectOptions, ServerAddr};
use futures_util::StreamExt;
use ring::rand::{SecureRandom, SystemRandom};
use tokio::runtime::{self, Runtime};
use tokio::task;

use crate::FleetError;
use crate::protocol::{AgentInfo, SERVICE, STREAM, STREAM_SUBJECTS};

/// Time after which the messages of a run are removed from the stream.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// Time without work after which the thread for host names ends: never.
const ALWAYS: Duration = Duration::from_secs(u32::MAX as u64);

/// Maximum delay between two attempts to connect again.
const MAX_DELAY: Duration = Duration::from_secs(1);

/// How to connect to NATS.
#[derive(Clone, Debug, Default)]
pub struct Connection {
    /// The servers, with commas: `nats://127.0.0.1:4222`, `tls://nats.example:4222`.
    pub url: String,
    /// A file of credentials (JWT and seed), as `nsc` writes it.
    pub credentials: Option<PathBuf>,
    /// A file with the seed of an nkey.
    pub nkey: Option<PathBuf>,
    /// Certificates of the authority of the server, for tls.
    pub ca: Option<PathBuf>,
}

impl Connection {
    /// Returns the servers without names and passwords of users.
    pub fn shown_url(&self) -> String {
        let shown = |server: &str| match (server.split_once("://"), server.rsplit_once('@')) {
            (Some((scheme, _)), Some((_, host))) => format!("{scheme}://{host}"),
            (None, Some((_, host))) => host.to_owned(),
            _ => server.to_owned(),
        };
        self.url.split(',').map(|server| shown(server.trim())).collect::<Vec<_>>().join(",")
    }

    /// Connects. A connection that is lost later is opened again, without an end. `capacity`: maximum number of messages that wait in
    /// a subscription; further ones are lost.
    pub(crate) async fn open(&self, name: &str, capacity: usize) -> Result<Client, FleetError> {
        let unreadable = |path: &PathBuf| {
            let path = path.clone();
            move |error| FleetError::Credentials { path, error }
        };
        let mut options = ConnectOptions::new()
            .name(name)
            .subscription_capacity(capacity)
            .connection_timeout(Duration::from_secs(5))
            .reconnect_delay_callback(|attempt| MAX_DELAY.min(Duration::from_millis(100) * attempt as u32))
            .request_timeout(Some(Duration::from_secs(5)));
        if let Some(path) = &self.credentials {
            options = options.credentials_file(path).await.map_err(unreadable(path))?;
        }
        if let Some(path) = &self.nkey {
            let seed = std::fs::read_to_string(path).map_err(unreadable(path))?;
            options = options.nkey(seed.trim().to_owned());
        }
        if let Some(path) = &self.ca {
            std::fs::metadata(path).map_err(unreadable(path))?;
            options = options.add_root_certificates(path.clone()).require_tls(true);
        }
        // The client does not take them from the address by itself.
        let first = self.url.split(',').next().unwrap_or_default().trim();
        if let Ok(address) = first.parse::<ServerAddr>()
            && let (Some(user), Some(password)) = (address.username(), address.password())
        {
            options = options.user_and_password(user.to_owned(), password.to_owned());
        }
        let failed = |error: async_nats::ConnectError| FleetError::Connect {
            url: self.shown_url(),
            why: error.to_string(),
        };
        let servers: Vec<&str> = self.url.split(',').map(str::trim).collect();
        options.connect(servers).await.map_err(failed)
    }
}

/// Returns the JetStream context, with a time limit for each call.
pub(crate) fn jetstream(client: &Client) -> Context {
    let mut context = jetstream::new(client.clone());
    context.set_timeout(Duration::from_secs(2));
    context
}

/// Creates the stream of all runs if it does not exist.
pub(crate) async fn require_stream(context: &Context) -> Result<stream::Stream, FleetError> {
    let config = stream::Config {
        name: STREAM.to_owned(),
        subjects: vec![STREAM_SUBJECTS.to_owned()],
        max_age: KEPT,
        storage: stream::StorageType::File,
        ..stream::Config::default()
    };
    context.get_or_create_stream(config).await.map_err(FleetError::nats("create the stream FOURTUPLE"))
}

/// Publishes a message to the stream, and waits until it is stored.
pub(crate) async fn publish(context: &Context, subject: String, payload: Vec<u8>) -> Result<(), FleetError> {
    let sent = context.publish(subject, payload.into()).await;
    let ack = sent.map_err(FleetError::nats("publish to the stream"))?;
    ack.await.map(drop).map_err(FleetError::nats("publish to the stream"))
}

/// Returns the agents that answer within `wait`, by name.
pub(crate) async fn discover(client: &Client, wait: Duration) -> Result<Vec<AgentInfo>, FleetError> {
    let inbox = client.new_inbox();
    let mut replies = client.subscribe(inbox.clone()).await.map_err(FleetError::nats("subscribe"))?;
    client
        .publish_with_reply(format!("$SRV.INFO.{SERVICE}"), inbox, "".into())
        .await
        .map_err(FleetError::nats("discover the agents"))?;
    let mut agents = Vec::new();
    let until = tokio::time::Instant::now() + wait;
    while let Ok(Some(message)) = tokio::time::timeout_at(until, replies.next()).await {
        let info = serde_json::from_slice::<Info>(&message.payload).ok();
        agents.extend(info.and_then(|info| AgentInfo::from_metadata(&info.metadata)));
    }
    agents.sort_by(|one, two| (&one.name, &one.instance).cmp(&(&two.name, &two.instance)));
    agents.dedup_by(|one, two| one.instance == two.instance);
    Ok(agents)
}

/// Returns 16 random bytes in hexadecimal: the name of a session, of a run or of an agent's process.
pub(crate) fn random_name() -> Result<String, FleetError> {
    let mut bytes = [0; 16];
    let failed =
        |_| FleetError::Call { what: "draw random bytes", error: std::io::Error::other("getrandom(2)") };
    SystemRandom::new().fill(&mut bytes).map_err(failed)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Returns the SHA-256 of the running program and of `program`, which it runs, in hexadecimal.
///
/// # Errors
///
/// [`FleetError::Call`] if a program cannot be read.
pub fn binary_digest(program: &Path) -> Result<String, FleetError> {
    let mut context = ring::digest::Context::new(&ring::digest::SHA256);
    // In parts: a debug build has a hundred megabytes.
    let mut part = vec![0; 64 * 1024];
    for path in [Path::new("/proc/self/exe"), program] {
        let failed = |error| FleetError::Call { what: "read the programs of this agent", error };
        let mut file = File::open(path).map_err(failed)?;
        loop {
            match file.read(&mut part).map_err(failed)? {
                0 => break,
                length => context.update(&part[..length]),
            }
        }
    }
    let digest = context.finish();
    Ok(digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Returns a runtime that uses the calling thread, and a second one for host names.
pub(crate) fn runtime() -> Result<Runtime, FleetError> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .thread_keep_alive(ALWAYS)
        .build()
        .map_err(FleetError::call("create the event loop of the connection to NATS"))?;
    // tokio panics if a lookup needs the first blocking thread and the system has none left. A runtime with a thread queues the lookup.
    let first = thread::Builder::new().spawn(|| ());
    let first = first.map_err(FleetError::call("create a thread for the lookup of host names"))?;
    let _ = first.join();
    let _ = runtime.block_on(async { task::spawn_blocking(|| ()).await });
    Ok(runtime)
}
