//! What people do with a disk, on file systems of the kernel: unpack a source tree, compile it, run
//! the result, check the file system, and find everything again after a remount.

use gaur_interop::attached::{Attached, DeviceKind, Shape, attach};
use gaur_interop::filesystem::{Kind, Mounted};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::run;

const SIZE_MIB: u64 = 768;

/// Unpacks the C project, from an archive.
const UNPACK: &str = r#"
tar -C "$(dirname "$1")" -cf "$2" "$(basename "$1")"
tar -xf "$2"
diff -r "$1" "$(basename "$1")"
"#;

/// Compiles zstd as a library and a program with it that packs and unpacks a file.
const COMPILE: &str = r#"
cat >round.c <<'END'
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "zstd.h"
int main(int count, char **names) {
    static char from[1 << 20], to[1 << 20];
    FILE *file = fopen(names[1], "r");
    size_t len = fread(from, 1, sizeof from, file);
    size_t bound = ZSTD_compressBound(len);
    char *packed = malloc(bound);
    size_t packed_len = ZSTD_compress(packed, bound, from, len, 3);
    size_t again = ZSTD_decompress(to, sizeof to, packed, packed_len);
    return count != 2 || again != len || memcmp(from, to, len);
}
END
cat >Makefile <<'END'
CFLAGS = -O0 -Izstd/lib -DZSTD_DISABLE_ASM
SOURCES = $(wildcard zstd/lib/common/*.c zstd/lib/compress/*.c zstd/lib/decompress/*.c) round.c
round: $(SOURCES:.c=.o)
	$(CC) -o $@ $^
END
make -s -j2
./round zstd/lib/zstd.h
"#;

/// Checksums of everything, kept outside.
const SUM: &str = r#"find . -type f -print0 | sort -z | xargs -0 sha256sum >"$1""#;
const VERIFY: &str = r#"sha256sum --quiet --check "$1"; find . -type f | wc -l; wc -l <"$1""#;

fn project() -> String {
    std::env::var("GAUR_C_PROJECT")
        .expect("GAUR_C_PROJECT names a folder with C sources: `cargo xtask vm test` says so")
}

#[track_caller]
fn unpack(mounted: &Mounted, scratch: &Scratch) {
    mounted.shell(UNPACK, &[&project(), &scratch.path("project.tar")]);
}

/// Nothing has changed, and no file is missing or new.
#[track_caller]
fn verify(mounted: &Mounted, sums: &str) {
    let said = mounted.shell(VERIFY, &[sums]).stdout;
    let counts: Vec<&str> = said.split_whitespace().collect();
    assert!(counts.len() == 2 && counts[0] == counts[1], "{said}");
}

/// A disk with the project on it: the image itself, or one below it.
#[track_caller]
fn with_project(
    kind: Kind,
    via: DeviceKind,
    shape: Shape,
    scratch: &Scratch,
) -> (Attached, String) {
    let name = if shape.backed {
        "base.qcow2"
    } else {
        "disk.qcow2"
    };
    let image = shape.create_above(scratch, name, None, SIZE_MIB);
    let disk = attach(via, &image, scratch, &[]);
    kind.make(&disk.path());
    let mounted = kind.mount(&disk.path(), scratch);
    unpack(&mounted, scratch);
    mounted.unmount();
    if !shape.backed {
        return (disk, image);
    }
    disk.detach();
    let top = shape.create_above(scratch, "disk.qcow2", Some(&image), SIZE_MIB);
    (attach(via, &top, scratch, &[]), image)
}

fn sum_of(image: &str) -> String {
    run("sha256sum", &[image]).ok().stdout
}

fn used_for_work(kind: Kind, via: DeviceKind, shape: Shape) {
    let scratch = Scratch::new("files");
    let (disk, image) = with_project(kind, via, shape, &scratch);
    let base = shape.backed.then(|| sum_of(&image));
    let sums = scratch.path("sums");
    let mounted = kind.mount(&disk.path(), &scratch);
    mounted.shell(COMPILE, &[]);
    mounted.shell(SUM, &[&sums]);
    mounted.unmount();
    kind.check(&disk.path());
    let mounted = kind.mount(&disk.path(), &scratch);
    verify(&mounted, &sums);
    mounted.unmount();
    disk.detach();
    if let Some(base) = base {
        assert_eq!(sum_of(&image), base, "the backing file has changed");
    }
    // And once more with another server.
    let disk = attach(via, &scratch.path("disk.qcow2"), &scratch, &["--read-only"]);
    assert_eq!(disk.attribute("ro"), "1");
    let mounted = kind.mount_read_only(&disk.path(), &scratch);
    verify(&mounted, &sums);
    mounted.unmount();
    disk.detach();
}

mod ext4 {
    gaur_interop::every_disk!(crate::used_for_work, gaur_interop::filesystem::Kind::Ext4);
}

mod xfs {
    gaur_interop::every_disk!(crate::used_for_work, gaur_interop::filesystem::Kind::Xfs);
}
