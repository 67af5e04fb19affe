//! Made-up machines: their `proc`, `sys` and `dev` in a temporary directory.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use tempfile::TempDir;

use super::*;

/// A made-up machine.
struct Machine(TempDir);

impl Machine {
    fn new(mounts: &str) -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        machine.write("proc/self/mountinfo", mounts);
        machine
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // The links of sysfs are relative; where to, makes no difference to who follows them.
        symlink(self.0.path().join(target), path).unwrap();
    }

    /// A block device at `place` under `sys/devices`.
    fn block(&self, number: &str, place: &str, sectors: u64) {
        let place = format!("sys/devices/{place}");
        self.write(&format!("{place}/size"), &sectors.to_string());
        self.link(&format!("sys/dev/block/{number}"), &place);
        let name = place.rsplit('/').next().unwrap();
        self.link(&format!("sys/class/block/{name}"), &place);
    }

    /// An NVMe drive with four lanes, of the generation with this speed, behind a bridge.
    fn nvme(&self, index: u32, speed: &str) -> String {
        let function = format!("pci0000:00/0000:00:0{index}.0/0000:0{index}:00.0");
        let at = format!("sys/devices/{function}");
        for (name, text) in [
            ("vendor", "0x144d"),
            ("current_link_width", "4"),
            ("current_link_speed", speed),
            ("max_link_width", "4"),
            ("max_link_speed", "16.0 GT/s PCIe"),
            ("numa_node", "1"),
        ] {
            self.write(&format!("{at}/{name}"), text);
        }
        let controller = format!("{function}/nvme/nvme{index}");
        for (name, text) in [
            ("model", "SAMSUNG MZQL23T8HCLS-00A07          "),
            ("serial", &format!("S64HNE0R50000{index}      ")),
            ("transport", "pcie"),
            ("firmware_rev", "GDC5602Q"),
            ("numa_node", "1"),
        ] {
            self.write(&format!("sys/devices/{controller}/{name}"), text);
        }
        let namespace = format!("{controller}/nvme{index}n1");
        self.block(&format!("259:{index}"), &namespace, 7_501_476_528);
        self.link(&format!("sys/devices/{namespace}/device"), &format!("sys/devices/{controller}"));
        self.write(&format!("sys/devices/{namespace}/wwid"), &format!("eui.36344830{index}"));
        for (name, text) in [
            ("scheduler", "[none] mq-deadline"),
            ("nr_requests", "1023"),
            ("max_sectors_kb", "128"),
            ("io_poll", "0"),
            ("write_cache", "write through"),
            ("logical_block_size", "512"),
            ("dma_alignment", "3"),
            ("rotational", "0"),
        ] {
            self.write(&format!("sys/devices/{namespace}/queue/{name}"), text);
        }
        namespace
    }

    fn locate(&self, path: &str) -> Location {
        locate_under(self.0.path(), Path::new(path)).unwrap()
    }
}

const EXT4: &str = "27 1 259:9 / /nvme rw,noatime - ext4 /dev/nvme1n1p1 rw,data=ordered";

#[test]
fn a_partition_leads_to_its_drive_and_the_link_behind_it() {
    let machine = Machine::new(EXT4);
    let namespace = machine.nvme(1, "8.0 GT/s PCIe");
    machine.block("259:9", &format!("{namespace}/nvme1n1p1"), 2048);
    machine.write(&format!("sys/devices/{namespace}/nvme1n1p1/partition"), "1");
    let location = machine.locate("/nvme/swap");
    assert_eq!(location.mount.value("data"), Some("ordered"));
    let [partition] = &location.devices[..] else { panic!("{location:?}") };
    assert_eq!((&*partition.name, partition.size_bytes), ("nvme1n1p1", 1 << 20));
    assert_eq!(partition.kind, DeviceKind::Partition);
    let [device] = location.drives()[..] else { panic!("{location:?}") };
    let drive = device.drive.as_ref().unwrap();
    assert!(drive.is_nvme());
    assert_eq!(drive.model.as_deref(), Some("SAMSUNG MZQL23T8HCLS-00A07"));
    assert_eq!(drive.serial.as_deref(), Some("S64HNE0R500001"));
    let [function] = &drive.functions[..] else { panic!("{drive:?}") };
    assert_eq!(function.address, "0000:01:00.0");
    assert_eq!(function.link, Some(Link { width: 4, gigatransfers: 8.0 }));
    assert!(function.is_degraded());
    assert_eq!(format!("{:.1}", drive.carries().unwrap()), "3.9");
    assert_eq!(location.numa_node(), Some(1));
    let queue = device.queue.as_ref().unwrap();
    assert_eq!(queue.scheduler.as_deref(), Some("none"));
    assert_eq!((queue.nr_requests, queue.max_sectors_kb), (Some(1023), Some(128)));
    assert_eq!((queue.io_poll, queue.rotational), (Some(false), Some(false)));
    assert_eq!(queue.physical_block_bytes, None);
    assert_eq!(location.identity(), "nvme:eui.363448301");
    assert!(!location.is_memory());
}

