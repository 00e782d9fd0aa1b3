//! The report as one HTML file that needs nothing else: no script, no font, no network.

use std::fmt::Write as _;
use std::iter::once;

use kvbm::SlotCounts;
use kvbm::{TIER_COLORS, Tier};

use super::record::{
    DemoRecord, DemoSample, DemoSummary, PREFILL_TOKENS_PER_SECOND, RouteTraffic, medium, minutes,
};
use crate::output;

const TEMPLATE: &str = include_str!("page.html");

/// The whole page.
pub(super) fn page(record: &DemoRecord) -> String {
    let parts = [
        ("{{colors}}", TIER_COLORS.to_owned()),
        ("{{introduction}}", introduction(&record.summary)),
        ("{{cards}}", cards(&record.summary)),
        ("{{legend}}", legend()),
        ("{{sources}}", sources(&record.samples)),
        ("{{occupancy}}", occupancy(record)),
        ("{{routes}}", routes(&record.summary.bytes)),
        ("{{assumptions}}", assumptions(&record.summary)),
    ];
    parts.iter().fold(TEMPLATE.to_owned(), |page, (place, part)| page.replace(place, part))
}

fn introduction(summary: &DemoSummary) -> String {
    format!(
        "{} requests of a generated multi-turn chat, replayed in {:.1} s. Sessions share system prompts and grow \
         turn by turn; every block that came back was compared with what it should be, byte by byte.",
        output::count(summary.requests),
        summary.seconds
    )
}

fn cards(summary: &DemoSummary) -> String {
    let cards = [
        (output::percent(summary.token_hit_rate), "of prompt tokens were cached".to_owned()),
        (
            minutes(summary.seconds_saved()),
            format!("of prefill saved, at {} tokens/s", output::count(PREFILL_TOKENS_PER_SECOND)),
        ),
        (output::count(summary.blocks_verified), "blocks came back and were checked".to_owned()),
        (output::count(summary.mismatches), "of them had a wrong byte".to_owned()),
    ];
    let card = |(number, meaning): &(String, String)| {
        format!("<section><b>{number}</b><span>{meaning}</span></section>")
    };
    cards.iter().map(card).collect()
}

fn legend() -> String {
    let sources = Tier::ALL.into_iter().map(Tier::name).chain(once("computed"));
    let entry = |name| format!("<span><i class=\"{name}\"></i>{name}</span>");
    sources.map(entry).collect()
}

/// Where the tokens of a stretch of the run came from: the tiers, then computation. Adds up to 1.
type TierShares = [f64; Tier::COUNT + 1];

fn shares(before: &DemoSample, after: &DemoSample) -> TierShares {
    let prompt = after.prompt_tokens - before.prompt_tokens;
    let mut shares = [0.0; Tier::COUNT + 1];
    for tier in Tier::ALL {
        shares[tier.index()] =
            output::share(after.hit_tokens.of(tier) - before.hit_tokens.of(tier), prompt);
    }
    shares[Tier::COUNT] = 1.0 - shares[..Tier::COUNT].iter().sum::<f64>();
    shares
}

/// A canvas: its size, and the margins in which the axes stand.
const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 44.0;
const BOTTOM: f64 = 24.0;
const TOP: f64 = 8.0;
/// Points along the horizontal axis.
const STRETCHES: usize = 80;

/// Areas on top of each other.
fn sources(samples: &[DemoSample]) -> String {
    let stretch = samples.len().div_ceil(STRETCHES).max(1);
    let ends: Vec<_> = samples.chunks(stretch).filter_map(|chunk| chunk.last()).collect();
    let begins = once(&DemoSample::ZERO).chain(ends.iter().copied());
    let points: Vec<TierShares> =
        begins.zip(&ends).map(|(before, after)| shares(before, after)).collect();
    let mut areas = String::new();
    let place =
        PictureBox { left: LEFT, top: TOP, width: WIDTH - LEFT, height: HEIGHT - TOP - BOTTOM };
    let mut floor = vec![0.0; points.len()];
    for (source, name) in Tier::ALL.into_iter().map(Tier::name).chain(once("computed")).enumerate()
    {
        let ceiling: Vec<f64> =
            floor.iter().zip(&points).map(|(floor, shares)| floor + shares[source]).collect();
        let path = area(&floor, &ceiling, place);
        let _ = write!(areas, "<path class=\"{name}\" d=\"{path}\"><title>{name}</title></path>");
        floor = ceiling;
    }
    let (grid, end) = (grid(), output::count(samples.len() as u64));
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"Share of prompt tokens by source\">\
         {areas}{grid}<text x=\"{LEFT}\" y=\"{y}\">first request</text>\
         <text x=\"{WIDTH}\" y=\"{y}\" text-anchor=\"end\">request {end}</text></svg>",
        y = HEIGHT - 6.0
    )
}

fn grid() -> String {
    let line = |quarter: u32| {
        let y = TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - f64::from(quarter) / 4.0);
        format!(
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{WIDTH}\" y1=\"{y}\" y2=\"{y}\" stroke-opacity=\".6\"/>\
             <text x=\"{x}\" y=\"{text}\" text-anchor=\"end\">{percent} %</text>",
            x = LEFT - 6.0,
            text = y + 4.0,
            percent = quarter * 25
        )
    };
    (0..=4).map(line).collect()
}

/// Where a picture lies on its canvas.
#[derive(Clone, Copy)]
struct PictureBox {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
}

