//! A peer of pingora: its option `custom_l4` takes the connection from the connector.

use std::net::Ipv4Addr;
use std::sync::Arc;

use async_trait::async_trait;
use fourtuple::dial::Connector;
use pingora_core::connectors::{L4Connect, TransportConnector};
use pingora_core::protocols::l4::{socket::SocketAddr, stream::Stream};
use pingora_core::upstreams::peer::BasicPeer;
use pingora_core::{Error, ErrorType, OrErr, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

#[derive(Debug)]
struct Dialing(Connector);

#[async_trait]
impl L4Connect for Dialing {
    async fn connect(&self, address: &SocketAddr) -> Result<Stream> {
        let address = address.as_inet().ok_or_else(|| Error::new(ErrorType::ConnectError))?;
        let stream = self.0.connect_to(*address).await.or_err(ErrorType::ConnectError, "fourtuple")?;
        Ok(stream.into_inner().into())
    }
}

#[tokio::test]
async fn a_peer_of_pingora_uses_the_connector() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let mut peer = BasicPeer::new(&listener.local_addr().unwrap().to_string());
    let connector = Connector::new();
    peer.options.custom_l4 = Some(Arc::new(Dialing(connector.clone())));
    let transport = TransportConnector::new(None);
    let (stream, accepted) = tokio::join!(transport.new_stream(&peer), listener.accept());
    accepted.unwrap().0.write_all(b"x").await.unwrap();
    assert_eq!(stream.unwrap().read_u8().await.unwrap(), b'x');
    assert_eq!(connector.dialers().len(), 1);
}
