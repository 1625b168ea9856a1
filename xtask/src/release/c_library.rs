//! The C library: an archive with header, shared and static library, and a file for pkg-config. It is unpacked below `/usr/local`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result};

use crate::release::binary::Linkage;
use crate::release::debian::LICENCES;
use crate::release::{Release, call, set_mode, text, third_party, write};

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
