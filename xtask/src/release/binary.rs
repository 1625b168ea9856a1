//! The programs of the packages: their build, debug symbols and checks.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::call;
use crate::cargo;
use crate::release::{Release, text};

pub(super) const NAME: &str = "fourtuple";

/// The program of `fourtuple fleet` and `fourtuple agent`.
pub(super) const FLEET: &str = "fourtuple-fleet";

/// The profile of Cargo.toml.
const PROFILE: &str = "dist";

/// Replaces the root of the workspace in paths of the debug information.
const SOURCES: &str = "/usr/src/fourtuple";
/// Replaces the directory of the registry's crates.
const CRATES: &str = "/usr/src/cargo";

/// Maximum size of a stripped program, in bytes.
const MAX_BYTES: u64 = 15 << 20;

/// The libraries of the C library and the unwinder, which every Debian has.
const LIBRARIES: &[&str] = &["ld-linux", "libc.so.6", "libgcc_s.so.1", "libm.so.6"];

pub(super) struct Binary {
    pub(super) name: &'static str,
    pub(super) stripped: PathBuf,
    pub(super) symbols: PathBuf,
    /// Build ID in hexadecimal digits.
    pub(super) build_id: String,
    /// Size without symbols, in bytes.
    pub(super) size: u64,
    /// The needed shared libraries, sorted.
    pub(super) libraries: Vec<String>,
    /// The newest version of glibc's symbols, if the program needs glibc.
    pub(super) glibc: Option<String>,
    pub(super) faults: Vec<String>,
}

/// Whether a program needs the C library of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Linkage {
    Dynamic,
    Static,
}

impl Release {
    /// Builds the programs, the command first, separates their debug symbols, and checks them.
    pub(super) fn binaries(&self) -> Result<[Binary; 2]> {
        let mut binaries = self.programs(Linkage::Dynamic)?;
        let command = &mut binaries[0];
        if !self.is_native() {
            println!("release: {NAME} is not started here, because it is for {}", self.target);
        } else if Command::new(&command.stripped).args(["fleet", "up", "--help"]).output()?.status.code()
            != Some(0)
        {
            command.faults.push(format!("{NAME} does not run {FLEET}, which is beside it"));
        }
        Ok(binaries)
    }

    /// Builds the programs with the C library in them, for hosts with an older one or with another.
    pub(super) fn static_binaries(&self) -> Result<[Binary; 2]> {
        self.programs(Linkage::Static)
    }

    fn programs(&self, linkage: Linkage) -> Result<[Binary; 2]> {
        let built = self.build(linkage, &["--package", "fourtuple-cli", "--bin", NAME])?;
        self.build(linkage, &["--manifest-path", "fleet/Cargo.toml", "--bin", FLEET])?;
        let prefixes = self.prefixes(&self.build_target(linkage))?;
        Ok([
            self.separate(NAME, linkage, &built, &prefixes)?,
            self.separate(FLEET, linkage, &built, &prefixes)?,
        ])
    }

    /// Builds targets with the profile of releases. Returns the directory of the output.
    pub(super) fn build(&self, linkage: Linkage, targets: &[&str]) -> Result<PathBuf> {
        let target = self.build_target(linkage);
        let prefixes = self.prefixes(&target)?;
        // Debuggers find the symbols by the build ID.
        let mut flags = vec![OsString::from("-Clink-arg=-Wl,--build-id=sha1")];
        if linkage == Linkage::Static {
            flags.push("-Ctarget-feature=+crt-static".into());
        }
        let mut cflags: Vec<OsString> = std::env::var_os("CFLAGS").into_iter().collect();
        cflags.extend(prefixes.iter().map(|prefix| joined("-ffile-prefix-map=", prefix)));
        let mut build = cargo();
        build.current_dir(&self.workspace.root);
        self.environment(&mut build, &prefixes, flags);
        build.env("CFLAGS", cflags.join(&OsString::from(" ")));
        build.args(["build", "--locked", "--profile", PROFILE, "--target", &self.target]).args(targets);
        build.arg("--target-dir").arg(&target);
        call(&mut build)?;
        Ok(target.join(&self.target).join(PROFILE))
    }

