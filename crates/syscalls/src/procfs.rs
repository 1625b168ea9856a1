//! Files of procfs, among them sysctls.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Bytes of the first read. The list of all odd ports, the longest list of reserved ports, has 188 KiB.
const FIRST_READ: usize = 64 << 10;

/// Reads a file of procfs as text.
///
/// A sysctl returns its value to the first read(2) only, cut to the size of the buffer (`proc_do_large_bitmap`), and
/// [`std::fs::read_to_string`] begins with a read of 32 bytes, because files of procfs report the size 0. This function reads into a
/// large buffer. If the file fills the buffer, the function opens the file again and reads into a buffer of twice the size.
///
/// # Errors
/// The errors of open(2) and read(2); [`io::ErrorKind::InvalidData`] if the file is not UTF-8.
pub fn read_to_string(path: impl AsRef<Path>) -> io::Result<String> {
    read_with(path.as_ref(), FIRST_READ)
}

fn read_with(path: &Path, mut size: usize) -> io::Result<String> {
    loop {
        let mut file = File::open(path)?;
        let mut buffer = vec![0; size];
        let mut filled = 0;
        while filled < size {
            match file.read(&mut buffer[filled..]) {
                Ok(0) => {
                    buffer.truncate(filled);
                    return String::from_utf8(buffer)
                        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
                }
                Ok(more) => filled += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        size *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_whole_in_buffers_of_any_size() {
        let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
        let release = std::fs::read_to_string("/proc/version").unwrap();
        for size in 1..=64 {
            let read = |path| read_with(Path::new(path), size).unwrap();
            assert_eq!(
                (read("/proc/sys/net/ipv4/ip_local_port_range"), read("/proc/version")),
                (range.clone(), release.clone())
            );
        }
        assert_eq!(read_to_string("/proc/no such file").unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
