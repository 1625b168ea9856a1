//! Direct calls of bpf(2) for SK_REUSEPORT programs, a type that aya does not support, for XDP programs, and to find out
//! whether an object exists.

use std::ffi::CStr;
use std::io;
use std::marker::PhantomData;
use std::mem;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::thread;
use std::time::Duration;

use fourtuple_syscalls::{Errno, option, signals};

use crate::error::BpfError;

/// Pauses before BPF_PROG_LOAD is repeated double up to this one: one second together.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// The call that creates a map, for errors.
pub(crate) const CREATE_MAP: &str = "bpf(BPF_MAP_CREATE)";

/// Commands of bpf(2) (enum bpf_cmd).
const MAP_CREATE: libc::c_long = 0;
const MAP_UPDATE_ELEM: libc::c_long = 2;
const MAP_DELETE_ELEM: libc::c_long = 3;
const PROG_LOAD: libc::c_long = 5;
const PROG_TEST_RUN: libc::c_long = 10;
const PROG_GET_FD_BY_ID: libc::c_long = 13;
const MAP_GET_FD_BY_ID: libc::c_long = 14;
const OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const LINK_CREATE: libc::c_long = 28;
const LINK_GET_FD_BY_ID: libc::c_long = 30;
const ITER_CREATE: libc::c_long = 33;

/// Type and attach type of a program (enum bpf_prog_type, enum bpf_attach_type).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProgramKind {
    program: u32,
    attach: u32,
    /// The function of an iterator in the type information of the kernel (BTF).
    function: u32,
}

impl ProgramKind {
    /// Returns the kind of an iterator: BPF_PROG_TYPE_TRACING attached as BPF_TRACE_ITER (Linux 5.8) to a function.
    pub(crate) fn iterator(function: u32) -> ProgramKind {
        ProgramKind { program: 26, attach: TRACE_ITER, function }
    }
}

const TRACE_ITER: u32 = 28;

/// BPF_PROG_TYPE_SK_REUSEPORT (Linux 4.19) attached as BPF_SK_REUSEPORT_SELECT_OR_MIGRATE (Linux 5.14): the kernel also
/// runs it when a listener is closed.
pub(crate) const CHOOSES_SOCKETS: ProgramKind = ProgramKind { program: 21, attach: 40, function: 0 };
/// Kind of an XDP program (BPF_PROG_TYPE_XDP).
pub(crate) const SEES_PACKETS: ProgramKind = ProgramKind { program: 6, attach: 37, function: 0 };
/// Socket option SO_ATTACH_REUSEPORT_EBPF.
const ATTACH_REUSEPORT_EBPF: libc::c_int = 52;

/// The map types that this crate uses (enum bpf_map_type).
#[derive(Clone, Copy)]
#[repr(u32)]
pub(crate) enum MapKind {
    Array = 2,
    /// BPF_MAP_TYPE_CPUMAP (Linux 4.15): a queue and a thread for each processor that has an entry.
    Processors = 16,
    /// BPF_MAP_TYPE_REUSEPORT_SOCKARRAY (Linux 4.19): the kernel removes a socket from the map when it is closed.
    Sockets = 20,
}

/// Map flag BPF_F_MMAPABLE (Linux 5.5).
const MMAPABLE: u32 = 1 << 10;

// The attributes are the head of union bpf_attr (include/uapi/linux/bpf.h), as long as the last field that is set; the
// kernel treats the rest as zero. No attribute has a hole, because the kernel requires zeroes in holes too.

#[repr(C)]
struct MapCreate {
    kind: u32,
    key_size: u32,
    value_size: u32,
    entries: u32,
    flags: u32,
    inner: u32,
    node: u32,
    name: [u8; 16],
}

