//! io_uring for datagrams: one request receives all datagrams of a socket (multishot recvmsg, Linux 6.0), into buffers
//! that the kernel takes from a shared ring (Linux 5.19).
//!
//! A received datagram stays in its buffer until the next [`resume`](DatagramRing::resume), so
//! [`Outgoing`](crate::datagram::Outgoing) sends it from there and forwarding copies no payload.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixDatagram;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use io_uring::types::{BufRingEntry, Fd, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue};

use crate::datagram::{Datagram, Messages, read_control};
use crate::{Errno, ring, shared};

/// User data of the receive request.
const RECEIVE: u64 = 1;
const CANCEL: u64 = 2;
/// Id of the only buffer group.
const GROUP: u16 = 0;

/// The header at the start of each buffer (struct io_uring_recvmsg_out).
#[derive(Clone, Copy)]
#[repr(C)]
struct RecvmsgHeader {
    name: u32,
    control: u32,
    payload: u32,
    flags: u32,
}

/// Size of the space for the sender's address, after the header.
const NAME: usize = size_of::<libc::sockaddr_storage>();
/// Size of the space for control messages: GRO size, overflow count, IPv6 destination address, TTL.
const CONTROL: usize = 24 + 24 + 40 + 24;
/// Offset of the payload, which starts on its own cache line.
const HEAD: usize = size_of::<RecvmsgHeader>() + NAME + CONTROL;
const LINE: usize = 64;

const _: () = assert!(HEAD.is_multiple_of(LINE));

/// Receives the datagrams of one socket for the thread that created it. The kernel runs the receive work at any system
/// call of that thread and wakes the thread for it: a blocking call fails with EINTR, and then the descriptor of the
/// ring is readable.
///
/// Unlike the other rings of this crate, it does not defer the work (IORING_SETUP_DEFER_TASKRUN), because such a ring
/// wakes no epoll (`io_req_local_work_add`, seen on Linux 6.18).
pub struct DatagramRing {
    ring: IoUring,
    /// The buffers. Declared after `ring`, so that they are dropped when the kernel can no longer write to them.
    buffers: Buffers,
    /// The msghdr of the request, with the sizes of the space for addresses and control messages.
    header: Box<libc::msghdr>,
    /// Whether the request is active. The kernel ends it if no buffer is free, after an empty datagram, and on errors.
    is_receiving: bool,
    /// A submission failed. The queued entry names a descriptor that may be closed by now, so nothing is submitted any
    /// more.
    is_broken: bool,
    received: Vec<Received>,
    /// The error with which the request ended.
    failure: Option<Errno>,
}

// SAFETY: all pointers are to memory that moves with the value. The kernel writes only to buffers that it was given and
// has not completed. No other reference to such a buffer exists, whichever thread owns the value.
unsafe impl Send for DatagramRing {}

#[derive(Clone, Copy)]
struct Received {
    buffer: u16,
    /// Number of bytes that the kernel wrote, with the header.
    length: usize,
}

