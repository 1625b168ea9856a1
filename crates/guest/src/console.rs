//! The serial console, one whole line at a time.

use std::io::{self, Write};
use std::sync::Mutex;

/// Keeps the lines of several threads apart.
#[derive(Default)]
pub(crate) struct Console {
    turn: Mutex<()>,
}

impl Console {
    /// Writes a line for `cargo xtask kernels` to read.
    pub(crate) fn say(&self, message: &str) {
        self.line("FOURTUPLE-GUEST ", message.as_bytes());
    }

    /// Writes one line behind a prefix. A console that is gone leaves nobody to tell, so errors are dropped.
    pub(crate) fn line(&self, prefix: &str, text: &[u8]) {
        let _turn = self.turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut line = Vec::with_capacity(prefix.len() + text.len() + 1);
        line.extend_from_slice(prefix.as_bytes());
        line.extend_from_slice(text);
        line.push(b'\n');
        let mut stdout = io::stdout().lock();
        let _ = stdout.write_all(&line).and_then(|()| stdout.flush());
    }
}
