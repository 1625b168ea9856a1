//! The signature of the checksums, by a key of SSH: `ssh-keygen -Y verify` is on nearly every host.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::release::call;

/// What the signature is for: a signature of the same key for another purpose is not accepted.
const NAMESPACE: &str = "fourtuple-release";

/// Writes `<file>.sig`.
pub(super) fn sign(file: &Path, key: &Path) -> Result<()> {
    call(Command::new("ssh-keygen").args(["-q", "-Y", "sign", "-n", NAMESPACE, "-f"]).args([key, file]))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    #[test]
    fn changed_checksums_are_refused() {
        if Command::new("ssh-keygen").arg("-?").output().is_err() {
            return fourtuple_testing::skip("changed_checksums_are_refused", "programs", "no ssh-keygen");
        }
        let room = std::env::temp_dir().join(format!("fourtuple-signature-{}", std::process::id()));
        fs::create_dir_all(&room).unwrap();
        let (key, sums) = (room.join("key"), room.join("SHA256SUMS"));
        call(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key)).unwrap();
        let public = fs::read_to_string(key.with_extension("pub")).unwrap();
        let signers = room.join("signers");
        fs::write(&signers, format!("releases {public}")).unwrap();
        fs::write(&sums, "ab  file\n").unwrap();
        sign(&sums, &key).unwrap();
        // The command of docs/install.md.
        let verify = || {
            let mut verify = Command::new("ssh-keygen");
            verify.args(["-Y", "verify", "-I", "releases", "-n", "fourtuple-release", "-f"]).arg(&signers);
            verify.arg("-s").arg(room.join("SHA256SUMS.sig")).stdin(File::open(&sums).unwrap());
            verify.output().unwrap().status.success()
        };
        assert!(verify());
        fs::write(&sums, "ac  file\n").unwrap();
        assert!(!verify());
        fs::remove_dir_all(&room).unwrap();
    }
}
