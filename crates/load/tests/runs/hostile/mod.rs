//! Peers and clients that violate the protocol: servers against both engines of `load`, clients against both modes of `serve`.
//! Each row of a table is a peer, and the counts of `load` or `serve` must equal the log of the peer.

mod clients;
mod peers;
mod script;
mod tls;
