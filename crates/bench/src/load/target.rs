use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;

use fourtuple_syscalls::{Endpoint, socket};

/// The protocol of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// HTTP/1.1
    Http,
    /// HTTP/1.1 over TLS.
    Https,
    /// A byte stream over TCP.
    Tcp,
    /// Datagrams over UDP.
    Udp,
    /// A byte stream, or HTTP/1.1, over a unix socket.
    Unix,
}

impl Scheme {
    /// Returns the text with which a target begins.
    pub(crate) fn prefix(self) -> &'static str {
        match self {
            Scheme::Http => "http://",
            Scheme::Https => "https://",
            Scheme::Tcp => "tcp://",
            Scheme::Udp => "udp://",
            Scheme::Unix => "unix:",
        }
    }
}

/// The server under load, as typed. [`Target::addresses`] returns its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    text: String,
    scheme: Scheme,
    host_or_path: TargetHost,
    /// Path and query for HTTP.
    path: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TargetHost {
    Host { name: String, port: u16 },
    Path(PathBuf),
}

/// The reason why a text is not a target.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a target{why}: expected http://HOST[:PORT][/PATH], https://..., tcp://HOST:PORT, udp://HOST:PORT or \
     unix:/SOCKET[:/PATH]"
)]
pub struct TargetError {
    text: String,
    why: &'static str,
}

impl Target {
    /// Returns the protocol.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Returns path and query for HTTP; `/` by default.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the host as typed; `localhost` for a unix socket.
    pub fn host(&self) -> &str {
        match &self.host_or_path {
            TargetHost::Host { name, .. } => name,
            TargetHost::Path(_) => "localhost",
        }
    }

    /// Returns the value of the Host header. It omits the default port of the scheme (RFC 9110, 7.2).
    pub fn authority(&self) -> String {
        match &self.host_or_path {
            TargetHost::Host { name, port } if self.default_port() == Some(*port) => name.clone(),
            TargetHost::Host { name, port } => format!("{name}:{port}"),
            TargetHost::Path(_) => "localhost".to_owned(),
        }
    }

    fn default_port(&self) -> Option<u16> {
        match self.scheme {
            Scheme::Http => Some(80),
            Scheme::Https => Some(443),
            Scheme::Tcp | Scheme::Udp | Scheme::Unix => None,
        }
    }

    /// Returns the addresses of the name, each once, in the order of the resolver or of `given`: at least one.
    ///
    /// # Errors
    ///
    /// The error of the resolver; `NotFound` if it returns no address.
    pub fn addresses(&self, given: Option<&HostAddresses>) -> io::Result<Vec<Endpoint>> {
        let TargetHost::Host { name, port } = &self.host_or_path else {
            return Ok(self.path_of_socket().into_iter().collect());
        };
        let all: Vec<SocketAddr> = match given {
            Some(given) => given.addresses.iter().map(|ip| SocketAddr::new(*ip, *port)).collect(),
            None => (bare(name), *port).to_socket_addrs()?.collect(),
        };
        let mut found = Vec::new();
        for address in all {
            // The library dials an IPv4-mapped IPv6 address as the IPv4 address.
            let endpoint = Endpoint::from(socket::canonical(address));
            if !found.contains(&endpoint) {
                found.push(endpoint);
            }
        }
        let none = || io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        if found.is_empty() { Err(none()) } else { Ok(found) }
    }

