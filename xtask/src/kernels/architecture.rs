//! What differs between the architectures of the guests: kernels, virtual machine and compilers.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// An architecture of guests.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Architecture {
    /// Value of `--arch`, and the name in targets of Rust and in the programs of qemu and of GNU.
    pub(crate) name: &'static str,
    /// The name that Debian and Go use.
    pub(crate) debian: &'static str,
    pub(crate) kernels: &'static [Series],
    /// The package of Debian that has the emulator.
    pub(crate) emulator_package: &'static str,
    /// Arguments of qemu that select the machine.
    pub(crate) machine: &'static [&'static str],
    /// Parameters of the kernel.
    pub(crate) parameters: &'static str,
    /// Paths of the libraries that a program of Rust loads, and of the dynamic linker, in a guest with cross-compiled programs.
    libraries: &'static [&'static str],
}

/// A series of kernels that Debian packages.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Series {
    /// Value of `--kernel`.
    pub(crate) name: &'static str,
    /// The beginning of the package's version.
    pub(crate) version: &'static str,
    /// The end of the package's name.
    pub(crate) flavour: &'static str,
    /// Requirements of tests that this kernel does not meet.
    pub(crate) lacks: &'static [&'static str],
}

/// The architectures of the kernels to test.
pub(crate) const ALL: &[Architecture] = &[
    Architecture {
        name: "x86_64",
        debian: "amd64",
        kernels: &[
            Series { name: "6.1", version: "6.1", flavour: "cloud-amd64", lacks: &[] },
            Series { name: "6.12", version: "6.12", flavour: "cloud-amd64", lacks: &[] },
        ],
        emulator_package: "qemu-system-x86",
        // The default machine type is used, since microvm hangs with these kernels.
        machine: &[],
        // On a busy machine the kernel may see too few ticks in the 40 ms of its timer check, and panic ("IO-APIC + timer doesn't
        // work!").
        parameters: "console=ttyS0 no_timer_check",
        libraries: &["/lib/libc.so.6", "/lib/libgcc_s.so.1", "/lib/libm.so.6", "/lib64/ld-linux-x86-64.so.2"],
    },
    Architecture {
        name: "aarch64",
        debian: "arm64",
        kernels: &[
            // arm64 has had direct calls of ftrace, which fexit programs need, since Linux 6.4.
            Series { name: "6.1", version: "6.1", flavour: "cloud-arm64", lacks: &["fexit"] },
            Series { name: "6.12", version: "6.12", flavour: "cloud-arm64", lacks: &[] },
            Series { name: "6.12-16k", version: "6.12", flavour: "arm64-16k", lacks: &[] },
        ],
        emulator_package: "qemu-system-arm",
        // A processor with pages of 16 KiB and without pointer authentication, which is slow to emulate.
        machine: &["-machine", "virt", "-cpu", "cortex-a76"],
        parameters: "console=ttyAMA0",
        libraries: &["/lib/libc.so.6", "/lib/libgcc_s.so.1", "/lib/libm.so.6", "/lib/ld-linux-aarch64.so.1"],
    },
];

impl Architecture {
    /// Returns the architecture of this machine; the first of the table on others.
    pub(crate) fn of_host() -> &'static Architecture {
        ALL.iter().find(|one| one.is_native()).unwrap_or(&ALL[0])
    }

    pub(crate) fn is_native(&self) -> bool {
        self.name == env::consts::ARCH
    }

    /// Returns the program that emulates a machine.
    pub(crate) fn emulator(&self) -> String {
        format!("qemu-system-{}", self.name)
    }

    /// Returns the kernel packages' names for users: `linux-image-6.1.*-cloud-amd64`.
    pub(crate) fn pattern(&self, series: &Series) -> String {
        format!("linux-image-{}.*-{}", series.version, series.flavour)
    }
}

/// The compilers of an architecture: this machine's own, or cross compilers.
#[derive(Debug)]
pub(crate) struct Toolchain {
    pub(crate) architecture: &'static Architecture,
    /// The compiler of Rust that has the standard library of another architecture; `None`: cargo's own builds for this machine.
    cross: Option<PathBuf>,
}

impl Toolchain {
    /// Finds the compilers, or returns what is missing, in one line.
    pub(crate) fn find(architecture: &'static Architecture) -> Result<Toolchain, String> {
        if architecture.is_native() {
            return Ok(Toolchain { architecture, cross: None });
        }
        let compiler = format!("{}-linux-gnu-gcc", architecture.name);
        if !runs(Command::new(&compiler).arg("--version")) {
            let package = format!("gcc-{}-linux-gnu", architecture.name.replace('_', "-"));
            return Err(format!("there is no {compiler} (Debian: {package})"));
        }
        // Debian's compiler takes standard libraries of other architectures; that of rustup may have them too.
        let own = env::var_os("RUSTC").map_or_else(|| "rustc".into(), PathBuf::from);
        let mut compilers = [own, "/usr/bin/rustc".into()].into_iter();
        let cross = compilers.find(|rustc| has_standard_library(rustc, &target(architecture)));
        let debian = architecture.debian;
        let cross = cross.ok_or_else(|| {
            format!(
                "no rustc has the standard library of {} (Debian: dpkg --add-architecture {debian}, then rustc-web and \
                 libstd-rust-web-dev:{debian})",
                target(architecture)
            )
        })?;
        Ok(Toolchain { architecture, cross: Some(cross) })
    }

    /// Makes cargo build for the architecture, in a directory of its own: the compiler may have another version.
    pub(crate) fn configure(&self, cargo: &mut Command, directory: &Path) {
        let Some(rustc) = &self.cross else { return };
        let (target, name) = (target(self.architecture), self.architecture.name);
        let variable = target.replace('-', "_");
        let compiler = format!("{name}-linux-gnu-gcc");
        cargo.env("RUSTC", rustc).env(format!("CC_{variable}"), &compiler);
        cargo.env(format!("CARGO_TARGET_{}_LINKER", variable.to_uppercase()), &compiler);
        // Nothing of it goes into the guest.
        cargo.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_PROFILE_RELEASE_DEBUG", "0");
        cargo.args(["--target", &target, "--target-dir"]).arg(directory.join(name));
    }

    pub(crate) fn is_cross(&self) -> bool {
        self.cross.is_some()
    }

    /// Returns a program of the C compiler or of binutils: `cc`, `strip`.
    pub(crate) fn tool(&self, name: &str) -> Command {
        let prefix = self.architecture.name;
        Command::new(match (&self.cross, name) {
            (None, _) => name.to_owned(),
            (Some(_), "cc") => format!("{prefix}-linux-gnu-gcc"),
            (Some(_), _) => format!("{prefix}-linux-gnu-{name}"),
        })
    }

    /// Returns the libraries of cross-compiled programs, each as (path in the guest, path on this machine): Debian's cross compilers
    /// have a C library of their own.
    pub(crate) fn libraries(&self) -> impl Iterator<Item = (PathBuf, PathBuf)> {
        let directory = PathBuf::from(format!("/usr/{}-linux-gnu/lib", self.architecture.name));
        let place = move |path: &Path| directory.join(path.file_name().unwrap_or_default());
        self.architecture.libraries.iter().map(Path::new).map(move |path| (path.to_owned(), place(path)))
    }
}

fn target(architecture: &Architecture) -> String {
    format!("{}-unknown-linux-gnu", architecture.name)
}

fn has_standard_library(rustc: &Path, target: &str) -> bool {
    let output = Command::new(rustc).args(["--print", "target-libdir", "--target", target]).output();
    output.is_ok_and(|output| Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir())
}

/// Returns whether a program can be started.
pub(crate) fn runs(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}
