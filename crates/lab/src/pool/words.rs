//! What is said of policies.

/// A policy as a program names it.
pub(crate) fn in_rust(policy: &str) -> String {
    match policy.split_once(':') {
        Some((_, every)) => format!("Policy::Rotate {{ every: {every} }}"),
        None if policy == "rotate" => "Policy::ROTATE".to_owned(),
        None => {
            let words = policy.split('-').map(|word| {
                let (first, rest) = word.split_at(word.len().min(1));
                first.to_uppercase() + rest
            });
            format!("Policy::{}", words.collect::<String>())
        }
    }
}

#[cfg(test)]
mod tests {
    use fourtuple::listen::Policy;

    use super::*;

    #[test]
    fn names_are_those_of_the_variants() {
        for policy in Policy::ALL {
            let said = in_rust(&policy.to_string());
            let name = format!("Policy::{policy:?}");
            assert!(
                said == name || policy == Policy::ROTATE && said == "Policy::ROTATE",
                "{said} for {name}"
            );
        }
        assert_eq!(in_rust("rotate:16"), "Policy::Rotate { every: 16 }");
    }
}
