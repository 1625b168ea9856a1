use super::table::Table;

/// How a piece of text looks when there are colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Strong,
    Dim,
    Good,
    Bad,
    /// Of a heat map, from 1 (few) to 4 (many).
    Heat(u8),
}

impl Tone {
    fn code(self) -> &'static str {
        match self {
            Tone::Plain => "",
            Tone::Strong => "\x1b[1m",
            Tone::Dim => "\x1b[2m",
            Tone::Good => "\x1b[32m",
            Tone::Bad => "\x1b[31m",
            Tone::Heat(..=1) => "\x1b[34m",
            Tone::Heat(2) => "\x1b[36m",
            Tone::Heat(3) => "\x1b[33m",
            Tone::Heat(4..) => "\x1b[91m",
        }
    }
}

/// A line: texts that stand side by side, each with its tone.
pub(crate) type Line = Vec<(String, Tone)>;

/// Lines of limited width.
pub(crate) struct Sheet {
    width: usize,
    color: bool,
    text: String,
}

impl Sheet {
    pub(crate) fn new(width: usize, color: bool) -> Sheet {
        // Narrower than this not even a name and its number stand side by side.
        Sheet { width: width.max(20), color, text: String::new() }
    }

    /// An empty line, unless there is one.
    pub(crate) fn gap(&mut self) {
        if !self.text.is_empty() && !self.text.ends_with("\n\n") {
            self.text.push('\n');
        }
    }

    pub(crate) fn heading(&mut self, text: &str) {
        self.gap();
        self.item("", text, Tone::Strong);
    }

    /// A wrapped paragraph; `mark` stands before its first line and the others are indented by as much.
    pub(crate) fn item(&mut self, mark: &str, text: &str, tone: Tone) {
        let indent = mark.chars().count();
        let lines = wrap(&printable(text), self.width - indent);
        for (number, line) in lines.iter().enumerate() {
            let before = if number == 0 { mark.to_owned() } else { " ".repeat(indent) };
            self.line(&[(before + line, tone)]);
        }
    }

    /// Short things in a row with dots between; a line breaks between two of them only, if it can.
    pub(crate) fn list(&mut self, things: &[String], tone: Tone) {
        let mut line = String::new();
        for thing in things.iter().map(|thing| printable(thing)) {
            if !line.is_empty() && line.chars().count() + 3 + thing.chars().count() > self.width {
                self.item("", &std::mem::take(&mut line), tone);
            }
            if !line.is_empty() {
                line.push_str(" · ");
            }
            line.push_str(&thing);
        }
        self.item("", &line, tone);
    }

    /// Columns of a line.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    pub(crate) fn table(&mut self, table: &Table) {
        let (lines, dropped) = table.fit(self.width);
        for line in &lines {
            self.line(line);
        }
        if !dropped.is_empty() {
            self.item("", &format!("(left out at this width: {})", dropped.join(", ")), Tone::Dim);
        }
    }

    /// One line, which is to be no longer than the width.
    pub(crate) fn line(&mut self, pieces: &[(String, Tone)]) {
        let start = self.text.len();
        for (text, tone) in pieces {
            if self.color && *tone != Tone::Plain && !text.trim().is_empty() {
                self.text.extend([tone.code(), text, "\x1b[0m"]);
            } else {
                self.text.push_str(text);
            }
        }
        let end = start + self.text[start..].trim_end().len();
        self.text.truncate(end);
        self.text.push('\n');
    }

    pub(crate) fn finish(self) -> String {
        self.text
    }
}

/// `text` without anything that moves the cursor or changes the direction of writing.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|character| match character {
            '\t' | '\n' => ' ',
            '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' => {
                '\u{fffd}'
            }
            character if character.is_control() => '\u{fffd}',
            character => character,
        })
        .collect()
}

/// Breaks at spaces; a word that is longer than a line is cut.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut used = 0;
    for word in text.split_whitespace() {
        let letters: Vec<char> = word.chars().collect();
        if used > 0 && used + 1 + letters.len() > width {
            lines.push(String::new());
            used = 0;
        }
        if used > 0 {
            lines.last_mut().expect("there is a line from the start").push(' ');
            used += 1;
        }
        for letter in letters {
            if used == width {
                lines.push(String::new());
                used = 0;
            }
            lines.last_mut().expect("there is a line from the start").push(letter);
            used += 1;
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wraps_at_spaces_and_cuts_what_has_none() {
        assert_eq!(wrap("one two  three", 7), ["one two", "three"]);
        assert_eq!(wrap("abcdefghij kl", 4), ["abcd", "efgh", "ij", "kl"]);
        assert_eq!(wrap("", 4), [""]);
    }

    #[test]
    fn control_characters_do_not_get_through() {
        assert_eq!(printable("a\x1b[2Jb\r\u{202e}c\nd"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}c d");
    }

    #[test]
    fn only_text_is_coloured() {
        let mut sheet = Sheet::new(40, true);
        sheet.item("! ", "bad", Tone::Bad);
        assert_eq!(sheet.finish(), "\x1b[31m! bad\x1b[0m\n");
    }
}
