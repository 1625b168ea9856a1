//! Nothing but a test: reqwest over the connector of fourtuple. docs/adoption.md has the lines that it needs.
#![forbid(unsafe_code)]
