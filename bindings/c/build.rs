//! Names the shared library: programs that are linked with it look for `libfourtuple.so.0`.
#![forbid(unsafe_code)]

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libfourtuple.so.0");
}
