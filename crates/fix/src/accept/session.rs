//! The groups of a server while they have selectors: attaches, follows reloads, detaches.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_bpf::fix_accept::{FoundProgram, LISTENERS, MEMBERS, Selection};
use fourtuple_bpf::{BpfError, Chooser, FixAccept};
use fourtuple_record::{FixAcceptListener, FixAcceptResults, Remark};
use fourtuple_syscalls::errno::EBUSY;
use fourtuple_syscalls::pidfd::Pidfd;
use fourtuple_syscalls::sock_diag::Member;
use fourtuple_syscalls::socket::{self, Transport};

use crate::accept::discover::{self, Scope};
use crate::accept::error::AcceptError;
use crate::accept::group::{Candidate, Group, Listener, duplicate};
use crate::accept::guard::{Guard, Handle};
use crate::accept::heart::Heart;
use crate::accept::settings::{Accept, AcceptProgress, AcceptTarget};
use crate::processes;

/// Time for which the maps of a fix that has ended may still hold a socket: the kernel frees them in the background.
const RELEASE_TIME: Duration = Duration::from_secs(2);
/// The greatest number of listeners in a record.
const ROWS: usize = 1_000;

pub(super) struct Session<'a> {
    settings: &'a Accept,
    scope: Scope,
    fix: FixAccept,
    /// The process of the target.
    process: Option<Pidfd>,
    guard: Option<Guard>,
    groups: Vec<Group>,
    /// Free entries of the maps. The entry that was free for the longest time is used first.
    free: Vec<usize>,
    /// Cookies of sockets without a group.
    ungrouped: BTreeSet<u64>,
    /// Rows of listeners that were closed.
    closed: Vec<FixAcceptListener>,
    /// Packets that ended groups left to the kernel's hash.
    left: (u64, u64),
    joined: u64,
    chosen: u64,
    remarks: BTreeMap<&'static str, String>,
    _heart: Heart,
}

