//! Findings about a directory: its file system, layers, drives, links, trials.

use super::*;

fn layer(name: &str, kind: DeviceKind, members: Vec<Device>) -> Device {
    Device { kind, members, drive: None, queue: None, ..drive(name) }
}

/// The findings about a directory that was changed.
fn directory_findings(change: impl FnOnce(&mut DirectoryFacts)) -> Vec<Finding> {
    let mut found = directory();
    change(&mut found);
    crate::report::directory::findings(&found, &facts())
}

/// The findings about a directory on another mount or device.
fn location_findings(change: impl FnOnce(&mut Location)) -> Vec<Finding> {
    directory_findings(|found| change(found.location.as_mut().unwrap()))
}

#[test]
fn a_directory_that_cannot_be_looked_at_is_one_failure() {
    let findings = directory_findings(|found| found.error = Some("is not a directory".into()));
    assert_eq!(findings.len(), 1);
    assert_found(&findings, "directory.path", Level::Failure, "is not a directory", None);
}

#[test]
fn file_systems_are_told_apart() {
    let id = "directory.file_system";
    let of = |file_system: &str, option: &str| {
        location_findings(|location| {
            location.mount.file_system = file_system.to_owned();
            location.mount.options.push(option.to_owned());
        })
    };
    assert_found(&of("ext4", "rw"), id, Level::Ok, "ext4 on /nvme", None);
    assert_found(&of("tmpfs", "rw"), id, Level::Info, "memory, not a drive", None);
    assert_found(&of("nfs4", "rw"), id, Level::Info, "by a network", None);
    let fix = Some("mount -o remount,rw /nvme");
    assert_found(&of("ext4", "ro"), id, Level::Failure, "read-only", fix);
    let findings = directory_findings(|found| found.location = None);
    assert_found(&findings, id, Level::Info, "mountinfo", None);
}

#[test]
fn a_command_takes_a_path_of_any_name_as_one_word() {
    let point = "/my disk; rm -rf ~/'x'";
    let findings = location_findings(|location| {
        location.mount.point = point.into();
        location.mount.options.push("ro".to_owned());
    });
    let found = find(&findings, "directory.file_system").unwrap();
    let words = shlex::split(&found.fix.as_ref().unwrap().command).unwrap();
    assert_eq!(words, ["mount", "-o", "remount,rw", point]);
}

#[test]
fn mount_options_that_cost_speed_are_said() {
    let id = "directory.mount_options";
    let of = |file_system: &str, option: &str| {
        location_findings(|location| {
            location.mount.file_system = file_system.to_owned();
            location.mount.options.push(option.to_owned());
        })
    };
    assert_eq!(find(&of("ext4", "data=ordered"), id), None);
    assert_found(&of("ext4", "data=journal"), id, Level::Warning, "written twice", None);
    let fix = Some("mount -o remount,async /nvme");
    assert_found(&of("xfs", "sync"), id, Level::Warning, "waits for the drive", fix);
    assert_found(&of("ext4", "discard"), id, Level::Info, "fstrim", None);
    assert_found(&of("btrfs", "rw"), id, Level::Info, "6.15", Some("chattr +C /nvme"));
    assert_eq!(find(&of("btrfs", "nodatasum"), id), None);
    let findings = location_findings(|location| {
        location.mount.file_system = "btrfs".to_owned();
        location.mount.options = vec!["nodatasum".to_owned(), "compress=zstd:3".to_owned()];
    });
    assert_found(&findings, id, Level::Info, "compress=zstd:3", None);
}

#[test]
fn room_runs_out_by_steps() {
    let id = "directory.room";
    let of = |total_bytes, available_bytes| {
        directory_findings(|found| found.room = Some(RoomFacts { total_bytes, available_bytes }))
    };
    assert_found(&of(1 << 40, 1 << 30), id, Level::Ok, "1 GiB free of 1 TiB", None);
    assert_found(&of(1 << 40, 1 << 20), id, Level::Warning, "1 MiB free", None);
    assert_found(&of(1 << 40, 0), id, Level::Failure, "full", None);
    assert_found(&of(0, 0), id, Level::Info, "doesn't say", None);
}

#[test]
fn a_file_system_without_direct_io_says_why() {
    let id = "directory.direct";
    let words = "memory at multiples of 4, offsets";
    assert_found(&directory_findings(|_| {}), id, Level::Ok, words, None);
    let findings = directory_findings(|found| {
        let reason = Some("O_DIRECT is refused at open".to_owned());
        found.alignment =
            Some(Alignment { direct: false, reason, memory_bytes: 1, offset_bytes: 4096 });
    });
    assert_found(&findings, id, Level::Warning, "refused at open", None);
}

#[test]
fn a_trial_that_failed_or_fell_back_says_why() {
    let of = |change: fn(&mut TrialFacts)| directory_findings(|found| change(&mut found.trials[0]));
    let id = "directory.uring";
    assert_found(&of(|_| {}), id, Level::Ok, "every byte; direct, registered memory", None);
    let findings = of(|trial| trial.failure = Some("no space left".to_owned()));
    assert_found(&findings, id, Level::Failure, "no space left", None);
    let findings = of(|trial| trial.fallbacks.push("memory isn't locked".to_owned()));
    assert_found(&findings, id, Level::Warning, "; memory isn't locked", None);
    let findings = of(|trial| {
        trial.direct = false;
        trial.registered = false;
    });
    assert_found(&findings, id, Level::Ok, "through the page cache", None);
    assert_eq!(find(&findings, "directory.aio").unwrap().level, Level::Ok);
    assert_eq!(find(&findings, "directory.threads").unwrap().level, Level::Ok);
}

