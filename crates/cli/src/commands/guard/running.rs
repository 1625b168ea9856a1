//! The guard while it runs: reads, decides, answers.

mod handover;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_fix::guard::{Effect, Keeper, Limits, Scope, Step, Why, directory_of};
use fourtuple_observe::doctor::{Limits as Thresholds, diagnose};
use fourtuple_observe::host::cgroup;
use fourtuple_record::measure::words::counted;
use fourtuple_record::{
    GuardAction, GuardEffect, GuardEvent, GuardEventKind, GuardFix, GuardResults, GuardState, GuardTotals,
    Severity,
};
use fourtuple_report::exposition::Collector;
use fourtuple_syscalls::{errno_name, resource};
use time::OffsetDateTime;

use super::GuardFlags;
use super::control::{Control, RequestKind};
use super::events::{Events, Metrics};
use super::evidence::{AcceptKey, AcceptNeed, Evidence, Judge, PortsKey, PortsNeed, Refusal};
use super::policy::Policy;
use super::repairs::{AcceptFix, PortsFix};
use super::service::Service;
use super::watcher::{MAX_NAMESPACES, Reading, Watcher};
use crate::commands::export::Exporter;
use crate::exit::Exit;
use crate::output;
use crate::units::nanoseconds;
use crate::watch::{Namespace, TargetFlags, Thresholds as Rules};

/// Interval at which requests are answered and the service manager hears of this process.
const POLL: Duration = Duration::from_millis(100);
/// Destinations with metrics of their own, as by default in `export`.
const DESTINATIONS: u32 = 20;
/// Interval at which new namespaces of programs are looked for, which reads /proc.
const FOLLOW: Duration = Duration::from_secs(10);

pub(super) struct Running {
    flags: GuardFlags,
    policy: Policy,
    /// Whether nothing is changed.
    observes: bool,
    mount: PathBuf,
    began: Instant,
    /// Time of the guards before this one.
    inherited: Duration,
    /// `Some(None)`: until someone resumes it.
    paused: Option<Option<Instant>>,
    judge: Judge,
    ports: BTreeMap<PortsKey, (u32, PortsFix)>,
    ports_keeper: Keeper<PortsKey>,
    /// Fixes that were let go before they were attached.
    ending: Vec<PortsFix>,
    accept: BTreeMap<AcceptKey, (AcceptNeed, AcceptFix)>,
    accept_keeper: Keeper<AcceptKey>,
    refused: BTreeSet<Refusal>,
    notified: BTreeSet<(u32, String, String)>,
    /// Without the fixes that run.
    totals: GuardTotals,
    events: Events,
    service: Service,
    control: Option<Control>,
    metrics: Arc<Metrics>,
    exporter: Option<Exporter>,
    successor: Option<Child>,
    /// When this guard goes on if its successor has not taken over.
    handover: Option<handover::Pending>,
    namespaces: usize,
    /// Whether an event has said that other namespaces cannot be entered.
    is_confined: bool,
    /// Whether there were too many other namespaces at the last look.
    is_full: bool,
}

impl Running {
    pub(super) fn new(flags: GuardFlags, policy: Policy, observes: bool) -> anyhow::Result<Running> {
        let limits = |own: Option<Limits>| own.unwrap_or(Limits { max: 0, quiet: policy.quiet });
        let ports_keeper = Keeper::new(limits(policy.ports.as_ref().map(|ports| ports.limits(policy.quiet))));
        let accept_keeper =
            Keeper::new(limits(policy.accept.as_ref().map(|accept| accept.limits(policy.quiet))));
        Ok(Running {
            mount: cgroup::mount_point(Path::new("/")).unwrap_or_default(),
            events: Events::new(flags.quiet),
            service: Service::from_env(),
            flags,
            policy,
            observes,
            began: Instant::now(),
            inherited: Duration::ZERO,
            paused: None,
            judge: Judge::default(),
            ports: BTreeMap::new(),
            ports_keeper,
            ending: Vec::new(),
            accept: BTreeMap::new(),
            accept_keeper,
            refused: BTreeSet::new(),
            notified: BTreeSet::new(),
            totals: GuardTotals::default(),
            control: None,
            metrics: Arc::default(),
            exporter: None,
            successor: None,
            handover: None,
            namespaces: 1,
            is_confined: false,
            is_full: false,
        })
    }

