//! Connections of a tokio client to a group, over TCP or a unix socket.

use fourtuple::listen::{Endpoint, ListenerGroup};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

pub(crate) trait Both: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Both for T {}

pub(crate) async fn connect(group: &ListenerGroup) -> Box<dyn Both> {
    match group.endpoint() {
        Endpoint::Unix(path) => Box::new(UnixStream::connect(path).await.unwrap()),
        Endpoint::Inet(address) => Box::new(TcpStream::connect(address).await.unwrap()),
    }
}
