//! The events that `fix_rotate` reports of a listener: its layouts differ by architecture.
#![forbid(unsafe_code)]

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;
use std::{fs, process};

use fourtuple_bpf::FixRotate;
use fourtuple_bpf::fix_rotate::{ListenerEvent, What};
use fourtuple_syscalls::epoll::{Epoll, Interest, Registration};
use fourtuple_syscalls::option;
use fourtuple_testing::{in_namespace, skip};

const TOKEN: u64 = 0x0123_4567_89ab_cdef;

#[test]
fn registrations_and_accepts_of_a_listener_are_reported() {
    in_namespace(|| {
        let mut rotate = match FixRotate::attach() {
            Ok(rotate) => rotate,
            Err(error) => {
                let test = "registrations_and_accepts_of_a_listener_are_reported";
                return skip(test, "bpf", &error.to_string());
            }
        };
        let [watched, other] = [4000, 4001].map(|port| TcpListener::bind(("127.0.0.1", port)).unwrap());
        let cookie = option::cookie(watched.as_fd()).unwrap();
        rotate.watch(cookie).unwrap();
        let epoll = Epoll::new().unwrap();
        for listener in [&watched, &other] {
            epoll.add(listener.as_fd(), TOKEN, Interest::ACCEPT.and(Interest::EXCLUSIVE)).unwrap();
            let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            listener.accept().unwrap();
            epoll.remove(listener.as_fd()).unwrap();
        }
        let mut events = Vec::new();
        while events.len() < 3 && rotate.wait(Duration::from_secs(60)).unwrap() {
            events.extend(std::iter::from_fn(|| rotate.next_event()));
        }
        let thread = fs::read_link("/proc/thread-self").unwrap();
        let thread = thread.file_name().unwrap().to_str().unwrap().parse().unwrap();
        let descriptor = watched.as_raw_fd();
        let events_wanted = (1 << 28) | 1;
        let epoll = epoll.as_fd().as_raw_fd();
        let expected = [
            What::Added {
                epoll,
                registration: Registration { descriptor, events: events_wanted, data: TOKEN },
            },
            What::Accepted { thread },
            What::Removed { epoll },
        ];
        let expected = expected.map(|what| ListenerEvent { cookie, process: process::id(), what });
        assert_eq!(events, expected);
    });
}
