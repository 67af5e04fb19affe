//! Files of tensors beside the reference library: what one writes the other reads, bit by bit, and
//! what one refuses the other does.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;

use forebay::io::{Durability, ErrorKind, Handle, Lent, Options};
use forebay::safetensors::{
    ChecksumState, Dtype, Header, LoadOptions, LoadPlan, Opened, PlanOptions, SaveOptions, Source,
    TensorData, Verdict, load, save, verify,
};
use forebay_testkit::memory::pattern;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

/// A tensor of a test.
#[derive(Clone, Debug, PartialEq)]
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

fn tensor(name: &str, dtype: Dtype, shape: &[u64]) -> Tensor {
    let length = usize::try_from(dtype.bytes_of(shape).unwrap()).unwrap();
    let seed = name.bytes().fold(7, |seed: u64, byte| seed.wrapping_mul(31) + u64::from(byte));
    let bytes = pattern(seed, length);
    Tensor { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
}

/// One tensor of each dtype, odd sizes and odd names.
fn tensors() -> Vec<Tensor> {
    let mut tensors: Vec<_> =
        Dtype::ALL.iter().map(|&dtype| tensor(dtype.name(), dtype, &[3, 4, 5])).collect();
    tensors.push(tensor("", Dtype::F32, &[]));
    tensors.push(tensor("empty", Dtype::F64, &[0, 5]));
    tensors.push(tensor("also empty", Dtype::U8, &[3, 0]));
    tensors.push(tensor("\u{1F600} \"quoted\"\\\n", Dtype::Bf16, &[1, 333_333]));
    tensors.push(tensor("odd", Dtype::U8, &[4097]));
    tensors.push(tensor("\u{0}", Dtype::I8, &[1]));
    tensors
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn handle() -> Handle {
    Handle::new(Options::default()).unwrap()
}

fn views(tensors: &[Tensor]) -> Vec<TensorData<'_>> {
    tensors
        .iter()
        .map(|Tensor { name, dtype, shape, bytes }| TensorData {
            name,
            dtype: *dtype,
            shape,
            bytes: Lent::Host(bytes),
        })
        .collect()
}

fn save_all(handle: &Handle, path: &Path, tensors: &[Tensor]) {
    save(handle, path, &views(tensors), None, &SaveOptions::default()).unwrap();
}

fn reference_dtype(dtype: Dtype) -> safetensors::Dtype {
    serde_json::from_value(dtype.name().into()).unwrap()
}

/// The bytes of a file that the reference library writes.
fn reference_bytes(tensors: &[Tensor], metadata: Option<HashMap<String, String>>) -> Vec<u8> {
    let views = tensors.iter().map(|tensor| {
        let shape = tensor.shape.iter().map(|&extent| usize::try_from(extent).unwrap()).collect();
        let dtype = reference_dtype(tensor.dtype);
        (tensor.name.clone(), TensorView::new(dtype, shape, &tensor.bytes).unwrap())
    });
    safetensors::serialize(views, metadata).unwrap()
}

fn open(source: &Source) -> Arc<Opened> {
    Arc::new(source.open().unwrap())
}

/// Loads, and gives the tensors back as a test has them.
fn load_all(handle: &Handle, source: &Source, options: &PlanOptions) -> Vec<Tensor> {
    let plan = LoadPlan::new(open(source), options).unwrap();
    let regions = load(handle, &plan, &LoadOptions::default()).unwrap();
    let placed = plan.tensors().iter().map(|placed| {
        let info = plan.opened().tensor(placed.place);
        let start = usize::try_from(placed.position).unwrap();
        let length = usize::try_from(info.bytes()).unwrap();
        let bytes = &regions[placed.region].as_slice()[start..start + length];
        assert!(
            bytes.is_empty()
                || (bytes.as_ptr().addr() as u64).is_multiple_of(info.dtype.alignment())
        );
        Tensor {
            name: info.name.clone(),
            dtype: info.dtype,
            shape: info.shape.clone(),
            bytes: bytes.to_vec(),
        }
    });
    placed.collect()
}

fn sorted(mut tensors: Vec<Tensor>) -> Vec<Tensor> {
    tensors.sort_by(|left, right| left.name.cmp(&right.name));
    tensors
}

#[test]
fn the_reference_reads_what_is_saved_in_the_order_that_it_would_write() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let tensors = tensors();
    let metadata: BTreeMap<_, _> = [("format".to_owned(), "pt".to_owned())].into();
    save(&handle(), &path, &views(&tensors), Some(&metadata), &SaveOptions::default()).unwrap();

    let bytes = fs::read(&path).unwrap();
    let theirs = SafeTensors::deserialize(&bytes).unwrap();
    for tensor in &tensors {
        let view = theirs.tensor(&tensor.name).unwrap();
        assert_eq!(view.dtype(), reference_dtype(tensor.dtype));
        assert!(view.shape().iter().map(|&extent| extent as u64).eq(tensor.shape.iter().copied()));
        assert!(view.data() == tensor.bytes, "{:?}", tensor.name);
    }
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
    let expected = reference_bytes(&tensors, None);
    let (length, expected_header) = SafeTensors::read_metadata(&expected).unwrap();
    let ours = Header::read(&path).unwrap();
    let data_start = usize::try_from(ours.data_start()).unwrap();
    assert_eq!((data_start % 4096, ours.checksums()), (0, ChecksumState::Ours));
    assert!(bytes[data_start..] == expected[8 + length..]);
    for tensor in ours.tensors().iter().filter(|tensor| tensor.bytes() > 0) {
        let offsets = expected_header.info(&tensor.name).unwrap().data_offsets;
        assert_eq!((tensor.start, tensor.end), (offsets.0 as u64, offsets.1 as u64));
    }
}