impl DatagramRing {
    /// Creates a ring with `buffers` buffers, a power of two up to 16,384, for datagrams of up to `capacity` bytes; longer
    /// datagrams are truncated. With UDP_GRO a message has up to 64 KiB. The descriptor of the ring is readable if
    /// [`receive`](DatagramRing::receive) has messages to return.
    ///
    /// # Errors
    ///
    /// ENOSYS, EPERM: io_uring is disabled on this host. EINVAL: before Linux 6.0 (IORING_SETUP_SINGLE_ISSUER), or
    /// `buffers` is not a power of two or is too large: the completion queue has at most 65,536 entries. ENOMEM, also if a buffer would have 4 GiB or more; EMFILE.
    pub fn new(buffers: u16, capacity: usize) -> io::Result<DatagramRing> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            // No interrupt for a busy thread: it makes a system call soon anyway.
            .setup_coop_taskrun()
            // More completions than buffers, so that the completion queue cannot overflow.
            .setup_cqsize(4 * u32::from(buffers.max(16)))
            .build(8)?;
        let mut buffers = Buffers::new(buffers, capacity)?;
        let (address, number) = (buffers.memory.start.as_ptr() as u64, buffers.number);
        // SAFETY: the mapping starts with an entry for each buffer and lives as long as the ring.
        unsafe { ring.submitter().register_buf_ring_with_flags(address, number, GROUP, 0) }?;
        (0..number).for_each(|buffer| buffers.give(buffer));
        // SAFETY: msghdr consists of numbers and pointers, for which zero is a valid value.
        let mut header: Box<libc::msghdr> = Box::new(unsafe { mem::zeroed() });
        header.msg_namelen = NAME as libc::socklen_t;
        header.msg_controllen = CONTROL as _;
        let received = Vec::with_capacity(usize::from(number));
        Ok(DatagramRing {
            ring,
            buffers,
            header,
            is_receiving: false,
            is_broken: false,
            received,
            failure: None,
        })
    }

    /// Probes, with a private socket pair, whether one request receives several datagrams and can be cancelled. Call it on a thread of
    /// its own: closing a ring interrupts the thread that created the ring a little later (`io_ring_exit_work`).
    ///
    /// # Errors
    ///
    /// The errors of [`DatagramRing::new`], and the errors of opening the sockets.
    pub fn works() -> io::Result<bool> {
        let (near, far) = UnixDatagram::pair()?;
        let mut ring = DatagramRing::new(4, 64)?;
        ring.resume(far.as_fd())?;
        for text in [b"one", b"two"] {
            near.send(text)?;
            let arrived = ring.receive()? == 1 && ring.get(0).is_some_and(|datagram| datagram.bytes == text);
            if !arrived || !ring.is_receiving {
                return Ok(false);
            }
            ring.resume(far.as_fd())?;
        }
        Ok(ring.stop()? == 0 && !ring.is_receiving)
    }

    /// Returns the received buffers to the kernel, and submits the receive request for `socket` if it is not active.
    /// Call it at the start and after each batch is processed, always with the same socket.
    ///
    /// # Errors
    ///
    /// EEXIST: the calling thread did not create the ring. ENOMEM.
    pub fn resume(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.recycle();
        if self.is_receiving {
            return Ok(());
        }
        let socket = Fd(socket.as_raw_fd());
        self.push(&opcode::RecvMsgMulti::new(socket, &raw const *self.header, GROUP).build(), RECEIVE)?;
        // Submitted while the socket is borrowed: in the queue, its descriptor number could come to mean another file.
        let submitted = self.enter();
        self.is_broken |= submitted.is_err();
        self.is_receiving = submitted.is_ok();
        submitted
    }

    /// Returns the number of messages since the last [`resume`](DatagramRing::resume), without waiting. Messages beyond the number of
    /// buffers stay in the socket's queue until the next `resume`.
    ///
    /// # Errors
    ///
    /// The errors of io_uring_enter(2).
    pub fn receive(&mut self) -> io::Result<usize> {
        if self.ring.completion().is_empty() {
            self.enter()?;
        }
        self.collect();
        Ok(self.received.len())
    }

    /// Returns the error with which the request has ended since the last call, except ENOBUFS: no buffer was free. The next
    /// [`resume`](DatagramRing::resume) submits it again.
    pub fn take_failure(&mut self) -> Option<Errno> {
        self.failure.take()
    }

    /// Stops receiving. Replaces the previous messages with messages that are still in buffers, as
    /// [`receive`](DatagramRing::receive) does. Call it until it returns 0; the remaining datagrams are in the socket's
    /// queue.
    ///
    /// # Errors
    ///
    /// EEXIST: the calling thread did not create the ring. TimedOut: the kernel has not ended the request within a
    /// second.
    pub fn stop(&mut self) -> io::Result<usize> {
        self.recycle();
        let begun = Instant::now();
        loop {
            // Cancels before returning messages: under continuous traffic there would always be another message to
            // return.
            if self.is_receiving {
                self.cancel()?;
            }
            self.collect();
            if !self.received.is_empty() || !self.is_receiving {
                return Ok(self.received.len());
            }
            if begun.elapsed() > Duration::from_secs(1) {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// Returns message `index` of the last [`receive`](DatagramRing::receive), or `None` beyond the last message.
    pub fn get(&self, index: usize) -> Option<Datagram<'_>> {
        let received = self.received.get(index)?;
        let start = self.buffers.start(received.buffer);
        // SAFETY: the kernel has written this header and does not write to the buffer until it gets it back. The buffer
        // is aligned to 64 bytes.
        let out = unsafe { start.cast::<RecvmsgHeader>().read() };
        // SAFETY: as above; the address follows the 16 bytes of the header, and the whole space for it was zeroed when the
        // memory was mapped.
        let name = unsafe { &*start.add(size_of::<RecvmsgHeader>()).cast() };
        let mut datagram = Datagram::new(self.bytes(index), out.flags as libc::c_int, name);
        if out.control > 0 {
            let length = (out.control as usize).min(CONTROL);
            // SAFETY: the space for control messages is within the buffer, and all of it was zeroed when the memory was
            // mapped.
            let control =
                unsafe { std::slice::from_raw_parts(start.add(size_of::<RecvmsgHeader>() + NAME), length) };
            read_control(control, &mut datagram);
        }
        Some(datagram)
    }

    /// Iterates over the messages of the last [`receive`](DatagramRing::receive).
    pub fn iter(&self) -> impl Iterator<Item = Datagram<'_>> {
        (0..self.received.len()).filter_map(|index| self.get(index))
    }

    /// Cancels the request and waits up to a second for its last completion.
    fn cancel(&mut self) -> io::Result<()> {
        self.check()?;
        let cancel = opcode::AsyncCancel::new(RECEIVE).build().flags(squeue::Flags::SKIP_SUCCESS);
        self.push(&cancel, CANCEL)?;
        let timeout = Timespec::from(Duration::from_millis(10));
        ring::without_completion(
            self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&timeout)),
        )
    }

    fn recycle(&mut self) {
        while let Some(received) = self.received.pop() {
            self.buffers.give(received.buffer);
        }
    }

    fn collect(&mut self) {
        for completion in self.ring.completion() {
            if completion.user_data() != RECEIVE {
                continue;
            }
            self.is_receiving = cqueue::more(completion.flags());
            match Errno::new(-completion.result()) {
                // No buffer was free, or `cancel` ended the request.
                Errno::ENOBUFS | Errno::ECANCELED => {}
                errno if completion.result() < 0 => self.failure = Some(errno),
                _ => {}
            }
            let Some(buffer) = cqueue::buffer_select(completion.flags()) else { continue };
            match usize::try_from(completion.result()) {
                Ok(length) if (HEAD..=self.buffers.length).contains(&length) => {
                    self.received.push(Received { buffer, length });
                }
                _ => self.buffers.give(buffer),
            }
        }
    }

    /// Submits the queued entries and lets the kernel run pending receive work.
    fn enter(&mut self) -> io::Result<()> {
        self.check()?;
        loop {
            let asked = self.ring.submission().len() as u32;
            let flags = EnterFlags::GETEVENTS.bits();
            // SAFETY: the call takes numbers and no pointers.
            ring::persist(|| unsafe {
                self.ring.submitter().enter::<libc::sigset_t>(asked, 0, flags, None)
            })?;
            if self.ring.submission().is_empty() {
                return Ok(());
            }
        }
    }

    fn check(&self) -> io::Result<()> {
        if self.is_broken { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
    }

    fn push(&mut self, entry: &squeue::Entry, data: u64) -> io::Result<()> {
        let entry = entry.clone().user_data(data);
        // SAFETY: the only pointer in an entry is to `header`, which does not move and lives as long as the ring.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| io::ErrorKind::WouldBlock.into())
    }
}

