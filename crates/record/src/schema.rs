//! The JSON schema of records, derived from their types. Only the test that keeps [`SCHEMA_JSON`](crate::SCHEMA_JSON) up to date
//! builds it.

use std::borrow::Cow;

use schemars::generate::SchemaSettings;
use schemars::transform::transform_subschemas;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use crate::snapshot::Part;
use crate::{Host, Record, Remark, SCHEMA, Saved};

/// Defines types that restrict a text or a number of a record, for `schemars(with = ...)`.
macro_rules! restricted {
    ($($(#[$doc:meta])* $name:ident: $schema:tt)+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name;

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!($schema)
            }
        }
    )+};
}

restricted! {
    /// Load of `lab accept` or `lab keepalive`.
    AcceptLoad: { "enum": ["light", "heavy", "sleep", "spin"] }
    /// Side that closes a connection.
    Closer: { "enum": ["client", "rst", "server"] }
    /// A part of a snapshot that was not read.
    DoctorHidden: { "type": "object", "required": ["hidden"], "properties": { "hidden": { "type": "string" } } }
    /// Family of a listener.
    ListenerFamily: { "enum": ["unix", "tcp4", "tcp6"] }
    /// Class of a lock of the kernel.
    LockClassName: { "enum": ["listener", "accept queue", "ehash", "bhash", "time-wait", "socket owner", "other"] }
    /// Change of `lab locks`.
    LocksChange: { "enum": ["reuseport", "sources", "full-range"] }
    /// I/O method of a plane.
    Plane: { "enum": ["one-by-one", "batched", "offload", "uring"] }
    /// Selector of the plane that receives a packet.
    PlanesSpread: { "enum": ["hash", "random", "flow", "cpu"] }
    /// Accept policy; `rotate:16` rotates every 16 accepts.
    Policy: {
        "oneOf": [
            {
                "enum": [
                    "exclusive", "plain", "blocking", "rotate", "shared-oneshot", "uring-oneshot", "reuseport",
                    "reuseport-least-busy", "dispatcher", "auto",
                ],
            },
            { "type": "string", "pattern": "^rotate:[1-9][0-9]*$" },
        ],
    }
    /// Accept policy, or the mark of an external server.
    PolicyOrExternal: { "anyOf": [{ "$ref": "#/$defs/Policy" }, { "const": "external" }] }
    /// Protocol of `serve`.
    ServeProtocol: { "enum": ["crr", "http", "udp", "sink"] }
    /// What a worker does during the service time.
    Service: { "enum": ["sleep", "spin"] }
    /// Part of a whole.
    Share: { "type": "number", "minimum": 0, "maximum": 1 }
    /// Number that may be negative.
    Signed: { "type": "number" }
}

impl<T: JsonSchema> JsonSchema for Part<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("Part_of_{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let (seen, hidden) = (generator.subschema_for::<T>(), generator.subschema_for::<DoctorHidden>());
        json_schema!({
            "oneOf": [{ "type": "object", "required": ["seen"], "properties": { "seen": seen } }, hidden],
        })
    }
}

impl<S: JsonSchema, R: JsonSchema> Record<S, R> {
    /// Returns what the schema requires of the records of some commands.
    pub(crate) fn branch(generator: &mut SchemaGenerator, commands: &[&str]) -> Schema {
        let settings = generator.subschema_for::<S>();
        let results = generator.subschema_for::<R>();
        match commands {
            [command] => json_schema!({
                "properties": { "command": { "const": command }, "settings": settings, "results": results },
            }),
            // The commands of a fleet share their first word.
            _ => json_schema!({
                "title": commands[0].split(' ').next(),
                "properties": { "command": { "enum": commands }, "settings": settings, "results": results },
            }),
        }
    }
}

