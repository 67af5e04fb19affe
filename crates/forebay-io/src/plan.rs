//! The planner: which bytes move how. Pure arithmetic, no system calls.
//!
//! A [`Span`] (file offset, memory address, length) is cut into [`Block`]s, one after another, for
//! a file with a given [`Geometry`]. Each block takes one of four routes:
//!
//! - [`Route::Direct`]: between the drive and the caller's memory; offset, length and address
//!   keep the rules of direct I/O.
//! - [`Route::Staged`]: through an aligned block, because the address breaks the rules or, for a
//!   load, because an end of the span is ragged; a load then moves the window of whole granules
//!   around the wanted bytes.
//! - [`Route::Gds`]: between the drive and a device's memory, whatever the address; whole granules
//!   of the file, so that nobody's bytes are read and written back around a ragged end.
//! - [`Route::Buffered`]: through the page cache, exactly the wanted bytes: whole spans of files
//!   that aren't open for direct I/O, and the ragged ends of a store. A neighbour's bytes are
//!   never rewritten: not by this process, nor behind the back of another one.
//!
//! # Invariants
//!
//! - The blocks of a span cover every byte of it once, in order.
//! - No direct or staged transfer breaks an alignment rule, or is longer than a block.
//! - Memory that the kernel can't reach has no direct block, and none that is longer than a staging
//!   block but for those of [`Route::Gds`].
//! - What is staged of other memory is minimal: nothing but ragged ends of a load if the address is congruent to
//!   the offset, and nothing of a store in that case.

/// What a file asks of a transfer, and how large blocks are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Granule of direct file offsets and lengths in bytes: a power of two, a page or more.
    pub offset_alignment: u64,
    /// Alignment of memory for direct I/O in bytes: a power of two.
    pub memory_alignment: usize,
    /// Most bytes in a direct or buffered block; a multiple of the granule.
    pub block_bytes: usize,
    /// Most bytes in a staged block; a multiple of the granule. If it doesn't hold
    /// [`STAGED_GRANULES_MIN`] of them, everything is buffered.
    pub staged_block_bytes: usize,
    /// The file is open for direct I/O. If not, everything is buffered.
    pub direct: bool,
    /// Who can reach the memory.
    pub reach: Reach,
}

/// Who can reach the memory of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The kernel.
    Kernel,
    /// Copies only, as with a device: every block goes through a staging block, buffered ones too,
    /// and none is longer than that.
    Copies,
    /// The same, but that the whole granules of the file go by GPUDirect Storage.
    Gds,
}

/// Granules that a staging block must hold for a file to be planned for direct I/O.
pub const STAGED_GRANULES_MIN: usize = 2;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the file to memory.
    Load,
    /// From memory to the file.
    Store,
}

/// A run of bytes in a file and in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// File offset of the first byte.
    pub offset: u64,
    /// Memory address of the first byte.
    pub address: usize,
    /// Bytes.
    pub length: usize,
}

/// How a block moves. See the [module documentation](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// Straight between the drive and the caller's memory.
    Direct,
    /// Through an aligned staging block.
    Staged,
    /// Between the drive and a device's memory, by GPUDirect Storage.
    Gds,
    /// Through the page cache.
    Buffered,
}

/// One block of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// How it moves.
    pub route: Route,
    /// Where its wanted bytes start within the span.
    pub position: usize,
    /// Wanted bytes.
    pub length: usize,
    /// File offset where the transfer starts; before the wanted bytes only for a staged load.
    pub window_offset: u64,
    /// Bytes that the transfer moves; more than `length` only for a staged load. The end of the
    /// file may cut it short behind the wanted bytes.
    pub window_length: usize,
}

impl Block {
    /// Bytes of the window that come before the wanted ones.
    pub fn skip(&self, span: &Span) -> usize {
        let wanted = span.offset + self.position as u64;
        usize::try_from(wanted - self.window_offset).unwrap_or(usize::MAX)
    }

    /// The same wanted bytes, moved through the page cache.
    #[must_use]
    pub fn buffered(&self, span: &Span) -> Self {
        Self {
            route: Route::Buffered,
            window_offset: span.offset + self.position as u64,
            window_length: self.length,
            ..*self
        }
    }
}