#[test]
fn what_was_saved_or_the_reference_wrote_is_loaded_bit_by_bit() {
    let directory = directory();
    let handle = handle();
    let tensors = tensors();
    let ours = directory.path().join("ours.safetensors");
    let theirs = directory.path().join("theirs.safetensors");
    save_all(&handle, &ours, &tensors);
    fs::write(&theirs, reference_bytes(&tensors, None)).unwrap();
    for path in [ours, theirs] {
        let loaded = load_all(&handle, &Source::File(path), &PlanOptions::default());
        assert!(sorted(loaded) == sorted(tensors.clone()));
    }
}

#[test]
fn data_that_begins_anywhere_is_loaded_right_and_aligned() {
    let directory = directory();
    let handle = handle();
    let tensors = tensors();
    let standard = reference_bytes(&tensors, None);
    let length = usize::try_from(u64::from_le_bytes(*standard.first_chunk().unwrap())).unwrap();
    for shift in 0..17 {
        let mut bytes = ((length + shift) as u64).to_le_bytes().to_vec();
        bytes.extend(&standard[8..8 + length]);
        bytes.resize(8 + length + shift, b' ');
        bytes.extend(&standard[8 + length..]);
        let path = directory.path().join(format!("{shift}.safetensors"));
        fs::write(&path, bytes).unwrap();
        let loaded = load_all(&handle, &Source::File(path), &PlanOptions::default());
        assert!(sorted(loaded) == sorted(tensors.clone()), "{shift}");
    }
}

#[test]
fn a_few_wide_tensors_behind_an_odd_one_are_copied_and_the_rest_stays_in_place() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let text = r#"{"a":{"dtype":"U8","shape":[100003],"data_offsets":[0,100003]},
        "b":{"dtype":"F64","shape":[2],"data_offsets":[100003,100019]}}"#;
    let data = pattern(3, 100_019);
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes.extend(&data);
    fs::write(&path, bytes).unwrap();
    let plan = LoadPlan::new(open(&Source::File(path.clone())), &PlanOptions::default()).unwrap();
    assert_eq!((plan.copied_bytes(), plan.tensors()[0].copied_from), (16, None));
    assert_eq!(plan.files()[0].reads[0].position % 4096, plan.files()[0].reads[0].offset % 4096);
    let loaded = load_all(&handle(), &Source::File(path), &PlanOptions::default());
    assert!(loaded[0].bytes == data[..100_003]);
    assert_eq!(loaded[1].bytes, data[100_003..]);
}

#[test]
fn a_subset_is_loaded_without_what_lies_far_between() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let handle = handle();
    let tensors: Vec<_> = (0..40)
        .map(|index| tensor(&format!("layer.{index:02}"), Dtype::F16, &[500_003 + index]))
        .collect();
    save_all(&handle, &path, &tensors);
    let names = ["layer.31", "layer.07", "layer.08"].map(str::to_owned).to_vec();
    let options = PlanOptions { names: Some(names.clone()), ..PlanOptions::default() };
    let plan = LoadPlan::new(open(&Source::File(path.clone())), &options).unwrap();
    assert_eq!(plan.files()[0].reads.len(), 2);
    assert!(plan.read_bytes() < plan.tensor_bytes() + 4 * 4096);
    let loaded = load_all(&handle, &Source::File(path), &options);
    let wanted = [31, 7, 8].map(|index| tensors[index].clone());
    assert!(loaded == wanted);
}

