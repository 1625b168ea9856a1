use std::net::TcpStream as StdStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::time;

use super::dialer::{DialReport, Dialer};
use super::error::DialError;

pub(super) async fn dial(
    dialer: &Dialer,
    timeout: Option<Duration>,
) -> Result<(TcpStream, DialReport), DialError> {
    let begun = Instant::now();
    let (socket, mut attempt, _) = dialer.start(true)?;
    let stream = dialer.call("epoll_ctl", TcpStream::from_std(StdStream::from(socket)))?;
    let waiting = Instant::now();
    let writable = match timeout {
        Some(timeout) => time::timeout(timeout.saturating_sub(begun.elapsed()), stream.writable())
            .await
            .map_err(|_| DialError::TimedOut { destination: dialer.destination(), after: begun.elapsed() })?,
        None => stream.writable().await,
    };
    dialer.call("epoll_wait", writable)?;
    if let Some(error) = dialer.call("getsockopt SO_ERROR", stream.take_error())? {
        return Err(dialer.connect_error(error, begun.elapsed()));
    }
    attempt.add_handshake(waiting.elapsed());
    let report = attempt.finish(stream.as_fd())?;
    Ok((stream, report))
}
