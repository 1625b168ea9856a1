#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

fuzz_target!(|bytes: &[u8]| fourtuple_fuzz::run("saved", bytes));

// Most mutations change a value of the record; some are byte mutations of libFuzzer.
fuzz_mutator!(|bytes: &mut [u8], size: usize, most: usize, seed: u32| {
    let changed =
        if seed % 8 == 0 { None } else { fourtuple_fuzz::mutate(&mut bytes[..most], size, seed.into()) };
    changed.unwrap_or_else(|| fuzzer_mutate(bytes, size, most))
});
