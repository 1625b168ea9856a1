#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fourtuple_fuzz::run("handover", bytes));
