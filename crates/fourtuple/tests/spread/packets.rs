//! Packets that are changed, or given to another processor, before the kernel sees them. Over loopback, whose driver knows no
//! XDP: the generic mode.