#[test]
fn a_name_that_is_not_there_is_refused_and_named() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    save_all(&handle(), &path, &tensors());
    let options = PlanOptions { names: Some(vec!["nope".to_owned()]), ..PlanOptions::default() };
    let error = LoadPlan::new(open(&Source::File(path.clone())), &options).unwrap_err();
    assert_eq!((error.kind(), error.path_ref()), (ErrorKind::InvalidInput, Some(&*path)));
    assert!(error.to_string().contains("\"nope\""), "{error}");
}

#[test]
fn a_load_that_exceeds_the_budget_is_refused_with_the_numbers() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    save_all(&handle(), &path, &[tensor("w", Dtype::U8, &[1_000_000])]);
    let options = |budget| PlanOptions {
        budget_bytes: Some(budget),
        staging_bytes: 1000,
        ..PlanOptions::default()
    };
    let opened = open(&Source::File(path));
    let peak = 1_003_520 + 1000;
    let plan = LoadPlan::new(Arc::clone(&opened), &options(peak)).unwrap();
    assert_eq!(plan.peak_bytes(), peak);
    let error = LoadPlan::new(opened, &options(peak - 1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.to_string().contains("1004520") && error.to_string().contains("1004519"));
}

#[test]
fn a_changed_byte_is_found_by_name_and_can_be_loaded_without_verification() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let handle = handle();
    let tensors: Vec<_> =
        (0..50).map(|index| tensor(&format!("t{index}"), Dtype::U8, &[90_001])).collect();
    save_all(&handle, &path, &tensors);
    let info = Header::read(&path).unwrap();
    let offset = info.data_start() + info.get("t17").unwrap().end - 1;
    let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();

    let opened = open(&Source::File(path.clone()));
    let plan = LoadPlan::new(Arc::clone(&opened), &PlanOptions::default()).unwrap();
    let error = load(&handle, &plan, &LoadOptions::default()).unwrap_err();
    assert_eq!((error.kind(), error.path_ref()), (ErrorKind::Mismatch, Some(&*path)));
    assert!(error.to_string().contains("\"t17\""), "{error}");
    let unverified = LoadOptions { verify: false, ..LoadOptions::default() };
    load(&handle, &plan, &unverified).unwrap();
    let others =
        PlanOptions { names: Some(vec!["t16".into(), "t18".into()]), ..PlanOptions::default() };
    let plan = LoadPlan::new(Arc::clone(&opened), &others).unwrap();
    load(&handle, &plan, &LoadOptions::default()).unwrap();

    let findings = verify(&handle, &opened, &SaveOptions::default().stop).unwrap();
    assert_eq!(findings.len(), 50);
    for finding in findings {
        let differs = matches!(finding.verdict, Verdict::Differs { .. });
        assert_eq!(differs, finding.name == "t17", "{finding:?}");
        assert!(finding.verdict != Verdict::Unknown);
    }
}

#[test]
fn a_file_that_the_reference_saved_again_is_loaded_and_told_not_to_be_verified() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let handle = handle();
    let saved = tensors();
    save_all(&handle, &path, &saved);
    let bytes = fs::read(&path).unwrap();
    let copied = SafeTensors::read_metadata(&bytes).unwrap().1.metadata().clone();
    let mut changed = saved.clone();
    changed[3].bytes[0] ^= 1;
    fs::write(&path, reference_bytes(&changed, copied)).unwrap();
    assert_eq!(Header::read(&path).unwrap().checksums(), ChecksumState::Stale);
    let loaded = load_all(&handle, &Source::File(path), &PlanOptions::default());
    assert!(sorted(loaded) == sorted(changed));
    let notices = handle.notices();
    assert!(notices.iter().any(|notice| notice.contains("is not verified")), "{notices:?}");
}

#[test]
fn a_flipped_bit_in_any_byte_of_a_header_is_found() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    save_all(&handle(), &path, &tensors());
    let bytes = fs::read(&path).unwrap();
    let file_bytes = bytes.len() as u64;
    let start = Header::parse(&bytes, file_bytes).unwrap().data_start();
    let mut header = bytes[..usize::try_from(start).unwrap()].to_vec();
    for offset in 0..header.len() {
        header[offset] ^= 1;
        assert!(Header::parse(&header, file_bytes).is_err(), "byte {offset}");
        header[offset] ^= 1;
    }
}

