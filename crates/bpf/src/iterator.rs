//! BPF iterators: programs that the kernel calls for each object of a kind, and that write records to the reader.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_syscalls::Errno;

use crate::call;
use crate::error::BpfError;
use crate::object::{Program, TypeInfo};

/// An iterator, which can be read any number of times.
#[derive(Debug)]
pub(crate) struct Iterator {
    link: OwnedFd,
    buffer: Vec<u8>,
}

impl Iterator {
    /// Loads the program called `name` in the section `section` of an object.
    pub(crate) fn load(
        name: &'static str,
        section: &'static str,
        object: &[u8],
    ) -> Result<Iterator, BpfError> {
        let kernel = TypeInfo::read().map_err(|source| BpfError::Absent {
            call: "read(/sys/kernel/btf/vmlinux)",
            what: "type information (CONFIG_DEBUG_INFO_BTF)",
            source,
        })?;
        let program = Program::read_iterator(name, section, object, &kernel)?.load(&[])?;
        let link = call::link_iterator(program.as_fd())
            .map_err(|error| BpfError::of("bpf(BPF_LINK_CREATE)", error))?;
        Ok(Iterator { link, buffer: vec![0; 32 << 10] })
    }

    /// Calls `found` for each record of a new pass, in the calling thread's namespaces. After an error `found` may have been called for
    /// some of them.
    pub(crate) fn each<const RECORD: usize>(
        &mut self,
        mut found: impl FnMut(&[u8; RECORD]),
    ) -> Result<(), BpfError> {
        let pass = call::iterate(self.link.as_fd());
        let mut pass = File::from(pass.map_err(|error| BpfError::of("bpf(BPF_ITER_CREATE)", error))?);
        let mut filled = 0;
        loop {
            match pass.read(&mut self.buffer[filled..]) {
                Ok(0) => return Ok(()),
                Ok(length) => filled += length,
                // EAGAIN: the kernel has looked at many objects without output and lets other tasks run (bpf_seq_read).
                Err(error) if matches!(Errno::of(&error), Some(Errno::EINTR | Errno::EAGAIN)) => continue,
                Err(error) => return Err(BpfError::of("read() of a BPF iterator", error)),
            }
            let (records, rest) = self.buffer[..filled].as_chunks::<RECORD>();
            records.iter().for_each(&mut found);
            let (whole, rest) = (filled - rest.len(), rest.len());
            self.buffer.copy_within(whole..filled, 0);
            filled = rest;
        }
    }
}
