//! A gRPC channel of tonic: the connector is a service for its endpoint.

use std::net::Ipv4Addr;

use fourtuple::dial::Connector;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tonic::transport::Endpoint;

#[tokio::test]
async fn a_channel_of_tonic_uses_the_connector() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let uri = format!("http://{}", listener.local_addr().unwrap());
    let connector = Connector::new();
    let endpoint = Endpoint::try_from(uri).unwrap();
    let channel = endpoint.connect_with_connector(connector.clone());
    let server = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut preface = [0; 24];
        stream.read_exact(&mut preface).await.unwrap();
        preface
    };
    let (channel, preface) = tokio::join!(channel, server);
    assert!(channel.is_ok() && preface.starts_with(b"PRI * HTTP/2.0"));
    assert_eq!(connector.dialers().len(), 1);
}