    /// Watches and repairs until `stop` is set.
    pub(super) fn run(
        mut self,
        namespace: &Namespace,
        stop: &AtomicBool,
        reload: &Arc<AtomicBool>,
    ) -> anyhow::Result<Exit> {
        let before = if self.flags.takeover { self.ask_for_handover()? } else { None };
        if before.is_none() {
            self.control = Some(Control::bind(&self.flags.socket)?);
        }
        let mut watcher = Watcher::begin(namespace, !self.flags.no_trace);
        match before {
            Some(handover) => self.take_over(handover, watcher.own(), stop)?,
            None => self.say(GuardEventKind::Start, None, "", self.what()),
        }
        self.listen()?;
        // What the verification of the programs and the first reading took.
        resource::release_memory();
        self.service.ready();
        let (mut next, mut follow, mut alive) = (Instant::now(), Instant::now(), None::<Instant>);
        while !stop.load(Ordering::Relaxed) {
            watcher.watch().poll();
            let now = Instant::now();
            // At once, because a successor has the rest of the time of the guard before it.
            let is_due = |interval| alive.is_none_or(|last| now >= last + interval);
            if self.service.watchdog_interval().is_some_and(is_due) {
                alive = Some(now);
                self.service.alive();
            }
            self.answer();
            self.look_after_fixes();
            if reload.swap(false, Ordering::Relaxed) {
                self.start_successor();
            }
            self.look_after_handover()?;
            if now >= next && self.handover.is_none() {
                next = now.max(next) + self.every();
                if now >= follow {
                    follow = now + FOLLOW;
                    self.follow(&mut watcher);
                    self.namespaces = watcher.namespaces();
                }
                let readings = watcher.read();
                self.decide(&readings);
                let fixes = self.ports.len() + self.accept.len();
                self.service.status(&format!("{}; {}", self.what(), counted(fixes as u64, "fix")));
                self.export(namespace, readings, &mut watcher);
            }
            let pause = POLL.min(watcher.watch().poll_interval());
            match &mut self.control {
                Some(control) => control.wait(pause),
                None => thread::sleep(pause),
            }
        }
        if self.handover.is_some() {
            // The successor has them, and says what becomes of them.
            self.ports.values().for_each(|(_, fix)| fix.stop());
            self.ports.into_values().for_each(|(_, fix)| drop(fix.end()));
            return Ok(Exit::Fine);
        }
        self.service.stopping();
        self.release_all("guard ends");
        self.say(GuardEventKind::Stop, None, "", "every fix is detached".to_owned());
        Ok(Exit::Fine)
    }

    /// Follows the programs of the policy, and says once which of them are not watched.
    fn follow(&mut self, watcher: &mut Watcher) {
        let followed = watcher.follow(&self.scopes());
        if let Some(error) = followed.refused.filter(|_| !self.is_confined) {
            self.is_confined = true;
            let why = format!(
                "programs in other network namespaces are not watched, which needs CAP_SYS_ADMIN: {}",
                errno_name(&error)
            );
            self.say(GuardEventKind::Refusal, None, "", why);
        }
        if followed.left_out > 0 && !self.is_full {
            let why = format!(
                "programs in {} are not watched: guard watches at most {MAX_NAMESPACES}",
                counted(followed.left_out as u64, "other network namespace")
            );
            self.say(GuardEventKind::Refusal, None, "", why);
        }
        self.is_full = followed.left_out > 0;
    }

