//! Plots of the tables: grouped bars as SVG, drawn without any font of the system.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::record::{Cell, Table, Unit};

const WIDTH: u32 = 960;
const HEIGHT: u32 = 440;

/// Okabe and Ito's colours, which people with any kind of sight can tell apart.
const COLOURS: &[RGBColor] = &[
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(150, 150, 150),
];

/// Bars side by side in groups.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plot {
    /// Stem of the file's name.
    pub name: String,
    /// What it says above the bars.
    pub title: String,
    /// What the axis counts.
    pub unit: String,
    /// Names of the groups.
    pub groups: Vec<String>,
    /// Names of the bars, each with a value for every group; a missing bar is none.
    pub bars: Vec<(String, Vec<Option<f64>>)>,
    /// A logarithmic axis.
    pub logarithmic: bool,
}

/// A label, and what its values add to the names of series.
type Split = (&'static str, fn(&str) -> &'static str);

/// How to make a plot of a table.
struct PlotSpec {
    table: &'static str,
    title: &'static str,
    /// The labels whose values name a group.
    group: &'static [&'static str],
    /// The label whose values split a series, with their names in the legend.
    split: Option<Split>,
    series: &'static [&'static str],
    logarithmic: bool,
}

/// Our engine and QEMU's, by sizes of clusters and subclusters.
const BY_LAYOUT: PlotSpec = PlotSpec {
    table: "",
    title: "",
    group: &["cluster", "subcluster"],
    split: None,
    series: &["gaur", "qemu"],
    logarithmic: false,
};

/// The same by size of clusters, with subclusters and without.
const BY_CLUSTER: PlotSpec = PlotSpec {
    group: &["cluster"],
    split: Some(("subcluster", with_or_without)),
    logarithmic: true,
    ..BY_LAYOUT
};

const WITH_FIO: &[&str] = &[
    "gaur",
    "qemu",
    "gaur, random",
    "qemu, io_uring",
    "fio, raw file",
];

const RECIPES: &[PlotSpec] = &[
    PlotSpec {
        table: "overlay",
        title: "Random 4 KiB writes to an empty overlay with a full backing image, by cluster size",
        ..BY_CLUSTER
    },
    PlotSpec {
        table: "overlay-disk",
        title: "Random 4 KiB writes to an empty overlay on a disk, by cluster size",
        ..BY_CLUSTER
    },
    PlotSpec {
        table: "empty",
        title: "Random 4 KiB writes to an empty image, by cluster size",
        ..BY_CLUSTER
    },
    PlotSpec {
        table: "growth",
        title: "Size of the file after 100 MiB of random 4 KiB writes, by cluster/subcluster size",
        ..BY_LAYOUT
    },
    PlotSpec {
        table: "mkfs",
        title: "Size of the file after mkfs.ext4 on 1 TiB, by cluster/subcluster size",
        ..BY_LAYOUT
    },
    PlotSpec {
        table: "cache",
        title: "Random 4 KiB reads by size of L2 slices and share of the tables in the cache",
        group: &["slice", "cache"],
        split: Some(("filled", |filled| {
            if filled == "first to last" {
                ", filled first to last"
            } else {
                ", in random order"
            }
        })),
        ..BY_LAYOUT
    },
    PlotSpec {
        table: "memory",
        title: "Random 4 KiB requests to a full image in memory",
        group: &["random, 4 KiB"],
        series: WITH_FIO,
        ..BY_LAYOUT
    },
    PlotSpec {
        table: "disk",
        title: "Random 4 KiB requests to a full image on a disk",
        group: &["random, 4 KiB"],
        series: WITH_FIO,
        ..BY_LAYOUT
    },
    PlotSpec {
        table: "huge",
        title: "Random 4 KiB reads of 8 TiB with 16 MiB for L2 tables, by cluster/subcluster size",
        series: &["gaur", "qemu", "gaur, random", "gaur, random, unlimited"],
        ..BY_LAYOUT
    },
    PlotSpec {
        table: "scaling",
        title: "One and two threads on one image",
        group: &["requests"],
        series: &["one thread", "two threads"],
        ..BY_LAYOUT
    },
];

fn with_or_without(subcluster: &str) -> &'static str {
    if subcluster == "-" {
        ""
    } else {
        ", subclusters"
    }
}

/// The plots of a table.
pub fn of(table: &Table) -> Vec<Plot> {
    let recipes = RECIPES.iter().filter(|recipe| recipe.table == table.name);
    recipes.map(|recipe| recipe.plot(table)).collect()
}