impl Messages for DatagramRing {
    fn bytes(&self, index: usize) -> &[u8] {
        let Some(received) = self.received.get(index) else { return &[] };
        let start = self.buffers.start(received.buffer);
        // SAFETY: `collect` has checked the number of written bytes against the size of the buffer, and the kernel does
        // not write to the buffer until it gets it back.
        unsafe { std::slice::from_raw_parts(start.add(HEAD), received.length - HEAD) }
    }
}

impl AsFd for DatagramRing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring keeps the descriptor open as long as it lives.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl Drop for DatagramRing {
    /// Discards the packets in buffers. If the request cannot be cancelled (in another thread), the memory of the buffers is leaked,
    /// because the kernel may still write to it.
    fn drop(&mut self) {
        while self.stop().is_ok_and(|left| left > 0) {}
        self.buffers.memory.is_kept = self.is_receiving;
    }
}

/// A mapping with the ring of buffer entries, followed by the buffers.
struct Buffers {
    memory: Mapping,
    number: u16,
    /// Size of a buffer: header and capacity.
    length: usize,
    /// Distance between the starts of two buffers.
    stride: usize,
    /// Offset of the first buffer in the mapping.
    offset: usize,
    tail: u16,
}

impl Buffers {
    fn new(number: u16, capacity: usize) -> io::Result<Buffers> {
        let too_large = || io::Error::from(Errno::ENOMEM);
        let length = HEAD
            .checked_add(capacity)
            .filter(|length| u32::try_from(*length).is_ok())
            .ok_or_else(too_large)?;
        // An odd number of cache lines, so that the starts of buffers are spread over all sets of the cache. Short
        // packets occupy the start of a buffer only.
        let stride = (length.div_ceil(LINE) | 1) * LINE;
        let offset = (usize::from(number) * size_of::<BufRingEntry>()).next_multiple_of(LINE);
        let whole = usize::from(number).checked_mul(stride).and_then(|buffers| buffers.checked_add(offset));
        let memory = Mapping::new(whole.ok_or_else(too_large)?)?;
        Ok(Buffers { memory, number, length, stride, offset, tail: 0 })
    }

