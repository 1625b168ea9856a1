//! The other side of a measurement: small servers, and what each of their workers did.
#![forbid(unsafe_code)]
