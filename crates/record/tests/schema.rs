//! The schema file accepts exactly the JSON that the Rust types write.

mod samples;

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

/// Returns whether the object's keys are data rather than field names.
fn is_map(place: &str) -> bool {
    let maps = [
        "/sysctls",
        "/states",
        "/tuples_left_out_states",
        "/seen/counters",
        "/counters/seen",
        "/locks/seen/classes",
        "/thresholds",
        "/capabilities",
        "/errors",
        "/error_details",
        "/labels",
        "/results/failed",
        "/dropped",
        "/dropped_replies",
        "/discarded",
        "/left",
        "/passed_over",
    ];
    maps.iter().any(|map| place.ends_with(map))
}

const OPTIONAL: [&str; 8] = [
    "accept",
    "arrival_per_s",
    "bfd_timers",
    "chosen",
    "scatter",
    "predicted_stall_at",
    "stalled_at",
    "retried",
];

/// Fields that may be absent from a server's settings, and are required in the settings of a load.
const OPTIONAL_OF_SERVE: [&str; 7] =
    ["policy", "request_bytes", "response_bytes", "close_every", "stall_at_ns", "stall_length_ns", "idle_ns"];

#[test]
fn every_record_is_valid_and_parses() {
    let validator = Validator::new();
    for (name, sample) in samples() {
        validator.require(name, &sample);
        Saved::parse(&sample.to_string()).unwrap();
    }
}

#[test]
fn every_field_is_required_unless_it_may_be_absent() {
    let validator = Validator::new();
    for (name, sample) in samples() {
        for place in all_places(&sample) {
            let Some((parent, field)) = place.rsplit_once('/') else { continue };
            let mut broken = sample.clone();
            let Some(Value::Object(object)) = broken.pointer_mut(parent) else { continue };
            object.remove(&field.replace("~1", "/").replace("~0", "~"));
            // A field of the record of a host may be absent where it may be absent in the record alone.
            let (command, within) = match parent.split_once("/record") {
                Some((host, within)) => (&sample.pointer(host).unwrap()["record"]["command"], within),
                None => (&sample["command"], parent),
            };
            let of_serve = command == "serve" && within == "/settings" && OPTIONAL_OF_SERVE.contains(&field);
            // Older records lack the protocol and the network namespace of a trace, the number of processes, the client limits of `forward`
            // and the notes on lost events.
            let of_trace = command == "trace connect" && within == "/settings" && field == "protocol"
                || (command == "trace connect" || command == "trace locks")
                    && (within, field) == ("/settings", "netns")
                || within == "/results" && field == "notes"
                || command == "trace connect"
                    && ["namespace", "processes"].contains(&field)
                    && within.starts_with("/results/tuples");
            let of_forward = command == "forward"
                && [
                    "client_limit",
                    "dropped_replies",
                    "evicted",
                    "failed_later",
                    "failed_receives",
                    "unanswered",
                ]
                .contains(&field);
            let of_load = command == "load"
                && [
                    // A run of one host to one address.
                    ("/results", "hosts"),
                    ("/results", "addresses"),
                    ("/results", "error_details"),
                    ("/results", "statuses"),
                    ("/settings", "resolve"),
                    ("/settings", "all_addresses"),
                ]
                .contains(&(within, field))
                || within.starts_with("/results/statuses/") && field == "location";
            let fine =
                is_map(parent) || OPTIONAL.contains(&field) || of_serve || of_trace || of_forward || of_load;
            assert_eq!(validator.accepts(&broken), fine, "{name} without {place}");
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
fn no_object_accepts_unknown_fields() {
    let validator = Validator::new();
    for (name, sample) in samples() {
        for place in all_places(&sample) {
            if is_map(&place) {
                continue;
            }
            let mut broken = sample.clone();
            let Some(Value::Object(object)) = broken.pointer_mut(&place) else { continue };
            object.insert("zzz".into(), json!(1));
            assert!(!validator.accepts(&broken), "{name} with zzz in {place:?}");
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
