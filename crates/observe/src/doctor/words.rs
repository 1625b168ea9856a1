//! Phrases that several rules share.

pub(crate) use fourtuple_record::measure::words::{counted, grouped as count};
use fourtuple_record::snapshot::{Owner, Tuple};

/// Returns a share in percent without decimals, but never 100 for less than all: `98%`.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    format!("{}%", (u128::from(part) * 100).checked_div(whole.into()).unwrap_or(0))
}

/// Returns a counted subject with its verb in the plural: `1 connection waits`, `3 connections wait`, `1 socket is`.
pub(crate) fn doing(number: u64, noun: &str, verb: &str) -> String {
    let verb = match (number, verb) {
        (1, "are") => "is".to_owned(),
        (1, "were") => "was".to_owned(),
        (1, "have") => "has".to_owned(),
        (1, _) => format!("{verb}s"),
        _ => verb.to_owned(),
    };
    format!("{} {verb}", counted(number, noun))
}

/// Returns dropped segments of handshakes: `1 SYN or ACK`, `371 SYNs and ACKs`.
pub(crate) fn segments(number: u64) -> String {
    if number == 1 { "1 SYN or ACK".to_owned() } else { count(number) + " SYNs and ACKs" }
}

/// Returns `nginx[812]`.
pub(crate) fn process(owner: &Owner) -> String {
    owner.to_string()
}

/// Returns the process that made calls; many short processes with one name have the number 0, and no command may name one of them.
pub(crate) fn caller(owner: &Owner, processes: u32) -> Owner {
    Owner { pid: if processes > 1 { 0 } else { owner.pid }, ..owner.clone() }
}

/// Returns `10.0.0.9 → 10.1.2.3:443`.
pub(crate) fn tuple(tuple: &Tuple) -> String {
    tuple.to_string()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        assert_eq!(
            (count(28_231), count(1_000_000), count(999)),
            ("28,231".into(), "1,000,000".into(), "999".into())
        );
        assert_eq!((percent(28_231, 28_232), percent(1, 0)), ("99%".into(), "0%".into()));
        assert_eq!(
            (rate(0.33), rate(465.4), rate(28_232.0)),
            ("0.3/s".into(), "465/s".into(), "28,232/s".into())
        );
        assert_eq!((time(42.0), time(400.0), time(10_800.0)), ("42 s".into(), "7 min".into(), "3 h".into()));
        let waiting = |number| doing(number, "connection", "wait");
        assert_eq!(
            [0, 1, 2].map(waiting),
            ["0 connections wait", "1 connection waits", "2 connections wait"]
        );
        let verbs = ["are", "were", "have"].map(|verb| doing(1, "entry", verb));
        assert_eq!(verbs, ["1 entry is", "1 entry was", "1 entry has"]);
        assert_eq!((counted(1, "call"), counted(1_200, "call")), ("1 call".into(), "1,200 calls".into()));
    }
}
