//! The live page and its updates.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

/// The page of an endpoint: its HTML, and the updates that it receives as server-sent events.
#[derive(Debug)]
pub struct Page {
    html: Arc<Mutex<String>>,
    updates: watch::Receiver<Arc<str>>,
}

/// Changes a [`Page`].
#[derive(Debug)]
pub struct Publisher {
    html: Arc<Mutex<String>>,
    updates: watch::Sender<Arc<str>>,
}

impl Page {
    /// Creates an empty page and its publisher.
    pub fn new() -> (Page, Publisher) {
        let html = Arc::new(Mutex::new(String::new()));
        let (sender, updates) = watch::channel(Arc::from(""));
        (Page { html: Arc::clone(&html), updates }, Publisher { html, updates: sender })
    }

    pub(crate) fn html(&self) -> String {
        self.html.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns a receiver of later updates.
    pub(crate) fn updates(&self) -> watch::Receiver<Arc<str>> {
        let mut updates = self.updates.clone();
        updates.mark_unchanged();
        updates
    }
}

impl Publisher {
    /// Sets the HTML of the page.
    pub fn set_page(&self, html: String) {
        *self.html.lock().unwrap_or_else(PoisonError::into_inner) = html;
    }

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
