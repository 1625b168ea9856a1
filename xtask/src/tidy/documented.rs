//! Checks that each public item of the library is used in an example that its reader finds.
//!
//! An item has an example if its own docs have one. Otherwise an example must name the item: one on the page of its type (the docs of the
//! type and of its methods), one in the docs of its module, unless the item is a method, or one to which the docs of the item or of its
//! type link with ``Example: [`X`]``. The check reads lines as rustfmt writes them.

use std::collections::BTreeMap;
use std::path::Path;

use crate::tidy::api;
use crate::tidy::links;
use crate::tidy::source::Source;
use crate::tidy::tree::{Fault, Tree};

/// The languages of a code block that is no example.
const NO_EXAMPLES: &[&str] = &["text", "console", "sh", "json", "toml"];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Module,
    /// A struct, an enum, a trait or an alias.
    Type,
    /// A function or a constant outside of a type.
    Free,
    /// A function or a constant of a type.
    Associated,
}

/// A public item.
struct Item<'a> {
    path: &'a Path,
    line: usize,
    kind: Kind,
    /// The type of an associated item, the module of any other.
    owner: String,
    name: &'a str,
    docs: Docs,
}

/// The part of the docs of an item that this check needs.
#[derive(Default)]
struct Docs {
    /// The visible lines of the examples.
    code: String,
    /// The items in ``Example: [`X`]`` or ``Examples: [`X`], [`Y`]``.
    links: Vec<String>,
}

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    let items = items(tree);
    // What a link shows: the docs of a method, the page of a type, the first page of a module.
    let mut examples = BTreeMap::<String, String>::new();
    for item in &items {
        *examples.entry(item.title()).or_default() += &item.docs.code;
        if item.kind == Kind::Associated {
            *examples.entry(item.owner.clone()).or_default() += &item.docs.code;
        }
    }
    let example = |title: &String| examples.get(title).map_or("", String::as_str);
    let of_types = |name: &str| items.iter().find(|item| item.kind == Kind::Type && item.name == name);
    let mut faults = Vec::new();
    for item in &items {
        let fault = |message: String| Fault::at(item.path, item.line, message);
        for link in item.docs.links.iter().filter(|link| example(link).is_empty()) {
            faults.push(fault(format!("{link} has no example to link to")));
        }
        let is_covered = match item.kind {
            Kind::Module | Kind::Type => {
                !example(&item.title()).is_empty()
                    || !item.docs.links.is_empty()
                    || item.is_named_in(example(&item.owner))
            }
            Kind::Free | Kind::Associated => {
                let links_of_type = of_types(&item.owner).map_or(&[][..], |owner| &owner.docs.links);
                let shown = item.docs.links.iter().chain(links_of_type).chain([&item.owner]);
                !item.docs.code.is_empty() || shown.into_iter().any(|title| item.is_named_in(example(title)))
            }
        };
        if !is_covered {
            faults.push(fault(format!("no example uses {} (CONTRIBUTING.md, rule 10)", item.title())));
        }
    }
    faults
}

impl Item<'_> {
    /// Returns the name of the item in a link.
    fn title(&self) -> String {
        match self.kind {
            Kind::Associated => format!("{}::{}", self.owner, self.name),
            // A function may have the same name: `dial`.
            Kind::Module => format!("mod {}", self.name),
            _ => self.name.to_owned(),
        }
    }

    /// Returns whether code names the item, an associated item after a `.` or a `::`.
    fn is_named_in(&self, code: &str) -> bool {
        let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
        code.match_indices(self.name).any(|(at, name)| {
            let before = code[..at].chars().next_back();
            let begins = match self.kind {
                Kind::Associated => matches!(before, Some('.' | ':')),
                _ => !before.is_some_and(is_word),
            };
            begins && !code[at + name.len()..].starts_with(is_word)
        })
    }
}

