//! A forwarder at work.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use fourtuple::spread::Group;
use fourtuple_syscalls::{option, schedule};

use crate::counters::{Counters, PlaneCounts};
use crate::error::ForwardError;
use crate::loops;
use crate::path::Path;
use crate::route::{Routes, Shared, View};
use crate::settings::{Forward, Link};
use crate::watch::{Sessions, Watch, Watched};
use crate::worker::{DRAIN, Desk, END, Order, Port, Worker};

/// Planes at work. Dropped, they end at once, and what waits in their queues is lost; [`Running::drain`] loses nothing.
#[derive(Debug)]
pub struct Running {
    pub(crate) forward: Forward,
    pub(crate) links: Vec<Open>,
    pub(crate) planes: Vec<Thread>,
    pub(crate) sessions: Sessions,
}

/// A link that is open.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) group: Group,
    routes: Arc<Shared>,
    pub(crate) watch: Option<Watch>,
}

impl Open {
    pub(crate) fn new(group: Group, link: &Link, watch: Option<Watch>) -> Open {
        Open { group, routes: Arc::new(Shared::new(link.routes.clone())), watch }
    }
}

/// A plane: its counters stay when it has left, for whoever joins in its place.
#[derive(Debug)]
pub(crate) struct Thread {
    /// One per link.
    counters: Vec<Arc<Counters>>,
    pub(crate) desk: Arc<Desk>,
    thread: Option<JoinHandle<io::Result<Vec<Port>>>>,
    /// How many members of each group it serves.
    seats: usize,
}

/// What a plane had when it ended.
pub(crate) struct Parted {
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
        let mut groups: Vec<Group> = Vec::new();
        for link in &self.links {
            // Sockets of one user may share an address, and would share what comes there.
            if groups.iter().any(|other| other.address() == link.listen) {
                return Err(ForwardError::Twice { listen: link.listen });
            }
            groups.push(link.open(self.planes)?);
        }
        self.refuse_loops(groups.iter().map(Group::address).collect())?;
        let peers = self.links.iter().zip(&groups).filter_map(|(link, group)| Some((link.bfd?, group)));
        let sessions = Sessions::start(peers)?;
        let open = |(group, link): (Group, &Link)| {
            let watch = Watch::new(&sessions, link.bfd.as_ref(), group.address(), &link.routes);
            Open::new(group, link, watch)
        };
        let links = groups.into_iter().zip(&self.links).map(open).collect();
        let mut running = Running::of(self, links, sessions);
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

    /// `listens` is where the links really listen.
    pub(crate) fn refuse_loops(&self, listens: Vec<SocketAddr>) -> Result<(), ForwardError> {
        let hops: Vec<_> = self.links.iter().map(|link| link.routes.hops().collect()).collect();
        loops::refuse(&listens, &hops)
    }

    pub(crate) fn check(&self) -> Result<(), ForwardError> {
        if self.links.is_empty() || self.planes == 0 {
            return Err(ForwardError::Nothing { links: self.links.len(), planes: self.planes });
        }
        self.kind.try_out()
    }
}

pub(crate) fn failed(call: &'static str) -> impl Fn(io::Error) -> ForwardError {
    move |source| ForwardError::Call { call, source }
}

impl Running {
    /// Without a plane yet.
    pub(crate) fn of(forward: &Forward, links: Vec<Open>, sessions: Sessions) -> Running {
        Running { forward: forward.clone(), links, planes: Vec::new(), sessions }
    }

    /// A socket that listens, as planes of this kind want it, with the way of its packets.
    pub(crate) fn port(&self, link: usize, seat: usize, listener: OwnedFd) -> Result<Port, ForwardError> {
        let (settings, open) = (&self.forward.links[link], &self.links[link]);
        let offloads = self.forward.kind.offloads();
        if offloads {
            // A kernel without it gives each datagram by itself.
            let _ = option::set_udp_gro(listener.as_fd(), true).map_err(failed("setsockopt(UDP_GRO)"))?;
        }
        if settings.needs_destination() {
            option::set_packet_info(listener.as_fd(), true).map_err(failed("setsockopt(IP_PKTINFO)"))?;
        }
        if open.watch.as_ref().is_some_and(Watch::hands_over) {
            option::set_hops_told(listener.as_fd(), true).map_err(failed("setsockopt(IP_RECVTTL)"))?;
        }
        if let Some(bytes) = self.forward.receive_buffer {
            option::set_receive_buffer(listener.as_fd(), bytes).map_err(failed("setsockopt(SO_RCVBUF)"))?;
        }
        let view = View::new(Arc::clone(&open.routes));
        let path = Path::new(view, Arc::default(), open.watch.clone(), settings, offloads, self.forward.work);
        Ok(Port::new(link, seat, listener, path))
    }

