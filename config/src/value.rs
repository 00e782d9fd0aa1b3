//! How values are written: sizes, capacities, toggles, numbers, and values tenant by tenant, such
//! as `7=3, 9=0.5`.
//!
//! Surrounding white space never matters. No message repeats the value: it might be a secret, and
//! the caller knows it.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Serialize;

/// How an optional setting is written that is not set.
pub(crate) const NONE: &str = "none";

/// Why a text is not a value of its sort, and what would be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}; valid: {valid}")]
pub struct InvalidValue {
    reason: Box<str>,
    valid: Box<str>,
}

impl InvalidValue {
    pub(crate) fn new(reason: impl Into<Box<str>>, valid: impl Into<Box<str>>) -> Self {
        Self { reason: reason.into(), valid: valid.into() }
    }

    /// The same reason where other values are valid.
    pub(crate) fn but_valid(self, valid: impl Into<Box<str>>) -> Self {
        Self { valid: valid.into(), ..self }
    }
}

pub(crate) const BOOLEANS: &str = "true, 1, on, yes, false, 0, off, no";
pub(crate) const SIZES: &str = "bytes as a whole number, or a number with a unit (B, kB, MB, GB, TB, KiB, MiB, GiB, \
                                TiB) such as 64KiB or 1.5GB";
pub(crate) const CAPACITIES: &str =
    "a size such as 1.5GB, a number of blocks such as `5000 blocks`, or 0 or none for no tier";
/// Of a tier that need not have a size.
pub(crate) const LIMITS: &str = "a size such as 1.5GB, a number of blocks such as `5000 blocks`, unlimited, or 0 or \
                                 none for no tier";
pub(crate) const BUDGETS: &str =
    "a size a day such as 500GB, drive-writes a day such as 0.5dwpd (at most 1000dwpd), or none";
pub(crate) const DIRECTORIES: &str =
    "directories separated by `:` or `,`, at most 64; in TOML also an array";
pub(crate) const HOSTS: &str =
    "host names without a port, separated by `,`, at most 64; in TOML also an array; or none";
pub(crate) const TEXTS: &str = "any text of at most 4096 bytes";

/// As long as a path may be, and longer than any name or key.
const MAX_TEXT: usize = 4096;
pub(crate) const DIRECTORY: &str = "a directory, or none";
/// Of one tier: each has a file open, and more than there are drives are of no use.
const MAX_DIRECTORIES: usize = 64;
const MAX_HOSTS: usize = 64;
/// As long as DNS lets a name be.
const MAX_HOST: usize = 253;

/// Units of [`parse_size`], in bytes.
const UNITS: [(&str, u64); 9] = [
    ("B", 1),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

/// Bytes of `64KiB`, `1.5GB`, `1.5 GiB` or a plain number of bytes. Units count in any case; a
/// fraction of a unit is rounded down to whole bytes.
///
/// # Errors
/// Anything else, a fraction of a byte, and what exceeds 64 bits.
pub fn parse_size(text: &str) -> Result<u64, InvalidValue> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit_bytes(unit.trim()).ok_or_else(|| not_a_size("not a size"))?;
    scale(number, unit)
}

fn unit_bytes(name: &str) -> Option<u64> {
    if name.is_empty() {
        return Some(1);
    }
    UNITS.iter().find(|(unit, _)| unit.eq_ignore_ascii_case(name)).map(|&(_, bytes)| bytes)
}

/// `number × unit`, exactly: decimal fractions are not what floats can hold.
fn scale(number: &str, unit: u64) -> Result<u64, InvalidValue> {
    let (whole, fraction) = match number.split_once('.') {
        Some(_) if unit == 1 => return Err(not_a_size("a fraction of a byte")),
        Some((whole, fraction)) => (whole, Some(fraction)),
        None => (number, None),
    };
    let is_number =
        |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    if !is_number(whole) || !fraction.is_none_or(is_number) {
        return Err(not_a_size("not a size"));
    }
    let whole: u64 = whole.parse().map_err(|_| not_a_size("too large"))?;
    let bytes = u128::from(whole) * u128::from(unit) + part_of(fraction.unwrap_or_default(), unit);
    u64::try_from(bytes).map_err(|_| not_a_size("too large"))
}

