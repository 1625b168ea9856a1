//! Sockets that share an address.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Transport};

use crate::spread::classic;
use crate::spread::error::SpreadError;
use crate::spread::selector::Spread;

/// More sockets than this no one can pin to processors.
pub(super) const MOST: usize = 1024;

/// UDP sockets bound to one address, among which a [`Spread`] chooses.
///
/// None of them may be connected: one connected socket in a group ends the balancing of all. Any process of the same user
/// that binds to the address with SO_REUSEPORT becomes a member as well.
#[derive(Debug)]
pub struct Group {
    address: SocketAddr,
    members: Vec<OwnedFd>,
}

impl Group {
    /// Opens and binds `members` non-blocking sockets; port 0 is any. The selector is attached to the first when it is still
    /// alone, so that no packet is spread by anything else, and the kernel never has to exchange it under traffic.
    ///
    /// # Errors
    ///
    /// [`SpreadError`]: EADDRINUSE when others have the address without SO_REUSEPORT, or as another user.
    pub fn open(address: SocketAddr, members: usize, spread: &Spread) -> Result<Group, SpreadError> {
        if !(1..=MOST).contains(&members) {
            return Err(SpreadError::Members { members });
        }
        let failure = |call, source| SpreadError::Call { call, address, source };
        let mut group = Group { address, members: Vec::new() };
        for _ in 0..members {
            let member =
                socket::open(Transport::Udp, address, true).map_err(|source| failure("socket()", source))?;
            let answer = option::set_reuse_port(member.as_fd())
                .map_err(|source| failure("setsockopt(SO_REUSEPORT)", source))?;
            if answer == Answer::Absent {
                return Err(SpreadError::Absent { spread: *spread, what: "SO_REUSEPORT" });
            }
            if group.members.is_empty() {
                group.attach(&member, members, spread)?;
            }
            socket::bind(member.as_fd(), group.address).map_err(|source| failure("bind()", source))?;
            group.address =
                socket::local_address(member.as_fd()).map_err(|source| failure("getsockname()", source))?;
            group.members.push(member);
        }
        Ok(group)
    }

    /// Before bind(): the group comes into being with its selector.
    fn attach(&self, first: &OwnedFd, members: usize, spread: &Spread) -> Result<(), SpreadError> {
        let Some(program) = classic::program(spread, members as u32) else { return Ok(()) };
        match option::attach_group_selector(first.as_fd(), &program) {
            Ok(Answer::Done) => Ok(()),
            Ok(Answer::Absent) => {
                Err(SpreadError::Absent { spread: *spread, what: "SO_ATTACH_REUSEPORT_CBPF" })
            }
            Err(source) => Err(SpreadError::Call {
                call: "setsockopt(SO_ATTACH_REUSEPORT_CBPF)",
                address: self.address,
                source,
            }),
        }
    }

    /// Address and port of all of them.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there is none, which [`Group::open`] rules out.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// A descriptor of member `index`, in the order of binding, which the selector's numbers mean.
    ///
    /// # Errors
    ///
    /// EMFILE; EINVAL beyond the last.
    pub fn member(&self, index: usize) -> io::Result<OwnedFd> {
        match self.members.get(index) {
            Some(member) => member.try_clone(),
            None => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}