    fn start(&self, buffer: u16) -> *mut u8 {
        debug_assert!(buffer < self.number);
        let at = self.offset + usize::from(buffer % self.number) * self.stride;
        // SAFETY: the offset is within the mapping, which was made for this number of buffers.
        unsafe { self.memory.start.as_ptr().add(at) }
    }

    /// Returns a buffer to the kernel.
    fn give(&mut self, buffer: u16) {
        let first: *mut BufRingEntry = self.memory.start.as_ptr().cast();
        let at = usize::from(self.tail % self.number);
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the mapping starts with the ring of entries. The kernel reads only the entries before the tail, and
        // only this value writes entries. The tail is a 16-bit number within the first entry, which no setter changes.
        unsafe {
            let entry = &mut *first.add(at);
            entry.set_addr(self.start(buffer) as u64);
            entry.set_len(self.length as u32);
            entry.set_bid(buffer);
            let tail = AtomicU16::from_ptr(BufRingEntry::tail(first).cast_mut());
            tail.store(self.tail, Ordering::Release);
        }
    }
}

/// Anonymous zeroed memory. The kernel allocates its pages at the first access.
struct Mapping {
    start: NonNull<u8>,
    length: usize,
    /// Whether the memory is leaked instead of unmapped on drop.
    is_kept: bool,
}

