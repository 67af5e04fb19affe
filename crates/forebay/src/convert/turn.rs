//! Elements that are the other way around: bytes within one, and the order of all.

use super::chunk::Place;

/// A tensor whose first index runs fastest (Fortran order).
#[derive(Clone, Debug)]
pub(super) struct Turned {
    pub(super) tensor: usize,
    pub(super) source: Place,
    pub(super) target: Place,
    pub(super) bytes: u64,
    pub(super) shape: Vec<u64>,
    pub(super) swapped_bytes: usize,
}

/// Turns each `width` bytes around; a width of 1 changes nothing.
pub(super) fn swap(bytes: &mut [u8], width: usize) {
    if width > 1 {
        bytes.chunks_exact_mut(width).for_each(<[u8]>::reverse);
    }
}

/// Puts elements whose first index runs fastest so that the last one does. Both have the bytes of
/// the shape, in which no extent is 0.
pub(super) fn turn(found: &[u8], shape: &[usize], wanted: &mut [u8]) {
    let count: usize = shape.iter().product();
    let width = found.len().checked_div(count).unwrap_or(0);
    if width == 0 {
        return;
    }
    let mut steps = Vec::with_capacity(shape.len());
    let mut step = width;
    for extent in shape {
        steps.push(step);
        step *= extent;
    }
    let mut index = vec![0; shape.len()];
    let mut from = 0;
    for element in wanted.chunks_exact_mut(width) {
        element.copy_from_slice(&found[from..from + width]);
        // The last index is counted up first.
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            from += steps[axis];
            if index[axis] < shape[axis] {
                break;
            }
            from -= steps[axis] * shape[axis];
            index[axis] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_elements_are_turned_around() {
        let mut bytes = *b"abcdefgh";
        swap(&mut bytes, 1);
        assert_eq!(&bytes, b"abcdefgh");
        swap(&mut bytes, 4);
        assert_eq!(&bytes, b"dcbahgfe");
    }

    #[test]
    fn every_element_comes_to_its_index() {
        let shape = [2, 3, 4];
        let name = |i: usize, j: usize, k: usize| u16::try_from(i * 100 + j * 10 + k).unwrap();
        let mut fortran = Vec::new();
        let mut c = Vec::new();
        for k in 0..4 {
            for j in 0..3 {
                (0..2).for_each(|i| fortran.extend(name(i, j, k).to_le_bytes()));
            }
        }
        for i in 0..2 {
            for j in 0..3 {
                (0..4).for_each(|k| c.extend(name(i, j, k).to_le_bytes()));
            }
        }
        let mut turned = vec![0; c.len()];
        turn(&fortran, &shape, &mut turned);
        assert_eq!(turned, c);
    }
}
