//! The program of each target without a mutator of its own. Its name, which Cargo.toml gives to this file, is that of the target.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fourtuple_fuzz::run(env!("CARGO_BIN_NAME"), bytes));
