//! The C library: an archive with header, shared and static library, and a file for pkg-config. It is unpacked below `/usr/local`.
//!
//! The Python package: its version, and its wheel and sdist where maturin is installed.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::call;
use crate::release::binary::Linkage;
use crate::release::packages::LICENCES;
use crate::release::{Release, files, set_mode, text, third_party, write};

const NAME: &str = "libfourtuple";

/// The name by which programs find the shared library. Its number changes when the ABI breaks: docs/c.md.
const SONAME: &str = "libfourtuple.so.0";

/// The libraries that Rust's standard library needs in a static link.
const PRIVATE: &str = "-lm -lpthread -ldl";

impl Release {
    /// Builds the library and writes its archive. Returns the faults.
    pub(super) fn c_library(&self) -> Result<Vec<String>> {
        let built = self.build(Linkage::Dynamic, &["--manifest-path", "bindings/c/Cargo.toml", "--lib"])?;
        let tree = self.stage.join("c");
        let libraries = tree.join("lib");
        let shared = format!("libfourtuple.so.{}", self.version);
        write(&tree.join("include/fourtuple.h"), self.source("bindings/c/fourtuple.h")?)?;
        write(&libraries.join("pkgconfig/fourtuple.pc"), pkg_config(&self.version))?;
        write(&libraries.join("valgrind/fourtuple.supp"), self.source("bindings/c/valgrind.supp")?)?;
        for (from, to, strip) in [
            ("libfourtuple_c.so", shared.as_str(), "--strip-unneeded"),
            ("libfourtuple_c.a", "libfourtuple.a", "--strip-debug"),
        ] {
            let output = libraries.join(to);
            call(
                self.tool("strip")
                    .args(["--enable-deterministic-archives", strip, "-o"])
                    .args([&output, &built.join(from)]),
            )?;
            set_mode(&output, 0o644)?;
        }
        for (link, target) in [(SONAME, shared.as_str()), ("libfourtuple.so", SONAME)] {
            symlink(target, libraries.join(link)).with_context(|| format!("link {link}"))?;
        }
        for licence in LICENCES {
            write(&tree.join("share/doc").join(NAME).join(licence), self.source(licence)?)?;
        }
        let notices = self.notices("bindings/c", "fourtuple-c")?;
        write(&tree.join("share/doc").join(NAME).join(third_party::NAME), notices)?;
        self.archive(&tree, NAME, "linux-gnu")?;
        self.faults(&libraries.join(shared), &fs::read_to_string(tree.join("include/fourtuple.h"))?)
    }

    /// Returns a fault if the shared library has another soname or exports a function that the header lacks.
    fn faults(&self, library: &Path, header: &str) -> Result<Vec<String>> {
        let mut faults = Vec::new();
        if !text(self.tool("readelf").arg("-d").arg(library))?
            .contains(&format!("Library soname: [{SONAME}]"))
        {
            faults.push(format!("{} has another soname than {SONAME}", library.display()));
        }
        let exported = text(
            self.tool("nm").args(["--dynamic", "--defined-only", "--format=just-symbols"]).arg(library),
        )?;
        let foreign = exported.lines().filter(|name| !header.contains(&format!("{name}(")));
        faults.extend(
            foreign.map(|name| format!("{} exports {name}, which is not in the header", library.display())),
        );
        if exported.lines().count() == 0 {
            faults.push(format!("{} exports nothing", library.display()));
        }
        Ok(faults)
    }
}

fn pkg_config(version: &str) -> String {
    format!(
        "prefix=${{pcfiledir}}/../..\n\nName: fourtuple\nDescription: connects with a source port that is found quickly\n\
         Version: {version}\nCflags: -I${{prefix}}/include\nLibs: -L${{prefix}}/lib -lfourtuple\nLibs.private: {PRIVATE}\n"
    )
}

/// Directory of the package, a workspace of its own.
const PACKAGE: &str = "bindings/python";

