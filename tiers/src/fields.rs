//! Numbers and other fields of records, little-endian. Offsets are constants within records of fixed
//! size.

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

pub(crate) fn u128_at(bytes: &[u8], at: usize) -> u128 {
    u128::from_le_bytes(array_at(bytes, at))
}

pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|byte| bytes[at + byte])
}
