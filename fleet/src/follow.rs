//! A coordinator follows a run: it reads the messages of the workers from the stream until the end of the run.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, PullConsumer, pull};
use async_nats::jetstream::stream::Stream;
use async_nats::{Client, Subject};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::join_all;
use tokio::time::Instant;

use crate::FleetError;
use crate::coordinator::{DISCOVERY, FleetOutcome, FleetProgress, Session, lead};
use crate::interval::{MAX_SECOND, Message, sum};
use crate::merge::{self, Merge, Slot};
use crate::nats::{discover, publish};
use crate::protocol::{
    AgentInfo, Lost, Plan, Request, STREAM, lost_subject, lost_subjects, slot_of, slot_subjects,
    slots_subjects, summary_subjects,
};
use crate::summary::Summary;

/// Time that a worker has for its last operations after the end of the run.
const GRACE: Duration = Duration::from_secs(3);

/// Time that workers have to end after a stop.
const STOPPED: Duration = Duration::from_secs(4);

/// Time that the coordinator waits for NATS after the deadline of the run.
const PATIENCE: Duration = Duration::from_secs(15);

/// Time between two calls of the progress callback.
const PROGRESS: Duration = Duration::from_millis(250);

/// Maximum number of messages of one fetch.
const MAX_FETCHED: usize = 512;

/// Maximum number of summaries of one fetch, which have up to 1 MiB each.
const MAX_SUMMARIES: usize = 64;

/// Time that NATS has for a summary. The stream of a long run has millions of other messages.
const SUMMARY: Duration = Duration::from_secs(10);

/// Maximum number of workers whose intervals are read by a consumer each. For more workers one consumer reads the intervals of
/// all workers.
const FEW: usize = 8;

/// Reads the messages of a run until its end.
pub(crate) struct Follow<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) client: &'a Client,
    pub(crate) context: Context,
    /// The run may have ended long ago, and its agents are asked for missing messages.
    pub(crate) collecting: bool,
    pub(crate) log: bool,
}