impl Release {
    /// Returns a fault for each value that the package and the workspace have in different forms. maturin takes the version of Cargo.toml.
    pub(super) fn python_metadata(&self) -> Result<Vec<String>> {
        let read = |file: &str| -> Result<toml::Table> {
            let path = format!("{PACKAGE}/{file}");
            let text = String::from_utf8(self.source(&path)?).with_context(|| format!("read {path}"))?;
            toml::from_str(&text).with_context(|| format!("read {path}"))
        };
        let (cargo, project) = (read("Cargo.toml")?, read("pyproject.toml")?);
        let urls = project["project"].get("urls");
        let url = |key: &str| urls.and_then(|urls| urls.get(key)?.as_str());
        let pairs = [
            ("Cargo.toml: version", cargo["package"]["version"].as_str(), self.version.as_str()),
            ("pyproject.toml: Homepage", url("Homepage"), self.field("homepage")?),
            ("pyproject.toml: Repository", url("Repository"), self.field("repository")?),
            ("pyproject.toml: Documentation", url("Documentation"), self.field("documentation")?),
        ];
        let differ = pairs.iter().filter(|(_, own, workspace)| *own != Some(workspace));
        Ok(differ
            .map(|(what, own, workspace)| {
                format!("{PACKAGE}/{what} is {}, that of the workspace {workspace}", own.unwrap_or("missing"))
            })
            .collect())
    }

    /// Builds the wheel and the sdist into the artifacts. Without maturin the release has neither, and a line says so.
    /// Returns a fault for each notice that the wheel lacks.
    pub(super) fn python_package(&self) -> Result<Vec<String>> {
        if Command::new("maturin").arg("--version").output().is_err() {
            println!("release: no wheel and no sdist for Python, because maturin is not in PATH");
            return Ok(Vec::new());
        }
        let target = self.workspace.target.join("release-python");
        let prefixes = self.prefixes(&target)?;
        // The source archive of the package has the name that Python wants, which anyone else would take for that of the command.
        let artifacts = self.artifacts.join("python");
        let maturin = |directory: &Path, arguments: &[&str]| {
            let mut maturin = Command::new("maturin");
            maturin.current_dir(directory).args(arguments);
            maturin.arg("--out").arg(&artifacts).env("CARGO_TARGET_DIR", &target);
            self.environment(&mut maturin, &prefixes, Vec::new());
            call(&mut maturin)
        };
        maturin(&self.workspace.root.join(PACKAGE), &["sdist"])?;
        // The crates of the library are outside of the package's workspace, so the names of their symbols depend on their directory:
        // the wheel is built in the same directory everywhere.
        let sources = env::temp_dir().join(format!("fourtuple-{}-wheel", self.version));
        if sources.exists() {
            fs::remove_dir_all(&sources).with_context(|| format!("remove {}", sources.display()))?;
        }
        fs::create_dir(&sources).with_context(|| format!("make {}", sources.display()))?;
        let sdist = artifacts.join(format!("fourtuple-{}.tar.gz", self.version));
        let mut tar = Command::new("tar");
        call(
            tar.arg("--extract")
                .arg("--strip-components=1")
                .arg("--file")
                .arg(&sdist)
                .arg("--directory")
                .arg(&sources),
        )?;
        // The wheel has the crates in it, the sdist has not: maturin packs the files that `license-files` of pyproject.toml names.
        write(&sources.join(third_party::NAME), self.notices(PACKAGE, "fourtuple-python")?)?;
        maturin(&sources, &["build", "--release", "--locked", "--target", &self.target])?;
        fs::remove_dir_all(&sources).with_context(|| format!("remove {}", sources.display()))?;
        let wheels =
            files(&artifacts)?.into_iter().filter(|path| path.extension().is_some_and(|end| end == "whl"));
        let mut faults = Vec::new();
        for wheel in wheels {
            let list = text(Command::new("python3").args(["-m", "zipfile", "-l"]).arg(&wheel))?;
            let names = LICENCES.into_iter().chain([third_party::NAME]);
            let missing = names.filter(|name| !list.contains(&format!("/licenses/{name} ")));
            faults.extend(missing.map(|name| format!("{} has no {name}", wheel.display())));
        }
        Ok(faults)
    }
}