#[repr(C)]
struct MapElement {
    map: u32,
    hole: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct ProgramLoad {
    kind: u32,
    instructions: u32,
    code: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    device: u32,
    attach: u32,
    /// Debug information of the program: none.
    debug: [u32; 9],
    function: u32,
}

#[derive(Default)]
#[repr(C)]
struct TestRun {
    program: u32,
    result: u32,
    data_in_size: u32,
    data_out_size: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    context_in_size: u32,
    context_out_size: u32,
    context_in: u64,
    context_out: u64,
}

/// An object by its id.
#[repr(C)]
struct ByNumber {
    number: u32,
    next: u32,
    flags: u32,
}

/// The kinds of BPF objects that have an id.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ObjectKind {
    Program,
    Map,
    /// A BPF link (Linux 5.8).
    Link,
}

impl ObjectKind {
    fn command(self) -> libc::c_long {
        match self {
            ObjectKind::Program => PROG_GET_FD_BY_ID,
            ObjectKind::Map => MAP_GET_FD_BY_ID,
            ObjectKind::Link => LINK_GET_FD_BY_ID,
        }
    }

    /// Returns the name of the call for errors.
    pub(crate) fn call(self) -> &'static str {
        match self {
            ObjectKind::Program => "bpf(BPF_PROG_GET_FD_BY_ID)",
            ObjectKind::Map => "bpf(BPF_MAP_GET_FD_BY_ID)",
            ObjectKind::Link => "bpf(BPF_LINK_GET_FD_BY_ID)",
        }
    }
}

#[repr(C)]
struct InfoByDescriptor {
    object: u32,
    /// Size of the buffer in bytes; the kernel sets it to the number of bytes that it wrote.
    length: u32,
    info: u64,
}

/// The head of struct bpf_prog_info (include/uapi/linux/bpf.h), up to the last field that this crate reads.
#[repr(C)]
struct ProgramInfo {
    kind: u32,
    id: u32,
    before: [u64; 25],
    recursion_misses: u64,
}

#[repr(C)]
struct LinkCreate {
    program: u32,
    device: u32,
    attach: u32,
    flags: u32,
}

#[repr(C)]
struct IterCreate {
    link: u32,
    flags: u32,
}

/// # Safety
///
/// `A` is the head of union bpf_attr for `command`, without holes, and its pointers are valid for the lengths that the
/// command reads and writes until the call returns.
unsafe fn bpf<A>(command: libc::c_long, attribute: &mut A) -> io::Result<libc::c_int> {
    let size = mem::size_of::<A>() as libc::c_long;
    // SAFETY: the attribute is readable and writable for its size; of what it points to the caller answers.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, ptr::from_mut(attribute), size) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result as libc::c_int) }
}

