//! The `fourtuple` command. See the library of this crate, which exists so that the tests of the crate can enable its features.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    fourtuple_cli::main()
}