    /// Serves the metrics and the page, if the flags say so.
    fn listen(&mut self) -> anyhow::Result<()> {
        let Some(address) = self.flags.listen else { return Ok(()) };
        let own: Box<dyn Collector> = Box::new(Arc::clone(&self.metrics));
        let settings = TargetFlags::own().settings(nanoseconds(self.every()));
        self.exporter = Some(Exporter::start(address, DESTINATIONS, Rules::default(), settings, vec![own])?);
        Ok(())
    }

    fn export(&mut self, namespace: &Namespace, readings: Vec<Reading>, watcher: &mut Watcher) {
        let status = self.status();
        let mut active = BTreeMap::new();
        for fix in &status.fixes {
            *active.entry(fix.action).or_default() += 1;
        }
        self.metrics.update(status.totals, active, self.events.counts());
        let own = readings.into_iter().find(|reading| reading.is_own);
        if let (Some(exporter), Some(own)) = (&mut self.exporter, own) {
            exporter.show(namespace, own.snapshot, watcher.watch().times());
        }
    }

    fn every(&self) -> Duration {
        self.flags.every.unwrap_or(self.policy.every)
    }

    fn scopes(&self) -> Vec<&Scope> {
        let ports = self.policy.ports.iter().map(|ports| &ports.scope);
        ports.chain(self.policy.accept.iter().map(|accept| &accept.scope)).collect()
    }

    fn what(&self) -> String {
        match (&self.flags.config, self.observes) {
            (Some(path), false) => format!("acts by {}", path.display()),
            (Some(path), true) => format!("observes by {}, and changes nothing", path.display()),
            (None, _) => "observes without a policy, and changes nothing".to_owned(),
        }
    }

    fn say(&mut self, event: GuardEventKind, action: Option<GuardAction>, target: &str, message: String) {
        let at = output::rfc3339(OffsetDateTime::now_utc());
        self.events.say(GuardEvent { at, event, action, target: target.to_owned(), message });
    }

    /// Says that a fault is left alone, and counts it.
    fn say_refused(&mut self, action: GuardAction, target: &str, why: String) {
        self.totals.refused += 1;
        self.say(GuardEventKind::Refusal, Some(action), target, why);
    }

    /// Returns the time since the start.
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn decide(&mut self, readings: &[Reading]) {
        let now = self.now();
        let ports = self.policy.ports.clone();
        let accept = self.policy.accept.clone();
        self.judge.note_fixes(now, self.ports.iter().map(|(key, (namespace, _))| (*namespace, key.clone())));
        let evidence = self.judge.evidence(now, readings, ports.as_ref(), accept.as_ref(), &self.mount);
        self.notify(readings);
        if self.paused.is_some() {
            return;
        }
        self.refuse(&evidence);
        self.decide_ports(now, &evidence);
        self.decide_accept(now, &evidence);
    }

    /// Says each refusal once, as long as it lasts.
    fn refuse(&mut self, evidence: &Evidence) {
        // The figures in a refusal change with each reading.
        let is_new = |refusal: &&Refusal| {
            !self
                .refused
                .iter()
                .any(|known| (known.action, &known.target) == (refusal.action, &refusal.target))
        };
        let fresh: Vec<Refusal> = evidence.refusals.iter().filter(is_new).cloned().collect();
        for refusal in fresh {
            if evidence.is_fixed(&refusal, |key| self.ports.contains_key(key)) {
                continue;
            }
            self.say_refused(refusal.action, &refusal.target, refusal.why);
        }
        self.refused.clone_from(&evidence.refusals);
    }

    /// Reports findings of doctor, each once as long as it lasts.
    fn notify(&mut self, readings: &[Reading]) {
        let rules = self.policy.notify.clone().unwrap_or_default();
        let mut found = BTreeSet::new();
        let mut fresh = Vec::new();
        for reading in readings {
            for finding in diagnose(&reading.snapshot, &Thresholds::default()).findings {
                let is_wanted = match rules.is_empty() {
                    true => finding.severity == Severity::Critical,
                    false => rules.contains(&finding.id),
                };
                let key = (reading.namespace, finding.id.clone(), finding.subject.clone());
                if is_wanted && found.insert(key.clone()) && !self.notified.contains(&key) {
                    fresh.push(finding);
                }
            }
        }
        self.notified = found;
        for finding in fresh {
            self.totals.notified += 1;
            let message = format!("{}: {}", finding.id, finding.verdict);
            self.say(GuardEventKind::Notify, Some(GuardAction::Notify), &finding.subject, message);
        }
    }

