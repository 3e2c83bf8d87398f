//! Bitmaps against a model: over requests, resizes, snapshots and verbs, closes and kills.

use std::collections::{BTreeMap, BTreeSet};

use gaur_block::{Device, Payload, Request, Source};
use gaur_format::Header;
use gaur_format::bitmap::{self, Bitmap};
use gaur_format::feature::Autoclear;
use gaur_format::plan::CreateOptions;

use super::{BitmapAction, BitmapSource};
use crate::chain::open;
use crate::create::create;
use crate::error::ImageError;
use crate::job::Job;
use crate::options::OpenOptions;
use crate::queue::Queue;
use crate::references::References;
use crate::snapshot::NewSnapshot;
use crate::test_file::{Random, TestFile, TestHost, block_on, cached_limits, check_clean, checked};

mod crash;

const SIZE: u64 = 3 << 20;
const SECTOR: u64 = 512;
const ADD: BitmapAction = BitmapAction::Add {
    granularity_bytes: None,
};

fn add(granularity: u64) -> BitmapAction {
    BitmapAction::Add {
        granularity_bytes: Some(granularity),
    }
}

fn named(source: &str) -> BitmapAction {
    BitmapAction::Merge(BitmapSource::Named(source.to_owned()))
}

fn image(options: &CreateOptions) -> (TestHost, TestFile) {
    let file = TestFile::new(Vec::new(), cached_limits());
    block_on(create(&file, options, &Job::default())).unwrap();
    (host_of(&file), file)
}

fn host_of(file: &TestFile) -> TestHost {
    let mut host = TestHost::default();
    host.add("disk", file.clone());
    host
}

fn small() -> CreateOptions {
    CreateOptions {
        size_bytes: SIZE,
        ..CreateOptions::default()
    }
}

fn try_open(host: &TestHost) -> Result<Queue<TestFile>, ImageError> {
    let options = OpenOptions::new(References::Any);
    let opened = block_on(open(host, "disk", &options))?;
    Ok(opened.image.queue(opened.files))
}

fn opened(host: &TestHost) -> Queue<TestFile> {
    try_open(host).unwrap()
}

fn change(queue: &Queue<TestFile>, name: &str, actions: &[BitmapAction]) -> Result<(), ImageError> {
    block_on(queue.change_bitmap(name, actions, &Job::default()))
}

fn write(queue: &Queue<TestFile>, offset_bytes: u64, len: u64) {
    let memory = vec![7; len as usize];
    let request = Request::Write {
        offset_bytes,
        fua: false,
    };
    let payload = Payload::Write(Source::memory(&memory));
    block_on(queue.submit(request, payload)).unwrap();
}

/// The numbers of the blocks whose bits are set.
fn blocks(queue: &Queue<TestFile>, name: &str, granularity: u64) -> BTreeSet<u64> {
    let mut set = BTreeSet::new();
    let bits = block_on(queue.bitmap_bits(name)).unwrap();
    bits.each_range(|start, len| set.extend(start / granularity..(start + len) / granularity));
    set
}

fn directory(file: &TestFile) -> Vec<Bitmap> {
    let bytes = file.bytes();
    let header = Header::parse(&bytes).unwrap();
    let Some(pointer) = header.bitmaps() else {
        return Vec::new();
    };
    let start = pointer.directory_offset.0 as usize;
    let bytes = &bytes[start..start + pointer.directory_len_bytes as usize];
    bitmap::parse_directory(bytes, pointer.count, &header.geometry()).unwrap()
}

/// What a bitmap should be.
#[derive(Clone, Debug)]
struct Expected {
    granularity: u64,
    is_enabled: bool,
    blocks: BTreeSet<u64>,
}

struct Model {
    host: TestHost,
    file: TestFile,
    queue: Option<Queue<TestFile>>,
    size: u64,
    /// Size of the disk that the snapshot keeps.
    snapshot: Option<u64>,
    bitmaps: BTreeMap<String, Expected>,
    /// What killed processes have taken is leaked.
    is_killed: bool,
}

impl Model {
    fn queue(&self) -> &Queue<TestFile> {
        self.queue.as_ref().unwrap()
    }