impl PlotSpec {
    fn plot(&self, table: &Table) -> Plot {
        let mut plot = Plot {
            name: self.table.to_owned(),
            title: self.title.to_owned(),
            logarithmic: self.logarithmic,
            ..Plot::default()
        };
        let group_of = |cell: &Cell| {
            let values: Vec<&str> = self.group.iter().map(|name| cell.label(name)).collect();
            values.join(if self.group.contains(&"cache") {
                ", "
            } else {
                "/"
            })
        };
        for cell in &table.cells {
            let group = group_of(cell);
            if !plot.groups.contains(&group) {
                plot.groups.push(group);
            }
        }
        for cell in &table.cells {
            let (unit, scale) = match cell.unit {
                Unit::Iops => ("thousands of requests a second", 1e3),
                Unit::Bytes => ("MiB", 1_048_576.0),
                Unit::Microseconds => ("ms", 1e3),
                _ => ("", 1.0),
            };
            plot.unit = unit.to_owned();
            let end = self
                .split
                .map_or("", |(label, name)| name(cell.label(label)));
            let group = plot
                .groups
                .iter()
                .position(|group| *group == group_of(cell));
            for who in self.series {
                let value = cell.series(who).map(|series| series.median() / scale);
                plot.put(format!("{who}{end}"), group.unwrap_or(0), value);
            }
        }
        plot
    }
}

impl Plot {
    fn put(&mut self, name: String, group: usize, value: Option<f64>) {
        let groups = self.groups.len();
        let index = match self.bars.iter().position(|(known, _)| *known == name) {
            Some(index) => index,
            None => {
                self.bars.push((name, vec![None; groups]));
                self.bars.len() - 1
            }
        };
        self.bars[index].1[group] = value;
    }

    /// Draws the plot into a file.
    pub fn draw(&self, path: &Path) -> Result<()> {
        let root = SVGBackend::new(path, (WIDTH, HEIGHT)).into_drawing_area();
        let drawn = || -> Result<(), Box<dyn std::error::Error>> {
            root.fill(&WHITE)?;
            self.draw_bars(&root)?;
            self.draw_legend(&root)?;
            root.present()?;
            Ok(())
        };
        drawn().map_err(|error| anyhow!("{}: {error}", path.display()))
    }

    /// The axis from and to, wide enough for all bars.
    fn axis(&self) -> (f64, f64) {
        let values = self.bars.iter().flat_map(|(_, values)| values).flatten();
        let values: Vec<f64> = values.copied().filter(|value| value.is_finite()).collect();
        let (low, high) = crate::statistics::range(&values);
        if values.is_empty() {
            (0.1, 1.0)
        } else if self.logarithmic {
            (
                10_f64.powf(low.log10().floor()),
                10_f64.powf((high * 1.3).log10().ceil()),
            )
        } else {
            (0.0, high * 1.12)
        }
    }

    fn draw_bars<B: DrawingBackend>(
        &self,
        root: &DrawingArea<B, Shift>,
    ) -> Result<(), Box<dyn std::error::Error>>
    where
        B::ErrorType: 'static,
    {
        let (low, high) = self.axis();
        let groups = self.groups.len() as f64;
        let mut builder = ChartBuilder::on(root);
        builder
            .margin(12)
            .margin_top(72)
            .margin_bottom(34)
            .set_label_area_size(LabelAreaPosition::Left, 64);
        // The two kinds of axis are two types; what is drawn on them is the same.
        macro_rules! draw_on {
            ($axis:expr) => {{
                let mut chart = builder.build_cartesian_2d(0.0..groups, $axis)?;
                chart
                    .configure_mesh()
                    .disable_x_mesh()
                    .disable_x_axis()
                    .y_desc(self.unit.as_str())
                    .y_label_formatter(&|value| axis_label(*value))
                    .light_line_style(WHITE)
                    .draw()?;
                for (from, to, value, colour) in self.rectangles() {
                    let corners = [(from, low), (to, value.max(low))];
                    chart.draw_series([Rectangle::new(corners, colour.filled())])?;
                    let top = chart.backend_coord(&((from + to) / 2.0, value.max(low)));
                    label(
                        root,
                        &axis_label(value),
                        (top.0, top.1 - 3),
                        10,
                        VPos::Bottom,
                    )?;
                }
                for (index, group) in self.groups.iter().enumerate() {
                    let middle = chart.backend_coord(&(index as f64 + 0.5, low));
                    label(root, group, (middle.0, middle.1 + 8), 13, VPos::Top)?;
                }
            }};
        }
        if self.logarithmic {
            draw_on!((low..high).log_scale());
        } else {
            draw_on!(low..high);
        }
        Ok(())
    }

