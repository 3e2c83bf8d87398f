//! Random operations, the same ones by QEMU on an image of its own and by QEMU through `gaur serve`
//! on a twin: the guest views are equal afterwards, and both images are clean.

use std::time::{Duration, Instant};

use gaur_interop::builder::{Kind, build, noise};
use gaur_interop::compare::assert_same_view;
use gaur_interop::gaur::{gaur, serve};
use gaur_interop::layout::Layout;
use gaur_interop::op;
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, run};

const KINDS: [Kind; 4] = [Kind::Plain, Kind::Chain, Kind::Compressed, Kind::Snapshots];

/// One round: a start image of some kind, its twin, `count` operations on both.
fn round(layout: &Layout, kind: Kind, seed: u64, count: usize) {
    eprintln!("round: {layout:?} {kind:?} seed {seed} count {count}");
    let scratch = Scratch::new("random");
    let theirs = build(kind, layout, &scratch);
    let ours = scratch.path("ours.qcow2");
    run("cp", &["--sparse=always", &theirs, &ours]).ok();
    let ops = op::random(layout, seed, count, kind.discards(layout), &noise(&scratch));
    for (number, ops) in ops.chunks(count.div_ceil(2)).enumerate() {
        op::apply("qcow2", &theirs, ops);
        let server = serve(&ours, &scratch.path(&format!("s{number}")));
        op::apply("raw", &server.uri(), ops);
        server.stop();
        assert_same_view(("qcow2", &ours), ("qcow2", &theirs));
    }
    assert_clean(&ours);
    gaur(&["check", &ours]).ok();
    gaur(&["compare", &ours, &theirs]).ok();
}

fn every_kind(layout: Layout) {
    for (number, kind) in KINDS.into_iter().enumerate() {
        let seed = layout.cluster_bytes + number as u64;
        round(&layout, kind, seed, 100);
    }
}

mod twins {
    gaur_interop::every_layout!(crate::every_kind);
    mod zstd {
        use gaur_interop::layout::Layout;
        gaur_interop::every_v3_layout!(crate::every_kind, Layout::zstd);
    }
    mod width {
        gaur_interop::every_width_with_snapshots!(crate::every_kind);
    }
}

/// Fresh seeds and longer sequences for as long as `GAUR_SOAK_SECONDS` says (seconds; none in an
/// ordinary run). The seed is printed, so that a failure can be put into a test of its own.
#[test]
fn long_random_sequences() {
    let seconds = std::env::var("GAUR_SOAK_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok());
    let limit = Duration::from_secs(seconds.unwrap_or(10));
    let start = Instant::now();
    let mut seed = match seconds {
        Some(_) => u64::from(std::process::id()) << 20,
        None => 1,
    };
    while start.elapsed() < limit {
        seed += 1;
        let mut random = Random::new(seed);
        let clusters = [512, 4096, 16384, 65536, 1 << 20, 2 << 20];
        let cluster = clusters[random.below(6) as usize];
        let layout = match random.below(3) {
            0 => Layout::v2(cluster),
            1 => Layout::v3(cluster).refcount_bits(1 << (1 + random.below(6))),
            _ => Layout::extended(cluster.max(16384)),
        };
        let kind = KINDS[random.below(4) as usize];
        round(&layout, kind, seed, 150);
    }
}
