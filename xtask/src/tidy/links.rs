//! Checks that every relative link of a Markdown page has a target: a file of the tree, and a heading if the link names one.

use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::tidy::source::Page;
use crate::tidy::tree::{Fault, Tree};

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    let root = &tree.workspace.root;
    let is_file = |path: &Path| root.join(path).exists();
    let read = |path: &Path| fs::read_to_string(root.join(path)).ok();
    let pages = tree.pages.iter().filter(|page| page.path.extension().is_some_and(|kind| kind == "md"));
    pages.flat_map(|page| broken(page, &is_file, &read)).collect()
}

fn broken(
    page: &Page,
    is_file: &dyn Fn(&Path) -> bool,
    read: &dyn Fn(&Path) -> Option<String>,
) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (line, link) in links(&page.text) {
        let (file, heading) = link.split_once('#').map_or((link, None), |(file, id)| (file, Some(id)));
        let target = if file.is_empty() { page.path.clone() } else { resolve(&page.path, file) };
        if !is_file(&target) {
            faults.push(Fault::at(&page.path, line, format!("links to {link}, which is not there")));
        } else if let Some(heading) = heading
            && !read(&target).is_some_and(|text| headings(&text).any(|found| found == heading))
        {
            faults.push(Fault::at(&page.path, line, format!("links to {link}: there is no such heading")));
        }
    }
    faults
}

/// Returns the path of a link from the root of the tree.
pub(super) fn resolve(page: &Path, link: &str) -> PathBuf {
    let mut path = page.parent().unwrap_or(Path::new("")).to_owned();
    for part in Path::new(link).components() {
        match part {
            Component::ParentDir => drop(path.pop()),
            part => path.push(part),
        }
    }
    path
}

/// Returns the lines of a page outside of code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut inside = false;
    text.lines().enumerate().filter_map(move |(number, line)| {
        let is_fence = line.trim_start().starts_with("```");
        inside ^= is_fence;
        (!inside && !is_fence).then_some((number + 1, line))
    })
}

/// Returns the relative links of a page and their lines.
fn links(text: &str) -> Vec<(usize, &str)> {
    let of_line = |(number, line)| {
        let targets = str::split(line, "](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
        targets.map(move |target| (number, target))
    };
    let is_relative = |link: &str| !link.contains("://") && !link.starts_with("mailto:");
    prose(text).flat_map(of_line).filter(|(_, link)| is_relative(link)).collect()
}

/// Returns the identifiers of the headings, by the rule of GitHub and mdBook.
fn headings(text: &str) -> impl Iterator<Item = String> {
    let heading = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|sign| sign.is_alphanumeric() || matches!(sign, '-' | '_' | ' '));
        kept.map(|sign| if sign == ' ' { '-' } else { sign }).collect()
    };
    prose(text).filter(|(_, line)| line.starts_with('#')).map(move |(_, line)| heading(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str) -> Vec<String> {
        let page = Page { path: PathBuf::from("docs/a.md"), text: text.to_owned() };
        let other = |path: &Path| {
            (path == Path::new("docs/b.md") || path == Path::new("C.md"))
                .then(|| "# Title\n```\n# No heading\n```\n## `fix --print`: it's 2\n".to_owned())
        };
        let is_file = |path: &Path| path == Path::new("docs/a.md") || other(path).is_some();
        let read = |path: &Path| if path == page.path { Some(text.to_owned()) } else { other(path) };
        broken(&page, &is_file, &read).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn targets_and_headings_exist() {
        assert!(
            faults("[b](b.md) [c](../C.md#title) [b](b.md#fix---print-its-2) [x](https://x/)\n").is_empty()
        );
        assert!(faults("# Here\n[here](#here)\n```\n[not a link](nowhere)\n```\n").is_empty());
        assert_eq!(
            faults("\n[c](C.md), [b](b.md#no-heading)"),
            [
                "docs/a.md:2: links to C.md, which is not there",
                "docs/a.md:2: links to b.md#no-heading: there is no such heading"
            ]
        );
    }
}
