//! From one guard to the next, without a gap.

use std::env;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{self, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use fourtuple_record::{GuardEventKind, GuardTotals};
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::pidfd::Pidfd;
use serde::{Deserialize, Serialize};
use signal_hook::consts::SIGTERM;

use super::Running;
use crate::commands::guard::control::{self, Control, Request, RequestKind};
use crate::commands::guard::evidence::{AcceptKey, AcceptNeed, PortsKey};
use crate::commands::guard::repairs::{PortsFix, program};
use crate::units::nanoseconds;

/// Time limit for the successor to take over; then this guard goes on.
const HANDOVER: Duration = Duration::from_secs(60);
/// Time limit for the fixes that a successor takes over.
const ATTACH: Duration = Duration::from_secs(30);

/// A handover that this guard waits for.
#[derive(Debug)]
pub(super) struct Pending {
    end: Instant,
    /// The successor; `None` if its number means no process here, as in another PID namespace.
    successor: Option<Pidfd>,
}

impl Pending {
    /// Returns why the successor will not take over, if that is clear.
    fn failed(&self) -> Option<&'static str> {
        if self.successor.as_ref().is_some_and(has_ended) {
            return Some("its successor has ended");
        }
        (Instant::now() >= self.end).then_some("its successor has not taken over in time")
    }
}

/// Returns whether a process has ended, also if its parent has not waited for it.
fn has_ended(process: &Pidfd) -> bool {
    let wait = || {
        let epoll = Epoll::new()?;
        epoll.add(process.as_fd(), 0, Interest::READ)?;
        Ok::<bool, io::Error>(!epoll.wait(&mut [Ready::NONE], Some(Duration::ZERO))?.is_empty())
    };
    // Without a descriptor the time limit is left.
    wait().unwrap_or(false)
}

