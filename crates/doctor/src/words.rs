//! Phrases that several rules share.

use fourtuple_record::snapshot::{Owner, Tuple};

/// Returns a number with thousands separators: `28,231`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns a share in percent without decimals, but never 100 for less than all: `98%`.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    format!("{}%", (part * 100).checked_div(whole).unwrap_or(0))
}

/// Returns `nginx[812]`.
pub(crate) fn process(owner: &Owner) -> String {
    format!("{}[{}]", owner.name, owner.pid)
}

/// Returns `10.0.0.9 → 10.1.2.3:443`.
pub(crate) fn tuple(tuple: &Tuple) -> String {
    format!("{} → {}", tuple.source, tuple.destination)
}

/// Returns a time: `42 s`, `7 min`, `3 h`.
pub(crate) fn time(seconds: f64) -> String {
    match seconds {
        ..120.0 => format!("{seconds:.0} s"),
        ..7200.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.0} h", seconds / 3600.0),
    }
}

/// Returns a rate: `465/s`, `1.5/s`, `28,232/s`.
pub(crate) fn rate(per_s: f64) -> String {
    if per_s < 10.0 { format!("{per_s:.1}/s") } else { format!("{}/s", count(per_s.round() as u64)) }
}
