//! The arithmetic of stripes: which byte of the logical file is where.
//!
//! The logical file is cut into stripes of equal length, the last one perhaps shorter. Stripe `k`
//! is in member `k mod n`, behind the member's earlier stripes, so a member has no gaps:
//!
//! ```text
//! logical   0 1 2 3 4 5 6        n = 3
//! member 0  0     3     6
//! member 1    1     4
//! member 2      2     5
//! ```
//!
//! # Invariants
//!
//! - Every logical byte is at exactly one place, and every byte of a member is one logical byte.
//! - The first bytes of a logical file are where they are whatever its size: growing it moves
//!   nothing.

use forebay_io::{Error, ErrorKind, Result};

/// What stripe sizes are multiples of: the granule of direct I/O, so that stripes stay direct.
pub const STRIPE_GRANULE_BYTES: u64 = 4096;
/// Largest stripe: beyond it, a file of several GiB would leave drives idle.
pub const STRIPE_BYTES_MAX: u64 = 1 << 30;
/// Most directories that a file can be striped over.
pub const MEMBERS_MAX: usize = 64;

/// How a logical file is cut up: stripe `k` is in member `k mod n`, behind its earlier stripes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    stripe_bytes: u64,
    member_count: usize,
}

/// A run of bytes that lies in one piece in one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which member.
    pub member: usize,
    /// Offset there, in bytes.
    pub offset: u64,
    /// Bytes of the run that was cut up which come before this piece.
    pub position: u64,
    /// Bytes.
    pub length: u64,
}

impl Layout {
    /// Stripes of `stripe_bytes`, over `member_count` members.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] for a stripe size that is no multiple of 4096 or out of bounds,
    /// and for no members or more than [`MEMBERS_MAX`].
    pub fn new(stripe_bytes: u64, member_count: usize) -> Result<Self> {
        let invalid = |text: String| Err(Error::new(ErrorKind::InvalidInput, text));
        if stripe_bytes == 0
            || stripe_bytes > STRIPE_BYTES_MAX
            || !stripe_bytes.is_multiple_of(STRIPE_GRANULE_BYTES)
        {
            return invalid(format!(
                "the stripe size is {stripe_bytes}: it must be a multiple of \
                 {STRIPE_GRANULE_BYTES}, from {STRIPE_GRANULE_BYTES} to {STRIPE_BYTES_MAX} bytes"
            ));
        }
        if !(1..=MEMBERS_MAX).contains(&member_count) {
            return invalid(format!(
                "{member_count} directories to stripe over: give 1 to {MEMBERS_MAX}"
            ));
        }
        Ok(Self { stripe_bytes, member_count })
    }

    /// Bytes of a stripe.
    pub fn stripe_bytes(&self) -> u64 {
        self.stripe_bytes
    }

    /// How many members there are.
    pub fn member_count(&self) -> usize {
        self.member_count
    }

    /// The member that has a logical byte, and the byte's offset there.
    pub fn locate(&self, logical: u64) -> (usize, u64) {
        let (stripe, within) = (logical / self.stripe_bytes, logical % self.stripe_bytes);
        let count = self.member_count as u64;
        let member = usize::try_from(stripe % count).unwrap_or_default();
        (member, stripe / count * self.stripe_bytes + within)
    }

    /// The logical byte at an offset of a member; the inverse of [`Self::locate`]. `None` if there
    /// is no such member, or the number is too large.
    pub fn logical(&self, member: usize, offset: u64) -> Option<u64> {
        let (row, within) = (offset / self.stripe_bytes, offset % self.stripe_bytes);
        let stripe = row.checked_mul(self.member_count as u64)?.checked_add(member as u64)?;
        let logical = stripe.checked_mul(self.stripe_bytes)?.checked_add(within);
        logical.filter(|_| member < self.member_count)
    }

    /// Bytes that a member has when the logical file has `logical_bytes`.
    pub fn member_bytes(&self, member: usize, logical_bytes: u64) -> u64 {
        let (stripes, rest) =
            (logical_bytes / self.stripe_bytes, logical_bytes % self.stripe_bytes);
        let count = self.member_count as u64;
        let (rows, last_member) = (stripes / count, stripes % count);
        rows * self.stripe_bytes
            + match last_member.cmp(&(member as u64)) {
                std::cmp::Ordering::Greater => self.stripe_bytes,
                std::cmp::Ordering::Equal => rest,
                std::cmp::Ordering::Less => 0,
            }
    }

