//! Values that are given tenant by tenant, such as `7=3, 9=0.5`.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use crate::value::{Capacity, InvalidValue, NONE};

/// What weights are written like.
pub(crate) const WEIGHTS: &str =
    "tenants and weights such as `7=3, 9=0.5`, each weight above 0 and at most 1000000, or none";
/// What quotas are written like.
pub(crate) const QUOTAS: &str =
    "tenants and sizes such as `7=64GiB, 9=5000 blocks`, each larger than nothing, or none";

const MAX_WEIGHT: f64 = 1_000_000.0;

/// Weights by tenant.
pub(crate) fn parse_weights(text: &str) -> Result<BTreeMap<u32, f64>, InvalidValue> {
    parse(text, WEIGHTS, |weight| {
        let weight: f64 = weight.parse().ok()?;
        // NaN is in no range.
        (weight > 0.0 && weight <= MAX_WEIGHT).then_some(weight)
    })
}

/// Quotas by tenant.
pub(crate) fn parse_quotas(text: &str) -> Result<BTreeMap<u32, Capacity>, InvalidValue> {
    parse(text, QUOTAS, |quota| Capacity::from_str(quota).ok().filter(|quota| !quota.is_zero()))
}

fn parse<T>(
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
pub(crate) fn text<T: Display>(values: &BTreeMap<u32, T>) -> Option<String> {
    let entries: Vec<_> =
        values.iter().map(|(tenant, value)| format!("{tenant}={value}")).collect();
    (!entries.is_empty()).then(|| entries.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let weights = parse_weights(" 7=3,9 = 0.5 ").unwrap();
        assert_eq!(weights, BTreeMap::from([(7, 3.0), (9, 0.5)]));
        assert_eq!(parse_weights(&text(&weights).unwrap()).unwrap(), weights);
        let quotas = parse_quotas("1=64GiB, 2=5000 blocks").unwrap();
        assert_eq!(
            quotas,
            BTreeMap::from([(1, Capacity::Bytes(64 << 30)), (2, Capacity::Blocks(5_000))])
        );
        assert_eq!(parse_quotas(&text(&quotas).unwrap()).unwrap(), quotas);
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