/// Returns the public items of the library.
fn items(tree: &Tree) -> Vec<Item<'_>> {
    let mut items: Vec<Item<'_>> = api::library(tree).flat_map(|source| items_of(tree, source)).collect();
    let modules: Vec<&str> =
        items.iter().filter(|item| item.kind == Kind::Module).map(|item| item.name).collect();
    for item in items.iter_mut().filter(|item| item.kind != Kind::Associated) {
        let mut stems = item.path.iter().filter_map(|part| Path::new(part).file_stem()?.to_str());
        let module = stems.rfind(|stem| modules.contains(stem));
        item.owner = module.map_or(String::new(), |module| format!("mod {module}"));
    }
    items
}

/// Returns the public items of a file. Those without a type have no owner yet.
fn items_of<'a>(tree: &'a Tree, source: &'a Source) -> Vec<Item<'a>> {
    let lines = api::product_lines(source);
    let mut items = Vec::new();
    let (mut docs_begin, mut in_attribute) = (0, false);
    // The type whose methods follow, and whether it is a trait: its methods are public without `pub`.
    let mut owner: Option<(&str, bool)> = None;
    for (index, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let declared = match code.strip_prefix("pub ") {
            Some(declared) => declaration(declared),
            None if owner.is_some_and(|(_, is_trait)| is_trait) => declaration(code),
            None => None,
        };
        if let Some((kind, name)) = declared
            && matches!(line.len() - code.len(), 0 | 4)
        {
            let mut docs = lines[docs_begin..index].to_vec();
            let mut path = &source.path;
            if kind == Kind::Module
                && let Some(file) = file_of(tree, &source.path, name)
            {
                docs.extend(
                    file.text.lines().take_while(|line| !line.is_empty() && !line.starts_with("///")),
                );
                path = &file.path;
            }
            let (kind, owner) = match owner {
                Some((owner, _)) if line.starts_with(' ') => (Kind::Associated, owner.to_owned()),
                _ => (kind, String::new()),
            };
            let docs = read(tree, path, &docs);
            items.push(Item { path: &source.path, line: index + 1, kind, owner, name, docs });
        }
        match line.strip_prefix("impl") {
            Some(header) if !header.contains(" for ") => owner = Some((implementer(header), false)),
            _ if line.starts_with("pub trait ") => owner = declared.map(|(_, name)| (name, true)),
            _ if *line == "}" => owner = None,
            _ => {}
        }
        let is_attribute = in_attribute || code.starts_with("#[");
        in_attribute = is_attribute && !code.ends_with(']');
        if !is_attribute && !code.starts_with("///") {
            docs_begin = index + 1;
        }
    }
    items
}

/// Returns the kind and the name of the item that a line declares, after `pub`.
fn declaration(line: &str) -> Option<(Kind, &str)> {
    let mut words = line.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
    let (mut kind, mut name) = (None, words.next()?);
    loop {
        kind = match name {
            "mod" => Some(Kind::Module),
            "struct" | "enum" | "trait" | "type" => Some(Kind::Type),
            "fn" | "const" | "async" | "unsafe" | "static" => Some(Kind::Free),
            name => return kind.map(|kind| (kind, name)),
        };
        name = words.next()?;
    }
}

/// Returns the name of the type in the header of an `impl` block, after `impl`.
fn implementer(header: &str) -> &str {
    let name = match header.strip_prefix('<') {
        Some(parameters) => parameters.split_once("> ").map_or("", |(_, name)| name),
        None => header.trim_start(),
    };
    name.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default()
}

/// Returns the file of a module that a file declares.
fn file_of<'a>(tree: &'a Tree, declaring: &Path, module: &str) -> Option<&'a Source> {
    let directory = declaring.parent()?.join(module);
    let files = [directory.with_extension("rs"), directory.join("mod.rs")];
    tree.sources.iter().find(|source| files.contains(&source.path))
}