    /// Sets what a build of cargo needs: the flags of the environment, such as those of a distribution, and then `flags`; the time of the
    /// commit; the linker of the target.
    pub(super) fn environment(
        &self,
        build: &mut Command,
        prefixes: &[(PathBuf, &str)],
        flags: Vec<OsString>,
    ) {
        let variable = |name: &str| std::env::var(name).ok();
        let mut rustflags = given_flags(variable("CARGO_ENCODED_RUSTFLAGS"), variable("RUSTFLAGS"));
        rustflags.extend(prefixes.iter().map(|prefix| joined("--remap-path-prefix=", prefix)));
        rustflags.extend(flags);
        build.env("CARGO_ENCODED_RUSTFLAGS", rustflags.join(&OsString::from("\x1f")));
        build.env("SOURCE_DATE_EPOCH", &self.epoch);
        let linker = format!("CARGO_TARGET_{}_LINKER", self.target.replace('-', "_").to_uppercase());
        if !self.is_native() && std::env::var_os(&linker).is_none() {
            build.env(linker, self.tool("gcc").get_program());
        }
    }

    fn build_target(&self, linkage: Linkage) -> PathBuf {
        self.workspace.target.join(match linkage {
            Linkage::Dynamic => "release-build",
            // Other flags, and so another directory: one directory would be built anew each time.
            Linkage::Static => "release-static",
        })
    }

    /// Returns the directories of this machine that the compilers replace, each with its replacement. The last one that matches a path
    /// counts.
    pub(super) fn prefixes(&self, target: &Path) -> Result<Vec<(PathBuf, &'static str)>> {
        let mut prefixes = vec![
            (self.workspace.root.clone(), SOURCES),
            (target.to_owned(), concat!("/usr/src/fourtuple", "/target")),
        ];
        let registry = cargo_home().context("HOME is not set")?.join("registry/src");
        let mut sources: Vec<PathBuf> = fs::read_dir(&registry)
            .with_context(|| format!("list {}", registry.display()))?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_>>()?;
        sources.sort();
        prefixes.extend(sources.into_iter().map(|path| (path, CRATES)));
        Ok(prefixes)
    }

    fn separate(
        &self,
        name: &'static str,
        linkage: Linkage,
        built: &Path,
        prefixes: &[(PathBuf, &str)],
    ) -> Result<Binary> {
        let built = &built.join(name);
        let stage = match linkage {
            Linkage::Dynamic => self.stage.clone(),
            Linkage::Static => self.stage.join("static"),
        };
        fs::create_dir_all(&stage).with_context(|| format!("make {}", stage.display()))?;
        let stripped = stage.join(name);
        let symbols = stage.join(format!("{name}.debug"));
        call(
            self.tool("objcopy")
                .args(["--only-keep-debug", "--compress-debug-sections"])
                .args([built, &symbols]),
        )?;
        call(self.tool("strip").arg("-o").args([&stripped, &built.to_owned()]))?;
        let size = fs::metadata(&stripped).context("size of the stripped binary")?.len();
        let libraries = needed(&text(self.tool("readelf").arg("-d").arg(&stripped))?);
        // A static program has no dynamic linker, and need not have dynamic symbols.
        let is_static = !text(self.tool("readelf").arg("-l").arg(&stripped))?.contains("INTERP");
        let glibc = match linkage {
            Linkage::Dynamic => newest(&text(self.tool("objdump").arg("-T").arg(&stripped))?),
            Linkage::Static => None,
        };
        let notes = text(self.tool("readelf").arg("-n").arg(&stripped))?;
        let build_id = notes.split("Build ID: ").nth(1).and_then(|rest| rest.split_whitespace().next());
        let build_id = build_id.context("a program has no build ID")?;
        let mut faults = Vec::new();
        // The C library in a static program has no bound of ours.
        if size > MAX_BYTES && linkage == Linkage::Dynamic {
            faults.push(format!("{name}, stripped, has {size} bytes, more than {MAX_BYTES}"));
        }
        if is_static != (linkage == Linkage::Static) {
            faults.push(format!("{name} is linked otherwise than {linkage:?}"));
        }
        for library in &libraries {
            if !LIBRARIES.iter().any(|known| library.starts_with(known)) {
                faults.push(format!("{name} needs {library}, which is not of the C library"));
            }
        }
        let contents = fs::read(built).with_context(|| format!("read {}", built.display()))?;
        let homes = cargo_home().into_iter().chain(std::env::var_os("HOME").map(PathBuf::from));
        for path in prefixes.iter().map(|(path, _)| path.clone()).chain(homes) {
            let count = occurrences(&contents, path.join("").as_os_str().as_encoded_bytes());
            if count > 0 {
                faults.push(format!("{name} has {count} paths below {}", path.display()));
            }
        }
        let build_id = build_id.to_owned();
        Ok(Binary { name, stripped, symbols, build_id, size, libraries, glibc, faults })
    }
}

