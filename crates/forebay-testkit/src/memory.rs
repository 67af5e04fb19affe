//! Memory for tests: contents that tell every position apart, at addresses that break rules.

/// `length` bytes in which no two aligned runs of 8 bytes are alike, different for each seed.
///
/// A block that ends up in the wrong place, twice, or not at all shows, whatever its size.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length + 8);
    let mut counter = 0u64;
    while bytes.len() < length {
        // The finaliser of splitmix64 (Steele, Lea and Flood, 2014): a bijection of the counter.
        let mut word = (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_add(counter);
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bytes.extend_from_slice(&(word ^ (word >> 31)).to_le_bytes());
        counter += 1;
    }
    bytes.truncate(length);
    bytes
}

/// Bytes at an address that lies `shift` bytes behind a page boundary.
#[derive(Debug)]
pub struct Placed {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl Placed {
    /// The page that addresses are shifted from.
    const PAGE_BYTES: usize = 4096;

    /// `length` zero bytes, `shift` bytes behind a page boundary.
    pub fn new(shift: usize, length: usize) -> Self {
        let memory = vec![0; length + shift + Self::PAGE_BYTES];
        let start = memory.as_ptr().align_offset(Self::PAGE_BYTES) + shift;
        Self { memory, start, length }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.length]
    }

    /// The bytes, to be written to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shifted_address_is_where_it_should_be() {
        for shift in [0, 1, 64, 511, 512, 4095] {
            let placed = Placed::new(shift, 10);
            assert_eq!(placed.bytes().as_ptr().addr() % Placed::PAGE_BYTES, shift);
            assert_eq!(placed.bytes().len(), 10);
        }
    }

    #[test]
    fn patterns_differ_by_seed_and_position() {
        let pattern = super::pattern(1, 4096);
        assert_ne!(pattern, super::pattern(2, 4096));
        let mut words: Vec<_> = pattern.chunks(8).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 512);
    }
}