    // Requests.

    fn answer(&mut self) {
        if let Some(Some(end)) = self.paused
            && Instant::now() >= end
        {
            self.resume();
        }
        let requests = self.control.as_mut().map(Control::requests).unwrap_or_default();
        for request in requests {
            let answer = match request.kind {
                RequestKind::Status => serde_json::to_value(self.status()).map_err(|error| error.to_string()),
                RequestKind::Pause { for_ns } => {
                    let end = for_ns.map(|time| Instant::now() + Duration::from_nanos(time));
                    self.pause(end);
                    Ok(serde_json::Value::Null)
                }
                RequestKind::Resume => {
                    self.resume();
                    Ok(serde_json::Value::Null)
                }
                RequestKind::Takeover { pid } => {
                    self.hand_over(pid, request);
                    return;
                }
            };
            request.answer(answer);
        }
    }

    fn pause(&mut self, end: Option<Instant>) {
        let was_paused = self.paused.replace(end).is_some();
        self.release_all("a person has paused guard");
        if !was_paused {
            self.say(GuardEventKind::Pause, None, "", "nothing is changed until guard resumes".to_owned());
        }
    }

    fn resume(&mut self) {
        if self.paused.take().is_some() {
            self.say(GuardEventKind::Resume, None, "", self.what());
        }
    }

    pub(super) fn status(&self) -> GuardResults {
        let mut totals = self.totals;
        let mut fixes = Vec::new();
        for (key, (namespace, fix)) in self.ports.iter().filter(|(_, (_, fix))| fix.is_announced) {
            let progress = fix.progress();
            let drawn = progress.drawn + progress.spread;
            totals.connects += progress.connects;
            totals.drawn += drawn;
            totals.fallbacks += progress.fallbacks;
            totals.saved_ns += progress.saved_ns.unwrap_or(0);
            let policy = self.policy.ports.as_ref();
            fixes.push(GuardFix {
                action: GuardAction::FixPorts,
                target: key.cgroup.clone(),
                to: self.destination(key),
                namespace: *namespace,
                pid: None,
                source: policy.and_then(|policy| policy.source).map(|source| source.to_string()),
                since_ns: nanoseconds(fix.began.elapsed()),
                reason: fix.reason.clone(),
                effect: effect(fix.effect),
                connects: progress.connects,
                drawn,
                fallbacks: progress.fallbacks,
                saved_ns: progress.saved_ns,
            });
        }
        for (key, (_, fix)) in self.accept.iter().filter(|(_, (_, fix))| fix.is_announced) {
            fixes.push(GuardFix {
                action: GuardAction::FixAccept,
                target: key.address.to_string(),
                to: None,
                namespace: key.namespace,
                pid: Some(fix.pid()),
                source: None,
                since_ns: nanoseconds(fix.began.elapsed()),
                reason: fix.reason.clone(),
                effect: effect(fix.effect),
                connects: 0,
                drawn: 0,
                fallbacks: 0,
                saved_ns: None,
            });
        }
        let remaining = self.paused.flatten().map(|end| end.saturating_duration_since(Instant::now()));
        GuardResults {
            state: match (self.paused, self.observes) {
                (Some(_), _) => GuardState::Paused,
                (None, true) => GuardState::Observing,
                (None, false) => GuardState::Active,
            },
            uptime_ns: nanoseconds(self.inherited + self.began.elapsed()),
            policy: self.flags.config.as_ref().map(|path| path.display().to_string()),
            paused_for_ns: remaining.map(nanoseconds),
            every_ns: nanoseconds(self.every()),
            namespaces: self.namespaces as u64,
            fixes,
            totals,
            events: self.events.last(),
        }
    }

