//! The library of `fourtuple run --via preload`: wraps socket(2), connect(2), bind(2) and getsockname(2) of the C library.
//!
//! `build.rs` compiles this file into a shared object that needs only libc, and `fourtuple` contains the object. The wrappers do not
//! allocate, take no lock and preserve errno. They read no memory of the program, so that a bad pointer still gives EFAULT. All
//! state is in the socket itself: the value of IP_LOCAL_PORT_RANGE tells a socket of `run`, also after dup(2), fork(2), execve(2) and
//! SCM_RIGHTS.
#![no_std]

#[path = "abi.rs"]
mod abi;
#[path = "../src/run/layout.rs"]
mod layout;

use core::ffi::{CStr, c_char, c_int, c_long, c_void};
use core::mem;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use abi::*;
use layout::*;

const SIZE: usize = COUNTERS * mem::size_of::<AtomicU64>();

#[repr(C)]
struct Timespec {
    seconds: c_long,
    nanoseconds: c_long,
}

/// Buffer for the address of an IP socket.
#[repr(C, align(8))]
struct Address([u8; 32]);

type Socket = extern "C" fn(c_int, c_int, c_int) -> c_int;
type Connect = extern "C" fn(c_int, *const c_void, u32) -> c_int;
type Name = extern "C" fn(c_int, *mut c_void, *mut u32) -> c_int;

// SAFETY: the declarations agree with the C library.
#[link(name = "c")]
unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn __errno_location() -> *mut c_int;
    fn getsockopt(socket: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut u32) -> c_int;
    fn setsockopt(socket: c_int, level: c_int, name: c_int, value: *const c_void, length: u32) -> c_int;
    fn clock_gettime(clock: c_int, time: *mut Timespec) -> c_int;
    fn getenv(name: *const c_char) -> *const c_char;
    fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    fn close(descriptor: c_int) -> c_int;
    fn lseek(descriptor: c_int, offset: c_long, whence: c_int) -> c_long;
    fn readlink(path: *const c_char, target: *mut c_char, length: usize) -> isize;
    fn fcntl(descriptor: c_int, command: c_int, ...) -> c_int;
    fn mmap(
        address: *mut c_void,
        length: usize,
        protection: c_int,
        flags: c_int,
        descriptor: c_int,
        offset: c_long,
    ) -> *mut c_void;
    fn abort() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: abort() takes nothing. No code of this file panics.
    unsafe { abort() }
}

/// The counters of `run`; null if there are none.
static SHARED: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());

/// The next definition of a function after this library, in the C library or another preloaded library.
struct Next {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Next {
        Next { name, address: AtomicPtr::new(ptr::null_mut()) }
    }