#[test]
fn layers_between_files_and_drives_are_named() {
    let id = "directory.layer";
    let of = |kind: DeviceKind| {
        location_findings(|location| {
            location.devices = vec![layer("x0", kind, vec![drive("nvme0n1"), drive("nvme1n1")])];
        })
    };
    let both = "nvme0n1, nvme1n1";
    assert_found(&of(DeviceKind::Partition), id, Level::Ok, both, None);
    let raid = DeviceKind::Raid { level: "raid0".to_owned(), chunk_bytes: 524_288 };
    let words = "raid0 over nvme0n1, nvme1n1, stripes of 512 KiB";
    assert_found(&of(raid), id, Level::Ok, words, None);
    let mapped =
        |maker: &str| DeviceKind::Mapper { name: "data".to_owned(), maker: Some(maker.to_owned()) };
    assert_found(&of(mapped("LVM")), id, Level::Ok, "data (LVM) on nvme0n1", None);
    assert_found(&of(mapped("CRYPT")), id, Level::Warning, "encrypted", None);
    let looped = |direct, memory| DeviceKind::Loop { file: "/a.img".into(), direct, memory };
    assert_found(&of(looped(true, false)), id, Level::Ok, "around the page cache", None);
    assert_found(&of(looped(false, true)), id, Level::Ok, "in memory", None);
    let fix = Some("losetup --direct-io=on /dev/x0");
    assert_found(&of(looped(false, false)), id, Level::Warning, "fills twice", fix);
    assert_found(&of(DeviceKind::Memory), id, Level::Info, "memory, not a drive", None);
}

#[test]
fn drives_are_told_apart() {
    let id = "directory.drive";
    let of = |transport: &str, rotational| {
        location_findings(|location| {
            let device = &mut location.devices[0];
            device.drive.as_mut().unwrap().transport = Some(transport.to_owned());
            device.queue.as_mut().unwrap().rotational = Some(rotational);
        })
    };
    assert_found(&of("nvme", false), id, Level::Ok, "PM9A3, nvme, 4 TiB", None);
    assert_found(&of("nvme-tcp", false), id, Level::Info, "not an NVMe drive of this", None);
    assert_found(&of("sata", true), id, Level::Warning, "it turns", None);
    assert_found(&of("virtio", true), id, Level::Info, "not an NVMe", None);
}

#[test]
fn a_link_that_carries_less_than_it_could_is_a_warning() {
    let id = "directory.link";
    let of = |change: fn(&mut PcieFunction)| {
        location_findings(|location| {
            change(&mut location.devices[0].drive.as_mut().unwrap().functions[0]);
        })
    };
    assert_found(&of(|_| {}), id, Level::Ok, "×4 at 16 GT/s, which carries 7.9 GB/s", None);
    let slow = of(|function| function.link = Some(Link { width: 2, gigatransfers: 8.0 }));
    let fix = Some("lspci -vv -s 0000:41:00.0");
    assert_found(&slow, id, Level::Warning, "2.0 GB/s of the 7.9", fix);
    let narrow = of(|function| {
        let link = Link { width: 1, gigatransfers: 8.0 };
        function.bottleneck = Some(("0000:00:01.0".to_owned(), link));
    });
    assert_found(&narrow, id, Level::Warning, "0000:00:01.0 on the way carries 1.0", None);
    assert_eq!(find(&of(|function| function.link = None), id), None);
}

#[test]
fn a_scheduler_before_an_nvme_drive_is_a_warning() {
    let id = "directory.queue";
    let of = |scheduler: &str, transport: &str| {
        location_findings(|location| {
            let device = &mut location.devices[0];
            device.queue.as_mut().unwrap().scheduler = Some(scheduler.to_owned());
            device.drive.as_mut().unwrap().transport = Some(transport.to_owned());
        })
    };
    let words = "scheduler none, 1023 requests of up to 128 KiB, blocks of 4096 bytes, polling on";
    assert_found(&of("none", "nvme"), id, Level::Ok, words, None);
    assert_found(&of("mq-deadline", "virtio"), id, Level::Ok, "mq-deadline", None);
    let fix = Some("echo none > /sys/block/nvme0n1/queue/scheduler");
    assert_found(&of("mq-deadline", "nvme"), id, Level::Warning, "without a scheduler", fix);
}

#[test]
fn the_numa_node_of_a_drive_is_said_where_there_are_several() {
    let id = "directory.numa";
    let fix = Some("numactl --cpunodebind=1 --membind=1 COMMAND");
    assert_found(&directory_findings(|_| {}), id, Level::Info, "1: processors", fix);
    let findings = location_findings(|location| {
        let mut other = drive("nvme1n1");
        other.drive.as_mut().unwrap().numa_node = Some(0);
        location.devices.push(other);
    });
    assert_found(&findings, id, Level::Info, "on several", None);
    let mut single = facts();
    single.system.numa_nodes = 1;
    assert_eq!(find(&crate::report::directory::findings(&directory(), &single), id), None);
}
