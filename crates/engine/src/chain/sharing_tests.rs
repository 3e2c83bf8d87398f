//! Images over the same base, which they share.

use super::tests::*;
use super::*;
use crate::base::Bases;
use crate::references::References;
use crate::test_file::{TestFile, TestHost, block_on};

/// Overlays in two directories, over a base with another below it.
fn shelf() -> TestHost {
    host(&[
        ("a/one", bytes_of(&over("/base/top"))),
        ("a/two", bytes_of(&over("/base/top"))),
        ("b/three", bytes_of(&over("/base/top"))),
        ("a/lone", bytes_of(&over("/base/bottom"))),
        ("/base/top", bytes_of(&over("/base/bottom"))),
        ("/base/bottom", bytes_of(&header())),
    ])
}

fn options() -> OpenOptions {
    OpenOptions::new(References::Allowed(vec!["/base".into()]))
}

/// Opens an image, and says how many files that took.
fn open_over(
    host: &TestHost,
    path: &str,
    options: &OpenOptions,
    bases: &Bases<TestFile>,
) -> (Opened<TestFile>, usize) {
    host.opened.borrow_mut().clear();
    let opened = block_on(open_sharing(host, path, options, bases)).unwrap();
    let count = host.opened.borrow().len();
    (opened, count)
}

#[test]
fn overlays_of_one_base_open_it_once_wherever_they_lie() {
    let (host, bases) = (shelf(), Bases::default());
    let (one, files) = open_over(&host, "a/one", &options(), &bases);
    assert_eq!((files, one.image.shares_base()), (3, false));
    for path in ["a/two", "b/three"] {
        // Its own, and a look at which file its backing file is.
        let (other, files) = open_over(&host, path, &options(), &bases);
        assert_eq!(files, 2, "{path}");
        assert!(Arc::ptr_eq(&one.image.base, &other.image.base));
        assert!(Arc::ptr_eq(&one.files.below, &other.files.below));
        assert_eq!(other.image.layers().len(), 3);
    }
    // A chain that begins with another file has a base of its own.
    let (lone, _) = open_over(&host, "a/lone", &options(), &bases);
    assert!(!lone.image.shares_base());
}

#[test]
fn a_base_goes_with_its_last_user_and_is_opened_anew() {
    let (host, bases) = (shelf(), Bases::default());
    let (one, _) = open_over(&host, "a/one", &options(), &bases);
    let (two, _) = open_over(&host, "a/two", &options(), &bases);
    drop(one);
    let (one, files) = open_over(&host, "a/one", &options(), &bases);
    assert_eq!((files, one.image.shares_base()), (2, true));
    drop((one, two));
    assert_eq!(open_over(&host, "b/three", &options(), &bases).1, 3);
}

#[test]
fn what_is_opened_in_another_way_is_not_shared() {
    type Change = fn(&mut OpenOptions);
    let read_only = |options: &mut OpenOptions| options.read_only = true;
    let changes: [(&str, Change, bool); 8] = [
        ("reading alone", read_only, true),
        (
            "cache of the top",
            |o| o.cache.refcount_bytes = Some(1 << 20),
            true,
        ),
        ("another index", |o| o.cache.l2_bytes = Some(1 << 20), false),
        ("past the cache", |o| o.backing_direct = Some(true), false),
        ("no locks", |o| o.lock = false, false),
        ("any file", |o| o.references = References::Any, false),
        (
            "more places",
            |o| o.references = References::Allowed(vec!["/base".into(), "/x".into()]),
            false,
        ),
        (
            "a key",
            |o| o.keys.for_others(gaur_luks::Passphrase::new(b"x".to_vec())),
            false,
        ),
    ];
    let (host, bases) = (shelf(), Bases::default());
    let (_one, _) = open_over(&host, "a/one", &options(), &bases);
    for (what, change, shares) in changes {
        let mut options = options();
        change(&mut options);
        let (two, _) = open_over(&host, "a/two", &options, &bases);
        assert_eq!(two.image.shares_base(), shares, "{what}");
    }
}

#[test]
fn a_base_that_was_found_beside_one_image_is_not_shown_to_another_elsewhere() {
    let host = host(&[
        ("/a/one", bytes_of(&over("/a/base"))),
        ("/b/two", bytes_of(&over("/a/base"))),
        ("/a/three", bytes_of(&over("/a/base"))),
        ("/a/base", bytes_of(&over("/a/bottom"))),
        ("/a/bottom", bytes_of(&header())),
    ]);
    // Both may name the base, one alone what that names.
    let options = OpenOptions::new(References::Allowed(vec!["/a/base".into()]));
    let bases = Bases::default();
    let (one, _) = open_over(&host, "/a/one", &options, &bases);
    let refused = block_on(open_sharing(&host, "/b/two", &options, &bases));
    assert!(refused.is_err_and(|error| error.kind() == ErrorKind::ReferenceRefused));
    let (three, _) = open_over(&host, "/a/three", &options, &bases);
    assert!(three.image.shares_base());
    drop(one);
}

#[test]
fn another_file_of_the_same_name_and_another_way_to_the_same_file_are_told_apart() {
    let files = |bottom: &str| {
        host(&[
            ("/a/one", bytes_of(&over("/base/top"))),
            ("/a/two", bytes_of(&over("/link/top"))),
            ("/base/top", bytes_of(&over(bottom))),
            ("/base/bottom", bytes_of(&header())),
            ("/link/bottom", bytes_of(&header())),
        ])
    };
    let any = OpenOptions::new(References::Any);
    for (bottom, shares) in [("/base/bottom", true), ("bottom", false)] {
        let (mut host, bases) = (files(bottom), Bases::default());
        let top = block_on(host.open("/base/top".as_ref(), access(&any, false))).unwrap();
        host.add("/link/top", top);
        let (_one, _) = open_over(&host, "/a/one", &any, &bases);
        let (two, _) = open_over(&host, "/a/two", &any, &bases);
        // What a relative name leads to depends on the way.
        assert_eq!(two.image.shares_base(), shares, "{bottom}");
        drop(two);
        let replaced = file(bytes_of(&over(bottom))).with_id(77);
        host.add("/base/top", replaced);
        let (anew, _) = open_over(&host, "/a/one", &any, &bases);
        assert!(!anew.image.shares_base());
    }
}
