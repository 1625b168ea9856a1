//! `cargo xtask site`: the pages of docs/ as a book in `target/site`, with a search, for a browser without a server.
//!
//! The pages keep their places relative to each other, so that their links work in the tree and in the book. docs/README.md has the
//! order of the pages, KERNELS.md and the other pages of the root at its end.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::Workspace;

const BOOK: &str = r#"[book]
title = "fourtuple"
description = "Make connections cheap: what the Linux kernel does between socket() and the first byte"
language = "en"
src = "."

[output.html]
no-section-label = true

[output.html.print]
enable = false
"#;
/// The page with the table of all pages.
const CONTENTS: &str = "docs/README.md";
/// Files outside of docs/ to which pages link.
const LINKED: [&str; 8] = [
    "KERNELS.md",
    "SECURITY.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "crates/record/schema/fourtuple-1.json",
];

/// Builds the book.
pub(crate) fn run() -> Result<bool> {
    let workspace = Workspace::read()?;
    let (pages, site) = (workspace.target.join("site-pages"), workspace.target.join("site"));
    for directory in [&pages, &site] {
        match fs::remove_dir_all(directory) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("remove {}", directory.display()));
            }
            _ => {}
        }
    }
    copy(&workspace.root.join("docs"), &pages.join("docs"))?;
    for file in LINKED {
        copy(&workspace.root.join(file), &pages.join(file))?;
    }
    let summary = summary(&workspace.root)?;
    fs::write(pages.join("SUMMARY.md"), summary).context("write SUMMARY.md")?;
    fs::write(pages.join("book.toml"), BOOK).context("write book.toml")?;
    let built = Command::new("mdbook").arg("build").arg(&pages).arg("--dest-dir").arg(&site).status();
    match built {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("no mdbook in PATH: cargo install --locked mdbook --no-default-features --features search")
        }
        built => ensure!(built.context("mdbook")?.success(), "mdbook failed"),
    }
    println!("site: {}", site.join("index.html").display());
    Ok(true)
}

/// Copies a file, or a directory with all files in it.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let context = || format!("copy {} to {}", from.display(), to.display());
    if !from.is_dir() {
        fs::create_dir_all(to.parent().unwrap_or(Path::new("/"))).with_context(context)?;
        return fs::copy(from, to).map(drop).with_context(context);
    }
    for entry in fs::read_dir(from).with_context(context)? {
        let name = entry.with_context(context)?.file_name();
        copy(&from.join(&name), &to.join(&name))?;
    }
    Ok(())
}

/// Returns the list of chapters: the page of contents, and the pages of its table.
fn summary(root: &Path) -> Result<String> {
    let read = |path: &Path| fs::read_to_string(path).with_context(|| format!("read {}", path.display()));
    let contents = root.join(CONTENTS);
    let text = read(&contents)?;
    let mut summary = format!("# Summary\n\n[Documentation]({CONTENTS})\n\n");
    for link in rows(&text) {
        let page = read(&contents.with_file_name(link))?;
        let title = page.lines().find_map(|line| line.strip_prefix("# ")).context("a page has no title")?;
        let path = link.strip_prefix("../").map_or_else(|| format!("docs/{link}"), str::to_owned);
        summary.push_str(&format!("- [{}]({path})\n", title.replace('`', "")));
    }
    Ok(summary)
}

/// Returns the links in the first column of the table of pages.
fn rows(text: &str) -> impl Iterator<Item = &str> {
    let cells =
        text.lines().filter_map(|line| line.strip_prefix("| [")?.split_once(" |").map(|(cell, _)| cell));
    cells
        .flat_map(|cell| cell.split("](").skip(1))
        .filter_map(|link| link.split_once(')').map(|(link, _)| link))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_contents_name_every_page_of_docs() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let text = fs::read_to_string(root.join(CONTENTS)).unwrap();
        let listed: Vec<&str> = rows(&text).collect();
        for entry in fs::read_dir(root.join("docs")).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let is_listed = name == "README.md" || !name.ends_with(".md") || listed.contains(&&*name);
            assert!(is_listed, "{CONTENTS} does not name {name}");
        }
        let summary = summary(root).unwrap();
        assert!(summary.contains("- [fourtuple doctor](docs/doctor.md)\n"), "{summary}");
        assert!(summary.contains("](docs/measurements/doctor.md)\n"), "{summary}");
        assert!(summary.contains("](KERNELS.md)\n"), "{summary}");
    }
}