impl Span {
    /// The block that starts at `position`, a byte index into the span; `None` at its end.
    ///
    /// The whole plan is the blocks found by starting at 0 and going on behind each block, so a
    /// plan of any size takes no memory.
    pub fn block_at(
        &self,
        geometry: &Geometry,
        direction: Direction,
        position: usize,
    ) -> Option<Block> {
        let left = self.length.checked_sub(position).filter(|left| *left > 0)?;
        let start = self.offset + position as u64;
        let end = start + left as u64;
        // Without room for two granules in a staging block, a ragged load would never get on.
        let stageable = geometry.staged_block_bytes as u64
            >= STAGED_GRANULES_MIN as u64 * geometry.offset_alignment;
        if !geometry.direct || !stageable {
            let most = if geometry.reach == Reach::Kernel {
                geometry.block_bytes
            } else {
                geometry.block_bytes.min(geometry.staged_block_bytes)
            };
            return Some(exact(Route::Buffered, position, start, left.min(most)));
        }
        let granule = geometry.offset_alignment;
        let core_start = self.offset.next_multiple_of(granule);
        let core_end = end - end % granule;
        let in_core = start >= core_start && start < core_end;
        if in_core && let Some(route) = self.core_route(geometry, core_start) {
            let length = bounded(core_end - start, geometry.block_bytes);
            return Some(exact(route, position, start, length));
        }
        match direction {
            Direction::Store if in_core => {
                let length = bounded(core_end - start, geometry.staged_block_bytes);
                Some(exact(Route::Staged, position, start, length))
            }
            Direction::Store => {
                let edge_end = if start < core_start { core_start.min(end) } else { end };
                // An edge is shorter than a granule, or two where the span has no whole one.
                Some(exact(Route::Buffered, position, start, bounded(edge_end - start, left)))
            }
            Direction::Load => {
                // The window of a ragged head ends where a core starts that isn't staged.
                let head_alone = start < core_start
                    && core_start < core_end
                    && self.core_route(geometry, core_start).is_some();
                let stop = if head_alone { core_start } else { end };
                Some(window(geometry, position, start, stop))
            }
        }
    }

    /// How whole granules move where they needn't be staged: the kernel wants memory behind the
    /// first of them aligned.
    fn core_route(&self, geometry: &Geometry, core_start: u64) -> Option<Route> {
        let head = core_start - self.offset;
        let address = (self.address as u64).wrapping_add(head);
        let aligned = address.is_multiple_of(geometry.memory_alignment as u64);
        match geometry.reach {
            Reach::Kernel => aligned.then_some(Route::Direct),
            Reach::Copies => None,
            Reach::Gds => Some(Route::Gds),
        }
    }
}

fn bounded(length: u64, limit: usize) -> usize {
    usize::try_from(length).map_or(limit, |length| length.min(limit))
}

fn exact(route: Route, position: usize, offset: u64, length: usize) -> Block {
    Block { route, position, length, window_offset: offset, window_length: length }
}

