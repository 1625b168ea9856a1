//! An allocator that counts allocations, for tests that a code path does not allocate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    // Const-initialised and without a destructor, so that access never allocates and is allowed while a thread ends.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system allocator with a count of the allocations of each thread.
///
/// Make it the `#[global_allocator]` of a test binary.
#[derive(Debug)]
pub struct CountingAllocator;

/// Returns how often the calling thread has allocated or reallocated. Always 0 if [`CountingAllocator`] is not the
/// global allocator.
pub fn allocations() -> u64 {
    ALLOCATIONS.get()
}

fn count() {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
}

// SAFETY: every call passes its arguments to `System` and returns the result unchanged, so the contract of `System`
// holds. The counter is a cell of this thread; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    /// # Safety
    ///
    /// The contract of [`GlobalAlloc::alloc`].
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller fulfils the contract for `layout`, which is also the contract of `System`.
        unsafe { System.alloc(layout) }
    }

    /// # Safety
    ///
    /// The contract of [`GlobalAlloc::alloc_zeroed`].
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller fulfils the contract for `layout`, which is also the contract of `System`.
        unsafe { System.alloc_zeroed(layout) }
    }

    /// # Safety
    ///
    /// The contract of [`GlobalAlloc::realloc`].
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the block came from `System` with this layout, through the methods here; the caller promises the rest.
        unsafe { System.realloc(block, layout, size) }
    }

    /// # Safety
    ///
    /// The contract of [`GlobalAlloc::dealloc`].
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the block came from `System` with this layout, through the methods here.
        unsafe { System.dealloc(block, layout) }
    }
}