/// Reads the docs of an item of the file at `path`.
fn read(tree: &Tree, path: &Path, lines: &[&str]) -> Docs {
    let mut docs = Docs::default();
    // The language of the block at this line.
    let mut block: Option<&str> = None;
    for line in lines.iter().map(|line| line.trim_start()).filter(|line| !line.contains("cfg_attr(not(")) {
        let attribute = line.split_once("doc = ").map(|(_, value)| value);
        let comment = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).map(str::trim_start);
        let Some(text) = comment.or(attribute.map(|value| value.trim_matches(['"', ')', ']']))) else {
            continue;
        };
        if let Some(language) = text.strip_prefix("```") {
            block = if block.is_none() { Some(language) } else { None };
        } else if block.is_some_and(|language| !NO_EXAMPLES.contains(&language)) {
            let included = text.strip_prefix("include_str!(\"").and_then(|rest| rest.split('"').next());
            let file = included.map(|file| links::resolve(path, file));
            let file = file.and_then(|file| tree.sources.iter().find(|source| source.path == file));
            if let Some(file) = file {
                docs.code += &file.text;
            } else if text != "#" && !text.starts_with("# ") {
                docs.code += text;
                docs.code.push('\n');
            }
        } else if block.is_none()
            && let Some((_, titles)) = text.split_once("Example: ").or(text.split_once("Examples: "))
        {
            let titles = titles.split("[`").skip(1).filter_map(|rest| rest.split(['`', '(']).next());
            docs.links.extend(titles.map(str::to_owned));
        }
    }
    docs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::fixture::{lines, package, tree};

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        lines(check(&tree(vec![package("fourtuple", &[])], files)))
    }

    #[test]
    fn an_item_in_an_example_passes() {
        let library = "#[cfg(test)]\nmod texts;\npub mod dial;\n";
        let module = [
            "//! Dials.",
            "//!",
            "//! ```no_run",
            "#![doc = include_str!(\"../../examples/dial.rs\")]",
            "//! ```",
            "",
            "pub const LIMIT: u8 = 1;",
        ];
        let page = [
            "/// Dials.",
            "///",
            "/// ```",
            "/// let dialer = Dialer::to(address);",
            "/// dialer.timeout(1);",
            "/// ```",
            "#[derive(Debug)]",
            "pub struct Dialer;",
            "",
            "impl<'a> Dialer<'a> {",
            "    pub fn to() {}",
            "",
            "    /// Sets the timeout.",
            "    pub const fn timeout() {}",
            "",
            "    /// Example: [`Report`].",
            "    pub fn report() {}",
            "}",
            "",
            "/// The report of a dial. Example: [`Report::source`].",
            "pub struct Report;",
            "",
            "impl Report {",
            "    /// ```",
            "    /// dialer.report().source();",
            "    /// ```",
            "    pub fn source() {}",
            "",
            "    pub(crate) fn internal() {}",
            "}",
        ];
        let files = [
            ("crates/fourtuple/src/lib.rs", library),
            ("crates/fourtuple/src/dial/mod.rs", &module.join("\n")),
            ("crates/fourtuple/src/dial/dialer.rs", &page.join("\n")),
            ("crates/fourtuple/examples/dial.rs", "fn main() { limit(LIMIT) }"),
        ];
        assert_eq!(found(&files), Vec::<String>::new());
    }

    #[test]
    fn an_item_in_no_example_is_found() {
        let page = [
            "/// ```",
            "/// # dialer.timeout(1);",
            "/// timeouts(); to(); report(1);",
            "/// ```",
            "pub struct Dialer;",
            "",
            "impl Dialer {",
            "    pub fn to() {}",
            "    pub fn timeout() {}",
            "}",
            "",
            "/// ```text",
            "/// report()",
            "/// ```",
            "pub fn report() {}",
            "",
            "/// Example: [`Dial`].",
            "pub trait Resolve {",
            "    fn resolve();",
            "}",
            "",
            "pub enum Uncovered {}",
        ];
        let (path, rule) = ("crates/fourtuple/src/dial.rs", "(CONTRIBUTING.md, rule 10)");
        let files = [("crates/fourtuple/src/lib.rs", "pub mod dial;\n"), (path, &page.join("\n"))];
        assert_eq!(
            found(&files),
            [
                format!("crates/fourtuple/src/lib.rs:1: no example uses mod dial {rule}"),
                format!("{path}:8: no example uses Dialer::to {rule}"),
                format!("{path}:9: no example uses Dialer::timeout {rule}"),
                format!("{path}:15: no example uses report {rule}"),
                format!("{path}:18: Dial has no example to link to"),
                format!("{path}:19: no example uses Resolve::resolve {rule}"),
                format!("{path}:22: no example uses Uncovered {rule}"),
            ]
        );
    }
}
