//! TODO
pub(crate) fn run() -> anyhow::Result<bool> {
    Ok(true)
}