impl<'a> Session<'a> {
    /// Attaches a selector to each group of the server.
    pub(super) fn attach(settings: &'a Accept, guard: Option<Guard>) -> Result<Session<'a>, AcceptError> {
        let process = match settings.target {
            AcceptTarget::Process(number) => {
                Some(Pidfd::of_process(number).map_err(|_| AcceptError::NoProcess(number))?)
            }
            AcceptTarget::Address(_) => None,
        };
        let scope = Scope::open(settings.target)?;
        let members = scope.members().map_err(AcceptError::List)?;
        let fix = FixAccept::attach()?;
        let heart = Heart::start(fix.heartbeat()).map_err(AcceptError::Thread)?;
        let mut session = Session {
            settings,
            scope,
            fix,
            process,
            guard,
            groups: Vec::new(),
            free: (0..LISTENERS).collect(),
            ungrouped: BTreeSet::new(),
            closed: Vec::new(),
            left: (0, 0),
            joined: 0,
            chosen: 0,
            remarks: BTreeMap::new(),
            _heart: heart,
        };
        let candidates = session.candidates(&members)?;
        session.check(&candidates)?;
        if let Err(error) = session.adopt(candidates) {
            session.detach()?;
            return Err(error);
        }
        Ok(session)
    }

    pub(super) fn addresses(&self) -> Vec<String> {
        // A server may have a group for TCP and one for UDP at one address.
        let addresses: BTreeSet<_> = self.groups.iter().map(|group| group.local).collect();
        addresses.iter().map(ToString::to_string).collect()
    }

    pub(super) fn has_ended(&self) -> bool {
        let is_over = |process: &Pidfd| socket::wait_readable(process.as_fd(), Some(Duration::ZERO));
        self.process.as_ref().is_some_and(|process| is_over(process).unwrap_or(false))
    }

    /// Follows the listeners: some were closed, others joined. `looks`: also for new addresses of the process.
    pub(super) fn follow(&mut self, looks: bool) -> Result<(), AcceptError> {
        if looks && matches!(self.settings.target, AcceptTarget::Process(_)) {
            self.scope.look().map_err(AcceptError::List)?;
        }
        let members = self.scope.members().map_err(AcceptError::List)?;
        self.release(&members)?;
        if looks {
            self.refresh(&members)?;
        }
        let known: BTreeSet<u64> =
            self.groups.iter().flat_map(|group| &group.listeners).map(|listener| listener.cookie).collect();
        let fresh: Vec<Member> = members
            .into_iter()
            .filter(|member| !known.contains(&member.cookie) && !self.ungrouped.contains(&member.cookie))
            .collect();
        if fresh.is_empty() {
            return Ok(());
        }
        // The kernel's hash chooses for a group that cannot be followed; the other groups keep their selectors.
        let followed = self.candidates(&fresh).and_then(|candidates| {
            let count = candidates.len() as u64;
            self.adopt(candidates).map(|()| self.joined += count)
        });
        if let Err(error) = followed {
            self.remarks.insert("not-followed", error.to_string());
        }
        Ok(())
    }

    /// Frees the entries of listeners that are closed, and notes the queues of open ones.
    fn release(&mut self, members: &[Member]) -> Result<(), AcceptError> {
        let queues: BTreeMap<u64, u32> = members.iter().map(|member| (member.cookie, member.queue)).collect();
        let mut has_changed = false;
        for group in &mut self.groups {
            let (open, closed): (Vec<_>, Vec<_>) =
                group.listeners.drain(..).partition(|listener| queues.contains_key(&listener.cookie));
            group.listeners = open;
            for listener in &mut group.listeners {
                listener.queue = queues[&listener.cookie];
            }
            if closed.is_empty() {
                continue;
            }
            has_changed = true;
            group.update();
            for listener in closed {
                self.closed.push(group.row(&listener, true, &self.fix)?);
                self.fix.leave(listener.entry);
                self.free.push(listener.entry);
            }
        }
        for group in self.groups.extract_if(.., |group| group.listeners.is_empty()) {
            add(&mut self.left, &group);
        }
        if has_changed { self.tell() } else { Ok(()) }
    }

    /// Finds the processes of the sockets again if one of them has ended: a reload may leave the sockets to other processes.
    fn refresh(&mut self, members: &[Member]) -> Result<(), AcceptError> {
        let mut listeners = self.groups.iter().flat_map(|group| &group.listeners);
        if !listeners.any(|listener| listener.handles.iter().any(Handle::is_stale)) {
            return Ok(());
        }
        let inodes: BTreeMap<u64, u32> = members.iter().map(|member| (member.cookie, member.inode)).collect();
        let mut handles = discover::handles(members);
        for listener in self.groups.iter_mut().flat_map(|group| &mut group.listeners) {
            let inode = inodes.get(&listener.cookie);
            if let Some(found) = inode.and_then(|inode| handles.remove(inode)) {
                listener.process = discover::worker(&found);
                listener.command = processes::command(listener.process);
                listener.handles = found;
            }
        }
        self.tell()
    }

    /// Asks the kernel about the groups of sockets. Sockets without a group are noted.
    fn candidates(&mut self, members: &[Member]) -> Result<Vec<Candidate>, AcceptError> {
        let mut handles = discover::handles(members);
        let mut found = Vec::new();
        for member in members {
            let handles = handles.remove(&member.inode).unwrap_or_default();
            // The duplicate is closed before the next step, because the server's close() has no effect as long as it is open.
            let Some(socket) =
                duplicate(&handles)?.map(|socket| self.fix.learn(socket.as_fd())).transpose()?
            else {
                continue;
            };
            if socket.group.is_none() {
                self.ungrouped.insert(member.cookie);
            }
            found.push(Candidate {
                transport: member.transport,
                local: member.local,
                cookie: member.cookie,
                queue: member.queue,
                handles,
                found: socket,
            });
        }
        Ok(found)
    }

    /// Returns the reason to refuse the server, if any.
    fn check(&self, candidates: &[Candidate]) -> Result<(), AcceptError> {
        let Some(first) = candidates.first() else {
            return Err(match self.settings.target {
                AcceptTarget::Address(address) => AcceptError::Nothing(
                    format!("at {address}"),
                    "fourtuple; --pid finds the listeners of a process in another namespace",
                ),
                AcceptTarget::Process(process) => {
                    AcceptError::Nothing(format!("for process {process} or its descendants"), "the process")
                }
            });
        };
        let Some(grouped) = candidates.iter().find(|candidate| candidate.found.group.is_some()) else {
            let command = processes::command(discover::worker(&first.handles));
            return Err(AcceptError::NoGroup { socket: first.describe(), command });
        };
        let Some(chosen) = candidates.iter().find(|candidate| self.is_for(candidate)) else {
            let flag = if self.settings.control.is_some() { "--control" } else { "--select" };
            return Err(AcceptError::OnlyUdp(flag, grouped.describe()));
        };
        if candidates.iter().filter(|candidate| self.is_for(candidate)).all(|its| its.found.members < 2) {
            return Err(AcceptError::Single(chosen.describe()));
        }
        let mut seen: BTreeMap<u64, usize> = BTreeMap::new();
        for candidate in candidates.iter().filter(|candidate| self.is_for(candidate)) {
            let members = candidate.found.members;
            if members as usize > MEMBERS {
                return Err(AcceptError::TooLarge { socket: candidate.describe(), members });
            }
            *seen.entry(candidate.found.group.unwrap_or_default()).or_default() += 1;
            if let Some(program) = candidate.found.program.as_ref().filter(|_| !self.settings.dry_run) {
                return Err(has_selector(candidate, program));
            }
        }
        for candidate in candidates.iter().filter(|its| its.transport == Transport::Tcp) {
            let members = candidate.found.members;
            if let Some(seen) = candidate.found.group.and_then(|group| seen.get(&group))
                && *seen < members as usize
            {
                return Err(AcceptError::Unseen {
                    address: candidate.local.to_string(),
                    seen: *seen,
                    members,
                });
            }
        }
        Ok(())
    }

    /// Returns whether the fix concerns a socket: it is in a group, and what the selector reads exists in its packets.
    fn is_for(&self, candidate: &Candidate) -> bool {
        let by_payload = matches!(self.settings.selection, Selection::Place(Chooser::Key { .. }))
            || self.settings.control.is_some();
        candidate.found.group.is_some() && (candidate.transport == Transport::Udp || !by_payload)
    }

    /// Takes sockets into their groups, and attaches selectors to groups that are new.
    fn adopt(&mut self, candidates: Vec<Candidate>) -> Result<(), AcceptError> {
        let mut by_group: BTreeMap<u64, Vec<Candidate>> = BTreeMap::new();
        for candidate in candidates {
            match candidate.found.group.filter(|_| self.is_for(&candidate)) {
                Some(key) => by_group.entry(key).or_default().push(candidate),
                None => continue,
            }
        }
        for (key, candidates) in by_group {
            let position = self.groups.iter().position(|group| group.key == key);
            match position {
                Some(position) => self.join(position, candidates)?,
                None => self.create(key, candidates)?,
            }
        }
        Ok(())
    }

    fn join(&mut self, position: usize, candidates: Vec<Candidate>) -> Result<(), AcceptError> {
        for candidate in candidates {
            // A listener that was closed in the meantime is left out.
            let Some(listener) = self.enter(&candidate)? else { continue };
            self.groups[position].listeners.push(listener);
            if self.groups[position].listeners.len() > MEMBERS {
                return Err(AcceptError::TooMany(format!("{MEMBERS} listeners of one group")));
            }
        }
        self.tell()?;
        self.groups[position].update();
        Ok(())
    }

    fn create(&mut self, key: u64, candidates: Vec<Candidate>) -> Result<(), AcceptError> {
        let first = &candidates[0];
        if let Some(program) = first.found.program.as_ref().filter(|_| !self.settings.dry_run) {
            return Err(has_selector(first, program));
        }
        let selector = match self.settings.dry_run {
            true => None,
            false => Some(self.fix.selector(self.settings.selection, self.settings.control)?),
        };
        let (transport, local) = (first.transport, first.local);
        self.groups.push(Group { key, transport, local, selector, listeners: Vec::new() });
        // The guard knows the group before the group has a selector.
        self.join(self.groups.len() - 1, candidates)?;
        let group = self.groups.last().expect("the group was added above");
        let socket = duplicate(&group.handles())?;
        if let (Some(selector), Some(socket)) = (&group.selector, socket) {
            selector.attach(socket.as_fd())?;
        }
        Ok(())
    }

    /// Gives an entry of the maps to a socket; `None` if the socket was closed in the meantime.
    fn enter(&mut self, candidate: &Candidate) -> Result<Option<Listener>, AcceptError> {
        if self.free.is_empty() {
            return Err(AcceptError::TooMany(format!("{LISTENERS} listeners")));
        }
        let entry = self.free.remove(0);
        let deadline = Instant::now() + RELEASE_TIME;
        loop {
            let Some(socket) = duplicate(&candidate.handles)? else {
                self.free.push(entry);
                return Ok(None);
            };
            let is_choice = !self.settings.dry_run;
            let entered = self.fix.enter(entry, socket.as_fd(), &candidate.found, is_choice);
            drop(socket);
            match entered {
                Err(BpfError::Call { source, .. }) if source.raw_os_error() == Some(EBUSY) => {
                    if Instant::now() > deadline {
                        return Err(AcceptError::InUse(candidate.describe()));
                    }
                    thread::sleep(Duration::from_millis(10));
                }
                result => break result?,
            }
        }
        let process = discover::worker(&candidate.handles);
        Ok(Some(Listener {
            cookie: candidate.cookie,
            entry,
            process,
            command: processes::command(process),
            handles: candidate.handles.clone(),
            queue: candidate.queue,
        }))
    }

    /// Tells the guard which groups have selectors.
    fn tell(&mut self) -> Result<(), AcceptError> {
        let groups: Vec<Vec<Handle>> = self.groups.iter().map(Group::handles).collect();
        match self.guard.as_mut().map(|guard| guard.tell(&groups)) {
            // The guard was killed. The heartbeat still protects the server.
            Some(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
                let message = "the guard process was killed; after SIGKILL of fourtuple the selector would stay attached, without a \
                               choice of its own";
                self.remarks.insert("guard-ended", message.to_owned());
                Ok(())
            }
            other => other.unwrap_or(Ok(())).map_err(AcceptError::Guard),
        }
    }

    pub(super) fn progress(
        &mut self,
        elapsed: Duration,
        since: Duration,
    ) -> Result<AcceptProgress, AcceptError> {
        let rows = self.rows()?;
        let chosen = rows.iter().map(|row| self.choices(row)).sum();
        let before = std::mem::replace(&mut self.chosen, chosen);
        let mut left = self.left;
        self.groups.iter().for_each(|group| add(&mut left, group));
        Ok(AcceptProgress {
            elapsed,
            groups: self.groups.len(),
            listeners: self.groups.iter().map(|group| group.listeners.len()).sum(),
            chosen,
            chosen_per_s: chosen.saturating_sub(before) as f64 / since.as_secs_f64().max(1e-9),
            open: rows.iter().map(|row| row.open).sum(),
            left: left.0 + left.1,
            longest_queue: rows.iter().filter_map(|row| row.queue).max().unwrap_or(0),
        })
    }

    /// Returns the rows of closed and open listeners.
    fn rows(&self) -> Result<Vec<FixAcceptListener>, AcceptError> {
        let mut rows = self.closed.clone();
        for group in &self.groups {
            for listener in &group.listeners {
                rows.push(group.row(listener, false, &self.fix)?);
            }
        }
        Ok(rows)
    }

    /// Returns the number that shares are computed from.
    fn choices(&self, row: &FixAcceptListener) -> u64 {
        if self.settings.dry_run { row.connections } else { row.choices }
    }

    /// Detaches the selectors, and frees the sockets from the maps at once. The kernel would do so in the background.
    fn detach(&mut self) -> Result<(), AcceptError> {
        for group in &self.groups {
            if !group.detach(&self.fix)? {
                let message =
                    format!("the selector of the group at {} was replaced by another program", group.local);
                self.remarks.insert("selector-replaced", message);
            }
            group.entries().into_iter().for_each(|entry| self.fix.leave(entry));
        }
        if let Some(guard) = self.guard.take() {
            guard.end();
        }
        Ok(())
    }

    pub(super) fn finish(
        mut self,
        elapsed: Duration,
    ) -> Result<(FixAcceptResults, Vec<Remark>), AcceptError> {
        // Queues of this moment.
        if let Ok(members) = self.scope.members() {
            self.release(&members)?;
            self.refresh(&members)?;
        }
        let mut rows = self.rows()?;
        let mut left = self.left;
        self.groups.iter().for_each(|group| add(&mut left, group));
        self.detach()?;
        let mut totals: BTreeMap<(String, String), u64> = BTreeMap::new();
        for row in &rows {
            *totals.entry((row.transport.clone(), row.address.clone())).or_default() += self.choices(row);
        }
        for row in &mut rows {
            let total = totals[&(row.transport.clone(), row.address.clone())];
            row.share = (total > 0).then(|| self.choices(row) as f64 / total as f64);
        }
        rows.sort_by(|a, b| (&a.transport, &a.address, a.cookie).cmp(&(&b.transport, &b.address, b.cookie)));
        let sum = |of: fn(&FixAcceptListener) -> u64| rows.iter().map(of).sum::<u64>();
        let (choices, connections) = (sum(|row| row.choices), sum(|row| row.connections));
        let left_out = rows.len().saturating_sub(ROWS) as u64;
        let results = FixAcceptResults {
            elapsed_ns: elapsed.as_nanos() as u64,
            groups: self.groups.len() as u64,
            choices,
            choices_per_s: choices as f64 / elapsed.as_secs_f64().max(1e-9),
            connections,
            lapsed: left.0,
            strays: left.1,
            joined: self.joined,
            closed: self.closed.len() as u64,
            missed: self.fix.missed()?,
            listeners: rows.into_iter().take(ROWS).collect(),
            listeners_left_out: left_out,
        };
        let remarks = self.remarks.into_iter().map(|(id, message)| Remark::new(id, message)).collect();
        Ok((results, remarks))
    }
}

/// Adds the packets that a group left to the kernel's hash.
fn add(sum: &mut (u64, u64), group: &Group) {
    let (lapsed, strays) = group.selector.as_ref().map_or((0, 0), |selector| selector.left());
    sum.0 += lapsed;
    sum.1 += strays;
}

fn has_selector(candidate: &Candidate, program: &FoundProgram) -> AcceptError {
    let program = match program.id {
        0 => "a classic BPF program".to_owned(),
        id => format!("BPF program {id} {}", program.name),
    };
    AcceptError::HasSelector { socket: candidate.describe(), program }
}
