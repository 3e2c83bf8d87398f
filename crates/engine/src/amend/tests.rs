//! Amendments through files: every width, what is refused, hosts that fail.

use gaur_block::{Device, Errno, Payload, Request, Source, Target};
use gaur_format::plan::CreateOptions;
use gaur_format::{AllocationPolicy, Header, Version};

use super::{Amendment, amend};
use crate::chain::open;
use crate::create::create;
use crate::error::{ErrorKind, ImageError};
use crate::job::Job;
use crate::options::OpenOptions;
use crate::queue::Queue;
use crate::references::References;
use crate::test_file::{
    TestFile, TestHost, block_on, cached_limits, check_clean, checked, direct_limits,
};

const SIZE: u64 = 1 << 20;

fn opened(file: &TestFile) -> Queue<TestFile> {
    let mut host = TestHost::default();
    host.add("image", file.clone());
    let options = OpenOptions::new(References::Any);
    let opened = block_on(open(&host, "image", &options)).unwrap();
    opened.image.queue(opened.files)
}

fn write(queue: &Queue<TestFile>, offset_bytes: u64, bytes: &[u8]) {
    let request = Request::Write {
        offset_bytes,
        fua: false,
    };
    block_on(queue.submit(request, Payload::Write(Source::memory(bytes)))).unwrap();
}

fn zero(queue: &Queue<TestFile>, offset_bytes: u64, len_bytes: u64) {
    let request = Request::WriteZeroes {
        offset_bytes,
        len_bytes,
        fua: false,
        may_unmap: false,
    };
    block_on(queue.submit(request, Payload::None)).unwrap();
}

/// An image with data, closed in order.
fn image(version: Version) -> Vec<u8> {
    let file = TestFile::new(Vec::new(), cached_limits());
    let options = CreateOptions {
        version,
        size_bytes: SIZE,
        cluster_bits: 9,
        ..CreateOptions::default()
    };
    block_on(create(&file, &options, &Job::default())).unwrap();
    let queue = opened(&file);
    let data: Vec<u8> = (0..300_000).map(|at| (at / 7) as u8).collect();
    write(&queue, 0, &data);
    block_on(queue.close()).unwrap();
    file.bytes()
}

fn data_of(file: &TestFile) -> Vec<u8> {
    let queue = opened(file);
    let mut memory = vec![0; SIZE as usize];
    let payload = Payload::Read(Target::memory(&mut memory));
    block_on(queue.submit(Request::Read { offset_bytes: 0 }, payload)).unwrap();
    memory
}

fn change(file: &TestFile, amendment: &Amendment) -> Result<(), ImageError> {
    block_on(amend(file, amendment, &Job::default()))
}

fn width(order: u32) -> Amendment {
    Amendment {
        refcount_order: Some(order),
        ..Amendment::default()
    }
}

#[test]
fn refcounts_of_every_width_become_those_of_every_other() {
    let bytes = image(Version::V3);
    for limits in [cached_limits(), direct_limits(512)] {
        let file = TestFile::new(bytes.clone(), limits);
        let expected = data_of(&file);
        for order in [0, 6, 1, 5, 2, 4, 3, 3, 0, 4] {
            change(&file, &width(order)).unwrap();
            let header = Header::parse(&file.bytes()).unwrap();
            assert_eq!(header.refcount_order, order);
            check_clean(&file);
            assert!(data_of(&file) == expected, "order {order}");
        }
        let queue = opened(&file);
        write(&queue, SIZE - 9000, &[7; 9000]);
        block_on(queue.close()).unwrap();
        check_clean(&file);
    }
}

#[test]
fn features_change_and_all_else_stays() {
    let file = TestFile::new(image(Version::V2), cached_limits());
    let expected = data_of(&file);
    let up = Amendment {
        version: Some(Version::V3),
        refcount_order: Some(1),
        lazy_refcounts: Some(true),
        allocation: Some(AllocationPolicy::Compact),
        ..Amendment::default()
    };
    change(&file, &up).unwrap();
    let header = Header::parse(&file.bytes()).unwrap();
    assert_eq!((header.version, header.refcount_order), (Version::V3, 1));
    assert_eq!(header.allocation(), Some(AllocationPolicy::Compact));
    check_clean(&file);
    let queue = opened(&file);
    zero(&queue, 4096, 8192);
    block_on(queue.close()).unwrap();
    let down = Amendment {
        version: Some(Version::V2),
        refcount_order: Some(4),
        ..Amendment::default()
    };
    let refused = change(&file, &down).unwrap_err();
    assert!(refused.to_string().contains("marked as zeros"), "{refused}");
    assert_eq!(Header::parse(&file.bytes()).unwrap().refcount_order, 1);
    let queue = opened(&file);
    block_on(queue.expand_zeros(&Job::default())).unwrap();
    block_on(queue.close()).unwrap();
    change(&file, &down).unwrap();
    let header = Header::parse(&file.bytes()).unwrap();
    assert_eq!(header.version, Version::V2);
    assert_eq!(header.allocation(), Some(AllocationPolicy::Compact));
    check_clean(&file);
    let after = data_of(&file);
    assert!(after[4096..12288].iter().all(|byte| *byte == 0));
    assert!(after[..4096] == expected[..4096] && after[12288..] == expected[12288..]);
}

#[test]
fn what_the_format_does_not_have_is_refused_before_anything_changes() {
    let none = Amendment::default;
    let (v2, v3) = (image(Version::V2), image(Version::V3));
    for (bytes, amendment, word) in [
        (&v2, width(3), "16 bits"),
        (&v3, width(7), "1 to 64"),
        (
            &v2,
            Amendment {
                lazy_refcounts: Some(true),
                ..none()
            },
            "lazy",
        ),
        (
            &v3,
            Amendment {
                version: Some(Version::V2),
                refcount_order: Some(5),
                ..none()
            },
            "16 bits",
        ),
        (
            &v3,
            Amendment {
                data_file: Some(b"d".to_vec()),
                ..none()
            },
            "no external data file",
        ),
    ] {
        let file = TestFile::new(bytes.clone(), cached_limits());
        let refused = change(&file, &amendment).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidInput);
        assert!(refused.to_string().contains(word), "{refused}");
        assert!(file.bytes() == *bytes, "{word}");
    }
}

#[test]
fn an_amendment_that_fails_or_is_cancelled_leaves_a_whole_image() {
    let bytes = image(Version::V3);
    let expected = data_of(&TestFile::new(bytes.clone(), cached_limits()));
    let mut failed = 0;
    for event in 0.. {
        let file = TestFile::new(bytes.clone(), cached_limits());
        file.fail_from(event, Errno::EIO);
        let outcome = change(&file, &width(6));
        let events = file.events().len();
        failed += usize::from(outcome.is_err());
        let left = TestFile::new(file.bytes(), cached_limits());
        assert!(checked(&left).only_leaks(), "event {event}");
        assert!(data_of(&left) == expected);
        if event >= events {
            break;
        }
    }
    assert!(failed > 10, "{failed} requests were refused");
    let file = TestFile::new(bytes, cached_limits());
    let job = Job::default();
    job.cancel();
    let error = block_on(amend(&file, &width(6), &job)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert_eq!(Header::parse(&file.bytes()).unwrap().refcount_order, 4);
    check_clean(&file);
}
