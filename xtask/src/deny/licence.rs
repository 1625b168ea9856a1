//! SPDX licence expressions: OR, AND, WITH, brackets; and the slash of old manifests, which is OR.

/// Returns whether an expression can be met with allowed licences. `is_allowed` is called for each licence with its
/// exception (`Apache-2.0 WITH LLVM-exception`). Returns `None` if the text is not a valid expression.
pub(super) fn allows(expression: &str, is_allowed: &dyn Fn(&str) -> bool) -> Option<bool> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut reader = Reader { words: &words, is_allowed };
    let allowed = reader.either()?;
    reader.words.is_empty().then_some(allowed)
}

struct Reader<'a> {
    words: &'a [&'a str],
    is_allowed: &'a dyn Fn(&str) -> bool,
}

impl<'a> Reader<'a> {
    /// Takes the next word if it equals `word`.
    fn take(&mut self, word: &str) -> bool {
        let is_next = self.words.first() == Some(&word);
        self.words = &self.words[usize::from(is_next)..];
        is_next
    }

    fn either(&mut self) -> Option<bool> {
        let mut allowed = self.both()?;
        while self.take("OR") {
            allowed |= self.both()?;
        }
        Some(allowed)
    }

    fn both(&mut self) -> Option<bool> {
        let mut allowed = self.one()?;
        while self.take("AND") {
            allowed &= self.one()?;
        }
        Some(allowed)
    }

    fn one(&mut self) -> Option<bool> {
        if self.take("(") {
            let allowed = self.either()?;
            return self.take(")").then_some(allowed);
        }
        let name = self.name()?;
        if self.take("WITH") {
            let exception = self.name()?;
            return Some((self.is_allowed)(&format!("{name} WITH {exception}")));
        }
        Some((self.is_allowed)(name))
    }

    fn name(&mut self) -> Option<&'a str> {
        let (name, rest) = self.words.split_first()?;
        self.words = rest;
        let is_word = |c: char| c.is_ascii_alphanumeric() || "-.+".contains(c);
        (name.chars().all(is_word) && !["OR", "AND", "WITH"].contains(name)).then_some(*name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_met_or_not() {
        let is_allowed = |licence: &str| ["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].contains(&licence);
        for (text, expected) in [
            ("MIT", Some(true)),
            ("GPL-3.0+", Some(false)),
            ("GPL-3.0 OR MIT", Some(true)),
            ("MIT/Apache-2.0", Some(true)),
            ("MIT AND GPL-3.0", Some(false)),
            ("(MIT OR GPL-3.0) AND ISC", Some(true)),
            ("MIT OR GPL-3.0 AND GPL-2.0", Some(true)),
            ("Apache-2.0 WITH LLVM-exception", Some(true)),
            ("Apache-2.0", Some(false)),
            ("", None),
            ("MIT ISC", None),
            ("(MIT", None),
            ("MIT OR", None),
        ] {
            assert_eq!(allows(text, &is_allowed), expected, "{text:?}");
        }
    }
}
