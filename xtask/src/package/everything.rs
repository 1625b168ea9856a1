//! Uses each optional feature of the library.

use std::error::Error;
use std::net::SocketAddr;

use fourtuple::dial::Connector;
use fourtuple::listen::{AcceptPolicy, AsyncAcceptor, ListenerGroupBuilder, Workers};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let address: SocketAddr = "127.0.0.1:0".parse()?;
    let group = ListenerGroupBuilder::at(address).workers(Workers::Runtimes).open()?;
    let acceptor = AsyncAcceptor::new(group.join()?)?;
    let listening = group.endpoint().inet().ok_or("a TCP listener has an address and a port")?;
    let stream = Connector::new().connect("127.0.0.1", listening.port()).await?;
    assert_eq!(stream.report().source.ip(), listening.ip());
    drop((stream, acceptor));
    assert!(AcceptPolicy::ALL.contains(&AcceptPolicy::UringOneshot));
    Ok(())
}
