//! The crates that an artifact is made of, as `cargo metadata` lists them: the software bill of materials in the format CycloneDX 1.5, with
//! licences and checksums, and THIRD-PARTY, with the licences and their texts from the sources of the crates.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::metadata;
use crate::release::{Release, walk};

/// The package whose crates are those of both programs: it has the command as a library.
pub(super) const ROOT: &str = "fourtuple-fleet";

impl Release {
    /// Returns the SBOM as JSON.
    pub(super) fn sbom(&self) -> Result<String> {
        let metadata = self.metadata("fleet")?;
        let lock = self.workspace.root.join("fleet/Cargo.lock");
        let lock: toml::Table = toml::from_str(&fs::read_to_string(lock).context("read Cargo.lock")?)
            .context("read Cargo.lock")?;
        let sbom = document(&metadata, &checksums(&lock), &self.version)?;
        Ok(format!("{}\n", serde_json::to_string_pretty(&sbom)?))
    }
}

/// Returns the SHA-256 of each crate of a registry, by name and version.
fn checksums(lock: &toml::Table) -> BTreeMap<(String, String), String> {
    let packages = lock.get("package").and_then(toml::Value::as_array).into_iter().flatten();
    let text = |package: &toml::Value, key: &str| Some(package.get(key)?.as_str()?.to_owned());
    packages
        .filter_map(|package| {
            let key = (text(package, "name")?, text(package, "version")?);
            Some((key, text(package, "checksum")?))
        })
        .collect()
}

/// Returns the document: the crates that the binary links or that its build runs, without the crates of tests.
fn document(
    metadata: &Value,
    checksums: &BTreeMap<(String, String), String>,
    version: &str,
) -> Result<Value> {
    let Graph { packages, edges, root, reached } = Graph::read(metadata, ROOT, &[None, Some("build")])?;
    let url = |id: &str| packages.get(id).map(|package| reference(package));
    let mut components = Vec::new();
    let mut dependencies = Vec::new();
    for &id in &reached {
        let mut below: Vec<String> = edges.get(id).into_iter().flatten().filter_map(|&id| url(id)).collect();
        below.sort();
        below.dedup();
        dependencies.push(json!({ "ref": url(id), "dependsOn": below }));
        if id != root {
            components.push(component(packages[id], checksums));
        }
    }
    let by = |key: &'static str| move |value: &Value| value[key].to_string();
    components.sort_by_key(by("bom-ref"));
    dependencies.sort_by_key(by("ref"));
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application", "bom-ref": url(root), "name": "fourtuple", "version": version,
                "licenses": [{ "expression": "MIT OR Apache-2.0" }],
            }
        },
        "components": components,
        "dependencies": dependencies,
    }))
}

/// Returns the package URL of a crate.
fn reference(package: &Value) -> String {
    let text = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
    format!("pkg:cargo/{}@{}", text("name"), text("version"))
}

fn component(package: &Value, checksums: &BTreeMap<(String, String), String>) -> Value {
    let text = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
    let url = reference(package);
    let mut component = json!({
        "type": "library", "bom-ref": url, "name": text("name"), "version": text("version"), "purl": url,
    });
    // Old manifests separate alternatives by a slash, which SPDX does not have.
    if let Some(licence) = package["license"].as_str() {
        component["licenses"] = json!([{ "expression": licence.replace('/', " OR ") }]);
    }
    if let Some(checksum) = checksums.get(&(text("name"), text("version"))) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    component
}

/// The packages of a workspace with their dependencies, all by the ID of cargo.
pub(super) struct Graph<'a> {
    pub(super) packages: BTreeMap<&'a str, &'a Value>,
    pub(super) edges: BTreeMap<&'a str, Vec<&'a str>>,
    pub(super) root: &'a str,
    /// The root, and the packages that it needs.
    pub(super) reached: BTreeSet<&'a str>,
}

impl Release {
    /// Returns what `cargo metadata` prints about a workspace for the target of the artifacts.
    pub(super) fn metadata(&self, directory: &str) -> Result<Value> {
        let directory = self.workspace.root.join(directory);
        metadata(&directory, &["--locked", "--filter-platform", &self.target])
    }
}

impl<'a> Graph<'a> {
    /// Follows the dependencies of these kinds from the package `root`: `None` is linked, `build` is run by a build, `dev` is for tests.
    pub(super) fn read(metadata: &'a Value, root: &str, kinds: &[Option<&str>]) -> Result<Graph<'a>> {
        let packages: BTreeMap<&str, &Value> = list(&metadata["packages"])
            .iter()
            .filter_map(|package| Some((package["id"].as_str()?, package)))
            .collect();
        let edge = |dependency: &'a Value| {
            let is_used =
                list(&dependency["dep_kinds"]).iter().any(|kind| kinds.contains(&kind["kind"].as_str()));
            dependency["pkg"].as_str().filter(|_| is_used)
        };
        let edges: BTreeMap<&str, Vec<&str>> = list(&metadata["resolve"]["nodes"])
            .iter()
            .filter_map(|node| {
                Some((node["id"].as_str()?, list(&node["deps"]).iter().filter_map(edge).collect()))
            })
            .collect();
        let mut all = packages.iter();
        let (&root, _) = all
            .find(|(_, package)| package["name"] == root)
            .with_context(|| format!("cargo metadata: no package {root}"))?;
        let mut reached = BTreeSet::new();
        let mut ahead = vec![root];
        while let Some(id) = ahead.pop() {
            if reached.insert(id) {
                ahead.extend(edges.get(id).into_iter().flatten());
            }
        }
        Ok(Graph { packages, edges, root, reached })
    }
}

