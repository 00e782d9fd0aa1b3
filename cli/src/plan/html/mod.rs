//! The report as one HTML file that needs nothing else: no script, no font, no network.

mod chart;

use std::fmt::Write as _;
use std::fs::Permissions;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use kvbm_policies::{BLOCK_TOKENS, EvictionKind, Policy};
use tempfile::NamedTempFile;

use self::chart::{ChartBar, ChartLine, ChartLines, UprightLine};
use super::outcome::{
    self, MissCurve, OutcomeRow, PlanOutcome, amount, capacity, duration, gain_points,
    gain_seconds, more, rate,
};
use super::tiers::{BitsStaircase, TierStep};
use super::what_if::{TierWhatIf, WhatIf, WhatIfPoint};
use crate::output::{self, CommandFailure};

const TEMPLATE: &str = include_str!("page.html");

/// A report that is to be.
#[derive(Debug)]
pub(super) struct PlanPage {
    path: PathBuf,
    file: NamedTempFile,
}

impl PlanPage {
    /// Claims the place beside `path`: that it cannot be written is better known before long work
    /// than after.
    pub(super) fn create(path: &Path) -> Result<Self, CommandFailure> {
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let file = tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o644))
            .prefix(".kvbm-plan-")
            .tempfile_in(directory.unwrap_or(Path::new(".")));
        let file = file.and_then(|file| {
            if path.is_dir() { Err(ErrorKind::IsADirectory.into()) } else { Ok(file) }
        });
        let file = file.map_err(|error| {
            CommandFailure::unusable(format!(
                "cannot write the report {}: {error}; see --html",
                path.display()
            ))
        })?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Writes the report, in place of what was there.
    pub(super) fn write(mut self, plan: &PlanOutcome) -> Result<(), CommandFailure> {
        let failed = |error: std::io::Error| {
            CommandFailure::unusable(format!(
                "cannot write the report {}: {error}",
                self.path.display()
            ))
        };
        self.file.write_all(page(plan).as_bytes()).map_err(failed)?;
        self.file.persist(&self.path).map(drop).map_err(|error| failed(error.error))
    }
}

fn page(plan: &PlanOutcome) -> String {
    let parts = [
        ("{{trace}}", escape(&plan.trace)),
        ("{{introduction}}", introduction(plan)),
        ("{{cards}}", cards(plan)),
        ("{{dark}}", chart::dark_colours()),
        ("{{policies}}", policies(plan)),
        ("{{tiers}}", plan.tiers.first().map_or_else(String::new, staircase)),
        ("{{writes}}", writes(&plan.tiers)),
        (
            "{{curve}}",
            plan.lru_curve.as_ref().map_or_else(String::new, |curve| lru_curve(curve, plan)),
        ),
        ("{{what_if}}", plan.what_if.as_ref().map_or_else(String::new, what_if)),
        ("{{notes}}", notes(&plan.notes)),
    ];
    parts.iter().fold(TEMPLATE.to_owned(), |page, (place, part)| page.replace(place, part))
}

/// What came from outside must not become markup.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('{', "&#123;")
}

fn introduction(plan: &PlanOutcome) -> String {
    let model = plan.model.as_ref().map(|model| format!(" {}.", model.describe()));
    format!(
        "{} requests over {} with {} prompt tokens, cut into blocks of {BLOCK_TOKENS} tokens. All figures are \
         simulated from the trace.{}",
        output::count(plan.requests),
        duration(plan.seconds),
        output::count(plan.prompt_tokens),
        model.unwrap_or_default()
    )
}

fn cards(plan: &PlanOutcome) -> String {
    let mut cards = vec![(output::count(plan.blocks), "distinct blocks".to_owned())];
    if let Some((_, all)) = plan.lru_curve.as_ref().and_then(|curve| curve.points.last()) {
        cards.push((
            output::percent(*all),
            "of prompt tokens could come from a cache that holds everything".to_owned(),
        ));
    }
    if let Some(tiers) = plan.tiers.first() {
        let names: Vec<_> = tiers.tiers.iter().map(|step| step.tier).collect();
        cards.push((
            output::percent(tiers.token_hit_rate),
            format!("come from {} together", names.join(", ")),
        ));
        if let Some(disk) = &tiers.disk {
            let writes = format!("{:.1}", disk.drive_writes_per_day);
            cards.push((writes, format!("drive writes a day, {}", tiers.admission)));
        }
    }
    let card = |(number, meaning): &(String, String)| {
        format!("<section><b>{number}</b><span>{meaning}</span></section>")
    };
    cards.iter().map(card).collect()
}

