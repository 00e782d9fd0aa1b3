//! Footers of segment objects.

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::object::segment::{
    Footer, FormatError, MAGIC, TAIL_BYTES, VERSION, decode_footer, encode_footer,
};

/// Reads the end of an object, whose length the first eight bytes say, as it is and with a trailer
/// that fits: else nothing with a wrong checksum would ever be looked at further.
pub fn segment_footer(bytes: &[u8]) {
    let Some((object_bytes, tail)) = bytes.split_first_chunk() else { return };
    let object_bytes = u64::from_le_bytes(*object_bytes);
    read(tail, object_bytes);
    read(&sealed(tail), object_bytes);
}

fn read(tail: &[u8], object_bytes: u64) {
    match decode_footer(tail, object_bytes) {
        Ok(Footer { provenance, entries }) => {
            let footer = encode_footer(&provenance, &entries);
            assert!(tail.ends_with(&footer), "another footer is written than was read");
            let payload_bytes = object_bytes - footer.len() as u64;
            assert!(entries.iter().all(|entry| entry.offset + entry.length <= payload_bytes));
        }
        Err(FormatError::Incomplete { needed }) => {
            assert!(needed > tail.len() as u64 && needed <= object_bytes);
        }
        Err(_) => {}
    }
}

fn sealed(beginning: &[u8]) -> Vec<u8> {
    let mut footer = beginning.to_vec();
    footer.extend(((beginning.len() + TAIL_BYTES) as u64).to_le_bytes());
    footer.extend(VERSION.to_le_bytes());
    footer.extend(checksum(&footer).to_le_bytes());
    footer.extend(MAGIC);
    footer
}
