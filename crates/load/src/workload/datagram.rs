use super::{Heard, Talk};

/// Bytes of the number that tells a late answer from the one that is waited for.
const NUMBER: usize = 8;

/// A datagram out, a datagram back. Where it has room for it, a datagram carries its number, and an answer with another one
/// is late and not counted.
pub(super) struct Datagram {
    payload: Vec<u8>,
    number: u64,
}

impl Datagram {
    pub(super) fn new(request: usize) -> Self {
        Datagram { payload: vec![b'x'; request.max(1)], number: 0 }
    }
}

impl Talk for Datagram {
    fn begin(&mut self, _last: bool) {
        self.number += 1;
        if let Some(room) = self.payload.get_mut(..NUMBER) {
            room.copy_from_slice(&self.number.to_be_bytes());
        }
    }

    fn outgoing(&self) -> &[u8] {
        &self.payload
    }

    fn heard(&mut self, bytes: &[u8]) -> Heard {
        match (bytes.get(..NUMBER), self.payload.get(..NUMBER)) {
            (Some(theirs), Some(ours)) if theirs != ours => Heard::More,
            _ => Heard::ANSWER,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_answer_is_not_taken_for_the_one_that_is_waited_for() {
        let mut talk = Datagram::new(16);
        talk.begin(false);
        let late = talk.outgoing().to_vec();
        talk.begin(false);
        assert_eq!(talk.heard(&late), Heard::More);
        let now = talk.outgoing().to_vec();
        assert_eq!(talk.heard(&now), Heard::ANSWER);
        let mut short = Datagram::new(1);
        short.begin(false);
        assert_eq!(short.heard(b"x"), Heard::ANSWER, "there is no room for a number");
    }
}