fn notes(notes: &[String]) -> String {
    let items: Vec<_> = notes.iter().map(|note| format!("<li>{}</li>", escape(note))).collect();
    if items.is_empty() { String::new() } else { format!("<ul>{}</ul>", items.concat()) }
}

/// A part of the page.
fn section(title: &str, explanation: &str, content: &str) -> String {
    format!("<section><h2>{title}</h2><p>{explanation}</p>{content}</section>")
}

fn table(titles: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = String::from("<table><thead><tr>");
    titles.iter().for_each(|title| _ = write!(table, "<th>{title}</th>"));
    table.push_str("</tr></thead><tbody>");
    for row in rows {
        table.push_str("<tr>");
        row.iter().for_each(|cell| _ = write!(table, "<td>{cell}</td>"));
        table.push_str("</tr>");
    }
    table + "</tbody></table>"
}

fn legend(lines: &[ChartLine]) -> String {
    let entry = |line: &ChartLine| {
        let dashed = if line.is_dashed { " class=\"dashed\"" } else { "" };
        format!(
            "<span><i{dashed} style=\"--line:{}\"></i>{}</span>",
            chart::variable(line.colour),
            line.name
        )
    };
    format!("<div class=\"legend\">{}</div>", lines.iter().map(entry).collect::<String>())
}

fn policies(plan: &PlanOutcome) -> String {
    let columns: Vec<&[OutcomeRow]> = plan.rows.chunk_by(|a, b| a.eviction == b.eviction).collect();
    let line = |(at, column): (usize, &&[OutcomeRow])| ChartLine {
        name: column[0].eviction.to_owned(),
        is_dashed: column[0].eviction == Policy::Belady.name(),
        colour: chart::policy_colour(column[0].eviction, at),
        points: column
            .iter()
            .map(|row| (f64::from(row.capacity), row.token_hit_rate * 100.0))
            .collect(),
        has_dots: true,
    };
    let lines: Vec<_> = columns.iter().enumerate().map(line).collect();
    let legend = legend(&lines);
    let picture = chart::lines(&ChartLines {
        label: "Token hit rate against capacity, by policy",
        x_title: "capacity in blocks (logarithmic)",
        y_title: "token hit rate in %",
        curves: lines,
        marks: Vec::new(),
    });
    let titles: Vec<_> =
        ["capacity (blocks)"].into_iter().chain(columns.iter().map(|c| c[0].eviction)).collect();
    let row = |(at, first): (usize, &OutcomeRow)| {
        let rates =
            columns.iter().filter_map(|column| column.get(at)).map(|row| rate(row.token_hit_rate));
        std::iter::once(capacity(first.capacity, first.bytes)).chain(rates).collect()
    };
    let first = columns.first().copied().unwrap_or_default();
    let figures = table(&titles, first.iter().enumerate().map(row));
    section(
        "One tier: hit rate by policy and capacity",
        "Share of the prompt tokens that one tier of this size would have held. belady knows the future: no policy \
         can be above it.",
        &format!("{legend}{picture}<div class=\"wide\">{figures}</div>"),
    )
}

fn staircase(case: &BitsStaircase) -> String {
    let mut floor = 0.0;
    let mut bars: Vec<_> = case
        .tiers
        .iter()
        .map(|step| {
            let share = step.token_hit_rate * 100.0;
            floor += share;
            ChartBar {
                name: step.tier.to_owned(),
                value: format!("{share:.1} %"),
                from: floor - share,
                to: floor,
                colour: chart::tier_colour(step.tier),
            }
        })
        .collect();
    let rest = (100.0 - floor).max(0.0);
    bars.push(ChartBar {
        name: "computed".to_owned(),
        value: format!("{rest:.1} %"),
        from: floor,
        to: 100.0,
        colour: chart::tier_colour("computed"),
    });
    let picture = chart::bars(
        "Prompt tokens by the tier that they come from",
        "prompt tokens in %",
        100.0,
        &bars,
    );
    let row = |step: &TierStep| {
        vec![
            step.tier.to_owned(),
            capacity(step.capacity, step.bytes),
            rate(step.token_hit_rate),
            amount(step.blocks_read_per_request, step.bytes_read_per_request),
            amount(step.blocks_written_per_request, step.bytes_written_per_request),
        ]
    };
    let titles =
        ["tier", "capacity (blocks)", "token hit rate", "read per request", "written per request"];
    section(
        "Tiers together",
        &format!(
            "Where prompt tokens come from, each from the fastest tier that holds them; {} in every tier, {} \
             between them. What no tier holds is computed.",
            case.eviction, case.admission
        ),
        &format!(
            "{picture}<div class=\"wide\">{}</div>",
            table(&titles, case.tiers.iter().map(row))
        ),
    )
}

