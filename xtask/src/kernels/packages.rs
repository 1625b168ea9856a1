//! Debian's kernels, downloaded and unpacked but never installed, since their install scripts are not needed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::kernels::architecture::{Architecture, Series};

/// Number of packages to try: apt knows names for which it has no download; after this many failures the download gives up.
const TRIES: usize = 6;

/// A kernel package, unpacked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    /// The release in the form of `uname -r`: `6.1.0-56-cloud-amd64`.
    pub(crate) release: String,
    /// Requirements of tests that this kernel does not meet.
    pub(crate) lacks: &'static [&'static str],
    directory: PathBuf,
}

impl Kernel {
    /// Finds the kernel of a package unpacked in a directory.
    pub(crate) fn unpacked_at(release: &str, directory: &Path) -> Kernel {
        Kernel { release: release.to_owned(), lacks: &[], directory: directory.to_owned() }
    }

    /// Returns the path of the compressed kernel.
    pub(crate) fn image(&self) -> PathBuf {
        self.directory.join(format!("boot/vmlinuz-{}", self.release))
    }

    /// Returns the directory of the modules; packages with a merged `/usr` have it one level further down.
    pub(crate) fn modules(&self) -> PathBuf {
        let below = |prefix: &str| self.directory.join(prefix).join(&self.release);
        let merged = below("usr/lib/modules");
        if merged.is_dir() { merged } else { below("lib/modules") }
    }
}

/// Unpacks the newest kernel of a series under `cache`, unless it is there; returns `None` if apt offers none.
pub(crate) fn newest(architecture: &Architecture, series: &Series, cache: &Path) -> Result<Option<Kernel>> {
    fs::create_dir_all(cache).with_context(|| format!("make {}", cache.display()))?;
    let mut names = offered()?;
    names.extend(cached(cache)?);
    let mut last_error = None;
    for name in pick(&names, series).into_iter().take(TRIES) {
        match unpacked(name, architecture.debian, cache) {
            Ok(kernel) => return Ok(Some(Kernel { lacks: series.lacks, ..kernel })),
            Err(error) => last_error = Some(error),
        }
    }
    match last_error {
        Some(error) => Err(error),
        None => Ok(None),
    }
}

/// Returns the packages of a series, newest first. Debug symbols and unsigned variants do not end in the flavour.
fn pick<'a>(names: &'a [String], series: &Series) -> Vec<&'a str> {
    let mut found: Vec<(Vec<u32>, &str)> = names
        .iter()
        .filter_map(|name| {
            let version =
                name.strip_prefix("linux-image-")?.strip_prefix(series.version)?.strip_prefix('.')?;
            let version = version.strip_suffix(series.flavour)?.strip_suffix('-')?;
            Some((numbers(version), name.as_str()))
        })
        .collect();
    found.sort();
    found.dedup();
    found.into_iter().rev().map(|(_, name)| name).collect()
}

/// Returns the numbers in a version, so that 6.12.101 sorts after 6.12.99.
fn numbers(version: &str) -> Vec<u32> {
    version.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

fn offered() -> Result<Vec<String>> {
    let output = match Command::new("apt-cache").args(["pkgnames", "linux-image-6"]).output() {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).context("start apt-cache"),
    };
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

fn cached(cache: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(cache).with_context(|| format!("list {}", cache.display()))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

fn unpacked(name: &str, architecture: &str, cache: &Path) -> Result<Kernel> {
    let directory = cache.join(name);
    let release = name.strip_prefix("linux-image-").context("a kernel's package name")?;
    let kernel = Kernel::unpacked_at(release, &directory);
    if directory.is_dir() {
        return Ok(kernel);
    }
    // The directory has a temporary name until it is complete, so an interrupted run leaves nothing that looks finished.
    let partial = cache.join(format!("partial-{name}"));
    if partial.exists() {
        fs::remove_dir_all(&partial).with_context(|| format!("remove {}", partial.display()))?;
    }
    fs::create_dir_all(&partial).with_context(|| format!("make {}", partial.display()))?;
    // apt run by root downloads as the user _apt, which may not write below the target directory.
    let sandbox = ["-o", "APT::Sandbox::User=root"];
    let package = format!("{name}:{architecture}");
    command(
        Command::new("apt-get").arg("-q").args(sandbox).args(["download", &package]).current_dir(&partial),
    )?;
    let mut package = None;
    for entry in fs::read_dir(&partial)? {
        package = Some(entry?.path());
    }
    let Some(package) = package else { bail!("apt-get download {name} left no file") };
    command(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&partial))?;
    fs::remove_file(&package).with_context(|| format!("remove {}", package.display()))?;
    let image = Kernel::unpacked_at(release, &partial).image();
    ensure!(image.is_file(), "{name} has no {}", image.display());
    fs::rename(&partial, &directory).with_context(|| format!("rename {}", partial.display()))?;
    Ok(kernel)
}

fn command(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("start {:?}", command.get_program()))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
    ensure!(output.status.success(), "{:?}: {}: {last}", command.get_program(), output.status);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(version: &'static str, flavour: &'static str) -> Series {
        Series { name: version, version, flavour, lacks: &[] }
    }

    #[test]
    fn the_newest_of_a_series_comes_first() {
        let names: Vec<String> = [
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64-dbg",
            "linux-image-6.1.0-57-amd64",
            "linux-image-6.12-cloud-amd64",
            "linux-image-6.12.99+deb12-cloud-amd64",
            "linux-image-6.12.117+deb12-cloud-amd64",
            "linux-image-6.12.118+deb12-cloud-amd64-unsigned",
            "linux-image-6.12.117+deb12-arm64-16k",
            "linux-image-6.12.117+deb12-cloud-arm64",
            "partial-linux-image-6.12.119+deb12-cloud-amd64",
        ]
        .map(str::to_owned)
        .to_vec();
        assert_eq!(
            pick(&names, &series("6.1", "cloud-amd64")),
            ["linux-image-6.1.0-56-cloud-amd64", "linux-image-6.1.0-9-cloud-amd64"]
        );
        for (flavour, newest) in [
            ("cloud-amd64", "linux-image-6.12.117+deb12-cloud-amd64"),
            ("cloud-arm64", "linux-image-6.12.117+deb12-cloud-arm64"),
            ("arm64-16k", "linux-image-6.12.117+deb12-arm64-16k"),
        ] {
            assert_eq!(pick(&names, &series("6.12", flavour))[0], newest);
        }
        assert!(pick(&names, &series("6.6", "cloud-amd64")).is_empty());
    }

    #[test]
    fn a_cached_kernel_that_apt_offers_counts_once() {
        let names = vec!["linux-image-6.1.0-56-cloud-amd64".to_owned(); 2];
        assert_eq!(pick(&names, &series("6.1", "cloud-amd64")).len(), 1);
    }
}