impl Mapping {
    fn new(length: usize) -> io::Result<Mapping> {
        let start = shared::map(length, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
        Ok(Mapping { start, length, is_kept: false })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if !self.is_kept {
            // SAFETY: mmap() returned this address for this length, and no reference to the memory exists.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket};
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::datagram::Outgoing;
    use crate::epoll::{Epoll, Interest, Ready};
    use crate::{Errno, option};

    /// Returns a ring, or `None` if io_uring is disabled on this host.
    fn ring(buffers: u16, capacity: usize) -> Option<DatagramRing> {
        match DatagramRing::new(buffers, capacity) {
            Ok(ring) => Some(ring),
            Err(error) => {
                assert!(
                    matches!(Errno::of(&error), Some(Errno::ENOSYS | Errno::EPERM | Errno::EINVAL)),
                    "{error}"
                );
                eprintln!("SKIPPED io_uring: {error}");
                None
            }
        }
    }

    fn pair() -> (UdpSocket, UdpSocket) {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        sender.connect(receiver.local_addr().unwrap()).unwrap();
        (sender, receiver)
    }

    /// Returns the numbers in the payloads of the last messages.
    fn numbers(ring: &DatagramRing) -> impl Iterator<Item = u32> + '_ {
        ring.iter().map(|datagram| u32::from_be_bytes(datagram.bytes.try_into().unwrap()))
    }

    /// Receives until there is a datagram, which a busy host may deliver after send() has returned. Returns the number of datagrams.
    fn received(ring: &mut DatagramRing) -> usize {
        let begun = Instant::now();
        loop {
            let count = ring.receive().unwrap();
            if count > 0 {
                return count;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "nothing is received");
        }
    }

    #[test]
    fn ring_buffers_are_forwarded_without_a_copy() {
        let Some(mut ring) = ring(8, 2048) else { return };
        assert!(DatagramRing::works().unwrap());
        let (sender, router) = pair();
        let target = UdpSocket::bind("127.0.0.1:0").unwrap();
        // Queued datagrams, and an empty datagram, after which the kernel ends the request.
        sender.send(b"one").unwrap();
        ring.resume(router.as_fd()).unwrap();
        let epoll = Epoll::new().unwrap();
        epoll.add(ring.as_fd(), 7, Interest::READ).unwrap();
        let mut ready = [Ready::NONE];
        // The wait may end early, because the kernel interrupts it to receive.
        while epoll.wait(&mut ready, None).unwrap().is_empty() {}
        assert_eq!(ready[0].token(), 7);
        for text in ["", "three"] {
            sender.send(text.as_bytes()).unwrap();
        }
        let mut outgoing = Outgoing::new();
        let mut got = Vec::new();
        let mut there = [0; 100];
        while got.len() < 3 {
            epoll.wait(&mut ready, None).unwrap();
            ring.receive().unwrap();
            outgoing.clear();
            for (index, datagram) in ring.iter().enumerate() {
                assert_eq!(datagram.from(), Some(sender.local_addr().unwrap()));
                outgoing.message(Some(target.local_addr().unwrap()), None);
                outgoing.part(index, 0..datagram.bytes.len());
            }
            assert_eq!(outgoing.send(router.as_fd(), &ring, 0).unwrap(), outgoing.len());
            for _ in 0..outgoing.len() {
                let length = target.recv(&mut there).unwrap();
                got.push(there[..length].to_vec());
            }
            ring.resume(router.as_fd()).unwrap();
        }
        assert_eq!(got, [&b"one"[..], b"", b"three"]);
        assert!(epoll.wait(&mut ready, Some(Duration::ZERO)).unwrap().is_empty());
        assert_eq!((ring.receive().unwrap(), ring.get(0).is_none()), (0, true));
    }

    #[test]
    fn no_packet_is_lost_with_fewer_buffers_than_packets() {
        let Some(mut ring) = ring(4, 64) else { return };
        let (sender, receiver) = pair();
        for number in 0..50_u32 {
            sender.send(&number.to_be_bytes()).unwrap();
        }
        let (mut got, mut ends) = (Vec::new(), 0);
        ring.resume(receiver.as_fd()).unwrap();
        while got.len() < 50 {
            ring.receive().unwrap();
            assert!(ring.received.len() <= 4);
            got.extend(numbers(&ring));
            // The kernel had no buffer for the next datagram (ENOBUFS), which stayed in the queue.
            ends += u32::from(!ring.is_receiving);
            ring.resume(receiver.as_fd()).unwrap();
            assert!(ring.is_receiving || !ring.ring.completion().is_empty());
        }
        assert!(got.into_iter().eq(0..50));
        assert!(ends > 5, "{ends}");
        assert_eq!(ring.receive().unwrap(), 0);
    }

    #[test]
    fn stop_returns_buffered_packets_and_leaves_the_rest_queued() {
        let Some(mut ring) = ring(8, 64) else { return };
        let (sender, receiver) = pair();
        receiver.set_nonblocking(true).unwrap();
        for round in 0..20 {
            ring.resume(receiver.as_fd()).unwrap();
            for number in 0..20_u32 {
                sender.send(&number.to_be_bytes()).unwrap();
                if number == round {
                    // The kernel moves queued packets into buffers; the test does not read them.
                    ring.enter().unwrap();
                }
            }
            let mut got = Vec::new();
            while ring.stop().unwrap() > 0 {
                got.extend(numbers(&ring));
            }
            assert!(got.len() > round.min(7) as usize, "{round}: {got:?}");
            assert!(!ring.is_receiving && ring.ring.completion().is_empty());
            let mut number = [0; 4];
            while receiver.recv(&mut number).is_ok() {
                got.push(u32::from_be_bytes(number));
            }
            assert!(got.into_iter().eq(0..20), "{round}");
        }
    }

    #[test]
    fn stop_ends_under_continuous_packets() {
        let Some(mut ring) = ring(8, 64) else { return };
        let (sender, receiver) = pair();
        ring.resume(receiver.as_fd()).unwrap();
        let mut stops = 0;
        loop {
            // If the request is still active, the kernel receives this datagram before send() returns.
            sender.send(b"more").unwrap();
            if ring.stop().unwrap() == 0 {
                break;
            }
            stops += 1;
            assert!(stops < 10, "it goes on receiving");
        }
    }

    #[test]
    fn control_messages_of_datagrams_are_read() {
        let Some(mut ring) = ring(8, 60) else { return };
        let receiver = UdpSocket::bind("0.0.0.0:0").unwrap();
        option::set_packet_info(receiver.as_fd(), true).unwrap();
        option::set_receive_hops(receiver.as_fd(), true).unwrap();
        let port = receiver.local_addr().unwrap().port();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        option::set_hops(sender.as_fd(), 9).unwrap();
        sender.send_to(&[7; 60], ("127.0.0.7", port)).unwrap();
        sender.send_to(&[7; 61], ("127.0.0.8", port)).unwrap();
        ring.resume(receiver.as_fd()).unwrap();
        ring.receive().unwrap();
        let seen: Vec<_> = ring
            .iter()
            .map(|datagram| (datagram.bytes.len(), datagram.truncated, datagram.arrived_at, datagram.hops))
            .collect();
        let at = |last| Some(Ipv4Addr::new(127, 0, 0, last).into());
        assert_eq!(seen, [(60, false, at(7), Some(9)), (60, true, at(8), Some(9))]);
    }

    #[test]
    fn one_message_may_be_many_datagrams() {
        let Some(mut ring) = ring(8, 65_536) else { return };
        let (sender, receiver) = pair();
        assert_eq!(option::set_udp_gro(receiver.as_fd(), true).unwrap(), option::Answer::Done);
        let (source, router) = pair();
        source.send(&[7; 250]).unwrap();
        let mut batch = crate::datagram::Batch::new(1, 2048);
        assert!(crate::socket::wait_readable(router.as_fd(), None).unwrap());
        assert_eq!(batch.receive(router.as_fd()).unwrap(), 1);
        let mut outgoing = Outgoing::new();
        outgoing.message(None, Some(100));
        outgoing.part(0, 0..250);
        assert_eq!(outgoing.send(sender.as_fd(), &batch, 0).unwrap(), 1);
        let mut bytes = 0;
        while bytes < 250 {
            ring.resume(receiver.as_fd()).unwrap();
            ring.receive().unwrap();
            for datagram in ring.iter() {
                assert!(datagram.segment.is_none_or(|segment| segment == 100), "{datagram:?}");
                bytes += datagram.bytes.len();
            }
        }
        assert_eq!(bytes, 250);
    }

    #[test]
    fn a_packet_wakes_a_waiting_epoll() {
        let Some(mut ring) = ring(64, 64) else { return };
        let (sender, receiver) = pair();
        ring.resume(receiver.as_fd()).unwrap();
        let epoll = Epoll::new().unwrap();
        epoll.add(ring.as_fd(), 7, Interest::READ).unwrap();
        let (ask, asked) = mpsc::channel::<u32>();
        let sending = thread::spawn(move || {
            asked.iter().for_each(|number| {
                // By then the other thread sleeps in most runs.
                thread::sleep(Duration::from_millis(1));
                sender.send(&number.to_be_bytes()).unwrap();
            })
        });
        let mut ready = [Ready::NONE];
        for number in 0..100 {
            ask.send(number).unwrap();
            let begun = Instant::now();
            // The wait may end early, because the kernel interrupts it to receive.
            while epoll.wait(&mut ready, Some(Duration::from_secs(60))).unwrap().is_empty() {
                assert!(begun.elapsed() < Duration::from_secs(60), "no packet {number}");
            }
            ring.receive().unwrap();
            assert!(numbers(&ring).eq([number]));
            ring.resume(receiver.as_fd()).unwrap();
        }
        drop(ask);
        sending.join().unwrap();
    }

    #[test]
    fn only_the_thread_that_created_the_ring_may_use_it() {
        let Some(mut ring) = ring(8, 64) else { return };
        let (sender, receiver) = pair();
        ring.resume(receiver.as_fd()).unwrap();
        // Another thread can still drop the ring, and later datagrams to the socket do no harm.
        let elsewhere = thread::spawn(move || {
            let refused = ring.stop().unwrap_err().raw_os_error();
            (refused, ring.is_receiving)
        });
        assert_eq!(elsewhere.join().unwrap(), (Some(libc::EEXIST), true));
        sender.send(b"x").unwrap();
    }

    #[test]
    fn buffers_larger_than_the_address_space_are_refused() {
        // Sizes that would overflow without checks: the header size wraps, or a buffer exceeds the 32-bit length of its
        // entry.
        for capacity in [usize::MAX, usize::MAX - HEAD, u32::MAX as usize, u32::MAX as usize - HEAD + 1] {
            let error = Buffers::new(32_768, capacity).err().unwrap();
            assert_eq!(Errno::of(&error), Some(Errno::ENOMEM), "{capacity}");
        }
    }

    #[test]
    fn a_ring_that_could_not_submit_stays_broken() {
        let Some(mut ring) = ring(8, 64) else { return };
        let (_, receiver) = pair();
        let (mut ring, receiver) = thread::spawn(move || {
            let error = ring.resume(receiver.as_fd()).unwrap_err();
            assert_eq!(Errno::of(&error), Some(Errno::EEXIST));
            (ring, receiver)
        })
        .join()
        .unwrap();
        // The queued request names the receiver's descriptor number, which may be reused by now.
        drop(receiver);
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        for error in [ring.resume(other.as_fd()).unwrap_err(), ring.receive().unwrap_err()] {
            assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        }
    }

    /// The kernel holds the file of an active request, so neither the end of the caller's descriptor nor its number matters.
    #[test]
    fn a_ring_keeps_its_socket_when_the_caller_closes_it() {
        let Some(mut ring) = ring(8, 64) else { return };
        let (sender, receiver) = pair();
        let (other_sender, other) = pair();
        ring.resume(receiver.as_fd()).unwrap();
        let number = receiver.as_raw_fd();
        // SAFETY: dup3() takes numbers. It closes the receiver's descriptor and makes its number mean the other socket; `receiver` owns the
        // number from now on.
        assert_eq!(unsafe { libc::dup3(other.as_raw_fd(), number, libc::O_CLOEXEC) }, number);
        for text in [b"one", b"two"] {
            other_sender.send(b"other").unwrap();
            sender.send(text).unwrap();
            assert_eq!(received(&mut ring), 1);
            assert_eq!(ring.get(0).unwrap().bytes, text);
            // The request is active, so the ring uses no descriptor.
            ring.resume(receiver.as_fd()).unwrap();
        }
        drop(receiver);
        sender.send(b"last").unwrap();
        assert_eq!(received(&mut ring), 1);
        assert_eq!(ring.get(0).unwrap().bytes, b"last");
        while ring.stop().unwrap() > 0 {}
        drop(ring);
        let mut buffer = [0; 8];
        other.set_nonblocking(true).unwrap();
        for _ in 0..2 {
            assert_eq!(other.recv(&mut buffer).unwrap(), 5);
        }
        assert_eq!(other.recv(&mut buffer).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn an_error_ends_the_request_and_is_reported_once() {
        let Some(mut ring) = ring(4, 64) else { return };
        let far = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = far.local_addr().unwrap();
        // An ICMP error for a datagram to a port without a socket. A child of another test may have a copy of a socket that was closed.
        let at = (Ipv4Addr::new(127, 0, 0, 77), to.port());
        far.connect(at).unwrap();
        ring.resume(far.as_fd()).unwrap();
        far.send(b"x").unwrap();
        let begun = Instant::now();
        while ring.failure.is_none() {
            assert_eq!(ring.receive().unwrap(), 0);
            assert!(begun.elapsed() < Duration::from_secs(60), "no error");
        }
        assert_eq!((ring.take_failure(), ring.take_failure()), (Some(Errno::ECONNREFUSED), None));
        ring.resume(far.as_fd()).unwrap();
        let near = UdpSocket::bind(at).unwrap();
        near.send_to(b"y", to).unwrap();
        while ring.receive().unwrap() == 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "nothing is received");
        }
        assert_eq!(ring.take_failure(), None);
        assert_eq!(ring.get(0).unwrap().bytes, b"y");
    }
}
