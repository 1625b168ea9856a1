//! The packages: `fourtuple.deb`, `fourtuple-dbgsym.deb` with the debug symbols, and a tar.gz with the same files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::release::binary::{Binary, NAME, parts};
use crate::release::{Release, call, files, set_mode, write};

const DESCRIPTION: &str = "diagnosis and repair of TCP and UDP connections
 fourtuple measures the kernel between socket() and the first byte of data: the
 source port that connect() selects, how long the port search takes, when the
 ports run out, and which worker gets a connection. fourtuple also repairs
 running programs from outside.";

const SYMBOLS: &str = "debug symbols of fourtuple
 For gdb and perf, which find the symbols by the build ID.";

/// The completions of each shell, and their paths below `/usr`.
const COMPLETIONS: &[(&str, &str)] = &[
    ("fourtuple.bash", "share/bash-completion/completions/fourtuple"),
    ("_fourtuple", "share/zsh/vendor-completions/_fourtuple"),
    ("fourtuple.fish", "share/fish/vendor_completions.d/fourtuple.fish"),
];

/// The policy of guard, which the administrator edits: dpkg keeps the changes at an upgrade.
const POLICY: (&str, &str) = ("contrib/guard.toml", "etc/fourtuple/guard.toml");

/// Files of the tree, and their paths below `/usr`.
const SOURCES: &[(&str, &str)] = &[
    ("contrib/systemd/fourtuple-agent.service", "lib/systemd/system/fourtuple-agent.service"),
    ("contrib/systemd/fourtuple-export.service", "lib/systemd/system/fourtuple-export.service"),
    ("contrib/systemd/fourtuple-guard.service", "lib/systemd/system/fourtuple-guard.service"),
    ("contrib/systemd/fourtuple-fix-ports@.service", "lib/systemd/system/fourtuple-fix-ports@.service"),
    // In the archive for other distributions too.
    (POLICY.0, "share/fourtuple/guard.toml"),
    ("contrib/grafana/fourtuple.json", "share/fourtuple/grafana/fourtuple.json"),
    ("contrib/prometheus/fourtuple.rules.yml", "share/fourtuple/prometheus/fourtuple.rules.yml"),
];

impl Release {
    /// Writes the packages, the archive and the SBOM.
    pub(super) fn packages(&self, binaries: &[Binary], sbom: &str) -> Result<()> {
        let tree = self.stage.join("deb/usr");
        self.install(binaries, sbom, &tree)?;
        let architecture = match self.architecture() {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => bail!("Debian has no name for the architecture {other} in this table"),
        };
        let newest = binaries.iter().max_by_key(|binary| parts(&binary.glibc)).context("no program")?;
        let mut depends = format!("libc6 (>= {})", newest.glibc);
        if binaries.iter().flat_map(|binary| &binary.libraries).any(|library| library.starts_with("libgcc_s"))
        {
            depends.push_str(", libgcc-s1");
        }
        let control =
            format!("Section: net\nPriority: optional\nDepends: {depends}\nDescription: {DESCRIPTION}\n");
        for script in ["postinst", "prerm", "postrm"] {
            let path = self.stage.join("deb/DEBIAN").join(script);
            write(&path, self.source(&format!("contrib/debian/{script}"))?)?;
            set_mode(&path, 0o755)?;
        }
        let (policy, path) = POLICY;
        write(&self.stage.join("deb").join(path), self.source(policy)?)?;
        write(&self.stage.join("deb/DEBIAN/conffiles"), format!("/{path}\n"))?;
        self.deb("deb", NAME, architecture, &control)?;

        for binary in binaries {
            let (directory, file) = binary.build_id.split_at(2);
            let symbols = format!("dbgsym/usr/lib/debug/.build-id/{directory}/{file}.debug");
            let contents = fs::read(&binary.symbols).context("read the debug symbols")?;
            write(&self.stage.join(symbols), contents)?;
        }
        let build_ids: Vec<&str> = binaries.iter().map(|binary| &*binary.build_id).collect();
        let control = format!(
            "Section: debug\nPriority: optional\nDepends: {NAME} (= {})\nBuild-Ids: {}\nDescription: {SYMBOLS}\n",
            self.version,
            build_ids.join(" ")
        );
        self.deb("dbgsym", "fourtuple-dbgsym", architecture, &control)?;
        self.archive(&tree, NAME)?;
        write(&self.artifacts.join(format!("{NAME}-{}.cdx.json", self.version)), sbom)
    }

