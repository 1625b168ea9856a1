//! The resolver of hickory-dns: TCP to the name servers by the connector.

use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::time::Duration;

use fourtuple::dial::{Connector, DialedStream};
use hickory_resolver::Resolver;
use hickory_resolver::config::{NameServerConfig, ResolverConfig};
use hickory_resolver::net::runtime::iocompat::AsyncIoTokioAsStd;
use hickory_resolver::net::runtime::{RuntimeProvider, TokioHandle, TokioRuntimeProvider, TokioTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UdpSocket};

type Later<T> = Pin<Box<dyn Send + Future<Output = io::Result<T>>>>;

#[derive(Clone, Default)]
struct Dialing {
    tokio: TokioRuntimeProvider,
    connector: Connector,
}

impl RuntimeProvider for Dialing {
    type Handle = TokioHandle;
    type Timer = TokioTime;
    type Udp = UdpSocket;
    type Tcp = AsyncIoTokioAsStd<DialedStream>;

    fn create_handle(&self) -> TokioHandle {
        self.tokio.create_handle()
    }

    fn connect_tcp(
        &self,
        server: SocketAddr,
        _source: Option<SocketAddr>,
        _timeout: Option<Duration>,
    ) -> Later<Self::Tcp> {
        let connector = self.connector.clone();
        Box::pin(async move { Ok(AsyncIoTokioAsStd(connector.connect_to(server).await?)) })
    }

    fn bind_udp(&self, local: SocketAddr, server: SocketAddr) -> Later<UdpSocket> {
        self.tokio.bind_udp(local, server)
    }
}

/// Answers one query over TCP with 192.0.2.9.
async fn answer(listener: TcpListener) {
    let (mut stream, _) = listener.accept().await.unwrap();
    let length = stream.read_u16().await.unwrap();
    let mut message = vec![0; length.into()];
    stream.read_exact(&mut message).await.unwrap();
    // The question: the labels, a zero byte, the type and the class.
    let end = 12 + message[12..].iter().position(|byte| *byte == 0).unwrap() + 5;
    message.truncate(end);
    // A response without an error, one question, one answer, no additional record.
    message[2..12].copy_from_slice(&[0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
    // A pointer to the name of the question, type A, class IN, 60 s, 4 bytes.
    message.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 9]);
    stream.write_u16(message.len() as u16).await.unwrap();
    stream.write_all(&message).await.unwrap();
}

#[tokio::test]
async fn a_resolver_of_hickory_uses_the_connector() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let mut server = NameServerConfig::tcp(Ipv4Addr::LOCALHOST.into());
    server.connections[0].port = listener.local_addr().unwrap().port();
    let provider = Dialing::default();
    let dialers = provider.connector.dialers().clone();
    let config = ResolverConfig::from_parts(None, Vec::new(), vec![server]);
    let resolver = Resolver::builder_with_config(config, provider).build().unwrap();
    let (found, ()) = tokio::join!(resolver.ipv4_lookup("example.org."), answer(listener));
    let found = found.unwrap();
    assert!(format!("{found:?}").contains("192.0.2.9"), "{found:?}");
    assert_eq!(dialers.len(), 1);
}
