use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;

use fourtuple_syscalls::Endpoint;

/// How to speak to a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// HTTP/1.1
    Http,
    /// HTTP/1.1 over TLS.
    Https,
    /// Bytes over TCP.
    Tcp,
    /// Datagrams.
    Udp,
    /// Bytes, or HTTP/1.1, over a unix socket.
    Unix,
}

/// What is loaded, as typed; [`Target::resolve`] says where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    text: String,
    scheme: Scheme,
    place: Place,
    /// Path and query of HTTP.
    path: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Host { name: String, port: u16 },
    Path(PathBuf),
}

/// Why a text is not a target.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a target{why}: expected http://HOST[:PORT][/PATH], https://..., tcp://HOST:PORT, udp://HOST:PORT or \
     unix:/PATH"
)]
pub struct TargetError {
    text: String,
    why: &'static str,
}

impl Target {
    /// How to speak to it.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Path and query for HTTP; `/` where none was given.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The host as it stands in the target; `localhost` for a unix socket.
    pub fn host(&self) -> &str {
        match &self.place {
            Place::Host { name, .. } => name,
            Place::Path(_) => "localhost",
        }
    }

    /// What a Host header says: the port is left out where it is the scheme's own (RFC 9110, 7.2).
    pub fn authority(&self) -> String {
        match &self.place {
            Place::Host { name, port } if self.default_port() == Some(*port) => name.clone(),
            Place::Host { name, port } => format!("{name}:{port}"),
            Place::Path(_) => "localhost".to_owned(),
        }
    }

    fn default_port(&self) -> Option<u16> {
        match self.scheme {
            Scheme::Http => Some(80),
            Scheme::Https => Some(443),
            Scheme::Tcp | Scheme::Udp | Scheme::Unix => None,
        }
    }

    /// Where it is: the first address that the name resolves to.
    ///
    /// # Errors
    ///
    /// What the resolver says; not found where it gives no address.
    pub fn resolve(&self) -> io::Result<Endpoint> {
        match &self.place {
            Place::Path(path) => Ok(Endpoint::Unix(path.clone())),
            Place::Host { name, port } => {
                let bare = name.trim_start_matches('[').trim_end_matches(']');
                let address: Option<SocketAddr> = (bare, *port).to_socket_addrs()?.next();
                let none = || io::Error::new(io::ErrorKind::NotFound, "the name has no address");
                address.map(Endpoint::Inet).ok_or_else(none)
            }
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(formatter)
    }
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        let refuse = |why| TargetError { text: text.to_owned(), why };
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() || path.len() > 107 {
                return Err(refuse(" (a unix socket's path has 1 to 107 bytes)"));
            }
            let place = Place::Path(PathBuf::from(path));
            return Ok(Target { text: text.to_owned(), scheme: Scheme::Unix, place, path: "/".to_owned() });
        }
        let (scheme, rest) = text.split_once("://").ok_or_else(|| refuse(""))?;
        let scheme = match scheme {
            "http" => Scheme::Http,
            "https" => Scheme::Https,
            "tcp" => Scheme::Tcp,
            "udp" => Scheme::Udp,
            _ => return Err(refuse("")),
        };
        let at = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(at);
        let is_http = matches!(scheme, Scheme::Http | Scheme::Https);
        if !is_http && !matches!(path, "" | "/") {
            return Err(refuse(" (only HTTP has paths)"));
        }
        if path.bytes().any(|byte| byte <= b' ' || byte == 0x7f) {
            return Err(refuse(" (a path has no blanks: write %20)"));
        }
        let mut path = path.split('#').next().unwrap_or_default().to_owned();
        if !path.starts_with('/') {
            path.insert(0, '/');
        }
        // What a colon before the last bracket separates is a group of an IPv6 address.
        let (name, port) = match authority.rsplit_once(':') {
            Some((name, port)) if !port.contains(']') => {
                let port = port.parse().ok().filter(|port| *port > 0);
                (name, Some(port.ok_or_else(|| refuse(" (a port is 1 to 65535)"))?))
            }
            _ => (authority, None),
        };
        if name.is_empty() || name.contains(['@', ' ']) || (name.contains(':') && !name.starts_with('[')) {
            return Err(refuse(" (an IPv6 address stands in brackets)"));
        }
        let mut target = Target {
            text: text.to_owned(),
            scheme,
            place: Place::Host { name: name.to_owned(), port: 0 },
            path,
        };
        let port = port.or(target.default_port()).ok_or_else(|| refuse(" (the port is missing)"))?;
        target.place = Place::Host { name: name.to_owned(), port };
        Ok(target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read() {
        for (text, authority, path, place) in [
            ("http://127.0.0.1", "127.0.0.1", "/", "127.0.0.1:80"),
            ("http://127.0.0.1:8080/a?b=c#d", "127.0.0.1:8080", "/a?b=c", "127.0.0.1:8080"),
            ("http://[::1]:8080?q", "[::1]:8080", "/?q", "[::1]:8080"),
            ("https://[::1]", "[::1]", "/", "[::1]:443"),
            ("tcp://127.0.0.1:7", "127.0.0.1:7", "/", "127.0.0.1:7"),
            ("udp://127.0.0.1:53/", "127.0.0.1:53", "/", "127.0.0.1:53"),
            ("unix:/run/app.sock", "localhost", "/", "/run/app.sock"),
        ] {
            let target: Target = text.parse().unwrap();
            assert_eq!((target.authority().as_str(), target.path()), (authority, path), "{text}");
            assert_eq!(target.resolve().unwrap().to_string(), place, "{text}");
        }
    }

    #[test]
    fn what_is_no_target_is_refused() {
        for text in [
            "",
            "127.0.0.1:80",
            "ftp://x",
            "tcp://127.0.0.1",
            "http://",
            "http://:80",
            "http://a:0",
            "http://a:99999",
            "http://::1:80",
            "udp://a:1/x",
            "unix:",
            "http://a/b c",
        ] {
            assert!(text.parse::<Target>().is_err(), "{text:?}");
        }
    }
}