    fn mark(&mut self, start: u64, len: u64) {
        for one in self.bitmaps.values_mut().filter(|one| one.is_enabled) {
            let end = (start + len).min(self.size).div_ceil(one.granularity);
            one.blocks.extend(start / one.granularity..end);
        }
    }

    fn request(&mut self, random: &mut Random) {
        let len = (1 + random.below(300)) * SECTOR;
        let offset_bytes = random.below((self.size - len) / SECTOR) * SECTOR;
        let request = match random.below(4) {
            0 => Request::Discard {
                offset_bytes,
                len_bytes: len,
            },
            1 => Request::WriteZeroes {
                offset_bytes,
                len_bytes: len,
                fua: false,
                may_unmap: random.below(2) == 0,
            },
            _ => {
                write(self.queue(), offset_bytes, len);
                return self.mark(offset_bytes, len);
            }
        };
        block_on(self.queue().submit(request, Payload::None)).unwrap();
        self.mark(offset_bytes, len);
    }

    fn resize(&mut self, new: u64) {
        block_on(self.queue().resize(new, true, &Job::default())).unwrap();
        let old = std::mem::replace(&mut self.size, new);
        self.resized(old);
    }

    fn resized(&mut self, old: u64) {
        let new = self.size;
        for one in self.bitmaps.values_mut() {
            let bits = new.div_ceil(one.granularity);
            one.blocks.retain(|block| *block < bits);
        }
        if new > old {
            self.mark(old, new - old);
        }
    }

    fn verb(&mut self, random: &mut Random) {
        let name = format!("b{}", random.below(3));
        let other = format!("b{}", random.below(3));
        let granularity = SECTOR << random.below(8);
        let queue = self.queue.as_ref().unwrap();
        let source = self.bitmaps.get(&other).cloned();
        let Some(one) = self.bitmaps.get_mut(&name) else {
            change(queue, &name, &[add(granularity)]).unwrap();
            let new = Expected {
                granularity,
                is_enabled: true,
                blocks: BTreeSet::new(),
            };
            self.bitmaps.insert(name, new);
            return;
        };
        let action = match (random.below(5), source) {
            (0, _) => BitmapAction::Clear,
            (1, _) => BitmapAction::Enable,
            (2, _) => BitmapAction::Disable,
            (3, Some(source)) => {
                for block in source.blocks {
                    let start = block * source.granularity;
                    let end = (start + source.granularity).min(self.size);
                    let range = start / one.granularity..end.div_ceil(one.granularity);
                    one.blocks.extend(range);
                }
                return change(queue, &name, &[named(&other)]).unwrap();
            }
            _ => BitmapAction::Remove,
        };
        change(queue, &name, std::slice::from_ref(&action)).unwrap();
        match action {
            BitmapAction::Clear => one.blocks.clear(),
            BitmapAction::Enable => one.is_enabled = true,
            BitmapAction::Disable => one.is_enabled = false,
            _ => drop(self.bitmaps.remove(&name)),
        }
    }

    fn snapshot(&mut self) {
        let job = Job::default();
        match self.snapshot.take() {
            None => {
                let new = NewSnapshot {
                    name: "s".to_owned(),
                    ..NewSnapshot::default()
                };
                block_on(self.queue().create_snapshot(&new, &job)).unwrap();
                self.snapshot = Some(self.size);
            }
            Some(size) => {
                block_on(self.queue().apply_snapshot("s", &job)).unwrap();
                block_on(self.queue().delete_snapshot("s", &job)).unwrap();
                let old = std::mem::replace(&mut self.size, size);
                self.resized(old);
                self.mark(0, size);
            }
        }
    }

    fn compare(&self) {
        let queue = self.queue();
        for (name, expected) in &self.bitmaps {
            let found = blocks(queue, name, expected.granularity);
            assert!(found == expected.blocks, "bits of {name}");
        }
        let facts = block_on(queue.bitmaps()).unwrap();
        assert_eq!(facts.len(), self.bitmaps.len());
        for one in facts {
            let expected = &self.bitmaps[&one.name];
            assert_eq!(one.is_enabled, expected.is_enabled, "{}", one.name);
            assert_eq!(one.granularity_bytes, expected.granularity);
            assert!(!one.is_inconsistent);
        }
    }