#[test]
fn a_file_that_is_replaced_during_a_load_is_loaded_as_it_was_opened() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let handle = handle();
    let before = tensors();
    save_all(&handle, &path, &before);
    let opened = open(&Source::File(path.clone()));
    save_all(&handle, &path, &[tensor("other", Dtype::U8, &[5])]);
    let plan = LoadPlan::new(opened, &PlanOptions::default()).unwrap();
    let regions = load(&handle, &plan, &LoadOptions::default()).unwrap();
    let placed = plan.tensors().iter().find(|placed| placed.place.tensor == 0).unwrap();
    let first = plan.opened().tensor(placed.place);
    let wanted = before.iter().find(|tensor| tensor.name == first.name).unwrap();
    let start = usize::try_from(placed.position).unwrap();
    let region = regions[placed.region].as_slice();
    assert!(region[start..start + wanted.bytes.len()] == wanted.bytes);
}

#[test]
fn a_file_that_is_cut_or_written_to_during_a_load_is_an_error() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let handle = handle();
    fs::write(&path, reference_bytes(&[tensor("w", Dtype::U8, &[3_000_001])], None)).unwrap();
    let opened = open(&Source::File(path.clone()));
    let plan = LoadPlan::new(opened, &PlanOptions::default()).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let length = file.metadata().unwrap().len();
    file.set_len(length + 1).unwrap();
    let error = load(&handle, &plan, &LoadOptions::default()).unwrap_err();
    assert_eq!((error.kind(), error.path_ref()), (ErrorKind::Mismatch, Some(&*path)));
    file.set_len(length - 1).unwrap();
    let error = load(&handle, &plan, &LoadOptions::default()).unwrap_err();
    assert_eq!((error.kind(), error.path_ref()), (ErrorKind::ShortFile, Some(&*path)));
}

