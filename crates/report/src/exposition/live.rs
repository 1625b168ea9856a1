//! The live page and its updates.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use hyper::body::Bytes;
use tokio::sync::watch;

/// The page of an endpoint: a function that renders its HTML, and the updates that it receives as server-sent events.
pub struct Page {
    render: Box<dyn Fn() -> String + Send + Sync>,
    updates: watch::Receiver<Arc<str>>,
    readings: Arc<AtomicU64>,
}

/// Sends updates to a [`Page`].
#[derive(Debug)]
pub struct Publisher {
    updates: watch::Sender<Arc<str>>,
    readings: Arc<AtomicU64>,
}

impl Page {
    /// Creates a page and its publisher. The endpoint calls `render`, and reads the metrics, at the first request after each call of
    /// [`Publisher::renew`]; other requests get the same text, so that clients in a loop cost little.
    pub fn new(render: impl Fn() -> String + Send + Sync + 'static) -> (Page, Publisher) {
        let (sender, updates) = watch::channel(Arc::from(""));
        let readings = Arc::new(AtomicU64::new(0));
        let page = Page { render: Box::new(render), updates, readings: Arc::clone(&readings) };
        (page, Publisher { updates: sender, readings })
    }

    /// Returns the number of calls of [`Publisher::renew`].
    pub(crate) fn reading(&self) -> u64 {
        self.readings.load(Ordering::Acquire)
    }

    pub(crate) fn html(&self) -> String {
        (self.render)()
    }

    /// Returns a receiver of later updates.
    pub(crate) fn updates(&self) -> watch::Receiver<Arc<str>> {
        let mut updates = self.updates.clone();
        updates.mark_unchanged();
        updates
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Page").finish_non_exhaustive()
    }
}

impl Publisher {
    /// Returns whether a browser reads updates.
    pub fn has_readers(&self) -> bool {
        // The page itself has a receiver.
        self.updates.receiver_count() > 1
    }

    /// Says that the page and the metrics have changed.
    pub fn renew(&self) {
        self.readings.fetch_add(1, Ordering::Release);
    }

    /// Sends an update to all browsers: a text without line ends, such as JSON. A browser that has not read the previous update
    /// gets the latest only.
    pub fn send(&self, update: String) {
        // Without receivers the endpoint has ended.
        let _ = self.updates.send(Arc::from(update));
    }
}

/// A text of the latest reading.
#[derive(Debug, Default)]
pub(crate) struct Cache(Mutex<Option<(u64, Bytes)>>);

impl Cache {
    /// Returns the text of a reading, which `make` makes once.
    pub(crate) fn get<E>(&self, reading: u64, make: impl FnOnce() -> Result<String, E>) -> Result<Bytes, E> {
        let mut cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*cached {
            Some((of, text)) if *of == reading => Ok(text.clone()),
            _ => {
                let text = Bytes::from(make()?);
                *cached = Some((reading, text.clone()));
                Ok(text)
            }
        }
    }
}
