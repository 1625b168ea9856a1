//! A patched reqwest takes the connector: below TLS, and with the error of a dial as the source of its own.

use std::error::Error;
use std::net::Ipv4Addr;
use std::sync::Arc;

use fourtuple::dial::{ConnectError, Connector};
use rustls::pki_types::PrivateKeyDer;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

/// Answers one request; returns the connection, which stays open.
async fn answer<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S) -> S {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        request.push(stream.read_u8().await.unwrap());
    }
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello").await.unwrap();
    stream.flush().await.unwrap();
    stream
}

#[tokio::test]
async fn requests_with_and_without_tls_use_the_connector() {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let certificate = own.cert.der().clone();
    let key = PrivateKeyDer::try_from(own.signing_key.serialize_der()).unwrap();
    let server = ServerConfig::builder().with_no_client_auth();
    let server =
        TlsAcceptor::from(Arc::new(server.with_single_cert(vec![certificate.clone()], key).unwrap()));
    let mut roots = RootCertStore::empty();
    roots.add(certificate).unwrap();
    let tls = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();

    // TLS is above the connector, so it must get https URIs.
    let connector = Connector::builder().enforce_http(false).build();
    let client = reqwest::Client::builder().tls_backend_preconfigured(tls).tcp_connector(connector.clone());
    // Each request opens a connection.
    let client = client.pool_max_idle_per_host(0).build().unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();

    let plain = async { answer(listener.accept().await.unwrap().0).await };
    let (response, _open) = tokio::join!(client.get(format!("http://127.0.0.1:{port}/")).send(), plain);
    assert_eq!(response.unwrap().text().await.unwrap(), "hello");
    assert_eq!(connector.dialers().len(), 1);

    let secret = async { answer(server.accept(listener.accept().await.unwrap().0).await.unwrap()).await };
    let (response, _open) = tokio::join!(client.get(format!("https://localhost:{port}/")).send(), secret);
    assert_eq!(response.unwrap().text().await.unwrap(), "hello");

    drop(listener);
    let failed = client.get(format!("http://127.0.0.1:{port}/")).send().await.unwrap_err();
    let mut cause: Option<&(dyn Error + 'static)> = Some(&failed);
    while let Some(error) = cause {
        if error.downcast_ref::<ConnectError>().is_some() {
            return;
        }
        cause = error.source();
    }
    panic!("no ConnectError in {failed:?}");
}
