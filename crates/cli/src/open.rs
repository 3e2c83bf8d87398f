//! Options about opening images that verbs share.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use gaur_engine::{AllocationPolicy, Format};
use gaur_server::host_kind::HostKind;
use gaur_server::image_spec::Aio;
pub use gaur_server::open::*;

/// Reads a format's name; the allowed ones are listed when it is none of them.
pub fn format_parser() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(["qcow2", "raw"])
        .map(|name| Format::from_name(&name).unwrap_or(Format::Raw))
}

/// Reads the name of a policy for space.
pub fn allocation_parser() -> impl TypedValueParser<Value = AllocationPolicy> {
    PossibleValuesParser::new(ALLOCATION_POLICIES)
        .map(|name| AllocationPolicy::from_name(&name).unwrap_or_default())
}

/// How a verb prints what it found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// For people
    Human,
    /// For programs
    Json,
}

/// Reads one of several values by its name.
pub fn choice<T: Copy + Send + Sync + 'static>(
    values: Vec<(PossibleValue, T)>,
) -> impl TypedValueParser<Value = T> {
    let names: Vec<PossibleValue> = values.iter().map(|(name, _)| name.clone()).collect();
    PossibleValuesParser::new(names).try_map(move |given| {
        let found = values.iter().find(|(name, _)| name.matches(&given, false));
        found.map(|(_, value)| *value).ok_or("the value is unknown")
    })
}

/// Reads a use of the host's cache.
pub fn cache_mode() -> impl TypedValueParser<Value = CacheMode> {
    let none = PossibleValue::new("none").alias("off");
    choice(vec![
        (none.help("Bypass it (O_DIRECT)"), CacheMode::None),
        (
            PossibleValue::new("writeback").help("Use it; a flush reaches the disk"),
            CacheMode::Writeback,
        ),
        (
            PossibleValue::new("writethrough")
                .help("Use it; every write reaches the disk before it is done"),
            CacheMode::Writethrough,
        ),
        (
            PossibleValue::new("directsync")
                .help("Bypass it; every write reaches the disk before it is done"),
            CacheMode::Directsync,
        ),
        (
            PossibleValue::new("unsafe").help("Use it; a flush does nothing"),
            CacheMode::Unsafe,
        ),
    ])
}

/// Reads a way to reach files.
pub fn host_kind() -> impl TypedValueParser<Value = HostKind> {
    choice(vec![
        (
            PossibleValue::new("auto").help("io_uring where it is allowed"),
            HostKind::Auto,
        ),
        (
            PossibleValue::new("uring").help("io_uring"),
            HostKind::Uring,
        ),
        (
            PossibleValue::new("blocking").help("pread and pwrite"),
            HostKind::Blocking,
        ),
    ])
}

/// Reads one of QEMU's names for ways to reach a file.
pub fn aio() -> impl TypedValueParser<Value = Aio> {
    choice(vec![
        (PossibleValue::new("threads").help("Any way"), Aio::Threads),
        (
            PossibleValue::new("native").help("Any way, with O_DIRECT"),
            Aio::Native,
        ),
        (
            PossibleValue::new("io_uring").help("io_uring or nothing"),
            Aio::Uring,
        ),
    ])
}
