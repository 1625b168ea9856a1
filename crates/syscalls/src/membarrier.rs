//! membarrier(2): waiting for what is under way in the kernel.

use std::io;

/// MEMBARRIER_CMD_GLOBAL
const GLOBAL: libc::c_long = 1;

/// Waits until every packet is delivered whose way through the kernel began before the call: MEMBARRIER_CMD_GLOBAL (Linux
/// 4.3) is `synchronize_rcu`, and a packet goes from the choice of its socket into that socket's queue under one RCU lock
/// (`__netif_receive_skb`). A few milliseconds, up to some tens on a busy machine.
///
/// # Errors
///
/// EINVAL on a kernel with processors that take no interrupts (nohz_full).
pub fn wait_for_packets_under_way() -> io::Result<()> {
    // SAFETY: membarrier() takes no pointers.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0_u32, 0_i32) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_comes_back() {
        super::wait_for_packets_under_way().unwrap();
    }
}
