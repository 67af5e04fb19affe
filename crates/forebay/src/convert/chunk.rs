//! Which bytes go where, cut into chunks that fit the memory: pure arithmetic.
//!
//! # Invariants
//!
//! - The parts of a chunk follow each other without a gap in one target file, and are all of it.
//! - A part that is cut is cut at a page of its target, which is a multiple of any element's size.

use super::budget::PAGE_BYTES;

/// Somewhere in one of several files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) file: usize,
    pub(super) offset: u64,
}

impl Place {
    fn plus(self, bytes: u64) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }
}

/// Bytes of one tensor, from a source file to a target file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) tensor: usize,
    /// Where in the tensor they begin.
    pub(super) start: u64,
    pub(super) source: Place,
    pub(super) target: Place,
    pub(super) length: u64,
    /// Bytes that are turned around together; 1 for none.
    pub(super) swapped_bytes: usize,
}

impl Part {
    /// Its first `length` bytes, and the rest.
    fn split(self, length: u64) -> (Self, Self) {
        let rest = Self {
            start: self.start + length,
            source: self.source.plus(length),
            target: self.target.plus(length),
            length: self.length - length,
            ..self
        };
        (Self { length, ..self }, rest)
    }
}

/// Parts that are stored together.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) parts: Vec<Part>,
    pub(super) length: u64,
}

impl Chunk {
    /// Where it goes. A chunk has at least one part.
    pub(super) fn target(&self) -> Place {
        self.parts[0].target
    }

    fn takes(&self, part: &Part) -> bool {
        self.parts.last().is_none_or(|last| last.target.plus(last.length) == part.target)
    }

    /// Where in the target its last page ends, counted from its beginning.
    fn room(&self, first: &Part, chunk_bytes: u64) -> u64 {
        let begin = self.parts.first().unwrap_or(first).target.offset;
        let end = (begin + chunk_bytes) / PAGE_BYTES * PAGE_BYTES;
        end - begin - self.length
    }
}

/// Cuts parts into chunks of at most `chunk_bytes`, which is a multiple of a page.
pub(super) fn chunks_of(mut parts: Vec<Part>, chunk_bytes: u64) -> Vec<Chunk> {
    parts.retain(|part| part.length > 0);
    parts.sort_unstable_by_key(|part| part.target);
    let mut chunks = Vec::new();
    let mut chunk = Chunk::default();
    for mut part in parts {
        if !chunk.takes(&part) {
            chunks.push(std::mem::take(&mut chunk));
        }
        loop {
            let room = chunk.room(&part, chunk_bytes);
            let whole = part.length <= room;
            let (now, later) = part.split(part.length.min(room));
            if now.length > 0 {
                chunk.length += now.length;
                chunk.parts.push(now);
            }
            if whole {
                break;
            }
            chunks.push(std::mem::take(&mut chunk));
            part = later;
        }
    }
    if !chunk.parts.is_empty() {
        chunks.push(chunk);
    }
    chunks
}

/// Runs of parts that follow each other in one source file too: where each begins, and its bytes.
pub(super) fn runs_of(parts: &[Part]) -> Vec<(Place, u64)> {
    let mut runs: Vec<(Place, u64)> = Vec::new();
    for part in parts {
        match runs.last_mut() {
            Some((place, length)) if place.plus(*length) == part.source => *length += part.length,
            _ => runs.push((part.source, part.length)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn part(tensor: usize, source: (usize, u64), target: (usize, u64), length: u64) -> Part {
        let place = |(file, offset)| Place { file, offset };
        let (source, target) = (place(source), place(target));
        Part { tensor, start: 0, source, target, length, swapped_bytes: 1 }
    }

    #[test]
    fn small_tensors_share_a_chunk_and_a_read() {
        let parts = vec![
            part(1, (0, 10), (0, 110), 5),
            part(0, (0, 0), (0, 100), 10),
            part(2, (0, 99), (0, 115), 1),
        ];
        let chunks = chunks_of(parts, 8192);
        assert_eq!(chunks.len(), 1);
        assert_eq!(chunks[0].length, 16);
        let place = |offset| Place { file: 0, offset };
        assert_eq!(runs_of(&chunks[0].parts), [(place(0), 15), (place(99), 1)]);
    }

    #[test]
    fn a_gap_or_another_file_ends_a_chunk() {
        let parts = vec![
            part(0, (0, 0), (0, 0), 10),
            part(1, (0, 10), (0, 11), 10),
            part(2, (0, 20), (1, 21), 10),
        ];
        assert_eq!(chunks_of(parts, 8192).len(), 3);
    }

    proptest! {
        #[test]
        fn every_byte_is_in_one_chunk_and_cuts_are_at_pages(
            lengths in prop::collection::vec(0_u64..40_000, 0..20),
            begin in 0_u64..5000,
            gap_at in any::<prop::sample::Index>(),
        ) {
            let mut offset = begin;
            let gap = if lengths.is_empty() { 0 } else { gap_at.index(lengths.len()) };
            let parts: Vec<Part> = lengths.iter().enumerate().map(|(tensor, length)| {
                offset += u64::from(tensor == gap);
                let made = part(tensor, (tensor, 7), (0, offset), *length);
                offset += length;
                made
            }).collect();
            let chunks = chunks_of(parts.clone(), 8192);
            let mut moved = vec![0; lengths.len()];
            for chunk in &chunks {
                prop_assert!(chunk.length <= 8192 && !chunk.parts.is_empty());
                prop_assert_eq!(chunk.length, chunk.parts.iter().map(|part| part.length).sum::<u64>());
                let mut next = chunk.target();
                for found in &chunk.parts {
                    prop_assert_eq!(found.target, next);
                    next = next.plus(found.length);
                    let whole = parts[found.tensor];
                    prop_assert_eq!(found.start, moved[found.tensor]);
                    prop_assert_eq!(found.source, whole.source.plus(found.start));
                    prop_assert_eq!(found.target, whole.target.plus(found.start));
                    prop_assert!(found.start == 0 || found.target.offset % PAGE_BYTES == 0);
                    moved[found.tensor] += found.length;
                }
            }
            prop_assert_eq!(moved, lengths);
        }
    }
}
