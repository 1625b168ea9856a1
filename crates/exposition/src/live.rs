//! The live page and its updates.

use std::fmt;
use std::sync::Arc;

use tokio::sync::watch;

/// The page of an endpoint: a function that renders its HTML, and the updates that it receives as server-sent events.
pub struct Page {
    render: Box<dyn Fn() -> String + Send + Sync>,
    updates: watch::Receiver<Arc<str>>,
}

/// Sends updates to a [`Page`].
#[derive(Debug)]
pub struct Publisher {
    updates: watch::Sender<Arc<str>>,
}

impl Page {
    /// Creates a page and its publisher. The endpoint calls `render` for each request.
    pub fn new(render: impl Fn() -> String + Send + Sync + 'static) -> (Page, Publisher) {
        let (sender, updates) = watch::channel(Arc::from(""));
        (Page { render: Box::new(render), updates }, Publisher { updates: sender })
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

    /// Sends an update to all browsers: a text without line ends, such as JSON. A browser that has not read the previous update
    /// gets the latest only.
    pub fn send(&self, update: String) {
        // Without receivers the endpoint has ended.
        let _ = self.updates.send(Arc::from(update));
    }
}
