//! What was measured, as it goes into the machine-readable file: tables of cells, each with the
//! samples of every contestant and a verdict on every target.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::statistics::{geometric_mean, median, range, ratios};

/// Everything a run of the suite has to say.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Record {
    /// Where the newest tables were measured.
    pub machine: Machine,
    /// The tables, in the order of the suite. Those that a run leaves out stay from the run before.
    pub tables: Vec<Table>,
}

impl Record {
    /// Puts a table in the place of the one with its name, or at the end.
    pub fn put(&mut self, table: Table) {
        match self.tables.iter_mut().find(|old| old.name == table.name) {
            Some(old) => *old = table,
            None => self.tables.push(table),
        }
    }
}

/// One table of the page on performance.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Table {
    /// What `--tables` calls it.
    pub name: String,
    /// The day it was measured.
    pub date: String,
    /// Commit of Gaur it was measured with.
    pub gaur: String,
    /// Load averages of the machine when it began.
    pub load_average: [f64; 3],
    /// Seconds it took.
    pub seconds: f64,
    /// Whether the short form was run.
    pub quick: bool,
    /// Times each cell was measured.
    pub rounds: usize,
    /// What a reader must know about this run of the table.
    pub notes: Vec<String>,
    /// The cells.
    pub cells: Vec<Cell>,
    /// Verdicts on targets for the table as a whole.
    pub verdicts: Vec<Verdict>,
}

impl Table {
    /// Judges a ratio of the table as a whole, which is to be at least `bound`.
    pub fn expect_ratio(&mut self, what: impl Into<String>, measured: f64, bound: f64) {
        let verdict = Verdict::new(what, Unit::Ratio, measured, Direction::AtLeast, bound);
        self.verdicts.push(verdict);
    }

    /// The geometric mean over cells of the medians of `over` / `under`.
    pub fn mean_ratio(&self, over: &str, under: &str) -> f64 {
        let ratios: Vec<f64> = self
            .cells
            .iter()
            .filter_map(|cell| cell.ratio(over, under))
            .map(|(median, _)| median)
            .collect();
        geometric_mean(&ratios)
    }
}

/// What numbers count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// Requests a second.
    #[default]
    Iops,
    /// Bytes.
    Bytes,
    /// Microseconds.
    Microseconds,
    /// A quotient.
    Ratio,
    /// Seconds.
    Seconds,
    /// Milliseconds.
    Milliseconds,
    /// MiB a second.
    MibPerSecond,
}

impl Unit {
    /// What stands behind a number.
    pub fn symbol(self) -> &'static str {
        match self {
            Unit::Seconds => "s",
            Unit::Milliseconds => "ms",
            Unit::MibPerSecond => "MiB/s",
            Unit::Iops | Unit::Bytes | Unit::Microseconds | Unit::Ratio => "",
        }
    }
}

/// One row of a table.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Cell {
    /// What is varied, and what it is here: `("cluster", "64K")`.
    pub labels: Vec<(String, String)>,
    /// What the samples count.
    pub unit: Unit,
    /// The figures of everybody who was measured.
    pub series: Vec<Series>,
    /// The targets of this cell.
    pub verdicts: Vec<Verdict>,
    /// Anything else: QEMU's way of input and output, a crash.
    pub notes: Vec<String>,
}

impl Cell {
    /// A cell without figures.
    pub fn new(unit: Unit, labels: &[(&str, &str)]) -> Cell {
        let own = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        Cell {
            labels: labels.iter().map(own).collect(),
            unit,
            ..Cell::default()
        }
    }

    /// What a label says here.
    pub fn label(&self, name: &str) -> &str {
        let found = self.labels.iter().find(|(label, _)| label == name);
        found.map_or("", |(_, value)| value)
    }

    /// The figures of a contestant.
    pub fn series(&self, who: &str) -> Option<&Series> {
        self.series.iter().find(|series| series.who == who)
    }

    /// The median figure of a contestant, NaN if there is none.
    pub fn median(&self, who: &str) -> f64 {
        self.series(who).map_or(f64::NAN, Series::median)
    }

    /// Median and range of the ratios of two, round by round.
    pub fn ratio(&self, over: &str, under: &str) -> Option<(f64, (f64, f64))> {
        let (over, under) = (self.series(over)?, self.series(under)?);
        let ratios = ratios(&over.samples, &under.samples);
        (!ratios.is_empty()).then(|| (median(&ratios), range(&ratios)))
    }

    /// Adds a sample of a contestant, and shows it.
    pub fn add(&mut self, who: &str, sample: f64) {
        let unit = self.unit.symbol();
        println!("{}: {who} {sample:.3} {unit}", self.label("what"));
        match self.series.iter_mut().find(|series| series.who == who) {
            Some(series) => series.samples.push(sample),
            None => self.series.push(Series {
                who: who.to_owned(),
                samples: vec![sample],
                ..Series::default()
            }),
        }
    }

    /// Judges that `over` is at least `bound` times `under`.
    pub fn expect_ratio(&mut self, over: &str, under: &str, bound: f64) {
        self.judge_ratio(over, under, bound, Direction::AtLeast);
    }

    /// Judges the ratio of two.
    pub fn judge_ratio(&mut self, over: &str, under: &str, bound: f64, direction: Direction) {
        let Some((measured, range)) = self.ratio(over, under) else {
            return;
        };
        self.verdicts.push(Verdict {
            range: Some(range),
            ..Verdict::new(
                format!("{over} / {under}"),
                Unit::Ratio,
                measured,
                direction,
                bound,
            )
        });
    }