/// `0.fraction × unit`, rounded down. Digits beyond the 18th are below a byte of any unit.
fn part_of(fraction: &str, unit: u64) -> u128 {
    let (numerator, denominator) = fraction
        .bytes()
        .take(18)
        .fold((0_u128, 1_u128), |(n, d), digit| (n * 10 + u128::from(digit - b'0'), d * 10));
    numerator * u128::from(unit) / denominator
}

fn not_a_size(reason: &str) -> InvalidValue {
    InvalidValue::new(reason, SIZES)
}

/// The shortest exact way to write a number of bytes: [`parse_size`] gives it back.
pub fn format_size(bytes: u64) -> String {
    let divides =
        UNITS.iter().filter(|(_, unit)| *unit > 1 && bytes > 0 && bytes.is_multiple_of(*unit));
    match divides.min_by_key(|(_, unit)| bytes / unit) {
        Some((name, unit)) => format!("{}{name}", bytes / unit),
        None => bytes.to_string(),
    }
}

/// How large a tier is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Capacity {
    /// As many blocks as fit into this number of bytes.
    Bytes(u64),
    /// Exactly this number of blocks.
    Blocks(u64),
}

impl Capacity {
    /// Whole blocks of `block_bytes` that this holds.
    pub fn blocks(self, block_bytes: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes / block_bytes.max(1),
            Self::Blocks(blocks) => blocks,
        }
    }

    /// Whether it is written as nothing at all.
    pub const fn is_zero(self) -> bool {
        matches!(self, Self::Bytes(0) | Self::Blocks(0))
    }
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => f.write_str(&format_size(*bytes)),
            Self::Blocks(blocks) => write!(f, "{blocks} blocks"),
        }
    }
}

impl FromStr for Capacity {
    type Err = InvalidValue;

    /// A size as in [`parse_size`], or `N blocks`.
    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        let text = text.trim();
        let blocks = text.strip_suffix("blocks").or_else(|| text.strip_suffix("block"));
        let capacity = match blocks {
            Some(count) => parse_whole(count, &(0..=u64::MAX)).map(Self::Blocks),
            None => parse_size(text).map(Self::Bytes),
        };
        capacity.map_err(|invalid| InvalidValue::new(invalid.reason, CAPACITIES))
    }
}

/// The most times in a day that a drive is written in full: no drive is that fast.
const MAX_DRIVE_WRITES_PER_DAY: f64 = 1000.0;

/// How much may be written to a medium that wears out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WriteBudget {
    /// Bytes in any 24 hours.
    BytesPerDay(u64),
    /// Multiples of the tier's size in any 24 hours.
    DriveWritesPerDay(f64),
}

impl fmt::Display for WriteBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BytesPerDay(bytes) => f.write_str(&format_size(*bytes)),
            Self::DriveWritesPerDay(times) => write!(f, "{times}dwpd"),
        }
    }
}

impl FromStr for WriteBudget {
    type Err = InvalidValue;

    /// A size as in [`parse_size`], which is meant a day, or `N dwpd`: drive-writes a day.
    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        let text = text.trim().to_ascii_lowercase();
        let Some(times) = text.strip_suffix("dwpd") else {
            return parse_size(&text)
                .map(Self::BytesPerDay)
                .map_err(|no| InvalidValue::new(no.reason, BUDGETS));
        };
        let times: f64 =
            times.trim().parse().map_err(|_| InvalidValue::new("not a number", BUDGETS))?;
        // NaN is in no range.
        if (0.0..=MAX_DRIVE_WRITES_PER_DAY).contains(&times) {
            Ok(Self::DriveWritesPerDay(times))
        } else {
            Err(InvalidValue::new("out of range", BUDGETS))
        }
    }
}

pub(crate) fn parse_boolean(text: &str) -> Result<bool, InvalidValue> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "1" | "on" | "yes" => Ok(true),
        "false" | "0" | "off" | "no" => Ok(false),
        "" => Err(InvalidValue::new("empty", BOOLEANS)),
        _ => Err(InvalidValue::new("not a boolean", BOOLEANS)),
    }
}

pub(crate) fn parse_whole(text: &str, range: &RangeInclusive<u64>) -> Result<u64, InvalidValue> {
    let number: u64 = text
        .trim()
        .parse()
        .map_err(|_| InvalidValue::new("not a whole number", whole_numbers(range)))?;
    if range.contains(&number) {
        Ok(number)
    } else {
        Err(InvalidValue::new("out of range", whole_numbers(range)))
    }
}