fn writes(cases: &[BitsStaircase]) -> String {
    let disk = |case: &BitsStaircase| case.tiers.iter().find(|step| step.tier == "disk").cloned();
    let cases: Vec<_> = cases.iter().filter_map(|case| Some((case, disk(case)?))).collect();
    if cases.is_empty() {
        return String::new();
    }
    let value =
        |step: &TierStep| step.bytes_written_per_request.unwrap_or(step.blocks_written_per_request);
    let most = cases.iter().map(|(_, step)| value(step)).fold(0.0, f64::max);
    // In a unit in which the axis has short numbers.
    let in_bytes = cases.iter().all(|(_, step)| step.bytes_written_per_request.is_some());
    let (unit, title) = match most {
        _ if !in_bytes => (1.0, "blocks written to disk per request"),
        1e9.. => (1e9, "GB written to disk per request"),
        _ => (1e6, "MB written to disk per request"),
    };
    let bar = |(case, step): &(&BitsStaircase, TierStep)| ChartBar {
        name: case.admission.to_owned(),
        value: amount(step.blocks_written_per_request, step.bytes_written_per_request),
        from: 0.0,
        to: value(step) / unit,
        colour: chart::tier_colour("disk"),
    };
    let bars: Vec<_> = cases.iter().map(bar).collect();
    let picture = chart::bars("Disk writes by way of admission", title, most / unit * 1.15, &bars);
    let row = |(case, step): &(&BitsStaircase, TierStep)| {
        let disk = case.disk.as_ref();
        let a_day = disk.map(|disk| match disk.bytes_per_day {
            Some(bytes) => output::decimal_bytes(bytes),
            None => format!("{} blocks", output::count(disk.blocks_per_day as u64)),
        });
        vec![
            case.admission.to_owned(),
            amount(step.blocks_written_per_request, step.bytes_written_per_request),
            a_day.unwrap_or_default(),
            disk.map(|disk| format!("{:.2}", disk.drive_writes_per_day)).unwrap_or_default(),
            rate(case.token_hit_rate),
        ]
    };
    let titles = [
        "admission",
        "written per request",
        "written a day",
        "drive writes a day",
        "token hit rate of all tiers",
    ];
    section(
        "What the disk has to endure",
        "Writes to the disk tier by the rule that admits blocks to it. A drive write is as much as the tier holds; a \
         day goes on at the trace's rate of requests.",
        &format!("{picture}<div class=\"wide\">{}</div>", table(&titles, cases.iter().map(row))),
    )
}

fn lru_curve(curve: &MissCurve, plan: &PlanOutcome) -> String {
    const LRU: &str = EvictionKind::Lru.name();
    let at = plan
        .rows
        .chunk_by(|a, b| a.eviction == b.eviction)
        .position(|column| column[0].eviction == LRU);
    let points =
        curve.points.iter().map(|&(capacity, rate)| (f64::from(capacity), (1.0 - rate) * 100.0));
    let line = ChartLine {
        name: LRU.to_owned(),
        is_dashed: false,
        colour: chart::policy_colour(LRU, at.unwrap_or(0)),
        points: points.collect(),
        has_dots: false,
    };
    let steps = plan.tiers.first().map(|case| case.tiers.as_slice()).unwrap_or_default();
    let mark = |step: &TierStep| UprightLine {
        name: step.tier.to_owned(),
        x: f64::from(step.capacity),
        colour: chart::tier_colour(step.tier),
    };
    let picture = chart::lines(&ChartLines {
        label: "Miss ratio of LRU against capacity",
        x_title: "capacity in blocks (logarithmic)",
        y_title: "miss ratio in % of prompt tokens",
        curves: vec![line],
        marks: steps.iter().map(mark).collect(),
    });
    section(
        "Miss-ratio curve",
        "Prompt tokens that one LRU tier of this size would lack, from one pass over the trace. Where the curve is \
         steep, memory pays. Upright lines: the sizes of the tiers above.",
        &picture,
    )
}

