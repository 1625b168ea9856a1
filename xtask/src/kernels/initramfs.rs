//! Writes an initramfs: the "new ASCII" cpio format of Documentation/driver-api/early-userspace/buffer-format.rst. And finds the
//! modules that tests need, in the order in which they can be loaded: depmod writes `modules.dep` when a package is installed; these
//! packages are never installed, so the dependencies are read from the modules.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// File type bits of a mode.
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// The name of the last entry of an archive.
const TRAILER: &str = "TRAILER!!!";

/// An archive being written. A directory must be added before its files: the kernel does not create parents.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    inodes: u32,
}

impl Archive {
    /// Adds a directory with mode 0755, owned by root.
    pub(crate) fn directory(&mut self, path: &str) {
        self.entry(path, DIRECTORY | 0o755, (0, 0), &[]);
    }

    /// Adds a file, with its permission bits.
    pub(crate) fn file(&mut self, path: &str, permissions: u32, content: &[u8]) {
        self.entry(path, REGULAR | permissions, (0, 0), content);
    }

    /// Adds a character device for root alone.
    pub(crate) fn character_device(&mut self, path: &str, major: u32, minor: u32) {
        self.entry(path, CHARACTER_DEVICE | 0o600, (major, minor), &[]);
    }

    /// Ends the archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry(TRAILER, 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.inodes += 1;
        let size = u32::try_from(content.len()).expect("a file in an initramfs is smaller than 4 GiB");
        let name_size = u32::try_from(path.len() + 1).expect("a path is short");
        self.bytes.extend_from_slice(b"070701");
        let fields = [
            self.inodes,
            mode,
            0, // owner
            0, // group
            1, // links
            0, // time of modification
            size,
            0, // major and minor of the device that the file lay on
            0,
            device.0,
            device.1,
            name_size,
            0, // check sum, unused in this format
        ];
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    /// Pads to a multiple of four bytes, counted from the start of the archive; each name and each content ends so.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// Features that the tests need and that a kernel may have as modules.
pub(crate) const MODULES: &[&str] =
    &["inet_diag", "tcp_diag", "udp_diag", "unix_diag", "veth", "dummy", "vrf"];

/// The modules of [`MODULES`] without tcp_diag and udp_diag. With inet_diag, sock_diag ends a dump with an errno instead of
/// refusing the request.
pub(crate) const MODULES_WITHOUT_DIAG: &[&str] = &["inet_diag", "veth", "dummy", "vrf"];

/// The modules for experiments with limits of the host.
pub(crate) const MODULES_OF_LIMITS: &[&str] =
    &["inet_diag", "tcp_diag", "udp_diag", "unix_diag", "nf_conntrack"];

/// A module ready to be loaded.
pub(crate) struct Module {
    pub(crate) name: String,
    pub(crate) content: Vec<u8>,
}

/// Collects the modules and everything they depend on, dependencies first, from `lib/modules/<release>`.
pub(crate) fn modules(directory: &Path, wanted: &[&str]) -> Result<Vec<Module>> {
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
    use anyhow::bail;

    use super::*;

    /// Name, mode, device, content.
    type Entry = (String, u32, (u32, u32), Vec<u8>);

    /// Parses an archive.
    fn read(bytes: &[u8]) -> Vec<Entry> {
        let mut entries = Vec::new();
        let mut at = 0;
        loop {
            assert_eq!(&bytes[at..at + 6], b"070701", "entry at {at}");
            let field = |index: usize| {
                let start = at + 6 + 8 * index;
                u32::from_str_radix(std::str::from_utf8(&bytes[start..start + 8]).unwrap(), 16).unwrap()
            };
            let name_start = at + 110;
            let name_end = name_start + field(11) as usize;
            assert_eq!(bytes[name_end - 1], 0);
            let name = String::from_utf8(bytes[name_start..name_end - 1].to_vec()).unwrap();
            let start = name_end.next_multiple_of(4);
            let end = start + field(6) as usize;
            if name == TRAILER {
                assert_eq!(bytes.len(), end.next_multiple_of(4));
                return entries;
            }
            entries.push((name, field(1), (field(9), field(10)), bytes[start..end].to_vec()));
            at = end.next_multiple_of(4);
        }
    }

    #[test]
    fn an_archive_survives_writing_and_reading() {
        let mut archive = Archive::default();
        archive.directory("bin");
        archive.character_device("dev/console", 5, 1);
        for length in 0..9 {
            archive.file(&"n".repeat(length + 1), 0o755, &vec![7; length]);
        }
        let entries = read(&archive.finish());
        assert_eq!(entries.len(), 11);
        assert_eq!(entries[0], ("bin".into(), 0o040_755, (0, 0), vec![]));
        assert_eq!(entries[1], ("dev/console".into(), 0o020_600, (5, 1), vec![]));
        for (length, entry) in entries[2..].iter().enumerate() {
            assert_eq!(entry, &("n".repeat(length + 1), 0o100_755, (0, 0), vec![7; length]));
        }
    }

    #[test]
    fn an_empty_archive_is_a_trailer() {
        let bytes = Archive::default().finish();
        assert!(read(&bytes).is_empty());
        assert_eq!(bytes.len(), 124);
    }

    #[test]
    fn inodes_differ_so_that_no_file_is_a_hard_link() {
        let mut archive = Archive::default();
        archive.file("a", 0o644, b"");
        archive.file("b", 0o644, b"");
        let bytes = archive.finish();
        assert_eq!(&bytes[6..14], b"00000001");
        assert_eq!(&bytes[112 + 6..112 + 14], b"00000002");
    }

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
