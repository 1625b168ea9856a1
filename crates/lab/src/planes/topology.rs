//! The namespaces of generator, router and sink, and the devices between them.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::Duration;

use fourtuple_syscalls::{netns, veth};

use crate::planes::settings::NetworkKind;
use crate::{LabError, Namespace};

/// Addresses of two networks that RFC 5737 reserves for documentation; they exist only between the namespaces.
const GENERATOR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const ROUTER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const ROUTER_TO_SINK: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const SINK: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
/// The addresses on which the planes and the sink listen.
const PORT: u16 = 4000;
const SINK_PORT: u16 = 4001;

/// Number of attempts to pass a packet through, and the length of each. Attempts are counted instead of time, since a
/// machine may be suspended for a while.
const TRIES: u32 = 2000;
const TRY: Duration = Duration::from_millis(5);

/// Three namespaces in a row, or one namespace in all three roles. The thread that created them is in the router's
/// namespace.
pub(super) struct Topology {
    generator: OwnedFd,
    router: OwnedFd,
    sink: OwnedFd,
    /// Address on which planes listen.
    pub(super) listen: SocketAddr,
    /// Destination of the packets.
    pub(super) to: SocketAddr,
}

impl Topology {
    /// Sets up the topology around the calling thread's namespace, with devices whose MTU allows packets of `mtu` bytes.
    pub(super) fn new(_router: &Namespace, over: NetworkKind, mtu: u32) -> Result<Topology, LabError> {
        let here = || netns::current().map_err(LabError::Namespace);
        let localhost = Ipv4Addr::LOCALHOST;
        if over == NetworkKind::Loopback {
            return Ok(Topology {
                generator: here()?,
                router: here()?,
                sink: here()?,
                listen: SocketAddr::from((localhost, PORT)),
                to: SocketAddr::from((localhost, SINK_PORT)),
            });
        }
        let router = here()?;
        let mut others = Vec::new();
        for _ in 0..2 {
            netns::enter_new().map_err(LabError::Namespace)?;
            others.push(here()?);
        }
        let [generator, sink] = others.try_into().expect("two were made");
        let topology = Topology {
            generator,
            router,
            sink,
            listen: SocketAddr::from((ROUTER, PORT)),
            to: SocketAddr::from((SINK, SINK_PORT)),
        };
        topology.cable(mtu).map_err(LabError::call("make veth devices"))?;
        for (from, to, address) in
            [(&topology.generator, &topology.router, ROUTER), (&topology.router, &topology.sink, SINK)]
        {
            topology
                .reach(from, to, address)
                .map_err(LabError::call(format!("reach {address} over veth")))?;
        }
        Ok(topology)
    }

    fn cable(&self, mtu: u32) -> io::Result<()> {
        self.within(&self.router, || {
            veth::create("veth-in", "veth", self.generator.as_fd(), mtu)?;
            veth::create("veth-out", "veth", self.sink.as_fd(), mtu)?;
            veth::set_up("veth-in", ROUTER, 24)?;
            veth::set_up("veth-out", ROUTER_TO_SINK, 24)
        })?;
        self.within(&self.generator, || veth::set_up("veth", GENERATOR, 24))?;
        self.within(&self.sink, || veth::set_up("veth", SINK, 24))
    }

    /// Sends until a packet arrives: a kernel worker enables a device some time after its setup (linkwatch_event), and
    /// neighbour discovery takes time. The counted packets then wait for neither.
    fn reach(&self, from: &OwnedFd, to: &OwnedFd, address: Ipv4Addr) -> io::Result<()> {
        let there = self.within(to, || UdpSocket::bind((address, 0)))?;
        let here = self.within(from, || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
        there.set_read_timeout(Some(TRY))?;
        let to = there.local_addr()?;
        // A send that fails now may succeed in the next attempt.
        let mut last = Ok(());
        for _ in 0..TRIES {
            last = here.send_to(b"?", to).and_then(|_| there.recv(&mut [0; 8])).map(drop);
            match &last {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => thread::sleep(TRY),
            }
        }
        last
    }

    /// Opens a socket in the sink's namespace; a socket stays in the namespace in which it was created.
    pub(super) fn at_sink<R>(&self, open: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        self.within(&self.sink, open)
    }

    /// Opens a socket in the generator's namespace.
    pub(super) fn at_generator<R>(&self, open: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        self.within(&self.generator, open)
    }

    fn within<R>(&self, namespace: &OwnedFd, work: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        netns::enter(namespace.as_fd())?;
        let done = work();
        netns::enter(self.router.as_fd())?;
        done
    }
}
