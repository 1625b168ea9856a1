//! Files and errors, and the bound of all lists.

use std::io;
use std::path::Path;

use fourtuple_syscalls::procfs;

/// Maximum number of items of a list in a snapshot; tuples with fewer ports in use are left out.
pub const LISTED: usize = 100;

/// Reads a file below `root`.
///
/// # Errors
///
/// The path and the error as text.
pub(super) fn text(root: &Path, path: &str) -> Result<String, String> {
    procfs::read_to_string(root.join(path)).map_err(|error| format!("/{path}: {}", reason(&error)))
}

/// Returns the name of an error: `EACCES`.
pub(super) fn reason(error: &io::Error) -> String {
    fourtuple_syscalls::errno_name(error).to_string()
}
