//! The files of the tree: Rust files and prose.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::tidy::lexer::{self, Kind, Token};

/// One Rust file.
pub(super) struct Source {
    /// Path relative to the root of the workspace.
    pub(super) path: PathBuf,
    pub(super) text: String,
}

impl Source {
    /// Returns its tokens, including comments.
    pub(super) fn tokens(&self) -> Vec<Token<'_>> {
        lexer::tokens(&self.text)
    }

    /// Returns whether the whole file is tests, benchmarks or examples, by its path.
    pub(super) fn is_test(&self) -> bool {
        let in_directory =
            |name: &str| self.path.parent().is_some_and(|parent| parent.iter().any(|part| part == name));
        in_directory("tests")
            || in_directory("benches")
            || in_directory("examples")
            || self.path.ends_with("tests.rs")
    }

    /// Returns the tokens that are compiled into the product: no comments, and nothing under `#[cfg(test)]`.
    pub(super) fn product_tokens(&self) -> Vec<Token<'_>> {
        if self.is_test() {
            return Vec::new();
        }
        let tokens: Vec<Token<'_>> =
            self.tokens().into_iter().filter(|token| token.kind != Kind::Comment).collect();
        let mut kept = Vec::new();
        let mut at = 0;
        while at < tokens.len() {
            match test_attribute(&tokens[at..]) {
                Some(Attribute { inner: true, .. }) => return Vec::new(),
                Some(Attribute { inner: false, length }) => {
                    at += length;
                    at += item_length(&tokens[at..]);
                }
                None => {
                    kept.push(tokens[at]);
                    at += 1;
                }
            }
        }
        kept
    }
}

/// A file with prose that is not Rust: Markdown, C or Go.
pub(super) struct Page {
    /// Path relative to the root of the workspace.
    pub(super) path: PathBuf,
    pub(super) text: String,
}

/// Returns the files below the root in the order of their paths, without build output and hidden directories.
pub(super) fn read(root: &Path) -> Result<(Vec<Source>, Vec<Page>)> {
    let (mut sources, mut pages) = (Vec::new(), Vec::new());
    walk(root, root, &mut sources, &mut pages)?;
    sources.sort_by(|a, b| a.path.cmp(&b.path));
    pages.sort_by(|a, b| a.path.cmp(&b.path));
    Ok((sources, pages))
}

fn walk(root: &Path, directory: &Path, sources: &mut Vec<Source>, pages: &mut Vec<Page>) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let entry = entry?;
        let path = entry.path();
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if entry.file_type()?.is_dir() {
            if name != "target" && !name.starts_with('.') {
                walk(root, &path, sources, pages)?;
            }
            continue;
        }
        let read = || fs::read_to_string(&path).with_context(|| format!("read {}", path.display()));
        let inside = path.strip_prefix(root).unwrap_or(&path).to_owned();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("rs") => sources.push(Source { text: read()?, path: inside }),
            Some("md" | "c" | "h" | "go") => pages.push(Page { text: read()?, path: inside }),
            _ => {}
        }
    }
    Ok(())
}

/// A `#[cfg(test)]` or `#![cfg(test)]`, and the number of its tokens.
struct Attribute {
    inner: bool,
    length: usize,
}

/// Returns the attribute at the start of the tokens if it limits an item to tests.
fn test_attribute(tokens: &[Token<'_>]) -> Option<Attribute> {
    let inner = tokens.get(1).is_some_and(|token| token.is('!'));
    let open = if inner { 2 } else { 1 };
    if !tokens.first()?.is('#') || !tokens.get(open)?.is('[') || tokens.get(open + 1)?.text != "cfg" {
        return None;
    }
    let body = &tokens[open..open + group_length(&tokens[open..])];
    let has = |word: &str| body.iter().any(|token| token.kind == Kind::Word && token.text == word);
    (has("test") && !has("not")).then_some(Attribute { inner, length: open + body.len() })
}

/// Returns the number of tokens of the bracketed group at the start, brackets included.
fn group_length(tokens: &[Token<'_>]) -> usize {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate() {
        if token.is('(') || token.is('[') || token.is('{') {
            depth += 1;
        } else if token.is(')') || token.is(']') || token.is('}') {
            depth = depth.saturating_sub(1);
            if depth == 0 {
                return index + 1;
            }
        }
    }
    tokens.len()
}

/// Returns the number of tokens of the item at the start, with its attributes: up to a `;` or the end of its braces.
fn item_length(tokens: &[Token<'_>]) -> usize {
    let mut at = 0;
    while at < tokens.len() {
        if tokens[at].is(';') {
            return at + 1;
        }
        if tokens[at].is('{') {
            return at + group_length(&tokens[at..]);
        }
        at += if tokens[at].is('(') || tokens[at].is('[') { group_length(&tokens[at..]) } else { 1 };
    }
    tokens.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(path: &str, text: &str) -> Vec<String> {
        let source = Source { path: PathBuf::from(path), text: text.to_owned() };
        source
            .product_tokens()
            .into_iter()
            .filter(|token| token.kind == Kind::Word)
            .map(|token| token.text.to_owned())
            .collect()
    }

    #[test]
    fn code_for_tests_only_is_left_out() {
        let text = "use a; #[cfg(test)] #[allow(b)] mod tests { fn c() { d(); } } struct E;
            #[cfg(all(test, unix))] use f; fn g() {}";
        assert_eq!(words("src/lib.rs", text), ["use", "a", "struct", "E", "fn", "g"]);
    }

    #[test]
    fn code_outside_tests_is_kept() {
        let text = "#[cfg(not(test))] fn a() {} #[cfg(unix)] fn b() {}";
        let words = words("src/lib.rs", text);
        assert!(words.contains(&"a".to_owned()) && words.contains(&"b".to_owned()));
    }

    #[test]
    fn whole_files_of_tests_are_empty() {
        assert!(words("src/lib.rs", "#![cfg(test)] fn a() {}").is_empty());
        assert!(words("crates/a/tests/dial.rs", "fn a() {}").is_empty());
        assert!(words("crates/a/src/ports/tests.rs", "fn a() {}").is_empty());
    }
}
