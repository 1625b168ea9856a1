//! A lexer for the part of Rust's syntax that tells code from comments and strings.

/// The kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// An identifier or keyword; a raw identifier without its `r#`.
    Word,
    /// One character of punctuation.
    Punctuation,
    /// A string, character or number.
    Literal,
    /// A lifetime or loop label.
    Lifetime,
    /// A comment of any form, with its slashes.
    Comment,
}

/// A token and the line on which it starts, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token<'a> {
    pub(super) kind: Kind,
    pub(super) text: &'a str,
    pub(super) line: usize,
}

impl Token<'_> {
    /// Returns whether the token is this character of punctuation.
    pub(super) fn is(&self, character: char) -> bool {
        self.kind == Kind::Punctuation && self.text.starts_with(character)
    }
}

/// Splits a file into tokens. An unterminated string or comment extends to the end of the file; rustc reports it.
pub(super) fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let mut rest = text;
    let mut line = 1;
    while let Some(first) = rest.chars().next() {
        let (kind, length) = token(rest, first);
        let (found, after) = rest.split_at(length);
        if let Some(kind) = kind {
            let text = if kind == Kind::Word { found.strip_prefix("r#").unwrap_or(found) } else { found };
            tokens.push(Token { kind, text, line });
        }
        line += found.matches('\n').count();
        rest = after;
    }
    tokens
}

/// Returns the kind (`None` for white space) and the length in bytes of the first token.
fn token(rest: &str, first: char) -> (Option<Kind>, usize) {
    if first.is_whitespace() {
        return (None, first.len_utf8());
    }
    if rest.starts_with("//") {
        return (Some(Kind::Comment), rest.find('\n').unwrap_or(rest.len()));
    }
    if rest.starts_with("/*") {
        return (Some(Kind::Comment), block_comment(rest));
    }
    if let Some(length) = string(rest) {
        return (Some(Kind::Literal), length);
    }
    if first == '\'' {
        return quote(rest);
    }
    if first.is_ascii_digit() {
        return (Some(Kind::Literal), number(rest));
    }
    if is_word(first) {
        let prefix = if rest.starts_with("r#") { 2 } else { 0 };
        return (Some(Kind::Word), prefix + span(&rest[prefix..], is_word));
    }
    (Some(Kind::Punctuation), first.len_utf8())
}

fn is_word(character: char) -> bool {
    character == '_' || character.is_alphanumeric()
}

/// Returns the number of leading bytes whose characters match.
fn span(text: &str, belongs: impl Fn(char) -> bool) -> usize {
    text.find(|character| !belongs(character)).unwrap_or(text.len())
}

/// Returns the length of a block comment; block comments nest.
fn block_comment(rest: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        let here = &rest.as_bytes()[at..];
        if here.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if here.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// Returns the length of a string at the start, in any of its forms: `""`, `r#""#`, `b""`, `br""`, `c""`, `cr""`.
fn string(rest: &str) -> Option<usize> {
    let prefix = ["br", "cr", "r", "b", "c", ""].into_iter().find(|prefix| {
        let after = rest.strip_prefix(prefix).unwrap_or_default();
        let after = if prefix.ends_with('r') { after.trim_start_matches('#') } else { after };
        after.starts_with('"')
    })?;
    let after = &rest[prefix.len()..];
    if prefix.ends_with('r') {
        let hashes = span(after, |character| character == '#');
        let close = format!("\"{}", "#".repeat(hashes));
        let body = prefix.len() + hashes + 1;
        return Some(rest[body..].find(&close).map_or(rest.len(), |end| body + end + close.len()));
    }
    Some(prefix.len() + escaped(after, b'"'))
}

/// Returns the length of a literal from its opening quote to the next quote without a backslash.
fn escaped(text: &str, quote: u8) -> usize {
    let mut bytes = text.bytes().enumerate().skip(1);
    while let Some((index, byte)) = bytes.next() {
        if byte == b'\\' {
            bytes.next();
        } else if byte == quote {
            return index + 1;
        }
    }
    text.len()
}

/// Lexes after a single quote: a character if another quote follows the character, otherwise a lifetime.
fn quote(rest: &str) -> (Option<Kind>, usize) {
    let mut characters = rest[1..].chars();
    let (second, third) = (characters.next(), characters.next());
    if second == Some('\\') || third == Some('\'') {
        return (Some(Kind::Literal), escaped(rest, b'\''));
    }
    (Some(Kind::Lifetime), 1 + span(&rest[1..], is_word))
}

/// Returns the length of a number with its suffix and fraction; in `1..2` the dots are a range.
fn number(rest: &str) -> usize {
    let whole = span(rest, is_word);
    let fraction =
        rest[whole..].strip_prefix('.').filter(|after| after.starts_with(|c: char| c.is_ascii_digit()));
    whole + fraction.map_or(0, |after| 1 + span(after, is_word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(kind: Kind, text: &str) -> Vec<&str> {
        tokens(text).into_iter().filter(|token| token.kind == kind).map(|token| token.text).collect()
    }

    #[test]
    fn strings_hide_words() {
        let text = r####"a("unsafe \" unsafe", r"unsafe\", r##"unsafe "# unsafe"##, b"unsafe", c"unsafe", br#"unsafe"#) b"####;
        assert_eq!(of(Kind::Word, text), ["a", "b"]);
    }

    #[test]
    fn comments_hide_words_and_nest() {
        let text = "a // unsafe\nb /* unsafe /* unsafe */ unsafe */ c /// unsafe";
        assert_eq!(of(Kind::Word, text), ["a", "b", "c"]);
        assert_eq!(of(Kind::Comment, text).len(), 3);
    }

    #[test]
    fn lifetimes_are_not_characters() {
        let text = r"fn f<'a>(x: &'a str, y: &'static u8) { '\'' ; 'x'; b'\\'; 'é'; 'outer: loop {} }";
        assert_eq!(of(Kind::Lifetime, text), ["'a", "'a", "'static", "'outer"]);
        // The prefix b of a byte literal becomes a token of its own; no check depends on it.
        assert_eq!(of(Kind::Literal, text), [r"'\''", "'x'", r"'\\'", "'é'"]);
    }

    #[test]
    fn raw_identifiers_lose_their_prefix_and_ranges_their_dots() {
        assert_eq!(of(Kind::Word, "r#type rest bytes crate"), ["type", "rest", "bytes", "crate"]);
        assert_eq!(of(Kind::Literal, "0..16 1.5e3 0xff_u8"), ["0", "16", "1.5e3", "0xff_u8"]);
    }

    #[test]
    fn lines_are_counted_across_everything() {
        let text = "a\n\"two\nlines\"\n/* two\nlines */\nb";
        let last = tokens(text).pop().unwrap();
        assert_eq!((last.text, last.line), ("b", 6));
    }

    #[test]
    fn unterminated_tokens_end_with_the_file() {
        for text in ["\"a", "/* a", "r#\"a", "'\\", "'"] {
            assert_eq!(tokens(text).len(), 1, "{text}");
        }
    }
}