#[test]
fn a_bridge_that_carries_less_than_the_drive_is_the_bottleneck() {
    let machine = Machine::new(&EXT4.replace("259:9", "259:1"));
    machine.nvme(1, "16.0 GT/s PCIe");
    let bridge = "sys/devices/pci0000:00/0000:00:01.0";
    machine.write(&format!("{bridge}/vendor"), "0x8086");
    machine.write(&format!("{bridge}/current_link_width"), "2");
    machine.write(&format!("{bridge}/current_link_speed"), "8.0 GT/s PCIe");
    let location = machine.locate("/nvme");
    let function = &location.drives()[0].drive.as_ref().unwrap().functions[0];
    assert!(!function.is_degraded());
    assert_eq!(function.bottleneck.as_ref().unwrap().0, "0000:00:01.0");
    assert_eq!(format!("{:.2}", function.carries().unwrap()), "1.97");
}

#[test]
fn an_array_and_a_mapped_device_lead_to_all_drives() {
    let machine = Machine::new("27 1 252:0 / /data rw - xfs /dev/mapper/vg-data rw");
    machine.nvme(1, "16.0 GT/s PCIe");
    machine.nvme(2, "16.0 GT/s PCIe");
    machine.block("9:0", "virtual/block/md0", 4096);
    machine.write("sys/devices/virtual/block/md0/md/level", "raid0");
    machine.write("sys/devices/virtual/block/md0/md/chunk_size", "524288");
    for index in [1, 2] {
        let member = format!("sys/class/block/nvme{index}n1");
        machine.link(&format!("sys/devices/virtual/block/md0/slaves/nvme{index}n1"), &member);
    }
    machine.block("252:0", "virtual/block/dm-0", 4096);
    machine.write("sys/devices/virtual/block/dm-0/dm/name", "vg-data");
    machine.write("sys/devices/virtual/block/dm-0/dm/uuid", "LVM-abcdef");
    machine.link("sys/devices/virtual/block/dm-0/slaves/md0", "sys/class/block/md0");
    let location = machine.locate("/data");
    assert_eq!(
        location.devices[0].kind,
        DeviceKind::Mapper { name: "vg-data".to_owned(), maker: Some("LVM".to_owned()) }
    );
    let names: Vec<&str> = location.drives().iter().map(|drive| &*drive.name).collect();
    assert_eq!(names, ["nvme1n1", "nvme2n1"]);
    assert_eq!(location.numa_node(), Some(1));
    assert_eq!(location.identity(), "LVM(raid0-524288(nvme:eui.363448301+nvme:eui.363448302))");
}

#[test]
fn a_mapped_device_is_found_by_its_name_where_its_number_is_hidden() {
    let machine = Machine::new("27 1 0:40 / /data rw - btrfs /dev/mapper/vault rw,compress=zstd:3");
    machine.nvme(1, "16.0 GT/s PCIe");
    machine.block("252:0", "virtual/block/dm-0", 4096);
    machine.write("sys/devices/virtual/block/dm-0/dm/name", "vault");
    machine.link("sys/devices/virtual/block/dm-0/slaves/nvme1n1", "sys/class/block/nvme1n1");
    assert_eq!(machine.locate("/data").identity(), "mapper(nvme:eui.363448301)");
}

