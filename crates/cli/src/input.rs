//! Files that flags name.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Reads a file of at most `longest` bytes. A device such as /dev/zero has no end.
pub(crate) fn read(path: &Path, longest: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(longest + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > longest {
        return Err(io::Error::other(format!("it is longer than {} MiB", longest >> 20)));
    }
    Ok(bytes)
}

/// Reads a file of settings: UTF-8, at most 16 MiB.
pub(crate) fn settings(path: &Path) -> io::Result<String> {
    utf8(read(path, 16 << 20)?)
}

/// Returns the text of UTF-8.
pub(crate) fn utf8(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|_| io::Error::other("it is not UTF-8"))
}
