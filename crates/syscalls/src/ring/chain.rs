//! Chains of linked steps: a builder, and the bookkeeping of a chain in progress.

use std::io;

use io_uring::types::Fixed;
use io_uring::{opcode, squeue};

use crate::ring::{MAX_STEPS, Ring, Step, user_data};

/// Up to [`MAX_STEPS`] steps, oldest first.
#[derive(Clone, Copy, Default)]
pub(super) struct Chain {
    steps: [u8; MAX_STEPS],
    length: u8,
}

impl Chain {
    pub(super) fn push(&mut self, step: Step) {
        self.steps[usize::from(self.length)] = step as u8;
        self.length += 1;
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        &self.steps[..usize::from(self.length)]
    }

    /// Removes the oldest `count` steps.
    pub(super) fn drop_first(&mut self, count: usize) {
        let length = usize::from(self.length);
        self.steps.copy_within(count..length, 0);
        self.length -= count as u8;
    }
}

/// A chain under construction.
pub(super) struct Builder<'a> {
    pub(super) ring: &'a mut Ring,
    slot: u32,
    chain: Chain,
    last: Option<(Step, squeue::Entry)>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(ring: &'a mut Ring, slot: u32) -> io::Result<Self> {
        ring.make_room()?;
        Ok(Builder { ring, slot, chain: Chain::default(), last: None })
    }

    pub(super) fn push(&mut self, step: Step, entry: squeue::Entry) {
        if let Some((step, entry)) = self.last.replace((step, entry)) {
            self.flush(step, entry, squeue::Flags::IO_LINK);
        }
    }

    pub(super) fn flush(&mut self, step: Step, entry: squeue::Entry, link: squeue::Flags) {
        let silent = if step.is_silent() { squeue::Flags::SKIP_SUCCESS } else { squeue::Flags::empty() };
        self.ring.push(entry.flags(link | silent).user_data(user_data(self.slot, step)));
        self.chain.push(step);
        self.ring.awaited += usize::from(!step.is_silent());
    }

    pub(super) fn option(
        &mut self,
        level: libc::c_int,
        name: libc::c_int,
        value: *const libc::c_void,
        length: usize,
    ) {
        let (level, name) = (level as u32, name as u32);
        let entry = opcode::SetSockOpt::new(Fixed(self.slot), level, name, value, length as u32).build();
        self.push(Step::Option, entry);
    }

    pub(super) fn connect(&mut self, destination: usize) {
        let (_, destination) = &self.ring.destinations[destination];
        let entry =
            opcode::Connect::new(Fixed(self.slot), destination.as_ptr(), destination.length()).build();
        self.push(Step::Connect, entry);
    }

    pub(super) fn send(&mut self, bytes: &[u8]) {
        let outgoing = &mut self.ring.slots[self.slot as usize].outgoing;
        outgoing.clear();
        outgoing.extend_from_slice(bytes);
        let entry = opcode::Send::new(Fixed(self.slot), outgoing.as_ptr(), outgoing.len() as u32)
            .flags(libc::MSG_NOSIGNAL | libc::MSG_WAITALL)
            .build();
        self.push(Step::Send, entry);
    }

    pub(super) fn receive(&mut self, flags: libc::c_int) {
        let room = self.ring.room;
        let received = &mut self.ring.slots[self.slot as usize].received;
        if received.is_empty() {
            *received = vec![0; room].into();
        }
        let entry = opcode::Recv::new(Fixed(self.slot), received.as_mut_ptr(), received.len() as u32)
            .flags(flags)
            .build();
        self.push(Step::Receive, entry);
    }

    pub(super) fn submit(mut self) -> io::Result<()> {
        if let Some((step, entry)) = self.last.take() {
            self.flush(step, entry, squeue::Flags::empty());
        }
        self.ring.slots[self.slot as usize].chain = self.chain;
        Ok(())
    }
}
