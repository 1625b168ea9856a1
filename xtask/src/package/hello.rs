//! Connects to a listener of its own.

use std::error::Error;
use std::net::TcpListener;

use fourtuple::dial::Dialer;

fn main() -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let dialer = Dialer::builder(listener.local_addr()?).build()?;
    let (stream, report) = dialer.dial()?;
    assert_eq!(stream.local_addr()?, report.source);
    Ok(())
}
