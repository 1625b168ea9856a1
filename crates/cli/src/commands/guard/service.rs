//! What the guard tells the service manager (sd_notify(3)), and the interval in which it must (sd_watchdog_enabled(3)).

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process;
use std::time::Duration;

use fourtuple_record::printable;

/// The service manager; none, if nothing has set NOTIFY_SOCKET.
#[derive(Debug)]
pub(super) struct Service {
    manager: Option<(UnixDatagram, SocketAddr)>,
    watchdog_interval: Option<Duration>,
}

impl Service {
    /// Reads NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID. A successor needs the first two and not WATCHDOG_PID, which names this process.
    pub(super) fn from_env() -> Service {
        let variable = |name: &str| env::var_os(name);
        let manager = variable("NOTIFY_SOCKET").and_then(|name| {
            let socket = UnixDatagram::unbound().ok()?;
            // A manager that does not read must not stop the guard.
            socket.set_nonblocking(true).ok()?;
            Some((socket, address(&name).ok()?))
        });
        let watchdog = watchdog(variable("WATCHDOG_USEC"), variable("WATCHDOG_PID"), process::id());
        Service { manager, watchdog_interval: watchdog.map(|time| time / 2) }
    }

    /// The guard watches, or it continues with its new policy.
    pub(super) fn ready(&self) {
        self.send("READY=1");
    }

    /// The loop runs.
    pub(super) fn alive(&self) {
        self.send("WATCHDOG=1");
    }

    /// The guard starts its successor.
    pub(super) fn reloading(&self) {
        self.send("RELOADING=1");
    }

    /// From now on this process is the guard.
    pub(super) fn main_pid(&self, process: u32) {
        self.send(&format!("MAINPID={process}"));
    }

    /// The guard ends.
    pub(super) fn stopping(&self) {
        self.send("STOPPING=1");
    }

    /// One line for `systemctl status`.
    pub(super) fn status(&self, text: &str) {
        // A line end would begin another variable.
        self.send(&format!("STATUS={}", printable(text)));
    }

    /// Returns the time between two calls of [`Service::alive`]; `None`: the manager expects none.
    pub(super) fn watchdog_interval(&self) -> Option<Duration> {
        self.watchdog_interval
    }

    fn send(&self, text: &str) {
        if let Some((socket, address)) = &self.manager {
            // Without a manager that reads the guard works all the same; the manager acts on what is missing.
            let _ = socket.send_to_addr(text.as_bytes(), address);
        }
    }
}

/// Returns the address of NOTIFY_SOCKET. A name with @ is abstract.
fn address(name: &OsStr) -> io::Result<SocketAddr> {
    match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(name),
    }
}

/// Returns the time limit of the watchdog, if it is for the process `own`.
fn watchdog(microseconds: Option<OsString>, process: Option<OsString>, own: u32) -> Option<Duration> {
    let microseconds: u64 = microseconds?.to_str()?.parse().ok()?;
    let is_for_us =
        process.is_none_or(|process| process.to_str().and_then(|text| text.parse().ok()) == Some(own));
    (is_for_us && microseconds > 0).then(|| Duration::from_micros(microseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(address: SocketAddr) -> Service {
        Service { manager: Some((UnixDatagram::unbound().unwrap(), address)), watchdog_interval: None }
    }

    #[test]
    fn the_manager_gets_one_variable_per_datagram() {
        let temp = env::temp_dir().join(format!("fourtuple-notify-{}", process::id()));
        std::fs::create_dir_all(&temp).unwrap();
        let path = temp.join("notify");
        let abstract_name = format!("@fourtuple-notify-{}", process::id());
        let address_of = |name: &OsStr| address(name).unwrap();
        for name in [path.as_os_str(), OsStr::new(&abstract_name)] {
            let manager = UnixDatagram::bind_addr(&address_of(name)).unwrap();
            let service = service(address_of(name));
            service.reloading();
            service.main_pid(4711);
            service.ready();
            service.alive();
            service.status("2 fixes\nMAINPID=1");
            service.stopping();
            let mut bytes = [0; 256];
            let mut next = || {
                let length = manager.recv(&mut bytes).unwrap();
                String::from_utf8(bytes[..length].to_vec()).unwrap()
            };
            let expected = [
                "RELOADING=1",
                "MAINPID=4711",
                "READY=1",
                "WATCHDOG=1",
                "STATUS=2 fixes MAINPID=1",
                "STOPPING=1",
            ];
            assert_eq!([(); 6].map(|()| next()), expected);
        }
        std::fs::remove_dir_all(&temp).unwrap();
        // Nobody reads.
        service(address_of(path.as_os_str())).ready();
        Service { manager: None, watchdog_interval: None }.ready();
    }

    #[test]
    fn the_watchdog_is_for_one_process() {
        let of = |microseconds: &str, process: Option<&str>| {
            watchdog(Some(microseconds.into()), process.map(OsString::from), 7)
        };
        let minute = Some(Duration::from_secs(60));
        assert_eq!((of("60000000", None), of("60000000", Some("7"))), (minute, minute));
        for (microseconds, process) in
            [("60000000", Some("8")), ("60000000", Some("")), ("0", None), ("1s", None)]
        {
            assert_eq!(of(microseconds, process), None, "{microseconds} {process:?}");
        }
        assert_eq!(watchdog(None, None, 7), None);
    }
}
