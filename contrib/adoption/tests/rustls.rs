//! TLS by rustls over the connector: hyper-rustls wraps it.

use std::net::Ipv4Addr;
use std::sync::Arc;

use fourtuple::dial::{Connector, DialReport};
use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use rustls::pki_types::PrivateKeyDer;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

#[tokio::test]
async fn https_over_the_connector() {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let certificate = own.cert.der().clone();
    let key = PrivateKeyDer::try_from(own.signing_key.serialize_der()).unwrap();
    let server = ServerConfig::builder().with_no_client_auth();
    let server = server.with_single_cert(vec![certificate.clone()], key).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate).unwrap();
    let client = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();

    // The TLS layer must see https URIs.
    let connector = Connector::builder().enforce_http(false).build();
    let https = HttpsConnectorBuilder::new().with_tls_config(client).https_only().enable_http1();
    let client =
        Client::builder(TokioExecutor::new()).build::<_, Empty<Bytes>>(https.wrap_connector(connector));

    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let uri = format!("https://localhost:{}/", listener.local_addr().unwrap().port()).parse().unwrap();
    let serve = async {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = TlsAcceptor::from(Arc::new(server)).accept(stream).await.unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            request.push(stream.read_u8().await.unwrap());
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello").await.unwrap();
        stream.flush().await.unwrap();
        stream
    };
    let (response, _open) = tokio::join!(client.get(uri), serve);
    let response = response.unwrap();
    assert!(response.extensions().get::<DialReport>().is_some(), "the report passes through the TLS layer");
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "hello");
}
