//! Output to the serial console, by complete lines.

use std::io::{self, Write};
use std::sync::Mutex;

/// Serializes the lines of several threads.
#[derive(Default)]
pub(crate) struct Console {
    turn: Mutex<()>,
}

impl Console {
    /// Writes a line for `cargo xtask kernels` to read.
    pub(crate) fn say(&self, message: &str) {
        self.line("FOURTUPLE-GUEST ", message.as_bytes());
    }

    /// Writes one line with a prefix. Ignores errors: without a console there is no place to report them.
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