/// A staged load of `start..stop`, as much of it as one staging block takes in whole granules.
fn window(geometry: &Geometry, position: usize, start: u64, stop: u64) -> Block {
    let granule = geometry.offset_alignment;
    let window_offset = start - start % granule;
    let window_length =
        bounded(stop.next_multiple_of(granule) - window_offset, geometry.staged_block_bytes);
    let wanted_end = stop.min(window_offset + window_length as u64);
    Block {
        route: Route::Staged,
        position,
        length: bounded(wanted_end - start, window_length),
        window_offset,
        window_length,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn geometries() -> impl Strategy<Value = Geometry> {
        let reach = prop_oneof![Just(Reach::Kernel), Just(Reach::Copies), Just(Reach::Gds)];
        (12u32..17, 0u32..13, 1usize..40, 1usize..20, any::<bool>(), reach).prop_map(
            |(granule, memory, block, staged, direct, reach)| Geometry {
                offset_alignment: 1 << granule,
                memory_alignment: 1 << memory,
                block_bytes: block << granule,
                staged_block_bytes: staged << granule,
                direct,
                reach,
            },
        )
    }

    fn spans() -> impl Strategy<Value = Span> {
        let offsets = prop_oneof![0u64..200_000, (0u64..64).prop_map(|page| page * 4096)];
        let lengths = prop_oneof![0usize..3_000_000, 0usize..9000];
        let addresses = prop_oneof![
            Just(1usize << 30),
            (0usize..65536).prop_map(|low| (1 << 30) + low),
            (0usize..128).prop_map(|low| (1 << 30) + low * 512),
        ];
        (offsets, addresses, lengths).prop_map(|(offset, address, length)| Span {
            offset,
            address,
            length,
        })
    }

    fn plan(span: &Span, geometry: &Geometry, direction: Direction) -> Vec<Block> {
        let mut blocks = Vec::new();
        let mut position = 0;
        while let Some(block) = span.block_at(geometry, direction, position) {
            assert!(block.length > 0, "an empty block never ends");
            position += block.length;
            blocks.push(block);
        }
        blocks
    }

    fn check_block(span: &Span, geometry: &Geometry, direction: Direction, block: &Block) {
        let granule = geometry.offset_alignment;
        let wanted = span.offset + block.position as u64;
        let wanted_end = wanted + block.length as u64;
        let window_end = block.window_offset + block.window_length as u64;
        assert!(block.window_offset <= wanted && wanted_end <= window_end);
        assert_eq!(block.skip(span) as u64, wanted - block.window_offset);
        let kernel = geometry.reach == Reach::Kernel;
        assert!(kernel || block.route != Route::Direct);
        assert!(geometry.reach == Reach::Gds || block.route != Route::Gds);
        let copied = !kernel && block.route != Route::Gds;
        assert!(!copied || block.window_length <= geometry.staged_block_bytes);
        if block.route == Route::Buffered {
            assert_eq!((block.window_offset, block.window_length), (wanted, block.length));
            return;
        }
        assert!(geometry.direct);
        assert_eq!(block.window_offset % granule, 0);
        assert_eq!(block.window_length as u64 % granule, 0);
        match block.route {
            Route::Direct => {
                assert_eq!(block.window_length, block.length);
                assert!(block.length <= geometry.block_bytes);
                assert_eq!((span.address + block.position) % geometry.memory_alignment, 0);
            }
            Route::Gds => {
                assert_eq!(block.window_length, block.length);
                assert!(block.length <= geometry.block_bytes);
            }
            _ => assert!(block.window_length <= geometry.staged_block_bytes),
        }
        if direction == Direction::Store {
            assert_eq!(block.window_length, block.length, "a store touches no other byte");
        }
        // A window never reaches further than the granules that hold wanted bytes.
        assert!(wanted - block.window_offset < granule && window_end - wanted_end < granule);
    }

    /// The fewest bytes that must be staged, from the definition and not from the planner.
    fn fewest_staged(span: &Span, geometry: &Geometry, direction: Direction) -> usize {
        let granule = geometry.offset_alignment;
        let end = span.offset + span.length as u64;
        let mut staged = 0;
        let mut offset = span.offset;
        while offset < end {
            let granule_start = offset - offset % granule;
            let stop = end.min(granule_start + granule);
            let whole = offset == granule_start && stop == granule_start + granule;
            let address = span.address as u64 + (offset - span.offset);
            let aligned = match geometry.reach {
                Reach::Kernel => address.is_multiple_of(geometry.memory_alignment as u64),
                Reach::Copies => false,
                Reach::Gds => true,
            };
            let staged_here = match direction {
                Direction::Load => !(whole && aligned),
                Direction::Store => whole && !aligned,
            };
            if staged_here {
                staged += usize::try_from(stop - offset).unwrap();
            }
            offset = stop;
        }
        let stageable = geometry.staged_block_bytes as u64 >= 2 * granule;
        if geometry.direct && stageable { staged } else { 0 }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn blocks_cover_every_byte_once_and_keep_every_rule(
            span in spans(),
            geometry in geometries(),
            load in any::<bool>(),
        ) {
            let direction = if load { Direction::Load } else { Direction::Store };
            let blocks = plan(&span, &geometry, direction);
            let mut position = 0;
            for block in &blocks {
                prop_assert_eq!(block.position, position);
                position += block.length;
                check_block(&span, &geometry, direction, block);
            }
            prop_assert_eq!(position, span.length);
            let staged: usize = blocks
                .iter()
                .filter(|block| block.route == Route::Staged)
                .map(|block| block.length)
                .sum();
            prop_assert_eq!(staged, fewest_staged(&span, &geometry, direction));
        }
    }

    #[test]
    fn an_aligned_span_is_cut_into_full_direct_blocks() {
        let geometry = Geometry {
            offset_alignment: 4096,
            memory_alignment: 512,
            block_bytes: 1 << 20,
            staged_block_bytes: 1 << 20,
            direct: true,
            reach: Reach::Kernel,
        };
        let span = Span { offset: 0, address: 1 << 21, length: (3 << 20) + 4096 };
        for direction in [Direction::Load, Direction::Store] {
            let blocks = plan(&span, &geometry, direction);
            assert!(blocks.iter().all(|block| block.route == Route::Direct));
            let lengths: Vec<_> = blocks.iter().map(|block| block.length).collect();
            assert_eq!(lengths, [1 << 20, 1 << 20, 1 << 20, 4096]);
        }
    }
}
