//! A forwarder at work.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::{self, JoinHandle};

use fourtuple::spread::Group;
use fourtuple_syscalls::bell::Bell;
use fourtuple_syscalls::{option, schedule};

use crate::counters::{Counters, PlaneCounts};
use crate::error::ForwardError;
use crate::route::{Routes, Shared, View};
use crate::settings::Forward;
use crate::worker::{DRAIN, END, GO_ON, Path, Port, Worker};

/// Planes at work. Dropped, they end at once, and what waits in their queues is lost; [`Running::drain`] loses nothing.
#[derive(Debug)]
pub struct Running {
    links: Vec<Open>,
    planes: Vec<Thread>,
}

/// A link that is open.
#[derive(Debug)]
struct Open {
    group: Group,
    routes: Arc<Shared>,
}

#[derive(Debug)]
struct Thread {
    /// One per link.
    counters: Vec<Arc<Counters>>,
    told: Arc<AtomicU8>,
    bell: Arc<Bell>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Forward {
    /// Opens the sockets and starts the planes.
    ///
    /// # Errors
    ///
    /// [`ForwardError`]
    pub fn start(&self) -> Result<Running, ForwardError> {
        if self.links.is_empty() || self.planes == 0 {
            return Err(ForwardError::Nothing { links: self.links.len(), planes: self.planes });
        }
        let mut links = Vec::new();
        for link in &self.links {
            let group = Group::open(link.listen, self.planes, &link.spread)?;
            link.check(group.address())?;
            links.push(Open { group, routes: Arc::new(Shared::new(link.routes.clone())) });
        }
        let mut running = Running { links, planes: Vec::new() };
        let processors = if self.pin {
            schedule::allowed_cpus().map_err(failed("sched_getaffinity()"))?
        } else {
            Vec::new()
        };
        for plane in 0..self.planes {
            let pin = processors.get(plane % processors.len().max(1)).copied();
            running.planes.push(self.start_plane(&running.links, plane, pin)?);
        }
        Ok(running)
    }

    fn start_plane(&self, links: &[Open], index: usize, pin: Option<usize>) -> Result<Thread, ForwardError> {
        let plane = self.kind.plane();
        let mut ports = Vec::new();
        let mut counters = Vec::new();
        for (link, open) in self.links.iter().zip(links) {
            let listener = open.group.member(index).map_err(failed("dup()"))?;
            if plane.offloads() {
                // A kernel without it gives each datagram by itself.
                let _ = option::set_udp_gro(listener.as_fd(), true).map_err(failed("setsockopt(UDP_GRO)"))?;
            }
            if link.routes.are_by_destination() {
                option::set_packet_info(listener.as_fd(), true).map_err(failed("setsockopt(IP_PKTINFO)"))?;
            }
            if let Some(bytes) = self.receive_buffer {
                option::set_receive_buffer(listener.as_fd(), bytes)
                    .map_err(failed("setsockopt(SO_RCVBUF)"))?;
            }
            let own = Arc::new(Counters::default());
            let view = View::new(Arc::clone(&open.routes));
            let path = Path::new(view, Arc::clone(&own), link, plane.offloads(), self.work);
            ports.push(Port { listener, path });
            counters.push(own);
        }
        let told = Arc::new(AtomicU8::new(GO_ON));
        let bell = Arc::new(Bell::new().map_err(failed("eventfd()"))?);
        let worker = Worker { ports, plane, told: Arc::clone(&told), bell: Arc::clone(&bell) };
        let thread = thread::Builder::new()
            .name(format!("plane-{index}"))
            .spawn(move || {
                if let Some(processor) = pin {
                    schedule::pin_to(processor)?;
                }
                worker.run()
            })
            .map_err(failed("clone()"))?;
        Ok(Thread { counters, told, bell, thread: Some(thread) })
    }
}

fn failed(call: &'static str) -> impl Fn(io::Error) -> ForwardError {
    move |source| ForwardError::Call { call, source }
}

impl Running {
    /// Where link `link` listens: the real port.
    pub fn address(&self, link: usize) -> Option<SocketAddr> {
        self.links.get(link).map(|open| open.group.address())
    }

    /// What each plane has done for link `link`, so far.
    pub fn counts(&self, link: usize) -> Vec<PlaneCounts> {
        let counters = self.planes.iter().filter_map(|plane| plane.counters.get(link));
        counters.map(|counters| counters.read()).collect()
    }

    /// Exchanges the routes of link `link`; packets that come after this go by the new ones. A next hop that is where it
    /// listens is refused, and routes by destination need a link that began with such ones.
    ///
    /// # Errors
    ///
    /// [`ForwardError::Loop`]
    pub fn set_routes(&self, link: usize, routes: Routes) -> Result<(), ForwardError> {
        let Some(open) = self.links.get(link) else { return Ok(()) };
        let listen = open.group.address();
        if let Some(to) = routes.hops().find(|hop| *hop == listen) {
            return Err(ForwardError::Loop { listen, to });
        }
        open.routes.exchange(routes);
        Ok(())
    }

    /// Ends all planes when nothing waits for them any more, and tells what each did, by link and plane.
    ///
    /// # Errors
    ///
    /// What made a plane end early: a failed epoll_wait(2), or no processor to pin it to.
    pub fn drain(mut self) -> Result<Vec<Vec<PlaneCounts>>, ForwardError> {
        self.end(DRAIN)?;
        Ok((0..self.links.len()).map(|link| self.counts(link)).collect())
    }

    fn end(&mut self, how: u8) -> Result<(), ForwardError> {
        for plane in &self.planes {
            plane.told.store(how, Ordering::Release);
            plane.bell.ring();
        }
        let mut result = Ok(());
        for plane in &mut self.planes {
            let Some(thread) = plane.thread.take() else { continue };
            if let Ok(Err(source)) = thread.join() {
                result = Err(ForwardError::Call { call: "epoll_wait()", source });
            }
        }
        result
    }
}

impl std::ops::Drop for Running {
    fn drop(&mut self) {
        // Who wants to know what became of it drains.
        let _ = self.end(END);
    }
}
