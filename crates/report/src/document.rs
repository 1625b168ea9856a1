//! Documents: a record as blocks that a renderer shows without knowledge of the record.

use fourtuple_record::TraceHeat;

use crate::table::{Cell, Column, Table};

/// The style of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Strong,
    Dim,
    Good,
    Bad,
}

impl Tone {
    /// Returns `Bad` if `bad` is true, otherwise `Plain`.
    pub(crate) fn bad_if(bad: bool) -> Tone {
        if bad { Tone::Bad } else { Tone::Plain }
    }
}

/// The renderers that show a block or a column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Medium {
    #[default]
    Both,
    /// The terminal, in brief or in full.
    Terminal,
    /// The terminal in brief: the first screen of a record that has more to say.
    Brief,
    /// The page, and the terminal in full.
    Full,
    Page,
}

impl Medium {
    /// Returns whether the renderer `here` shows it: the page, or the terminal in brief or in full.
    pub(crate) fn includes(self, here: Medium) -> bool {
        match self {
            Medium::Both => true,
            Medium::Terminal => here != Medium::Page,
            Medium::Full => here != Medium::Brief,
            Medium::Brief | Medium::Page => self == here,
        }
    }
}

/// A document, ready for any renderer.
#[derive(Default)]
pub(crate) struct Document {
    /// Question that the record answers.
    pub(crate) title: &'static str,
    /// Blocks in order, each with the renderers that show it.
    pub(crate) blocks: Vec<(Medium, Block)>,
    pub(crate) advice: Vec<String>,
    /// Command line that repeats the run.
    pub(crate) command_line: String,
    /// Whether the document begins with its first block, and facts about the host follow at the end.
    pub(crate) leads: bool,
    /// Whether the figures were computed rather than measured.
    pub(crate) computed: bool,
    /// Field of the results that charts read; empty for the results as a whole.
    pub(crate) part: &'static str,
    medium: Medium,
}

/// A part of a document.
pub(crate) enum Block {
    /// Title of the following blocks.
    Heading(String),
    /// Short facts on one line.
    Facts(Vec<String>),
    /// Key figures with their names.
    Figures(Vec<(&'static str, String)>),
    Table(Table),
    /// One picture per policy with a vertical bar per worker.
    Ladder {
        items: Vec<Workers>,
        caption: String,
    },
    Bars {
        charts: Vec<BarChart>,
        caption: String,
    },
    /// Samples of several sides on one axis.
    Dots {
        sides: Vec<Side>,
        caption: String,
    },
    /// An interactive chart that the page's scripts draw from the embedded record.
    Chart(Chart),
    /// A heat map: counts by time (columns) and by duration (rows).
    HeatMap {
        heat: TraceHeat,
        caption: &'static str,
    },
    /// Busy and idle times of each worker.
    Timeline(Timeline),
    /// The conclusion in one sentence, with the figures behind it.
    Verdict {
        verdict: String,
        detail: String,
    },
    /// A fault, or that there is none: the most visible line of a document.
    Finding(Tone, String),
    /// A paragraph.
    Note(Tone, String),
    /// A list of short paragraphs.
    List(Tone, Vec<Named>),
    /// A command to paste, which a renderer does not break into lines, and its effect, which may be empty.
    Command {
        command: String,
        effect: String,
    },
    /// A blank line, on the terminal only.
    Gap,
    /// A warning that the record has no results.
    Nothing,
}

/// The work of each worker, as bars on one scale.
pub(crate) struct Workers {
    pub(crate) name: String,
    /// Unit of the counts: `accepts`.
    pub(crate) unit: &'static str,
    pub(crate) counts: Vec<u64>,
    /// Share of each worker, 0 to 1; empty if all counts are 0.
    pub(crate) shares: Vec<f64>,
    /// Share that fills the height.
    pub(crate) most: f64,
    /// Text below the picture.
    pub(crate) note: String,
}

/// Horizontal bars on one scale.
pub(crate) struct BarChart {
    pub(crate) title: &'static str,
    pub(crate) bars: Vec<Bar>,
}

/// A bar with its figure, and with whiskers if there is an interval.
pub(crate) struct Bar {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) interval: Option<(f64, f64)>,
    /// The value as text.
    pub(crate) figure: String,
    /// Tooltip.
    pub(crate) hint: String,
    /// Index of the colour.
    pub(crate) series: usize,
}

/// The samples of one side, in the order of the trials.
pub(crate) struct Side {
    pub(crate) name: &'static str,
    pub(crate) samples: Vec<f64>,
    pub(crate) median: Option<f64>,
}

/// Names and values of `data-` attributes.
pub(crate) type Select = Vec<(&'static str, String)>;

/// Name, which may be empty, and text of a list item.
pub(crate) type Named = (String, String);

/// A chart that `charts.js` and the files beside it draw.
pub(crate) struct Chart {
    /// Name of the drawing function.
    pub(crate) kind: &'static str,
    /// Field of the results that it reads.
    pub(crate) part: &'static str,
    /// Further selection of the data that it reads.
    pub(crate) select: Select,
    pub(crate) caption: String,
}

/// Rows of strips over one time axis.
pub(crate) struct Timeline {
    pub(crate) from_ns: u64,
    pub(crate) to_ns: u64,
    /// Times marked in every row.
    pub(crate) marks: [u64; 2],
    pub(crate) rows: Vec<TimelineRow>,
    pub(crate) caption: String,
}

pub(crate) struct TimelineRow {
    pub(crate) name: String,
    pub(crate) tone: Tone,
    /// Strips; later strips cover earlier ones.
    pub(crate) strips: Vec<Strip>,
}

/// An interval of time in a row.
pub(crate) struct Strip {
    pub(crate) kind: StripKind,
    pub(crate) from_ns: u64,
    pub(crate) to_ns: u64,
    pub(crate) hint: String,
}

/// The activity in a strip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StripKind {
    Busy,
    Waits,
    Served,
    Gap,
}

impl StripKind {
    pub(crate) const ALL: [StripKind; 4] =
        [StripKind::Busy, StripKind::Waits, StripKind::Served, StripKind::Gap];

