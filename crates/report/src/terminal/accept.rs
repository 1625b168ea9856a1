use fourtuple_record::{AcceptResults, AcceptSettings};

use super::sheet::{Sheet, Tone};

pub(super) fn body(sheet: &mut Sheet, words: &[String], _: &AcceptSettings, results: &AcceptResults) {
    sheet.heading("Which worker gets the connection");
    sheet.list(words, Tone::Dim);
    if results.cells.is_empty() {
        sheet.item("", "Nothing was measured.", Tone::Bad);
    }
}
