//! Names of network devices.

use std::fmt;
use std::str::FromStr;

/// The size of a device name with its terminating zero byte (IFNAMSIZ).
const ROOM: usize = 16;

/// The name of a network device.
///
/// ```
/// use fourtuple::spread::DeviceName;
///
/// assert_eq!("eth0".parse::<DeviceName>()?.name(), "eth0");
/// assert!("a name longer than 15 bytes".parse::<DeviceName>().is_err());
/// # Ok::<(), fourtuple::spread::DeviceNameError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceName([u8; ROOM]);

/// An error in the text of a device name.
///
/// Example: [`DeviceName`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no name of a network device: expected 1 to {} bytes without / and blanks", ROOM - 1)]
pub struct DeviceNameError {
    text: String,
}

impl DeviceName {
    /// Returns the name.
    pub fn name(&self) -> &str {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(ROOM);
        std::str::from_utf8(&self.0[..end]).unwrap_or_default()
    }
}

impl FromStr for DeviceName {
    type Err = DeviceNameError;

    /// Checks the name by the rules of the kernel's `dev_valid_name`.
    fn from_str(text: &str) -> Result<DeviceName, DeviceNameError> {
        let is_odd =
            |letter: char| letter == '/' || letter == ':' || letter == '\0' || letter.is_whitespace();
        if text.is_empty() || text.len() >= ROOM || text == "." || text == ".." || text.contains(is_odd) {
            return Err(DeviceNameError { text: text.to_owned() });
        }
        let mut name = [0; ROOM];
        name[..text.len()].copy_from_slice(text.as_bytes());
        Ok(DeviceName(name))
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl fmt::Debug for DeviceName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "DeviceName({:?})", self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_equal_the_names_of_the_kernel() {
        for name in ["lo", "veth0", "a.b-c_d", "fifteen-bytes--"] {
            assert_eq!(name.parse::<DeviceName>().unwrap().name(), name);
        }
        for name in ["", ".", "..", "a b", "a/b", "eth0:1", "sixteen-bytes---"] {
            assert!(name.parse::<DeviceName>().is_err(), "{name:?}");
        }
    }
}
