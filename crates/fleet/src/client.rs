//! The requests of a coordinator to one agent.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_nats::{Client, HeaderMap};
use fourtuple_syscalls::resource;

use crate::clock::{ClockEstimate, EXCHANGES, Exchange};
use crate::error::FleetError;
use crate::protocol::{AgentInfo, Envelope, Reply, Request, agent_subject};
use crate::session::Ticket;

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
        let subject = format!("{}.request", agent_subject(&self.agent.instance));
        let refused = |reason: &str| FleetError::Refused(format!("{}: {reason}", self.agent.name));
        let request = async_nats::Request::new().payload(envelope.into()).timeout(Some(wait));
        let message = self.client.send_request(subject, request).await;
        let message = message.map_err(|error| refused(&format!("no answer: {error}")))?;
        if let Some(reason) = service_error(message.headers.as_ref()) {
            return Err(refused(&reason));
        }
        serde_json::from_slice(&message.payload)
            .map_err(|error| refused(&format!("its reply is invalid: {error}")))
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
