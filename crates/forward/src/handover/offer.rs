//! What the one at work has, and whether a new one can go on with it.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use fourtuple::spread::Group;

use super::error::HandoverError;
use super::line::{Line, Said};
use crate::error::ForwardError;
use crate::plane::PlaneKind;
use crate::settings::Forward;

/// Sockets that are open, and who they were opened for.
pub(super) struct Offer {
    pub(super) process: u32,
    /// How its planes move packets, by name: of a newer version it may be one that is not known here.
    plane: String,
    door: OwnedFd,
    links: Vec<Offered>,
}

/// One link of it.
struct Offered {
    /// As it was asked for, perhaps with port 0.
    listen: SocketAddr,
    at: SocketAddr,
    spread: String,
    seats: usize,
    members: Vec<OwnedFd>,
    /// Whether it speaks BFD among the data.
    is_in_band: bool,
    /// Of control packets among the data.
    control: Option<OwnedFd>,
    /// Of the program at a device.
    link: Option<OwnedFd>,
}

impl Offer {
    pub(super) fn hear(line: &Line) -> Result<Offer, HandoverError> {
        let mut said = line.wait()?;
        if said.kind() != "offer" {
            return Err(said.unexpected("offer"));
        }
        let Some(door) = said.descriptors.pop() else {
            return Err(said.unexpected("the socket of the path"));
        };
        let (process, plane, number): (u32, String, usize) =
            (said.value("process")?, said.value("plane")?, said.value("links")?);
        let mut links: Vec<Offered> = Vec::new();
        loop {
            let mut said = line.wait()?;
            let is_whole = number == links.len() && links.iter().all(Offered::is_whole);
            match (said.kind(), links.last_mut()) {
                ("link", _) => links.push(Offered::of(said)?),
                ("seats", Some(link)) => link.members.append(&mut said.descriptors),
                ("that is all", _) if is_whole => {
                    return Ok(Offer { process, plane, door, links });
                }
                _ => return Err(said.unexpected("all links with their sockets")),
            }
        }
    }

    /// How many sockets there are at each address, if they will do.
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
            let Offered { at, spread, .. } = offered;
            let wanted = link.spread_over(offered.seats).to_string();
            if *spread != wanted {
                return Err(differs(format!(
                    "packets to {at} are spread by {spread}, which cannot become {wanted}"
                )));
            }
            // A filter for control packets begins with the group, and what it takes out somebody has to read.
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
            return Err(differs(format!(
                "it has {seats} sockets at each address, too few for {planes} planes"
            )));
        }
        // What the kernel has put together stays together in the queue, and is told apart only as long as the option is set;
        // other planes would have no room for it. So it may be with planes that are not known here.
        let is_apart = self.plane.parse().is_ok_and(|kind: PlaneKind| !kind.offloads());
        if !is_apart && !wanted.kind.offloads() {
            return Err(differs(format!(
                "its planes are {}, and packets that were put together for them may wait: planes that are {} cannot take them",
                self.plane, wanted.kind
            )));
        }
        Ok(seats)
    }

    /// For each link that is wanted, which of these it is: by its real address, else by what was asked for.
    fn places(&self, wanted: &Forward) -> Vec<Option<usize>> {
        let mut is_free = vec![true; self.links.len()];
        let by: [fn(&Offered) -> SocketAddr; 2] = [|offered| offered.at, |offered| offered.listen];
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

    /// The groups in the order of the links that are wanted, each with its number here, and the socket of the path. Only for
    /// one that fits.
    pub(super) fn groups(self, wanted: &Forward) -> Result<(Vec<(Group, usize)>, OwnedFd), ForwardError> {
        let places = self.places(wanted);
        let mut links: Vec<Option<Offered>> = self.links.into_iter().map(Some).collect();
        let mut groups = Vec::new();
        for (place, link) in places.into_iter().zip(&wanted.links) {
            let Some((place, offered)) = place.and_then(|place| Some((place, links[place].take()?))) else {
                continue;
            };
            let spread = link.spread_over(offered.seats);
            groups.push((Group::adopt(spread, offered.members, offered.control, offered.link)?, place));
        }
        Ok((groups, self.door))
    }
}

impl Offered {
    fn of(mut said: Said) -> Result<Offered, HandoverError> {
        let (has_control, has_link): (bool, bool) = (said.value("control")?, said.value("link")?);
        if said.descriptors.len() != usize::from(has_control) + usize::from(has_link) {
            return Err(said.unexpected("a link with its descriptors"));
        }
        let mut descriptors = std::mem::take(&mut said.descriptors).into_iter();
        Ok(Offered {
            listen: said.value("listen")?,
            at: said.value("at")?,
            spread: said.value("spread")?,
            seats: said.value("seats")?,
            members: Vec::new(),
            is_in_band: said.value("in-band")?,
            control: if has_control { descriptors.next() } else { None },
            link: descriptors.next(),
        })
    }

    fn is_whole(&self) -> bool {
        self.members.len() == self.seats
    }
}