/// The path between two curves of values from 0 to 1.
fn area(floor: &[f64], ceiling: &[f64], place: PictureBox) -> String {
    let PictureBox { left, top, width, height } = place;
    let step = width / floor.len().saturating_sub(1).max(1) as f64;
    let point = |(i, value): (usize, &f64)| {
        format!(
            "{:.1},{:.1} ",
            left + i as f64 * step,
            top + height * (1.0 - value.clamp(0.0, 1.0))
        )
    };
    let there = ceiling.iter().enumerate().map(point);
    let back = floor.iter().enumerate().rev().map(point);
    format!("M{}Z", there.chain(back).collect::<String>().trim_end())
}

fn occupancy(record: &DemoRecord) -> String {
    record
        .slots
        .iter()
        .map(|(tier, slots)| tier_occupancy(&record.samples, *tier, *slots))
        .collect()
}

fn tier_occupancy(samples: &[DemoSample], tier: Tier, slots: SlotCounts) -> String {
    const PLACE: PictureBox = PictureBox { left: 0.0, top: 0.0, width: 280.0, height: 90.0 };
    let step = samples.len().div_ceil(STRETCHES).max(1);
    let resident: Vec<f64> =
        samples.iter().step_by(step).map(|s| f64::from(s.resident[tier.index()])).collect();
    let most = samples.iter().map(|sample| sample.resident[tier.index()]).max().unwrap_or(0);
    // The object tier has no end: its own peak is the measure.
    let is_bounded = tier != Tier::Object;
    let scale = f64::from(if is_bounded { slots.total } else { most }.max(1));
    let curve: Vec<f64> = resident.iter().map(|blocks| blocks / scale).collect();
    let path = area(&vec![0.0; curve.len()], &curve, PLACE);
    let of = if is_bounded {
        format!(" of {}", output::count(slots.total.into()))
    } else {
        String::new()
    };
    format!(
        "<div><h2>{name}</h2><p>{medium}<br><b>{most}</b>{of} blocks</p>\
         <svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"Occupancy of the {name} tier\">\
         <path class=\"{name}\" d=\"{path}\"/>\
         <line class=\"grid\" x1=\"0\" x2=\"{width}\" y1=\"{height}\" y2=\"{height}\"/></svg></div>",
        name = tier.name(),
        medium = medium(tier),
        most = output::count(most.into()),
        width = PLACE.width,
        height = PLACE.height,
    )
}

fn routes(traffic: &[RouteTraffic]) -> String {
    let most = traffic.iter().map(|route| route.bytes).max().unwrap_or(0);
    let row = |RouteTraffic { from, to, bytes }: &RouteTraffic| {
        format!(
            "<tr><td>{from} → {to}</td><td><span class=\"bar {to}\" style=\"width:{width:.1}%\"></span></td>\
             <td>{bytes}</td></tr>",
            width = output::share(*bytes, most) * 100.0,
            bytes = output::bytes(*bytes),
        )
    };
    traffic.iter().map(row).collect()
}

fn assumptions(summary: &DemoSummary) -> String {
    format!(
        "Time saved = {} cached tokens ÷ {} prompt tokens/s (an assumed prefill rate) = {:.0} s, less {:.1} s that \
         loading them took here. The device tier is emulated in host memory; its blocks hold patterns in place of KV.",
        output::count(summary.hit_tokens.total()),
        output::count(PREFILL_TOKENS_PER_SECOND),
        summary.prefill_seconds_avoided,
        summary.load_seconds,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::HitTokens;

    fn record(samples: Vec<DemoSample>) -> DemoRecord {
        let hit_tokens = HitTokens { device: 512, host: 1_024, disk: 0, object: 512 };
        let bytes = vec![RouteTraffic { from: Tier::Device, to: Tier::Host, bytes: 1 << 20 }];
        let summary = DemoSummary {
            requests: samples.len() as u64,
            prompt_tokens: 4_096,
            hit_tokens,
            token_hit_rate: 0.5,
            blocks_verified: 4,
            mismatches: 0,
            failed_loads: 0,
            bytes,
            prefill_tokens_per_second: PREFILL_TOKENS_PER_SECOND,
            prefill_seconds_avoided: 0.256,
            load_seconds: 0.001,
            seconds: 1.0,
        };
        let counts = SlotCounts { total: 10, ..SlotCounts::default() };
        DemoRecord {
            summary,
            samples,
            slots: Tier::ALL.map(|tier| (tier, counts)).to_vec(),
            drift: 0,
        }
    }

    #[test]
    fn the_page_is_whole_and_needs_nothing_else() {
        let sample = DemoSample { prompt_tokens: 4_096, resident: [3; 4], ..DemoSample::ZERO };
        for samples in [vec![], vec![sample], vec![sample; 1_000]] {
            let page = page(&record(samples));
            assert!(!page.contains("{{") && !page.contains("NaN"), "{page}");
            assert!(!page.contains("http") && !page.contains("<script"));
            assert_eq!(page.matches("<svg").count(), 5);
            assert!(page.contains(TIER_COLORS) && page.matches("--device:").count() == 1);
        }
    }

    #[test]
    fn shares_of_a_stretch_add_up() {
        let hit_tokens = HitTokens { device: 100, host: 200, disk: 0, object: 0 };
        let after = DemoSample { prompt_tokens: 400, hit_tokens, ..DemoSample::ZERO };
        let per_mille = |shares: TierShares| shares.map(|share| (share * 1e3) as u32);
        assert_eq!(per_mille(shares(&DemoSample::ZERO, &after)), [250, 500, 0, 0, 250]);
        assert_eq!(per_mille(shares(&after, &after)), [0, 0, 0, 0, 1_000]);
    }
}
