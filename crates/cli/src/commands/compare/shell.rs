/// Splits a command line as a shell does: at blanks outside of quotes. Supports '...', "..." and \; inside of "..." a \
/// escapes " \ $ and `. Does not expand variables or patterns.
///
/// # Errors
/// A text for the user if a quote is not closed, or if the text ends with a \.
pub(super) fn split(text: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            ' ' | '\t' | '\n' => words.extend(word.take()),
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match letters.next().ok_or("a ' is not closed")? {
                        '\'' => break,
                        inside => word.push(inside),
                    }
                }
            }
            '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match letters.next().ok_or("a \" is not closed")? {
                        '"' => break,
                        '\\' => match letters.next().ok_or("a \" is not closed")? {
                            escaped @ ('"' | '\\' | '$' | '`') => word.push(escaped),
                            other => word.extend(['\\', other]),
                        },
                        inside => word.push(inside),
                    }
                }
            }
            '\\' => {
                word.get_or_insert_default().push(letters.next().ok_or("nothing stands after the last \\")?)
            }
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn quotes_and_escapes_follow_the_shell() {
        for (text, words) in [
            ("", &[][..]),
            ("  lab   ports\t--range 1-2\n", &["lab", "ports", "--range", "1-2"]),
            ("a 'b c' \"d e\"f", &["a", "b c", "d ef"]),
            (r#"a\ b "c\"d\e" '\'"#, &["a b", r#"c"d\e"#, r"\"]),
            ("'' \"\"", &["", ""]),
        ] {
            assert_eq!(split(text).unwrap(), words, "{text:?}");
        }
        for text in ["'a", "\"a", "a\\", "\"a\\"] {
            assert!(split(text).is_err(), "{text:?}");
        }
    }
}
