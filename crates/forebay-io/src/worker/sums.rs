//! Checksums of blocks, while their bytes are in the host's memory and hot.
#![expect(unsafe_code, reason = "reads the bytes of a block")]

use super::flight::Flight;
use crate::operation::Work;
use crate::plan::Direction;

/// Adds the bytes of a block that has moved to its operation's checksums, if those are wanted.
pub(super) fn add(flight: &Flight) {
    let plan = &flight.unit.operation.plan;
    let (Some(sums), Work::Move { part, span, block, .. }) = (&plan.sums, &flight.unit.work) else {
        return;
    };
    let first = match flight.staging {
        // What a load has staged is the window around the wanted bytes.
        Some((_, address)) if plan.direction == Direction::Load => {
            address.wrapping_add(block.skip(span))
        }
        Some((_, address)) => address,
        None => {
            std::ptr::with_exposed_provenance_mut::<u8>(span.address).wrapping_add(block.position)
        }
    };
    // SAFETY: a staging block is this flight's, and the drive and the device are done with it, or
    // only read it; a device's memory always has one. Else it is the caller's memory, which is valid
    // until the operation is done. The bytes were read from the file, or are written to it.
    let bytes = unsafe { std::slice::from_raw_parts(first, block.length) };
    sums.add(*part, block.position, bytes);
}
