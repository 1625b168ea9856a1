//! The messages of a worker on its disk, so that they outlive an outage of NATS and the coordinator.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::interval::MOST_BYTES;

/// Number of journals that an agent keeps. The oldest is removed first.
const MOST_JOURNALS: usize = 32;

const SUFFIX: &str = "journal";

/// A journal that grows during a run: each message after its length in 4 bytes, little-endian.
pub(crate) struct Journal {
    file: File,
}

impl Journal {
    /// Creates the journal of a worker in `directory`, and removes the oldest journals there.
    pub(crate) fn create(directory: &Path, run: &str, slot: u32) -> io::Result<Journal> {
        fs::create_dir_all(directory)?;
        forget_oldest(directory)?;
        let file = OpenOptions::new().write(true).create_new(true).open(path(directory, run, slot))?;
        Ok(Journal { file })
    }

    /// Adds a message.
    pub(crate) fn add(&mut self, message: &[u8]) -> io::Result<()> {
        let mut bytes = (message.len() as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(message);
        // One write, so that a crash truncates at most the last message.
        self.file.write_all(&bytes)
    }
}

/// Returns all complete messages of a journal.
pub(crate) fn read(directory: &Path, run: &str, slot: u32) -> io::Result<Vec<Vec<u8>>> {
    let mut bytes = Vec::new();
    File::open(path(directory, run, slot))?.read_to_end(&mut bytes)?;
    let mut rest = bytes.as_slice();
    let mut messages = Vec::new();
    while let Some((length, after)) = rest.split_first_chunk() {
        let length = u32::from_le_bytes(*length) as usize;
        let Some((message, after)) = after.split_at_checked(length).filter(|_| length <= MOST_BYTES) else {
            break;
        };
        messages.push(message.to_vec());
        rest = after;
    }
    Ok(messages)
}

/// The name of a run is a token, so the path stays in the directory.
fn path(directory: &Path, run: &str, slot: u32) -> PathBuf {
    directory.join(format!("{run}-{slot}.{SUFFIX}"))
}

fn forget_oldest(directory: &Path) -> io::Result<()> {
    let mut journals = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.path().extension().is_some_and(|extension| extension == SUFFIX) {
            journals.push((entry.metadata()?.modified()?, entry.path()));
        }
    }
    journals.sort();
    let surplus = (journals.len() + 1).saturating_sub(MOST_JOURNALS);
    journals.iter().take(surplus).try_for_each(|(_, path)| fs::remove_file(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Directory {
            let path = std::env::temp_dir().join(format!("fourtuple-journal-{name}-{}", std::process::id()));
            // A killed process with the same ID may have left it.
            let _ = fs::remove_dir_all(&path);
            Directory(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_journal_is_read_up_to_its_last_whole_message() {
        let room = Directory::new("read");
        let mut journal = Journal::create(&room.0, "r", 3).unwrap();
        journal.add(b"one").unwrap();
        journal.add(b"").unwrap();
        journal.add(b"three").unwrap();
        assert_eq!(read(&room.0, "r", 3).unwrap(), [b"one".to_vec(), b"".to_vec(), b"three".to_vec()]);
        let path = path(&room.0, "r", 3);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert_eq!(read(&room.0, "r", 3).unwrap().len(), 2);
        assert!(read(&room.0, "r", 4).is_err());
        assert!(Journal::create(&room.0, "r", 3).is_err(), "a run has one journal per slot");
    }

    #[test]
    fn the_oldest_journals_are_removed() {
        let room = Directory::new("oldest");
        for number in 0..MOST_JOURNALS + 3 {
            Journal::create(&room.0, &format!("r{number}"), 0).unwrap();
        }
        assert_eq!(fs::read_dir(&room.0).unwrap().count(), MOST_JOURNALS);
    }
}
