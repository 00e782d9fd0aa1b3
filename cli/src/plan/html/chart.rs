//! Pictures, as SVG with the colours of a light page. A style sheet gives them those of a dark one.

use std::fmt::Write as _;

use std::ops::Range;

use kvbm_policies::Policy;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::output;

/// A colour on a light page, and on a dark one.
pub(super) type LineColour = (RGBColor, RGBColor);

/// Of what no policy can reach.
pub(super) const BOUND: LineColour = (RGBColor(102, 114, 132), RGBColor(147, 160, 180));
const INK: LineColour = (RGBColor(103, 114, 132), RGBColor(147, 160, 181));
const RULE: LineColour = (RGBColor(223, 227, 234), RGBColor(42, 51, 66));
const DEVICE: LineColour = (RGBColor(224, 122, 31), RGBColor(242, 153, 74));
const HOST: LineColour = (RGBColor(31, 157, 130), RGBColor(60, 195, 165));
const DISK: LineColour = (RGBColor(47, 111, 222), RGBColor(91, 147, 245));
const OBJECT: LineColour = (RGBColor(135, 86, 217), RGBColor(168, 132, 236));
const COMPUTED: LineColour = (RGBColor(195, 202, 213), RGBColor(59, 71, 90));
/// None of them is a tier's.
const SERIES: [LineColour; 6] = [
    (RGBColor(209, 73, 91), RGBColor(240, 113, 130)),
    (RGBColor(20, 140, 180), RGBColor(80, 190, 225)),
    (RGBColor(138, 109, 59), RGBColor(201, 171, 113)),
    (RGBColor(190, 80, 170), RGBColor(226, 133, 210)),
    (RGBColor(110, 140, 30), RGBColor(165, 195, 85)),
    (RGBColor(70, 85, 110), RGBColor(175, 190, 210)),
];

const FONT: &str = "sans-serif";
const FONT_SIZE: u32 = 13;

/// The colour of the policy that comes at this place among others; some repeat after the sixth.
pub(super) fn policy_colour(policy: &str, at: usize) -> LineColour {
    if policy == Policy::Belady.name() { BOUND } else { SERIES[at % SERIES.len()] }
}

/// The colour of a tier, or of what is computed.
pub(super) fn tier_colour(tier: &str) -> LineColour {
    match tier {
        "device" => DEVICE,
        "host" => HOST,
        "disk" => DISK,
        "object" => OBJECT,
        _ => COMPUTED,
    }
}

/// The colour in a style sheet.
pub(super) fn variable(colour: LineColour) -> String {
    format!("light-dark({}, {})", hex(colour.0), hex(colour.1))
}

/// Rules that replace the pictures' colours by those of a dark page.
pub(super) fn dark_colours() -> String {
    let all = [BOUND, INK, RULE, DEVICE, HOST, DISK, OBJECT, COMPUTED].into_iter().chain(SERIES);
    all.fold(String::new(), |mut rules, (light, dark)| {
        let (light, dark) = (hex(light), hex(dark));
        let _ = writeln!(
            rules,
            "  svg [fill=\"{light}\"] {{ fill: {dark}; }} svg [stroke=\"{light}\"] {{ stroke: {dark}; }}"
        );
        rules
    })
}

/// As the SVG backend writes it.
fn hex(RGBColor(red, green, blue): RGBColor) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

/// A picture of lines.
#[derive(Debug)]
pub(super) struct ChartLines<'a> {
    /// What it shows, for those who cannot see it.
    pub(super) label: &'a str,
    pub(super) x_title: &'a str,
    pub(super) y_title: &'a str,
    pub(super) curves: Vec<ChartLine>,
    pub(super) marks: Vec<UprightLine>,
}

/// A line through points.
#[derive(Debug)]
pub(super) struct ChartLine {
    pub(super) name: String,
    pub(super) colour: LineColour,
    pub(super) is_dashed: bool,
    pub(super) has_dots: bool,
    pub(super) points: Vec<(f64, f64)>,
}

