//! The parts of a request as they are planned, and the checksums of those that were asked for.
//!
//! Parts that follow each other in the request, in their file and in memory are planned as one, so
//! that many short ones take few blocks; on a device, only within one allocation. Each part still has a checksum of its own, put together
//! from those of the pieces that blocks hold of it, whatever order they pass in. Neighbours are
//! joined at once, so what is kept is a few numbers for each part and each block under way.

use std::sync::{Mutex, PoisonError};

use super::FilePart;
use crate::checksum::{crc32c, crc32c_combine};
use crate::device::allocation_at;
use crate::plan::Span;
use crate::request::{Part, Request};

/// Where a part of the request lies in the parts of the plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Index into [`Plan::parts`](super::Plan::parts).
    planned: usize,
    /// Its first byte there.
    start: usize,
    /// The byte behind its last one.
    end: usize,
}

/// The parts to plan, those joined that follow each other, and where what was asked for lies there.
pub(crate) fn join(request: &Request) -> (Vec<FilePart>, Vec<Place>) {
    let mut planned: Vec<FilePart> = Vec::with_capacity(request.parts.len());
    let mut places = Vec::with_capacity(request.parts.len());
    for part in &request.parts {
        let start = match planned.last_mut() {
            Some(last) if follows(last, part) && in_one_allocation(request, last, part) => {
                last.span.length += part.length;
                last.span.length - part.length
            }
            _ => {
                planned.push(planned_alone(part));
                0
            }
        };
        places.push(Place { planned: planned.len() - 1, start, end: start + part.length });
    }
    (planned, places)
}

fn planned_alone(part: &Part) -> FilePart {
    let address = part.address.expose_provenance();
    let span = Span { offset: part.offset, address, length: part.length };
    FilePart { file: part.file, span, device: part.device }
}

fn follows(last: &FilePart, part: &Part) -> bool {
    let Span { offset, address, length } = last.span;
    (last.file, last.device) == (part.file, part.device)
        && offset + length as u64 == part.offset
        && address + length == part.address.addr()
}

/// Whether the driver can move the two at once: allocations of a device that happen to be neighbours
/// stay two.
fn in_one_allocation(request: &Request, last: &FilePart, part: &Part) -> bool {
    let Some(access) = part.device.and_then(|device| request.devices.get(device)) else {
        return true;
    };
    let number = |address| allocation_at(access.context.cuda(), address).ok();
    let empty = last.span.length == 0 || part.length == 0;
    // Asked of the last byte, as what was joined before is in one.
    let end = last.span.address + last.span.length;
    empty || number(end - 1).is_some_and(|one| number(part.address.addr()) == Some(one))
}

/// A run of bytes of a part, and its checksum.
#[derive(Clone, Copy, Debug)]
struct Run {
    start: usize,
    end: usize,
    checksum: u32,
}

impl Run {
    /// This run, and the one that follows it.
    fn with(self, next: Self) -> Self {
        let checksum = crc32c_combine(self.checksum, next.checksum, (next.end - next.start) as u64);
        Self { start: self.start, end: next.end, checksum }
    }
}

/// The checksums of an operation's parts. See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct Sums {
    /// In the order of the request, which is that of the plan.
    places: Vec<Place>,
    /// What has passed of each part, by where it begins.
    runs: Mutex<Vec<Vec<Run>>>,
}

impl Sums {
    pub(crate) fn new(places: Vec<Place>) -> Self {
        let runs = Mutex::new(vec![Vec::new(); places.len()]);
        Self { places, runs }
    }

    /// Takes note of bytes that have passed: those at `position` of a part of the plan.
    pub(crate) fn add(&self, planned: usize, position: usize, bytes: &[u8]) {
        let end = position + bytes.len();
        let first =
            self.places.partition_point(|place| (place.planned, place.end) <= (planned, position));
        let here = |place: &&Place| place.planned == planned && place.start < end;
        let mut fresh = Vec::new();
        for place in self.places[first..].iter().take_while(here) {
            let (from, to) = (place.start.max(position), place.end.min(end));
            let checksum = crc32c(&bytes[from - position..to - position]);
            fresh.push(Run { start: from - place.start, end: to - place.start, checksum });
        }
        let mut runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        for (runs, run) in runs[first..].iter_mut().zip(fresh) {
            insert(runs, run);
        }
    }