    /// Cuts a run of logical bytes into pieces, in logical order. Over one member a run is one
    /// piece; over several, stripes that follow each other in a member don't in memory.
    pub fn pieces(&self, offset: u64, length: u64) -> impl Iterator<Item = Piece> + use<> {
        let layout = *self;
        let mut position = 0;
        std::iter::from_fn(move || {
            let left = length - position;
            let logical = offset + position;
            let (member, offset) = layout.locate(logical);
            let in_stripe = layout.stripe_bytes - logical % layout.stripe_bytes;
            let length = if layout.member_count == 1 { left } else { left.min(in_stripe) };
            let piece = Piece { member, offset, position, length };
            position += length;
            (left > 0).then_some(piece)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layouts() -> impl Strategy<Value = Layout> {
        (1..=9_u64, 1..=7_usize)
            .prop_map(|(pages, members)| Layout::new(pages * 4096, members).unwrap())
    }

    fn sizes(layout: &Layout) -> impl Strategy<Value = u64> + use<> {
        let row = layout.stripe_bytes() * layout.member_count() as u64;
        prop_oneof![
            0..=3 * row,
            (0..9_u64, -1..=1_i64)
                .prop_map(move |(stripe, more)| { (stripe * 4096).saturating_add_signed(more) }),
            (0..4_u64, -1..=1_i64)
                .prop_map(move |(rows, more)| (rows * row).saturating_add_signed(more)),
        ]
    }

    proptest! {
        #[test]
        fn a_byte_is_at_one_place_and_found_back_from_there(
            layout in layouts(), logical in 0..u64::MAX >> 1,
        ) {
            let (member, offset) = layout.locate(logical);
            prop_assert!(member < layout.member_count());
            prop_assert_eq!(layout.logical(member, offset), Some(logical));
            prop_assert_eq!(layout.logical(layout.member_count(), offset), None);
        }

        #[test]
        fn members_have_no_gaps_and_together_every_byte(
            (layout, size) in layouts().prop_flat_map(|layout| (Just(layout), sizes(&layout))),
        ) {
            let count = layout.member_count();
            let total: u64 = (0..count).map(|member| layout.member_bytes(member, size)).sum();
            prop_assert_eq!(total, size);
            for member in 0..count {
                let bytes = layout.member_bytes(member, size);
                let inside = bytes.checked_sub(1).map(|last| layout.logical(member, last));
                prop_assert!(inside.is_none_or(|last| last.is_some_and(|last| last < size)));
                prop_assert!(layout.logical(member, bytes).is_some_and(|next| next >= size));
            }
        }

        #[test]
        fn pieces_cover_a_run_once_and_in_order_and_lie_where_their_bytes_do(
            (layout, offset, length) in layouts().prop_flat_map(|layout| {
                (Just(layout), sizes(&layout), sizes(&layout))
            }),
        ) {
            let mut position = 0;
            for piece in layout.pieces(offset, length) {
                prop_assert!(piece.length > 0);
                prop_assert_eq!(piece.position, position);
                for byte in [0, piece.length / 2, piece.length - 1] {
                    let place = layout.locate(offset + position + byte);
                    prop_assert_eq!(place, (piece.member, piece.offset + byte));
                }
                position += piece.length;
            }
            prop_assert_eq!(position, length);
        }

        #[test]
        fn neighbouring_pieces_are_never_one(
            (layout, offset, length) in layouts().prop_flat_map(|layout| {
                (Just(layout), sizes(&layout), sizes(&layout))
            }),
        ) {
            let pieces: Vec<_> = layout.pieces(offset, length).collect();
            for pair in pieces.windows(2) {
                let follows = pair[0].offset + pair[0].length == pair[1].offset;
                prop_assert!(pair[0].member != pair[1].member || !follows);
            }
        }
    }

    #[test]
    fn sizes_and_counts_out_of_bounds_are_refused_with_the_bounds() {
        for stripe_bytes in [0, 1, 4095, 4097, STRIPE_BYTES_MAX + 4096, u64::MAX] {
            let error = Layout::new(stripe_bytes, 2).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains(&stripe_bytes.to_string()), "{error}");
        }
        for count in [0, MEMBERS_MAX + 1] {
            assert_eq!(Layout::new(4096, count).unwrap_err().kind(), ErrorKind::InvalidInput);
        }
        assert!(Layout::new(STRIPE_BYTES_MAX, MEMBERS_MAX).is_ok());
    }
}