/// An upright line.
#[derive(Debug)]
pub(super) struct UprightLine {
    pub(super) name: String,
    pub(super) x: f64,
    pub(super) colour: LineColour,
}

/// A bar that begins and ends somewhere on the axis.
#[derive(Debug)]
pub(super) struct ChartBar {
    pub(super) name: String,
    pub(super) value: String,
    pub(super) from: f64,
    pub(super) to: f64,
    pub(super) colour: LineColour,
}

type ChartCanvas<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type PlotChart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<ChartAxis, ChartAxis>>;
type Drawn<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

/// A picture across the page; its horizontal axis is logarithmic.
pub(super) fn lines(picture: &ChartLines<'_>) -> String {
    let range =
        bounds(picture.curves.iter().flat_map(|line| line.points.iter().map(|point| point.0)));
    let scale = AxisScale::Logarithmic { from: range.0, to: range.1 };
    draw(960, 380, picture.label, |canvas| draw_lines(canvas, picture, scale))
}

/// A picture in a column; its horizontal axis begins at 0.
pub(super) fn small_lines(picture: &ChartLines<'_>) -> String {
    let (_, most) =
        bounds(picture.curves.iter().flat_map(|line| line.points.iter().map(|point| point.0)));
    draw(340, 240, picture.label, |canvas| {
        draw_lines(canvas, picture, AxisScale::Linear { to: most })
    })
}

/// Bars side by side, on an axis from 0 to `most`.
pub(super) fn bars(label: &str, y_title: &str, most: f64, bars: &[ChartBar]) -> String {
    draw(960, 320, label, |canvas| draw_bars(canvas, y_title, most, bars))
}

/// The SVG as a part of a page.
fn draw(
    width: u32,
    height: u32,
    label: &str,
    paint: impl Fn(&ChartCanvas<'_>) -> Drawn<'static>,
) -> String {
    let mut svg = String::new();
    let painted = {
        let canvas = SVGBackend::with_string(&mut svg, (width, height)).into_drawing_area();
        paint(&canvas).and_then(|()| canvas.present())
    };
    // Nothing is written but to memory.
    if let Err(error) = painted {
        return format!("<p>This picture could not be drawn: {error}</p>");
    }
    // Inside a page it is as wide as its place, and needs no name space.
    let opening = format!("<svg width=\"{width}\" height=\"{height}\"");
    svg.replacen(&opening, &format!("<svg role=\"img\" aria-label=\"{label}\""), 1).replacen(
        " xmlns=\"http://www.w3.org/2000/svg\"",
        "",
        1,
    )
}

/// The smallest and the largest number; something harmless where there is none.
fn bounds(numbers: impl Iterator<Item = f64>) -> (f64, f64) {
    let (least, most) = numbers
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), number| (a.min(number), b.max(number)));
    if least.is_finite() { (least, most) } else { (0.0, 1.0) }
}

/// How capacities are laid out.
#[derive(Clone, Copy, Debug)]
enum AxisScale {
    Linear { to: f64 },
    Logarithmic { from: f64, to: f64 },
}

impl AxisScale {
    /// Where a number is on the axis.
    fn place(self, number: f64) -> f64 {
        match self {
            Self::Linear { .. } => number,
            Self::Logarithmic { .. } => number.max(1.0).log10(),
        }
    }

    fn number(self, place: f64) -> f64 {
        match self {
            Self::Linear { .. } => place,
            Self::Logarithmic { .. } => 10_f64.powf(place),
        }
    }

    fn axis(self) -> ChartAxis {
        match self {
            Self::Linear { to } => linear_axis(to.max(1.0), 3),
            Self::Logarithmic { from, to } => {
                let (from, to) = (from.max(1.0), to.max(from.max(1.0) * 2.0));
                let decades = (from.log10().floor() as i32)..=(to.log10().ceil() as i32);
                let ticks = decades
                    .flat_map(|decade| [1.0, 2.0, 5.0].map(|step| step * 10_f64.powi(decade)));
                let ticks =
                    ticks.filter(|tick| (from..=to).contains(tick)).map(f64::log10).collect();
                ChartAxis { range: from.log10()..to.log10(), ticks }
            }
        }
    }
}

