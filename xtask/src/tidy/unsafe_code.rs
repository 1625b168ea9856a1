//! Checks that `unsafe` occurs in three crates and one library only, and that each use states why it is sound.

use std::path::Path;

use crate::tidy::lexer::{Kind, Token};
use crate::tidy::tree::{Fault, Tree};

/// The only directories that may contain `unsafe`. The library of `run --via preload` runs inside of other programs, replaces functions
/// of the C library, and can use no crate. The C library gets pointers from C.
const ALLOWED: &[&str] = &["crates/syscalls", "crates/bpf", "crates/fix/preload", "crates/c"];

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    let mut faults = Vec::new();
    for source in &tree.sources {
        let tokens = source.tokens();
        let is_allowed = ALLOWED.iter().any(|directory| source.path.starts_with(directory));
        for (index, token) in tokens.iter().enumerate() {
            if token.kind != Kind::Word || token.text != "unsafe" {
                continue;
            }
            if !is_allowed {
                faults.push(Fault::at(
                    &source.path,
                    token.line,
                    format!("unsafe outside of {}", ALLOWED.join(", ")),
                ));
            } else if let Some(wanted) = missing(&tokens, index) {
                faults.push(Fault::at(
                    &source.path,
                    token.line,
                    format!("unsafe without a `{wanted}` above it"),
                ));
            }
        }
    }
    for package in &tree.workspace.packages {
        if ALLOWED.iter().any(|directory| package.directory == Path::new(directory)) {
            continue;
        }
        for root in &package.roots {
            let source = tree.sources.iter().find(|source| source.path == *root);
            if source.is_some_and(|source| !forbids_unsafe(&source.tokens())) {
                faults.push(Fault::in_file(root, "a crate root without #![forbid(unsafe_code)]"));
            }
        }
    }
    faults
}

/// Returns whether the tokens have `#![forbid(unsafe_code)]`, alone or among other lints.
fn forbids_unsafe(tokens: &[Token<'_>]) -> bool {
    let code: Vec<&Token<'_>> = tokens.iter().filter(|token| token.kind != Kind::Comment).collect();
    code.windows(5).enumerate().any(|(index, window)| {
        let is_forbid = window[0].is('#')
            && window[1].is('!')
            && window[2].is('[')
            && window[3].text == "forbid"
            && window[4].is('(');
        let list = code[index..].iter().take_while(|token| !token.is(')'));
        is_forbid && list.into_iter().any(|token| token.text == "unsafe_code")
    })
}

/// Returns the comment that the `unsafe` at an index needs above it and lacks.
fn missing(tokens: &[Token<'_>], index: usize) -> Option<&'static str> {
    let mut code = tokens[index + 1..].iter().filter(|token| token.kind != Kind::Comment);
    let mut next = code.next()?;
    let mut after = code.next();
    // `unsafe extern "C" fn` and the type `unsafe extern "C" fn(...)`.
    if next.text == "extern" && after.is_some_and(|token| token.kind == Kind::Literal) {
        next = code.next()?;
        after = code.next();
    }
    match next.text {
        // `#[unsafe(no_mangle)]` and `unsafe fn(...)` as a type need no comment here.
        "(" => None,
        "fn" if after.is_some_and(|token| token.is('(')) => None,
        "fn" | "trait" => {
            let described = has_comment_above(tokens, index, "# Safety");
            (!described && !has_comment_above(tokens, index, "SAFETY:")).then_some("/// # Safety")
        }
        _ => (!has_comment_above(tokens, index, "SAFETY:")).then_some("// SAFETY:"),
    }
}

/// Returns whether a comment with a mark stands between the `unsafe` and the end of the statement or item before it.
fn has_comment_above(tokens: &[Token<'_>], index: usize, mark: &str) -> bool {
    for token in tokens[..index].iter().rev() {
        if token.kind == Kind::Comment && token.text.contains(mark) {
            return true;
        }
        if token.is(';') || token.is('{') || token.is('}') {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::fixture::{lines, package, tree};

    fn in_syscalls(text: &str) -> Vec<String> {
        lines(check(&tree(vec![package("fourtuple-syscalls", &[])], &[("crates/syscalls/src/lib.rs", text)])))
    }

    #[test]
    fn a_reason_above_each_use_passes() {
        let text = "
            fn a() -> i32 {
                // SAFETY: takes no pointers.
                // Goes on.
                let id = unsafe { getpid() };
                checked(
                    // SAFETY: the same.
                    unsafe { getpid() },
                )
            }
            // SAFETY: it is only a number.
            unsafe impl Send for A {}
            /// Does it.
            ///
            /// # Safety
            /// The pointer is valid.
            #[inline]
            pub unsafe fn b(f: unsafe extern \"C\" fn(i32), g: unsafe fn()) {}
            // SAFETY: the signatures match libc.
            unsafe extern \"C\" { fn c(); }
            #[unsafe(no_mangle)]
            fn d() {}";
        assert_eq!(in_syscalls(text), Vec::<String>::new());
    }

    #[test]
    fn each_use_without_one_is_caught() {
        let text = "
            // SAFETY: this belongs to another item.
            fn a() {
                unsafe { b() };
                // Not a reason.
                unsafe { b() };
            }
            unsafe impl Send for A {}
            /// Does it.
            pub unsafe fn c() {}
            unsafe extern \"C\" { fn d(); }";
        assert_eq!(
            in_syscalls(text),
            [
                "crates/syscalls/src/lib.rs:4: unsafe without a `// SAFETY:` above it",
                "crates/syscalls/src/lib.rs:6: unsafe without a `// SAFETY:` above it",
                "crates/syscalls/src/lib.rs:8: unsafe without a `// SAFETY:` above it",
                "crates/syscalls/src/lib.rs:10: unsafe without a `/// # Safety` above it",
                "crates/syscalls/src/lib.rs:11: unsafe without a `// SAFETY:` above it",
            ]
        );
    }

    #[test]
    fn other_crates_forbid_it_and_have_none() {
        let packages = || vec![package("fourtuple-lab", &[])];
        let path = "crates/lab/src/lib.rs";
        let good = "//! Labs.\n#![forbid(unsafe_code)]\n// unsafe\nconst A: &str = \"unsafe { }\";";
        assert!(check(&tree(packages(), &[(path, good)])).is_empty());
        let bad = "#![deny(unsafe_code)] // #![forbid(unsafe_code)]\nfn a() { unsafe {} }";
        assert_eq!(
            lines(check(&tree(packages(), &[(path, bad)]))),
            [
                "crates/lab/src/lib.rs:2: unsafe outside of crates/syscalls, crates/bpf, crates/fix/preload, crates/c",
                "crates/lab/src/lib.rs: a crate root without #![forbid(unsafe_code)]",
            ]
        );
    }

    #[test]
    fn the_preloaded_library_is_the_only_exception_in_its_crate() {
        let package = || vec![package("fourtuple-fix", &[])];
        let text = "// SAFETY: takes no pointers.\nconst A: i32 = unsafe { getpid() };";
        assert!(check(&tree(package(), &[("crates/fix/preload/preload.rs", text)])).is_empty());
        assert_eq!(lines(check(&tree(package(), &[("crates/fix/src/run/mod.rs", text)]))).len(), 1);
    }

    #[test]
    fn forbid_may_name_other_lints_too() {
        assert!(forbids_unsafe(&crate::tidy::lexer::tokens("#![forbid(missing_docs, unsafe_code)]")));
        assert!(!forbids_unsafe(&crate::tidy::lexer::tokens("#![forbid(missing_docs)] fn unsafe_code() {}")));
    }
}
