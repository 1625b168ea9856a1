//! The schema file is derived from the Rust types, and accepts exactly the JSON that they write.

mod samples;

use std::path::Path;
use std::process::Command;
use std::{env, fs};

use boon::{Compiler, SchemaIndex, Schemas};
use fourtuple_record::{SCHEMA_JSON, Saved};
use serde_json::{Value, json};

struct Validator {
    schemas: Schemas,
    index: SchemaIndex,
}

impl Validator {
    fn new() -> Validator {
        let mut compiler = Compiler::new();
        let schema: Value = serde_json::from_str(SCHEMA_JSON).unwrap();
        let address = schema["$id"].as_str().unwrap().to_owned();
        compiler.add_resource(&address, schema).unwrap();
        let mut schemas = Schemas::new();
        let index = compiler.compile(&address, &mut schemas).unwrap();
        Validator { schemas, index }
    }

    fn accepts(&self, record: &Value) -> bool {
        self.schemas.validate(record, self.index).is_ok()
    }

    fn require(&self, name: &str, record: &Value) {
        if let Err(error) = self.schemas.validate(record, self.index) {
            panic!("{name}: {error:#}");
        }
    }
}

/// Returns the shared samples as JSON, with lists cut to the first two items and the last one.
fn samples() -> Vec<(&'static str, Value)> {
    let json = |(name, saved): &(&'static str, Saved)| {
        let mut value = serde_json::to_value(saved).unwrap();
        thin(&mut value);
        (*name, value)
    };
    samples::valid().iter().map(json).collect()
}

fn thin(value: &mut Value) {
    match value {
        Value::Object(fields) => fields.values_mut().for_each(thin),
        Value::Array(items) => {
            let cut = 2.min(items.len())..items.len().saturating_sub(1).max(2.min(items.len()));
            items.drain(cut);
            items.iter_mut().for_each(thin);
        }
        _ => {}
    }
}

/// Returns every location in `value` as a JSON pointer: objects and their contents.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| {
            let name = name.replace('~', "~0").replace('/', "~1");
            places(value, &format!("{at}/{name}"), found);
        }),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(index, item)| places(item, &format!("{at}/{index}"), found));
        }
        _ => {}
    }
}

fn all_places(value: &Value) -> Vec<String> {
    let mut found = Vec::new();
    places(value, "", &mut found);
    found
}

/// Returns what this version reads from a record and writes again; `None`: it cannot read it.
fn read_and_written(record: &Value) -> Option<Value> {
    Saved::from_value(record.clone()).ok().map(|saved| serde_json::to_value(saved).unwrap())
}

#[test]
fn schema_is_derived_from_the_types() {
    let schema = fourtuple_record::schema::generate();
    if env::var_os("FOURTUPLE_WRITE").is_some() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        fs::write(root.join("crates/record/schema/fourtuple-1.json"), schema).unwrap();
        let types = Command::new("python3").arg(root.join("bindings/python/generate_types.py")).status();
        assert!(types.expect("python3, which writes the Python types").success());
        return;
    }
    let write = "FOURTUPLE_WRITE=1 cargo test -p fourtuple-record --test schema";
    assert!(
        schema == SCHEMA_JSON,
        "the types have changed: write the schema and the Python types with\n    {write}"
    );
}

#[test]
fn every_record_is_valid_and_parses() {
    let validator = Validator::new();
    for (name, sample) in samples() {
        validator.require(name, &sample);
        Saved::parse(&sample.to_string()).unwrap();
    }
}

/// A field may be absent if older records lack it, or if commands leave it out; `null` is then no other way to say so.
#[test]
fn absent_fields_are_valid_where_the_types_read_them() {
    let validator = Validator::new();
    for (name, sample) in samples() {
        for place in all_places(&sample) {
            let Some((parent, field)) = place.rsplit_once('/') else { continue };
            let mut broken = sample.clone();
            let Some(Value::Object(object)) = broken.pointer_mut(parent) else { continue };
            object.remove(&field.replace("~1", "/").replace("~0", "~"));
            let read = read_and_written(&broken);
            if validator.accepts(&broken) {
                assert!(read.is_some(), "{name} without {place} is valid and cannot be read");
            } else {
                // serde reads a missing `Option` as `None`, which commands write as `null`.
                let null = read.is_none_or(|read| read.pointer(&place) == Some(&Value::Null));
                assert!(null, "{name} without {place} is read and not valid");
            }
        }
    }
}

