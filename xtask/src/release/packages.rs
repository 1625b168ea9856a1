//! The packages: `fourtuple.deb`, `fourtuple-dbgsym.deb` with the debug symbols, a tar.gz with the same files, and one with static programs; and the
//! package for distributions with RPM, by `rpmbuild` of Debian's package `rpm`: contrib/rpm/fourtuple.spec.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::call;
use crate::release::binary::{Binary, NAME, parts};
use crate::release::{Release, files, set_mode, text, third_party, walk, write};

const DESCRIPTION: &str = "diagnosis and repair of TCP and UDP connections
 fourtuple measures the kernel between socket() and the first byte of data: the
 source port that connect() selects, how long the port search takes, when the
 ports run out, and which worker gets a connection. fourtuple also repairs
 running programs from outside.";

const SYMBOLS_NAME: &str = "fourtuple-dbgsym";
const SYMBOLS: &str = "debug symbols of fourtuple
 For gdb and perf, which find the symbols by the build ID.";

/// The completions of each shell, and their paths below `/usr`.
const COMPLETIONS: &[(&str, &str)] = &[
    ("fourtuple.bash", "share/bash-completion/completions/fourtuple"),
    ZSH,
    ("fourtuple.fish", "share/fish/vendor_completions.d/fourtuple.fish"),
];

/// Below /usr/local, and in other distributions below /usr, zsh looks here.
const ZSH: (&str, &str) = ("_fourtuple", "share/zsh/site-functions/_fourtuple");
/// Debian keeps that directory free for the administrator.
const DEBIAN_ZSH: &str = "share/zsh/vendor-completions/_fourtuple";

/// The policy of guard, which the administrator edits: dpkg keeps the changes at an upgrade.
const POLICY: (&str, &str) = ("contrib/guard.toml", "etc/fourtuple/guard.toml");

pub(super) const LICENCES: [&str; 2] = ["LICENSE-MIT", "LICENSE-APACHE"];

/// Files of the tree, and their paths below `/usr`.
const SOURCES: &[(&str, &str)] = &[
    ("contrib/systemd/fourtuple-agent.service", "lib/systemd/system/fourtuple-agent.service"),
    ("contrib/systemd/fourtuple-export.service", "lib/systemd/system/fourtuple-export.service"),
    ("contrib/systemd/fourtuple-guard.service", "lib/systemd/system/fourtuple-guard.service"),
    ("contrib/systemd/fourtuple-fix-ports@.service", "lib/systemd/system/fourtuple-fix-ports@.service"),
    ("contrib/systemd/fourtuple.preset", "lib/systemd/system-preset/80-fourtuple.preset"),
    // In the archive for other distributions too.
    (POLICY.0, "share/fourtuple/guard.toml"),
    ("contrib/grafana/fourtuple.json", "share/fourtuple/grafana/fourtuple.json"),
    ("contrib/prometheus/fourtuple.rules.yml", "share/fourtuple/prometheus/fourtuple.rules.yml"),
];