pub(crate) fn whole_numbers(range: &RangeInclusive<u64>) -> String {
    match (*range.start(), *range.end()) {
        (0, u64::MAX) => "a whole number".to_owned(),
        (start, u64::MAX) => format!("a whole number, at least {start}"),
        (start, end) => format!("a whole number from {start} to {end}"),
    }
}

pub(crate) fn parse_share(text: &str) -> Result<f64, InvalidValue> {
    let valid = "a number from 0 to 1";
    let share: f64 = text.trim().parse().map_err(|_| InvalidValue::new("not a number", valid))?;
    // NaN is in no range.
    if (0.0..=1.0).contains(&share) {
        Ok(share)
    } else {
        Err(InvalidValue::new("out of range", valid))
    }
}

pub(crate) fn parse_text(text: &str) -> Result<String, InvalidValue> {
    let text = text.trim();
    match text.len() {
        0 => Err(InvalidValue::new("empty", TEXTS)),
        1..=MAX_TEXT => Ok(text.to_owned()),
        _ => Err(InvalidValue::new("too long", TEXTS)),
    }
}

pub(crate) fn parse_directory(text: &str) -> Result<PathBuf, InvalidValue> {
    match text.trim() {
        "" => Err(InvalidValue::new("a directory without a name", DIRECTORY)),
        text if text.len() > MAX_TEXT => Err(InvalidValue::new("too long", DIRECTORY)),
        text => Ok(PathBuf::from(text)),
    }
}

/// Directories in one text: a variable has no arrays.
pub(crate) fn split_directories(text: &str) -> Vec<String> {
    text.split([':', ',']).map(|directory| directory.trim().to_owned()).collect()
}

pub(crate) fn parse_directories(names: &[String]) -> Result<Vec<PathBuf>, InvalidValue> {
    if names.is_empty() || names.iter().any(String::is_empty) {
        return Err(InvalidValue::new("a directory without a name", DIRECTORIES));
    }
    if names.len() > MAX_DIRECTORIES {
        return Err(InvalidValue::new("too many directories", DIRECTORIES));
    }
    let directories: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
    let twice =
        directories.iter().enumerate().any(|(at, directory)| directories[..at].contains(directory));
    if twice {
        Err(InvalidValue::new("a directory named twice", DIRECTORIES))
    } else {
        Ok(directories)
    }
}

/// Names of hosts, in lower case, since their case says nothing.
pub(crate) fn parse_hosts<'n>(
    names: impl Iterator<Item = &'n str>,
) -> Result<Vec<String>, InvalidValue> {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    let hosts = names.map(|name| match name.trim() {
        name if name.is_empty() || name.len() > MAX_HOST || !name.bytes().all(is_part) => {
            Err(InvalidValue::new("not the name of a host", HOSTS))
        }
        name => Ok(name.to_ascii_lowercase()),
    });
    let hosts: Vec<_> = hosts.collect::<Result<_, _>>()?;
    if hosts.len() > MAX_HOSTS {
        Err(InvalidValue::new("too many names", HOSTS))
    } else {
        Ok(hosts)
    }
}

/// What weights are written like.
pub(crate) const TENANT_WEIGHTS: &str =
    "tenants and weights such as `7=3, 9=0.5`, each weight above 0 and at most 1000000, or none";
/// What quotas are written like.
pub(crate) const TENANT_QUOTAS: &str =
    "tenants and sizes such as `7=64GiB, 9=5000 blocks`, each larger than nothing, or none";

const MAX_WEIGHT: f64 = 1_000_000.0;

/// Weights by tenant.
pub(crate) fn parse_weights(text: &str) -> Result<BTreeMap<u32, f64>, InvalidValue> {
    parse_by_tenant(text, TENANT_WEIGHTS, |weight| {
        let weight: f64 = weight.parse().ok()?;
        // NaN is in no range.
        (weight > 0.0 && weight <= MAX_WEIGHT).then_some(weight)
    })
}