    /// Judges that the median figure of `who` is at most `bound`.
    pub fn expect_at_most(&mut self, who: &str, bound: f64) {
        let measured = self.median(who);
        let verdict = Verdict::new(who, self.unit, measured, Direction::AtMost, bound);
        self.verdicts.push(verdict);
    }
}

/// The figures of one program or one way of running it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Series {
    /// `"gaur"`, `"qemu"`, `"fio"` and the like.
    pub who: String,
    /// One figure a round.
    pub samples: Vec<f64>,
    /// Medians of what else was seen: hit rates, latencies, memory.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub details: BTreeMap<String, f64>,
}

impl Series {
    /// The median figure.
    pub fn median(&self) -> f64 {
        median(&self.samples)
    }
}

/// Which side of a bound is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// More is better.
    AtLeast,
    /// Less is better.
    AtMost,
}

impl Direction {
    /// As in a report.
    pub fn words(self) -> &'static str {
        match self {
            Direction::AtLeast => "at least",
            Direction::AtMost => "at most",
        }
    }
}

/// A target and what became of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Verdict {
    /// What is judged.
    pub what: String,
    /// What the numbers count.
    pub unit: Unit,
    /// The figure.
    #[serde(with = "finite")]
    pub measured: f64,
    /// Smallest and largest of the rounds, where there are rounds.
    pub range: Option<(f64, f64)>,
    /// The target.
    pub bound: f64,
    /// Which side of it is good.
    pub direction: Direction,
}

impl Verdict {
    /// A verdict on a figure of a whole table.
    pub fn new(
        what: impl Into<String>,
        unit: Unit,
        measured: f64,
        direction: Direction,
        bound: f64,
    ) -> Verdict {
        Verdict {
            what: what.into(),
            unit,
            measured,
            range: None,
            bound,
            direction,
        }
    }

    /// Whether the target is met. What could not be measured is not.
    pub fn met(&self) -> bool {
        match self.direction {
            Direction::AtLeast => self.measured >= self.bound,
            Direction::AtMost => self.measured <= self.bound,
        }
    }

    /// By how many percent of the bound it is missed; negative where it is met.
    pub fn missed_by_percent(&self) -> f64 {
        let over = (self.measured / self.bound - 1.0) * 100.0;
        match self.direction {
            Direction::AtLeast => -over,
            Direction::AtMost => over,
        }
    }
}

/// JSON has no NaN: a figure that is missing is null.
mod finite {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_f64(*value)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(gaur: &[f64], qemu: &[f64]) -> Cell {
        let mut cell = Cell::new(Unit::Iops, &[("cluster", "64K")]);
        for (who, samples) in [("gaur", gaur), ("qemu", qemu)] {
            cell.series.push(Series {
                who: who.to_owned(),
                samples: samples.to_vec(),
                ..Series::default()
            });
        }
        cell
    }

    #[test]
    fn a_ratio_is_the_median_of_rounds_and_not_of_medians() {
        let mut cell = cell(&[10.0, 30.0, 20.0], &[10.0, 10.0, 2.0]);
        assert_eq!(cell.ratio("gaur", "qemu"), Some((3.0, (1.0, 10.0))));
        assert_eq!(cell.ratio("gaur", "raw"), None);
        cell.expect_ratio("gaur", "qemu", 1.5);
        cell.expect_ratio("gaur", "raw", 1.5);
        assert_eq!(cell.verdicts.len(), 1);
        assert!(cell.verdicts[0].met());
    }

    #[test]
    fn how_far_a_target_is_missed() {
        let verdict =
            |measured, direction| Verdict::new("x", Unit::Ratio, measured, direction, 2.0);
        assert_eq!(verdict(1.5, Direction::AtLeast).missed_by_percent(), 25.0);
        assert!(verdict(2.0, Direction::AtLeast).met());
        assert_eq!(verdict(3.0, Direction::AtMost).missed_by_percent(), 50.0);
        assert!(!verdict(3.0, Direction::AtMost).met());
        assert!(!verdict(f64::NAN, Direction::AtLeast).met());
    }

    #[test]
    fn a_record_survives_its_file_and_takes_newer_tables() {
        let mut record = Record::default();
        let mut table = Table {
            name: "empty".to_owned(),
            cells: vec![cell(&[8.0], &[2.0]), cell(&[2.0], &[2.0])],
            ..Table::default()
        };
        assert!((table.mean_ratio("gaur", "qemu") - 2.0).abs() < 1e-12);
        let unknown = Verdict::new("x", Unit::Ratio, f64::NAN, Direction::AtLeast, 1.0);
        table.verdicts.push(unknown);
        record.put(table);
        let text = serde_json::to_string(&record).unwrap();
        let mut back: Record = serde_json::from_str(&text).unwrap();
        assert_eq!(back.tables[0].cells[0].label("cluster"), "64K");
        assert_eq!(back.tables[0].cells[0].median("gaur"), 8.0);
        assert!(back.tables[0].verdicts[0].measured.is_nan());
        back.put(Table {
            name: "empty".to_owned(),
            ..Table::default()
        });
        assert_eq!(back.tables.len(), 1);
        assert!(back.tables[0].cells.is_empty());
    }
}