impl Release {
    /// Writes the packages, the archives and the SBOM.
    pub(super) fn packages(&self, binaries: &[Binary], static_binaries: &[Binary], sbom: &str) -> Result<()> {
        let tree = self.stage.join("deb/usr");
        self.install(binaries, sbom, &tree)?;
        let (policy, path) = POLICY;
        write(&self.stage.join("deb").join(path), self.source(policy)?)?;
        self.archive(&tree, NAME, "linux-gnu")?;
        self.rpm(&self.stage.join("deb"), path)?;
        self.static_archive(static_binaries)?;
        fs::create_dir_all(tree.join("share/zsh/vendor-completions")).context("make a directory")?;
        fs::rename(tree.join(ZSH.1), tree.join(DEBIAN_ZSH)).context("move the completion of zsh")?;
        fs::remove_dir(tree.join("share/zsh/site-functions")).context("remove an empty directory")?;
        self.debian_documents(&tree)?;
        let architecture = match self.architecture() {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => bail!("Debian has no name for the architecture {other} in this table"),
        };
        let newest =
            binaries.iter().filter_map(|binary| binary.glibc.as_deref()).max_by_key(|glibc| parts(glibc));
        let mut depends = format!("libc6 (>= {})", newest.context("no program needs glibc")?);
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
        write(&self.stage.join("deb/DEBIAN/conffiles"), format!("/{path}\n"))?;
        self.deb("deb", NAME, architecture, &control)?;

        for binary in binaries {
            let (directory, file) = binary.build_id.split_at(2);
            let symbols = format!("dbgsym/usr/lib/debug/.build-id/{directory}/{file}.debug");
            let contents = fs::read(&binary.symbols).context("read the debug symbols")?;
            write(&self.stage.join(symbols), contents)?;
        }
        let build_ids: Vec<&str> = binaries.iter().map(|binary| &*binary.build_id).collect();
        let documents = self.stage.join("dbgsym/usr/share/doc");
        fs::create_dir_all(&documents).context("make a directory")?;
        symlink(NAME, documents.join(SYMBOLS_NAME)).context("link the documents of the debug symbols")?;
        let control = format!(
            "Auto-Built-Package: debug-symbols\nSection: debug\nPriority: optional\nDepends: {NAME} (= {})\nBuild-Ids: {}\nDescription: {SYMBOLS}\n",
            self.version,
            build_ids.join(" ")
        );
        self.deb("dbgsym", SYMBOLS_NAME, architecture, &control)?;
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
        write(&documents.join("CHANGELOG.md"), self.source("CHANGELOG.md")?)?;
        write(&documents.join("fourtuple.cdx.json"), sbom)?;
        write(&documents.join(third_party::NAME), self.notices("fleet", third_party::ROOT)?)?;
        for licence in LICENCES {
            write(&documents.join(licence), self.source(licence)?)?;
        }
        let mut pages = files(&tree.join("share/man/man1"))?;
        pages.extend(
            ["CHANGELOG.md", "fourtuple.cdx.json", third_party::NAME].map(|name| documents.join(name)),
        );
        // Without the name and the time of the file.
        call(Command::new("gzip").args(["-9", "--no-name"]).args(pages))
    }

    /// Adds what only Debian's policy asks for, and removes what it has itself.
    fn debian_documents(&self, tree: &Path) -> Result<()> {
        let documents = tree.join("share/doc").join(NAME);
        for licence in LICENCES {
            fs::remove_file(documents.join(licence)).context("remove a licence")?;
        }
        let source =
            |path: &str| String::from_utf8(self.source(path)?).with_context(|| format!("read {path}"));
        let copyright = source("contrib/debian/copyright")?;
        let copyright = copyright.replace("@MIT@\n", &indented(&source("LICENSE-MIT")?));
        let copyright = copyright.replace("@CDDL@\n", &indented(&self.licence_of("inferno")?));
        write(&documents.join("copyright"), copyright)?;
        let date = text(Command::new("date").env("LC_ALL", "C").args([
            "-u",
            "-R",
            "-d",
            &format!("@{}", self.epoch),
        ]))?;
        let (version, author) = (&self.version, self.author()?);
        let changelog = format!(
            "{NAME} ({version}) unstable; urgency=medium\n\n  * Release {version}; CHANGELOG.md.gz has its changes.\n\n -- {author}  {date}\n"
        );
        write(&documents.join("changelog"), changelog)?;
        call(Command::new("gzip").args(["-9", "--no-name"]).arg(documents.join("changelog")))?;
        write(
            &tree.join("share/lintian/overrides").join(NAME),
            self.source("contrib/debian/lintian-overrides")?,
        )
    }

