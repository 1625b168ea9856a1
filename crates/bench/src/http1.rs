//! What the header fields of HTTP/1 say about the body and the connection, for the parsers of load, serve and lab.

use httparse::Header;

/// Why the length of a body is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BadLength {
    NotANumber,
    /// Two values that differ are an attack or a mistake (RFC 9112, 6.3).
    Different,
}

/// Returns Content-Length: digits only (RFC 9110, 8.6), where `u64::from_str` takes a sign too.
pub(crate) fn content_length(headers: &[Header<'_>]) -> Result<Option<u64>, BadLength> {
    let mut length = None;
    for header in named(headers, "content-length") {
        let digits = header.value.trim_ascii();
        let text = std::str::from_utf8(digits).ok().filter(|_| digits.iter().all(u8::is_ascii_digit));
        let value = text.and_then(|text| text.parse().ok()).ok_or(BadLength::NotANumber)?;
        if length.is_some_and(|other| other != value) {
            return Err(BadLength::Different);
        }
        length = Some(value);
    }
    Ok(length)
}

/// Returns whether the connection closes after this message: by default HTTP/1.0 closes, HTTP/1.1 keeps alive (RFC 9112, 9.3).
pub(crate) fn closes(headers: &[Header<'_>], version: Option<u8>) -> bool {
    lists(headers, "connection", "close") || version == Some(0) && !lists(headers, "connection", "keep-alive")
}

/// Returns whether a field with a comma-separated list contains `word`.
pub(crate) fn lists(headers: &[Header<'_>], name: &str, word: &str) -> bool {
    named(headers, name).any(|header| {
        let mut words = header.value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
        words.any(|found| found.eq_ignore_ascii_case(word.as_bytes()))
    })
}

/// Returns the first value of a field, if it is text.
pub(crate) fn value<'h>(headers: &[Header<'h>], name: &str) -> Option<&'h str> {
    let header = headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
    std::str::from_utf8(header.value).ok().map(str::trim)
}

/// Returns the fields of this name.
pub(crate) fn named<'a, 'h>(
    headers: &'a [Header<'h>],
    name: &'a str,
) -> impl Iterator<Item = &'a Header<'h>> + use<'a, 'h> {
    headers.iter().filter(move |header| header.name.eq_ignore_ascii_case(name))
}
