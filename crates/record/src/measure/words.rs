//! Numbers as text, for advice and error messages.

/// Formats an integer: `28,232`.
pub fn grouped(number: u64) -> String {
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

/// Formats a count with its noun: `1 source`, `2 sources`, `2 source addresses`.
pub fn counted(number: u64, noun: &str) -> String {
    let number = (number, grouped(number));
    let hisses = ["s", "x", "ch", "sh"].iter().any(|end| noun.ends_with(end));
    match (noun.strip_suffix('y'), number) {
        (_, (1, one)) => format!("{one} {noun}"),
        (Some(stem), (_, all)) if !stem.ends_with(['a', 'e', 'o', 'u']) => format!("{all} {stem}ies"),
        (_, (_, all)) => format!("{all} {noun}{}", if hisses { "es" } else { "s" }),
    }
}

/// Formats a number: `2,000`, `470.5`, `0.003`.
pub fn decimal(number: f64) -> String {
    if number >= 1000.0 || number.fract() == 0.0 {
        return grouped(number.round() as u64);
    }
    format!("{number:.*}", if number >= 1.0 { 1 } else { 3 })
}

/// Formats a share: `97%`, `2.4%`.
pub fn percent(share: f64) -> String {
    let number = share * 100.0;
    if number < 10.0 && number.fract() != 0.0 { format!("{number:.1}%") } else { format!("{number:.0}%") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(
            ["1", "999", "1,000", "28,232", "1,000,000"],
            [1, 999, 1000, 28232, 1_000_000].map(grouped).each_ref().map(String::as_str)
        );
        assert_eq!(
            ["0", "0.003", "470.5", "2,000"],
            [0.0, 0.003, 470.53, 2000.4].map(decimal).each_ref().map(String::as_str)
        );
        assert_eq!([counted(1, "source"), counted(2, "source address")], ["1 source", "2 source addresses"]);
        assert_eq!([percent(0.97), percent(0.024), percent(0.05)], ["97%", "2.4%", "5%"]);
    }
}