    fn get(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        const RTLD_NEXT: *mut c_void = -1isize as *mut c_void;
        // SAFETY: the name ends in NUL. The C library defines all four functions, so the result is not null.
        let found = unsafe { dlsym(RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

static SOCKET: Next = Next::new(c"socket");
static CONNECT: Next = Next::new(c"connect");
static BIND: Next = Next::new(c"bind");
static NAME: Next = Next::new(c"getsockname");

fn next_connect() -> Connect {
    // SAFETY: the address is the address of connect(), which has this signature.
    unsafe { mem::transmute::<*mut c_void, Connect>(CONNECT.get()) }
}

fn next_bind() -> Connect {
    // SAFETY: the address is the address of bind(), which has the signature of connect().
    unsafe { mem::transmute::<*mut c_void, Connect>(BIND.get()) }
}

fn next_name() -> Name {
    // SAFETY: the address is the address of getsockname(), which has this signature.
    unsafe { mem::transmute::<*mut c_void, Name>(NAME.get()) }
}

/// Runs when the library is loaded, while the process has one thread: resolves the functions, since dlsym(3) must not be called in
/// a signal handler, and maps the counters.
extern "C" fn initialise() {
    for next in [&SOCKET, &CONNECT, &BIND, &NAME] {
        next.get();
    }
    // SAFETY: the name ends in NUL; no other thread changes the environment yet.
    let path = unsafe { getenv(c"FOURTUPLE_RUN_COUNTERS".as_ptr()) };
    if path.is_null() {
        return;
    }
    let errno = errno();
    // SAFETY: the path is a string of the environment. The descriptor is used and closed here only. The mapping is at an address of
    // the kernel's choice, and is kept until the process ends.
    unsafe {
        let file = if is_counters(path) { open(path, O_RDWR | O_CLOEXEC) } else { -1 };
        if file >= 0 {
            // Access beyond the end of the file would be SIGBUS.
            let has_size = lseek(file, 0, SEEK_END) >= SIZE as c_long;
            if has_size && fcntl(file, F_GET_SEALS) & SEALS == SEALS {
                let address = mmap(ptr::null_mut(), SIZE, PROT_READ_WRITE, MAP_SHARED, file, 0);
                if address as isize != -1 {
                    SHARED.store(address.cast(), Ordering::Release);
                }
            }
            close(file);
        }
    }
    set_errno(errno);
}

/// Returns whether the path leads to counters of `run`, before it is opened: the process whose descriptor it names may have ended, and
/// its number may belong to another process.
///
/// # Safety
///
/// The path is a string that ends in NUL.
unsafe fn is_counters(path: *const c_char) -> bool {
    const NAME: &[u8] = b"/memfd:fourtuple-counters";
    let mut target = [0u8; NAME.len()];
    // SAFETY: the caller passes a string; the buffer has this many bytes.
    let length = unsafe { readlink(path, target.as_mut_ptr().cast(), target.len()) };
    length == NAME.len() as isize && target == NAME
}

#[used]
#[unsafe(link_section = ".init_array")]
static INITIALISE: extern "C" fn() = initialise;

fn errno() -> c_int {
    // SAFETY: the C library returns a valid pointer to the errno of this thread.
    unsafe { *__errno_location() }
}

fn set_errno(value: c_int) {
    // SAFETY: as above.
    unsafe { *__errno_location() = value }
}

fn add(counter: usize, number: u64) {
    let first = SHARED.load(Ordering::Acquire);
    if !first.is_null() && counter < COUNTERS {
        // SAFETY: the mapping holds COUNTERS numbers and is never unmapped.
        unsafe { &*first.add(counter) }.fetch_add(number, Ordering::Relaxed);
    }
}

fn now() -> u64 {
    let mut time = Timespec { seconds: 0, nanoseconds: 0 };
    // SAFETY: the pointer is to a writable timespec.
    unsafe { clock_gettime(CLOCK_MONOTONIC, &raw mut time) };
    time.seconds as u64 * 1_000_000_000 + time.nanoseconds as u64
}

/// Returns an option of 4 bytes.
fn get(socket: c_int, level: c_int, name: c_int) -> Option<u32> {
    let mut value = 0u32;
    let mut length = 4u32;
    // SAFETY: the pointers are to 4 writable bytes, and their number.
    let result = unsafe { getsockopt(socket, level, name, (&raw mut value).cast(), &raw mut length) };
    (result == 0 && length == 4).then_some(value)
}

fn set(socket: c_int, name: c_int, value: u32) -> bool {
    // SAFETY: pointer and length describe one number.
    unsafe { setsockopt(socket, IPPROTO_IP, name, (&raw const value).cast(), 4) == 0 }
}

/// Returns the address of an IP socket, its length and its port.
fn local_address(socket: c_int) -> Option<(Address, u32, u16)> {
    let mut address = Address([0; 32]);
    let mut length = 32u32;
    if next_name()(socket, (&raw mut address).cast(), &raw mut length) != 0 {
        return None;
    }
    let family = c_int::from(u16::from_ne_bytes([address.0[0], address.0[1]]));
    let port = u16::from_be_bytes([address.0[2], address.0[3]]);
    (family == AF_INET || family == AF_INET6).then_some((address, length, port))
}

/// Gives a socket whose port is not chosen yet the port that bind() would have given it.
fn choose_port(socket: c_int) {
    if get(socket, IPPROTO_IP, IP_LOCAL_PORT_RANGE) != Some(DEFERRED) {
        return;
    }
    let Some((address, length, 0)) = local_address(socket) else { return };
    set(socket, IP_BIND_ADDRESS_NO_PORT, 0);
    if next_bind()(socket, (&raw const address).cast(), length) == 0 {
        set(socket, IP_LOCAL_PORT_RANGE, SEARCH);
        add(NAMED, 1);
    } else {
        set(socket, IP_BIND_ADDRESS_NO_PORT, 1);
    }
}

/// Wraps socket(2): the kernel will search the whole range for the port of a TCP socket.
#[unsafe(no_mangle)]
extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: the address is the address of socket(), which has this signature.
    let next = unsafe { mem::transmute::<*mut c_void, Socket>(SOCKET.get()) };
    let socket = next(domain, kind, protocol);
    let is_tcp = (domain == AF_INET || domain == AF_INET6)
        && kind & SOCK_TYPE_MASK == SOCK_STREAM
        && (protocol == 0 || protocol == IPPROTO_TCP);
    if socket >= 0 && is_tcp {
        let errno = errno();
        set(socket, IP_LOCAL_PORT_RANGE, SEARCH);
        set_errno(errno);
    }
    socket
}

/// Wraps connect(2).
#[unsafe(no_mangle)]
extern "C" fn connect(socket: c_int, address: *const c_void, length: u32) -> c_int {
    let next = next_connect();
    let before = errno();
    let Some(range) = get(socket, IPPROTO_IP, IP_LOCAL_PORT_RANGE) else {
        // No IP socket, or no socket.
        set_errno(before);
        return next(socket, address, length);
    };
    let is_searched = prepare(socket, range);
    set_errno(before);
    let start = now();
    let result = next(socket, address, length);
    let elapsed = now() - start;
    let after = errno();
    add(CONNECTS, 1);
    if is_searched {
        add(SEARCHED, 1);
        if range == DEFERRED {
            add(BOUND, 1);
        }
        add(TIME, elapsed);
        if result == 0 || after == EINPROGRESS {
            if let Some((_, _, port)) = local_address(socket) {
                add(if port & 1 == 0 { EVEN } else { ODD }, 1);
            }
        } else if after == EADDRNOTAVAIL {
            add(UNAVAILABLE, 1);
        }
    }
    set_errno(after);
    result
}

/// Makes the kernel search the whole range for a TCP socket without a range of its own. Returns whether it will, and counts why not.
fn prepare(socket: c_int, range: u32) -> bool {
    if range == SEARCH || range == DEFERRED {
        return true;
    }
    let left = match get(socket, SOL_SOCKET, SO_PROTOCOL).map(|protocol| protocol as c_int) {
        Some(IPPROTO_TCP) if range != 0 => OWN_RANGE,
        Some(IPPROTO_TCP) if set(socket, IP_LOCAL_PORT_RANGE, SEARCH) => return true,
        Some(IPPROTO_UDP) => UDP,
        _ => PROTOCOL,
    };
    add(left, 1);
    false
}

/// Wraps bind(2): bind() to port 0 leaves the choice of the port to connect(), which knows the destination.
#[unsafe(no_mangle)]
extern "C" fn bind(socket: c_int, address: *const c_void, length: u32) -> c_int {
    let next = next_bind();
    let before = errno();
    let range = get(socket, IPPROTO_IP, IP_LOCAL_PORT_RANGE);
    if range == Some(DEFERRED) {
        // The second bind() of a socket fails with EINVAL if the first one has given it a port.
        choose_port(socket);
    }
    let is_ours = (range == Some(SEARCH) || range == Some(0))
        && get(socket, SOL_SOCKET, SO_PROTOCOL) == Some(IPPROTO_TCP as u32)
        && get(socket, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT) == Some(0)
        && set(socket, IP_BIND_ADDRESS_NO_PORT, 1);
    set_errno(before);
    let result = next(socket, address, length);
    if is_ours {
        let after = errno();
        let has_no_port = result == 0 && matches!(local_address(socket), Some((_, _, 0)));
        if !(has_no_port && set(socket, IP_LOCAL_PORT_RANGE, DEFERRED)) {
            set(socket, IP_BIND_ADDRESS_NO_PORT, 0);
        }
        set_errno(after);
    }
    result
}

/// Wraps getsockname(2): a program that asks for the port that bind() chose gets one.
#[unsafe(no_mangle)]
extern "C" fn getsockname(socket: c_int, address: *mut c_void, length: *mut u32) -> c_int {
    let before = errno();
    choose_port(socket);
    set_errno(before);
    next_name()(socket, address, length)
}
