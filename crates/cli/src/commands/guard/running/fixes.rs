//! The beginnings and the ends of fixes.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use fourtuple_fix::guard::{Effect, Step, Why, directory_of};
use fourtuple_record::measure::words::counted;
use fourtuple_record::{GuardAction, GuardEventKind};

use super::Running;
use crate::commands::guard::evidence::{AcceptKey, AcceptNeed, Evidence, PortsKey, PortsNeed};
use crate::commands::guard::repairs::{AcceptFix, PortsFix};

impl Running {
    pub(super) fn decide_ports(&mut self, now: Duration, evidence: &Evidence) {
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
                    self.totals.refused += 1;
                    self.say(GuardEventKind::Refusal, Some(GuardAction::FixPorts), &key.cgroup, why);
                }
            }
        }
    }

    pub(super) fn begin_ports(&mut self, now: Duration, key: PortsKey, namespace: u32, reason: String) {
        let action = Some(GuardAction::FixPorts);
        if self.observes {
            self.say(GuardEventKind::Would, action, &key.cgroup, format!("{reason}: fix ports would begin"));
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
                self.totals.refused += 1;
                self.say(
                    GuardEventKind::Refusal,
                    action,
                    &key.cgroup,
                    format!("cannot start a thread: {error}"),
                );
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

    pub(super) fn decide_accept(&mut self, now: Duration, evidence: &Evidence) {
        let needed: Vec<AcceptKey> = evidence.accept.keys().copied().collect();
        let mut effects = BTreeMap::new();
        for (key, (_, fix)) in &mut self.accept {
            let before = fix.effect;
            let stuck = evidence.accept.get(key).and_then(|need| need.stuck);
            effects.insert(*key, (before, fix.tell(stuck)));
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
                    self.totals.refused += 1;
                    self.say(
                        GuardEventKind::Refusal,
                        Some(GuardAction::FixAccept),
                        &key.address.to_string(),
                        why,
                    );
                }
            }
        }
    }

    pub(super) fn begin_accept(&mut self, now: Duration, key: AcceptKey, need: AcceptNeed) {
        let action = Some(GuardAction::FixAccept);
        let target = key.address.to_string();
        let reason = need.reason.clone();
        if self.observes {
            self.say(GuardEventKind::Would, action, &target, format!("{reason}: fix accept would begin"));
            return;
        }
        match AcceptFix::begin(key.address, need.process, need.stuck.unwrap_or(0), reason) {
            Ok(fix) => _ = self.accept.insert(key, (need, fix)),
            Err(error) => {
                self.accept_keeper.failed(now, key);
                self.totals.refused += 1;
                self.say(
                    GuardEventKind::Refusal,
                    action,
                    &target,
                    format!("cannot start fix accept: {error}"),
                );
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
    pub(super) fn look_after_fixes(&mut self) {
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

    pub(super) fn announce(&mut self) {
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
            self.totals.refused += 1;
            self.say(GuardEventKind::Refusal, Some(action), target, why.to_owned());
        }
    }

    pub(super) fn release_all(&mut self, why: &str) {
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
    use std::time::Instant;

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
