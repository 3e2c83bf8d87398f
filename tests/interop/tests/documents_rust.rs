//! The Rust in the README and `docs/` compiles, and does what it shows. Alone in its program, because the
//! example works in the current folder.

use gaur_interop::gaur::gaur;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::assert_clean;

include!(concat!(env!("OUT_DIR"), "/documents.rs"));

/// It did not compile: the block lacked a type for its errors, and a `main`.
#[test]
fn the_example_of_the_readme_writes_to_an_image() {
    let scratch = Scratch::new("readme");
    let image = scratch.path("disk.qcow2");
    gaur(&["create", "-q", &image, "10M"]).ok();
    std::env::set_current_dir(scratch.folder()).expect("a folder");
    readme_0::main().expect("the example does well");
    std::env::set_current_dir("/").expect("a folder");
    assert_clean(&image);
    let letters = b"hello".iter().zip(4096..);
    let wanted = letters.map(|(letter, offset)| Op::Expect {
        offset,
        len: 1,
        pattern: *letter,
    });
    op::apply("qcow2", &image, &wanted.collect::<Vec<Op>>());
}