fn owned(descriptor: libc::c_int) -> OwnedFd {
    // SAFETY: the kernel has just created the descriptor for this call, and no other code owns it.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}

/// Returns at most 15 bytes of a name: letters, digits, `_` and `.`.
fn object_name(name: &str) -> [u8; 16] {
    let mut field = [0; 16];
    let length = name.len().min(15);
    field[..length].copy_from_slice(&name.as_bytes()[..length]);
    field
}

/// Creates a map with keys of type u32. Its descriptor has FD_CLOEXEC, like all descriptors from bpf(2).
pub(crate) fn create_map(
    kind: MapKind,
    value_size: usize,
    entries: usize,
    flags: u32,
    name: &str,
) -> io::Result<OwnedFd> {
    let mut attribute = MapCreate {
        kind: kind as u32,
        key_size: 4,
        value_size: value_size as u32,
        entries: entries as u32,
        flags,
        inner: 0,
        node: 0,
        name: object_name(name),
    };
    // SAFETY: this is what BPF_MAP_CREATE reads, and it has no pointers.
    unsafe { bpf(MAP_CREATE, &mut attribute) }.map(owned)
}

/// Creates a map of sockets.
pub(crate) fn create_socket_map(entries: usize, name: &str) -> Result<OwnedFd, BpfError> {
    create_map(MapKind::Sockets, 8, entries, 0, name)
        .map_err(|source| BpfError::or_absent(CREATE_MAP, "REUSEPORT_SOCKARRAY (Linux 4.19)", source))
}

/// Puts a socket into a map of sockets and replaces the previous socket.
pub(crate) fn put_socket(map: BorrowedFd<'_>, key: u32, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
    put(map, key, socket.as_raw_fd() as u64)
        .map_err(|source| BpfError::of("bpf(BPF_MAP_UPDATE_ELEM)", source))
}

/// Puts a number into a map whose values have 8 bytes, or 4 bytes if the number fits.
pub(crate) fn put(map: BorrowedFd<'_>, key: u32, value: u64) -> io::Result<()> {
    let mut attribute = MapElement {
        map: map.as_raw_fd() as u32,
        hole: 0,
        key: ptr::from_ref(&key) as u64,
        value: ptr::from_ref(&value) as u64,
        flags: 0,
    };
    // SAFETY: this is what BPF_MAP_UPDATE_ELEM reads; key and value have the sizes that the maps of this crate are made
    // with, and outlive the call.
    unsafe { bpf(MAP_UPDATE_ELEM, &mut attribute) }.map(drop)
}

/// Removes a socket from a map of sockets, if it is there: the kernel removes a socket when it is closed.
pub(crate) fn take_socket(map: BorrowedFd<'_>, key: u32) -> Result<(), BpfError> {
    let mut attribute = MapElement {
        map: map.as_raw_fd() as u32,
        hole: 0,
        key: ptr::from_ref(&key) as u64,
        value: 0,
        flags: 0,
    };
    // SAFETY: this is what BPF_MAP_DELETE_ELEM reads; the key has the size that the maps of this crate are made with, and
    // outlives the call.
    match unsafe { bpf(MAP_DELETE_ELEM, &mut attribute) } {
        Err(error) if Errno::of(&error) != Some(Errno::ENOENT) => {
            Err(BpfError::of("bpf(BPF_MAP_DELETE_ELEM)", error))
        }
        _ => Ok(()),
    }
}

/// Starts a pass of an iterator, in the calling thread's namespaces. Reads of the descriptor return what the program writes.
pub(crate) fn iterate(link: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut attribute = IterCreate { link: link.as_raw_fd() as u32, flags: 0 };
    // SAFETY: this is what BPF_ITER_CREATE reads, and it has no pointers.
    unsafe { bpf(ITER_CREATE, &mut attribute) }.map(owned)
}

/// Returns a descriptor of the object with this id. ENOENT: there is no such object.
pub(crate) fn object_by_number(kind: ObjectKind, number: u32) -> io::Result<OwnedFd> {
    let mut attribute = ByNumber { number, next: 0, flags: 0 };
    // SAFETY: this is what the BPF_*_GET_FD_BY_ID commands read, and it has no pointers.
    unsafe { bpf(kind.command(), &mut attribute) }.map(owned)
}

/// Returns how often the kernel skipped this program because it was already running on that processor. The kernel counts this
/// for tracing programs since Linux 5.12 and for tracepoints since Linux 6.1; older kernels return 0.
pub(crate) fn recursion_misses(program: BorrowedFd<'_>) -> io::Result<u64> {
    info(program).map(|info| info.recursion_misses)
}

pub(crate) fn program_id(program: BorrowedFd<'_>) -> io::Result<u32> {
    info(program).map(|info| info.id)
}

fn info(program: BorrowedFd<'_>) -> io::Result<ProgramInfo> {
    let mut info = ProgramInfo { kind: 0, id: 0, before: [0; 25], recursion_misses: 0 };
    let mut attribute = InfoByDescriptor {
        object: program.as_raw_fd() as u32,
        length: mem::size_of_val(&info) as u32,
        info: ptr::from_mut(&mut info) as u64,
    };
    // SAFETY: this is what BPF_OBJ_GET_INFO_BY_FD reads. It writes the length into it and at most `length` bytes into
    // `info`, whose zeroes ask for no arrays; both outlive the call.
    unsafe { bpf(OBJ_GET_INFO_BY_FD, &mut attribute) }?;
    Ok(info)
}

/// Loads a program. If `log` is not empty, the verifier writes its log there, terminated by NUL.
pub(crate) fn load(
    kind: ProgramKind,
    name: &str,
    license: &CStr,
    code: &[[u8; 8]],
    log: &mut [u8],
) -> io::Result<OwnedFd> {
    let has_log = !log.is_empty();
    let mut attribute = ProgramLoad {
        kind: kind.program,
        instructions: code.len() as u32,
        code: code.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log_level: u32::from(has_log),
        log_size: log.len() as u32,
        log: if has_log { log.as_mut_ptr() as u64 } else { 0 },
        kernel_version: 0,
        flags: 0,
        name: object_name(name),
        device: 0,
        attach: kind.attach,
        debug: [0; 9],
        function: kind.function,
    };
    let mut pause = Duration::from_millis(1);
    loop {
        // The verifier gives up if a signal is pending (`signal_pending` in `do_check`), which a profiler sends more often than a load ends.
        let mask = signals::block_all()?;
        // SAFETY: this is what BPF_PROG_LOAD reads; instructions, licence and log are as long as it says, the log is
        // writable, and all outlive the call.
        let loaded = unsafe { bpf(PROG_LOAD, &mut attribute) }.map(owned);
        mask.restore()?;
        match loaded {
            // Other pending work of this thread has the same effect: the end of an io_uring that the thread has just closed, which a
            // kernel worker may take long to complete.
            Err(error) if Errno::of(&error) == Some(Errno::EAGAIN) && pause < MAX_PAUSE => {
                thread::sleep(pause);
                pause *= 2;
            }
            result => return result,
        }
    }
}

/// Attaches the program to the socket's group with SO_ATTACH_REUSEPORT_EBPF.
pub(crate) fn attach(socket: BorrowedFd<'_>, program: BorrowedFd<'_>) -> Result<(), BpfError> {
    option::set_int(socket, libc::SOL_SOCKET, ATTACH_REUSEPORT_EBPF, program.as_raw_fd())
        .map_err(|source| BpfError::of("setsockopt(SO_ATTACH_REUSEPORT_EBPF)", source))
}

/// Runs a program of a raw tracepoint in this thread, with one argument (Linux 5.10).
pub(crate) fn run(program: BorrowedFd<'_>, argument: u64) -> io::Result<()> {
    let context = [argument];
    let mut attribute = TestRun {
        program: program.as_raw_fd() as u32,
        context_in_size: mem::size_of_val(&context) as u32,
        context_in: context.as_ptr() as u64,
        ..TestRun::default()
    };
    // SAFETY: this is what BPF_PROG_TEST_RUN reads, and it writes the result of the program into it; the context is as long as
    // it says, and both outlive the call.
    unsafe { bpf(PROG_TEST_RUN, &mut attribute) }.map(drop)
}

/// Attaches an XDP program with BPF_LINK_CREATE (Linux 5.9) until the last descriptor of the link is closed. `device` is the
/// index of the device in the network namespace of the calling thread.
pub(crate) fn link(program: BorrowedFd<'_>, device: u32, flags: u32) -> io::Result<OwnedFd> {
    let mut attribute =
        LinkCreate { program: program.as_raw_fd() as u32, device, attach: SEES_PACKETS.attach, flags };
    // SAFETY: this is what BPF_LINK_CREATE reads, and it has no pointers.
    unsafe { bpf(LINK_CREATE, &mut attribute) }.map(owned)
}

/// Makes an iterator of a program with BPF_LINK_CREATE (Linux 5.8).
pub(crate) fn link_iterator(program: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut attribute =
        LinkCreate { program: program.as_raw_fd() as u32, device: 0, attach: TRACE_ITER, flags: 0 };
    // SAFETY: this is what BPF_LINK_CREATE reads, and it has no pointers.
    unsafe { bpf(LINK_CREATE, &mut attribute) }.map(owned)
}

/// Runs a program on this packet with BPF_PROG_TEST_RUN. Returns the result of the program and the packet after it.
#[cfg(test)]
pub(crate) fn run_on_packet(program: BorrowedFd<'_>, packet: &[u8]) -> io::Result<(u32, Vec<u8>)> {
    let mut out = vec![0_u8; packet.len()];
    let mut attribute = TestRun {
        program: program.as_raw_fd() as u32,
        data_in_size: packet.len() as u32,
        data_out_size: out.len() as u32,
        data_in: packet.as_ptr() as u64,
        data_out: out.as_mut_ptr() as u64,
        repeat: 1,
        ..TestRun::default()
    };
    // SAFETY: this is what BPF_PROG_TEST_RUN reads and writes; both buffers are as long as it says and outlive the call.
    unsafe { bpf(PROG_TEST_RUN, &mut attribute) }?;
    out.truncate(attribute.data_out_size as usize);
    Ok((attribute.result, out))
}

/// A type that the kernel, BPF programs and forked processes may change at any time.
///
/// # Safety
///
/// All fields are atomics or never read; zeroes and any other bytes are a valid value.
pub(crate) unsafe trait AllAtomic: Sync {}

/// The mapped value of a map with [`MMAPABLE`]. Forked children share it.
#[derive(Debug)]
pub(crate) struct Shared<T: AllAtomic> {
    value: NonNull<T>,
    owns: PhantomData<T>,
}

// SAFETY: it gives out `&T` alone, which AllAtomic makes Sync; the mapping belongs to the process, not to a thread.
unsafe impl<T: AllAtomic> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: AllAtomic> Sync for Shared<T> {}

impl<T: AllAtomic> Shared<T> {
    /// Creates an array of one value, all zeroes, and maps the value. Returns the array too.
    pub(crate) fn create(name: &str) -> Result<(OwnedFd, Shared<T>), BpfError> {
        let array = create_map(MapKind::Array, mem::size_of::<T>(), 1, MMAPABLE, name)
            .map_err(|source| BpfError::or_absent(CREATE_MAP, "BPF_F_MMAPABLE (Linux 5.5)", source))?;
        let value = Shared::map(array.as_fd())?;
        Ok((array, value))
    }

    /// Maps the only value of the array.
    pub(crate) fn map(array: BorrowedFd<'_>) -> Result<Shared<T>, BpfError> {
        Shared::try_map(array).map_err(|source| BpfError::of("mmap of a BPF array", source))
    }

    fn try_map(array: BorrowedFd<'_>) -> io::Result<Shared<T>> {
        // SAFETY: a mapping at an address of the kernel's choice touches no memory in use.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                mem::size_of::<T>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                array.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let value = NonNull::new(start.cast::<T>()).ok_or_else(|| io::Error::from(Errno::EFAULT))?;
        Ok(Shared { value, owns: PhantomData })
    }
}

impl<T: AllAtomic> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the mapping is page-aligned, as long as a T, and stays until drop; the kernel refuses to map more pages
        // than the array has. AllAtomic allows others to write meanwhile.
        unsafe { self.value.as_ref() }
    }
}

