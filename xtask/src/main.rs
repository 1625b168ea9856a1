//! Tasks of CI besides cargo's: `cargo xtask plurals`, `bpf`, `deny`, `kernels`, `package`, `site` and `release`.
#![forbid(unsafe_code)]

mod bpf;
mod deny;
mod kernels;
mod package;
mod plurals;
mod release;
mod site;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "usage: cargo xtask plurals
       cargo xtask bpf [--check]
       cargo xtask deny
       cargo xtask kernels [--arch x86_64|aarch64] [--kernel 6.1|6.12|6.12-16k|all] [--release] [--no-run]
       cargo xtask site
       cargo xtask package
       cargo xtask release [--dry-run] [--target TRIPLE] [--key FILE]";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.split_first() {
        Some((&"plurals", [])) => plurals::run(),
        Some((&"bpf", [])) => bpf::run(bpf::Purpose::Rebuild),
        Some((&"bpf", ["--check"])) => bpf::run(bpf::Purpose::Check),
        Some((&"deny", [])) => deny::run(),
        Some((&"kernels", rest)) => match kernels::Options::parse(rest) {
            Ok(options) => kernels::run(&options),
            Err(message) => return misused(&message),
        },
        Some((&"site", [])) => site::run(),
        Some((&"package", [])) => package::run(),
        Some((&"release", rest)) => {
            let key = std::env::var_os("FOURTUPLE_SIGNING_KEY").map(PathBuf::from);
            match release::Options::parse(rest, key) {
                Ok(options) => release::run(&options),
                Err(message) => return misused(&message),
            }
        }
        Some((other, _)) => return misused(&format!("{other}: no such task, or it takes no arguments")),
        None => return misused("which task?"),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn misused(message: &str) -> ExitCode {
    eprintln!("xtask: {message}\n{USAGE}");
    ExitCode::from(2)
}