impl Follow<'_> {
    pub(crate) async fn until_the_end(
        self,
        begun: Instant,
        stop: &AtomicBool,
        mut progress: impl FnMut(&FleetProgress<'_>),
    ) -> Result<FleetOutcome, FleetError> {
        let plan = self.plan;
        let mut merge = self.merge();
        let deadline = Duration::from_nanos(plan.deadline_ns);
        let warm_up = Duration::from_nanos(plan.settings.warm_up_ns);
        let last_second = self.last_second();
        let mut readers = self.readers(&mut merge).await;
        let mut connected_since = Instant::now();
        let mut shown = Instant::now();
        let mut answered = Instant::now();
        let mut stopped: Option<Instant> = None;
        let mut asked_again = false;
        let mut is_resent = false;
        let mut heard = Instant::now();
        // A worker that has sent nothing may be waiting for the start, and has no seconds before the end of the warm-up.
        let mut unchanged = vec![(0, heard + lead(&plan.workers) + warm_up); plan.workers.len()];
        progress(&self.progress(&merge, begun.elapsed(), true));
        while !merge.is_complete() {
            let connected = self.client.connection_state() == State::Connected;
            let read = if connected { read_all(&mut readers, &mut merge).await } else { None };
            if read.is_none() {
                connected_since = Instant::now();
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            let now = Instant::now();
            if read != Some(0) {
                heard = now;
            }
            let elapsed = now.saturating_duration_since(begun);
            if now >= shown + PROGRESS {
                shown = now;
                progress(&self.progress(&merge, elapsed, read.is_some()));
            }
            if stop.load(Ordering::Relaxed) && stopped.is_none() {
                stopped = Some(now);
                self.stop_workers().await;
            }
            if stopped.is_some_and(|at| now >= at + STOPPED) {
                break;
            }
            if read.is_some() {
                answered = now;
            } else if elapsed > deadline + PATIENCE && now > answered + PATIENCE {
                return Err(FleetError::Gone { run: plan.run.clone() });
            }
            // The stream may have more.
            if read.is_none_or(|most| most == MAX_FETCHED) {
                continue;
            }
            let connected_for = now - connected_since;
            // An end follows the intervals in the stream, so what is missing before it can only be on the disk of the worker.
            let ended = merge.slots().iter().all(|slot| slot.end.is_some() || slot.lost_at.is_some());
            if (self.collecting || ended) && !asked_again && connected_for > Duration::from_secs(1) {
                asked_again = true;
                is_resent = self.ask_again(&merge).await;
                connected_since = Instant::now();
                continue;
            }
            if ended && asked_again && (!is_resent || now >= heard + PATIENCE) {
                break;
            }
            let elapsed = elapsed.saturating_sub(warm_up);
            self.lose_the_missing(&mut merge, elapsed, connected_for, last_second, &mut unchanged).await;
        }
        let interrupted = stopped.is_some();
        let (record, log) = merge::record(plan, merge, interrupted);
        Ok(FleetOutcome { run: plan.run.clone(), record, log })
    }

    /// Returns the readers of the intervals that the result needs. Of a run that has ended these are the intervals of workers
    /// without a summary, and the summaries of all others are added here.
    async fn readers(&self, merge: &mut Merge) -> Vec<Reader<'_>> {
        let run = &self.plan.run;
        let reader = |filter| Reader { context: &self.context, run, filter, consumer: None, next: 1 };
        let all = || vec![reader(slots_subjects(run))];
        if !self.collecting || self.log {
            return all();
        }
        if self.read_summaries(merge).await.is_err() {
            *merge = self.merge();
        }
        let slots = merge.slots().iter().enumerate();
        let missing: Vec<u32> =
            slots.filter(|(_, slot)| slot.end.is_none()).map(|(slot, _)| slot as u32).collect();
        match missing.len() {
            ..=FEW => missing.into_iter().map(|slot| reader(slot_subjects(run, slot))).collect(),
            _ => all(),
        }
    }

    /// Returns a sum without a message.
    fn merge(&self) -> Merge {
        let Plan { run, workers, started_ns, settings, .. } = self.plan;
        let zero = Duration::from_nanos(*started_ns) + Duration::from_nanos(settings.warm_up_ns);
        Merge::new(run, workers.len() as u32, self.log.then_some(zero))
    }

    /// Adds the summaries of all workers without a loss. The end of a worker with a loss may come before or after it, which its
    /// messages tell in their order.
    async fn read_summaries(&self, merge: &mut Merge) -> Result<(), async_nats::Error> {
        let mut lost = BTreeSet::new();
        loop {
            self.add_summaries(merge, &lost).await?;
            // A loss that is not in the stream now comes after the ends of these workers, and has no effect.
            self.read_last(lost_subjects(&self.plan.run), |slot, _| {
                lost.insert(slot);
            })
            .await?;
            let mut slots = merge.slots().iter().zip(0..);
            if !slots.any(|(slot, number)| slot.end.is_some() && lost.contains(&number)) {
                return Ok(());
            }
            *merge = self.merge();
        }
    }

    async fn add_summaries(&self, merge: &mut Merge, lost: &BTreeSet<u32>) -> Result<(), async_nats::Error> {
        let mut parts: BTreeMap<u32, Vec<Bytes>> = BTreeMap::new();
        self.read_last(summary_subjects(&self.plan.run), |slot, payload| {
            let parts = parts.entry(slot).or_default();
            parts.push(payload);
            if !lost.contains(&slot)
                && let Ok(Some(summary)) = Summary::decode(parts)
            {
                parts.clear();
                merge.add_summary(summary);
            }
        })
        .await
    }

    /// Calls `add` with the slot and the payload of the last message of each subject that is in the stream now.
    async fn read_last(
        &self,
        filter: String,
        mut add: impl FnMut(u32, Bytes),
    ) -> Result<(), async_nats::Error> {
        let mut context = self.context.clone();
        context.set_timeout(SUMMARY);
        let stream: Stream = context.get_stream(STREAM).await?;
        let config = pull::Config {
            deliver_policy: DeliverPolicy::LastPerSubject,
            ack_policy: AckPolicy::None,
            filter_subject: filter,
            inactive_threshold: Duration::from_secs(30),
            memory_storage: true,
            ..pull::Config::default()
        };
        let consumer: PullConsumer = stream.create_consumer(config).await?;
        let mut left = consumer.cached_info().num_pending;
        while left > 0 {
            let mut batch = consumer.fetch().max_messages(MAX_SUMMARIES).messages().await?;
            let mut is_empty = true;
            while let Some(message) = tokio::time::timeout(SUMMARY, batch.next()).await? {
                let message = message?;
                left = message.info()?.pending;
                is_empty = false;
                if let Some((slot, _)) = slot_of(&self.plan.run, message.subject.as_str()) {
                    add(slot, message.payload.clone());
                }
            }
            if is_empty {
                // They expired meanwhile.
                break;
            }
        }
        Ok(())
    }

    /// Returns the number of the last second, if the run is limited in time only.
    fn last_second(&self) -> Option<u64> {
        let settings = &self.plan.settings;
        let length = settings.for_ns.filter(|_| settings.hold == 0 && settings.operations.is_none())?;
        Some(length.div_ceil(1_000_000_000).saturating_sub(1))
    }

    /// Declares workers lost. `elapsed`: from the end of the warm-up. `unchanged`: for each worker the number of its intervals, and the time of the last change.
    async fn lose_the_missing(
        &self,
        merge: &mut Merge,
        elapsed: Duration,
        connected: Duration,
        last_second: Option<u64>,
        unchanged: &mut [(u64, Instant)],
    ) {
        let now = Instant::now();
        for slot in 0..self.plan.workers.len() as u32 {
            let of = &merge.slots()[slot as usize];
            if of.end.is_some() || of.lost_at.is_some() {
                continue;
            }
            let second = of.next_second();
            // A coordinator that collects does not know when the run began: the wall clocks of two hosts differ. It waits as long as
            // the first coordinator, from the last interval that it read.
            let of_worker = if self.collecting {
                let (intervals, since) = &mut unchanged[slot as usize];
                if *intervals != of.intervals() {
                    (*intervals, *since) = (of.intervals(), now);
                }
                let due = last_second.map_or(second, |last| second.min(last + 1));
                Duration::from_secs(due) + now.saturating_duration_since(*since)
            } else {
                elapsed
            };
            if is_lost(of_worker, connected, second, last_second, GRACE) {
                // The loss has an effect when it is read again: the worker may have ended before it, and all coordinators must come
                // to the same result.
                let lost = serde_json::to_vec(&Lost { slot, second }).expect("a loss has string keys");
                let published = publish(&self.context, lost_subject(&self.plan.run, slot), lost).await;
                let deadline = Duration::from_nanos(self.plan.deadline_ns);
                if published.is_err() && elapsed > deadline + PATIENCE {
                    // This coordinator may not publish, or the stream is full.
                    merge.lose_at(slot, second);
                }
                // A worker that was only cut off must not continue alone.
                self.stop_worker(&self.plan.workers[slot as usize].agent).await;
            }
        }
    }

    async fn stop_worker(&self, agent: &AgentInfo) {
        let (client, run) = (self.client.clone(), self.plan.run.clone());
        let agent = agent.clone();
        // A worker that does not answer must not delay the remaining workers.
        tokio::spawn(async move {
            if let Ok(session) = Session::open(&client, &agent).await {
                let _ = session.ask(Request::Stop { run }, Duration::from_secs(1)).await;
            }
        });
    }

    async fn stop_workers(&self) {
        for worker in &self.plan.workers {
            self.stop_worker(&worker.agent).await;
        }
    }

    /// Asks the agents for the messages that are not in the stream. An agent that was started again has them too. Returns false if
    /// none of these agents is there, so that no message will follow.
    async fn ask_again(&self, merge: &Merge) -> bool {
        let Ok(agents) = discover(self.client, DISCOVERY).await else { return true };
        let asks =
            self.plan.workers.iter().zip(merge.slots()).enumerate().filter_map(|(slot, (worker, of))| {
                let agent = agents.iter().find(|agent| agent.name == worker.agent.name)?;
                (!of.is_complete()).then_some(async move {
                    let session = Session::open(self.client, agent).await?;
                    let request = Request::Resend {
                        run: self.plan.run.clone(),
                        slot: slot as u32,
                        from: of.next_sequence(),
                    };
                    session.ask(request, Duration::from_secs(5)).await
                })
            });
        !join_all(asks).await.is_empty()
    }

    fn progress<'a>(&'a self, merge: &'a Merge, elapsed: Duration, connected: bool) -> FleetProgress<'a> {
        let workers = self.plan.workers.iter().zip(merge.slots());
        FleetProgress {
            run: &self.plan.run,
            elapsed,
            last: merge.last(),
            operations: sum(merge.slots().iter().map(|slot| slot.operations)),
            errors: sum(merge.errors().values().copied()),
            hosts: workers
                .map(|(worker, slot)| {
                    let last = slot.seconds.last_key_value().map(|(_, second)| second);
                    (worker.agent.name.as_str(), last, slot.lost_at.is_some())
                })
                .collect(),
            connected,
        }
    }
}

