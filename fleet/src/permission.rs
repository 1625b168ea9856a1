//! The commands (`--allow`) and targets (`--allow-target`) that an agent accepts.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use fourtuple_syscalls::Endpoint;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// A command that an agent can perform.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Permission {
    /// `load`
    Load,
    /// `doctor`
    Doctor,
    /// `lab ports`
    Lab,
    /// `trace connect`
    Trace,
    /// `serve`
    Serve,
    /// `plan`
    Plan,
}

impl Permission {
    /// All commands.
    pub const ALL: [Permission; 6] = [
        Permission::Load,
        Permission::Doctor,
        Permission::Lab,
        Permission::Trace,
        Permission::Serve,
        Permission::Plan,
    ];

    /// Returns the name in `--allow`.
    pub fn name(self) -> &'static str {
        match self {
            Permission::Load => "load",
            Permission::Doctor => "doctor",
            Permission::Lab => "lab",
            Permission::Trace => "trace",
            Permission::Serve => "serve",
            Permission::Plan => "plan",
        }
    }
}

impl FromStr for Permission {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Permission::ALL.into_iter().find(|permission| permission.name() == text);
        found.ok_or_else(|| {
            format!("{text:?} is not accepted: expected load, doctor, lab, trace, serve or plan")
        })
    }
}

/// The reason why an agent refuses a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotPermitted {
    /// The command is not in `--allow`.
    #[error("the agent does not perform {command}: start it with --allow {command}")]
    Command { command: &'static str },
    /// The target is not in `--allow-target`.
    #[error(
        "the target {target} is outside --allow-target ({accepted}): start the agent with --allow-target {target}"
    )]
    Target {
        /// The address of the target, without its port.
        target: IpAddr,
        accepted: String,
    },
    /// The target is a Unix socket.
    #[error("an agent connects to no unix socket: {path} may belong to a service of its host")]
    Unix { path: String },
}

/// The commands and targets that an agent accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permissions {
    commands: BTreeSet<Permission>,
    targets: Vec<IpNet>,
}

impl Permissions {
    /// Creates permissions. Without commands all are accepted; without targets loopback only.
    pub fn new(commands: impl IntoIterator<Item = Permission>, targets: Vec<IpNet>) -> Permissions {
        let mut commands: BTreeSet<Permission> = commands.into_iter().collect();
        if commands.is_empty() {
            commands.extend(Permission::ALL);
        }
        let loopback = || {
            let v4 = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8);
            vec![v4.into(), Ipv6Net::new_assert(Ipv6Addr::LOCALHOST, 128).into()]
        };
        Permissions { commands, targets: if targets.is_empty() { loopback() } else { targets } }
    }

    /// Checks a command.
    ///
    /// # Errors
    ///
    /// [`NotPermitted::Command`]
    pub fn command(&self, command: Permission) -> Result<(), NotPermitted> {
        match self.commands.contains(&command) {
            true => Ok(()),
            false => Err(NotPermitted::Command { command: command.name() }),
        }
    }

    /// Checks the resolved address of a target, or the address of a server. An IPv4 address in IPv6 (`::ffff:10.0.0.1`) counts as the IPv4 address.
    ///
    /// # Errors
    ///
    /// [`NotPermitted::Target`], [`NotPermitted::Unix`]
    pub fn target(&self, endpoint: &Endpoint) -> Result<(), NotPermitted> {
        let address = match endpoint {
            Endpoint::Inet(address) => address.ip().to_canonical(),
            Endpoint::Unix(path) => return Err(NotPermitted::Unix { path: path.display().to_string() }),
        };
        if self.targets.iter().any(|network| network.contains(&address)) {
            return Ok(());
        }
        let accepted = self.targets.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        Err(NotPermitted::Target { target: address, accepted })
    }

    /// Returns the names of the accepted commands, with commas.
    pub fn command_names(&self) -> String {
        self.commands.iter().map(|command| command.name()).collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inet(text: &str) -> Endpoint {
        Endpoint::Inet(text.parse().unwrap())
    }

    #[test]
    fn loopback_alone_is_the_default_target() {
        let permissions = Permissions::new([], Vec::new());
        for accepted in ["127.0.0.1:80", "127.9.9.9:80", "[::1]:80", "[::ffff:127.0.0.1]:80"] {
            assert_eq!(permissions.target(&inet(accepted)), Ok(()), "{accepted}");
        }
        for refused in ["10.0.0.1:80", "0.0.0.0:80", "[::ffff:10.0.0.1]:80", "[fe80::1]:80", "[::]:80"] {
            let error = permissions.target(&inet(refused)).unwrap_err().to_string();
            assert!(error.contains("--allow-target") && error.contains("127.0.0.0/8"), "{error}");
        }
        let docker = Endpoint::Unix("/run/docker.sock".into());
        assert!(permissions.target(&docker).unwrap_err().to_string().contains("/run/docker.sock"));
    }

    #[test]
    fn given_targets_replace_the_default() {
        let permissions = Permissions::new([], vec!["10.1.0.0/16".parse().unwrap()]);
        assert_eq!(permissions.target(&inet("10.1.255.1:80")), Ok(()));
        assert!(permissions.target(&inet("10.2.0.1:80")).is_err());
        assert!(permissions.target(&inet("127.0.0.1:80")).is_err());
    }

    #[test]
    fn commands_are_limited_by_allow() {
        let permissions = Permissions::new(["doctor".parse().unwrap()], Vec::new());
        assert_eq!(permissions.command(Permission::Doctor), Ok(()));
        let error = permissions.command(Permission::Load).unwrap_err().to_string();
        assert!(error.contains("--allow load"), "{error}");
        assert_eq!(permissions.command_names(), "doctor");
        assert_eq!(Permissions::new([], Vec::new()).command_names(), "load,doctor,lab,trace,serve,plan");
        assert!("shell".parse::<Permission>().is_err());
    }
}
