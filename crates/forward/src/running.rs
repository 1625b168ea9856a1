//! A running forwarder.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use fourtuple::spread::UdpGroup;
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::schedule;
use fourtuple_syscalls::sock_diag::{self, Filter};
use fourtuple_syscalls::socket::Transport;

use crate::clients::{ClientLimit, Pool, Share};
use crate::counters::{Counters, PlaneCounts};
use crate::path::Path;
use crate::route::{self, Endpoints, Routes, Shared, Table, View};
use crate::settings::{Forward, ForwardError, Link};
use crate::watch::{SessionReport, SessionView, Sessions};
use crate::worker::{DRAIN, END, Port, Request, RequestQueue, Worker};

/// A running forwarder. A drop ends all planes at once and loses the packets in the receive queues; [`Running::drain`] loses none.
#[derive(Debug)]
pub struct Running {
    pub(crate) forward: Forward,
    pub(crate) links: Vec<Open>,
    pub(crate) planes: Vec<Thread>,
    pub(crate) sessions: Sessions,
    clients: Option<(ClientLimit, Arc<Pool>)>,
    lacks_gro: AtomicBool,
}

/// A link with open sockets.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) group: UdpGroup,
    routes: Arc<Shared>,
    pub(crate) watch: Option<SessionView>,
}

impl Open {
    pub(crate) fn new(group: UdpGroup, link: &Link, watch: Option<SessionView>) -> Open {
        Open { group, routes: Arc::new(Shared::new(link.routes.clone())), watch }
    }
}

/// A plane. Its counters stay after it has left, for the next plane with its number.
#[derive(Debug)]
pub(crate) struct Thread {
    /// One set of counters for each link.
    counters: Vec<Arc<Counters>>,
    pub(crate) requests: Arc<RequestQueue>,
    thread: Option<JoinHandle<io::Result<Vec<Port>>>>,
    /// The number of sockets of each link that the plane serves.
    seats: usize,
}

/// An ended plane with its sockets.
pub(crate) struct EndedPlane {
    plane: usize,
    seats: usize,
    pub(crate) ports: Vec<Port>,
}

impl Forward {
    /// Opens the sockets and starts the planes.
    ///
    /// # Errors
    ///
    /// [`ForwardError`]
    pub fn start(&self) -> Result<Running, ForwardError> {
        self.check()?;
        let mut groups: Vec<UdpGroup> = Vec::new();
        for link in &self.links {
            // SO_REUSEPORT sockets of one user may share an address, and the kernel would distribute its packets over both links.
            if groups.iter().any(|other| other.address() == link.listen) {
                return Err(ForwardError::Twice { listen: link.listen });
            }
            if !self.share {
                refuse(link.listen, 0)?;
            }
            let group = link.open(self.planes)?;
            if !self.share {
                // Finds a process that has bound its sockets in between.
                refuse(group.address(), group.len() + usize::from(group.has_control()))?;
            }
            groups.push(group);
        }
        self.refuse_loops(groups.iter().map(UdpGroup::address).collect())?;
        let peers = self.links.iter().zip(&groups).filter_map(|(link, group)| Some((link.bfd?, group)));
        let sessions = Sessions::start(peers)?;
        let open = |(group, link): (UdpGroup, &Link)| {
            let watch = SessionView::new(&sessions, link.bfd.as_ref(), group.address(), &link.routes);
            Open::new(group, link, watch)
        };
        let links = groups.into_iter().zip(&self.links).map(open).collect();
        let mut running = Running::of(self, links, sessions)?;
        for seat in 0..self.planes {
            let mut ports = Vec::new();
            for link in 0..running.links.len() {
                let listener = running.links[link].group.member(seat).map_err(failed("dup()"))?;
                ports.push(running.port(link, seat, listener)?);
            }
            running.start_plane(None, ports, 1)?;
        }
        Ok(running)
    }