    /// Starts a plane with these sockets, of `seats` seats, in the place of one that has left if one is named.
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
        let desk = Arc::new(Desk::new().map_err(failed("eventfd()"))?);
        let worker = Worker::new(self.forward.kind.plane(), Arc::clone(&desk), counters.clone());
        let thread = thread::Builder::new()
            .name(format!("plane-{index}"))
            .spawn(move || {
                if let Some(processor) = pin {
                    schedule::pin_to(processor)?;
                }
                worker.run(ports)
            })
            .map_err(failed("clone()"))?;
        let thread = Thread { counters, desk, thread: Some(thread), seats };
        match self.planes.get_mut(index) {
            Some(left) => *left = thread,
            None => self.planes.push(thread),
        }
        Ok(index)
    }

    /// Where link `link` listens: the real port.
    pub fn address(&self, link: usize) -> Option<SocketAddr> {
        self.links.get(link).map(|open| open.group.address())
    }

    /// What each plane has done for link `link`, so far; also those that have left.
    pub fn counts(&self, link: usize) -> Vec<PlaneCounts> {
        let counters = self.planes.iter().filter_map(|plane| plane.counters.get(link));
        counters.map(|counters| counters.read()).collect()
    }

    /// The BFD sessions as they are: one for each peer, in the order of the links.
    pub fn bfd(&self) -> Vec<Watched> {
        self.sessions.read()
    }

    /// Ends the BFD sessions in order, while packets are forwarded: peers that hear that the link goes down take another way
    /// before it does. It takes until they have answered, or have to have noticed.
    pub fn end_bfd(&mut self) -> Vec<Watched> {
        self.sessions.drain()
    }

    /// Exchanges the routes of link `link`; packets that come after this go by the new ones. A next hop that is where it
    /// listens is refused, and routes by destination need a link that began with such ones.
    ///
    /// # Errors
    ///
    /// [`ForwardError::Loop`], [`ForwardError::Round`]; nothing is changed then.
    pub fn set_routes(&self, link: usize, routes: Routes) -> Result<(), ForwardError> {
        self.set_some_routes(vec![(link, routes)])
    }

    /// The same of all links, in their order; what is wrong with one changes none. Links that change places are no loop on the
    /// way there.
    ///
    /// # Errors
    ///
    /// As of [`Running::set_routes`].
    pub fn set_all_routes(&self, routes: Vec<Routes>) -> Result<(), ForwardError> {
        self.set_some_routes(routes.into_iter().enumerate().collect())
    }

    fn set_some_routes(&self, new: Vec<(usize, Routes)>) -> Result<(), ForwardError> {
        let listens: Vec<_> = self.links.iter().map(|open| open.group.address()).collect();
        let mut hops: Vec<Vec<_>> =
            self.links.iter().map(|open| open.routes.current().hops().collect()).collect();
        for (link, routes) in &new {
            if let Some(hops) = hops.get_mut(*link) {
                *hops = routes.hops().collect();
            }
        }
        loops::refuse(&listens, &hops)?;
        for (link, routes) in new {
            let Some(open) = self.links.get(link) else { continue };
            if let Some(watch) = &open.watch {
                watch.look_at(&routes);
            }
            open.routes.exchange(routes);
        }
        Ok(())
    }

    /// Which planes are at work.
    pub fn at_work(&self) -> Vec<usize> {
        let planes = self.planes.iter().enumerate();
        planes.filter(|(_, plane)| plane.thread.is_some()).map(|(number, _)| number).collect()
    }

    /// Ends plane `plane`. Its sockets, with what waits in them and with its clients, go to the plane that serves the fewest:
    /// no packet is lost, none is steered elsewhere, and it needs no privilege. That plane serves both from then on.
    ///
    /// # Errors
    ///
    /// [`ForwardError::NoPlane`] when it is not at work, or is the last one that is; [`ForwardError::Plane`]
    pub fn leave(&mut self, plane: usize) -> Result<(), ForwardError> {
        let others = self.at_work().into_iter().filter(|other| *other != plane);
        let heir = others.min_by_key(|other| self.planes[*other].seats);
        let (Some(heir), true) = (heir, self.at_work().contains(&plane)) else {
            return Err(ForwardError::NoPlane { plane });
        };
        let ports = self.planes[plane].end(plane, END)?;
        self.planes[heir].seats += std::mem::take(&mut self.planes[plane].seats);
        self.planes[heir].desk.order(Order::Take(ports));
        Ok(())
    }

    /// Starts a plane, which takes sockets over from the one that serves the most: its number. It has the counters of one that
    /// has left, where there is one.
    ///
    /// # Errors
    ///
    /// [`ForwardError::NoSeat`] when every plane has one socket of each link only: a group has as many as there were planes
    /// when it was opened.
    pub fn join(&mut self) -> Result<usize, ForwardError> {
        let at_work = self.at_work();
        let giver = at_work.iter().copied().max_by_key(|plane| self.planes[*plane].seats);
        let Some(giver) = giver.filter(|giver| self.planes[*giver].seats > 1) else {
            return Err(ForwardError::NoSeat { planes: at_work.len() });
        };
        let (sender, receiver) = mpsc::channel();
        self.planes[giver].desk.order(Order::Give(sender));
        let Ok(ports) = receiver.recv() else {
            return Err(ForwardError::Plane { plane: giver, why: "it does not answer".to_owned() });
        };
        self.planes[giver].seats -= 1;
        let place = self.planes.iter().position(|plane| plane.thread.is_none());
        self.start_plane(place, ports, 1)
    }

    /// Whether all planes are still at work that should be. Worth asking now and then: one that has failed says so nowhere
    /// else before the end.
    ///
    /// # Errors
    ///
    /// [`ForwardError::Plane`]
    pub fn check(&mut self) -> Result<(), ForwardError> {
        for (number, plane) in self.planes.iter_mut().enumerate() {
            if plane.thread.as_ref().is_some_and(JoinHandle::is_finished) {
                plane.end(number, END)?;
                return Err(ForwardError::Plane { plane: number, why: "nobody told it to".to_owned() });
            }
        }
        Ok(())
    }

    /// Ends all planes when nothing waits for them any more, and tells what each did, by link and plane. BFD sessions end
    /// before that ([`Running::end_bfd`]).
    ///
    /// # Errors
    ///
    /// What made a plane end early: a failed epoll_wait(2), or no processor to pin it to.
    pub fn drain(mut self) -> Result<Vec<Vec<PlaneCounts>>, ForwardError> {
        self.end_bfd();
        self.end(DRAIN)?;
        Ok((0..self.links.len()).map(|link| self.counts(link)).collect())
    }

    /// Ends all planes at once: what they had can go on elsewhere, or here again.
    pub(crate) fn part(&mut self) -> Result<Vec<Parted>, ForwardError> {
        self.end(END)
    }

    /// Starts planes again that have parted.
    pub(crate) fn go_on(&mut self, parted: Vec<Parted>) -> Result<(), ForwardError> {
        for Parted { plane, seats, ports } in parted {
            self.start_plane(Some(plane), ports, seats)?;
        }
        Ok(())
    }

    fn end(&mut self, how: u8) -> Result<Vec<Parted>, ForwardError> {
        self.planes.iter().for_each(|plane| plane.desk.tell(how));
        let mut parted = Vec::new();
        let mut result = Ok(());
        for (number, plane) in self.planes.iter_mut().enumerate() {
            if plane.thread.is_none() {
                continue;
            }
            match plane.end(number, how) {
                Ok(ports) => parted.push(Parted { plane: number, seats: plane.seats, ports }),
                Err(error) => result = Err(error),
            }
        }
        result.map(|()| parted)
    }
}

impl Thread {
    /// What it had; nothing where it has left already.
    fn end(&mut self, number: usize, how: u8) -> Result<Vec<Port>, ForwardError> {
        let Some(thread) = self.thread.take() else { return Ok(Vec::new()) };
        self.desk.tell(how);
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
        // Who wants to know what became of it drains.
        let _ = self.end(END);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plane_that_ends_by_itself_is_noticed() {
        let forward = Forward::new(Link::new(([127, 0, 0, 1], 1).into(), ([127, 0, 0, 1], 2).into()), 1);
        let broken = || Err(io::Error::from_raw_os_error(9));
        let thread = thread::spawn(broken);
        while !thread.is_finished() {
            thread::yield_now();
        }
        let plane = Thread {
            counters: Vec::new(),
            desk: Arc::new(Desk::new().unwrap()),
            thread: Some(thread),
            seats: 1,
        };
        let mut running =
            Running { forward, links: Vec::new(), planes: vec![plane], sessions: Sessions::default() };
        let error = running.check().unwrap_err();
        assert!(matches!(error, ForwardError::Plane { plane: 0, .. }));
        assert!(error.to_string().contains("Bad file descriptor"), "{error}");
        assert!(running.check().is_ok(), "it is told once");
    }
}
