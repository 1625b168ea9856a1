//! The server's address, and the clients' connections to it.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fourtuple::listen::Family;
use fourtuple_syscalls::{Endpoint, option, socket};

use crate::lab::LabError;

/// Limit on the wait for a response. No response of these loads takes this long.
const PATIENCE: Duration = Duration::from_secs(10);

/// Number of source addresses that clients use in turn over IPv4, so that ports in TIME_WAIT do not run out and the hash of
/// SO_REUSEPORT distributes the connections.
const SOURCES: u32 = 16;

/// A server's address, with the path and the Host header of requests.
#[derive(Clone, Debug)]
pub(crate) struct ServerAddress {
    pub(crate) endpoint: Endpoint,
    /// Path of the URL.
    pub(crate) path: String,
    /// Value of the Host header.
    pub(crate) host: String,
    /// Source addresses; if empty, the kernel chooses.
    sources: Vec<IpAddr>,
}

impl ServerAddress {
    /// Returns the address of a server on this host.
    pub(crate) fn at(endpoint: Endpoint) -> ServerAddress {
        let is_local = endpoint.inet().is_some_and(|address| address.ip() == Ipv4Addr::LOCALHOST);
        let sources = if is_local {
            (0..SOURCES).map(|host| Ipv4Addr::from(u32::from(Ipv4Addr::LOCALHOST) + host).into()).collect()
        } else {
            // Loopback has only one IPv6 address, ::1, and a server on a different host replies only to addresses of this
            // host.
            Vec::new()
        };
        ServerAddress { endpoint, path: "/".to_owned(), host: "fourtuple".to_owned(), sources }
    }

    /// Parses the URL of a server: `http://host:port/path` or `unix:/path/of/socket`.
    pub(crate) fn of_url(url: &str) -> Result<ServerAddress, LabError> {
        let refuse = |why: &str| {
            LabError::setting("server", url, format!("{why}; expected http://HOST:PORT/PATH or unix:/PATH"))
        };
        if let Some(path) = url.strip_prefix("unix:") {
            if path.is_empty() {
                return Err(refuse("there is no path"));
            }
            return Ok(ServerAddress::at(Endpoint::Unix(PathBuf::from(path))));
        }
        let rest = url.strip_prefix("http://").ok_or_else(|| refuse("it is neither http nor unix"))?;
        let (host, path) = rest.find('/').map_or((rest, "/"), |slash| rest.split_at(slash));
        let named =
            if host.ends_with(']') || !host.contains(':') { format!("{host}:80") } else { host.to_owned() };
        let address = named
            .to_socket_addrs()
            .map_err(|error| refuse(&error.to_string()))?
            .next()
            .ok_or_else(|| refuse("the name has no address"))?;
        Ok(ServerAddress {
            path: path.to_owned(),
            host: host.to_owned(),
            ..ServerAddress::at(address.into())
        })
    }

    /// Connects; `turn` chooses the source address.
    pub(crate) fn connect(&self, turn: usize) -> io::Result<TcpStream> {
        let socket = socket::open_stream(&self.endpoint, false)?;
        if let Some(source) = self.sources.get(turn % self.sources.len().max(1)) {
            // Without IP_BIND_ADDRESS_NO_PORT the kernel chooses the port in bind(), among fewer ports; ports then run out
            // sooner, which a remark reports.
            let _ = option::set_bind_address_no_port(socket.as_fd())?;
            socket::bind(socket.as_fd(), SocketAddr::new(*source, 0))?;
        }
        if self.endpoint.inet().is_some() {
            option::set_no_delay(socket.as_fd())?;
        }
        // `TcpStream` also holds a unix socket: on any stream socket its calls are recv(2), send(2) and setsockopt(2).
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(PATIENCE))?;
        // SO_SNDTIMEO bounds connect() too.
        stream.set_write_timeout(Some(PATIENCE))?;
        socket::connect_endpoint(stream.as_fd(), &self.endpoint)?;
        Ok(stream)
    }
}

/// The address at which the experiment's own server listens. A unix socket needs a path: a directory with access for this
/// user only, removed on drop.
#[derive(Debug)]
pub(crate) struct ListenAddress {
    directory: Option<PathBuf>,
    pub(crate) endpoint: Endpoint,
}

/// Port of the server, below every ephemeral range of the clients.
const PORT: u16 = 8080;

impl ListenAddress {
    pub(crate) fn new(family: Family) -> Result<ListenAddress, LabError> {
        let address = match family {
            Family::Tcp4 => Ipv4Addr::LOCALHOST.into(),
            Family::Tcp6 => Ipv6Addr::LOCALHOST.into(),
            Family::Unix => {
                static NEXT: AtomicU32 = AtomicU32::new(0);
                let number = NEXT.fetch_add(1, Ordering::Relaxed);
                let name = format!("fourtuple-lab-{}-{number}", process::id());
                let directory = std::env::temp_dir().join(name);
                fs::DirBuilder::new()
                    .mode(0o700)
                    .create(&directory)
                    .map_err(LabError::call(format!("mkdir {}", directory.display())))?;
                let endpoint = Endpoint::Unix(directory.join("socket"));
                return Ok(ListenAddress { directory: Some(directory), endpoint });
            }
        };
        Ok(ListenAddress { directory: None, endpoint: SocketAddr::new(address, PORT).into() })
    }
}

impl Drop for ListenAddress {
    fn drop(&mut self) {
        if let Some(directory) = &self.directory {
            // A cleaner of temporary files may already have removed the directory.
            let _ = fs::remove_dir_all(directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        let place = ServerAddress::of_url("http://127.0.0.1:81/a/b?c").unwrap();
        assert_eq!(place.endpoint.inet(), Some("127.0.0.1:81".parse().unwrap()));
        assert_eq!((place.path.as_str(), place.host.as_str()), ("/a/b?c", "127.0.0.1:81"));
        assert_eq!(place.sources.len(), 16);
        let place = ServerAddress::of_url("http://[::1]").unwrap();
        assert_eq!(place.endpoint.inet(), Some("[::1]:80".parse().unwrap()));
        assert_eq!((place.path.as_str(), place.sources.len()), ("/", 0));
        let place = ServerAddress::of_url("unix:/run/server").unwrap();
        assert_eq!(place.endpoint, Endpoint::Unix("/run/server".into()));
        for wrong in ["https://127.0.0.1/", "127.0.0.1:80", "unix:", "http://", "http://127.0.0.1:x/"] {
            assert!(ServerAddress::of_url(wrong).unwrap_err().is_usage(), "{wrong}");
        }
    }
}
