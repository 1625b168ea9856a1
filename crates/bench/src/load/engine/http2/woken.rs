use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

/// The connections, or the streams, whose waker was called since the last turn. A waker may be called from any thread, though here
/// only one thread does so.
pub(super) struct Woken {
    list: WokenList,
    wakers: Vec<Waker>,
    tokens: Vec<Arc<Token>>,
}

struct Token {
    number: u32,
    is_listed: AtomicBool,
    list: WokenList,
}

#[derive(Clone, Default)]
pub(super) struct WokenList(Arc<Mutex<Vec<u32>>>);

impl WokenList {
    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Token {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_listed.swap(true, Ordering::AcqRel) {
            self.list.lock().push(self.number);
        }
    }
}

impl Woken {
    /// Creates wakers for the numbers below `count`.
    pub(super) fn new(count: u32) -> Woken {
        let list = WokenList::default();
        let token =
            |number| Arc::new(Token { number, is_listed: AtomicBool::new(false), list: list.clone() });
        let tokens: Vec<Arc<Token>> = (0..count).map(token).collect();
        let wakers = tokens.iter().map(|token| Waker::from(Arc::clone(token))).collect();
        Woken { list, wakers, tokens }
    }

    pub(super) fn waker(&self, number: u32) -> &Waker {
        &self.wakers[number as usize]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.len() == 0
    }

    pub(super) fn list(&self) -> &WokenList {
        &self.list
    }

    /// Swaps the list with `woken`, which is empty. What is woken from now on is on the next one.
    pub(super) fn take(&self, woken: &mut Vec<u32>) {
        mem::swap(&mut *self.list.lock(), woken);
        for number in woken {
            self.tokens[*number as usize].is_listed.store(false, Ordering::Release);
        }
    }
}