    fn destination(&self, key: &PortsKey) -> Option<String> {
        let policy = self.policy.ports.as_ref()?;
        Some(policy.destinations[key.destination?].0.clone())
    }
}

fn effect(effect: Effect) -> GuardEffect {
    match effect {
        Effect::Pending => GuardEffect::Pending,
        Effect::Helps => GuardEffect::Helps,
        Effect::Fails => GuardEffect::None,
    }
}

impl Running {
    fn decide_ports(&mut self, now: Duration, evidence: &Evidence) {
        // Those that were attached during the readings, before their effects and ends.
        self.announce();
        let is_needed = |(key, need): (&PortsKey, &PortsNeed)| {
            (need.begins || self.ports.contains_key(key)).then(|| key.clone())
        };
        let mut needed: Vec<PortsKey> = evidence.ports.iter().filter_map(is_needed).collect();
        needed.sort_by_key(|key| Reverse(evidence.ports[key].sockets));
        let mut effects = BTreeMap::new();
        for (key, (_, fix)) in &mut self.ports {
            let before = fix.effect;
            effects.insert(key.clone(), (before, fix.tell()));
        }
        for (key, (before, after)) in &effects {
            if before != after && *after == Effect::Helps {
                let progress = self.ports[key].1.progress();
                let drawn = progress.drawn + progress.spread;
                let message = format!("it helps: {} got a port that was drawn", counted(drawn, "connect"));
                self.say(GuardEventKind::Effect, Some(GuardAction::FixPorts), &key.cgroup, message);
            }
        }
        let effect = |key: &PortsKey| effects.get(key).map_or(Effect::Pending, |(_, effect)| *effect);
        for step in self.ports_keeper.step(now, &needed, effect) {
            match step {
                Step::Begin(key) => {
                    let need = evidence.ports[&key].clone();
                    self.begin_ports(now, key, need.namespace, need.reason);
                }
                Step::End(key, why) => self.end_ports(&key, why),
                Step::Full(key) => {
                    let max = self.policy.ports.as_ref().map_or(0, |ports| ports.max);
                    let why = format!("{}; `max` allows {max}", evidence.ports[&key].reason);
                    self.say_refused(GuardAction::FixPorts, &key.cgroup, why);
                }
            }
        }
    }

    fn begin_ports(&mut self, now: Duration, key: PortsKey, namespace: u32, reason: String) {
        let action = GuardAction::FixPorts;
        if self.observes {
            let what = format!("{reason}: fix ports would begin");
            self.say(GuardEventKind::Would, Some(action), &key.cgroup, what);
            return;
        }
        let Some(policy) = &self.policy.ports else { return };
        let destination = key.destination.map(|index| policy.destinations[index].1);
        let directory = directory_of(&self.mount, &key.cgroup);
        // Guard lets go below half of the share, and connects above it are in need.
        let began = PortsFix::begin(directory, destination, policy.source, policy.past / 2.0, reason);
        match began {
            Ok(fix) => _ = self.ports.insert(key, (namespace, fix)),
            Err(error) => {
                self.ports_keeper.failed(now, key.clone());
                self.say_refused(action, &key.cgroup, format!("cannot start a thread: {error}"));
            }
        }
    }

    fn end_ports(&mut self, key: &PortsKey, why: Why) {
        let Some((_, fix)) = self.ports.remove(key) else { return };
        if !fix.is_attached() && !fix.has_ended() {
            // The verifier of the kernel may take seconds, for which guard would answer nobody.
            fix.stop();
            self.ending.push(fix);
            return;
        }
        let quiet = self.policy.quiet.as_secs();
        let progress = fix.progress();
        let why = match why {
            Why::Quiet => format!("no need for {quiet} s"),
            Why::NoEffect if progress.drawn + progress.fallbacks == 0 => {
                "the program binds its sockets itself, so that connect() finds no port for it".to_owned()
            }
            Why::NoEffect => format!(
                "it did not help: {} of {} found no port",
                progress.fallbacks,
                counted(progress.fallbacks + progress.drawn + progress.spread, "draw")
            ),
        };
        self.release_ports(key, fix, &why);
    }

