//! Files that flags name.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Reads a file of at most `longest` bytes. A device such as /dev/zero has no end.
pub(crate) fn read(path: &Path, longest: u64) -> io::Result<Vec<u8>> {
    bounded(File::open(path)?, longest)
}

/// Reads a file of settings: UTF-8, at most 16 MiB.
pub(crate) fn settings(path: &Path) -> io::Result<String> {
    utf8(read(path, 16 << 20)?)
}

/// Reads stdin to its end, at most `longest` bytes.
pub(crate) fn stdin(longest: u64) -> io::Result<Vec<u8>> {
    bounded(io::stdin().lock(), longest)
}

fn bounded(from: impl Read, longest: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(longest + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > longest {
        return Err(io::Error::other(format!("it is longer than {} MiB", longest >> 20)));
    }
    Ok(bytes)
}

/// Returns the text of UTF-8, without the byte order mark that editors of other systems write.
pub(crate) fn utf8(bytes: Vec<u8>) -> io::Result<String> {
    let why = match bytes.as_slice() {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "it is UTF-16, and UTF-8 is expected",
        _ => "it is not UTF-8",
    };
    let mut text = String::from_utf8(bytes).map_err(|_| io::Error::other(why))?;
    if text.starts_with('\u{feff}') {
        text.drain(..'\u{feff}'.len_utf8());
    }
    Ok(text)
}

/// Returns the message of a TOML error with its line, without the excerpt of the file.
pub(crate) fn toml_error(text: &str, error: &toml::de::Error) -> String {
    let line = error.span().map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
    // The message quotes keys of the file, which may contain any character.
    let message = error.message().replace(char::is_control, " ");
    line.map_or(message.clone(), |line| format!("line {line}: {message}"))
}
