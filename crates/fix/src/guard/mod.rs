//! The decisions of `fourtuple guard`: which programs a policy includes, and when a fix begins and ends.

mod keeper;
mod scope;

pub use keeper::{Effect, Keeper, Limits, Step, Why};
pub use scope::{Scope, ScopeError, directory_of, own_cgroup, user_who_chose};
