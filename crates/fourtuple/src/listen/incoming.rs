use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::Stream;

use crate::listen::error::ListenError;
use crate::listen::tokio::{Accepted, AsyncAcceptor};

/// The connections of an [`AsyncAcceptor`] as a stream; see [`AsyncAcceptor::incoming`]. An error does not end the stream. Dropping it drops
/// the acceptor.
///
/// Example: [`AsyncAcceptor::incoming`].
pub struct Incoming {
    next: Pin<Box<Accepting>>,
}

/// A call of [`AsyncAcceptor::accept`], with the acceptor.
type Accepting = dyn Future<Output = (AsyncAcceptor, Result<Accepted, ListenError>)> + Send;

impl Incoming {
    pub(super) fn of(acceptor: AsyncAcceptor) -> Incoming {
        Incoming { next: Box::pin(acceptor.accept_owned()) }
    }
}

impl fmt::Debug for Incoming {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Incoming").finish_non_exhaustive()
    }
}

impl Stream for Incoming {
    type Item = Result<Accepted, ListenError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let (acceptor, accepted) = ready!(self.next.as_mut().poll(context));
        *self = Incoming::of(acceptor);
        Poll::Ready(match accepted {
            Err(ListenError::Drained) => None,
            accepted => Some(accepted),
        })
    }
}