/// Quotas by tenant.
pub(crate) fn parse_quotas(text: &str) -> Result<BTreeMap<u32, Capacity>, InvalidValue> {
    parse_by_tenant(text, TENANT_QUOTAS, |quota| {
        Capacity::from_str(quota).ok().filter(|quota| !quota.is_zero())
    })
}

fn parse_by_tenant<T>(
    text: &str,
    valid: &'static str,
    value: impl Fn(&str) -> Option<T>,
) -> Result<BTreeMap<u32, T>, InvalidValue> {
    let mut values = BTreeMap::new();
    if text.trim().eq_ignore_ascii_case(NONE) {
        return Ok(values);
    }
    for entry in text.split(',') {
        let invalid = || InvalidValue::new(format!("`{}` is not understood", entry.trim()), valid);
        let (tenant, given) = entry.split_once('=').ok_or_else(invalid)?;
        let tenant: u32 = tenant.trim().parse().map_err(|_| invalid())?;
        let given = value(given.trim()).ok_or_else(invalid)?;
        if values.insert(tenant, given).is_some() {
            return Err(InvalidValue::new(format!("tenant {tenant} is named twice"), valid));
        }
    }
    Ok(values)
}

/// As the parsers take it; `None` where no tenant is named.
pub(crate) fn text_by_tenant<T: Display>(values: &BTreeMap<u32, T>) -> Option<String> {
    let entries: Vec<_> =
        values.iter().map(|(tenant, value)| format!("{tenant}={value}")).collect();
    (!entries.is_empty()).then(|| entries.join(", "))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in any::<String>()) {
            let _ = parse_size(&text);
            let _ = text.parse::<Capacity>();
            let _ = parse_boolean(&text);
            let _ = parse_whole(&text, &(1..=9));
            let _ = parse_share(&text);
            let _ = parse_directory(&text);
            let _ = parse_directories(&split_directories(&text));
            let _ = parse_hosts(text.split(','));
        }

        #[test]
        fn numbers_with_any_unit_never_panic(number in "[0-9]{0,40}[.]?[0-9]{0,40}", unit in "[kMGTmgt]?i?[Bb]?") {
            let _ = parse_size(&format!("{number}{unit}"));
        }

        #[test]
        fn sizes_round_trip(bytes in any::<u64>(), shift in 0_u32..50) {
            let bytes = bytes >> shift << shift;
            prop_assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
            prop_assert_eq!(parse_size(&bytes.to_string()), Ok(bytes));
        }

        #[test]
        fn decimal_sizes_round_trip(count in 0_u64..1_000_000, power in 0_u32..13) {
            let bytes = count * 10_u64.pow(power);
            prop_assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
        }

        #[test]
        fn fractions_are_exact(thousandths in 0_u64..10_000_000) {
            let text = format!("{}.{:03} GB", thousandths / 1000, thousandths % 1000);
            prop_assert_eq!(parse_size(&text), Ok(thousandths * 1_000_000));
        }

        #[test]
        fn capacities_round_trip(amount in any::<u64>(), in_blocks in any::<bool>()) {
            let capacity = if in_blocks { Capacity::Blocks(amount) } else { Capacity::Bytes(amount) };
            prop_assert_eq!(capacity.to_string().parse(), Ok(capacity));
        }

        #[test]
        fn booleans_in_any_case_with_any_space(
            value in any::<bool>(), word in 0_usize..4, upper in any::<u8>(), space in "[ \t]{0,3}"
        ) {
            let words = if value { ["true", "1", "on", "yes"] } else { ["false", "0", "off", "no"] };
            let cased: String = words[word].chars().enumerate()
                .map(|(at, c)| if upper >> at & 1 == 1 { c.to_ascii_uppercase() } else { c })
                .collect();
            prop_assert_eq!(parse_boolean(&format!("{space}{cased}{space}")), Ok(value));
        }
    }

    #[test]
    fn sizes_as_people_write_them() {
        let sizes = [
            ("64KiB", 65_536),
            ("1.5GB", 1_500_000_000),
            ("1.5 GiB", 1_610_612_736),
            ("1.1GB", 1_100_000_000),
            ("4096", 4096),
            (" 2 mb ", 2_000_000),
            ("0.3KiB", 307),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, bytes) in sizes {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size() {
        let texts = [
            "", " ", "-1", "+1", "0.5", "1.", ".5GB", "1.2.3GB", "1G", "1Gb/s", "1e9", "GB",
            "1 G B", "NaN",
        ];
        for text in texts {
            assert!(parse_size(text).is_err(), "{text}");
        }
        for text in [
            "18446744073709551616",
            "99999999999 TiB",
            "999999999999999999999999999999999999999999 kB",
        ] {
            assert!(parse_size(text).unwrap_err().to_string().starts_with("too large"), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_in_their_shortest_form() {
        let sizes = [
            (0, "0"),
            (1, "1"),
            (65_536, "64KiB"),
            (1_500_000_000, "1500MB"),
            (10_u64.pow(12), "1TB"),
        ];
        for (bytes, text) in sizes {
            assert_eq!(format_size(bytes), text);
        }
    }

    #[test]
    fn what_is_no_boolean() {
        for text in ["", " ", "2", "y", "enable", "tru e", "-1", "None"] {
            assert!(parse_boolean(text).unwrap_err().to_string().ends_with(BOOLEANS), "{text}");
        }
    }

    #[test]
    fn whole_means_whole() {
        for text in ["0.5", "1.0", "1e3", "", "-1", "0x10"] {
            assert!(parse_whole(text, &(0..=10)).is_err(), "{text}");
        }
        assert!(parse_whole("11", &(0..=10)).unwrap_err().to_string().ends_with("from 0 to 10"));
    }

    #[test]
    fn budgets_are_sizes_or_drive_writes() {
        let budgets = [
            ("500GB", WriteBudget::BytesPerDay(500_000_000_000)),
            ("0", WriteBudget::BytesPerDay(0)),
            (" 0.5 DWPD", WriteBudget::DriveWritesPerDay(0.5)),
        ];
        for (text, budget) in budgets {
            assert_eq!(text.parse(), Ok(budget), "{text}");
            assert_eq!(budget.to_string().parse(), Ok(budget));
        }
        for text in ["", "-1dwpd", "NaN dwpd", "dwpd", "inf dwpd", "1e300dwpd", "lots"] {
            let error = text.parse::<WriteBudget>().unwrap_err();
            assert!(error.to_string().ends_with(BUDGETS), "{text}");
        }
    }

    #[test]
    fn shares_lie_between_none_and_all() {
        for text in ["-0.1", "1.1", "NaN", "inf", "10%"] {
            assert!(parse_share(text).is_err(), "{text}");
        }
        assert_eq!(parse_share(" 1 "), Ok(1.0));
    }

    #[test]
    fn directories_are_split_and_distinct() {
        assert_eq!(split_directories("/a:/b, /c"), ["/a", "/b", "/c"]);
        for text in ["", "/a::/b", "/a,", "/a:/a"] {
            assert!(parse_directories(&split_directories(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn hosts_are_names_without_a_port() {
        assert_eq!(
            parse_hosts("Node-1.example, kvbm".split(',')).unwrap(),
            ["node-1.example", "kvbm"]
        );
        for text in
            ["", "a,", "a:80", "*", "http://a", "a b", &"x".repeat(254), &["a"; 65].join(",")]
        {
            assert!(parse_hosts(text.split(',')).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let weights = parse_weights(" 7=3,9 = 0.5 ").unwrap();
        assert_eq!(weights, BTreeMap::from([(7, 3.0), (9, 0.5)]));
        assert_eq!(parse_weights(&text_by_tenant(&weights).unwrap()).unwrap(), weights);
        let quotas = parse_quotas("1=64GiB, 2=5000 blocks").unwrap();
        assert_eq!(
            quotas,
            BTreeMap::from([(1, Capacity::Bytes(64 << 30)), (2, Capacity::Blocks(5_000))])
        );
        assert_eq!(parse_quotas(&text_by_tenant(&quotas).unwrap()).unwrap(), quotas);
        assert!(parse_weights("none").unwrap().is_empty());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for wrong in ["7", "7=", "seven=1", "7=0", "7=-1", "7=NaN", "7=inf", "7=1,7=2", "7=1,"] {
            assert!(parse_weights(wrong).is_err(), "{wrong}");
        }
        for wrong in ["7=much", "7=0", "7=0 blocks", "-1=5GB"] {
            assert!(parse_quotas(wrong).is_err(), "{wrong}");
        }
    }
}
