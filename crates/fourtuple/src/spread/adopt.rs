//! Takeover of a group that another process has opened.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_syscalls::socket;

use crate::spread::error::UdpGroupError;
use crate::spread::group::{MAX_MEMBERS, UdpGroup};
use crate::spread::selector::Selector;

impl UdpGroup {
    /// Returns a group of sockets that another process has opened, in the order of its members. The selector stays in force, since the
    /// kernel keeps it while one of the sockets is open. `control` and `link` are the results of [`UdpGroup::control`] and
    /// [`UdpGroup::link`] in the other process. The group cannot be changed ([`UdpGroupError::Fixed`], even with [`Selector::Map`]), and
    /// [`UdpGroup::at_device`] returns `None`.
    ///
    /// # Errors
    ///
    /// [`UdpGroupError::Members`]; [`UdpGroupError::NotOne`] when the sockets are not all bound to one address, or when
    /// the selector has a program at a device and `link` is missing.
    ///
    /// # Examples
    ///
    /// ```
    /// use fourtuple::spread::{Selector, UdpGroup};
    ///
    /// let group = UdpGroup::open("127.0.0.1:0".parse()?, 2, &Selector::Random)?;
    /// let members = vec![group.member(0)?, group.member(1)?]; // sent to the other process (SCM_RIGHTS of unix(7))
    /// let link = group.link().map(|link| link.try_clone_to_owned()).transpose()?;
    ///
    /// let adopted = UdpGroup::adopt(Selector::Random, members, None, link)?; // in the other process
    /// drop(group);
    /// assert_eq!((adopted.len(), adopted.has_control()), (2, false));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn adopt(
        spread: Selector,
        members: Vec<OwnedFd>,
        control: Option<OwnedFd>,
        link: Option<OwnedFd>,
    ) -> Result<UdpGroup, UdpGroupError> {
        if !(1..=MAX_MEMBERS).contains(&members.len()) {
            return Err(UdpGroupError::Members { members: members.len() });
        }
        let mut first: Option<SocketAddr> = None;
        for member in members.iter().chain(&control) {
            // Fails for a descriptor that is not an IP socket.
            let address = socket::local_address(member.as_fd()).map_err(|error| UdpGroupError::NotOne {
                selector: spread,
                why: "a member is no UDP socket",
                error: Some(error),
            })?;
            if *first.get_or_insert(address) != address {
                return Err(UdpGroupError::NotOne {
                    selector: spread,
                    why: "its members are bound to different addresses",
                    error: None,
                });
            }
        }
        let Some(address) = first else { return Err(UdpGroupError::Members { members: 0 }) };
        if spread.device().is_some() && link.is_none() {
            return Err(UdpGroupError::NotOne {
                selector: spread,
                why: "the link of its program at the device is missing",
                error: None,
            });
        }
        Ok(UdpGroup::of(address, spread, members, control, link))
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn an_adopted_group_keeps_its_selector() {
        let group = UdpGroup::open("127.0.0.1:0".parse().unwrap(), 3, &Selector::Random).unwrap();
        let (address, members) = (group.address(), (0..3).map(|seat| group.member(seat).unwrap()).collect());
        let adopted = UdpGroup::adopt(Selector::Random, members, None, None).unwrap();
        assert!(!adopted.has_control());
        drop(group);
        assert_eq!((adopted.address(), adopted.len()), (address, 3));
        // The selector is still in force: packets of one 4-tuple reach all members.
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        for _ in 0..200 {
            sender.send_to(b"x", address).unwrap();
        }
        for seat in 0..3 {
            assert!(socket::has_something(adopted.member(seat).unwrap().as_fd()), "{seat}");
        }
    }

    #[test]
    fn sockets_that_form_no_group_are_refused() {
        let socket = || OwnedFd::from(UdpSocket::bind("127.0.0.1:0").unwrap());
        assert!(matches!(
            UdpGroup::adopt(Selector::Hash, Vec::new(), None, None),
            Err(UdpGroupError::Members { members: 0 })
        ));
        let strangers = [(vec![socket(), socket()], None), (vec![socket()], Some(socket()))];
        for (members, control) in strangers {
            let strangers = UdpGroup::adopt(Selector::Hash, members, control, None);
            assert!(matches!(strangers, Err(UdpGroupError::NotOne { .. })));
        }
        let unlinked = UdpGroup::adopt("xdp:64".parse().unwrap(), vec![socket()], None, None);
        assert!(matches!(unlinked, Err(UdpGroupError::NotOne { .. })));
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(matches!(
            UdpGroup::adopt(Selector::Hash, vec![file], None, None),
            Err(UdpGroupError::NotOne { .. })
        ));
    }
}
