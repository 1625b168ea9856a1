//! The rules of `doctor` on real sockets, each test in a network namespace of its own.

mod accept_rules;
mod honest_load;
mod host_rules;
mod port_rules;
mod scene;
mod time_wait_rules;

#[test]
fn each_rule_has_a_row_with_its_title() {
    let page = include_str!("../../../../docs/doctor.md");
    // The rows of the experiments have a severity behind the rule.
    let is_rule = |line: &&str| {
        let id = line.strip_prefix("| `").and_then(|rest| rest.split_once("` |")).map(|(id, _)| id);
        id.is_some_and(|id| id.len() == 3 && id.ends_with(|digit: char| digit.is_ascii_digit()))
    };
    let rows: Vec<&str> = page.lines().filter(is_rule).collect();
    let row = |rule: &fourtuple_observe::doctor::Rule| format!("| `{}` | {} |", rule.id, rule.title);
    let expected: Vec<String> = fourtuple_observe::doctor::ALL.iter().map(row).collect();
    assert_eq!(rows, expected);
}
