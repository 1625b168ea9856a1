use std::net::TcpStream as StdStream;
use std::os::fd::AsFd;
use std::time::Instant;

use tokio::net::TcpStream;
use tokio::time;

use super::dialer::Dialer;
use super::error::DialError;
use super::report::DialReport;

impl Dialer {
    /// Opens a connection on the current tokio runtime.
    ///
    /// # Errors
    ///
    /// As [`Dialer::dial`].
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O (and, with a timeout, time) enabled.
    pub async fn dial_tokio(&self) -> Result<(TcpStream, DialReport), DialError> {
        let begun = Instant::now();
        let (socket, mut attempt, _) = self.start(true)?;
        let stream = self.call("epoll_ctl", TcpStream::from_std(StdStream::from(socket)))?;
        let waiting = Instant::now();
        let writable = match self.timeout {
            Some(timeout) => {
                time::timeout(timeout.saturating_sub(begun.elapsed()), stream.writable()).await.map_err(
                    |_| DialError::TimedOut { destination: self.destination(), after: begun.elapsed() },
                )?
            }
            None => stream.writable().await,
        };
        self.call("epoll_wait", writable)?;
        if let Some(error) = self.call("getsockopt SO_ERROR", stream.take_error())? {
            return Err(self.connect_error(error, begun.elapsed()));
        }
        attempt.add_handshake(waiting.elapsed());
        let report = attempt.finish(stream.as_fd())?;
        Ok((stream, report))
    }
}
