//! The offer of the running process: its sockets, and the check that the settings of a new process fit them.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use fourtuple::spread::UdpGroup;

use crate::error::ForwardError;
use crate::handover::connection::{Message, PeerConnection};
use crate::handover::error::HandoverError;
use crate::plane::kind::PlaneKind;
use crate::settings::Forward;

/// The open sockets of the running process.
pub(super) struct Offer {
    pub(super) process: u32,
    /// The kind of its planes by name. A newer version may have a kind that this version does not know.
    plane: String,
    takeover_socket: OwnedFd,
    links: Vec<OfferedLink>,
}

/// One link of the offer.
struct OfferedLink {
    /// The requested address, perhaps with port 0.
    listen: SocketAddr,
    at: SocketAddr,
    spread: String,
    seats: usize,
    members: Vec<OwnedFd>,
    /// Whether the link has an in-band BFD session.
    is_in_band: bool,
    /// The socket for in-band control packets.
    control: Option<OwnedFd>,
    /// The BPF link of the program at a device.
    link: Option<OwnedFd>,
}

impl Offer {
    pub(super) fn receive(connection: &PeerConnection) -> Result<Offer, HandoverError> {
        let mut received = connection.wait()?;
        if received.kind() != "offer" {
            return Err(received.unexpected("offer"));
        }
        let Some(takeover_socket) = received.descriptors.pop() else {
            return Err(received.unexpected("the socket of the path"));
        };
        let (process, plane, number): (u32, String, usize) =
            (received.value("process")?, received.value("plane")?, received.value("links")?);
        let mut links: Vec<OfferedLink> = Vec::new();
        loop {
            let mut received = connection.wait()?;
            let is_whole = number == links.len() && links.iter().all(OfferedLink::is_whole);
            match (received.kind(), links.last_mut()) {
                ("link", _) => links.push(OfferedLink::of(received)?),
                ("seats", Some(link)) => link.members.append(&mut received.descriptors),
                ("that is all", _) if is_whole => {
                    return Ok(Offer { process, plane, takeover_socket, links });
                }
                _ => return Err(received.unexpected("all links with their sockets")),
            }
        }
    }

    /// Checks that the settings fit the offer, and returns the number of sockets at each address.
    pub(super) fn fits(&self, wanted: &Forward) -> Result<usize, HandoverError> {
        let differs = |why: String| HandoverError::Differs { why };
        let (theirs, ours) = (self.links.len(), wanted.links.len());
        if theirs != ours {
            return Err(differs(format!("it has {theirs} links, and there are to be {ours}")));
        }
        for (link, place) in wanted.links.iter().zip(self.places(wanted)) {
            let Some(offered) = place.map(|place| &self.links[place]) else {
                let at: Vec<_> = self.links.iter().map(|offered| offered.at.to_string()).collect();
                let (listen, at) = (link.listen, at.join(", "));
                return Err(differs(format!("it does not listen at {listen} but at {at}")));
            };
            let OfferedLink { at, spread, .. } = offered;
            let wanted = link.spread_over(offered.seats).to_string();
            if *spread != wanted {
                return Err(differs(format!(
                    "packets to {at} are spread by {spread}, which cannot become {wanted}"
                )));
            }
            // A filter for control packets exists as long as the group, and a session must read the packets that it separates.
            if offered.is_in_band != link.is_in_band() {
                let (a, why) = match offered.is_in_band {
                    true => ("a", "which would have to go on"),
                    false => ("no", "which cannot begin with sockets that are open"),
                };
                return Err(differs(format!("it has {a} BFD session among the data to {at}, {why}")));
            }
        }
        let seats = self.links.iter().map(|link| link.seats).min().unwrap_or_default();
        if wanted.planes > seats {
            let planes = wanted.planes;
            return Err(differs(format!("sockets at each address: {seats}, fewer than the {planes} planes")));
        }
        // Packets that UDP_GRO has coalesced stay coalesced in the receive queue. Planes without UDP_GRO could not split them and have no
        // buffers for them. The same is assumed for planes of an unknown kind.
        let is_split = self.plane.parse().is_ok_and(|kind: PlaneKind| !kind.offloads());
        if !is_split && !wanted.kind.offloads() {
            return Err(differs(format!(
                "its planes are {}, and packets that were put together for them may wait: planes that are {} cannot take them",
                self.plane, wanted.kind
            )));
        }
        Ok(seats)
    }

    /// Returns the offered link of each requested link: the link with its bound address, or else with its requested address.
    fn places(&self, wanted: &Forward) -> Vec<Option<usize>> {
        let mut is_free = vec![true; self.links.len()];
        let by: [fn(&OfferedLink) -> SocketAddr; 2] = [|offered| offered.at, |offered| offered.listen];
        let place = |listen: SocketAddr| {
            let mut found = by.iter().flat_map(|by| {
                self.links.iter().enumerate().filter(|(_, link)| by(link) == listen).map(|(place, _)| place)
            });
            let found = found.find(|place| is_free[*place])?;
            is_free[found] = false;
            Some(found)
        };
        wanted.links.iter().map(|link| link.listen).map(place).collect()
    }

    /// Returns the groups in the order of the requested links, each with its number in the offer, and the listening socket of the takeover path.
    /// Call it only after [`Offer::fits`].
    pub(super) fn groups(self, wanted: &Forward) -> Result<(Vec<(UdpGroup, usize)>, OwnedFd), ForwardError> {
        let places = self.places(wanted);
        let mut links: Vec<Option<OfferedLink>> = self.links.into_iter().map(Some).collect();
        let mut groups = Vec::new();
        for (place, link) in places.into_iter().zip(&wanted.links) {
            let Some((place, offered)) = place.and_then(|place| Some((place, links[place].take()?))) else {
                continue;
            };
            let spread = link.spread_over(offered.seats);
            groups.push((UdpGroup::adopt(spread, offered.members, offered.control, offered.link)?, place));
        }
        Ok((groups, self.takeover_socket))
    }
}

impl OfferedLink {
    fn of(mut received: Message) -> Result<OfferedLink, HandoverError> {
        let (has_control, has_link): (bool, bool) = (received.value("control")?, received.value("link")?);
        if received.descriptors.len() != usize::from(has_control) + usize::from(has_link) {
            return Err(received.unexpected("a link with its descriptors"));
        }
        let mut descriptors = std::mem::take(&mut received.descriptors).into_iter();
        Ok(OfferedLink {
            listen: received.value("listen")?,
            at: received.value("at")?,
            spread: received.value("spread")?,
            seats: received.value("seats")?,
            members: Vec::new(),
            is_in_band: received.value("in-band")?,
            control: if has_control { descriptors.next() } else { None },
            link: descriptors.next(),
        })
    }

    fn is_whole(&self) -> bool {
        self.members.len() == self.seats
    }
}
