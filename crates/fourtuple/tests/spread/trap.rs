//! What happens when somebody connects a member.