/// Reads the messages of some workers from the stream, in order. After an error it continues behind the last message that it read:
/// the consumer is made again, because a consumer does not outlive every restart of nats-server.
struct Reader<'a> {
    context: &'a Context,
    run: &'a str,
    filter: String,
    consumer: Option<PullConsumer>,
    next: u64,
}

/// Reads with each reader. Returns the largest number of messages that one of them read; `None` after an error.
async fn read_all(readers: &mut [Reader<'_>], merge: &mut Merge) -> Option<usize> {
    let wait = Duration::from_millis(200) / readers.len().max(1) as u32;
    let mut most = 0;
    for reader in readers {
        most = most.max(reader.read(merge, wait).await?);
    }
    Some(most)
}

impl Reader<'_> {
    /// Adds the messages that are in the stream now, or arrive within `wait`, to the merge. Returns their number; `None` after an
    /// error.
    async fn read(&mut self, merge: &mut Merge, wait: Duration) -> Option<usize> {
        const MAX_WAIT: Duration = Duration::from_secs(3);
        match tokio::time::timeout(MAX_WAIT, self.fetch(merge, wait)).await {
            Ok(Ok(count)) => Some(count),
            Ok(Err(_)) | Err(_) => {
                self.consumer = None;
                None
            }
        }
    }

    async fn fetch(&mut self, merge: &mut Merge, wait: Duration) -> Result<usize, async_nats::Error> {
        let consumer = match &self.consumer {
            Some(consumer) => consumer.clone(),
            None => self.consume().await?,
        };
        self.consumer = Some(consumer.clone());
        let mut batch = consumer.batch().max_messages(MAX_FETCHED).expires(wait).messages().await?;
        let mut count = 0;
        while let Some(message) = batch.next().await {
            let message = message?;
            self.next = message.info()?.stream_sequence + 1;
            count += 1;
            self.add(merge, &message.subject, &message.payload);
        }
        Ok(count)
    }

    fn add(&self, merge: &mut Merge, subject: &Subject, payload: &[u8]) {
        let Some((slot, kind)) = slot_of(self.run, subject.as_str()) else { return };
        // The intervals of a worker with a summary need no decoding.
        if merge.slots().get(slot as usize).is_none_or(Slot::is_complete) {
            return;
        }
        if kind == "lost" {
            // This coordinator or another one has decided on it.
            if let Ok(Lost { slot, second }) = serde_json::from_slice(payload)
                && second <= MAX_SECOND
            {
                merge.lose_at(slot, second);
            }
        } else if let Ok(message) = Message::decode(payload) {
            merge.add(message);
        }
    }

    async fn consume(&self) -> Result<PullConsumer, async_nats::Error> {
        let stream: Stream = self.context.get_stream(STREAM).await?;
        let config = pull::Config {
            deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: self.next },
            ack_policy: AckPolicy::None,
            filter_subject: self.filter.clone(),
            inactive_threshold: Duration::from_secs(30),
            memory_storage: true,
            ..pull::Config::default()
        };
        Ok(stream.create_consumer(config).await?)
    }
}

