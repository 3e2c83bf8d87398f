//! Which files a chain may have opened, by names out of images.

use super::tests::*;
use super::*;
use crate::references::References;
use crate::test_file::TestHost;

/// Every image names a file of this name.
fn naming(name: &str, files: &[&str]) -> TestHost {
    let top = ("images/top", bytes_of(&over(name)));
    let others = files.iter().map(|file| (*file, bytes_of(&header())));
    let files: Vec<_> = std::iter::once(top).chain(others).collect();
    host(&files)
}

fn opened(host: &TestHost) -> Vec<String> {
    let opened = host.opened.borrow();
    opened.iter().map(|(name, _)| name.clone()).collect()
}

#[test]
fn names_that_lead_out_of_the_directory_are_refused_and_not_opened() {
    for (name, path) in [
        ("/etc/passwd", "/etc/passwd"),
        ("../secret", "images/../secret"),
        ("deep/../../secret", "images/deep/../../secret"),
        ("/dev/fd/0", "/dev/fd/0"),
        ("/proc/self/maps", "/proc/self/maps"),
        ("file:/etc/passwd", "/etc/passwd"),
        ("file:secret", "secret"),
    ] {
        let host = naming(name, &[path]);
        let allowed = References::Allowed(vec!["/bases".into()]);
        for references in [References::Beside, allowed] {
            let options = OpenOptions::new(references);
            let (kind, line) = failure(&host, "images/top", &options);
            assert_eq!(kind, ErrorKind::ReferenceRefused, "{name}");
            let reason = "it is outside of the image's directory, and not allowed";
            let expected =
                format!("cannot open {path:?}, backing file of \"images/top\": {reason}");
            assert_eq!(line, expected);
        }
        assert_eq!(opened(&host), ["images/top", "images/top"]);
        let any = OpenOptions::new(References::Any);
        assert!(open_in(&host, "images/top", &any).is_ok(), "{name}");
    }
}

#[test]
fn protocols_are_refused_whatever_is_allowed() {
    for name in ["ssh://host/x", "json:{\"driver\":\"file\"}", "fat:/etc"] {
        let host = naming(name, &[]);
        let any = OpenOptions::new(References::Any);
        let (kind, line) = failure(&host, "images/top", &any);
        assert_eq!(kind, ErrorKind::Unsupported);
        assert!(
            line.contains("is not supported; files, NBD and stores are"),
            "{line}"
        );
    }
}

#[test]
fn an_image_without_references_may_not_even_name_its_neighbour() {
    let host = naming("base", &["images/base"]);
    let beside = OpenOptions::new(References::Beside);
    assert!(open_in(&host, "images/top", &beside).is_ok());
    let nothing = OpenOptions::new(References::Nothing);
    let (kind, line) = failure(&host, "images/top", &nothing);
    assert_eq!(kind, ErrorKind::ReferenceRefused);
    assert!(
        line.ends_with("the image may not refer to other files"),
        "{line}"
    );
    let alone = OpenOptions {
        backing: false,
        ..nothing
    };
    assert!(open_in(&host, "images/top", &alone).is_ok());
}

/// An attacker's image that points to an allowed one does not get what that points to, nor what lies
/// beside it.
#[test]
fn images_further_down_add_no_places() {
    let host = host(&[
        ("images/top", bytes_of(&over("/bases/middle"))),
        ("/bases/middle", bytes_of(&over("base"))),
        ("/bases/base", bytes_of(&header())),
    ]);
    let allowing = |place: &str| OpenOptions::new(References::Allowed(vec![place.into()]));
    let (kind, line) = failure(&host, "images/top", &allowing("/bases/middle"));
    assert_eq!(kind, ErrorKind::ReferenceRefused);
    assert!(line.contains("\"/bases/base\", backing file of"), "{line}");
    assert!(open_in(&host, "images/top", &allowing("/bases")).is_ok());
}

#[test]
fn a_locked_file_outside_is_not_looked_at_to_find_a_loop() {
    let mut host = naming("../other", &[]);
    host.lock("images/../other");
    let beside = OpenOptions::new(References::Beside);
    let (kind, _) = failure(&host, "images/top", &beside);
    assert_eq!(kind, ErrorKind::ReferenceRefused);
}