    /// Refuses links that forward to each other in a circle. `listens` are the bound addresses of the links.
    pub(crate) fn refuse_loops(&self, listens: Vec<SocketAddr>) -> Result<(), ForwardError> {
        let hops: Vec<_> = self.links.iter().map(|link| link.routes.hops().collect()).collect();
        route::refuse(&listens, &hops)
    }

    pub(crate) fn check(&self) -> Result<(), ForwardError> {
        if self.links.is_empty() || self.planes == 0 {
            return Err(ForwardError::Nothing { links: self.links.len(), planes: self.planes });
        }
        self.kind.probe()
    }
}

pub(crate) fn failed(call: &'static str) -> impl Fn(io::Error) -> ForwardError {
    move |source| ForwardError::Call { call, source }
}

impl Running {
    /// Returns a forwarder without planes.
    pub(crate) fn of(
        forward: &Forward,
        links: Vec<Open>,
        sessions: Sessions,
    ) -> Result<Running, ForwardError> {
        let sockets = |open: &Open| open.group.len();
        let with_replies = links.iter().zip(&forward.links).filter(|(_, link)| link.replies);
        let clients = match with_replies.map(|(open, _)| sockets(open)).sum() {
            0 => None,
            of_clients => {
                let limit = ClientLimit::new(forward, links.iter().map(sockets).sum())?;
                Some((limit, Arc::new(Pool::new(limit.clients, of_clients))))
            }
        };
        let running = Running {
            forward: forward.clone(),
            links,
            planes: Vec::new(),
            sessions,
            clients,
            lacks_gro: AtomicBool::new(false),
        };
        running.exchange(forward.links.iter().map(|link| link.routes.clone()).collect());
        Ok(running)
    }

    /// Sets the options of a listening socket that planes of this kind need, and returns its port.
    pub(crate) fn port(&self, link: usize, seat: usize, listener: OwnedFd) -> Result<Port, ForwardError> {
        let (settings, open) = (&self.forward.links[link], &self.links[link]);
        let offloads = self.forward.kind.offloads();
        if offloads {
            // A kernel without UDP_GRO delivers each datagram singly.
            let answer =
                option::set_udp_gro(listener.as_fd(), true).map_err(failed("setsockopt(UDP_GRO)"))?;
            self.lacks_gro.fetch_or(answer == Answer::Absent, Ordering::Relaxed);
        }
        if settings.needs_destination() {
            enable_packet_info(listener.as_fd())?;
        }
        if open.watch.as_ref().is_some_and(SessionView::searches_data) {
            option::set_receive_hops(listener.as_fd(), true).map_err(failed("setsockopt(IP_RECVTTL)"))?;
        }
        if let Some(bytes) = self.forward.receive_buffer {
            option::set_receive_buffer(listener.as_fd(), bytes).map_err(failed("setsockopt(SO_RCVBUF)"))?;
        }
        let view = View::new(Arc::clone(&open.routes));
        let share = self.clients.as_ref().filter(|_| settings.replies);
        let share = share.map(|(_, pool)| Share::new(Arc::clone(pool)));
        let watch = open.watch.clone();
        let path = Path::new(view, Arc::default(), watch, settings, share, offloads, self.forward.work);
        Ok(Port::new(link, seat, listener, path))
    }

    /// Returns the most clients of all planes and the resources that bound them; `None` if no link has clients.
    pub fn client_limit(&self) -> Option<ClientLimit> {
        self.clients.as_ref().map(|(limit, _)| *limit)
    }

    /// Returns whether planes requested UDP_GRO from a kernel that lacks it and delivers each packet singly.
    pub fn lacks_gro(&self) -> bool {
        self.lacks_gro.load(Ordering::Relaxed)
    }

