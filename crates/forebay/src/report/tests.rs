//! Every level of every finding, from made-up facts.
use super::*;
#[test]
fn x() {
    let _ = Level::Ok;
}
