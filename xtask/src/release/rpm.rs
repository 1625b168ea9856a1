//! The package for distributions with RPM, by `rpmbuild` of Debian's package `rpm`: contrib/rpm/fourtuple.spec.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::release::{Release, call, walk};

const SPEC: &str = "contrib/rpm/fourtuple.spec";

impl Release {
    /// Packs a tree of files, of which `policy` is the configuration. Without rpmbuild the release has no package, and a line says so.
    pub(super) fn rpm(&self, tree: &Path, policy: &str) -> Result<()> {
        if Command::new("rpmbuild").arg("--version").output().is_err() {
            println!("release: no rpm, because rpmbuild is not in PATH");
            return Ok(());
        }
        let top = self.stage.join("rpm");
        let mut rpmbuild = Command::new("rpmbuild");
        rpmbuild.env("SOURCE_DATE_EPOCH", &self.epoch).env("LC_ALL", "C").args(["--quiet", "-bb"]);
        rpmbuild.args(["--target", &format!("{}-linux", self.architecture())]);
        for (name, value) in [
            ("_topdir", top.display().to_string()),
            ("tree", tree.display().to_string()),
            ("policy", format!("/{policy}")),
            ("release_version", self.version.clone()),
            ("url", self.field("homepage")?.to_owned()),
            ("packager", self.author()?.to_owned()),
        ] {
            rpmbuild.arg("--define").arg(format!("{name} {value}"));
        }
        call(rpmbuild.arg(self.workspace.root.join(SPEC)))?;
        for package in walk(&top.join("RPMS"))? {
            let name = package.file_name().context("a package without a name")?;
            std::fs::copy(&package, self.artifacts.join(name))
                .with_context(|| format!("copy {}", package.display()))?;
        }
        Ok(())
    }
}
