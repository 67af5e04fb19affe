//! An ext4 file system on a loop device over memory, for the time of one bench.
//!
//! # Invariants
//!
//! - Nothing of it outlives the process, however that ends: the mount is in a mount namespace of
//!   this process's own, the loop device clears itself when unmounted (`mount -o loop`), and the
//!   backing file has no name any more once the device is attached.

#![expect(unsafe_code, reason = "leaving the mount namespace has no safe form in rustix")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::thread::UnshareFlags;

/// What ext4 needs besides the payload: journal, inode tables, reserve.
const OVERHEAD_BYTES: u64 = 192 << 20;

/// A mounted file system in memory.
#[derive(Debug)]
pub(crate) struct LoopDevice {
    directory: PathBuf,
}

impl LoopDevice {
    /// Mounts a file system with room for `payload_bytes` on `directory`, made if need be.
    ///
    /// To be called before other threads are started: they would stay in the old namespace.
    pub(crate) fn mount(directory: PathBuf, payload_bytes: u64) -> Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "only root can mount a loop device");
        // SAFETY: `NEWNS` leaves the table of descriptors shared.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }
            .context("cannot have a mount namespace")?;
        run("mount", &["--make-rprivate", "/"])?;
        let name = directory.file_name().context("a mount point has a name")?.to_string_lossy();
        let image = format!("/dev/shm/forebay-bench-{}-{name}.img", std::process::id());
        fs::create_dir_all(&directory).context("cannot make a mount point")?;
        let device = Self { directory };
        let mounted = device.make_and_mount(Path::new(&image), payload_bytes + OVERHEAD_BYTES);
        // The device holds the file from here on, if it is attached at all.
        let _ = fs::remove_file(&image);
        mounted?;
        Ok(device)
    }

    /// Where it is mounted.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    fn make_and_mount(&self, image: &Path, bytes: u64) -> Result<()> {
        let file = File::create(image).context("cannot make a file in /dev/shm")?;
        file.set_len(bytes)?;
        drop(file);
        let image = image.to_string_lossy();
        let directory = self.directory.to_string_lossy();
        run("mkfs.ext4", &["-q", "-F", "-m", "0", "-E", "lazy_itable_init=0", &image])?;
        run("mount", &["-o", "loop,noatime", &image, &directory])
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // Without effect where the mount failed; the namespace takes care of what is left.
        let _ = run("umount", &["--lazy", &self.directory.to_string_lossy()]);
        let _ = fs::remove_dir(&self.directory);
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program).args(arguments).output();
    let output = output
        .with_context(|| format!("{program} isn't here: apt-get install util-linux e2fsprogs"))?;
    ensure!(
        output.status.success(),
        "{program} {} failed: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
