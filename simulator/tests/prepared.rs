//! The images that the simulator starts from are valid by every judge. If they were not, the simulator
//! would blame the engine for its own faults.

use gaur_sim::Random;
use gaur_simulator::config::Config;
use gaur_simulator::content::{Found, ValueEncoding};
use gaur_simulator::judge::read_snapshots;
use gaur_simulator::prepare::{PreparedOptions, prepare};
use gaur_simulator::qemu;
use gaur_simulator::view::{Files, View};

fn wanted(config: &Config) -> PreparedOptions {
    PreparedOptions {
        filled_per_mille: config.image.filled_per_mille.max(100),
        ..config.image.clone()
    }
}

/// Every kind of cluster, snapshots and all refcount widths: QEMU finds nothing but the leaks that
/// were asked for and sees the same disk, and so do our own reader and the builder's own account.
#[test]
fn prepared_images_match_their_description() {
    let (mut with_snapshots, mut encrypted) = (0, 0);
    for seed in 0..60 {
        let config = Config::draw(seed);
        let script = ValueEncoding::new(seed, config.unit_bytes);
        let mut next_value = 0;
        let prepared = prepare(
            &wanted(&config),
            script,
            &mut next_value,
            &mut Random::new(seed),
        );
        let view = View::open(&prepared.file, &[]).unwrap();
        let disk = view.read_disk(view.active).unwrap();
        let units = disk
            .chunks_exact(config.unit_bytes as usize)
            .zip(&prepared.active);
        for (unit, (bytes, value)) in units.enumerate() {
            let expected = Found::Value(value.unwrap_or(0));
            assert_eq!(
                script.decode(unit as u32, bytes),
                expected,
                "seed {seed} unit {unit}"
            );
        }
        assert_eq!(view.snapshots.len(), prepared.snapshots.len());
        with_snapshots += usize::from(!view.snapshots.is_empty());
        let snapshots = read_snapshots(&view).unwrap();
        if config.image.encryption.is_some() {
            // QEMU would want the key.
            encrypted += 1;
            continue;
        }
        let files = Files::from([("top.qcow2".to_owned(), prepared.file)]);
        qemu::judge(&files, "top.qcow2", &disk, &snapshots, None)
            .unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }
    assert!(with_snapshots > 5);
    assert!((1..20).contains(&encrypted), "{encrypted} of 60");
}