    /// Returns its CSS class, its terminal character and its text in the legend.
    pub(crate) fn look(self) -> (&'static str, char, &'static str) {
        match self {
            StripKind::Busy => ("busy", '█', "busy"),
            StripKind::Waits => ("waits", '░', "the request waits"),
            StripKind::Served => ("served", '▓', "the request is served"),
            StripKind::Gap => ("gap", '_', "the idle worker could have served it"),
        }
    }
}

impl Document {
    /// Creates a document whose title both renderers show.
    pub(crate) fn new(title: &'static str, command_line: String, advice: &[String]) -> Document {
        let mut document = Document::untitled(title, command_line, advice);
        document.terminal(|terminal| terminal.heading(title));
        document
    }

    /// Creates a document whose title only the page shows.
    pub(crate) fn untitled(title: &'static str, command_line: String, advice: &[String]) -> Document {
        Document { title, command_line, advice: advice.to_vec(), ..Document::default() }
    }

    /// Adds blocks that only the page shows.
    pub(crate) fn page(&mut self, add: impl FnOnce(&mut Document)) {
        self.on(Medium::Page, add);
    }

    /// Adds blocks that only the terminal shows.
    pub(crate) fn terminal(&mut self, add: impl FnOnce(&mut Document)) {
        self.on(Medium::Terminal, add);
    }

    /// Adds blocks that `medium` shows.
    pub(crate) fn on(&mut self, medium: Medium, add: impl FnOnce(&mut Document)) {
        let before = std::mem::replace(&mut self.medium, medium);
        add(self);
        self.medium = before;
    }

    pub(crate) fn push(&mut self, block: Block) {
        self.blocks.push((self.medium, block));
    }

    pub(crate) fn heading(&mut self, text: impl Into<String>) {
        self.push(Block::Heading(text.into()));
    }

    pub(crate) fn facts(&mut self, facts: Vec<String>) {
        self.push(Block::Facts(facts));
    }

    pub(crate) fn table(&mut self, table: impl Into<Table>) {
        self.push(Block::Table(table.into()));
    }

    pub(crate) fn note(&mut self, tone: Tone, text: impl Into<String>) {
        self.push(Block::Note(tone, text.into()));
    }

    pub(crate) fn verdict(&mut self, verdict: &str, detail: String) {
        self.push(Block::Verdict { verdict: verdict.to_owned(), detail });
    }

    /// Adds a heading that only the page shows.
    pub(crate) fn page_heading(&mut self, text: &str) {
        self.page(|page| page.heading(text));
    }

    /// Adds a heading and a table below it, unless the table has no rows.
    pub(crate) fn table_below(&mut self, heading: &str, table: Table) {
        if !table.rows.is_empty() {
            self.heading(heading);
            self.table(table);
        }
    }

    /// Adds an explanation in small print, which only the page shows.
    pub(crate) fn explain(&mut self, text: impl Into<String>) {
        self.page(|page| page.note(Tone::Dim, text));
    }

    /// Adds a chart, which only the page shows.
    pub(crate) fn chart(&mut self, kind: &'static str, caption: impl Into<String>) {
        self.chart_of(kind, Vec::new(), caption.into());
    }

    /// Adds a chart of a part of the record.
    pub(crate) fn chart_of(&mut self, kind: &'static str, select: Select, caption: String) {
        let chart = Chart { kind, part: self.part, select, caption };
        self.page(|page| page.push(Block::Chart(chart)));
    }

    /// Adds a heading and a list below it, unless the list is empty.
    pub(crate) fn list(&mut self, heading: &str, tone: Tone, items: impl IntoIterator<Item = Named>) {
        let mut items = items.into_iter().peekable();
        if items.peek().is_some() {
            self.heading(heading);
        }
        self.items(tone, items);
    }

    /// Adds a list of names and texts, unless it is empty.
    pub(crate) fn items(&mut self, tone: Tone, items: impl IntoIterator<Item = Named>) {
        let items: Vec<Named> = items.into_iter().collect();
        if !items.is_empty() {
            self.push(Block::List(tone, items));
        }
    }

    /// Adds a histogram: per bucket its lower bound, and the count and bar of each series.
    pub(crate) fn histogram<const N: usize>(
        &mut self,
        heading: &str,
        series: [&'static str; N],
        steps: &[(String, [u64; N])],
    ) {
        if steps.is_empty() {
            return;
        }
        self.heading(heading);
        let most = steps.iter().flat_map(|(_, counts)| counts).copied().max().unwrap_or(0);
        let mut columns = vec![Column::number("from", 0)];
        for (number, name) in series.into_iter().enumerate() {
            columns.extend([Column::number(name, 0), Column::text("", (N - number) as u8)]);
        }
        let row = |(from, counts): &(String, [u64; N])| {
            let cells = counts.iter().flat_map(|number| [Cell::count(*number), Cell::bar(*number, most)]);
            std::iter::once(from.clone().into()).chain(cells).collect()
        };
        self.table(Table::new(columns, steps.iter().map(row).collect()));
    }
}