/// What a guard hands to its successor.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Handover {
    uptime_ns: u64,
    totals: GuardTotals,
    ports: Vec<HandedPorts>,
    accept: Vec<HandedAccept>,
    /// Process that hands over, which SIGTERM ends.
    pid: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct HandedPorts {
    cgroup: String,
    namespace: u32,
    /// As written in the policy.
    destination: Option<String>,
    reason: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct HandedAccept {
    namespace: u32,
    address: SocketAddr,
    process: Option<u32>,
    waiting: u32,
    reason: String,
}

impl Running {
    /// Starts a guard that takes over from this one, with the program and the policy as they are now.
    pub(super) fn start_successor(&mut self) {
        if self.handover.is_some() || self.successor.is_some() {
            return;
        }
        self.service.reloading();
        let started = program().and_then(|program| {
            let mut command = Command::new(program);
            command.args(env::args_os().skip(1));
            if !self.flags.takeover {
                command.arg("--takeover");
            }
            // Its watchdog is told by its own number, which the service manager knows only afterwards.
            command.env_remove("WATCHDOG_PID").stdin(Stdio::null()).process_group(0).spawn()
        });
        match started {
            Ok(child) => self.successor = Some(child),
            Err(error) => self.stay(&format!("its successor cannot be started: {error}")),
        }
    }

    /// Takes note of a successor that has failed: this guard goes on.
    pub(super) fn look_after_handover(&mut self) -> anyhow::Result<()> {
        if let Some(child) = &mut self.successor
            && let Ok(Some(status)) = child.try_wait()
        {
            self.successor = None;
            self.stay(&format!("its successor ended: {status}"));
        }
        if let Some(why) = self.handover.as_ref().and_then(Pending::failed) {
            self.stay(why);
        }
        if self.control.is_none() && self.handover.is_none() {
            self.control = Some(Control::bind(&self.flags.socket)?);
            self.listen()?;
        }
        Ok(())
    }

    fn stay(&mut self, why: &str) {
        self.handover = None;
        self.service.ready();
        self.say(GuardEventKind::Takeover, None, "", format!("this guard goes on: {why}"));
    }

    /// Hands over: the successor attaches its fixes beside those of this guard, and then ends this process. A group takes one selector, so that
    /// those are detached first.
    pub(super) fn hand_over(&mut self, pid: u32, request: Request) {
        let accept = std::mem::take(&mut self.accept);
        let accept: Vec<HandedAccept> = accept
            .into_iter()
            .map(|(key, (need, fix))| {
                let reason = fix.reason.clone();
                self.totals.released += u64::from(fix.is_announced);
                self.totals.drawn += fix.end();
                self.accept_keeper.gone(&key);
                HandedAccept {
                    namespace: key.namespace,
                    address: key.address,
                    process: need.process,
                    waiting: need.stuck.unwrap_or(0),
                    reason,
                }
            })
            .collect();
        let ports = self.ports.iter().map(|(key, (namespace, fix))| HandedPorts {
            cgroup: key.cgroup.clone(),
            namespace: *namespace,
            destination: self.destination(key),
            reason: fix.reason.clone(),
        });
        let handover = Handover {
            uptime_ns: nanoseconds(self.inherited + self.began.elapsed()),
            totals: self.status().totals,
            ports: ports.collect(),
            accept,
            pid: process::id(),
        };
        self.say(GuardEventKind::Takeover, None, "", format!("process {pid} takes over"));
        // Free for the successor before it hears of it.
        self.control = None;
        self.exporter = None;
        let successor = Pidfd::of_process(pid).ok();
        self.handover = Some(Pending { end: Instant::now() + HANDOVER, successor });
        self.service.main_pid(pid);
        request.answer(serde_json::to_value(handover).map_err(|error| error.to_string()));
    }

    /// Asks the guard at the socket to hand over. `None`: no guard runs there.
    pub(super) fn ask_for_handover(&self) -> anyhow::Result<Option<(Handover, Option<Pidfd>)>> {
        if UnixStream::connect(&self.flags.socket).is_err() {
            return Ok(None);
        }
        let value = control::ask(&self.flags.socket, &RequestKind::Takeover { pid: process::id() })?;
        let handover: Handover =
            serde_json::from_value(value).context("the guard at the socket is of another version")?;
        // Now, while it waits: its number may be another's when the fixes are attached.
        let before = Pidfd::of_process(handover.pid).ok();
        Ok(Some((handover, before)))
    }

    pub(super) fn take_over(
        &mut self,
        (handover, before): (Handover, Option<Pidfd>),
        own: u32,
        stop: &AtomicBool,
    ) -> anyhow::Result<()> {
        self.inherited = Duration::from_nanos(handover.uptime_ns);
        self.totals = handover.totals;
        let now = self.now();
        for handed in handover.ports {
            let policy = self.policy.ports.as_ref();
            let index = |text: &String| {
                policy.and_then(|policy| policy.destinations.iter().position(|(known, _)| known == text))
            };
            let destination = handed.destination.as_ref().map(index);
            let is_included = policy.is_some_and(|policy| {
                policy.scope.find(&handed.cgroup) == Some(handed.cgroup.as_str())
                    && destination != Some(None)
                    && destination.is_some() != policy.destinations.is_empty()
            });
            // The policy may be another one.
            if !is_included {
                continue;
            }
            let key = PortsKey { cgroup: handed.cgroup, destination: destination.flatten() };
            self.ports_keeper.adopt(now, key.clone());
            self.begin_ports(now, key, handed.namespace, handed.reason);
        }
        let end = Instant::now() + ATTACH;
        let is_waiting = |fix: &PortsFix| !fix.is_attached() && !fix.has_ended();
        while self.ports.values().any(|(_, fix)| is_waiting(fix))
            && Instant::now() < end
            && !stop.load(Ordering::Relaxed)
        {
            thread::sleep(Duration::from_millis(10));
        }
        self.announce();
        for handed in handover.accept {
            let is_included =
                self.policy.accept.as_ref().is_some_and(|policy| policy.includes(handed.address));
            if is_included && (handed.namespace == own || handed.process.is_some()) {
                let key = AcceptKey { namespace: handed.namespace, address: handed.address };
                let need = AcceptNeed {
                    process: handed.process,
                    stuck: Some(handed.waiting),
                    reason: handed.reason,
                };
                self.accept_keeper.adopt(now, key);
                self.begin_accept(now, key, need);
            }
        }
        self.control = Some(Control::replace(&self.flags.socket)?);
        // It may have ended by itself.
        let _ = before.map(|before| before.signal(SIGTERM));
        self.say(
            GuardEventKind::Takeover,
            None,
            "",
            format!("took over from process {}; {}", handover.pid, self.what()),
        );
        Ok(())
    }
}