impl JsonSchema for Saved {
    fn schema_name() -> Cow<'static, str> {
        "Record".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let (branches, commands) = Saved::branches(generator);
        json_schema!({
            "$id": "urn:fourtuple:record:1",
            "title": "A record of fourtuple, schema fourtuple/1",
            "description": "The record of one command. Durations are integers in nanoseconds (_ns), rates are numbers per second (_per_s).",
            "type": "object",
            "required": ["schema", "command", "started", "host", "settings", "validity", "results"],
            "properties": {
                "schema": { "const": SCHEMA },
                "command": { "enum": commands },
                "started": {
                    "description": "RFC 3339 in UTC",
                    "type": "string",
                    "pattern": r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?Z$",
                },
                "host": generator.subschema_for::<Host>(),
                "settings": { "type": "object" },
                "validity": generator.subschema_for::<Vec<Remark>>(),
                "results": { "type": "object" },
            },
            "oneOf": branches,
        })
    }
}

/// Returns the text of the schema.
///
/// It describes what commands write, and older records: a field with `serde(default)` may be absent.
pub fn generate() -> String {
    let settings = SchemaSettings::draft2020_12().for_serialize().with_transform(restrict);
    let schema = settings.into_generator().into_root_schema_for::<Saved>();
    let mut text = String::new();
    write(schema.as_value(), 0, &mut text);
    text + "\n"
}

/// Makes a derived schema as strict as the types: no other fields, no negative rates, no `null` where a field is left out instead.
fn restrict(schema: &mut Schema) {
    transform_subschemas(&mut restrict, schema);
    let map = schema.ensure_object();
    match map.remove("format").as_ref().and_then(Value::as_str) {
        Some("uint32") => drop(map.insert("maximum".into(), u32::MAX.into())),
        Some("double") => drop(map.entry("minimum").or_insert(0.into())),
        _ => {}
    }
    if map.get("type") == Some(&json!("object")) && map.contains_key("properties") {
        let mut required = map.remove("required").unwrap_or_else(|| json!([]));
        let names = required.as_array_mut().expect("a list of names");
        for (name, field) in map["properties"].as_object_mut().expect("fields by name") {
            let field = field.as_object_mut().expect("a schema");
            if field.remove("default").is_some() {
                names.retain(|required| required != name);
            } else if !names.iter().any(|required| required == name) {
                refuse_null(field);
            }
        }
        map.insert("required".into(), required);
        map.insert("additionalProperties".into(), false.into());
    }
    if let Some(Value::String(text)) = map.get_mut("description") {
        *text = text.replace('\n', " ");
    }
}

fn refuse_null(field: &mut Map<String, Value>) {
    if let Some(Value::Array(kinds)) = field.get_mut("type") {
        kinds.retain(|kind| kind != "null");
        let kind = kinds.pop().expect("a type beside null");
        field.insert("type".into(), kind);
    }
    // `Option` of a type with a name is a choice between this name and `null`.
    if let Some(Value::Array(mut parts)) = field.remove("anyOf") {
        parts.retain(|part| *part != json!({ "type": "null" }));
        field.extend(parts.into_iter().flat_map(|part| part.as_object().cloned().unwrap_or_default()));
    }
}

/// Appends a value: on one line if it fits.
fn write(value: &Value, indent: usize, text: &mut String) {
    const MAX_COLUMNS: usize = 160;
    let line = value.to_string();
    let inner: Vec<(String, &Value)> = match value {
        _ if indent + line.len() <= MAX_COLUMNS => Vec::new(),
        Value::Object(fields) => {
            fields.iter().map(|(name, field)| (format!("\"{name}\": "), field)).collect()
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            items.iter().map(|item| (String::new(), item)).collect()
        }
        _ => Vec::new(),
    };
    if inner.is_empty() {
        text.push_str(&line);
        return;
    }
    let indented = format!("\n{:1$}", "", indent + 2);
    text.push_str(&line[..1]);
    for (at, (name, field)) in inner.iter().enumerate() {
        text.push_str(if at == 0 { "" } else { "," });
        text.push_str(&indented);
        text.push_str(name);
        write(field, indent + 2, text);
    }
    text.push_str(&indented[..indented.len() - 2]);
    text.push_str(&line[line.len() - 1..]);
}
