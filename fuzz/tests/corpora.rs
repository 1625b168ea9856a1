//! Replays the corpora of `fuzz/corpus`: inputs that reach new code, and inputs that failed before the fix.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use fourtuple_record::{SCHEMA_JSON, Saved};
use serde_json::Value;

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

#[test]
fn corpora_pass_their_targets() {
    let mut failed = Vec::new();
    for (name, target) in fourtuple_fuzz::TARGETS {
        let directory = corpus().join(name);
        let entries =
            fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        let mut replayed = 0;
        for entry in entries {
            let path = entry.unwrap().path();
            let bytes = fs::read(&path).unwrap();
            if std::panic::catch_unwind(|| target(&bytes)).is_err() {
                failed.push(path);
            }
            replayed += 1;
        }
        assert!(replayed > 0, "{name} has no corpus");
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn every_corpus_has_a_target_and_a_fuzzer() {
    let targets: BTreeSet<String> =
        fourtuple_fuzz::TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let entries = fs::read_dir(corpus()).unwrap().map(|entry| entry.unwrap().file_name());
    let corpora: BTreeSet<String> = entries.map(|name| name.into_string().unwrap()).collect();
    assert_eq!(corpora, targets);
    let manifest: toml::Table = toml::from_str(include_str!("../Cargo.toml")).unwrap();
    let programs = manifest["bin"].as_array().unwrap();
    let fuzzers = programs.iter().map(|program| program["name"].as_str().unwrap().to_owned());
    assert_eq!(fuzzers.collect::<BTreeSet<_>>(), targets);
}

/// The mutator changes values and cannot make a record of another kind.
#[test]
fn every_kind_of_record_has_a_seed() {
    let schema: Value = serde_json::from_str(SCHEMA_JSON).unwrap();
    let kinds = schema["properties"]["command"]["enum"].as_array().expect("the kinds of records");
    let seeds: Vec<String> = fs::read_dir(corpus().join("saved"))
        .unwrap()
        .filter_map(|file| Saved::parse(&fs::read_to_string(file.unwrap().path()).ok()?).ok())
        .map(|record| record.common().command.to_owned())
        .collect();
    for kind in kinds {
        assert!(seeds.iter().any(|seed| seed == kind), "no seed of {kind}");
    }
}

#[test]
fn corpora_stay_small() {
    let files =
        fourtuple_fuzz::TARGETS.iter().flat_map(|(name, _)| fs::read_dir(corpus().join(name)).unwrap());
    let bytes: u64 = files.map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert!(bytes < 1 << 20, "{bytes} bytes: minimise them, see docs/fuzzing.md");
}
