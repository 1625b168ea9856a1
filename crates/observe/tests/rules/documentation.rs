//! The table of rules in docs/doctor.md.

#[test]
fn each_rule_has_a_row_with_its_title() {
    let page = include_str!("../../../../docs/doctor.md");
    let rows: Vec<&str> = page
        .lines()
        .filter(|line| {
            line.len() > 8
                && line.starts_with("| `")
                && line[3..6].ends_with(|digit: char| digit.is_ascii_digit())
                // The rows of the experiments have a severity there.
                && line[6..].starts_with("` |")
        })
        .collect();
    let expected: Vec<String> = fourtuple_observe::doctor::ALL
        .iter()
        .map(|rule| format!("| `{}` | {} |", rule.id, rule.title))
        .collect();
    assert_eq!(rows, expected);
}
