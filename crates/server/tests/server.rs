//! A server without the command: configured by structs, asked for facts, told to stop.

use std::time::Duration;

use gaur_engine::Format;
use gaur_export::nbd::{self, Listen};
use gaur_server::exporter::{ImageOptions, Limits, NewExport};
use gaur_server::fronts::FrontConfig;
use gaur_server::host_kind::HostKind;
use gaur_server::image_spec::ImageSpec;
use gaur_server::pin::{Pin, Prospect};
use gaur_server::server::{Config, Ended, Server};

const DISK_BYTES: u64 = 1 << 20;

#[test]
fn server_tells_its_exports_and_ends_in_order() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("disk.raw");
    let file = std::fs::File::create(&image).expect("a file");
    file.set_len(DISK_BYTES).expect("a length");
    let socket = folder.path().join("nbd.sock");
    let server = Server::new(Config {
        host: HostKind::Auto,
        pin: Pin::default(),
        prospect: Prospect::Neither,
        limits: Limits {
            drain: Duration::from_secs(5),
            close: Duration::from_secs(60),
        },
        log: None,
        nbd: Some((Listen::Unix(socket), nbd::Options::new(Vec::new()))),
        control: None,
        stays: false,
    });
    let server = server.unwrap_or_else(|failure| panic!("{failure}"));
    let new = NewExport {
        name: "disk".to_owned(),
        spec: ImageSpec::plain(&image, Some(Format::Raw)),
        image: ImageOptions::default(),
        description: String::new(),
        front: FrontConfig::Nbd {},
    };
    let exporter = server.exporter();
    let again = exporter.add(new.clone()).and_then(|_| exporter.add(new));
    assert!(again.is_err(), "the name is taken");
    let facts = server.exporter().all_facts();
    assert_eq!(facts.len(), 1);
    assert_eq!(
        (facts[0].kind.as_str(), facts[0].virtual_size),
        ("nbd", DISK_BYTES)
    );
    let stopper = server.stopper();
    let running = std::thread::spawn(move || server.run());
    stopper.stop();
    let ended = running.join().expect("no panic");
    assert_eq!(
        ended.unwrap_or_else(|failure| panic!("{failure}")),
        Ended::InOrder
    );
}