    /// The checksum of each part, once all bytes have passed.
    pub(crate) fn all(&self) -> Vec<u32> {
        let runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        runs.iter()
            .map(|runs| runs.first().map_or_else(|| crc32c(&[]), |run| run.checksum))
            .collect()
    }
}

/// Puts a run among those of its part, joined with its neighbours.
fn insert(runs: &mut Vec<Run>, mut run: Run) {
    let mut index = runs.partition_point(|other| other.end <= run.start);
    if let Some(before) = index.checked_sub(1).map(|before| runs[before])
        && before.end == run.start
    {
        index -= 1;
        runs.remove(index);
        run = before.with(run);
    }
    if let Some(after) = runs.get(index).copied()
        && after.start == run.end
    {
        runs[index] = run.with(after);
    } else {
        runs.insert(index, run);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::files::Target;
    use crate::plan::Direction;

    /// A request of parts that begin `gaps` bytes behind the end of the one before.
    fn request(lengths: &[(usize, usize)]) -> Request {
        let address = std::ptr::without_provenance_mut(1 << 20);
        let mut request = Request::new(Direction::Load, Target::Path("file".into()), 0, address, 0);
        request.parts.clear();
        let mut at = 0;
        for &(gap, length) in lengths {
            at += gap;
            let part = Part {
                file: 0,
                offset: at as u64,
                address: address.wrapping_add(at),
                length,
                device: None,
            };
            request.parts.push(part);
            at += length;
        }
        request
    }

    proptest! {
        #[test]
        fn parts_have_their_checksums_whatever_the_blocks_and_their_order(
            lengths in prop::collection::vec((prop_oneof![Just(0_usize), 1..9_usize], 0..300_usize), 0..20),
            block in 1..200_usize,
            seed: u64,
        ) {
            let request = request(&lengths);
            let (planned, places) = join(&request);
            let sums = Sums::new(places);
            let bytes: Vec<u8> = (0..10_000_u32).map(|index| (index * 31 % 251) as u8).collect();
            let mut blocks = Vec::new();
            for (index, part) in planned.iter().enumerate() {
                for start in (0..part.span.length).step_by(block) {
                    blocks.push((index, start, part.span.length.min(start + block)));
                }
            }
            // A different order each time, without a crate for it.
            blocks.sort_by_key(|&(index, start, _)| {
                (index as u64 * 1000 + start as u64 + 1).wrapping_mul(seed | 1)
            });
            for (index, start, end) in blocks {
                let offset = usize::try_from(planned[index].span.offset).unwrap();
                sums.add(index, start, &bytes[offset + start..offset + end]);
            }
            let wanted: Vec<u32> = request
                .parts
                .iter()
                .map(|part| crc32c(&bytes[usize::try_from(part.offset).unwrap()..][..part.length]))
                .collect();
            prop_assert_eq!(sums.all(), wanted);
            let runs = sums.runs.into_inner().unwrap();
            prop_assert!(runs.iter().all(|runs| runs.len() <= 1), "neighbours are joined");
        }
    }

    #[test]
    fn parts_are_joined_only_where_file_memory_and_device_go_on() {
        let together = request(&[(0, 10), (0, 0), (0, 5)]);
        let (planned, _) = join(&together);
        assert_eq!(planned.len(), 1);
        assert_eq!(planned[0].span.length, 15);
        assert_eq!(join(&request(&[(0, 10), (1, 5)])).0.len(), 2);
        let changes: [fn(&mut Part); 4] = [
            |part| part.file = 1,
            |part| part.device = Some(0),
            |part| part.offset += 1,
            |part| part.address = part.address.wrapping_add(1),
        ];
        for change in changes {
            let mut apart = request(&[(0, 10), (0, 5)]);
            change(&mut apart.parts[1]);
            assert_eq!(join(&apart).0.len(), 2);
        }
    }
}