    /// Starts a plane with the ports of `seats` seats. `place` is the number of a plane that has left; `None` adds a number.
    pub(crate) fn start_plane(
        &mut self,
        place: Option<usize>,
        ports: Vec<Port>,
        seats: usize,
    ) -> Result<usize, ForwardError> {
        let index = place.unwrap_or(self.planes.len());
        let counters = match self.planes.get(index) {
            Some(left) => left.counters.clone(),
            None => self.links.iter().map(|_| Arc::default()).collect(),
        };
        let pin = if self.forward.pin {
            let processors = schedule::allowed_cpus().map_err(failed("sched_getaffinity()"))?;
            processors.get(index % processors.len().max(1)).copied()
        } else {
            None
        };
        let requests = Arc::new(RequestQueue::new().map_err(failed("eventfd()"))?);
        let worker = Worker::new(self.forward.kind.plane(), Arc::clone(&requests), counters.clone());
        let thread = thread::Builder::new()
            .name(format!("plane-{index}"))
            .spawn(move || {
                if let Some(processor) = pin {
                    schedule::pin_to(processor)?;
                }
                worker.run(ports)
            })
            .map_err(failed("clone()"))?;
        let thread = Thread { counters, requests, thread: Some(thread), seats };
        match self.planes.get_mut(index) {
            Some(left) => *left = thread,
            None => self.planes.push(thread),
        }
        Ok(index)
    }

    /// Returns the bound address of link `link`.
    pub fn address(&self, link: usize) -> Option<SocketAddr> {
        self.links.get(link).map(|open| open.group.address())
    }

    /// Returns the counters of each plane for link `link`, including planes that have left.
    pub fn counts(&self, link: usize) -> Vec<PlaneCounts> {
        let counters = self.planes.iter().filter_map(|plane| plane.counters.get(link));
        counters.map(|counters| counters.read()).collect()
    }

    /// Returns the state of the BFD sessions: one for each peer, in the order of the links.
    pub fn bfd(&self) -> Vec<SessionReport> {
        self.sessions.read()
    }

    /// Ends the BFD sessions with AdminDown while planes still forward, so that peers choose another route before the link goes down.
    /// Returns when each peer has answered or its detection time has passed.
    pub fn end_bfd(&mut self) -> Vec<SessionReport> {
        self.sessions.drain()
    }

    /// Replaces the routes of link `link`. Packets that arrive after this call take the new routes.
    ///
    /// # Errors
    ///
    /// [`ForwardError::Loop`] and [`ForwardError::Round`] when packets would come back to a link; [`ForwardError::Call`] when
    /// the kernel refuses `setsockopt(IP_PKTINFO)`, which routes by destination need. The old routes stay in force then.
    pub fn set_routes(&self, link: usize, routes: Routes) -> Result<(), ForwardError> {
        self.set_some_routes(vec![(link, routes)])
    }

    /// Replaces the routes of all links, in their order. An error in one leaves all links unchanged. Only the new routes together are
    /// checked for circles.
    ///
    /// # Errors
    ///
    /// The same errors as [`Running::set_routes`].
    pub fn set_all_routes(&self, routes: Vec<Routes>) -> Result<(), ForwardError> {
        self.set_some_routes(routes.into_iter().enumerate().collect())
    }

    fn set_some_routes(&self, new: Vec<(usize, Routes)>) -> Result<(), ForwardError> {
        let mut routes: Vec<Routes> = self.links.iter().map(|open| open.routes.current().routes).collect();
        for (link, new) in new {
            if let Some(routes) = routes.get_mut(link) {
                *routes = new;
            }
        }
        route::refuse(&self.listens(), &hops(&routes))?;
        for (open, _) in self.links.iter().zip(&routes).filter(|(_, routes)| routes.are_by_destination()) {
            for member in 0..open.group.len() {
                let listener = open.group.member(member).map_err(failed("dup()"))?;
                enable_packet_info(listener.as_fd())?;
            }
        }
        self.exchange(routes);
        Ok(())
    }

    fn listens(&self) -> Vec<SocketAddr> {
        self.links.iter().map(|open| open.group.address()).collect()
    }

    /// Replaces the table of each link: its routes, and the addresses of all links and next hops.
    fn exchange(&self, routes: Vec<Routes>) {
        let endpoints = Endpoints::new(&self.listens(), &hops(&routes));
        for (open, routes) in self.links.iter().zip(routes) {
            if let Some(watch) = &open.watch {
                watch.look_at(&routes);
            }
            open.routes.exchange(Table { routes, endpoints: endpoints.clone() });
        }
    }