#[test]
fn a_sharded_model_is_loaded_by_its_index() {
    let directory = directory();
    let handle = handle();
    let first = [tensor("a", Dtype::F32, &[1000]), tensor("shared", Dtype::U8, &[10])];
    let mut other = tensor("shared", Dtype::U8, &[10]);
    other.bytes.fill(9);
    let second = [tensor("b", Dtype::F32, &[7]), other];
    save_all(&handle, &directory.path().join("one.safetensors"), &first);
    save_all(&handle, &directory.path().join("two.safetensors"), &second);
    save_all(&handle, &directory.path().join("stray.safetensors"), &[tensor("s", Dtype::U8, &[1])]);
    let index = directory.path().join("model.safetensors.index.json");
    let map = r#"{"weight_map":{"a":"one.safetensors","shared":"two.safetensors"}}"#;
    fs::write(&index, map).unwrap();
    for source in [Source::of(directory.path()), Source::of(&index)] {
        let loaded = load_all(&handle, &source, &PlanOptions::default());
        assert!(sorted(loaded) == [first[0].clone(), second[0].clone(), second[1].clone()]);
    }

    fs::write(&index, r#"{"weight_map":{"b":"one.safetensors"}}"#).unwrap();
    let error = Source::of(directory.path()).open().unwrap_err();
    assert_eq!((error.kind(), error.path_ref()), (ErrorKind::Corrupt, Some(&*index)));
    assert!(error.to_string().contains("\"b\""), "{error}");

    fs::write(&index, r#"{"weight_map":{"b":"gone.safetensors"}}"#).unwrap();
    let error = Source::of(directory.path()).open().unwrap_err();
    assert_eq!((error.kind(), error.os_code()), (ErrorKind::Os, Some(2)));
    assert_eq!(error.path_ref(), Some(&*directory.path().join("gone.safetensors")));
}

#[test]
fn a_directory_without_an_index_is_all_its_files_unless_names_clash() {
    let directory = directory();
    let handle = handle();
    let path = |name: &str| directory.path().join(name);
    let error = Source::of(directory.path()).open().unwrap_err();
    assert_eq!((error.os_code(), error.path_ref()), (Some(2), Some(directory.path())));
    save_all(&handle, &path("x.safetensors"), &[tensor("a", Dtype::U8, &[4])]);
    save_all(&handle, &path("y.safetensors"), &[tensor("b", Dtype::U8, &[4])]);
    fs::write(path("notes.txt"), "x").unwrap();
    let loaded = load_all(&handle, &Source::of(directory.path()), &PlanOptions::default());
    assert!(loaded == [tensor("a", Dtype::U8, &[4]), tensor("b", Dtype::U8, &[4])]);

    save_all(&handle, &path("z.safetensors"), &[tensor("a", Dtype::U8, &[4])]);
    let error = Source::of(directory.path()).open().unwrap_err();
    assert_eq!(
        (error.kind(), error.path_ref()),
        (ErrorKind::InvalidInput, Some(&*path("z.safetensors")))
    );

    save_all(&handle, &path("model.safetensors"), &[tensor("only", Dtype::U8, &[4])]);
    let loaded = load_all(&handle, &Source::of(directory.path()), &PlanOptions::default());
    assert!(loaded == [tensor("only", Dtype::U8, &[4])]);
}

#[test]
fn a_file_without_tensors_is_one() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let handle = handle();
    save_all(&handle, &path, &[]);
    assert!(SafeTensors::deserialize(&fs::read(&path).unwrap()).unwrap().is_empty());
    assert!(load_all(&handle, &Source::File(path.clone()), &PlanOptions::default()).is_empty());
    save_all(&handle, &path, &[tensor("e", Dtype::F32, &[0, 5])]);
    let loaded = load_all(&handle, &Source::File(path), &PlanOptions::default());
    assert!(loaded == [tensor("e", Dtype::F32, &[0, 5])]);
}

#[test]
fn the_mode_of_an_existing_file_stays_and_a_new_one_follows_the_umask() {
    let directory = directory();
    let handle = handle();
    let tensors = [tensor("w", Dtype::U8, &[10])];
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let plain = directory.path().join("plain");
    fs::write(&plain, "x").unwrap();
    let new = directory.path().join("new.safetensors");
    save_all(&handle, &new, &tensors);
    assert_eq!(mode(&new), mode(&plain));
    for wanted in [0o600, 0o640, 0o444] {
        fs::set_permissions(&new, fs::Permissions::from_mode(wanted)).unwrap();
        save_all(&handle, &new, &tensors);
        assert_eq!(mode(&new), wanted);
    }
}

#[test]
fn a_link_is_followed_and_stays() {
    let directory = directory();
    let handle = handle();
    fs::create_dir(directory.path().join("sub")).unwrap();
    let (link, target) = (directory.path().join("link"), directory.path().join("sub/target"));
    symlink("sub/target", &link).unwrap();
    for length in [10, 20] {
        save_all(&handle, &link, &[tensor("w", Dtype::U8, &[length])]);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(Header::read(&target).unwrap().get("w").unwrap().shape, [length]);
    }
    symlink("loop", directory.path().join("loop")).unwrap();
    let error = save(&handle, directory.path().join("loop"), &[], None, &SaveOptions::default());
    assert_eq!(error.unwrap_err().os_code(), Some(40));
}

#[test]
fn what_cannot_be_saved_leaves_the_old_file_and_nothing_else() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let handle = handle();
    fs::write(&path, "before").unwrap();
    let wrong =
        TensorData { name: "w", dtype: Dtype::F32, shape: &[3], bytes: Lent::Host(&[0; 11]) };
    let twice = TensorData { name: "w", dtype: Dtype::U8, shape: &[1], bytes: Lent::Host(&[0]) };
    for tensors in [vec![wrong], vec![twice, twice]] {
        let error = save(&handle, &path, &tensors, None, &SaveOptions::default()).unwrap_err();
        assert_eq!((error.kind(), error.path_ref()), (ErrorKind::InvalidInput, Some(&*path)));
    }
    let stopped = SaveOptions::default();
    stopped.stop.request();
    let error = save(&handle, &path, &[twice], None, &stopped).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    let names: Vec<_> = fs::read_dir(directory.path()).unwrap().collect();
    assert_eq!((names.len(), &*fs::read(&path).unwrap()), (1, &b"before"[..]));
    for (path, code) in [(directory.path().to_path_buf(), 21), (directory.path().join("no/x"), 2)] {
        let error = save(&handle, &path, &[twice], None, &SaveOptions::default()).unwrap_err();
        assert_eq!((error.os_code(), error.path_ref()), (Some(code), Some(&*path)), "{error}");
    }
}

#[test]
fn every_durability_gives_the_same_file() {
    let directory = directory();
    let handle = handle();
    let tensors = tensors();
    let bytes = [Durability::None, Durability::Data, Durability::Full].map(|durability| {
        let path = directory.path().join("m.safetensors");
        let options = SaveOptions { durability, ..SaveOptions::default() };
        save(&handle, &path, &views(&tensors), None, &options).unwrap();
        fs::read(&path).unwrap()
    });
    assert!(bytes[0] == bytes[1] && bytes[1] == bytes[2]);
}
