//! Bidirectional Forwarding Detection (RFC 5880, over UDP: RFC 5881), asynchronous mode.