/// Returns the flags of the environment, where the encoded ones win, as for cargo.
fn given_flags(encoded: Option<String>, plain: Option<String>) -> Vec<OsString> {
    let flags: Vec<String> = match (encoded, plain) {
        (Some(encoded), _) => encoded.split('\x1f').map(str::to_owned).collect(),
        (None, plain) => plain.unwrap_or_default().split_whitespace().map(str::to_owned).collect(),
    };
    flags.into_iter().filter(|flag| !flag.is_empty()).map(OsString::from).collect()
}

fn joined(flag: &str, (path, replacement): &(PathBuf, &str)) -> OsString {
    let mut argument = OsString::from(flag);
    argument.push(path);
    argument.push("=");
    argument.push(replacement);
    argument
}

fn cargo_home() -> Option<PathBuf> {
    let default = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo"));
    std::env::var_os("CARGO_HOME").map(PathBuf::from).or_else(default)
}

/// Returns the needed libraries in the output of `readelf -d`, sorted.
fn needed(dynamic: &str) -> Vec<String> {
    let lines = dynamic.lines().filter(|line| line.contains("(NEEDED)"));
    let names = lines.filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0));
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort();
    names
}

/// Returns the newest GLIBC version in the output of `objdump -T`.
fn newest(symbols: &str) -> Option<String> {
    let versions = symbols.split("GLIBC_").skip(1);
    let versions = versions.map(|text| text.split([')', ' ', '\n']).next().unwrap_or_default());
    versions.max_by_key(|version| parts(version)).map(str::to_owned)
}

/// Returns the numbers of a version, in the order in which versions compare.
pub(super) fn parts(version: &str) -> Vec<u32> {
    version.split('.').map(|part| part.parse().unwrap_or(0)).collect()
}

/// Counts a sequence of bytes.
fn occurrences(contents: &[u8], bytes: &[u8]) -> usize {
    // Most bytes are not a slash, so the comparison is rare.
    contents.windows(bytes.len()).filter(|window| window.first() == bytes.first() && *window == bytes).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_readelf() {
        let dynamic = " 0x1 (NEEDED)  Shared library: [libm.so.6]\n 0x1 (NEEDED)  Shared library: [libc.so.6]\n 0xe (SONAME)  [x]\n";
        assert_eq!(needed(dynamic), ["libc.so.6", "libm.so.6"]);
    }

    #[test]
    fn flags_of_the_environment_are_kept() {
        let given = |encoded: Option<&str>, plain: Option<&str>| {
            given_flags(encoded.map(str::to_owned), plain.map(str::to_owned))
        };
        assert_eq!(given(None, Some(" -Ccodegen-units=1  -g ")), ["-Ccodegen-units=1", "-g"]);
        assert_eq!(given(Some("-Clink-arg=-a b\x1f-g"), Some("-O")), ["-Clink-arg=-a b", "-g"]);
        assert!(given(Some(""), None).is_empty() && given(None, None).is_empty());
    }

    #[test]
    fn glibc_versions_are_compared_by_number() {
        let symbols = "0 DF *UND* 0 (GLIBC_2.4) a\n0 DF *UND* 0 (GLIBC_2.34) b\n0 DF *UND* 0 (GLIBC_2.9) c\n";
        assert_eq!(newest(symbols).as_deref(), Some("2.34"));
        assert_eq!(newest("0 DF *UND* 0 (GCC_3.0) a"), None);
    }
}
