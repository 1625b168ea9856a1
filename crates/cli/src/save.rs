//! Files written as a whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes `text` to `path` atomically: the file holds either its old or all of its new content.
///
/// Writes a temporary file in the same directory, syncs it to disk and renames it: a full disk or a kill leaves the
/// old content. An error removes the temporary file; a kill may leave it as `.NAME.PID.partial`. Symbolic links are
/// followed, and the permissions of the old file are kept. Files that are not regular (`/dev/stdout`, a pipe,
/// `/dev/full`) are written directly.
///
/// # Errors
/// Returns the error of the failed call, with its kind, and the path in the message.
pub fn save(path: &Path, text: &str) -> io::Result<()> {
    let result = match fs::metadata(path) {
        // Below /dev and /proc a name may be an open file of another process, even a regular one: no renaming.
        _ if path.starts_with("/dev") || path.starts_with("/proc") => write_through(path, text),
        Ok(old) if old.is_file() => {
            fs::canonicalize(path).and_then(|target| replace(&target, text, Some(old.permissions())))
        }
        Ok(_) => write_through(path, text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => replace(path, text, None),
        Err(error) => Err(error),
    };
    result.map_err(|error| io::Error::new(error.kind(), format!("cannot write {}: {error}", path.display())))
}

/// Parses the value of a flag for a file that is written at the end of a run: its directory must be there now.
pub fn new_file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if path.is_dir() || directory.is_some_and(|directory| !directory.is_dir()) {
        return Err(format!(
            "{text:?} is not a file that can be written: expected one in a directory that exists"
        ));
    }
    Ok(path)
}

fn write_through(path: &Path, text: &str) -> io::Result<()> {
    // Append, because /dev/stdout may be a file that the shell opened and other processes write to.
    let mut file = OpenOptions::new().append(true).open(path)?;
    file.write_all(text.as_bytes())?;
    file.flush()
}

fn replace(path: &Path, text: &str, permissions: Option<fs::Permissions>) -> io::Result<()> {
    let temporary = beside(path)?;
    let result = write_whole(&temporary, text, permissions).and_then(|()| fs::rename(&temporary, path));
    if result.is_err() {
        // The first error matters more than one from removing the file.
        let _ = fs::remove_file(&temporary);
    }
    result
}

fn write_whole(path: &Path, text: &str, permissions: Option<fs::Permissions>) -> io::Result<()> {
    // A killed process with the same ID, or an attacker, may have left a file or a link: never write through it.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::create_new(path)?;
    if let Some(permissions) = permissions {
        file.set_permissions(permissions)?;
    }
    file.write_all(text.as_bytes())?;
    // Some file systems report a full disk only here.
    file.sync_all()
}

fn beside(path: &Path) -> io::Result<PathBuf> {
    let name =
        path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a file name"))?;
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{}.partial", std::process::id()));
    Ok(path.with_file_name(temporary))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    struct TempDir(PathBuf);

    impl TempDir {
        fn new(name: &str) -> TempDir {
            let path = std::env::temp_dir().join(format!("fourtuple-save-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            TempDir(path)
        }

        fn names(&self) -> Vec<String> {
            let mut names: Vec<String> = fs::read_dir(&self.0)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        }
    }

    impl Drop for TempDir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn writes_a_new_file_and_replaces_an_old_one() {
        let temp = TempDir::new("replace");
        let path = temp.0.join("report.html");
        save(&path, "first").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        save(&path, "second").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(temp.names(), ["report.html"]);
    }

    #[test]
    fn a_symbolic_link_is_followed() {
        let temp = TempDir::new("link");
        let (target, link) = (temp.0.join("target"), temp.0.join("link"));
        fs::write(&target, "old").unwrap();
        symlink(&target, &link).unwrap();
        save(&link, "new").unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(temp.names(), ["link", "target"]);
    }

    #[test]
    fn an_error_names_the_path_and_leaves_no_file() {
        let temp = TempDir::new("error");
        let missing = temp.0.join("no/such/report.html");
        let error = save(&missing, "text").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(error.to_string().contains(missing.to_str().unwrap()), "{error}");
        let error = save(&temp.0, "text").unwrap_err();
        assert!(error.to_string().contains(temp.0.to_str().unwrap()), "{error}");
        assert!(temp.names().is_empty());
    }

    #[test]
    fn a_failed_rename_keeps_the_old_file() {
        let temp = TempDir::new("rename");
        // A directory with this name makes the last step, rename(), fail.
        let path = temp.0.join("report.html");
        fs::create_dir(&path).unwrap();
        assert!(replace(&path, "text", None).is_err());
        assert_eq!(temp.names(), ["report.html"]);
    }

    #[test]
    fn a_full_disk_is_an_error_with_the_path() {
        let error = save(Path::new("/dev/full"), "text").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(error.to_string().contains("/dev/full"), "{error}");
        save(Path::new("/dev/null"), "text").unwrap();
    }
}