pub(super) fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The name of the file in every artifact.
pub(super) const NAME: &str = "THIRD-PARTY";

/// The beginnings of the names of files with a licence or a notice, in capitals.
const TEXTS: &[&str] = &["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];

/// What the compiler adds to every program. Its texts are those of MIT and Apache-2.0, as of many crates.
const STANDARD: &str = "the standard library of Rust
    licence: MIT OR Apache-2.0
    source: https://github.com/rust-lang/rust
";

/// What a static link adds.
pub(super) const GLIBC: &str = "the GNU C library, in the static programs
    licence: LGPL-2.1-or-later
    source: https://sourceware.org/glibc/, and that of the distribution on which the programs were linked. `cargo xtask release` links
        them again with another version.
";

/// A crate, and the texts in its sources.
struct Notice {
    name: String,
    version: String,
    licence: String,
    source: String,
    authors: String,
    texts: Vec<String>,
}

impl Release {
    /// Returns the text for the artifact of a package, from the workspace in this directory.
    pub(super) fn notices(&self, directory: &str, package: &str) -> Result<String> {
        render(&read_crates(&self.metadata(directory)?, package)?)
    }

    /// Returns a fault for each linked crate with a licence that deny.toml permits to this crate alone, and that Debian's copyright file does
    /// not name.
    pub(super) fn unnamed_licences(&self) -> Result<Vec<String>> {
        let read = |path: &str| String::from_utf8(self.source(path)?).with_context(|| format!("read {path}"));
        let deny: toml::Table = toml::from_str(&read("deny.toml")?).context("read deny.toml")?;
        let exceptions = deny["licenses"]["exceptions"].as_array().context("deny.toml: no exceptions")?;
        let exceptions: Vec<&str> = exceptions.iter().filter_map(|row| row.get("crate")?.as_str()).collect();
        let copyright = read("contrib/debian/copyright")?;
        let notices = read_crates(&self.metadata("fleet")?, ROOT)?;
        let unnamed = notices.iter().map(|notice| &notice.name).filter(|name| {
            exceptions.contains(&name.as_str()) && !copyright.contains(&format!("Files: vendor/{name}/*"))
        });
        Ok(unnamed.map(|name| format!("contrib/debian/copyright does not name {name}")).collect())
    }

    /// Returns the licence text of a linked crate of the command.
    pub(super) fn licence_of(&self, crate_name: &str) -> Result<String> {
        let notices = read_crates(&self.metadata("fleet")?, ROOT)?;
        let notice = notices.iter().find(|notice| notice.name == crate_name);
        let text = notice.and_then(|notice| notice.texts.first());
        text.cloned()
            .with_context(|| format!("the command does not link {crate_name}, or it has no licence text"))
    }
}

/// Reads the crates of a registry that the package links. A macro runs in the compiler only.
fn read_crates(metadata: &Value, package: &str) -> Result<Vec<Notice>> {
    let graph = Graph::read(metadata, package, &[None])?;
    let foreign = graph.reached.iter().filter_map(|id| graph.packages.get(id)).filter(|package| {
        let is_macro = list(&package["targets"])
            .iter()
            .any(|target| list(&target["kind"]).iter().any(|kind| kind == "proc-macro"));
        !package["source"].is_null() && !is_macro
    });
    let mut notices = foreign.map(|package| notice(package)).collect::<Result<Vec<_>>>()?;
    notices.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    Ok(notices)
}

fn notice(package: &Value) -> Result<Notice> {
    let text = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
    let manifest = text("manifest_path");
    let directory = Path::new(&manifest).parent().context("a package without a manifest")?;
    let mut texts = Vec::new();
    for path in walk(directory)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        // Sources such as `license.rs` are not texts.
        let is_text = TEXTS.iter().any(|begin| name.starts_with(begin)) && !name.ends_with(".RS");
        if is_text || path == directory.join(text("license_file")) {
            let contents = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            texts.push(tidy(&String::from_utf8_lossy(&contents)));
        }
    }
    // The text of Apache-2.0 is the same for all.
    ensure!(
        !texts.is_empty() || text("license").contains("Apache-2.0"),
        "{} ({}) has no licence text in its sources, and no other crate has the same",
        text("name"),
        text("license")
    );
    let authors: Vec<&str> = list(&package["authors"]).iter().filter_map(Value::as_str).collect();
    Ok(Notice {
        name: text("name"),
        version: text("version"),
        // Old manifests separate alternatives by a slash, which SPDX does not have.
        licence: text("license").replace('/', " OR "),
        source: text("repository"),
        authors: authors.join(", "),
        texts,
    })
}