/// An axis with marks of its own: those of plotters are not round on a logarithmic one.
#[derive(Debug)]
struct ChartAxis {
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl Ranged for ChartAxis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (first, last): (i32, i32)) -> i32 {
        let part = (value - self.range.start) / (self.range.end - self.range.start);
        first + (f64::from(last - first) * part).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.ticks.clone() }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for ChartAxis {}

/// From 0 to `most`, with about this many round numbers marked.
fn linear_axis(most: f64, ticks: u32) -> ChartAxis {
    let step = round_step(most / f64::from(ticks));
    let marked = (0..=(most / step + 1e-9) as u32).map(|tick| f64::from(tick) * step).collect();
    ChartAxis { range: 0.0..most, ticks: marked }
}

/// The round number next above: 1, 2, 2.5 or 5 times a power of ten.
fn round_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.log10().floor());
    let factor =
        [1.0, 2.0, 2.5, 5.0].into_iter().find(|factor| factor * power >= least * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

fn draw_lines(
    canvas: &ChartCanvas<'_>,
    picture: &ChartLines<'_>,
    scale: AxisScale,
) -> Drawn<'static> {
    let (_, most) =
        bounds(picture.curves.iter().flat_map(|line| line.points.iter().map(|point| point.1)));
    let step = round_step(most.max(1e-3) / 5.0);
    let most = (most / step).ceil().max(1.0) * step;
    let mut chart = ChartBuilder::on(canvas)
        .margin_top(26)
        .margin_right(24)
        .margin_left(6)
        .set_label_area_size(LabelAreaPosition::Left, 58)
        .set_label_area_size(LabelAreaPosition::Bottom, 46)
        .build_cartesian_2d(scale.axis(), linear_axis(most, 5))?;
    let x_label = |place: &f64| output::count(scale.number(*place).round() as u64);
    mesh(&mut chart, picture.x_title, picture.y_title, &x_label)?;
    for mark in &picture.marks {
        draw_mark(&mut chart, mark, scale, most)?;
    }
    for line in &picture.curves {
        let points = line.points.iter().map(|&(x, y)| (scale.place(x), y));
        draw_line(&mut chart, line, points)?;
    }
    Ok(())
}

fn mesh(
    chart: &mut PlotChart<'_, '_>,
    x_title: &str,
    y_title: &str,
    x_label: &dyn Fn(&f64) -> String,
) -> Drawn<'static> {
    let text = (FONT, FONT_SIZE).into_font().color(&INK.0);
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(RULE.0)
        .axis_style(RULE.0)
        .label_style(text.clone())
        .axis_desc_style(text)
        .x_desc(x_title)
        .y_desc(y_title)
        .x_label_formatter(x_label)
        .y_label_formatter(&|value| format!("{}", (value * 100.0).round() / 100.0))
        .draw()
}

fn draw_line(
    chart: &mut PlotChart<'_, '_>,
    line: &ChartLine,
    points: impl Iterator<Item = (f64, f64)> + Clone,
) -> Drawn<'static> {
    let stroke = line.colour.0.stroke_width(2);
    if line.is_dashed {
        chart.draw_series(DashedLineSeries::new(points.clone(), 6, 4, stroke))?;
    } else {
        chart.draw_series(LineSeries::new(points.clone(), stroke))?;
    }
    if line.has_dots {
        chart.draw_series(points.map(|point| Circle::new(point, 3, line.colour.0.filled())))?;
    }
    Ok(())
}