impl<T: AllAtomic> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that was made above, and no reference outlives self.
        unsafe { libc::munmap(self.value.as_ptr().cast(), mem::size_of::<T>()) };
    }
}

/// The numbers of system calls in the BPF programs, which have no header of the kernel: each must be the number of the C library. The
/// programs have the numbers of x86-64 first, then those of arm64; each is compared where the tests run.
#[cfg(all(test, any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests {
    use super::*;

    /// Returns the part of a source with the numbers of this architecture: `parts` are divided by `divider`, that of x86-64 first.
    fn of_this_architecture<'a>(source: &'a str, function: &str, divider: &str) -> &'a str {
        let (_, body) = source.split_once(function).expect("the function is in the source");
        let (body, _) = body.split_once("\n}\n").expect("a function ends");
        let mut parts = body.split(divider).skip(1);
        let part = if cfg!(target_arch = "x86_64") { parts.next() } else { parts.nth(1) };
        part.expect("both architectures have a part")
    }

    /// Returns the numbers that follow a text, sorted.
    fn numbers(text: &str, before: &str) -> Vec<libc::c_long> {
        let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>();
        let found = text.split(before).skip(1).map(|rest| digits(rest).parse().expect("a number"));
        sorted(found.collect())
    }

    fn sorted(mut numbers: Vec<libc::c_long>) -> Vec<libc::c_long> {
        numbers.sort_unstable();
        numbers
    }

    #[test]
    fn accepts_and_waits_have_the_numbers_of_libc() {
        let source = include_str!("current.h");
        let calls = |function| numbers(of_this_architecture(source, function, "return "), "call == ");
        assert_eq!(calls("INLINE int is_accept("), sorted(vec![libc::SYS_accept, libc::SYS_accept4]));
        let waits = vec![
            libc::SYS_epoll_pwait,
            libc::SYS_epoll_pwait2,
            libc::SYS_ppoll,
            libc::SYS_pselect6,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_epoll_wait,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_poll,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_select,
        ];
        assert_eq!(calls("INLINE int is_wait("), sorted(waits));
    }

    #[test]
    fn failed_calls_have_the_numbers_of_libc() {
        let source = include_str!("failed_calls.bpf.c");
        let calls = of_this_architecture(source, "INLINE u32 call_kind(", "switch (call)");
        for (kind, wanted) in [
            ("SOCKET", vec![libc::SYS_socket]),
            ("CONNECT", vec![libc::SYS_connect]),
            ("ACCEPT", vec![libc::SYS_accept, libc::SYS_accept4]),
            ("BIND", vec![libc::SYS_bind]),
            ("LISTEN_", vec![libc::SYS_listen]),
            ("SO_ERROR_", vec![libc::SYS_getsockopt]),
            (
                "SEND",
                vec![
                    libc::SYS_write,
                    libc::SYS_writev,
                    libc::SYS_sendfile,
                    libc::SYS_sendto,
                    libc::SYS_sendmsg,
                    libc::SYS_sendmmsg,
                ],
            ),
            (
                "RECV",
                vec![
                    libc::SYS_read,
                    libc::SYS_readv,
                    libc::SYS_recvfrom,
                    libc::SYS_recvmsg,
                    libc::SYS_recvmmsg,
                ],
            ),
        ] {
            let line = calls.lines().find(|line| line.ends_with(&format!("return {kind};")));
            assert_eq!(numbers(line.expect(kind), "case "), sorted(wanted), "{kind}");
        }
    }

    #[test]
    fn epoll_ctl_has_the_number_and_the_layout_of_libc() {
        let source = include_str!("fix_rotate.bpf.c");
        let of_this = |function: &str| {
            let (_, body) = source.split_once(function).expect("the function is in the source");
            let (_, choice) = body.split_once("IS_THERE(registers->orig_ax) ? ").expect("a choice");
            let (x86_64, others) = choice.split_once(" : ").expect("two values");
            let text = if cfg!(target_arch = "x86_64") { x86_64 } else { others };
            text.chars()
                .take_while(char::is_ascii_digit)
                .collect::<String>()
                .parse::<usize>()
                .expect("a number")
        };
        assert_eq!(of_this("INLINE int is_epoll_ctl("), libc::SYS_epoll_ctl as usize);
        assert_eq!(of_this("INLINE void read_event("), mem::offset_of!(libc::epoll_event, u64));
    }
}
