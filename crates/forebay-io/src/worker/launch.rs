//! From a unit of work to a transfer that an engine can take: where it goes, through which memory,
//! and what is registered for it.

use std::time::Instant;

use super::flight::{self, Flight};
use super::{Worker, copy};
use crate::engine::{Command, Transfer};
use crate::error::Result;
use crate::operation::{Unit, Work};
use crate::plan::{Direction, Route};
use crate::syscalls::{cached_bytes, page_bytes};

/// Smallest operation, in bytes, whose file is worth two calls to register it.
const BIND_FILE_BYTES_MIN: u64 = 16 << 20;

impl Worker {
    /// Turns a unit into a transfer that is ready for the engine.
    pub(super) fn start(&mut self, unit: Unit) {
        let at_once = match &unit.work {
            Work::Trim { file } => Some(file.trim()),
            Work::Begin(commit) => Some(commit.begin()),
            Work::Commit(commit) => Some(commit.finish()),
            _ => None,
        };
        if let Some(done) = at_once {
            if let Some(operation) = unit.settle(done.map(|()| 0)) {
                self.scheduler.push(operation, 0);
            }
            return;
        }
        let token = self.free_tokens.pop().unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() - 1
        });
        self.prefetch_in_flight += usize::from(unit.is_prefetch());
        let mut flight = Flight {
            unit,
            transfer: flight::call(token as u64, -1),
            staging: None,
            bound_file: None,
            cached: false,
            refused: None,
            moved: 0,
            rest: None,
            delivered: 0,
            attempts: 0,
            started: Instant::now(),
        };
        self.prefer_page_cache(&mut flight);
        match self.stage(&mut flight) {
            Ok(true) => {}
            Ok(false) => {
                self.prefetch_in_flight -= usize::from(flight.unit.is_prefetch());
                self.free_tokens.push(token);
                self.parked.push_back(flight.unit);
                return;
            }
            Err(error) if flight.unit.operation.plan.require_direct || flight.is_copied() => {
                return self.end(token, flight, Err(error));
            }
            Err(error) => {
                self.counters.fallback(&format!("no memory for staging: {error}"));
                self.reroute(&mut flight, None);
            }
        }
        flight.cut();
        self.set_off(token, flight);
    }

    /// Starts what moves a block, once it has its staging block if it needs one.
    pub(super) fn set_off(&mut self, token: usize, flight: Flight) {
        if flight.is_copied() && flight.unit.operation.plan.direction == Direction::Store {
            return self.copy(token, flight);
        }
        self.launch(token, flight);
    }

    /// Makes the transfer of what is left of a block ready for the engine.
    pub(super) fn launch(&mut self, token: usize, mut flight: Flight) {
        self.aim(&mut flight, token);
        self.ready.push(flight.transfer);
        self.flights[token] = Some(flight);
    }

    /// A block whose pages are all in the page cache already is loaded from there.
    fn prefer_page_cache(&self, flight: &mut Flight) {
        let Work::Move { file, span, block, maybe_cached: true, .. } = &mut flight.unit.work else {
            return;
        };
        if !self.uses_page_cache || matches!(block.route, Route::Buffered | Route::Gds) {
            return;
        }
        let page = page_bytes();
        let start = span.offset + block.position as u64;
        let end = start + block.length as u64;
        let wanted = end.next_multiple_of(page) - (start - start % page);
        let cached = cached_bytes(file.buffered(), start, block.length as u64);
        if cached.is_some_and(|cached| cached >= wanted) {
            *block = block.buffered(span);
            flight.cached = true;
        }
    }

    /// Finds a staging block for a staged one and, for a store, fills it. `false`: none is free.
    fn stage(&mut self, flight: &mut Flight) -> Result<bool> {
        let Work::Move { span, block, .. } = &flight.unit.work else {
            return Ok(true);
        };
        if !flight.unit.is_staged() {
            return Ok(true);
        }
        let Some((index, address)) = self.staging.of(flight.is_copied()).take()? else {
            return Ok(false);
        };
        if flight.unit.operation.plan.direction == Direction::Store && !flight.is_copied() {
            let from = std::ptr::with_exposed_provenance::<u8>(span.address);
            copy(from.wrapping_add(block.position), address, block.length);
        }
        flight.staging = Some((index, address));
        Ok(true)
    }

    /// Points the transfer at what is left of the block, registered where that pays.
    fn aim(&mut self, flight: &mut Flight, token: usize) {
        flight.aim(token as u64);
        let Some((file, _, block)) = flight.block() else {
            return;
        };
        if block.route == Route::Gds {
            return;
        }
        let direct = block.route != Route::Buffered;
        let operation = &flight.unit.operation;
        // A ragged end of a long store leaves no page behind; short ones may soon be written next
        // to, and would then have to read the page back.
        flight.transfer.uncached = !direct
            && file.is_direct()
            && flight.transfer.command == Command::Write
            && operation.plan.parts.len() == 1
            && operation.bytes_total() >= operation.plan.block_bytes as u64
            && file.mount.takes_uncached();
        let descriptor = flight.transfer.descriptor;
        if direct {
            let Transfer { address, length, .. } = flight.transfer;
            let engine = self.engine.as_mut();
            flight.transfer.buffer_slot = self.bindings.buffer_slot(engine, address, length);
            if flight.bound_file.is_none()
                && flight.unit.operation.bytes_total() >= BIND_FILE_BYTES_MIN
            {
                let slot = self.bindings.file_slot(engine, descriptor);
                flight.bound_file = Some((descriptor, slot));
            }
            flight.transfer.file_slot = flight.bound_file.and_then(|(_, slot)| slot);
        }
    }
}
