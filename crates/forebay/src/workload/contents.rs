//! Bytes that follow from their position, so that a block in the wrong place, twice, or left over
//! from an earlier loop shows.

use serde::{Deserialize, Serialize};

/// Bytes between two keys. Within a block, bytes differ by a table; between blocks, by the key.
const BLOCK_BYTES: usize = 4096;
const BLOCK_WORDS: usize = BLOCK_BYTES / 8;

/// The contents of a file, of which any part can be made or checked.
#[derive(Clone, Debug)]
pub struct Contents {
    /// What the keys of all blocks are made from.
    base: u64,
    table: Vec<u64>,
}

/// A byte that isn't what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// Where in the file, in bytes.
    pub offset: u64,
    /// What should be there.
    pub wanted: u8,
    /// What is there.
    pub found: u8,
}

/// The finalizer of `SplitMix64` (Steele, Lea and Flood, OOPSLA 2014).
pub(super) fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Contents {
    /// The contents of a seed in a generation, such as the number of the loop that writes them.
    pub fn new(seed: u64, generation: u64) -> Self {
        let base = mix(seed ^ mix(generation));
        let table = (0..BLOCK_WORDS as u64).map(|word| mix(mix(seed) ^ word)).collect();
        Self { base, table }
    }

    /// Fills `bytes`, which are at `offset` of the file.
    pub fn fill(&self, offset: u64, bytes: &mut [u8]) {
        let mut place = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (block, start) = self.block_at(place);
            let length = rest.len().min(BLOCK_BYTES - start);
            let (part, others) = rest.split_at_mut(length);
            part.copy_from_slice(&block[start..start + length]);
            rest = others;
            place += length as u64;
        }
    }

    /// The first byte that differs, of `bytes` at `offset` of the file.
    pub fn difference(&self, offset: u64, bytes: &[u8]) -> Option<Difference> {
        let mut place = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (block, start) = self.block_at(place);
            let (part, others) = rest.split_at(rest.len().min(BLOCK_BYTES - start));
            let wanted = &block[start..start + part.len()];
            if part != wanted {
                let index = part.iter().zip(wanted).position(|(found, wanted)| found != wanted)?;
                let offset = place + index as u64;
                return Some(Difference { offset, wanted: wanted[index], found: part[index] });
            }
            rest = others;
            place += part.len() as u64;
        }
        None
    }

    /// The block that a byte of the file is in, and where in it that is.
    fn block_at(&self, place: u64) -> ([u8; BLOCK_BYTES], usize) {
        let key = mix(self.base ^ (place / BLOCK_BYTES as u64));
        let mut block = [0; BLOCK_BYTES];
        for (bytes, word) in block.chunks_exact_mut(8).zip(&self.table) {
            bytes.copy_from_slice(&(word ^ key).to_le_bytes());
        }
        (block, usize::try_from(place % BLOCK_BYTES as u64).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_any_length_and_offset_are_parts_of_the_whole() {
        let contents = Contents::new(3, 1);
        let mut whole = vec![0; 20_001];
        contents.fill(0, &mut whole);
        for (offset, length) in [(0, 1), (1, 4096), (4095, 2), (4097, 9000), (20_000, 1), (7, 0)] {
            let mut part = vec![0; length];
            contents.fill(offset as u64, &mut part);
            assert_eq!(part, whole[offset..offset + length], "{length} bytes at {offset}");
            assert_eq!(contents.difference(offset as u64, &part), None);
        }
    }

    #[test]
    fn one_flipped_bit_anywhere_is_found_with_its_offset() {
        let contents = Contents::new(3, 1);
        for flipped in [0, 1, 4095, 4096, 10_000] {
            let mut bytes = vec![0; 10_001];
            contents.fill(100, &mut bytes);
            let wanted = bytes[flipped];
            bytes[flipped] ^= 0x10;
            let offset = 100 + flipped as u64;
            let expected = Difference { offset, wanted, found: wanted ^ 0x10 };
            assert_eq!(contents.difference(100, &bytes), Some(expected));
        }
    }

    #[test]
    fn another_block_another_generation_and_another_seed_differ() {
        let filled = |seed, generation, offset| {
            let mut bytes = vec![0; 4096];
            Contents::new(seed, generation).fill(offset, &mut bytes);
            bytes
        };
        let bytes = filled(3, 1, 0);
        for other in [filled(3, 1, 4096), filled(3, 2, 0), filled(4, 1, 0), filled(3, 1, 512)] {
            let same = bytes.iter().zip(&other).filter(|(one, other)| one == other).count();
            assert!(same < 200, "{same} of 4096 bytes are the same");
        }
    }
}
