//! A runtime without a form of its own: async-io with `Dialer::prepare`.

use std::error::Error;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use async_io::Async;
use fourtuple::dial::{DialError, DialReport, Dialer, Retry};
use socket2::{Domain, Socket, Type};

const EINPROGRESS: i32 = 115;

async fn connect(dialer: &Dialer) -> Result<(Async<TcpStream>, DialReport), Box<dyn Error>> {
    let open = || -> io::Result<Socket> {
        let socket = Socket::new(Domain::for_address(dialer.destination()), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    };
    let mut socket = open()?;
    let mut attempt = dialer.prepare(socket.as_fd())?;
    loop {
        let connected = socket.connect(&dialer.destination().into());
        let stream = Async::new(TcpStream::from(socket))?;
        let failure = match connected {
            Err(error) if error.raw_os_error() == Some(EINPROGRESS) => {
                stream.writable().await?;
                stream.get_ref().take_error()?
            }
            connected => connected.err(),
        };
        let Some(error) = failure else {
            let report = attempt.finish(stream.get_ref().as_fd())?;
            return Ok((stream, report));
        };
        // An error of the handshake too: a source without an answer would otherwise be the first choice of the next dial.
        socket = Socket::from(stream.into_inner()?);
        if attempt.connect_failed(error)? == Retry::FreshSocket {
            socket = open()?;
        }
        attempt.prepare(socket.as_fd())?;
    }
}

#[test]
fn async_io_connects_with_prepare() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialer = Dialer::builder(listener.local_addr().unwrap()).build().unwrap();
    let (stream, report) = async_io::block_on(connect(&dialer)).unwrap();
    let (_accepted, peer) = listener.accept().unwrap();
    assert_eq!((stream.get_ref().local_addr().unwrap(), report.source), (peer, peer));
    drop(listener);
    let refused = async_io::block_on(connect(&dialer)).unwrap_err();
    assert!(matches!(refused.downcast_ref(), Some(DialError::Refused { .. })), "{refused:?}");
}