    /// Copies every file of the package below `tree`.
    fn install(&self, binaries: &[Binary], sbom: &str, tree: &Path) -> Result<()> {
        for binary in binaries {
            let program = tree.join("bin").join(binary.name);
            write(&program, fs::read(&binary.stripped).context("read a program")?)?;
            set_mode(&program, 0o755)?;
        }
        let manual = self.stage.join("manual");
        for page in files(&manual.join("man1"))? {
            let name = page.file_name().unwrap_or_default();
            write(&tree.join("share/man/man1").join(name), fs::read(&page).context("read a man page")?)?;
        }
        for (file, path) in COMPLETIONS {
            let source = manual.join("completions").join(file);
            write(
                &tree.join(path),
                fs::read(&source).with_context(|| format!("read {}", source.display()))?,
            )?;
        }
        for (file, path) in SOURCES {
            write(&tree.join(path), self.source(file)?)?;
        }
        let documents = tree.join("share/doc").join(NAME);
        let licence = String::from_utf8(self.source("LICENSE-MIT")?).context("read LICENSE-MIT")?;
        let copyright =
            String::from_utf8(self.source("contrib/debian/copyright")?).context("read copyright")?;
        write(&documents.join("copyright"), copyright.replace("@MIT@\n", &indented(&licence)))?;
        write(&documents.join("changelog"), self.source("CHANGELOG.md")?)?;
        write(&documents.join("fourtuple.cdx.json"), sbom)?;
        let mut pages = files(&tree.join("share/man/man1"))?;
        pages.extend([documents.join("changelog"), documents.join("fourtuple.cdx.json")]);
        // Without the name and the time of the file.
        call(Command::new("gzip").args(["-9", "--no-name"]).args(pages))
    }

    /// Builds a package of `stage/<directory>`.
    fn deb(&self, directory: &str, package: &str, architecture: &str, fields: &str) -> Result<()> {
        let root = self.stage.join(directory);
        let contents = walk(&root.join("usr"))?;
        let mut installed = 0;
        let mut sums = Command::new("md5sum");
        sums.current_dir(&root);
        for path in &contents {
            installed += fs::metadata(path)?.len().div_ceil(1024);
            sums.arg(path.strip_prefix(&root).unwrap_or(path));
        }
        write(&root.join("DEBIAN/md5sums"), format!("{}\n", crate::release::text(&mut sums)?))?;
        let control = format!(
            "Package: {package}\nVersion: {}\nArchitecture: {architecture}\nMaintainer: The fourtuple authors\n\
             Installed-Size: {installed}\n{fields}",
            self.version
        );
        write(&root.join("DEBIAN/control"), control)?;
        directories(&root)?;
        // One thread: the blocks of xz depend on the number of threads.
        call(
            Command::new("dpkg-deb")
                .env("SOURCE_DATE_EPOCH", &self.epoch)
                .args(["--root-owner-group", "--threads-max=1", "-Zxz", "--build"])
                .arg(&root)
                .arg(self.artifacts.join(format!("{package}_{}_{architecture}.deb", self.version))),
        )
    }

    /// Writes a tar.gz that is unpacked below `/usr/local`.
    pub(super) fn archive(&self, tree: &Path, name: &str) -> Result<()> {
        let name = format!("{name}-{}-{}-linux-gnu", self.version, self.architecture());
        let archive = self.artifacts.join(format!("{name}.tar"));
        call(
            Command::new("tar")
                .args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--format=gnu"])
                .arg(format!("--mtime=@{}", self.epoch))
                .arg(format!("--transform=s,^\\.,{name},"))
                .arg("-C")
                .arg(tree)
                .arg("-cf")
                .arg(&archive)
                .arg("."),
        )?;
        call(Command::new("gzip").args(["-9", "--no-name"]).arg(&archive))
    }
}

/// Indents a text for a field of a Debian control file, in which a dot stands for an empty line.
fn indented(text: &str) -> String {
    text.lines().map(|line| format!(" {}\n", if line.is_empty() { "." } else { line })).collect()
}

/// Returns every file below a directory, sorted.
fn walk(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for path in files(directory)? {
        if path.is_dir() {
            found.extend(walk(&path)?);
        } else {
            found.push(path);
        }
    }
    Ok(found)
}

/// Sets the mode of a directory and its subdirectories, which the umask would otherwise decide.
fn directories(directory: &Path) -> Result<()> {
    set_mode(directory, 0o755)?;
    for path in files(directory)?.into_iter().filter(|path| path.is_dir()) {
        directories(&path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licences_are_indented_as_debian_wants() {
        assert_eq!(indented("MIT\n\nPermission\n"), " MIT\n .\n Permission\n");
    }
}