/// The name stands above the picture.
fn draw_mark(
    chart: &mut PlotChart<'_, '_>,
    mark: &UprightLine,
    scale: AxisScale,
    most: f64,
) -> Drawn<'static> {
    let x = scale.place(mark.x);
    let range = chart.x_range();
    if !(range.start..=range.end).contains(&x) {
        return Ok(());
    }
    chart.draw_series(DashedLineSeries::new(
        [(x, 0.0), (x, most)],
        3,
        3,
        mark.colour.0.stroke_width(1),
    ))?;
    let style = (FONT, FONT_SIZE)
        .into_font()
        .color(&mark.colour.0)
        .pos(Pos::new(HPos::Center, VPos::Bottom));
    let name = EmptyElement::at((x, most)) + Text::new(mark.name.clone(), (0, -4), style);
    chart.draw_series(std::iter::once(name)).map(drop)
}

fn draw_bars(
    canvas: &ChartCanvas<'_>,
    y_title: &str,
    most: f64,
    bars: &[ChartBar],
) -> Drawn<'static> {
    let places: Vec<_> = (0..bars.len()).map(|at| at as f64 + 0.5).collect();
    let x_axis = ChartAxis { range: 0.0..bars.len().max(1) as f64, ticks: places };
    let mut chart = ChartBuilder::on(canvas)
        .margin_top(26)
        .margin_right(24)
        .margin_left(6)
        .set_label_area_size(LabelAreaPosition::Left, 58)
        .set_label_area_size(LabelAreaPosition::Bottom, 30)
        .build_cartesian_2d(x_axis, linear_axis(most.max(1e-9), 5))?;
    let name =
        |place: &f64| bars.get(*place as usize).map_or_else(String::new, |bar| bar.name.clone());
    mesh(&mut chart, "", y_title, &name)?;
    for (at, bar) in bars.iter().enumerate() {
        draw_bar(&mut chart, at as f64, bar)?;
    }
    Ok(())
}

fn draw_bar(chart: &mut PlotChart<'_, '_>, at: f64, bar: &ChartBar) -> Drawn<'static> {
    let corners = [(at + 0.25, bar.from), (at + 0.75, bar.to)];
    chart.draw_series(std::iter::once(Rectangle::new(corners, bar.colour.0.filled())))?;
    let style =
        (FONT, FONT_SIZE).into_font().color(&INK.0).pos(Pos::new(HPos::Center, VPos::Bottom));
    let value = EmptyElement::at((at + 0.5, bar.to)) + Text::new(bar.value.clone(), (0, -4), style);
    chart.draw_series(std::iter::once(value)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(points: Vec<(f64, f64)>) -> ChartLines<'static> {
        let line =
            ChartLine { name: "a".into(), colour: DISK, is_dashed: true, has_dots: true, points };
        let mark = UprightLine { name: "here".into(), x: 5.0, colour: HOST };
        ChartLines {
            label: "what",
            x_title: "x",
            y_title: "y",
            curves: vec![line],
            marks: vec![mark],
        }
    }

    #[test]
    fn steps_are_round_numbers() {
        for (least, step) in
            [(0.9, 1.0), (1.0, 1.0), (2.1, 2.5), (3.0, 5.0), (20.0, 20.0), (600.0, 1_000.0)]
        {
            assert!((round_step(least) - step).abs() < 1e-9, "{least}: {}", round_step(least));
        }
    }

    #[test]
    fn every_colour_of_a_picture_has_a_dark_counterpart() {
        let points = (1..9).map(|x| (f64::from(x * 100), f64::from(x))).collect();
        let svg = lines(&picture(points));
        let dark = dark_colours();
        for part in svg.split('"').filter(|part| part.starts_with('#')) {
            assert!(dark.contains(&format!("\"{part}\"")), "{part} in {svg}");
        }
    }

    #[test]
    fn odd_numbers_are_drawn_too() {
        for points in [vec![], vec![(0.0, 0.0)], vec![(7.0, 100.0)], vec![(1e9, 3.0), (2e9, 4.0)]] {
            let picture = picture(points);
            for svg in [lines(&picture), small_lines(&picture)] {
                assert!(svg.starts_with("<svg role=\"img\" aria-label=\"what\""), "{svg}");
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            }
        }
        assert!(bars("what", "y", 0.0, &[]).starts_with("<svg role"));
    }
}
