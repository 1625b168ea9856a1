//! Parts that the texts share.

use std::fmt::Write;

use crate::print::snapshot::{PortRangeOption, Snapshot};

/// Returns a template with each `@name@` replaced by its value.
pub(super) fn fill(template: &str, values: &[(&str, &str)]) -> String {
    let mut text = template.to_owned();
    for (name, value) in values {
        text = text.replace(&format!("@{name}@"), value);
    }
    text
}

/// Returns the items, each in a line by `line`.
pub(super) fn lines<T>(items: &[T], line: impl Fn(usize, &T) -> String) -> String {
    items.iter().enumerate().fold(String::new(), |mut text, (number, item)| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}", line(number, item));
        text
    })
}

/// Returns sentences about this host, which begin every text, as comments.
pub(super) fn heading(snapshot: &Snapshot, comment: &str) -> String {
    let (low, high) = (snapshot.low, snapshot.high);
    let reserved = if snapshot.reserved.is_empty() { "" } else { " without the reserved ones" };
    let mut sentences = vec![
        format!(
            "This host: Linux {}, CPUs: {}, source ports {low} to {high}{reserved}.",
            snapshot.kernel, snapshot.cpus
        ),
        format!("Ports of a source address for each destination: {}.", snapshot.usable()),
    ];
    sentences.push(match snapshot.option {
        PortRangeOption::Linear => format!(
            "Beyond half of them ({}) connect() searches for milliseconds, unless the socket has IP_LOCAL_PORT_RANGE.",
            snapshot.half()
        ),
        _ => format!("Beyond half of them ({}) connect() searches for milliseconds.", snapshot.half()),
    });
    lines(&sentences, |_, sentence| format!("{comment} {sentence}"))
}

/// Returns the reason why a text has no IP_LOCAL_PORT_RANGE; `None` if it has.
pub(super) fn why_no_option(option: PortRangeOption) -> Option<&'static str> {
    match option {
        PortRangeOption::Linear => None,
        PortRangeOption::Parity => Some(
            "IP_LOCAL_PORT_RANGE is not set: the search of this kernel passes over half of the range with this option too (Linux 6.8 changed it).",
        ),
        PortRangeOption::Absent => {
            Some("IP_LOCAL_PORT_RANGE is not set: this kernel does not have it (Linux 6.3).")
        }
    }
}
