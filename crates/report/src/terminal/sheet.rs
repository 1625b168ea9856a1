use fourtuple_record::printable;

use crate::document::Tone;
use crate::terminal::table::Text;

/// The style of a text when colours are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Tone(Tone),
    /// Intensity in a heat map, from 1 (few) to 4 (many).
    Heat(u8),
}

impl Style {
    pub(super) const PLAIN: Style = Style::Tone(Tone::Plain);
    pub(super) const DIM: Style = Style::Tone(Tone::Dim);

    fn code(self) -> &'static str {
        match self {
            Style::Tone(Tone::Plain) => "",
            Style::Tone(Tone::Strong) => "\x1b[1m",
            Style::Tone(Tone::Dim) => "\x1b[2m",
            Style::Tone(Tone::Good) => "\x1b[32m",
            Style::Tone(Tone::Bad) => "\x1b[31m",
            Style::Heat(..=1) => "\x1b[34m",
            Style::Heat(2) => "\x1b[36m",
            Style::Heat(3) => "\x1b[33m",
            Style::Heat(4..) => "\x1b[91m",
        }
    }
}

/// A line: texts side by side, each with its style.
pub(super) type Line = Vec<(String, Style)>;

/// Lines of limited width.
pub(super) struct Sheet {
    width: usize,
    color: bool,
    text: String,
}

impl Sheet {
    pub(super) fn new(width: usize, color: bool) -> Sheet {
        // Below this width a name and its number do not fit side by side.
        Sheet { width: width.max(20), color, text: String::new() }
    }

    /// Adds an empty line unless the last line is empty.
    pub(super) fn gap(&mut self) {
        if !self.text.is_empty() && !self.text.ends_with("\n\n") {
            self.text.push('\n');
        }
    }

    pub(super) fn heading(&mut self, text: &str) {
        self.gap();
        self.item("", text, Tone::Strong);
    }

    /// Adds a wrapped paragraph; `mark` precedes its first line, and further lines are indented by the same width.
    pub(super) fn item(&mut self, mark: &str, text: &str, tone: Tone) {
        let indent = mark.chars().count();
        let lines = wrap(&printable(text), self.width - indent);
        for (number, line) in lines.iter().enumerate() {
            let before = if number == 0 { mark.to_owned() } else { " ".repeat(indent) };
            self.line(&[(before + line, Style::Tone(tone))]);
        }
    }

    /// Adds a line that is never wrapped, because a terminal copies a wrapped command as several lines.
    pub(super) fn unbroken(&mut self, mark: &str, text: &str) {
        self.line(&[(mark.to_owned() + &printable(text), Style::PLAIN)]);
    }

    /// Adds short facts separated by dots; lines break between two facts if possible.
    pub(super) fn list(&mut self, facts: &[String], tone: Tone) {
        let mut line = String::new();
        for fact in facts.iter().map(|fact| printable(fact)) {
            if !line.is_empty() && line.chars().count() + 3 + fact.chars().count() > self.width {
                self.item("", &std::mem::take(&mut line), tone);
            }
            if !line.is_empty() {
                line.push_str(" · ");
            }
            line.push_str(&fact);
        }
        self.item("", &line, tone);
    }

    /// Returns the number of columns of a line.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    pub(super) fn table(&mut self, table: &Text) {
        let (lines, dropped) = table.fit(self.width);
        for line in &lines {
            self.line(line);
        }
        if !dropped.is_empty() {
            self.item("", &format!("(left out at this width: {})", dropped.join(", ")), Tone::Dim);
        }
    }

    /// Adds one line, which must fit the width.
    pub(super) fn line(&mut self, pieces: &[(String, Style)]) {
        let start = self.text.len();
        for (text, style) in pieces {
            if self.color && *style != Style::PLAIN && !text.trim().is_empty() {
                self.text.extend([style.code(), text, "\x1b[0m"]);
            } else {
                self.text.push_str(text);
            }
        }
        let end = start + self.text[start..].trim_end().len();
        self.text.truncate(end);
        self.text.push('\n');
    }

    pub(super) fn finish(self) -> String {
        self.text
    }
}

/// Breaks at spaces; cuts a word that is longer than a line.
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
    fn text_wraps_at_spaces_and_long_words_are_cut() {
        assert_eq!(wrap("one two  three", 7), ["one two", "three"]);
        assert_eq!(wrap("abcdefghij kl", 4), ["abcd", "efgh", "ij", "kl"]);
        assert_eq!(wrap("", 4), [""]);
    }

    #[test]
    fn only_text_is_coloured() {
        let mut sheet = Sheet::new(40, true);
        sheet.item("! ", "bad", Tone::Bad);
        assert_eq!(sheet.finish(), "\x1b[31m! bad\x1b[0m\n");
    }
}
