//! The groups of a server while they have selectors: attaches, follows reloads, detaches.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fourtuple_bpf::fix_accept::{FoundProgram, Heartbeat, LISTENERS, MEMBERS, Selection};
use fourtuple_bpf::{BpfError, Chooser, FixAccept};
use fourtuple_record::{FixAcceptListener, FixAcceptResults, Remark};
use fourtuple_syscalls::Errno;
use fourtuple_syscalls::fork::Guard;
use fourtuple_syscalls::pidfd::Pidfd;
use fourtuple_syscalls::sock_diag::Member;
use fourtuple_syscalls::socket::Transport;

use crate::accept::discover::{self, Scope};
use crate::accept::group::{self, Attached, Candidate, Detached, Group, Handle, Listener, duplicate};
use crate::accept::{Accept, AcceptError, AcceptProgress, AcceptTarget, Fixing, has_ended};
use crate::target;

/// Time for which the maps of a fix that has ended may still hold a socket: the kernel frees them in the background.
const RELEASE_TIME: Duration = Duration::from_secs(2);
/// Maximum number of listeners in a record.
const ROWS: usize = 1_000;

pub(super) struct Session<'a> {
    settings: &'a Accept,
    selection: Selection,
    scope: Scope,
    fix: FixAccept,
    /// The process of the target.
    process: Option<Pidfd>,
    guard: Option<Guard>,
    groups: Vec<Group>,
    /// Ids of all selectors of this session.
    programs: BTreeSet<u32>,
    /// Free entries of the maps. The entry that was free for the longest time is used first.
    free: Vec<usize>,
    /// Cookies of sockets that get no choice: without a group, without what the selector reads, or of a refused group.
    excluded: BTreeSet<u64>,
    /// Cookies of sockets whose processes were not found at the last look or since: a socket in flight (SCM_RIGHTS), or of another PID
    /// namespace.
    unseen: BTreeSet<u64>,
    /// Until then the maps of an earlier fix may hold the sockets.
    deadline: Instant,
    closed: Closed,
    /// Packets that ended groups left to the kernel's hash.
    left: (u64, u64),
    joined: u64,
    chosen: u64,
    remarks: BTreeMap<&'static str, String>,
    _heart: Heart,
}