    /// Returns the numbers of the running planes.
    pub fn at_work(&self) -> Vec<usize> {
        let planes = self.planes.iter().enumerate();
        planes.filter(|(_, plane)| plane.thread.is_some()).map(|(number, _)| number).collect()
    }

    /// Ends plane `plane`. Its sockets, with their receive queues and clients, move to the plane that serves the fewest sockets. No packet
    /// is lost or delivered to another socket, and no privilege is needed.
    ///
    /// # Errors
    ///
    /// [`ForwardError::NoPlane`] when the plane does not run or is the last running plane; [`ForwardError::Plane`].
    pub fn leave(&mut self, plane: usize) -> Result<(), ForwardError> {
        let others = self.at_work().into_iter().filter(|other| *other != plane);
        let heir = others.min_by_key(|other| self.planes[*other].seats);
        let (Some(heir), true) = (heir, self.at_work().contains(&plane)) else {
            return Err(ForwardError::NoPlane { plane });
        };
        let ports = self.planes[plane].end(plane, END)?;
        self.planes[heir].seats += std::mem::take(&mut self.planes[plane].seats);
        self.planes[heir].requests.request(Request::Take(ports));
        Ok(())
    }

    /// Starts a plane, which takes sockets from the plane that serves the most, and returns its number. It continues the counters of a
    /// plane that has left, if any.
    ///
    /// # Errors
    ///
    /// [`ForwardError::NoSeat`] when each plane has only one socket of each link: the number of sockets is the number of planes at the
    /// start.
    pub fn join(&mut self) -> Result<usize, ForwardError> {
        let at_work = self.at_work();
        let giver = at_work.iter().copied().max_by_key(|plane| self.planes[*plane].seats);
        let Some(giver) = giver.filter(|giver| self.planes[*giver].seats > 1) else {
            return Err(ForwardError::NoSeat { planes: at_work.len() });
        };
        let (sender, receiver) = mpsc::channel();
        self.planes[giver].requests.request(Request::Give(sender));
        let Ok(ports) = receiver.recv() else {
            return Err(ForwardError::Plane { plane: giver, why: "it does not answer".to_owned() });
        };
        self.planes[giver].seats -= 1;
        let place = self.planes.iter().position(|plane| plane.thread.is_none());
        self.start_plane(place, ports, 1)
    }