/// Number of missing intervals from which a worker is lost.
const MISSING: u64 = 3;

/// Time that an interval may take from the end of its second to the coordinator. With it a pause of [`MISSING`] seconds loses no
/// worker.
const TRANSIT: Duration = Duration::from_millis(1500);

/// Returns whether a worker is lost: [`MISSING`] intervals that were due have not arrived.
///
/// `elapsed`: time since the start of the run. `connected`: time for which the coordinator has been connected without an
/// interruption; an outage of NATS delays the intervals of every worker and loses none. `next`: the first second that has not
/// arrived. `last_second`: number of the last second that the run can have, if it is limited in time; after it a worker owes its
/// end only, and `grace` is the time that it has for this.
fn is_lost(
    elapsed: Duration,
    connected: Duration,
    next: u64,
    last_second: Option<u64>,
    grace: Duration,
) -> bool {
    let patience = Duration::from_secs(MISSING) + TRANSIT;
    if connected < patience {
        return false;
    }
    match last_second {
        // All its seconds have arrived or may never come: the end is due.
        Some(last) if next > last => elapsed >= Duration::from_secs(last + 1) + grace + patience,
        // Second n is due at n + 1.
        _ => elapsed >= Duration::from_secs(next + 1) + Duration::from_secs(MISSING - 1) + TRANSIT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);
    const GRACE: Duration = Duration::from_secs(2);

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn a_worker_is_lost_after_three_missing_intervals() {
        // Seconds 0 to 4 have arrived; 5, 6 and 7 are missing when 8 s have passed.
        assert!(!is_lost(seconds(7.9), LONG, 5, Some(100), GRACE));
        assert!(!is_lost(seconds(9.4), LONG, 5, Some(100), GRACE));
        assert!(is_lost(seconds(9.5), LONG, 5, Some(100), GRACE));
        assert!(!is_lost(seconds(9.5), LONG, 6, Some(100), GRACE));
        assert!(is_lost(seconds(4.5), LONG, 0, None, GRACE), "it never began");
    }

    #[test]
    fn an_outage_of_nats_loses_no_worker() {
        assert!(!is_lost(seconds(60.0), seconds(4.4), 5, Some(100), GRACE));
        assert!(is_lost(seconds(60.0), seconds(4.5), 5, Some(100), GRACE));
    }

    #[test]
    fn a_worker_has_time_for_its_end() {
        assert!(!is_lost(seconds(10.0), LONG, 10, Some(9), GRACE));
        assert!(!is_lost(seconds(16.4), LONG, 10, Some(9), GRACE));
        assert!(is_lost(seconds(16.5), LONG, 10, Some(9), GRACE));
    }
}
