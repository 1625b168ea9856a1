//! The vectors in `bindings/vectors`, with which all languages test their strategies: this test computes each file and compares it with
//! the file in the tree. `FOURTUPLE_WRITE=1` writes the files.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::num::NonZeroU16;
use std::path::Path;

use fastrand::Rng;
use fourtuple::capabilities::LocalPortRange;
use fourtuple::dial::{Step, Strategy};
use fourtuple::ports::{PortRange, Random};

const CASES: usize = 1000;

/// A strategy with drawn parameters, and the parameters as JSON values.
type Drawn = (Strategy, String);

#[test]
fn steps_equal_the_vectors_of_all_languages() {
    compare("kernel-default", &[], |_| (Strategy::KernelDefault, String::new()));
    compare("full-range", &[], |_| (Strategy::FullRange, String::new()));
    compare("select-test-repeat", &["tries"], |random| {
        let tries = tries(random);
        (Strategy::SelectTestRepeat { tries }, format!("{tries}, "))
    });
    compare("random-window", &["width", "tries", "then_full_range"], |random| {
        let width = match random.u8(..4) {
            0 => random.u16(1..=8),
            1 => random.u16(1..),
            _ => 500,
        };
        let (tries, then_full_range) = (tries(random), random.bool());
        let width = NonZeroU16::new(width).expect("at least 1");
        let strategy = Strategy::RandomWindow { width, tries, then_full_range };
        (strategy, format!("{width}, {tries}, {then_full_range}, "))
    });
    compare("auto", &["found", "ports_known"], |random| {
        const ALL: [LocalPortRange; 4] = [
            LocalPortRange::Absent,
            LocalPortRange::Parity,
            LocalPortRange::Linear,
            LocalPortRange::Unproven,
        ];
        let (found, ports_known) = (ALL[random.usize(..ALL.len())], random.bool());
        (Strategy::for_kernel(found, ports_known), format!("{:?}, {ports_known}, ", found.name()))
    });
}

/// Compares the cases of a strategy with its file.
fn compare(name: &str, parameters: &[&str], draw: impl Fn(&mut Rng) -> Drawn) {
    // A generator for the inputs, apart from the generators of the cases.
    let mut random = Rng::with_seed(2026);
    let fields: String = parameters.iter().map(|parameter| format!("{parameter:?}, ")).collect();
    let mut text = format!(
        "{{\n\"strategy\": {name:?},\n\"fields\": [\"seed\", \"low\", \"high\", \"attempts\", {fields}\"steps\"],\n\"cases\": [\n"
    );
    for case in 0..CASES {
        let (seed, range, attempts) = (random.u64(..), range(&mut random), random.u32(1..=6));
        let (strategy, parameters) = draw(&mut random);
        let steps = steps(strategy, seed, range, attempts);
        let end = if case + 1 < CASES { "," } else { "" };
        writeln!(
            text,
            "[\"{seed:016x}\", {}, {}, {attempts}, {parameters}[{steps}]]{end}",
            range.low(),
            range.high()
        )
        .expect("a String takes all text");
    }
    text.push_str("]\n}\n");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../bindings/vectors/{name}.json"));
    if env::var_os("FOURTUPLE_WRITE").is_some() {
        fs::write(&path, &text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    let stored = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let different = text.lines().zip(stored.lines()).position(|(computed, stored)| computed != stored);
    assert!(
        text == stored,
        "{} differs from line {:?} on: if the change is intended, run FOURTUPLE_WRITE=1 cargo test --test library vectors, and \
         tell the users of the bindings",
        path.display(),
        different.map(|index| index + 1)
    );
}

/// Returns the steps of a dial whose ports are all in use, as JSON: null for a search, [low, high] for a window, a number for a bind.
fn steps(strategy: Strategy, seed: u64, range: PortRange, attempts: u32) -> String {
    let mut random = Random::with_seed(seed);
    let steps = (0..attempts).map_while(|tried| strategy.step(tried, range, &mut random));
    let texts = steps.map(|step| match step {
        Step::Search => "null".to_owned(),
        Step::Window(window) => format!("[{}, {}]", window.low(), window.high()),
        Step::Bind(port) => port.to_string(),
    });
    texts.collect::<Vec<_>>().join(", ")
}

fn range(random: &mut Rng) -> PortRange {
    let (low, high) = match random.u8(..5) {
        0 => return PortRange::KERNEL_DEFAULT,
        1 => return PortRange::ALL,
        2 => {
            let low = random.u16(..=65_000);
            (low, low + random.u16(..16))
        }
        _ => (random.u16(..), random.u16(..)),
    };
    PortRange::new(low.min(high), low.max(high)).expect("low is not above high")
}

fn tries(random: &mut Rng) -> NonZeroU16 {
    let tries = match random.u8(..4) {
        0 => 100,
        1 => random.u16(1..),
        _ => random.u16(1..=6),
    };
    NonZeroU16::new(tries).expect("at least 1")
}
