//! The planner, over any span and any geometry that a file can have.
//!
//! The invariants are those of `forebay_io::plan`: the blocks cover every byte once and in order,
//! no block breaks a rule of direct I/O or touches a byte that isn't its own, and what is staged
//! is minimal. They are checked from the definitions, not by the planner's own arithmetic.

#![no_main]

use arbitrary::Arbitrary;
use forebay_io::plan::{Block, Direction, Geometry, Reach, Route, Span};
use libfuzzer_sys::fuzz_target;

/// Most blocks of one plan that are looked at: a 64-bit span has more than there is time for.
const BLOCKS_MAX: usize = 4096;

#[derive(Arbitrary, Debug)]
struct Input {
    offset: u64,
    address: u64,
    length: u64,
    granule_shift: u8,
    memory_shift: u8,
    block_granules: u16,
    staged_granules: u8,
    is_direct: bool,
    reach: u8,
    is_load: bool,
}

impl Input {
    /// Bounds as the files and the options have them: granules of 4 KiB to 64 KiB, memory
    /// alignment up to a page, at least two granules in a staged block, offsets and addresses
    /// whose ends fit their types.
    fn span_and_geometry(&self) -> Option<(Span, Geometry)> {
        let granule_shift = 12 + u32::from(self.granule_shift % 5);
        let length = usize::try_from(self.length % (1 << 33)).ok()?;
        let span = Span {
            offset: self.offset % (1 << 62),
            address: usize::try_from(self.address % (1 << 47)).ok()?,
            length,
        };
        let geometry = Geometry {
            offset_alignment: 1 << granule_shift,
            memory_alignment: 1 << (self.memory_shift % 13),
            block_bytes: (usize::from(self.block_granules) + 1) << granule_shift,
            staged_block_bytes: (usize::from(self.staged_granules) + 2) << granule_shift,
            direct: self.is_direct,
            reach: [Reach::Kernel, Reach::Copies, Reach::Gds][usize::from(self.reach % 3)],
        };
        Some((span, geometry))
    }
}

fuzz_target!(|input: Input| {
    let Some((span, geometry)) = input.span_and_geometry() else { return };
    let direction = if input.is_load { Direction::Load } else { Direction::Store };
    let mut position = 0;
    let mut staged_bytes = 0;
    for _ in 0..BLOCKS_MAX {
        let Some(block) = span.block_at(&geometry, direction, position) else { break };
        assert!(block.length > 0, "an empty block never ends");
        assert_eq!(block.position, position, "blocks come in order");
        check(&span, &geometry, direction, &block);
        if block.route == Route::Staged {
            staged_bytes += block.length;
        }
        position += block.length;
    }
    assert!(position <= span.length, "no byte beyond the span");
    let at_end = span.block_at(&geometry, direction, span.length);
    assert!(at_end.is_none(), "nothing is left at the end");
    assert_eq!(staged_bytes, fewest_staged(&span, &geometry, direction, position));
});

/// The rules for one block.
fn check(span: &Span, geometry: &Geometry, direction: Direction, block: &Block) {
    let granule = geometry.offset_alignment;
    let wanted = span.offset + block.position as u64;
    let wanted_end = wanted + block.length as u64;
    let window_end = block.window_offset + block.window_length as u64;
    assert!(block.window_offset <= wanted && wanted_end <= window_end);
    assert_eq!(block.skip(span) as u64, wanted - block.window_offset);
    let kernel = geometry.reach == Reach::Kernel;
    if block.route == Route::Buffered {
        assert_eq!((block.window_offset, block.window_length), (wanted, block.length));
        assert!(geometry.direct || block.length <= geometry.block_bytes);
        assert!(kernel || block.length <= geometry.staged_block_bytes);
        return;
    }
    assert!(geometry.direct, "only buffered blocks where direct I/O can't be had");
    assert!(block.window_offset.is_multiple_of(granule));
    assert!((block.window_length as u64).is_multiple_of(granule));
    if block.route == Route::Staged {
        assert!(block.window_length <= geometry.staged_block_bytes);
    } else {
        assert_eq!(block.window_length, block.length);
        assert!(block.length <= geometry.block_bytes);
        assert_eq!(block.route == Route::Gds, geometry.reach == Reach::Gds);
        let aligned = (span.address + block.position).is_multiple_of(geometry.memory_alignment);
        assert!(block.route == Route::Gds || (kernel && aligned));
    }
    if direction == Direction::Store {
        assert_eq!(block.window_length, block.length, "a store touches no other byte");
    }
    let spare = (wanted - block.window_offset).max(window_end - wanted_end);
    assert!(spare < granule, "a window ends with the granules that hold wanted bytes");
}

/// Of the first `planned` bytes of the span, those that can move no other way: for a load, ends
/// that don't fill a granule and everything at addresses that break the rules; for a store, only
/// the latter, and only whole granules (its ends go through the page cache).
fn fewest_staged(span: &Span, geometry: &Geometry, direction: Direction, planned: usize) -> usize {
    if !geometry.direct || span.length == 0 {
        return 0;
    }
    let granule = geometry.offset_alignment;
    let end = span.offset + span.length as u64;
    let core_start = span.offset.next_multiple_of(granule).min(end);
    let core_end = (end - end % granule).max(core_start);
    let core_address = span.address as u64 + (core_start - span.offset);
    let is_aligned = match geometry.reach {
        Reach::Kernel => core_address.is_multiple_of(geometry.memory_alignment as u64),
        Reach::Copies => false,
        Reach::Gds => true,
    };
    let planned_end = span.offset + planned as u64;
    let core_bytes = planned_end.clamp(core_start, core_end) - core_start;
    let ragged_bytes = planned as u64 - core_bytes;
    let staged = match direction {
        Direction::Load => ragged_bytes + if is_aligned { 0 } else { core_bytes },
        Direction::Store if is_aligned => 0,
        Direction::Store => core_bytes,
    };
    usize::try_from(staged).expect("no more than the span")
}
