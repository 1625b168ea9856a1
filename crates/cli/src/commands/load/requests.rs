//! The file of `--requests`: one JSON object a line.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fourtuple_bench::load::{HttpRequest, MAX_BODY, MAX_BYTES};
use serde::Deserialize;

use crate::exit::UsageError;
use crate::input;

/// Maximum length of the file in bytes.
const MAX_FILE: u64 = 256 << 20;

/// A line of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    method: Option<String>,
    path: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    body: Option<String>,
    body_file: Option<PathBuf>,
}

/// Reads a file with a body: a regular one may be longer than what a device without an end may fill.
pub(super) fn body(path: &Path) -> Result<Vec<u8>, String> {
    let is_regular = path.metadata().is_ok_and(|file| file.is_file());
    let most = if is_regular { MAX_BODY } else { MAX_BYTES.into() };
    input::read(path, most).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// Reads the requests; `common` has the authority and the headers that all share, and the default path.
pub(super) fn read(path: &Path, common: &HttpRequest) -> Result<Vec<HttpRequest>, UsageError> {
    let place = path.display();
    let refuse = |why: String| UsageError(format!("invalid value '{place}' for '--requests': {why}"));
    let text = input::read(path, MAX_FILE)
        .and_then(input::utf8)
        .map_err(|error| refuse(format!("cannot read it: {error}")))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let requests = lines.map(|(number, line)| {
        request(line, common).map_err(|why| refuse(format!("line {}: {why}", number + 1)))
    });
    let requests = requests.collect::<Result<Vec<_>, _>>()?;
    if requests.is_empty() {
        return Err(refuse("expected one JSON object a line, such as {\"path\": \"/\"}".to_owned()));
    }
    Ok(requests)
}

fn request(line: &str, common: &HttpRequest) -> Result<HttpRequest, String> {
    let Line { method, path, headers, body, body_file } =
        serde_json::from_str(line).map_err(|error| parse_error(&error))?;
    let body = match (body, body_file) {
        (Some(_), Some(_)) => return Err("expected body or body_file, not both".to_owned()),
        (Some(text), None) => Some(text.into_bytes()),
        (None, Some(path)) => Some(self::body(&path)?),
        (None, None) => None,
    };
    let method = method.unwrap_or_else(|| if body.is_some() { "POST" } else { "GET" }.to_owned());
    if !HttpRequest::is_token(&method) {
        return Err(format!("invalid method {method:?}: expected a name of HTTP, such as GET"));
    }
    let path = path.unwrap_or_else(|| common.path.clone());
    if !HttpRequest::is_path(&path) {
        return Err(format!("invalid path {path:?}: expected one that begins with / and has no blanks"));
    }
    let is_header =
        |(name, value): &(&String, &String)| HttpRequest::is_token(name) && HttpRequest::is_value(value);
    if let Some((name, value)) = headers.iter().find(|header| !is_header(header)) {
        return Err(format!(
            "invalid header {:?}: expected a name and a value on one line",
            format!("{name}: {value}")
        ));
    }
    let is_own = |name: &str| headers.keys().any(|own| own.eq_ignore_ascii_case(name));
    let mut all: Vec<(String, String)> =
        common.headers.iter().filter(|(name, _)| !is_own(name)).cloned().collect();
    all.extend(headers.clone());
    Ok(HttpRequest { method, path, headers: all, body: body.unwrap_or_default(), ..common.clone() })
}

/// Returns the message of the parser without its position: it parsed one line.
fn parse_error(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or_default();
    format!("{text}: expected an object with method, path, headers, body or body_file")
}
