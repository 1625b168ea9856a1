//! The command `fourtuple`, beside the program `fourtuple-fleet` of the tests.

use std::process::ExitCode;

fn main() -> ExitCode {
    fourtuple_cli::main()
}
