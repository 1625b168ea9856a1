//! Nothing but tests: other libraries over the connector of fourtuple. docs/adoption.md has the lines that they need.
#![forbid(unsafe_code)]
