//! Settings in the form of their `Display` and `FromStr`, for the feature `serde`: `strategy = "full-range"` in a configuration file.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::dial::{SourcePool, Strategy};
use crate::listen::{AcceptPolicy, Family};
use crate::ports::{PortRange, PortSet};
use crate::spread::{ControlFilter, DeviceName, Selector};

macro_rules! is_text {
    ($($setting:ty),+) => {$(
        impl Serialize for $setting {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $setting {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
            }
        }
    )+};
}

is_text!(AcceptPolicy, ControlFilter, DeviceName, Family, PortRange, PortSet, Selector, Strategy);

/// A list of addresses.
impl Serialize for SourcePool {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.addresses())
    }
}

/// A list of addresses and networks; an empty list is [`SourcePool::any`].
impl<'de> Deserialize<'de> for SourcePool {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Vec::<String>::deserialize(deserializer)?.join(",") {
            none if none.is_empty() => Ok(SourcePool::any()),
            list => list.parse().map_err(D::Error::custom),
        }
    }
}