    /// Writes an archive with the static programs and their licences.
    fn static_archive(&self, binaries: &[Binary]) -> Result<()> {
        let tree = self.stage.join("static-tree");
        for binary in binaries {
            let program = tree.join("bin").join(binary.name);
            write(&program, fs::read(&binary.stripped).context("read a program")?)?;
            set_mode(&program, 0o755)?;
        }
        let documents = tree.join("share/doc").join(NAME);
        for licence in LICENCES {
            write(&documents.join(licence), self.source(licence)?)?;
        }
        let notices = self.notices("fleet", third_party::ROOT)?.replacen(
            "\n\n",
            &format!("\n\n{}\n", third_party::GLIBC),
            1,
        );
        write(&documents.join(third_party::NAME), notices)?;
        self.archive(&tree, NAME, "linux-static")
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
        write(&root.join("DEBIAN/md5sums"), format!("{}\n", text(&mut sums)?))?;
        let control = format!(
            "Package: {package}\nVersion: {}\nArchitecture: {architecture}\nMaintainer: {}\nHomepage: {}\n\
             Installed-Size: {installed}\n{fields}",
            self.version,
            self.author()?,
            self.field("homepage")?
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
    pub(super) fn archive(&self, tree: &Path, name: &str, system: &str) -> Result<()> {
        let name = format!("{name}-{}-{}-{system}", self.version, self.architecture());
        archive(tree, &self.artifacts, &name, &self.epoch)
    }
}

/// Writes `<name>.tar.gz` with everything below `tree` in a directory `name`.
fn archive(tree: &Path, artifacts: &Path, name: &str, epoch: &str) -> Result<()> {
    let archive = artifacts.join(format!("{name}.tar"));
    call(
        Command::new("tar")
            .args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--format=gnu"])
            // Not the umask's: who unpacks as root would change the modes of directories that exist.
            .arg("--mode=u=rwX,go=rX")
            .arg(format!("--mtime=@{epoch}"))
            .arg(format!("--transform=flags=r;s,^\\.,{name},"))
            .arg("-C")
            .arg(tree)
            .arg("-cf")
            .arg(&archive)
            .arg("."),
    )?;
    call(Command::new("gzip").args(["-9", "--no-name"]).arg(&archive))
}

/// Indents a text for a field of a Debian control file, in which a dot stands for an empty line.
fn indented(text: &str) -> String {
    text.lines().map(|line| format!(" {}\n", if line.is_empty() { "." } else { line })).collect()
}

/// Sets the mode of a directory and its subdirectories, which the umask would otherwise decide.
fn directories(directory: &Path) -> Result<()> {
    set_mode(directory, 0o755)?;
    for path in files(directory)?.into_iter().filter(|path| path.is_dir() && !path.is_symlink()) {
        directories(&path)?;
    }
    Ok(())
}

const SPEC: &str = "contrib/rpm/fourtuple.spec";

impl Release {
    /// Packs a tree of files, of which `policy` is the configuration. Without rpmbuild the release has no package, and a line says so.
    fn rpm(&self, tree: &Path, policy: &str) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_umask_is_not_in_an_archive() {
        let directory = std::env::temp_dir().join(format!("fourtuple-archive-{}", std::process::id()));
        let [first, second] = [(0o700, 0o600), (0o775, 0o664)].map(|(directory_mode, file_mode)| {
            let tree = directory.join(format!("{directory_mode:o}"));
            write(&tree.join("lib/library"), "same").unwrap();
            symlink("library", tree.join("lib/link")).unwrap();
            set_mode(&tree.join("lib/library"), file_mode).unwrap();
            for path in [tree.join("lib"), tree.clone()] {
                set_mode(&path, directory_mode).unwrap();
            }
            archive(&tree, &directory, "name", "0").unwrap();
            let path = directory.join("name.tar.gz");
            let contents = fs::read(&path).unwrap();
            let list = text(Command::new("tar").args(["--list", "--verbose", "--file"]).arg(&path)).unwrap();
            fs::remove_file(path).unwrap();
            (contents, list)
        });
        fs::remove_dir_all(&directory).unwrap();
        assert!(first.0 == second.0, "{}\n{}", first.1, second.1);
        assert!(first.1.starts_with("drwxr-xr-x 0/0"), "{}", first.1);
        assert!(first.1.contains("name/lib/link -> library"), "{}", first.1);
    }

    #[test]
    fn licences_are_indented_as_debian_wants() {
        assert_eq!(indented("MIT\n\nPermission\n"), " MIT\n .\n Permission\n");
    }
}
