//! Circles of imports between the files of one crate.
//!
//! A file imports another file when a path in its code names an item that the other file defines. Re-exports are followed to the
//! file that defines the item, so a `mod.rs` that only re-exports its children is in no circle.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::tidy::lexer::{Kind, Token};
use crate::tidy::purity::paths;
use crate::tidy::source::Source;
use crate::tidy::tree::{Fault, Tree};

/// The largest circle that passes, in files.
const MAX_FILES: usize = 3;

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    let mut faults = Vec::new();
    for package in &tree.workspace.packages {
        for root in &package.roots {
            let modules = Modules::below(root, &tree.sources);
            for circle in circles(&modules.imports()).into_iter().filter(|circle| circle.len() > MAX_FILES) {
                let names: Vec<String> = circle.iter().map(|file| file.display().to_string()).collect();
                let count = circle.len();
                faults.push(Fault::in_file(root, format!("a circle of {count} files: {}", names.join(", "))));
            }
        }
    }
    faults
}

/// The modules of one crate: path of the module (`["listen", "wait"]`) to its file.
struct Modules<'a> {
    files: BTreeMap<Vec<String>, Module<'a>>,
}

struct Module<'a> {
    path: &'a Path,
    tokens: Vec<Token<'a>>,
    /// Names that a `use` brings into the module, with the full path from the root of the crate.
    uses: BTreeMap<String, Vec<String>>,
}

impl<'a> Modules<'a> {
    /// Reads the modules below a root file such as `crates/load/src/lib.rs`.
    fn below(root: &Path, sources: &'a [Source]) -> Modules<'a> {
        let directory = root.parent().unwrap_or(Path::new(""));
        let mut files = BTreeMap::new();
        for source in sources {
            let Ok(inside) = source.path.strip_prefix(directory) else { continue };
            let is_root = source.path == root;
            if source.is_test() || (!is_root && matches!(inside.to_str(), Some("lib.rs" | "main.rs"))) {
                continue;
            }
            let name = if is_root { Vec::new() } else { module_path(inside) };
            let tokens = source.product_tokens();
            let uses = uses(&tokens, &name);
            files.insert(name, Module { path: &source.path, tokens, uses });
        }
        Modules { files }
    }

    /// Returns for each file the files of the crate that it imports.
    fn imports(&self) -> BTreeMap<&'a Path, BTreeSet<&'a Path>> {
        let mut imports: BTreeMap<&Path, BTreeSet<&Path>> = BTreeMap::new();
        for (name, module) in &self.files {
            let targets = imports.entry(module.path).or_default();
            // A single name was imported by a `use`, which is already counted, or is a `mod` declaration.
            for path in code_paths(&module.tokens).into_iter().filter(|path| path.len() > 1) {
                let Some(path) = self.absolute(&path, name, module) else { continue };
                if let Some(file) = self.file_of(&path, 0).filter(|file| *file != module.path) {
                    targets.insert(file);
                }
            }
        }
        imports
    }

    /// Returns the path from the root of the crate, if the path starts inside this crate.
    fn absolute(&self, path: &[String], name: &[String], module: &Module<'_>) -> Option<Vec<String>> {
        let child = || [name, &path[..1]].concat();
        if let Some(path) = from_root(path, name) {
            return Some(path);
        }
        if let Some(used) = module.uses.get(&path[0]) {
            return Some([used.as_slice(), &path[1..]].concat());
        }
        self.files.contains_key(&child()).then(|| [name, path].concat())
    }

    /// Returns the file that defines the item of a path; follows re-exports of the modules on the way.
    fn file_of(&self, path: &[String], depth: usize) -> Option<&'a Path> {
        let known = (0..=path.len()).rev().find(|&length| self.files.contains_key(&path[..length]))?;
        let module = &self.files[&path[..known]];
        match path.get(known).and_then(|item| module.uses.get(item)) {
            // The bound ends the search if two modules re-export each other.
            Some(used) if depth < 8 => {
                self.file_of(&[used.as_slice(), &path[known + 1..]].concat(), depth + 1)
            }
            _ => Some(module.path),
        }
    }
}

/// Returns the module of a file: `listen/wait/mod.rs` and `listen/wait.rs` are the module `listen::wait`.
fn module_path(inside: &Path) -> Vec<String> {
    let mut parts: Vec<String> =
        inside.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if parts.last().is_some_and(|last| last == "mod") {
        parts.pop();
    }
    parts
}

/// Returns the full path of a path that starts with `crate`, `self` or `super`.
fn from_root(path: &[String], name: &[String]) -> Option<Vec<String>> {
    let mut base = name.to_vec();
    let mut rest = path;
    match path.first()?.as_str() {
        "crate" => {
            base.clear();
            rest = &path[1..];
        }
        "self" => rest = &path[1..],
        "super" => {
            while rest.first().is_some_and(|part| part == "super") {
                base.pop()?;
                rest = &rest[1..];
            }
        }
        _ => return None,
    }
    Some([base.as_slice(), rest].concat())
}