impl<'a> Session<'a> {
    /// Attaches a selector to each group of the server.
    pub(super) fn attach(
        settings: &'a Accept,
        selection: Selection,
        guard: Option<Guard>,
    ) -> Result<Session<'a>, AcceptError> {
        let process = settings.target.open_process()?;
        let scope = Scope::open(&settings.target)?;
        let members = scope.members().map_err(AcceptError::List)?;
        let fix = FixAccept::attach()?;
        let heart = Heart::start(fix.heartbeat()).map_err(AcceptError::Thread)?;
        let mut session = Session {
            settings,
            selection,
            scope,
            fix,
            process,
            guard,
            groups: Vec::new(),
            programs: BTreeSet::new(),
            free: (0..LISTENERS).collect(),
            excluded: BTreeSet::new(),
            unseen: BTreeSet::new(),
            deadline: Instant::now() + RELEASE_TIME,
            closed: Closed::default(),
            left: (0, 0),
            joined: 0,
            chosen: 0,
            remarks: BTreeMap::new(),
            _heart: heart,
        };
        let candidates = session.candidates(&members).into_iter().collect::<Result<Vec<_>, _>>()?;
        session.check(&candidates, &members)?;
        if let Err(error) = session.adopt(candidates) {
            session.detach()?;
            return Err(error);
        }
        Ok(session)
    }

    fn listeners(&self) -> impl Iterator<Item = &Listener> {
        self.groups.iter().flat_map(|group| &group.listeners)
    }

    /// Frees the entries of listeners that are closed, and notes the queues of open ones.
    fn release(&mut self, members: &[Member]) -> Result<(), AcceptError> {
        let queues: BTreeMap<u64, u32> = members.iter().map(|member| (member.cookie, member.queue)).collect();
        self.excluded.retain(|cookie| queues.contains_key(cookie));
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
            group.update();
            for listener in closed {
                self.closed.add(group.row(&listener, true, &self.fix)?);
                self.fix.leave(listener.entry);
                self.free.push(listener.entry);
            }
        }
        Ok(())
    }

    /// Removes groups without listeners, except a group whose selector a candidate has: its listeners were all replaced since the
    /// sockets were listed.
    fn forget(&mut self, candidates: &[Candidate]) {
        let is_gone = |group: &mut Group| {
            group.listeners.is_empty()
                && !candidates.iter().any(|candidate| group.is_group_of(&candidate.found))
        };
        for group in self.groups.extract_if(.., is_gone) {
            add(&mut self.left, &group);
        }
    }

    /// Finds the processes of the sockets again if one of them has ended: a reload may leave the sockets to other processes.
    fn refresh(&mut self, members: &[Member]) {
        if !self.listeners().any(|listener| listener.handles.iter().any(Handle::is_stale)) {
            return;
        }
        let inodes: BTreeMap<u64, u32> = members.iter().map(|member| (member.cookie, member.inode)).collect();
        let mut handles = discover::handles(members);
        for listener in self.groups.iter_mut().flat_map(|group| &mut group.listeners) {
            let inode = inodes.get(&listener.cookie);
            if let Some(found) = inode.and_then(|inode| handles.remove(inode)) {
                listener.process = discover::worker(&found);
                listener.command = target::command(listener.process);
                listener.handles = found;
            }
        }
    }

    /// Asks the kernel about the groups of sockets. Sockets that were closed in the meantime are left out.
    fn candidates(&self, members: &[Member]) -> Vec<Result<Candidate, AcceptError>> {
        let mut handles = discover::handles(members);
        let mut candidate = |member: &Member| {
            let handles = handles.remove(&member.inode).unwrap_or_default();
            // The duplicate is closed before the next step, because the server's close() has no effect as long as it is open.
            let Some(found) =
                duplicate(&handles)?.map(|socket| self.fix.learner().learn(socket.as_fd())).transpose()?
            else {
                return Ok(None);
            };
            Ok(Some(Candidate {
                transport: member.transport,
                local: member.local,
                cookie: member.cookie,
                queue: member.queue,
                handles,
                found,
            }))
        };
        members.iter().filter_map(|member| candidate(member).transpose()).collect()
    }

    /// Returns the reason to refuse the server, if any.
    fn check(&self, candidates: &[Candidate], members: &[Member]) -> Result<(), AcceptError> {
        let Some(first) = candidates.first() else {
            let mptcp = members.iter().find(|member| member.mptcp);
            return Err(mptcp.map_or_else(
                || self.settings.target.nothing(),
                |member| AcceptError::Mptcp(discover::describe(member)),
            ));
        };
        let Some(grouped) = candidates.iter().find(|candidate| candidate.found.group.is_some()) else {
            let command = target::command(discover::worker(&first.handles));
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
            self.check_group(candidate)?;
            *seen.entry(candidate.found.group.unwrap_or_default()).or_default() += 1;
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

    /// Returns the reason to refuse the group of a socket, if any.
    fn check_group(&self, candidate: &Candidate) -> Result<(), AcceptError> {
        let members = candidate.found.members;
        if members as usize > MEMBERS {
            return Err(AcceptError::TooLarge { socket: candidate.describe(), members });
        }
        let is_foreign = |program: &&FoundProgram| !self.programs.contains(&program.id);
        let program = candidate.found.program.as_ref().filter(|_| !self.settings.dry_run);
        let Some(program) = program.filter(is_foreign) else { return Ok(()) };
        let program = match program.id {
            0 => "a classic BPF program".to_owned(),
            id => format!("BPF program {id} {}", program.name),
        };
        Err(AcceptError::HasSelector { socket: candidate.describe(), program })
    }

    /// Returns whether the fix concerns a socket: it is in a group, and what the selector reads exists in its packets.
    fn is_for(&self, candidate: &Candidate) -> bool {
        let by_payload = matches!(self.selection, Selection::Place(Chooser::Key { .. }))
            || self.settings.control.is_some();
        candidate.found.group.is_some() && (candidate.transport == Transport::Udp || !by_payload)
    }

    /// Takes sockets into their groups, and attaches selectors to groups that are new. An error excludes the sockets that it concerns
    /// only; the first error is returned.
    fn adopt(&mut self, candidates: Vec<Candidate>) -> Result<(), AcceptError> {
        // Joins are first, because they need no program.
        let mut by_group: BTreeMap<(bool, u64), Vec<Candidate>> = BTreeMap::new();
        for candidate in candidates {
            match candidate.found.group.filter(|_| self.is_for(&candidate)) {
                Some(key) => {
                    let is_new = self.groups.iter().all(|group| group.key != key);
                    by_group.entry((is_new, key)).or_default().push(candidate);
                }
                None => _ = self.excluded.insert(candidate.cookie),
            }
        }
        let mut result = Ok(());
        for ((_, key), candidates) in by_group {
            let adopted = match self.groups.iter().position(|group| group.key == key) {
                Some(position) => self.join(position, &candidates),
                None => self.create(key, &candidates),
            };
            if adopted.as_ref().is_err_and(AcceptError::is_lasting) {
                self.excluded.extend(candidates.iter().map(|candidate| candidate.cookie));
            }
            result = result.and(adopted);
        }
        result
    }

    fn join(&mut self, position: usize, candidates: &[Candidate]) -> Result<(), AcceptError> {
        let mut result = Ok(());
        for candidate in candidates {
            match self.enter(candidate) {
                Ok(listener) => self.groups[position].listeners.extend(listener),
                Err(error) => result = result.and(Err(error)),
            }
        }
        let group = &self.groups[position];
        group.update();
        if group.listeners.len() > MEMBERS {
            result = result.and(Err(AcceptError::TooMany(format!("{MEMBERS} listeners of one group"))));
        }
        result
    }

    /// Adds a group and attaches its selector; without both the group is not added.
    fn create(&mut self, key: u64, candidates: &[Candidate]) -> Result<(), AcceptError> {
        candidates.iter().try_for_each(|candidate| self.check_group(candidate))?;
        if candidates.len() > self.free.len() {
            return Err(too_many_listeners());
        }
        let selector = match self.settings.dry_run {
            true => None,
            false => Some(self.fix.selector(self.selection, self.settings.control)?),
        };
        if let Some(selector) = &selector {
            // The guard knows the selector before the group has it.
            self.programs.insert(selector.id()?);
            self.tell()?;
        }
        let Candidate { transport, local, .. } = candidates[0];
        self.groups.push(Group { key, transport, local, selector, listeners: Vec::new() });
        let joined = self.join(self.groups.len() - 1, candidates);
        let attached = joined.and_then(|()| self.groups.last().map_or(Ok(false), Group::attach));
        if let Ok(true) = attached {
            return Ok(());
        }
        let Some(group) = self.groups.pop() else { return attached.map(drop) };
        for entry in group.entries() {
            self.fix.leave(entry);
            self.free.push(entry);
        }
        if let Some(program) = group.selector.and_then(|selector| selector.id().ok()) {
            // No group has it, and the kernel may give its id to another program.
            self.programs.remove(&program);
        }
        attached.map(drop)
    }

    /// Gives an entry of the maps to a socket; `None` if the socket was closed in the meantime.
    fn enter(&mut self, candidate: &Candidate) -> Result<Option<Listener>, AcceptError> {
        if self.free.is_empty() {
            return Err(too_many_listeners());
        }
        let entry = self.free.remove(0);
        let entered = self.put(entry, candidate);
        if !matches!(entered, Ok(true)) {
            self.fix.leave(entry);
            self.free.push(entry);
            return entered.map(|_| None);
        }
        let process = discover::worker(&candidate.handles);
        Ok(Some(Listener {
            cookie: candidate.cookie,
            entry,
            process,
            command: target::command(process),
            handles: candidate.handles.clone(),
            queue: candidate.queue,
        }))
    }

    /// Puts a socket into an entry of the maps; false if the socket was closed in the meantime.
    fn put(&mut self, entry: usize, candidate: &Candidate) -> Result<bool, AcceptError> {
        loop {
            let Some(socket) = duplicate(&candidate.handles)? else { return Ok(false) };
            let is_choice = !self.settings.dry_run;
            let entered = self.fix.enter(entry, socket.as_fd(), &candidate.found, is_choice);
            drop(socket);
            match entered {
                Err(BpfError::Call { source, .. }) if Errno::of(&source) == Some(Errno::EBUSY) => {
                    if Instant::now() > self.deadline {
                        return Err(AcceptError::InUse(candidate.describe()));
                    }
                    thread::sleep(Duration::from_millis(10));
                }
                result => return Ok(result.map(|()| true)?),
            }
        }
    }

    /// Tells the guard which programs are selectors, and where.
    fn tell(&mut self) -> Result<(), AcceptError> {
        let attached =
            Attached { programs: self.programs.clone(), addresses: self.scope.addresses().clone() };
        let Some(Err(error)) = self.guard.as_mut().map(|guard| guard.tell(attached.text().as_bytes())) else {
            return Ok(());
        };
        // The heartbeat still protects the server.
        let what = match error.kind() {
            io::ErrorKind::BrokenPipe => "was killed",
            io::ErrorKind::TimedOut => "does not run (a frozen cgroup?)",
            _ => return Err(AcceptError::Guard(error)),
        };
        let message = format!(
            "the guard process {what}; after SIGKILL of fourtuple the selector would stay attached, without a choice of its own"
        );
        self.remarks.insert("guard-ended", message);
        Ok(())
    }

    /// Returns the rows of closed and open listeners.
    fn rows(&self) -> Result<Vec<FixAcceptListener>, AcceptError> {
        let mut rows: Vec<_> = self.closed.rows.iter().cloned().collect();
        for group in &self.groups {
            for listener in &group.listeners {
                rows.push(group.row(listener, false, &self.fix)?);
            }
        }
        Ok(rows)
    }

    /// Returns the number that shares are computed from.
    fn choices(&self, of: &Choices) -> u64 {
        if self.settings.dry_run { of.connections } else { of.choices }
    }

    /// Detaches the selectors wherever they are, and frees the sockets from the maps at once. The kernel would do so in the
    /// background.
    fn detach(&mut self) -> Result<(), AcceptError> {
        self.groups.iter().for_each(Group::rest);
        let mut sockets: Vec<Vec<Handle>> =
            self.listeners().map(|listener| listener.handles.clone()).collect();
        // Listeners of the last moment. An error: no descriptor or no thread is left.
        if let Ok(members) = self.scope.members() {
            sockets.extend(discover::handles(&members).into_values());
        }
        let Detached { others, is_complete } = group::detach(self.fix.learner(), &sockets, &self.programs)?;
        for group in &self.groups {
            if group.selector.is_some() && others.contains(&group.key) {
                let message =
                    format!("the selector of the group at {} was replaced by another program", group.local);
                self.remarks.insert("selector-replaced", message);
            }
            group.entries().into_iter().for_each(|entry| self.fix.leave(entry));
        }
        if let Some(mut guard) = self.guard.take() {
            if is_complete {
                // The guard may have been killed.
                let _ = guard.tell(Attached::default().text().as_bytes());
            }
            guard.end();
        }
        Ok(())
    }
}

impl Fixing for Session<'_> {
    fn addresses(&self) -> Vec<String> {
        // A server may have a group for TCP and one for UDP at one address.
        let addresses: BTreeSet<_> = self.groups.iter().map(|group| group.local).collect();
        addresses.iter().map(ToString::to_string).collect()
    }

    fn has_ended(&self) -> bool {
        has_ended(self.process.as_ref())
    }

    /// Follows the listeners: some were closed, others joined. `looks`: also for new addresses of the process.
    fn follow(&mut self, looks: bool) -> Result<(), AcceptError> {
        let is_look = looks && matches!(self.settings.target, AcceptTarget::Process(_));
        let in_groups = self.groups.iter().map(|group| (group.transport, group.local)).collect();
        let looked = if is_look { self.scope.look(&in_groups) } else { Ok(()) };
        let members = match looked.and_then(|()| self.scope.members()) {
            Ok(members) => members,
            // No descriptor or no thread is left: the next listing follows soon, and the selectors choose meanwhile.
            Err(error) => {
                let message = format!("the sockets could not be listed at one time: {error}");
                self.remarks.insert("not-followed", message);
                return Ok(());
            }
        };
        self.release(&members)?;
        if looks {
            self.refresh(&members);
            // Says whether the guard lives.
            self.tell()?;
        }
        let known: BTreeSet<u64> = self.listeners().map(|listener| listener.cookie).collect();
        let others: Vec<Member> =
            members.into_iter().filter(|member| !known.contains(&member.cookie)).collect();
        if looks {
            self.unseen.clear();
        }
        let fresh = fresh(&others, &[&self.excluded, &self.unseen]);
        if fresh.is_empty() {
            self.forget(&[]);
            return Ok(());
        }
        // Excluded sockets are examined again when another one joins at their address: a group gets a selector with all its members.
        let others: Vec<Member> =
            others.into_iter().filter(|member| fresh.contains(&(member.transport, member.local))).collect();
        let (mut candidates, mut result) = (Vec::new(), Ok(()));
        self.unseen.extend(others.iter().map(|member| member.cookie));
        for candidate in self.candidates(&others) {
            match candidate {
                Ok(candidate) => {
                    self.unseen.remove(&candidate.cookie);
                    candidates.push(candidate);
                }
                Err(error) => result = Err(error),
            }
        }
        self.forget(&candidates);
        // The kernel's hash chooses for a group that cannot be followed; the other groups keep their selectors.
        if let Err(error) = result.and(self.adopt(candidates)) {
            self.remarks.insert("not-followed", error.to_string());
        }
        self.joined += (self.listeners().count() - known.len()) as u64;
        Ok(())
    }

    fn wait(&mut self, time: Duration) -> Result<(), AcceptError> {
        thread::sleep(time);
        Ok(())
    }

    fn progress(&mut self, elapsed: Duration, since: Duration) -> Result<AcceptProgress, AcceptError> {
        let rows = self.rows()?;
        let forgotten: u64 = self.closed.forgotten.values().map(|sums| self.choices(sums)).sum();
        let chosen = forgotten + rows.iter().map(|row| self.choices(&Choices::of(row))).sum::<u64>();
        let before = std::mem::replace(&mut self.chosen, chosen);
        let mut left = self.left;
        self.groups.iter().for_each(|group| add(&mut left, group));
        Ok(AcceptProgress {
            elapsed,
            groups: self.groups.len(),
            listeners: self.listeners().count(),
            chosen,
            chosen_per_s: chosen.saturating_sub(before) as f64 / since.as_secs_f64().max(1e-9),
            open: rows.iter().filter_map(|row| row.open).sum(),
            left: left.0 + left.1,
            longest_queue: rows.iter().filter_map(|row| row.queue).max().unwrap_or(0),
        })
    }

    fn finish(mut self, elapsed: Duration) -> Result<(FixAcceptResults, Vec<Remark>), AcceptError> {
        // Queues of this moment.
        if let Ok(members) = self.scope.members() {
            self.release(&members)?;
            self.forget(&[]);
            self.refresh(&members);
        }
        let rows = self.rows()?;
        let mut left = self.left;
        self.groups.iter().for_each(|group| add(&mut left, group));
        self.detach()?;
        let (Choices { choices, connections, .. }, listeners, left_out) =
            self.closed.listed(rows, |of| self.choices(of));
        let results = FixAcceptResults {
            elapsed_ns: elapsed.as_nanos() as u64,
            groups: self.groups.len() as u64,
            choices,
            choices_per_s: choices as f64 / elapsed.as_secs_f64().max(1e-9),
            connections,
            moves: 0,
            lapsed: left.0,
            strays: left.1,
            joined: self.joined,
            closed: self.closed.rows.len() as u64 + self.closed.left_out,
            missed: self.fix.missed()?,
            listeners,
            listeners_left_out: left_out,
        };
        let remarks = self.remarks.into_iter().map(|(id, message)| Remark::new(id, message)).collect();
        Ok((results, remarks))
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Choices {
    choices: u64,
    pub(super) connections: u64,
    pub(super) moves: u64,
}

impl Choices {
    fn of(row: &FixAcceptListener) -> Choices {
        Choices { choices: row.choices, connections: row.connections, moves: row.moves }
    }

    fn add(&mut self, other: Choices) {
        self.choices += other.choices;
        self.connections += other.connections;
        self.moves += other.moves;
    }
}

/// The listeners that were closed: rows of the last ones, and sums of the others, since a server may reload for months.
#[derive(Debug, Default)]
pub(super) struct Closed {
    pub(super) rows: VecDeque<FixAcceptListener>,
    /// The choices of listeners without a row, by transport and address.
    forgotten: BTreeMap<(String, String), Choices>,
    /// Number of listeners without a row.
    pub(super) left_out: u64,
}

impl Closed {
    pub(super) fn add(&mut self, row: FixAcceptListener) {
        self.rows.push_back(row);
        if self.rows.len() > ROWS
            && let Some(row) = self.rows.pop_front()
        {
            self.left_out += 1;
            self.forgotten
                .entry((row.transport.clone(), row.address.clone()))
                .or_default()
                .add(Choices::of(&row));
        }
    }
}

impl Closed {
    /// Returns the sums of all listeners, the rows of a record with their shares of what is `counted`, and the number of listeners without a
    /// row.
    pub(super) fn listed(
        &self,
        mut rows: Vec<FixAcceptListener>,
        counted: impl Fn(&Choices) -> u64,
    ) -> (Choices, Vec<FixAcceptListener>, u64) {
        let place = |row: &FixAcceptListener| (row.transport.clone(), row.address.clone());
        let mut totals = self.forgotten.clone();
        for row in &rows {
            totals.entry(place(row)).or_default().add(Choices::of(row));
        }
        for row in &mut rows {
            let total = counted(&totals[&place(row)]);
            row.share = (total > 0).then(|| counted(&Choices::of(row)) as f64 / total as f64);
        }
        rows.sort_by(|a, b| {
            (&a.transport, &a.address, a.cookie, a.process).cmp(&(
                &b.transport,
                &b.address,
                b.cookie,
                b.process,
            ))
        });
        let left_out = rows.len().saturating_sub(ROWS) as u64 + self.left_out;
        rows.truncate(ROWS);
        let mut sums = Choices::default();
        totals.into_values().for_each(|of| sums.add(of));
        (sums, rows, left_out)
    }
}

/// Returns the addresses with a socket that is in none of these sets of cookies.
fn fresh(others: &[Member], known: &[&BTreeSet<u64>]) -> BTreeSet<(Transport, SocketAddr)> {
    let is_known = |member: &&Member| known.iter().any(|cookies| cookies.contains(&member.cookie));
    others.iter().filter(|member| !is_known(member)).map(|member| (member.transport, member.local)).collect()
}

/// Adds the packets that a group left to the kernel's hash.
fn add(sum: &mut (u64, u64), group: &Group) {
    let (lapsed, strays) = group.selector.as_ref().map_or((0, 0), |selector| selector.left());
    sum.0 += lapsed;
    sum.1 += strays;
}

fn too_many_listeners() -> AcceptError {
    AcceptError::TooMany(format!("{LISTENERS} listeners"))
}

/// Ten heartbeats fit into the timeout, so that a busy host does not miss it.
const INTERVAL: Duration = Duration::from_millis(Heartbeat::TIMEOUT_MS / 10);

/// A thread that sends heartbeats until this value is dropped. A thread of its own, because reading /proc may take long.
pub(super) struct Heart {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Heart {
    pub(super) fn start(heartbeat: Heartbeat) -> io::Result<Heart> {
        heartbeat.beat();
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let beat = move || {
            while !flag.load(Ordering::Relaxed) {
                heartbeat.beat();
                thread::park_timeout(INTERVAL);
            }
        };
        let thread = thread::Builder::new().name("heartbeat".to_owned()).spawn(beat)?;
        Ok(Heart { stop, thread: Some(thread) })
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// To find the process of a socket, all of /proc is read.
    #[test]
    fn sockets_without_a_process_are_not_fresh() {
        let member = |cookie, port| Member {
            mptcp: false,
            transport: Transport::Udp,
            local: SocketAddr::from(([127, 0, 0, 1], port)),
            cookie,
            inode: 1,
            queue: 0,
        };
        let others = [member(1, 53), member(2, 53), member(3, 54)];
        let (excluded, unseen) = (BTreeSet::from([1]), BTreeSet::from([2]));
        let ports = |known: &[&BTreeSet<u64>]| -> Vec<u16> {
            fresh(&others, known).iter().map(|(_, local)| local.port()).collect()
        };
        assert_eq!(ports(&[&excluded, &unseen]), [54]);
        assert_eq!(ports(&[&excluded, &BTreeSet::new()]), [53, 54]);
    }

    #[test]
    fn closed_listeners_are_bounded_and_stay_in_the_sums() {
        let mut closed = Closed::default();
        let all = ROWS as u64 * 3;
        for cookie in 0..all {
            closed.add(FixAcceptListener {
                transport: "tcp".to_owned(),
                address: format!("127.0.0.1:{}", cookie % 2),
                cookie,
                process: 7,
                command: "server".to_owned(),
                choices: 2,
                connections: 1,
                moves: 0,
                share: None,
                open: Some(0),
                queue: None,
            });
        }
        assert_eq!((closed.rows.len(), closed.left_out), (ROWS, all - ROWS as u64));
        assert_eq!(closed.rows[0].cookie, all - ROWS as u64, "the last ones have rows");
        let half = ROWS as u64;
        let sums: Vec<Choices> = closed.forgotten.into_values().collect();
        assert_eq!(sums, [Choices { choices: 2 * half, connections: half, moves: 0 }; 2]);
    }
}
