//! The software bill of materials in the format CycloneDX 1.5: the crates of the binary, their licences and checksums.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::release::Release;
use crate::release::crates::Graph;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::release::crates::list;

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
}
