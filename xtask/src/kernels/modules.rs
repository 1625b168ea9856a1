//! The modules that tests need, in the order in which they can be loaded.
//!
//! depmod writes `modules.dep` when a package is installed. These packages are never installed, so the dependencies are
//! read from the modules.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Features that the tests need and that a kernel may have as modules.
pub(crate) const WANTED: &[&str] =
    &["inet_diag", "tcp_diag", "udp_diag", "unix_diag", "veth", "dummy", "vrf"];

/// The modules of [`WANTED`] without tcp_diag and udp_diag. With inet_diag, sock_diag ends a dump with an errno instead of
/// refusing the request.
pub(crate) const WANTED_WITHOUT_DIAG: &[&str] = &["inet_diag", "veth", "dummy", "vrf"];

/// The modules for experiments with limits of the host.
pub(crate) const WANTED_OF_LIMITS: &[&str] =
    &["inet_diag", "tcp_diag", "udp_diag", "unix_diag", "nf_conntrack"];

/// A module ready to be loaded.
pub(crate) struct Module {
    pub(crate) name: String,
    pub(crate) content: Vec<u8>,
}

/// Collects the modules and everything they depend on, dependencies first, from `lib/modules/<release>`.
pub(crate) fn collect(directory: &Path, wanted: &[&str]) -> Result<Vec<Module>> {
    let mut files = BTreeMap::new();
    find(&directory.join("kernel"), &mut files)?;
    let builtin = fs::read_to_string(directory.join("modules.builtin")).unwrap_or_default();
    let builtin: Vec<String> = builtin.lines().filter_map(|line| module_name(Path::new(line))).collect();
    order(
        wanted,
        |name| builtin.iter().any(|other| other == name),
        |name| {
            let path =
                files.get(name).with_context(|| format!("{} has no module {name}", directory.display()))?;
            read(path)
        },
    )
}

/// Visits depth first from each wanted module, so that a module follows all its dependencies.
fn order(
    wanted: &[&str],
    is_builtin: impl Fn(&str) -> bool,
    read: impl Fn(&str) -> Result<Vec<u8>>,
) -> Result<Vec<Module>> {
    fn visit(
        name: &str,
        done: &mut Vec<Module>,
        is_builtin: &impl Fn(&str) -> bool,
        read: &impl Fn(&str) -> Result<Vec<u8>>,
    ) -> Result<()> {
        if is_builtin(name) || done.iter().any(|module| module.name == name) {
            return Ok(());
        }
        let content = read(name)?;
        for dependency in dependencies(&content) {
            visit(&dependency, done, is_builtin, read)?;
        }
        done.push(Module { name: name.to_owned(), content });
        Ok(())
    }
    let mut done = Vec::new();
    for name in wanted {
        visit(name, &mut done, &is_builtin, &read)?;
    }
    Ok(done)
}

/// Returns the modules in the `depends=` string of the `.modinfo` section. The section's strings end in NUL, so no ELF reader is
/// needed.
fn dependencies(content: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(start) = content.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let value = &content[start + KEY.len()..];
    let value = &value[..value.iter().position(|&byte| byte == 0).unwrap_or(value.len())];
    String::from_utf8_lossy(value).split(',').filter(|name| !name.is_empty()).map(canonical).collect()
}

fn find(directory: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            find(&path, files)?;
        } else if let Some(name) = module_name(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

fn module_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_suffix(".xz").unwrap_or(name);
    name.strip_suffix(".ko").map(canonical)
}

/// Returns the module name of a file: file names have dashes where the kernel has underscores.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

fn read(path: &Path) -> Result<Vec<u8>> {
    if path.extension().is_none_or(|extension| extension != "xz") {
        return fs::read(path).with_context(|| format!("read {}", path.display()));
    }
    let output = Command::new("xz").arg("-dc").arg(path).output().context("start xz (Debian: xz-utils)")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "xz -dc {}: {}", path.display(), stderr.trim());
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    fn fake(name: &str) -> Result<Vec<u8>> {
        Ok(match name {
            "tcp_diag" | "udp_diag" => b"\x7fELF\0license=GPL\0depends=inet_diag,netlink\0name=x\0".to_vec(),
            "inet_diag" => b"\x7fELF\0depends=\0".to_vec(),
            other => bail!("no {other}"),
        })
    }

    #[test]
    fn dependencies_come_first_and_once() {
        let modules = order(&["tcp_diag", "udp_diag"], |name| name == "netlink", fake).unwrap();
        let names: Vec<&str> = modules.iter().map(|module| module.name.as_str()).collect();
        assert_eq!(names, ["inet_diag", "tcp_diag", "udp_diag"]);
    }

    #[test]
    fn a_missing_module_is_named() {
        let error = order(&["veth"], |_| false, fake).err().unwrap();
        assert_eq!(error.to_string(), "no veth");
    }

    #[test]
    fn names_lose_dashes_and_endings() {
        assert_eq!(module_name(Path::new("kernel/a/nf-x.ko.xz")).as_deref(), Some("nf_x"));
        assert_eq!(module_name(Path::new("kernel/a/veth.ko")).as_deref(), Some("veth"));
        assert_eq!(module_name(Path::new("modules.order")), None);
    }
}
