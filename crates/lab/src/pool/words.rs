//! Policy names in advice.

/// Returns the Rust expression for a policy name.
pub(crate) fn in_rust(policy: &str) -> String {
    match policy.split_once(':') {
        Some((_, every)) => format!("AcceptPolicy::Rotate {{ every: {every} }}"),
        None if policy == "rotate" => "AcceptPolicy::ROTATE".to_owned(),
        None => {
            let words = policy.split('-').map(|word| {
                let (first, rest) = word.split_at(word.len().min(1));
                first.to_uppercase() + rest
            });
            format!("AcceptPolicy::{}", words.collect::<String>())
        }
    }
}

#[cfg(test)]
mod tests {
    use fourtuple::listen::AcceptPolicy;

    use super::*;

    #[test]
    fn policy_names_match_the_enum_variants() {
        for policy in AcceptPolicy::ALL {
            let said = in_rust(&policy.to_string());
            let name = format!("AcceptPolicy::{policy:?}");
            assert!(
                said == name || policy == AcceptPolicy::ROTATE && said == "AcceptPolicy::ROTATE",
                "{said} for {name}"
            );
        }
        assert_eq!(in_rust("rotate:16"), "AcceptPolicy::Rotate { every: 16 }");
    }
}