/// Removes spaces at the ends of lines, and empty lines at the ends of the text.
fn tidy(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    lines.join("\n").trim_matches('\n').to_owned()
}

/// Returns the file: a paragraph for each crate, and each text once.
fn render(notices: &[Notice]) -> Result<String> {
    ensure!(!notices.is_empty(), "no crate of another project is linked");
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    let mut texts = Vec::new();
    let mut out = format!(
        "This program contains the following software of other projects. The numbers are those of the texts below. A crate without a\n\
         number has no text in its sources; the text of its licence is below, too, from another crate.\n\n{STANDARD}\n"
    );
    for notice in notices {
        let found: Vec<String> = notice
            .texts
            .iter()
            .map(|text| {
                let number = *numbers.entry(text).or_insert_with(|| {
                    texts.push(text);
                    texts.len()
                });
                number.to_string()
            })
            .collect();
        out.push_str(&format!("{} {}\n    licence: {}\n", notice.name, notice.version, notice.licence));
        for (key, value) in
            [("source", &notice.source), ("authors", &notice.authors), ("texts", &found.join(", "))]
        {
            if !value.is_empty() {
                out.push_str(&format!("    {key}: {value}\n"));
            }
        }
        out.push('\n');
    }
    for (index, text) in texts.iter().enumerate() {
        out.push_str(&format!("{}\nText {}\n\n{text}\n\n", "=".repeat(80), index + 1));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::Workspace;
    use crate::release::host;

    fn dependency(id: &str, kind: Value) -> Value {
        json!({ "pkg": id, "dep_kinds": [{ "kind": kind }] })
    }

    #[test]
    fn the_sbom_has_linked_crates_and_not_those_of_tests() {
        let package = |name: &str, licence: &str| json!({ "id": name, "name": name, "version": "1.0.0", "license": licence });
        let metadata = json!({
            "packages": [
                package(ROOT, "MIT"), package("linked", "MIT/Apache-2.0"), package("built", "MIT"),
                package("tested", "MIT"),
            ],
            "resolve": { "nodes": [
                { "id": ROOT, "deps": [dependency("linked", Value::Null), dependency("tested", json!("dev"))] },
                { "id": "linked", "deps": [dependency("built", json!("build"))] },
                { "id": "built", "deps": [] },
                { "id": "tested", "deps": [] },
            ]},
        });
        let lock = "[[package]]\nname = \"linked\"\nversion = \"1.0.0\"\nchecksum = \"ab\"\n";
        let sbom = document(&metadata, &checksums(&toml::from_str(lock).unwrap()), "0.1.0").unwrap();
        let names: Vec<&str> =
            list(&sbom["components"]).iter().filter_map(|component| component["name"].as_str()).collect();
        assert_eq!(names, ["built", "linked"]);
        let linked = &sbom["components"][1];
        assert_eq!(linked["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(linked["hashes"][0]["content"], "ab");
        assert_eq!(sbom["dependencies"][1]["dependsOn"], json!(["pkg:cargo/linked@1.0.0"]));
    }

    fn notice(name: &str, texts: &[&str]) -> Notice {
        Notice {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            licence: "MIT".to_owned(),
            source: "https://example.org/it".to_owned(),
            authors: String::new(),
            texts: texts.iter().map(|text| tidy(text)).collect(),
        }
    }

    #[test]
    fn every_artifact_has_its_notices() {
        let release = Release {
            workspace: Workspace::read().unwrap(),
            package: toml::Table::new(),
            target: host(),
            version: String::new(),
            epoch: String::new(),
            stage: PathBuf::new(),
            artifacts: PathBuf::new(),
        };
        for (directory, package, linked, text) in [
            ("fleet", ROOT, "inferno", "COMMON DEVELOPMENT AND DISTRIBUTION LICENSE"),
            ("bindings/c", "fourtuple-c", "libc", "Permission is hereby granted"),
            ("bindings/python", "fourtuple-python", "pyo3", "Apache License"),
        ] {
            let notices = release.notices(directory, package).unwrap();
            assert!(notices.contains(&format!("\n\n{linked} ")) && notices.contains(text), "{package}");
            // A macro runs in the compiler.
            assert!(!notices.contains("\n\nserde_derive "), "{package}");
        }
        assert_eq!(release.unnamed_licences().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn equal_texts_are_printed_once() {
        let text = render(&[
            notice("a", &["MIT\n\nof a\n"]),
            notice("b", &["Apache\n", "\nMIT  \n\nof a\n\n"]),
            notice("c", &[]),
        ])
        .unwrap();
        assert_eq!(text.matches("MIT\n\nof a\n").count(), 1, "{text}");
        assert!(
            text.contains("a 1.0.0\n    licence: MIT\n    source: https://example.org/it\n    texts: 1\n"),
            "{text}"
        );
        assert!(
            text.contains("b 1.0.0\n    licence: MIT\n    source: https://example.org/it\n    texts: 2, 1\n"),
            "{text}"
        );
        assert!(text.contains("c 1.0.0\n    licence: MIT\n    source: https://example.org/it\n\n"), "{text}");
    }
}
