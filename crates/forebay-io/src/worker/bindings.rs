//! What a worker has registered with its engine: pieces of pool memory, and files.
//!
//! A piece is registered when a transfer first touches it and stays so until its region is gone;
//! a file only while transfers of it are in flight here.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::{Arc, Weak};

use crate::engine::Engine;
use crate::memory::{self, Piece, RegionListener};
use crate::scheduler::Port;
use crate::stats::Counters;

/// The registrations of one worker. See the [module documentation](self).
#[derive(Debug)]
pub(super) struct Bindings {
    port: Arc<Port>,
    counters: Arc<Counters>,
    takes_buffers: bool,
    takes_files: bool,
    /// Slot of each piece, by region and index; `None` where the engine refused it.
    pieces: HashMap<(u64, u32), Option<u16>>,
    files: HashMap<RawFd, BoundFile>,
}

#[derive(Debug)]
struct BoundFile {
    slot: Option<u32>,
    in_flight: usize,
}

impl Bindings {
    pub(super) fn new(port: Arc<Port>, counters: Arc<Counters>, engine: &dyn Engine) -> Self {
        let capabilities = engine.capabilities();
        Self {
            port,
            counters,
            takes_buffers: capabilities.registered_buffers,
            takes_files: capabilities.registered_files,
            pieces: HashMap::new(),
            files: HashMap::new(),
        }
    }

    /// The slot of the registered memory that holds all of `address..address + length`.
    pub(super) fn buffer_slot(
        &mut self,
        engine: &mut dyn Engine,
        address: *mut u8,
        length: usize,
    ) -> Option<u16> {
        if !self.takes_buffers {
            return None;
        }
        let piece = memory::piece_of(address, length)?;
        let key = (piece.region, piece.index);
        if let Some(slot) = self.pieces.get(&key) {
            return *slot;
        }
        let slot = self.bind(engine, &piece);
        self.pieces.insert(key, slot);
        let port: Arc<dyn RegionListener> = Arc::clone(&self.port) as Arc<dyn RegionListener>;
        let port: Weak<dyn RegionListener> = Arc::downgrade(&port);
        memory::listen(piece.region, port);
        slot
    }

    #[expect(unsafe_code, reason = "registering memory is a promise about its life")]
    fn bind(&self, engine: &mut dyn Engine, piece: &Piece) -> Option<u16> {
        // SAFETY: the piece is mapped, since the operation at hand holds a buffer in its region;
        // when the region goes, `region_gone` has this worker unbind it.
        match unsafe { engine.bind_buffer(piece.address, piece.length) } {
            Ok(slot) => slot,
            Err(error) => {
                self.counters.fallback(&format!("memory is not registered: {error}"));
                None
            }
        }
    }

    /// Ends the registration of regions that are gone.
    pub(super) fn drop_gone_regions(&mut self, engine: &mut dyn Engine) {
        let gone = std::mem::take(
            &mut *self.port.regions_gone.lock().unwrap_or_else(std::sync::PoisonError::into_inner),
        );
        for region in gone {
            self.pieces.retain(|(of, _), slot| {
                if let (true, Some(slot)) = (*of == region, *slot) {
                    engine.unbind_buffer(slot);
                }
                *of != region
            });
        }
    }

    /// The slot of a file that a transfer is about to use; [`Self::release_file`] follows it.
    pub(super) fn file_slot(&mut self, engine: &mut dyn Engine, file: RawFd) -> Option<u32> {
        if !self.takes_files {
            return None;
        }
        let bound = self
            .files
            .entry(file)
            .or_insert_with(|| BoundFile { slot: engine.bind_file(file), in_flight: 0 });
        bound.in_flight += 1;
        bound.slot
    }

    /// A transfer of the file is through.
    pub(super) fn release_file(&mut self, engine: &mut dyn Engine, file: RawFd) {
        let Some(bound) = self.files.get_mut(&file) else {
            return;
        };
        bound.in_flight -= 1;
        if bound.in_flight == 0 {
            if let Some(slot) = bound.slot {
                engine.unbind_file(slot);
            }
            self.files.remove(&file);
        }
    }
}
