//! How the image of an export is opened, as a command line says it.

use std::path::PathBuf;

use clap::builder::{PossibleValue, TypedValueParser};
use gaur_engine::{AllocationPolicy, Format};
use gaur_server::exporter::{Discard, ImageOptions};

use crate::open::{CacheMode, allocation_parser, cache_mode, choice, format_parser};

/// How an image is opened for an export.
#[derive(Clone, Debug, clap::Args)]
pub struct ImageArgs {
    /// Format of the images (probed by default)
    #[arg(short, long, value_name = "FMT", value_parser = format_parser())]
    pub format: Option<Format>,
    /// The images are lists of options, driver=qcow2,file.filename=PATH,..
    #[arg(long, conflicts_with = "format")]
    pub image_opts: bool,
    /// Refuse writes
    #[arg(short, long)]
    pub read_only: bool,
    /// Serve the disk as it was when this internal snapshot (an id or a name) was made; it cannot be
    /// written to, unless --temporary is given
    #[arg(long, value_name = "NAME")]
    pub snapshot: Option<String>,
    /// What clients write is kept beside the image, in $TMPDIR, and forgotten at the end
    #[arg(long, conflicts_with = "read_only")]
    pub temporary: bool,
    /// Use of the host's cache
    #[arg(long, value_name = "MODE", value_parser = cache_mode(), default_value = "writeback")]
    pub cache: CacheMode,
    /// What a client's discard does
    #[arg(long, value_name = "MODE", value_parser = discard(), default_value = "unmap")]
    pub discard: Discard,
    /// What to do with the host's space, whatever the image says
    #[arg(long, value_name = "POLICY", value_parser = allocation_parser())]
    pub allocation: Option<AllocationPolicy>,
    /// Remove the images' persistent bitmaps with the first write, which would make them useless
    #[arg(long)]
    pub drop_bitmaps: bool,
    /// Keep in FILE (in /run, or where else a reboot forgets it) what clients have been told is written
    /// and the image does not say yet; what a server that was killed left there is taken over, unless
    /// somebody else has written to the image since
    #[arg(long, value_name = "FILE", conflicts_with_all = ["read_only", "snapshot", "temporary"])]
    pub handover: Option<PathBuf>,
}

fn discard() -> impl TypedValueParser<Value = Discard> {
    choice(vec![
        (
            PossibleValue::new("unmap").help("Give the space back to the host"),
            Discard::Unmap,
        ),
        (
            PossibleValue::new("ignore").help("Nothing"),
            Discard::Ignore,
        ),
    ])
}

impl ImageArgs {
    /// What they say.
    pub fn options(&self) -> ImageOptions {
        ImageOptions {
            format: self.format,
            image_opts: self.image_opts,
            read_only: self.read_only,
            snapshot: self.snapshot.clone(),
            temporary: self.temporary,
            cache: self.cache,
            discard: self.discard,
            allocation: self.allocation,
            drop_bitmaps: self.drop_bitmaps,
            handover: self.handover.clone(),
            kept: None,
        }
    }
}
