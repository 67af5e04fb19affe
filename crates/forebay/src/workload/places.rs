//! Which bytes each request moves, and in which order.

use super::contents::mix;

/// The requests of a loop: a range cut into pieces of one length, the last one shorter.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// Where the range begins.
    pub offset: u64,
    /// Its bytes.
    pub length: u64,
    /// Bytes of a request.
    pub request_bytes: usize,
}

impl Places {
    /// Offset and length of a request.
    pub fn span(&self, index: usize) -> (u64, usize) {
        let begin = (index as u64).saturating_mul(self.request_bytes as u64).min(self.length);
        let left = usize::try_from(self.length - begin).unwrap_or(usize::MAX);
        (self.offset + begin, left.min(self.request_bytes))
    }

    /// How many requests there are.
    pub fn count(&self) -> usize {
        usize::try_from(self.length.div_ceil(self.request_bytes.max(1) as u64)).unwrap_or(0)
    }

    /// All requests, from the first to the last.
    pub fn in_order(&self) -> Vec<usize> {
        (0..self.count()).collect()
    }

    /// All requests, each once, in an order that follows from `seed`.
    pub fn shuffled(&self, seed: u64) -> Vec<usize> {
        let mut order = self.in_order();
        let mut state = seed;
        for end in (1..order.len()).rev() {
            state = mix(state);
            let index = usize::try_from(state % (end as u64 + 1)).unwrap_or(0);
            order.swap(end, index);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_cover_every_byte_once_whatever_the_lengths() {
        for length in [0, 1, 511, 4096, 4097, 1_000_003] {
            for request_bytes in [1, 7, 4096, 1 << 20] {
                if length / request_bytes as u64 > 5000 {
                    continue;
                }
                let places = Places { offset: 100, length, request_bytes };
                let mut end = 100;
                for index in places.in_order() {
                    let (offset, bytes) = places.span(index);
                    assert_eq!(offset, end);
                    assert!((1..=request_bytes).contains(&bytes));
                    end = offset + bytes as u64;
                }
                assert_eq!(end, 100 + length);
            }
        }
    }

    #[test]
    fn a_random_order_has_each_request_once_and_depends_on_the_seed() {
        let places = Places { offset: 0, length: 1000, request_bytes: 1 };
        let order = places.shuffled(1);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, places.in_order());
        assert_ne!(order, places.in_order());
        assert_ne!(order, places.shuffled(2));
        assert_eq!(order, places.shuffled(1));
    }
}