#[test]
fn a_btrfs_over_several_devices_has_them_all() {
    let machine = Machine::new("27 1 0:40 /@ /data rw - btrfs /dev/nvme1n1 rw,subvol=/@");
    for index in [1, 2] {
        machine.nvme(index, "16.0 GT/s PCIe");
        let member = format!("sys/class/block/nvme{index}n1");
        machine.link(&format!("sys/fs/btrfs/5d1a/devices/nvme{index}n1"), &member);
    }
    assert_eq!(machine.locate("/data/x").identity(), "nvme:eui.363448301+nvme:eui.363448302");
}

#[test]
fn a_loop_device_is_as_fast_as_what_its_file_is_on() {
    let machine = Machine::new(
        "27 1 259:1 / / rw - ext4 /dev/nvme1n1 rw\n\
         28 27 0:23 / /dev/shm rw - tmpfs tmpfs rw\n\
         29 27 7:0 / /slow rw - ext4 /dev/loop0 rw\n\
         30 27 7:1 / /fast rw - ext4 /dev/loop1 rw",
    );
    machine.nvme(1, "16.0 GT/s PCIe");
    for (index, file) in ["/images/a b.img", "/dev/shm/drive.img (deleted)"].iter().enumerate() {
        machine.block(&format!("7:{index}"), &format!("virtual/block/loop{index}"), 16384);
        let at = format!("sys/devices/virtual/block/loop{index}/loop");
        machine.write(&format!("{at}/backing_file"), file);
        machine.write(&format!("{at}/dio"), "1");
    }
    let slow = machine.locate("/slow");
    assert_eq!(slow.identity(), "loop(nvme:eui.363448301)");
    assert_eq!(
        slow.devices[0].kind,
        DeviceKind::Loop { file: "/images/a b.img".into(), direct: true, memory: false }
    );
    assert!(!slow.is_memory());
    let fast = machine.locate("/fast");
    assert!(fast.is_memory());
    assert_eq!(fast.identity(), "loop(memory)");
}

#[test]
fn a_loop_device_on_itself_comes_to_an_end() {
    let machine = Machine::new("29 27 7:0 / / rw - ext4 /dev/loop0 rw");
    machine.block("7:0", "virtual/block/loop0", 16384);
    machine.write("sys/devices/virtual/block/loop0/loop/backing_file", "/drive.img");
    assert!(machine.locate("/").identity().starts_with("loop(loop("));
}

#[test]
fn a_virtual_drive_without_a_name_is_known_by_size_and_place() {
    let machine = Machine::new("27 1 254:0 / / rw - ext4 /dev/root rw");
    let function = "pci0000:00/0000:00:02.0";
    machine.write(&format!("sys/devices/{function}/vendor"), "0x1af4");
    machine.write(&format!("sys/devices/{function}/numa_node"), "-1");
    machine.block("254:0", &format!("{function}/virtio1/block/vda"), 8);
    let location = machine.locate("/home");
    let drive = location.drives()[0].drive.clone().unwrap();
    assert_eq!(drive.transport.as_deref(), Some("virtio"));
    assert_eq!((drive.carries(), location.numa_node()), (None, None));
    assert_eq!(location.identity(), "virtio:4096:0000:00:02.0");
    machine.write(&format!("sys/devices/{function}/virtio1/block/vda/serial"), "vol-0af3");
    assert_eq!(machine.locate("/home").identity(), "virtio:vol-0af3");
}

#[test]
fn a_sata_drive_has_no_maker_of_its_own() {
    let machine = Machine::new("27 1 8:0 / / rw - ext4 /dev/sda rw");
    let device = "pci0000:00/0000:00:1f.2/ata1/host0/target0:0:0/0:0:0:0";
    machine.block("8:0", &format!("{device}/block/sda"), 8);
    machine
        .link(&format!("sys/devices/{device}/block/sda/device"), &format!("sys/devices/{device}"));
    machine.write(&format!("sys/devices/{device}/vendor"), "ATA");
    machine.write(&format!("sys/devices/{device}/model"), "HDD 4T");
    machine.write(&format!("sys/devices/{device}/wwid"), "naa.5000");
    let location = machine.locate("/");
    let drive = location.drives()[0].drive.clone().unwrap();
    assert_eq!(drive.transport.as_deref(), Some("sata"));
    assert_eq!(drive.model.as_deref(), Some("HDD 4T"));
    assert_eq!(location.identity(), "sata:naa.5000");
}