    /// A process is killed, and another one opens the image: bitmaps have what they had, and regions besides.
    fn kill(&mut self) {
        drop(self.queue.take());
        self.is_killed = true;
        self.queue = Some(opened(&self.host));
        let queue = self.queue.as_ref().unwrap();
        for (name, expected) in &mut self.bitmaps {
            let found = blocks(queue, name, expected.granularity);
            let missing = expected.blocks.difference(&found).count();
            assert_eq!(missing, 0, "blocks that {name} lacks");
            expected.blocks = found;
        }
        write(self.queue(), 0, SECTOR);
        self.mark(0, SECTOR);
    }

    fn reopen(&mut self) {
        block_on(self.queue.take().unwrap().close()).unwrap();
        match self.is_killed {
            true => assert!(checked(&self.file).only_leaks()),
            false => check_clean(&self.file),
        }
        for stored in directory(&self.file) {
            assert!(!stored.has(bitmap::IN_USE), "{stored:?}");
        }
        self.queue = Some(opened(&self.host));
    }
}

#[test]
fn bitmaps_have_what_was_changed_since_and_nothing_else() {
    for round in 0..8 {
        let shapes = [(16, false), (9, false), (12, false), (14, true)];
        let (cluster_bits, extended_l2) = shapes[round % 4];
        let options = CreateOptions {
            cluster_bits,
            extended_l2,
            ..small()
        };
        let (host, file) = image(&options);
        let mut model = Model {
            queue: Some(opened(&host)),
            host,
            file,
            size: SIZE,
            snapshot: None,
            bitmaps: BTreeMap::new(),
            is_killed: false,
        };
        let mut random = Random::new(round as u64 + 1);
        for _ in 0..250 {
            match random.below(16) {
                0 => model.reopen(),
                1 if round >= 4 => model.kill(),
                1 => model.reopen(),
                2 => model.resize((1 << 20) + random.below(6000) * SECTOR),
                3 => model.snapshot(),
                4..7 => model.verb(&mut random),
                _ => model.request(&mut random),
            }
            if random.below(4) == 0 {
                model.compare();
            }
        }
        model.reopen();
        model.compare();
    }
}

#[test]
fn what_is_asked_for_in_one_call_happens_wholly_or_not() {
    let (host, file) = image(&small());
    let queue = opened(&host);
    change(&queue, "a", &[add(512)]).unwrap();
    let before = directory(&file);
    let long = "x".repeat(1024);
    for (name, actions) in [
        ("a", &[ADD][..]),
        ("a", &[BitmapAction::Clear, named("b")]),
        ("b", &[ADD, named("c")]),
        ("b", &[BitmapAction::Remove]),
        ("b", &[add(511)]),
        ("b", &[add(256)]),
        ("b", &[add(1 << 32)]),
        ("", &[ADD]),
        (&long, &[ADD]),
    ] {
        change(&queue, name, actions).unwrap_err();
        assert_eq!(directory(&file), before, "{name} {actions:?}");
    }
    let all = [BitmapAction::Remove, ADD, BitmapAction::Disable, named("a")];
    change(&queue, "a", &all).unwrap();
    let list = directory(&file);
    assert_eq!(
        (list.len(), list[0].flags, list[0].granularity_bits),
        (1, 0, 16)
    );
    change(&queue, "a", &[BitmapAction::Remove]).unwrap();
    block_on(queue.close()).unwrap();
    let header = Header::parse(&file.bytes()).unwrap();
    assert!(!header.autoclear.has(Autoclear::BITMAPS) && directory(&file).is_empty());
    check_clean(&file);
}

