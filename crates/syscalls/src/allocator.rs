//! An allocator that counts, for tests that show that something does not allocate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    // Const and without a destructor, so that using it never allocates by itself and is allowed while a thread ends.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, with a count of what each thread asked of it.
///
/// Make it the `#[global_allocator]` of a test binary.
#[derive(Debug)]
pub struct CountingAllocator;

/// How often the calling thread has allocated or reallocated; 0 for ever where [`CountingAllocator`] is not the global
/// one.
pub fn allocations() -> u64 {
    ALLOCATIONS.get()
}

fn count() {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
}

// SAFETY: every call goes to `System` with the arguments unchanged and its answer is returned unchanged, so its promises
// are kept; the counting touches a cell of this thread, neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    /// # Safety
    ///
    /// As [`GlobalAlloc::alloc`] says.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: what the caller promises of `layout` is what `System` asks for.
        unsafe { System.alloc(layout) }
    }

    /// # Safety
    ///
    /// As [`GlobalAlloc::alloc_zeroed`] says.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: what the caller promises of `layout` is what `System` asks for.
        unsafe { System.alloc_zeroed(layout) }
    }

    /// # Safety
    ///
    /// As [`GlobalAlloc::realloc`] says.
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the block came from `System` with this layout, through the methods here; the caller promises the rest.
        unsafe { System.realloc(block, layout, size) }
    }

    /// # Safety
    ///
    /// As [`GlobalAlloc::dealloc`] says.
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the block came from `System` with this layout, through the methods here.
        unsafe { System.dealloc(block, layout) }
    }
}