    fn path_of_socket(&self) -> Option<Endpoint> {
        match &self.host_or_path {
            TargetHost::Path(path) => Some(Endpoint::Unix(path.clone())),
            TargetHost::Host { .. } => None,
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
        // Schemes are case-insensitive (RFC 3986, 3.1).
        if let Some((scheme, path)) = text.split_once(':')
            && scheme.eq_ignore_ascii_case("unix")
        {
            let path = path.strip_prefix("//").unwrap_or(path);
            let (path, of_http) = match path.find(":/") {
                Some(at) => (&path[..at], &path[at + 1..]),
                None => (path, "/"),
            };
            if path.is_empty() || path.len() > 107 {
                return Err(refuse(" (a unix socket's path has 1 to 107 bytes)"));
            }
            let host_or_path = TargetHost::Path(PathBuf::from(path));
            return Ok(Target {
                text: text.to_owned(),
                scheme: Scheme::Unix,
                host_or_path,
                path: path_of_http(of_http).ok_or_else(|| refuse(NO_BLANKS))?,
            });
        }
        let without_scheme = " (the scheme is missing: http:// in front of it?)";
        let (scheme, rest) = text.split_once("://").ok_or_else(|| refuse(without_scheme))?;
        let scheme = match scheme.to_ascii_lowercase().as_str() {
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
        let path = path_of_http(path).ok_or_else(|| refuse(NO_BLANKS))?;
        if authority.contains('@') {
            return Err(refuse(" (credentials are not supported: use --header 'Authorization: ...')"));
        }
        // A colon before the closing bracket belongs to an IPv6 address.
        let (name, port) = match authority.rsplit_once(':') {
            Some((name, port)) if !port.contains(']') => {
                let port = port.parse().ok().filter(|port| *port > 0);
                (name, Some(port.ok_or_else(|| refuse(" (a port is 1 to 65535)"))?))
            }
            _ => (authority, None),
        };
        // The name becomes part of an HTTP request.
        if name.contains(|c: char| c.is_control() || c.is_whitespace()) {
            return Err(refuse(" (a host has no blanks or control characters)"));
        }
        if name.is_empty() {
            return Err(refuse(" (the host is missing)"));
        }
        if name.contains([':', '[', ']']) && !is_bracketed(name) {
            return Err(refuse(" (an IPv6 address stands in brackets)"));
        }
        let mut target = Target {
            text: text.to_owned(),
            scheme,
            host_or_path: TargetHost::Host { name: name.to_owned(), port: 0 },
            path,
        };
        let port = port.or(target.default_port()).ok_or_else(|| refuse(" (the port is missing)"))?;
        target.host_or_path = TargetHost::Host { name: name.to_owned(), port };
        Ok(target)
    }
}

const NO_BLANKS: &str = " (a path has no blanks or control characters: write %20)";

/// Returns the path and query of a request, which begins with a slash; `None` if it contains what a request line cannot.
fn path_of_http(text: &str) -> Option<String> {
    if text.contains(|c: char| c.is_control() || c == ' ') {
        return None;
    }
    let path = text.split('#').next().unwrap_or_default();
    Some(if path.starts_with('/') { path.to_owned() } else { format!("/{path}") })
}

fn bare(name: &str) -> &str {
    name.trim_start_matches('[').trim_end_matches(']')
}

/// Maximum number of addresses that can be given for a host.
const MAX_ADDRESSES: usize = 64;

/// The addresses of a host and port, instead of the resolver's, as with curl: `HOST:PORT:ADDR[,ADDR...]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAddresses {
    host: String,
    port: u16,
    addresses: Vec<IpAddr>,
}

impl HostAddresses {
    /// Returns whether host and port are the target's.
    pub fn is_of(&self, target: &Target) -> bool {
        match &target.host_or_path {
            TargetHost::Host { name, port } => {
                bare(&self.host).eq_ignore_ascii_case(bare(name)) && self.port == *port
            }
            TargetHost::Path(_) => false,
        }
    }
}

impl fmt::Display for HostAddresses {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        write!(formatter, "{}:{}:{}", self.host, self.port, addresses.join(","))
    }
}

impl FromStr for HostAddresses {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || {
            format!(
                "{text:?} is not accepted: expected HOST:PORT:ADDR[,ADDR...], such as example.org:443:192.0.2.1"
            )
        };
        // The colons in the brackets of an IPv6 address end no host.
        let after = text.find(']').filter(|_| text.starts_with('[')).unwrap_or(0);
        let end = after + text[after..].find(':').ok_or_else(refuse)?;
        let (host, rest) = (&text[..end], &text[end + 1..]);
        let (port, addresses) = rest.split_once(':').filter(|_| !host.is_empty()).ok_or_else(refuse)?;
        let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(refuse)?;
        let addresses = addresses.split(',').map(|one| bare(one).parse().map_err(|_| refuse()));
        let addresses = addresses.take(MAX_ADDRESSES + 1).collect::<Result<Vec<IpAddr>, _>>()?;
        if addresses.len() > MAX_ADDRESSES {
            return Err(format!("{host}: expected at most {MAX_ADDRESSES} addresses"));
        }
        Ok(HostAddresses { host: host.to_owned(), port, addresses })
    }
}

