//! Text of others, such as names of programs and replies of other hosts, made safe for a terminal and for a log.

/// Replaces control characters and invisible format characters (Unicode category Cf, such as bidirectional overrides) by
/// U+FFFD, and line ends and tabs by a space.
pub fn printable(text: &str) -> String {
    text.chars()
        .map(|character| if matches!(character, '\t' | '\n') { ' ' } else { shown(character) })
        .collect()
}

/// Like [`printable`], for text of several lines in colours: keeps line ends, tabs and colours (SGR sequences).
pub fn printable_lines(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(character) = rest.next() {
        match (character, colour(rest.as_str())) {
            ('\t' | '\n', _) => kept.push(character),
            ('\x1b', Some(colour)) => {
                kept.extend(["\x1b", colour]);
                rest = rest.as_str()[colour.len()..].chars();
            }
            _ => kept.push(shown(character)),
        }
    }
    kept
}

/// Returns the rest of an SGR sequence, at whose escape character the text before `rest` ends.
fn colour(rest: &str) -> Option<&str> {
    let numbers = rest.strip_prefix('[')?.find(|letter: char| !matches!(letter, '0'..='9' | ';'))?;
    rest.get(..numbers + 2).filter(|sequence| sequence.ends_with('m'))
}

fn shown(character: char) -> char {
    match character {
        '\u{ad}'
        | '\u{600}'..='\u{605}'
        | '\u{61c}'
        | '\u{6dd}'
        | '\u{70f}'
        | '\u{180e}'
        | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}'
        | '\u{feff}'
        | '\u{fff9}'..='\u{fffb}'
        | '\u{e0000}'..='\u{e007f}' => '\u{fffd}',
        character if character.is_control() => '\u{fffd}',
        character => character,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_get_through() {
        assert_eq!(printable("a\x1b[2Jb\r\u{202e}c\nd"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}c d");
    }

    #[test]
    fn lines_keep_their_colours_only() {
        let text = "\x1b[31m! bad\x1b[0m\n\ta\x1b[1;32mb";
        assert_eq!(printable_lines(text), text);
        for (text, kept) in [
            ("\x1b[2J", "\u{fffd}[2J"),
            ("\x1b]0;title\x07", "\u{fffd}]0;title\u{fffd}"),
            ("\x1b[31", "\u{fffd}[31"),
            ("\x1b", "\u{fffd}"),
            ("\x1b[\u{e9}m\r", "\u{fffd}[\u{e9}m\u{fffd}"),
        ] {
            assert_eq!(printable_lines(text), kept);
        }
    }
}
