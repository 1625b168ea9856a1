//! The target for saved records: every record that parses can be rendered.

use fastrand::Rng;
use fourtuple_record::Saved;
use fourtuple_report::{html, terminal};
use serde_json::{Number, Value};

/// Parses a record and renders it for three terminal widths and as a page.
pub(crate) fn record(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    let Ok(saved) = Saved::parse(text) else { return };
    for width in [20, 80, 200] {
        let shown = terminal::render(&saved, width, false);
        for line in shown.lines() {
            // A command is not broken, so that it can be copied.
            let is_command = matches!(saved, Saved::Doctor(_)) && line.starts_with("    ");
            assert!(is_command || line.chars().count() <= width, "{width}: {line}");
            assert!(!line.contains(char::is_control), "{line:?}");
        }
    }
    terminal::render(&saved, 80, true);
    let page = html::page(std::slice::from_ref(&saved));
    assert!(page.ends_with("</html>\n") || page.ends_with("</html>"));
}

/// Replacement values for numbers.
const NUMBERS: [f64; 8] = [0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, 1e18, 65_535.0];
const WHOLE: [u64; 8] = [0, 1, 2, 255, 65_536, u32::MAX as u64, i64::MAX as u64, u64::MAX];
/// Replacement values for strings.
const TEXTS: [&str; 8] =
    ["", "x", "</script>", "\u{202e}\u{1b}[31m", "a\nb", "64", "0/0", "\u{1d11e} \u{301}"];

/// Changes one value of a record, so that the bytes stay valid JSON; the mutations of libFuzzer rarely do. Returns the new
/// length, or `None` if the bytes are not JSON or the result is longer than `bytes`.
pub fn mutate(bytes: &mut [u8], length: usize, seed: u64) -> Option<usize> {
    let mut value: Value = serde_json::from_slice(&bytes[..length]).ok()?;
    let mut random = Rng::with_seed(seed);
    let mut left = random.usize(..values(&value).max(1));
    change(&mut value, &mut left, &mut random);
    let text = serde_json::to_vec(&value).ok()?;
    bytes.get_mut(..text.len())?.copy_from_slice(&text);
    Some(text.len())
}

/// Returns the number of values, including arrays and objects.
fn values(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(values).sum(),
        Value::Object(fields) => fields.values().map(values).sum(),
        _ => 0,
    }
}

/// Changes the value at position `left` in document order. Returns whether the document has that many values.
fn change(value: &mut Value, left: &mut usize, random: &mut Rng) -> bool {
    if *left == 0 {
        change_this(value, random);
        return true;
    }
    *left -= 1;
    match value {
        Value::Array(items) => items.iter_mut().any(|item| change(item, left, random)),
        Value::Object(fields) => fields.values_mut().any(|field| change(field, left, random)),
        _ => false,
    }
}

fn change_this(value: &mut Value, random: &mut Rng) {
    match value {
        Value::Array(items) if !items.is_empty() => {
            let at = random.usize(..items.len());
            match random.u8(..4) {
                0 => items.truncate(at),
                1 => drop(items.remove(at)),
                2 if items.len() < 64 => items.insert(at, items[at].clone()),
                _ => items.reverse(),
            }
        }
        Value::Object(fields) if random.u8(..4) == 0 => {
            let names: Vec<String> = fields.keys().cloned().collect();
            if let Some(name) = names.get(random.usize(..names.len().max(1))) {
                fields.remove(name);
            }
        }
        Value::Object(fields) => {
            // For maps keyed by name: adds another name for an existing value.
            let first = fields.iter().next().map(|(_, value)| value.clone());
            fields.insert(TEXTS[random.usize(..TEXTS.len())].to_owned(), first.unwrap_or(Value::Null));
        }
        Value::Number(number) if number.is_u64() => match random.u8(..4) {
            0 => *value = float(random),
            1 => *value = Value::Null,
            _ => *value = WHOLE[random.usize(..WHOLE.len())].into(),
        },
        Value::Number(_) => *value = float(random),
        Value::String(text) => {
            *text = match random.u8(..8) {
                0 => TEXTS[random.usize(..TEXTS.len())].repeat(40),
                _ => TEXTS[random.usize(..TEXTS.len())].to_owned(),
            }
        }
        Value::Bool(set) => *set = !*set,
        Value::Null => *value = WHOLE[random.usize(..WHOLE.len())].into(),
        Value::Array(_) => *value = Value::Null,
    }
}

fn float(random: &mut Rng) -> Value {
    Number::from_f64(NUMBERS[random.usize(..NUMBERS.len())]).map_or(Value::Null, Value::Number)
}