fn what_if(what_if: &WhatIf) -> String {
    let tiers: String = what_if.tiers.iter().map(|tier| what_if_tier(tier, what_if)).collect();
    section(
        "What if a tier were another size",
        &format!(
            "All tiers simulated together, one of them in another size. As they are: {} of prompt tokens hit, mean \
             time to the first token {:.2} s. {}",
            rate(what_if.token_hit_rate),
            what_if.mean_ttft_seconds,
            outcome::assumptions(what_if)
        ),
        &format!("<div class=\"tiers\">{tiers}</div>"),
    )
}

fn what_if_tier(tier: &TierWhatIf, what_if: &WhatIf) -> String {
    let misses =
        what_if_picture(tier, "miss ratio in %", |point| (1.0 - point.token_hit_rate) * 100.0);
    let seconds = what_if_picture(tier, "mean TTFT in seconds", |point| point.mean_ttft_seconds);
    let row = |point: &WhatIfPoint| {
        vec![
            more(point),
            format!("{} points", gain_points(point, what_if)),
            format!("{} s", gain_seconds(point, what_if)),
        ]
    };
    let changes = tier.points.iter().filter(|point| point.more_blocks != 0).map(row);
    let changes = table(&["change", "hit rate", "mean TTFT"], changes);
    format!("<div><h3>{}</h3>{misses}{seconds}<div class=\"wide\">{changes}</div></div>", tier.tier)
}

/// One thing about all tiers, against the size of this one.
fn what_if_picture(tier: &TierWhatIf, y_title: &str, y: impl Fn(&WhatIfPoint) -> f64) -> String {
    let now = tier.points.iter().find(|point| point.more_blocks == 0);
    let now = now.map(|point| UprightLine {
        name: "now".to_owned(),
        x: point.capacity.into(),
        colour: chart::BOUND,
    });
    chart::small_lines(&ChartLines {
        label: &format!("{y_title} against the size of the {} tier", tier.tier),
        x_title: &format!("{} tier in blocks", tier.tier),
        y_title,
        curves: vec![ChartLine {
            name: tier.tier.to_owned(),
            is_dashed: false,
            colour: chart::tier_colour(tier.tier),
            points: tier.points.iter().map(|point| (point.capacity.into(), y(point))).collect(),
            has_dots: true,
        }],
        marks: now.into_iter().collect(),
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::plan::{PlanArgs, plan};

    use super::*;

    #[derive(Parser)]
    struct PageCommand {
        #[command(flatten)]
        args: PlanArgs,
    }

    fn page_of(trace: &str, options: &[&str]) -> String {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("<trace>.jsonl");
        std::fs::write(&path, trace).unwrap();
        let line = ["plan", path.to_str().unwrap(), "--html", "unused"]
            .into_iter()
            .chain(options.iter().copied());
        page(&plan(&PageCommand::try_parse_from(line).unwrap().args).unwrap())
    }

    #[test]
    fn the_page_is_whole_and_needs_nothing_else() {
        let full = r#"{"timestamp":0,"input_length":1500,"output_length":1,"hash_ids":[1,2,3]}"#;
        let later = full.replace("\"timestamp\":0", "\"timestamp\":9000");
        let empty = r#"{"timestamp":0,"input_length":0,"output_length":1,"hash_ids":[]}"#;
        let object = ["--what-if", "--tiers", "device=1,disk=2,object=3", "--model", "llama-3-8b"];
        for trace in [empty.to_owned(), full.to_owned(), format!("{full}\n{later}")] {
            for options in [["--what-if"].as_slice(), &[], &object, &["--tiers", "host=0"]] {
                let page = page_of(&trace, options);
                assert!(!page.contains("{{") && !page.contains("NaN"), "{page}");
                assert!(
                    !page.contains("http")
                        && !page.contains("<script")
                        && !page.contains("<trace>")
                );
                assert_eq!(page.matches("<svg role").count(), page.matches("</svg>").count());
                assert_eq!(page.matches("<section>").count(), page.matches("</section>").count());
            }
        }
    }

    #[test]
    fn a_report_that_cannot_be_written_is_refused_early() {
        let directory = tempfile::tempdir().unwrap();
        for path in [directory.path().join("no/such/place.html"), directory.path().to_owned()] {
            let error = PlanPage::create(&path).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()) && error.contains("--html"), "{error}");
        }
    }
}
