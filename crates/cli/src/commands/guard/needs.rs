//! What the host must have for the fixes of a policy. Asked at the start, because a guard that cannot act is no guard.

use std::path::Path;

use anyhow::Context;
use fourtuple_observe::host::cgroup;

use super::policy::Policy;

pub(super) fn check(policy: &Policy) -> anyhow::Result<()> {
    if policy.ports.is_some() || policy.accept.is_some() {
        let mounted = cgroup::mount_point(Path::new("/"));
        mounted.map_err(|error| {
            let remedy = cgroup::remedy(&error);
            anyhow::Error::new(error)
                .context(format!("guard needs cgroups of version 2, and none are mounted{remedy}"))
        })?;
    }
    if policy.ports.is_some() {
        fourtuple_fix::Ports::verify().context("guard")?;
    }
    if policy.accept.is_some() {
        fourtuple_fix::Accept::verify().context("guard")?;
    }
    Ok(())
}
