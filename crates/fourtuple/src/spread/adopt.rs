//! Groups that another process has opened: how they go to the one that takes over.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_syscalls::socket;

use crate::spread::error::SpreadError;
use crate::spread::group::{Group, MOST};
use crate::spread::selector::Spread;

impl Group {
    /// A group of sockets that another process has opened as one, given in the order of its members: what they were spread by
    /// they still are, since a selector is the kernel's, and stays as long as one of the sockets is open. `control` and `link`
    /// are what [`Group::control`] and [`Group::link`] gave there. What needs more than that is [`SpreadError::Fixed`], also
    /// with [`Spread::Map`], and [`Group::at_device`] tells nothing.
    ///
    /// # Errors
    ///
    /// [`SpreadError::Members`]; [`SpreadError::NotOne`] when the sockets are not all bound to one address, or where a program
    /// at a device is to be and there is no link.
    pub fn adopt(
        spread: Spread,
        members: Vec<OwnedFd>,
        control: Option<OwnedFd>,
        link: Option<OwnedFd>,
    ) -> Result<Group, SpreadError> {
        if !(1..=MOST).contains(&members.len()) {
            return Err(SpreadError::Members { members: members.len() });
        }
        let mut first: Option<SocketAddr> = None;
        for member in members.iter().chain(&control) {
            // Of what is no socket of IP, this fails.
            let address = socket::local_address(member.as_fd())
                .map_err(|_| SpreadError::NotOne { spread, why: "a member is no UDP socket" })?;
            if *first.get_or_insert(address) != address {
                return Err(SpreadError::NotOne {
                    spread,
                    why: "its members are bound to different addresses",
                });
            }
        }
        let Some(address) = first else { return Err(SpreadError::Members { members: 0 }) };
        if matches!(spread, Spread::XdpSourcePort { .. } | Spread::Cpumap { .. }) && link.is_none() {
            return Err(SpreadError::NotOne {
                spread,
                why: "the link of its program at the device is missing",
            });
        }
        Ok(Group::of(address, spread, members, control, link))
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn what_is_one_group_goes_on_as_one() {
        let group = Group::open("127.0.0.1:0".parse().unwrap(), 3, &Spread::Random).unwrap();
        let (address, members) = (group.address(), (0..3).map(|seat| group.member(seat).unwrap()).collect());
        let adopted = Group::adopt(Spread::Random, members, None, None).unwrap();
        assert!(!adopted.has_control());
        drop(group);
        assert_eq!((adopted.address(), adopted.len()), (address, 3));
        // The selector is still there: one 4-tuple, all members.
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        for _ in 0..200 {
            sender.send_to(b"x", address).unwrap();
        }
        for seat in 0..3 {
            assert!(socket::has_something(adopted.member(seat).unwrap().as_fd()), "{seat}");
        }
    }

    #[test]
    fn what_is_none_is_refused() {
        let socket = || OwnedFd::from(UdpSocket::bind("127.0.0.1:0").unwrap());
        assert!(matches!(
            Group::adopt(Spread::Hash, Vec::new(), None, None),
            Err(SpreadError::Members { members: 0 })
        ));
        let strangers = [(vec![socket(), socket()], None), (vec![socket()], Some(socket()))];
        for (members, control) in strangers {
            let strangers = Group::adopt(Spread::Hash, members, control, None);
            assert!(matches!(strangers, Err(SpreadError::NotOne { .. })));
        }
        let unlinked = Group::adopt("xdp:64".parse().unwrap(), vec![socket()], None, None);
        assert!(matches!(unlinked, Err(SpreadError::NotOne { .. })));
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(matches!(
            Group::adopt(Spread::Hash, vec![file], None, None),
            Err(SpreadError::NotOne { .. })
        ));
    }
}