/// Returns the names that the `use` declarations of a file import from its own crate.
fn uses(tokens: &[Token<'_>], name: &[String]) -> BTreeMap<String, Vec<String>> {
    let mut uses = BTreeMap::new();
    for (start, end) in use_declarations(tokens) {
        for path in code_paths(&tokens[start + 1..end]) {
            let Some(mut full) = from_root(&path, name) else { continue };
            if full.last().is_some_and(|last| last == "self") {
                full.pop();
            }
            if let Some(last) = full.last().cloned() {
                uses.insert(last, full);
            }
        }
    }
    uses
}

/// Returns the start of each `use` and the position of its semicolon.
fn use_declarations(tokens: &[Token<'_>]) -> Vec<(usize, usize)> {
    let starts =
        tokens.iter().enumerate().filter(|(_, token)| token.kind == Kind::Word && token.text == "use");
    starts
        .map(|(start, _)| {
            let length = tokens[start..].iter().position(|token| token.is(';'));
            (start, length.map_or(tokens.len(), |length| start + length))
        })
        .collect()
}

/// Returns every path of the code, split at `::`. Paths of `pub use` are left out: a re-export is not an import.
fn code_paths(tokens: &[Token<'_>]) -> Vec<Vec<String>> {
    let mut kept = Vec::new();
    let mut at = 0;
    for (start, end) in use_declarations(tokens) {
        let before = if start > 0 { &tokens[start - 1] } else { &tokens[start] };
        if start < at || !(before.text == "pub" || before.is(')')) {
            continue;
        }
        kept.extend_from_slice(&tokens[at..start]);
        at = end;
    }
    kept.extend_from_slice(&tokens[at..]);
    paths(&kept)
        .into_iter()
        .map(|(_, path)| path.trim_end_matches("::*").split("::").map(str::to_owned).collect())
        .collect()
}

/// Returns the groups of two or more files that all reach each other.
fn circles<'a>(imports: &BTreeMap<&'a Path, BTreeSet<&'a Path>>) -> Vec<Vec<&'a Path>> {
    let reach: BTreeMap<&Path, BTreeSet<&Path>> =
        imports.keys().map(|&file| (file, reachable(file, imports))).collect();
    let mut found: BTreeSet<Vec<&Path>> = BTreeSet::new();
    for (&file, reached) in &reach {
        if reached.contains(file) {
            found.insert(reached.iter().copied().filter(|other| reach[other].contains(file)).collect());
        }
    }
    found.into_iter().filter(|circle| circle.len() > 1).collect()
}

fn reachable<'a>(from: &'a Path, imports: &BTreeMap<&'a Path, BTreeSet<&'a Path>>) -> BTreeSet<&'a Path> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(file) = open.pop() {
        for &next in imports.get(file).into_iter().flatten() {
            if reached.insert(next) {
                open.push(next);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::tidy::fixture::{lines, package, tree};

    fn faults(sources: &[(&str, &str)]) -> Vec<String> {
        lines(check(&tree(vec![package("fourtuple-lab", &[])], sources)))
    }

    #[test]
    fn a_circle_of_four_files_is_named() {
        let sources = [
            ("crates/lab/src/lib.rs", "mod a; mod b; mod c; mod d;"),
            ("crates/lab/src/a.rs", "use crate::b::B; pub struct A;"),
            ("crates/lab/src/b.rs", "use crate::c::C; pub struct B;"),
            ("crates/lab/src/c.rs", "use super::d::D; pub struct C;"),
            ("crates/lab/src/d.rs", "pub struct D(crate::a::A);"),
        ];
        let found = faults(&sources);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].contains("a circle of 4 files: crates/lab/src/a.rs, crates/lab/src/b.rs"),
            "{found:?}"
        );
        assert!(faults(&sources[..4]).is_empty());
    }

    #[test]
    fn reexports_lead_to_the_file_that_defines() {
        // Without following `pub use`, all of these files would import mod.rs, and mod.rs would import them.
        let sources = [
            ("crates/lab/src/lib.rs", "pub mod wait; pub use self::wait::A;"),
            ("crates/lab/src/wait/mod.rs", "mod a; mod b; mod c; pub use self::a::A; pub use self::b::B;"),
            ("crates/lab/src/wait/a.rs", "pub struct A;"),
            ("crates/lab/src/wait/b.rs", "use crate::A; pub struct B;"),
            ("crates/lab/src/wait/c.rs", "use super::{A, B};"),
        ];
        assert_eq!(faults(&sources), Vec::<String>::new());
        let modules: Vec<Source> = sources
            .iter()
            .map(|&(path, text)| Source { path: PathBuf::from(path), text: text.to_owned() })
            .collect();
        let modules = Modules::below(Path::new("crates/lab/src/lib.rs"), &modules);
        let imports = modules.imports();
        let of = |path: &str| {
            imports[Path::new(path)].iter().map(|file| file.to_str().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(of("crates/lab/src/wait/c.rs"), ["crates/lab/src/wait/a.rs", "crates/lab/src/wait/b.rs"]);
        assert_eq!(of("crates/lab/src/wait/b.rs"), ["crates/lab/src/wait/a.rs"]);
        assert!(of("crates/lab/src/wait/mod.rs").is_empty());
    }
}