#[test]
fn a_failure_at_any_step_leaves_the_old_bitmaps_or_the_new() {
    let (host, file) = image(&small());
    let queue = opened(&host);
    change(&queue, "a", &[ADD]).unwrap();
    write(&queue, 0, SECTOR);
    block_on(queue.close()).unwrap();
    let start = file.bytes();
    for step in 0.. {
        let file = TestFile::new(start.clone(), cached_limits());
        let host = host_of(&file);
        let queue = opened(&host);
        file.forget_events();
        file.fail_from(step, gaur_block::Errno::EIO);
        let merged = change(&queue, "b", &[ADD, named("a"), BitmapAction::Disable]);
        drop(queue);
        let copy = TestFile::new(file.bytes(), cached_limits());
        let names: Vec<Vec<u8>> = directory(&copy).into_iter().map(|one| one.name).collect();
        let queue = opened(&host_of(&copy));
        assert_eq!(
            blocks(&queue, "a", 65536),
            BTreeSet::from([0]),
            "step {step}"
        );
        match names.len() {
            1 => assert!(merged.is_err(), "step {step}"),
            _ => assert_eq!(blocks(&queue, "b", 65536), BTreeSet::from([0])),
        }
        let report = checked(&copy);
        assert_eq!(
            (report.corruptions, report.check_errors),
            (0, 0),
            "step {step}"
        );
        if merged.is_ok() {
            assert!(step > 8, "there was something to fail");
            return;
        }
    }
}

/// The header of an image with a backing file has the file's name right behind the extensions; and where the
/// first extension would lie across two sectors, it may not.
#[test]
fn the_extension_finds_room_in_every_header() {
    for len in (1..1000).step_by(37).chain(340..420) {
        let backing = format!("/{}", "n".repeat(len));
        let options = CreateOptions {
            backing_file: Some(backing.clone().into_bytes()),
            ..small()
        };
        let file = TestFile::new(Vec::new(), cached_limits());
        block_on(create(&file, &options, &Job::default())).unwrap();
        let options = OpenOptions {
            backing: false,
            ..OpenOptions::new(References::Any)
        };
        let opened = block_on(open(&host_of(&file), "disk", &options)).unwrap();
        let queue = opened.image.queue(opened.files);
        for name in ["a", "b"] {
            change(&queue, name, &[ADD]).unwrap();
        }
        for name in ["a", "b"] {
            change(&queue, name, &[BitmapAction::Remove]).unwrap();
        }
        change(&queue, "c", &[ADD]).unwrap();
        block_on(queue.close()).unwrap();
        let header = Header::parse(&file.bytes()).unwrap();
        assert_eq!(header.backing_file(), Some(backing.as_bytes()), "{len}");
        assert_eq!(directory(&file)[0].name, b"c", "{len}");
    }
}

#[test]
fn hostile_bitmaps_are_shown_and_never_believed() {
    let (host, file) = image(&small());
    let queue = opened(&host);
    change(&queue, "a", &[add(512)]).unwrap();
    write(&queue, 0, SECTOR);
    block_on(queue.close()).unwrap();
    let list = directory(&file);
    let header = Header::parse(&file.bytes()).unwrap();
    let place = header.bitmaps().unwrap().directory_offset.0 as usize;
    let table = list[0].table_offset.0 as usize;
    let edits: [(usize, &[u8]); 5] = [
        (place + 8, &2_u32.to_be_bytes()),
        (place + 8, &0x7ff_ffff_u32.to_be_bytes()),
        (place, &(1_u64 << 40).to_be_bytes()),
        (table, &(1_u64 << 40).to_be_bytes()),
        (table, &3_u64.to_be_bytes()),
    ];
    for (at, edit) in edits {
        let mut bytes = file.bytes();
        bytes[at..at + edit.len()].copy_from_slice(edit);
        let queue = opened(&host_of(&TestFile::new(bytes.clone(), cached_limits())));
        let facts = block_on(queue.bitmaps()).unwrap();
        assert!(facts[0].is_inconsistent, "{at} {edit:?}");
        block_on(queue.bitmap_bits("a")).unwrap_err();
        write(&queue, 0, SECTOR);
        change(&queue, "a", &[BitmapAction::Remove]).unwrap();
        block_on(queue.close()).unwrap();
    }
    // A table that claims a table of the image.
    let mut bytes = file.bytes();
    let l1 = header.l1_table_offset.0.to_be_bytes();
    bytes[table..table + 8].copy_from_slice(&l1);
    let host = host_of(&TestFile::new(bytes, cached_limits()));
    let refused = try_open(&host).err().unwrap();
    assert!(format!("{refused:#}").contains("overlap"), "{refused:#}");
}