    fn release_ports(&mut self, key: &PortsKey, fix: PortsFix, why: &str) {
        let was_attached = fix.is_announced;
        let (progress, ended) = fix.end();
        let drawn = progress.drawn + progress.spread;
        self.totals.connects += progress.connects;
        self.totals.drawn += drawn;
        self.totals.fallbacks += progress.fallbacks;
        self.totals.saved_ns += progress.saved_ns.unwrap_or(0);
        let why = ended.map_or_else(|error| error.to_string(), |()| why.to_owned());
        let what = format!("{drawn} of {} got a port that was drawn", counted(progress.connects, "connect"));
        self.say_end(was_attached, GuardAction::FixPorts, &key.cgroup, &why, &what);
    }

    fn decide_accept(&mut self, now: Duration, evidence: &Evidence) {
        let needed: Vec<AcceptKey> = evidence.accept.keys().copied().collect();
        let mut effects = BTreeMap::new();
        for (key, (need, fix)) in &mut self.accept {
            let before = fix.effect;
            let stuck = evidence.accept.get(key).and_then(|need| need.stuck);
            effects.insert(*key, (before, fix.tell(need.stuck.is_some(), stuck)));
        }
        for (key, (before, after)) in &effects {
            if before != after && *after == Effect::Helps {
                let message =
                    "it helps: the queue of the worker that does not accept grows no more".to_owned();
                self.say(
                    GuardEventKind::Effect,
                    Some(GuardAction::FixAccept),
                    &key.address.to_string(),
                    message,
                );
            }
        }
        let effect = |key: &AcceptKey| effects.get(key).map_or(Effect::Pending, |(_, effect)| *effect);
        for step in self.accept_keeper.step(now, &needed, effect) {
            match step {
                Step::Begin(key) => self.begin_accept(now, key, evidence.accept[&key].clone()),
                Step::End(key, why) => {
                    let quiet = self.policy.quiet.as_secs();
                    let why = match why {
                        Why::Quiet => format!("no need for {quiet} s"),
                        Why::NoEffect => "it did not help: the queue grew on".to_owned(),
                    };
                    if let Some((_, fix)) = self.accept.remove(&key) {
                        self.release_accept(key, fix, &why);
                    }
                }
                Step::Full(key) => {
                    let max = self.policy.accept.as_ref().map_or(0, |accept| accept.max);
                    let why = format!("{}; `max` allows {max}", evidence.accept[&key].reason);
                    self.say_refused(GuardAction::FixAccept, &key.address.to_string(), why);
                }
            }
        }
    }

    fn begin_accept(&mut self, now: Duration, key: AcceptKey, need: AcceptNeed) {
        let action = GuardAction::FixAccept;
        let target = key.address.to_string();
        let reason = need.reason.clone();
        if self.observes {
            let what = format!("{reason}: fix accept would begin");
            self.say(GuardEventKind::Would, Some(action), &target, what);
            return;
        }
        match AcceptFix::begin(key.address, need.process, reason) {
            Ok(fix) => _ = self.accept.insert(key, (need, fix)),
            Err(error) => {
                self.accept_keeper.failed(now, key);
                self.say_refused(action, &target, format!("cannot start fix accept: {error}"));
            }
        }
    }

    fn release_accept(&mut self, key: AcceptKey, fix: AcceptFix, why: &str) {
        let was_attached = fix.is_announced;
        let choices = fix.end();
        self.totals.connects += choices;
        self.totals.drawn += choices;
        let what = format!("fix accept chose for {}", counted(choices, "connection"));
        self.say_end(was_attached, GuardAction::FixAccept, &key.address.to_string(), why, &what);
    }