#[test]
fn a_trace_without_protocol_is_tcp() {
    let mut old = serde_json::to_value(samples::trace_connect()).unwrap();
    old["settings"].as_object_mut().unwrap().remove("protocol");
    let Saved::TraceConnect(read) = Saved::parse(&old.to_string()).unwrap() else { panic!("{old}") };
    assert_eq!(read.settings.protocol, "tcp");
}

#[test]
fn objects_accept_only_keys_that_the_types_keep() {
    let validator = Validator::new();
    for (name, sample) in samples() {
        for place in all_places(&sample) {
            let mut broken = sample.clone();
            let Some(Value::Object(object)) = broken.pointer_mut(&place) else { continue };
            // In a map, a value like the others.
            let value = object.values().next().cloned().unwrap_or(json!(1));
            object.insert("zzz".into(), value);
            let read = read_and_written(&broken);
            let kept = read.is_some_and(|read| read.pointer(&format!("{place}/zzz")).is_some());
            assert_eq!(validator.accepts(&broken), kept, "{name} with zzz in {place:?}");
        }
    }
}

#[test]
fn negative_numbers_and_wrong_types_are_refused() {
    let validator = Validator::new();
    for (name, sample) in samples() {
        for place in all_places(&sample).iter().filter(|place| !place.is_empty()) {
            let mut broken = sample.clone();
            let value = broken.pointer_mut(place).unwrap();
            *value = match value {
                // A growth and the offset of a clock may be negative.
                Value::Number(_)
                    if place.ends_with("/growth_per_s") || place.ends_with("/clock_offset_ns") =>
                {
                    json!("1")
                }
                Value::Number(_) => json!(-1),
                Value::Bool(_) => json!("yes"),
                // A field may also be null or text.
                Value::Null => json!(["yes"]),
                _ => json!(17),
            };
            assert!(!validator.accepts(&broken), "{name} with {} in {place}", broken.pointer(place).unwrap());
        }
    }
}

#[test]
fn unknown_versions_and_commands_are_refused() {
    let validator = Validator::new();
    let samples = samples();
    let ports = samples.iter().find(|(name, _)| *name == "ports").map(|(_, sample)| sample.clone()).unwrap();
    for (field, value) in [("schema", "fourtuple/2"), ("command", "lab udp"), ("started", "yesterday")] {
        let mut broken = ports.clone();
        broken[field] = json!(value);
        assert!(!validator.accepts(&broken), "{field} {value}");
    }
    let mut whole: Vec<&Value> = samples.iter().map(|(_, sample)| sample).collect();
    whole.sort_by_key(|sample| sample["command"].to_string());
    whole.dedup_by_key(|sample| sample["command"].to_string());
    // `lab accept` and `lab keepalive` share their results, and the commands of a fleet too.
    let alike = ["lab keepalive", "fleet lab ports", "fleet trace connect", "fleet plan", "fleet serve"];
    whole.retain(|sample| !alike.contains(&sample["command"].as_str().unwrap()));
    let schema: Value = serde_json::from_str(SCHEMA_JSON).unwrap();
    let commands = schema["properties"]["command"]["enum"].as_array().unwrap();
    assert_eq!(whole.len(), commands.len() - alike.len(), "one sample of every other command");
    for (one, other) in whole.iter().zip(whole.iter().cycle().skip(1)) {
        let mut mixed = (*one).clone();
        mixed["results"] = other["results"].clone();
        assert!(!validator.accepts(&mixed), "{} with the results of {}", one["command"], other["command"]);
    }
    let mut broken = ports;
    broken["results"]["strategies"][0]["elapsed_ns"] = json!(1.5);
    assert!(!validator.accepts(&broken), "a duration with a fraction");
}