/// Returns whether the name is an IPv6 address in brackets, with an optional zone: `[::1]`, `[fe80::1%eth0]`.
fn is_bracketed(name: &str) -> bool {
    let inner = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    inner.is_some_and(|inner| inner.split('%').next().unwrap_or_default().parse::<Ipv6Addr>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read() {
        for (text, authority, path, host_or_path) in [
            ("HTTP://127.0.0.1/A", "127.0.0.1", "/A", "127.0.0.1:80"),
            ("Unix:/run/App.sock", "localhost", "/", "/run/App.sock"),
            ("http://127.0.0.1", "127.0.0.1", "/", "127.0.0.1:80"),
            ("http://127.0.0.1:8080/a?b=c#d", "127.0.0.1:8080", "/a?b=c", "127.0.0.1:8080"),
            ("http://[::1]:8080?q", "[::1]:8080", "/?q", "[::1]:8080"),
            ("https://[::1]", "[::1]", "/", "[::1]:443"),
            ("tcp://127.0.0.1:7", "127.0.0.1:7", "/", "127.0.0.1:7"),
            ("udp://127.0.0.1:53/", "127.0.0.1:53", "/", "127.0.0.1:53"),
            ("unix:/run/app.sock", "localhost", "/", "/run/app.sock"),
            ("unix:/run/app.sock:/a/b?c=d:/e#f", "localhost", "/a/b?c=d:/e", "/run/app.sock"),
            ("unix:app.sock:/", "localhost", "/", "app.sock"),
        ] {
            let target: Target = text.parse().unwrap();
            assert_eq!((target.authority().as_str(), target.path()), (authority, path), "{text}");
            let addresses: Vec<_> = target.addresses(None).unwrap().iter().map(ToString::to_string).collect();
            assert_eq!(addresses, [host_or_path], "{text}");
        }
    }

    #[test]
    fn invalid_targets_are_refused() {
        for (why, texts) in [
            ("no scheme", &["", "127.0.0.1:80"][..]),
            ("an unknown scheme", &["ftp://x"]),
            ("no host", &["http://", "http://:80", "unix:"]),
            ("no port", &["tcp://127.0.0.1"]),
            ("a port out of range", &["http://a:0", "http://a:99999"]),
            (
                "IPv6 without both brackets",
                &["http://::1:80", "http://[::1/", "http://[::1:80/", "http://::1]/"],
            ),
            ("brackets without IPv6", &["http://[x]:80", "http://a[::1]:80"]),
            ("a path over UDP", &["udp://a:1/x"]),
            ("white space", &["http://a/b c", "http://a\r\nX: y", "unix:/a:/b c", "tcp://a b:1"]),
        ] {
            for text in texts {
                assert!(text.parse::<Target>().is_err(), "{why}: {text:?}");
            }
        }
        for text in ["http://user:secret@host/", "http://user@host:80/"] {
            let error = text.parse::<Target>().unwrap_err().to_string();
            assert!(error.contains("credentials are not supported"), "{error}");
        }
    }

    #[test]
    fn given_addresses_replace_the_resolver() {
        let target: Target = "http://does.not.exist:81/".parse().unwrap();
        let given: HostAddresses = "Does.Not.Exist:81:[::1],127.0.0.9,::ffff:127.0.0.9".parse().unwrap();
        assert!(given.is_of(&target));
        let found = target.addresses(Some(&given)).unwrap();
        assert_eq!(found, [([0, 0, 0, 0, 0, 0, 0, 1], 81).into(), ([127, 0, 0, 9], 81).into()]);
        assert_eq!(given.to_string().parse::<HostAddresses>().unwrap(), given);
        assert!(!given.is_of(&"http://other:81/".parse().unwrap()), "another host");
        assert!(!given.is_of(&"http://does.not.exist/".parse().unwrap()), "another port");
        let of_v6: HostAddresses = "[::1]:80:127.0.0.1".parse().unwrap();
        assert!(of_v6.is_of(&"http://[::1]/".parse().unwrap()));
        let many = "127.0.0.1,".repeat(64);
        assert!(format!("host:80:{many}127.0.0.1").parse::<HostAddresses>().is_err(), "65 addresses");
        for text in [
            "",
            "host",
            ":80:127.0.0.1",
            "host:",
            "host:80",
            "host:80:",
            "host:80:name",
            "host:127.0.0.1",
            "host:0:127.0.0.1",
            "host:65536:127.0.0.1",
            "host:80:127.0.0.1,",
            "[::1:80:127.0.0.1",
        ] {
            assert!(text.parse::<HostAddresses>().is_err(), "{text:?}");
        }
    }
}
