use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time;

/// Sorts addresses for RFC 8305, section 4: the families alternate, the family of the first address first. The order within a
/// family stays. Removes repeated addresses.
pub(super) fn interleave(addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let first_is_ipv4 = addresses.first().is_some_and(SocketAddr::is_ipv4);
    let (mut first, mut second): (VecDeque<_>, VecDeque<_>) =
        addresses.iter().copied().partition(|address| address.is_ipv4() == first_is_ipv4);
    let mut sorted = Vec::with_capacity(addresses.len());
    while !first.is_empty() || !second.is_empty() {
        for address in [first.pop_front(), second.pop_front()].into_iter().flatten() {
            if !sorted.contains(&address) {
                sorted.push(address);
            }
        }
    }
    sorted
}

/// Starts an attempt for each address in turn, RFC 8305, section 5: the next attempt starts `delay` after the previous one, or at
/// once after an attempt failed. Returns the first success and drops the other attempts, or returns the errors in the order in which
/// they occurred.
pub(super) async fn race<T, E, F>(
    addresses: &[SocketAddr],
    delay: Duration,
    mut attempt: impl FnMut(SocketAddr) -> F,
) -> Result<T, Vec<E>>
where
    F: Future<Output = Result<T, E>>,
{
    let mut waiting = addresses.iter();
    let mut attempts: Vec<Pin<Box<F>>> = Vec::new();
    let mut errors = Vec::new();
    while let Some(address) = waiting.next() {
        attempts.push(Box::pin(attempt(*address)));
        if waiting.len() == 0 {
            break;
        }
        match time::timeout(delay, first_result(&mut attempts)).await {
            Ok(Ok(success)) => return Ok(success),
            Ok(Err(error)) => errors.push(error),
            Err(_elapsed) => {}
        }
    }
    while !attempts.is_empty() {
        match first_result(&mut attempts).await {
            Ok(success) => return Ok(success),
            Err(error) => errors.push(error),
        }
    }
    Err(errors)
}

/// Waits until an attempt ends, and removes it.
async fn first_result<R>(attempts: &mut Vec<Pin<Box<impl Future<Output = R>>>>) -> R {
    poll_fn(|context| {
        for index in 0..attempts.len() {
            if let Poll::Ready(result) = attempts[index].as_mut().poll(context) {
                drop(attempts.remove(index));
                return Poll::Ready(result);
            }
        }
        Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::future::{pending, ready};
    use std::rc::Rc;

    use super::*;

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
    }

    #[test]
    fn families_alternate_from_the_first_address() {
        let sorted = interleave(&addresses(&["[::1]:1", "[::2]:1", "[::3]:1", "1.1.1.1:1", "2.2.2.2:1"]));
        assert_eq!(sorted, addresses(&["[::1]:1", "1.1.1.1:1", "[::2]:1", "2.2.2.2:1", "[::3]:1"]));
        let sorted = interleave(&addresses(&["1.1.1.1:1", "1.1.1.1:1", "[::1]:1"]));
        assert_eq!(sorted, addresses(&["1.1.1.1:1", "[::1]:1"]));
        assert!(interleave(&[]).is_empty());
    }

    #[test]
    fn a_failure_starts_the_next_attempt_at_once() {
        let started = RefCell::new(Vec::new());
        let all = addresses(&["1.1.1.1:1", "2.2.2.2:2", "3.3.3.3:3"]);
        // The delay never passes.
        let result = run(race(&all, Duration::MAX, |address| {
            started.borrow_mut().push(address.port());
            ready(if address.port() == 2 { Ok(address.port()) } else { Err(address.port()) })
        }));
        assert_eq!((result, started.into_inner()), (Ok(2), vec![1, 2]));
    }

    #[test]
    fn all_errors_are_returned() {
        let all = addresses(&["1.1.1.1:1", "2.2.2.2:2"]);
        let result: Result<(), _> = run(race(&all, Duration::MAX, |address| ready(Err(address.port()))));
        assert_eq!(result, Err(vec![1, 2]));
        let result: Result<(), Vec<()>> = run(race(&[], Duration::MAX, |_| pending()));
        assert_eq!(result, Err(Vec::new()));
    }

    #[test]
    fn the_losers_are_dropped_before_the_race_returns() {
        let all = addresses(&["1.1.1.1:1", "2.2.2.2:2"]);
        let silent = Rc::new(());
        let result: Result<u16, Vec<()>> = run(race(&all, Duration::from_millis(1), |address| {
            let silent = Rc::clone(&silent);
            async move {
                if address.port() == 1 {
                    pending::<()>().await;
                }
                drop(silent);
                Ok(address.port())
            }
        }));
        assert_eq!((result, Rc::strong_count(&silent)), (Ok(2), 1));
    }
}
