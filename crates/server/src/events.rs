//! Events of a server as lines: time, level, what it is about, what has happened.

use std::fmt::{Debug, Write};

use jiff::Zoned;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::notice::say;

/// From now on events of exports are lines of the log. A subscriber that was there before stays.
pub fn log_events() {
    let _ = tracing::subscriber::set_global_default(Lines);
}

/// A time as the log shows it.
pub(crate) fn time(at: &Zoned) -> String {
    at.strftime("%Y-%m-%d %H:%M:%S").to_string()
}

/// Says the events of this crate. The engine's are said by the exports that they concern.
struct Lines;

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event()
            && *metadata.level() <= LevelFilter::INFO
            && metadata.target().starts_with(env!("CARGO_CRATE_NAME"))
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let (now, level) = (time(&Zoned::now()), event.metadata().level());
        say(format!("{now} {level} {}{}", line.export, line.message));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The parts of a line.
#[derive(Default)]
struct Line {
    export: String,
    message: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            "export" => write!(self.export, "{value:?}: "),
            other => write!(self.message, " {other}={value:?}"),
        };
    }
}
