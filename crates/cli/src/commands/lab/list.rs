/// Returns the items in their order, each once.
pub(super) fn without_duplicates<T: Copy + PartialEq>(items: &[T]) -> Vec<T> {
    let mut unique = Vec::new();
    for item in items {
        if !unique.contains(item) {
            unique.push(*item);
        }
    }
    unique
}