    /// Left, right, height and colour of each bar.
    fn rectangles(&self) -> Vec<(f64, f64, f64, RGBColor)> {
        const FILLED: f64 = 0.84;
        let width = FILLED / self.bars.len().max(1) as f64;
        let mut rectangles = Vec::new();
        for (index, (_, values)) in self.bars.iter().enumerate() {
            for (group, value) in values.iter().enumerate() {
                if let Some(value) = value {
                    let from = group as f64 + (1.0 - FILLED) / 2.0 + width * index as f64;
                    let colour = COLOURS[index % COLOURS.len()];
                    rectangles.push((from, from + width * 0.94, *value, colour));
                }
            }
        }
        rectangles
    }

    fn draw_legend<B: DrawingBackend>(
        &self,
        root: &DrawingArea<B, Shift>,
    ) -> Result<(), Box<dyn std::error::Error>>
    where
        B::ErrorType: 'static,
    {
        label(root, &self.title, (WIDTH as i32 / 2, 12), 17, VPos::Top)?;
        let mut left = 76;
        for (index, (name, _)) in self.bars.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let square = [(left, 44), (left + 13, 57)];
            root.draw(&Rectangle::new(square, colour.filled()))?;
            let style = ("sans-serif", 14).into_font().color(&BLACK);
            let style = style.pos(Pos::new(HPos::Left, VPos::Center));
            root.draw(&Text::new(name.clone(), (left + 19, 51), style))?;
            // No font is at hand to measure with; letters are about half as wide as high.
            left += 19 + 7 * name.len() as i32 + 24;
        }
        Ok(())
    }
}

fn label<B: DrawingBackend>(
    root: &DrawingArea<B, Shift>,
    text: &str,
    at: (i32, i32),
    size: i32,
    vertical: VPos,
) -> Result<(), Box<dyn std::error::Error>>
where
    B::ErrorType: 'static,
{
    let style = ("sans-serif", size).into_font().color(&BLACK);
    let style = style.pos(Pos::new(HPos::Center, vertical));
    root.draw(&Text::new(text.to_owned(), at, style))?;
    Ok(())
}

/// A number with as many digits as a reader wants.
fn axis_label(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{}", (value * 10.0).round() / 10.0),
        value => format!("{}", (value * 100.0).round() / 100.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Series;

    fn table() -> Table {
        let mut table = Table {
            name: "overlay".to_owned(),
            ..Table::default()
        };
        for (cluster, subcluster, gaur) in
            [("64K", "-", 30e3), ("2M", "-", 1e3), ("64K", "2K", 60e3)]
        {
            let labels = [("cluster", cluster), ("subcluster", subcluster)];
            let mut cell = Cell::new(Unit::Iops, &labels);
            cell.series.push(Series {
                who: "gaur".to_owned(),
                samples: vec![gaur],
                ..Series::default()
            });
            table.cells.push(cell);
        }
        table
    }

    #[test]
    fn cells_become_groups_and_bars() {
        let plots = of(&table());
        assert_eq!(plots.len(), 1);
        assert_eq!(plots[0].groups, ["64K", "2M"]);
        let gaur: Vec<_> = plots[0]
            .bars
            .iter()
            .filter(|(name, _)| name.starts_with("gaur"))
            .collect();
        assert_eq!(gaur[0], &("gaur".to_owned(), vec![Some(30.0), Some(1.0)]));
        assert_eq!(
            gaur[1],
            &("gaur, subclusters".to_owned(), vec![Some(60.0), None])
        );
        let unknown = Table::default();
        assert!(of(&unknown).is_empty());
    }

    #[test]
    fn a_plot_is_a_picture_with_its_words() {
        let path = std::env::temp_dir().join(format!("gaur-plot-{}.svg", std::process::id()));
        let [plot] = &of(&table())[..] else {
            panic!("one plot")
        };
        plot.draw(&path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(text.starts_with("<svg"));
        for word in ["64K", "gaur, subclusters", "Random 4 KiB writes"] {
            assert!(text.contains(word), "{word} is missing");
        }
    }

    #[test]
    fn an_axis_holds_all_bars() {
        let mut plot = Plot {
            bars: vec![("a".to_owned(), vec![Some(2.0), None, Some(900.0)])],
            logarithmic: true,
            ..Plot::default()
        };
        assert_eq!(plot.axis(), (1.0, 10_000.0));
        plot.logarithmic = false;
        let (low, high) = plot.axis();
        assert!(low == 0.0 && high > 900.0);
        plot.bars.clear();
        assert!(plot.axis().0 < plot.axis().1);
    }
}