    /// Takes note of fixes that are attached now, and of those that have ended by themselves.
    fn look_after_fixes(&mut self) {
        self.announce();
        for fix in self.ending.extract_if(.., |fix| fix.has_ended()) {
            let _ = fix.end();
        }
        let now = self.now();
        let ended: Vec<PortsKey> =
            self.ports.iter().filter(|(_, (_, fix))| fix.has_ended()).map(|(key, _)| key.clone()).collect();
        for key in ended {
            let Some((_, fix)) = self.ports.remove(&key) else { continue };
            if fix.is_announced || fix.was_too_late() {
                // A cgroup of this name may have been made again meanwhile.
                self.ports_keeper.gone(&key);
            } else {
                self.ports_keeper.failed(now, key.clone());
            }
            if !fix.was_too_late() {
                self.release_ports(&key, fix, "the cgroup was removed");
            }
        }
        let mut ended = Vec::new();
        for (key, (_, fix)) in &mut self.accept {
            ended.extend(fix.ended().map(|why| (*key, why)));
        }
        for (key, why) in ended {
            if let Some((_, fix)) = self.accept.remove(&key) {
                self.accept_keeper.failed(now, key);
                self.release_accept(key, fix, &why);
            }
        }
    }

    fn announce(&mut self) {
        let mut attached = Vec::new();
        for (key, (_, fix)) in &mut self.ports {
            if !fix.is_announced && fix.is_attached() {
                fix.is_announced = true;
                attached.push((GuardAction::FixPorts, key.cgroup.clone(), fix.reason.clone()));
            }
        }
        for (key, (_, fix)) in &mut self.accept {
            if !fix.is_announced && fix.is_attached() {
                fix.is_announced = true;
                attached.push((GuardAction::FixAccept, key.address.to_string(), fix.reason.clone()));
            }
        }
        for (action, target, reason) in attached {
            self.totals.attached += 1;
            self.say(GuardEventKind::Attach, Some(action), &target, reason);
        }
    }

    /// Says that a fix has ended: released, or refused if it never was attached.
    fn say_end(&mut self, was_attached: bool, action: GuardAction, target: &str, why: &str, what: &str) {
        if was_attached {
            self.totals.released += 1;
            self.say(GuardEventKind::Release, Some(action), target, format!("{why}; {what}"));
        } else {
            self.say_refused(action, target, why.to_owned());
        }
    }

    fn release_all(&mut self, why: &str) {
        self.announce();
        // All at once: each takes up to the pace of its thread.
        self.ports.values().for_each(|(_, fix)| fix.stop());
        for (key, (_, fix)) in std::mem::take(&mut self.ports) {
            self.release_ports(&key, fix, why);
            self.ports_keeper.gone(&key);
        }
        for (key, (_, fix)) in std::mem::take(&mut self.accept) {
            self.release_accept(key, fix, why);
            self.accept_keeper.gone(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::guard::GuardFlags;
    use crate::commands::guard::policy::Policy;

    /// On a host without a free processor the verifier takes minutes.
    #[test]
    fn guard_does_not_wait_for_a_fix_that_is_not_attached() {
        let flags = GuardFlags {
            config: None,
            dry_run: false,
            every: None,
            socket: "/nonexistent".into(),
            takeover: false,
            listen: None,
            no_trace: true,
            quiet: true,
        };
        let mut running = Running::new(flags, Policy::of_all(), false).unwrap();
        let key = PortsKey { cgroup: "/a".to_owned(), destination: None };
        let (verified, fix) = PortsFix::in_verification();
        running.ports.insert(key.clone(), (1, fix));
        running.end_ports(&key, Why::Quiet);
        assert!(running.ports.is_empty() && !running.ending[0].has_ended());
        running.look_after_fixes();
        assert_eq!(running.ending.len(), 1);
        drop(verified);
        let end = Instant::now() + Duration::from_secs(60);
        while !running.ending.is_empty() && Instant::now() < end {
            running.look_after_fixes();
        }
        assert!(running.ending.is_empty());
        assert!(running.events.last().is_empty(), "what was not attached is not released");
    }
}