#[test]
fn a_drive_with_several_paths_has_all_their_links() {
    let machine = Machine::new("27 1 259:7 / / rw - xfs /dev/nvme1n1 rw");
    machine.nvme(1, "16.0 GT/s PCIe");
    machine.nvme(2, "16.0 GT/s PCIe");
    let subsystem = "virtual/nvme-subsystem/nvme-subsys0";
    machine.block("259:7", &format!("{subsystem}/nvme7n1"), 8);
    machine.link(
        &format!("sys/devices/{subsystem}/nvme7n1/device"),
        &format!("sys/devices/{subsystem}"),
    );
    machine.write(&format!("sys/devices/{subsystem}/serial"), "S1");
    for index in [1, 2] {
        machine.link(
            &format!("sys/devices/{subsystem}/nvme{index}"),
            &format!(
                "sys/devices/pci0000:00/0000:00:0{index}.0/0000:0{index}:00.0/nvme/nvme{index}"
            ),
        );
    }
    let location = machine.locate("/");
    let drive = location.drives()[0].drive.clone().unwrap();
    assert_eq!(drive.functions.len(), 2);
    assert_eq!(format!("{:.1}", drive.carries().unwrap()), "15.8");
    assert_eq!(drive.transport.as_deref(), Some("nvme"));
    assert_eq!(location.identity(), "nvme:SAMSUNG MZQL23T8HCLS-00A07:S1");
}

#[test]
fn an_overlay_is_where_it_writes() {
    let machine = Machine::new(
        "27 1 259:1 / / rw - ext4 /dev/nvme1n1 rw\n\
         28 27 0:50 / /merged rw - overlay overlay rw,lowerdir=/low,upperdir=/up,workdir=/w",
    );
    machine.nvme(1, "16.0 GT/s PCIe");
    // A container sees the overlay, but not the directories it is made of.
    assert_eq!(machine.locate("/merged/x").identity(), "overlay:/merged");
    fs::create_dir(machine.0.path().join("up")).unwrap();
    let location = machine.locate("/merged/x");
    assert_eq!(location.mount.file_system, "overlay");
    assert_eq!(location.identity(), "nvme:eui.363448301");
}

#[test]
fn an_overlay_that_hides_its_own_directories_has_no_devices() {
    let machine =
        Machine::new("28 27 0:50 / / rw - overlay overlay rw,lowerdir=/a,upperdir=/up,workdir=/w");
    fs::create_dir(machine.0.path().join("up")).unwrap();
    assert_eq!(machine.locate("/x").devices, []);
}

#[test]
fn memory_servers_and_hidden_devices_have_names_too() {
    let machine = Machine::new(
        "27 1 254:0 / / rw - ext4 /dev/vda rw\n\
         28 27 0:23 / /dev/shm rw - tmpfs tmpfs rw\n\
         29 27 0:24 / /home rw - nfs4 server:/export rw\n\
         30 27 253:0 / /zram rw - ext4 /dev/zram0 rw",
    );
    machine.block("253:0", "virtual/block/zram0", 8);
    assert_eq!(machine.locate("/").identity(), "ext4:/");
    assert!(!machine.locate("/").is_memory());
    assert!(machine.locate("/dev/shm").is_memory());
    assert!(machine.locate("/home/me").is_remote());
    assert_eq!(machine.locate("/home/me").identity(), "nfs4:server:/export");
    assert!(machine.locate("/zram").is_memory());
}

#[test]
fn without_proc_the_error_names_what_is_missing() {
    let nothing = tempfile::tempdir().unwrap();
    let error = locate_under(nothing.path(), Path::new("/x")).unwrap_err().to_string();
    assert!(error.contains("mountinfo") && error.contains("No such file"), "{error}");
}

#[test]
fn a_missing_path_is_an_error_with_its_name() {
    let error = locate(Path::new("/no/such/directory")).unwrap_err().to_string();
    assert!(error.contains("/no/such/directory"), "{error}");
}