    /// Checks that no plane has failed. Call this regularly: before [`Running::drain`], a failure is reported nowhere else.
    ///
    /// # Errors
    ///
    /// [`ForwardError::Plane`]
    pub fn check(&mut self) -> Result<(), ForwardError> {
        for (number, plane) in self.planes.iter_mut().enumerate() {
            if plane.thread.as_ref().is_some_and(JoinHandle::is_finished) {
                plane.end(number, END)?;
                return Err(ForwardError::Plane {
                    plane: number,
                    why: "its thread returned without a command to end".to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Ends the BFD sessions ([`Running::end_bfd`]), then all planes after they have emptied their receive queues. Returns the counters
    /// by link and plane.
    ///
    /// # Errors
    ///
    /// [`ForwardError::Plane`] when a plane ended early: epoll_wait(2) failed, or its CPU is not allowed any more.
    pub fn drain(mut self) -> Result<Vec<Vec<PlaneCounts>>, ForwardError> {
        self.end_bfd();
        self.end(DRAIN)?;
        Ok((0..self.links.len()).map(|link| self.counts(link)).collect())
    }

    /// Ends all planes at once and returns their sockets, which another process or [`Running::resume`] can continue to use.
    pub(crate) fn end_planes(&mut self) -> Result<Vec<EndedPlane>, ForwardError> {
        self.end(END)
    }

    /// Restarts planes that [`Running::end_planes`] has ended.
    pub(crate) fn resume(&mut self, ended: Vec<EndedPlane>) -> Result<(), ForwardError> {
        for EndedPlane { plane, seats, ports } in ended {
            self.start_plane(Some(plane), ports, seats)?;
        }
        Ok(())
    }

    fn end(&mut self, how: u8) -> Result<Vec<EndedPlane>, ForwardError> {
        self.planes.iter().for_each(|plane| plane.requests.command_to(how));
        let mut ended = Vec::new();
        let mut result = Ok(());
        for (number, plane) in self.planes.iter_mut().enumerate() {
            if plane.thread.is_none() {
                continue;
            }
            match plane.end(number, how) {
                Ok(ports) => ended.push(EndedPlane { plane: number, seats: plane.seats, ports }),
                Err(error) => result = Err(error),
            }
        }
        result.map(|()| ended)
    }
}

/// Makes the kernel report the destination address of each packet that the socket receives. The option belongs to the open
/// socket, so that it holds for every duplicate of the descriptor too.
fn enable_packet_info(listener: BorrowedFd<'_>) -> Result<(), ForwardError> {
    option::set_packet_info(listener, true).map_err(failed("setsockopt(IP_PKTINFO)"))
}

/// Returns the next hops of each link.
fn hops(routes: &[Routes]) -> Vec<Vec<SocketAddr>> {
    routes.iter().map(|routes| routes.hops().collect()).collect()
}

impl Thread {
    /// Ends the thread and returns its ports; none if the plane has already left.
    fn end(&mut self, number: usize, how: u8) -> Result<Vec<Port>, ForwardError> {
        let Some(thread) = self.thread.take() else { return Ok(Vec::new()) };
        self.requests.command_to(how);
        let failed = |why: String| ForwardError::Plane { plane: number, why };
        match thread.join() {
            Ok(Ok(ports)) => Ok(ports),
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(_) => Err(failed("it has panicked".to_owned())),
        }
    }
}

impl std::ops::Drop for Running {
    fn drop(&mut self) {
        // The error is ignored: a caller that needs the outcome calls `drain`.
        let _ = self.end(END);
    }
}

/// Refuses an address at which more UDP sockets are bound than the `own` sockets of this process: with SO_REUSEPORT the kernel would
/// distribute packets over all of them without an error.
///
/// If the kernel cannot list UDP sockets (no udp_diag), a bind(2) without SO_REUSEPORT detects other sockets while this process has none.
/// Such a bind(2) also fails if a socket is bound to the wildcard address.
pub(crate) fn refuse(listen: SocketAddr, own: usize) -> Result<(), ForwardError> {
    if listen.port() == 0 {
        return Ok(());
    }
    let nowhere: IpAddr =
        if listen.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let filter = Filter {
        transport: Transport::Udp,
        source: Some(listen.ip()),
        source_port: Some(listen.port()),
        destination: SocketAddr::new(nowhere, 0),
    };
    let mut sockets = 0;
    let listed = sock_diag::each(&filter, |_| sockets += 1);
    let is_taken = match listed {
        Ok(()) => sockets > own,
        Err(_) if own == 0 => {
            UdpSocket::bind(listen).is_err_and(|error| error.kind() == std::io::ErrorKind::AddrInUse)
        }
        Err(_) => false,
    };
    if is_taken { Err(ForwardError::Taken { listen }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_reports_a_failed_plane_once() {
        let forward = Forward::new(Link::new(([127, 0, 0, 1], 1).into(), ([127, 0, 0, 1], 2).into()), 1);
        let broken = || Err(fourtuple_syscalls::Errno::EBADF.into());
        let thread = thread::spawn(broken);
        while !thread.is_finished() {
            thread::yield_now();
        }
        let plane = Thread {
            counters: Vec::new(),
            requests: Arc::new(RequestQueue::new().unwrap()),
            thread: Some(thread),
            seats: 1,
        };
        let mut running = Running::of(&forward, Vec::new(), Sessions::default()).unwrap();
        running.planes.push(plane);
        let error = running.check().unwrap_err();
        assert!(matches!(error, ForwardError::Plane { plane: 0, .. }));
        assert!(error.to_string().contains("Bad file descriptor"), "{error}");
        assert!(running.check().is_ok(), "the error is reported once");
    }
}
