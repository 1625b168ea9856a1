use std::time::Duration;

/// `28,232`.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 source`, `2 sources`, `2 addresses`.
pub(super) fn counted(number: u64, noun: &str) -> String {
    let plural = match (number, noun.ends_with('s')) {
        (1, _) => "",
        (_, false) => "s",
        (_, true) => "es",
    };
    format!("{} {noun}{plural}", grouped(number))
}

/// Three digits and the unit that suits: `12.1 s`, `850 ms`, `2 min`.
pub(super) fn in_words(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    let (number, unit) = match seconds {
        0.0 => return "0 s".to_owned(),
        s if s < 1e-3 => (s * 1e6, "us"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s if s < 600.0 => (s, "s"),
        s if s < 7_200.0 => (s / 60.0, "min"),
        s => (s / 3_600.0, "h"),
    };
    let digits = match number {
        n if n < 10.0 => 2,
        n if n < 100.0 => 1,
        _ => 0,
    };
    let text = format!("{number:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {unit}")
}

/// `97%`, `2.4%`.
pub(super) fn percent(share: f64) -> String {
    let number = share * 100.0;
    if number < 10.0 && number.fract() != 0.0 { format!("{number:.1}%") } else { format!("{number:.0}%") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([1, 999, 28_231, 1_200_000].map(grouped), ["1", "999", "28,231", "1,200,000"]);
        let words = |ms| in_words(Duration::from_millis(ms));
        assert_eq!([words(0), words(850), words(12_100), words(60_000)], ["0 s", "850 ms", "12.1 s", "60 s"]);
        assert_eq!(words(7_200_000), "2 h");
        assert_eq!([counted(1, "source"), counted(2, "address")], ["1 source", "2 addresses"]);
        assert_eq!([percent(0.97), percent(0.024), percent(0.05)], ["97%", "2.4%", "5%"]);
    }
}
