//! The target for the messages of a takeover: both halves of the conversation between the old and the new process.

use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::sync::OnceLock;

use fourtuple_forward::{Forward, Link, fuzzing};

/// Byte between two messages. It does not occur in UTF-8.
const SEPARATOR: u8 = 0xff;

/// Parses the messages of one half of a takeover. The first byte selects the half; the first byte of each message is the number
/// of its descriptors, modulo 8.
pub(crate) fn messages(bytes: &[u8]) {
    static SOCKET: OnceLock<UdpSocket> = OnceLock::new();
    let socket = SOCKET.get_or_init(|| UdpSocket::bind("127.0.0.1:0").expect("bind"));
    let Some((half, rest)) = bytes.split_first() else { return };
    let messages: Vec<(&[u8], usize)> = rest
        .split(|byte| *byte == SEPARATOR)
        .filter_map(|message| message.split_first())
        .map(|(number, text)| (text, usize::from(number % 8)))
        .collect();
    if half & 1 == 0 {
        let listen = ([127, 0, 0, 1], 4000).into();
        let forward = Forward::new(Link::new(listen, ([127, 0, 0, 1], 4001).into()), 1);
        fuzzing::offer(&messages, socket.as_fd(), &forward);
    } else {
        fuzzing::inherited(&messages, socket.as_fd(), rest);
    }
}
