//! The crates that an artifact is made of, as `cargo metadata` lists them.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::release::Release;
use crate::workspace::cargo;

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
        let mut metadata = cargo();
        metadata.current_dir(self.workspace.root.join(directory));
        metadata.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", &self.target]);
        let output = metadata.output().context("start cargo metadata")?;
        ensure!(
            output.status.success(),
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        serde_json::from_slice(&output.stdout).context("read what cargo metadata printed")
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
