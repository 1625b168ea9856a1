//! The messages of a worker on its disk, so that they outlive an outage of NATS and the coordinator.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use crate::interval::MAX_MESSAGE_BYTES;

/// Number of journals that an agent keeps. The oldest is removed first.
const MAX_JOURNALS: usize = 32;

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

/// Reads a journal message by message: it can have hundreds of megabytes.
pub(crate) struct JournalReader(BufReader<File>);

impl JournalReader {
    pub(crate) fn open(directory: &Path, run: &str, slot: u32) -> io::Result<JournalReader> {
        Ok(JournalReader(BufReader::new(File::open(path(directory, run, slot))?)))
    }

    /// Returns the length of the next message; `None` at the end.
    fn length(&mut self) -> Option<usize> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).ok()?;
        Some(u32::from_le_bytes(length) as usize).filter(|length| *length <= MAX_MESSAGE_BYTES)
    }

    /// Skips a message. Returns whether there was one.
    pub(crate) fn pass(&mut self) -> bool {
        let length = self.length();
        length.is_some_and(|length| self.0.seek_relative(length as i64).is_ok())
    }
}

impl Iterator for JournalReader {
    type Item = Vec<u8>;

    /// Returns the next complete message.
    fn next(&mut self) -> Option<Vec<u8>> {
        let mut message = vec![0; self.length()?];
        self.0.read_exact(&mut message).ok()?;
        Some(message)
    }
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
    let surplus = (journals.len() + 1).saturating_sub(MAX_JOURNALS);
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
        let open = |slot| JournalReader::open(&room.0, "r", slot);
        let messages: Vec<_> = open(3).unwrap().collect();
        assert_eq!(messages, [b"one".to_vec(), b"".to_vec(), b"three".to_vec()]);
        let mut reader = open(3).unwrap();
        assert!(reader.pass() && reader.pass());
        assert_eq!((reader.next(), reader.pass()), (Some(b"three".to_vec()), false));
        let path = path(&room.0, "r", 3);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert_eq!(open(3).unwrap().count(), 2);
        assert!(open(4).is_err());
        assert!(Journal::create(&room.0, "r", 3).is_err(), "a run has one journal per slot");
    }

    #[test]
    fn the_oldest_journals_are_removed() {
        let room = Directory::new("oldest");
        for number in 0..MAX_JOURNALS + 3 {
            Journal::create(&room.0, &format!("r{number}"), 0).unwrap();
        }
        assert_eq!(fs::read_dir(&room.0).unwrap().count(), MAX_JOURNALS);
    }
}
