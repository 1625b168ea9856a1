use crate::plane::batched::Batched;

/// Bytes for each message: UDP_GRO coalesces up to 64 KiB. An odd number of cache lines, see `batched.rs`.
const ROOM: usize = 1025 * 64;

/// Like `Batched`, with UDP_GRO on receive and UDP_SEGMENT on send: the stack handles one large buffer instead of many packets. The
/// sockets have the options ([`crate::PlaneKind`]); this plane has buffers for such messages.
pub(super) fn offload() -> Batched {
    Batched::with_room(ROOM)
}
