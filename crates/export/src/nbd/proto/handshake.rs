//! The newstyle handshake: client flags, then options until one of them chooses an export.
//!
//! Invariants: an option is looked at only when all of it has arrived, and no option longer than
//! [`OPTION_MAX_BYTES`] is looked at, so the caller's buffer needs [`Handshake::BUFFER_BYTES`]; one
//! call handles one option, so what it writes is bounded by the exports there are.

use std::borrow::Cow;
use std::cmp::Ordering;

use super::option::{self, MetaQuery};
use super::violation::Violation;
use super::wire::{
    ALLOCATION_CONTEXT, ALLOCATION_CONTEXT_ID, CLIENT_FLAGS_LEN, Fields, GREETING_LEN,
    GREETING_MAGIC, OPTION_HEADER_LEN, OPTION_MAGIC, OPTION_MAX_BYTES, OPTION_REPLY_MAGIC,
    OPTION_SKIP_MAX_BYTES, OPTIONS_MAX, STRING_MAX_BYTES, clip, handshake_flag, info, opt, rep,
};
use super::{Contexts, ExportInfo, Session, Style};

/// The exports a handshake can talk about.
pub trait Exports {
    /// Shows the name and the description of each, at most [`STRING_MAX_BYTES`] long; a description is
    /// for people, and empty for none.
    fn list(&self, show: &mut dyn FnMut(&str, &str));
    /// The number of the export that is called `name`, or else answers to the empty name. It means this
    /// export as long as the connection lasts, even if the export goes.
    fn find(&self, name: &[u8]) -> Option<usize>;
    /// Name and description of an export.
    fn names(&self, export: usize) -> (String, String);
    /// Facts about an export, or one line that says why it cannot be served.
    fn info(&self, export: usize) -> Result<ExportInfo, String>;
    /// Its metadata contexts: numbers (below 128) and names.
    fn contexts(&self, _export: usize) -> Vec<(u32, String)> {
        vec![(ALLOCATION_CONTEXT_ID, ALLOCATION_CONTEXT.to_owned())]
    }
}

/// What comes of feeding a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// More bytes are needed.
    Need,
    /// An option was handled; call again with what is left.
    Again,
    /// The client was told that the TLS handshake comes next. Nothing may be left that arrived before it.
    StartTls,
    /// The transmission phase begins with the next byte.
    Transmit(Session),
    /// The client said goodbye: send what there is to send and close.
    Abort,
    /// The client broke the protocol: close.
    Violation(Violation),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    ClientFlags,
    Option,
    Skip { left: usize },
    Ended,
}

/// What is done about TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tls {
    /// It is not offered.
    Off,
    /// Nothing else is talked about before.
    Required,
    /// All of this is encrypted.
    On,
}

/// How an option is refused: the type of the reply, and its message.
type Refused = (u32, Cow<'static, str>);

const NO_DATA: Refused = (
    rep::ERR_INVALID,
    Cow::Borrowed("this option carries no data"),
);
const NO_EXPORT: Refused = (rep::ERR_UNKNOWN, Cow::Borrowed("no export of that name"));

fn invalid(message: &'static str) -> Refused {
    (rep::ERR_INVALID, message.into())
}

/// The handshake of one connection.
#[derive(Debug)]
pub struct Handshake {
    state: State,
    fixed_newstyle: bool,
    no_zeroes: bool,
    style: Style,
    /// An export, and the contexts that were chosen for it.
    contexts_for: Option<(usize, Contexts)>,
    options: u32,
    tls: Tls,
    has_refused: bool,
}

impl Default for Handshake {
    fn default() -> Self {
        Handshake::new()
    }
}

impl Handshake {
    /// A buffer of this many bytes holds whatever one call needs to see at once.
    pub const BUFFER_BYTES: usize = OPTION_HEADER_LEN + OPTION_MAX_BYTES as usize;

    /// A handshake before its first byte.
    pub fn new() -> Handshake {
        Handshake {
            state: State::ClientFlags,
            fixed_newstyle: false,
            no_zeroes: false,
            style: Style::Simple,
            contexts_for: None,
            options: 0,
            tls: Tls::Off,
            has_refused: false,
        }
    }

    /// The same of a server that talks about nothing before the client has switched to TLS.
    pub fn with_tls() -> Handshake {
        Handshake {
            tls: Tls::Required,
            ..Handshake::new()
        }
    }

    /// Whether an option of the client was refused.
    pub fn has_refused(&self) -> bool {
        self.has_refused
    }

    /// What the server says first.
    pub fn greeting() -> [u8; GREETING_LEN] {
        let flags = (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES) as u16;
        let mut greeting = [0; GREETING_LEN];
        greeting[..8].copy_from_slice(&GREETING_MAGIC.to_be_bytes());
        greeting[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        greeting[16..].copy_from_slice(&flags.to_be_bytes());
        greeting
    }

    /// Takes the front of `input`, what has arrived and was not used yet; appends to `out` what is
    /// to be sent. Returns how many bytes of `input` were used.
    pub fn feed(
        &mut self,
        input: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> (usize, Step) {
        let (used, step) = match self.state {
            State::ClientFlags => self.client_flags(input),
            State::Option => self.option(input, exports, out),
            State::Skip { left } => self.skip(input, left),
            State::Ended => (0, Step::Need),
        };
        if matches!(step, Step::Transmit(_) | Step::Abort | Step::Violation(_)) {
            self.state = State::Ended;
        }
        (used, step)
    }

    fn client_flags(&mut self, input: &[u8]) -> (usize, Step) {
        let Some(flags) = Fields(input).u32() else {
            return (0, Step::Need);
        };
        if flags & !(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES) != 0 {
            let violation = Violation::ClientFlags(flags);
            return (CLIENT_FLAGS_LEN, Step::Violation(violation));
        }
        self.fixed_newstyle = flags & handshake_flag::FIXED_NEWSTYLE != 0;
        self.no_zeroes = flags & handshake_flag::NO_ZEROES != 0;
        self.state = State::Option;
        (CLIENT_FLAGS_LEN, Step::Again)
    }

    fn skip(&mut self, input: &[u8], left: usize) -> (usize, Step) {
        let used = left.min(input.len());
        if used == left {
            self.state = State::Option;
            return (used, Step::Again);
        }
        self.state = State::Skip { left: left - used };
        (used, Step::Need)
    }

    fn option(&mut self, input: &[u8], exports: &dyn Exports, out: &mut Vec<u8>) -> (usize, Step) {
        let mut fields = Fields(input);
        // The magic is judged as soon as it is there: a peer that speaks something else is told
        // apart from a slow one at once.
        let Some(magic) = fields.u64() else {
            return (0, Step::Need);
        };
        if magic != OPTION_MAGIC {
            return (8, Step::Violation(Violation::OptionMagic(magic)));
        }
        let (Some(option), Some(len_bytes)) = (fields.u32(), fields.u32()) else {
            return (0, Step::Need);
        };
        if len_bytes > OPTION_SKIP_MAX_BYTES {
            let violation = Violation::OptionLength { option, len_bytes };
            return (OPTION_HEADER_LEN, Step::Violation(violation));
        }
        if len_bytes <= OPTION_MAX_BYTES && fields.0.len() < len_bytes as usize {
            return (0, Step::Need);
        }
        self.options += 1;
        if self.options > OPTIONS_MAX {
            let violation = Violation::TooManyOptions;
            return (OPTION_HEADER_LEN, Step::Violation(violation));
        }
        if !self.fixed_newstyle && option != opt::EXPORT_NAME {
            let violation = Violation::NotFixedNewstyle(option);
            return (OPTION_HEADER_LEN, Step::Violation(violation));
        }
        if len_bytes > OPTION_MAX_BYTES {
            self.has_refused = true;
            refuse(out, option, (rep::ERR_TOO_BIG, "option is too long".into()));
            self.state = State::Skip {
                left: len_bytes as usize,
            };
            return (OPTION_HEADER_LEN, Step::Again);
        }
        let data = &fields.0[..len_bytes as usize];
        let step = self.handle(option, data, exports, out);
        (OPTION_HEADER_LEN + data.len(), step)
    }

    fn handle(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Step {
        if self.tls == Tls::Required && !matches!(option, opt::STARTTLS | opt::ABORT) {
            if option == opt::EXPORT_NAME {
                return Step::Violation(Violation::NoTls);
            }
            let reason = "this server talks about nothing before TLS";
            self.has_refused = true;
            refuse(out, option, (rep::ERR_TLS_REQD, reason.into()));
            return Step::Again;
        }
        let handled = match option {
            opt::EXPORT_NAME => return self.export_name(data, exports, out),
            opt::ABORT => {
                answer(out, option, rep::ACK, &[]);
                return Step::Abort;
            }
            opt::LIST => list(data, exports, out),
            opt::INFO | opt::GO => self.go(option, data, exports, out),
            opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS => self.raise_style(option, data, out),
            opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => {
                self.meta_context(option, data, exports, out)
            }
            opt::STARTTLS => self.start_tls(data, out),
            _ => Err((rep::ERR_UNSUP, "unknown option".into())),
        };
        handled.unwrap_or_else(|refused| {
            self.has_refused = true;
            refuse(out, option, refused);
            Step::Again
        })
    }

    fn session(&self, export: usize, info: &ExportInfo) -> Session {
        Session {
            export,
            size_bytes: info.size_bytes,
            read_only: info.read_only,
            style: self.style,
            contexts: match self.contexts_for {
                Some((chosen, contexts)) if chosen == export && self.structured() => contexts,
                _ => Contexts::default(),
            },
        }
    }

    fn start_tls(&mut self, data: &[u8], out: &mut Vec<u8>) -> Result<Step, Refused> {
        match self.tls {
            Tls::Off => return Err((rep::ERR_POLICY, "TLS not configured".into())),
            Tls::On => return Err(invalid("TLS was agreed on already")),
            Tls::Required if !data.is_empty() => return Err(NO_DATA),
            Tls::Required => self.tls = Tls::On,
        }
        answer(out, opt::STARTTLS, rep::ACK, &[]);
        Ok(Step::StartTls)
    }

    fn export_name(&mut self, data: &[u8], exports: &dyn Exports, out: &mut Vec<u8>) -> Step {
        let Some(export) = exports.find(data) else {
            let name = String::from_utf8_lossy(&data[..data.len().min(STRING_MAX_BYTES)]);
            return Step::Violation(Violation::UnknownExport(name.into_owned()));
        };
        let info = match exports.info(export) {
            Ok(info) => info,
            Err(reason) => return Step::Violation(Violation::ExportUnavailable(reason)),
        };
        out.extend_from_slice(&info.size_bytes.to_be_bytes());
        out.extend_from_slice(&info.flags(self.style).to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; 124]);
        }
        Step::Transmit(self.session(export, &info))
    }

    fn structured(&self) -> bool {
        self.style >= Style::Structured
    }

    /// `STRUCTURED_REPLY` and `EXTENDED_HEADERS`. Extended headers include structured replies, so
    /// they may come second but not first.
    fn raise_style(
        &mut self,
        option: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Step, Refused> {
        let style = match option {
            opt::EXTENDED_HEADERS => Style::Extended,
            _ => Style::Structured,
        };
        if !data.is_empty() {
            return Err(NO_DATA);
        }
        match self.style.cmp(&style) {
            Ordering::Equal => return Err(invalid("this was agreed on already")),
            Ordering::Greater => {
                let reason = "extended headers were agreed on already";
                return Err((rep::ERR_EXT_HEADER_REQD, reason.into()));
            }
            Ordering::Less => self.style = style,
        }
        answer(out, option, rep::ACK, &[]);
        Ok(Step::Again)
    }

    fn go(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Step, Refused> {
        let wanted = option::Wanted::parse(data);
        let wanted = wanted.ok_or_else(|| invalid("malformed request for an export"))?;
        let export = exports.find(wanted.name).ok_or(NO_EXPORT)?;
        // The protocol has no "cannot be served now" but this; the text says why.
        let unavailable = |reason: String| (rep::ERR_UNKNOWN, reason.into());
        let found = exports.info(export).map_err(unavailable)?;
        let (name, description) = exports.names(export);
        if wanted.asks(info::NAME) {
            inform(out, option, info::NAME, &[name.as_bytes()]);
        }
        if wanted.asks(info::DESCRIPTION) && !description.is_empty() {
            inform(out, option, info::DESCRIPTION, &[description.as_bytes()]);
        }
        if wanted.asks(info::BLOCK_SIZE) {
            let [minimum, preferred, maximum] = found.block_sizes().map(u32::to_be_bytes);
            let sizes: [&[u8]; 3] = [&minimum, &preferred, &maximum];
            inform(out, option, info::BLOCK_SIZE, &sizes);
        }
        let size = found.size_bytes.to_be_bytes();
        let flags = found.flags(self.style).to_be_bytes();
        inform(out, option, info::EXPORT, &[&size, &flags]);
        answer(out, option, rep::ACK, &[]);
        Ok(match option {
            opt::GO => Step::Transmit(self.session(export, &found)),
            _ => Step::Again,
        })
    }

    fn meta_context(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Step, Refused> {
        let set = option == opt::SET_META_CONTEXT;
        if set {
            // A new choice replaces the old one even when it fails.
            self.contexts_for = None;
        }
        if !self.structured() {
            return Err(invalid("agree on structured replies first"));
        }
        let query = MetaQuery::parse(data);
        let query = query.ok_or_else(|| invalid("malformed metadata context query"))?;
        let export = exports.find(query.name).ok_or(NO_EXPORT)?;
        let mut chosen = Contexts::default();
        for (id, name) in exports.contexts(export) {
            if query.selects(&name, set) {
                chosen.insert(id);
                let id = if set { id } else { 0 }.to_be_bytes();
                let parts: [&[u8]; 2] = [&id, name.as_bytes()];
                answer(out, option, rep::META_CONTEXT, &parts);
            }
        }
        if set {
            self.contexts_for = Some((export, chosen));
        }
        answer(out, option, rep::ACK, &[]);
        Ok(Step::Again)
    }
}

fn list(data: &[u8], exports: &dyn Exports, out: &mut Vec<u8>) -> Result<Step, Refused> {
    if !data.is_empty() {
        return Err(NO_DATA);
    }
    exports.list(&mut |name, description| {
        let len = (name.len() as u32).to_be_bytes();
        let parts = [&len, name.as_bytes(), description.as_bytes()];
        answer(out, opt::LIST, rep::SERVER, &parts);
    });
    answer(out, opt::LIST, rep::ACK, &[]);
    Ok(Step::Again)
}

fn inform(out: &mut Vec<u8>, option: u32, item: u16, parts: &[&[u8]]) {
    let item = item.to_be_bytes();
    let mut all: [&[u8]; 4] = [&item, &[], &[], &[]];
    all[1..=parts.len()].copy_from_slice(parts);
    answer(out, option, rep::INFO, &all);
}

fn refuse(out: &mut Vec<u8>, option: u32, (reply, message): Refused) {
    answer(out, option, reply, &[clip(&message).as_bytes()]);
}

fn answer(out: &mut Vec<u8>, option: u32, reply: u32, parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&reply.to_be_bytes());
    out.extend_from_slice(&(len as u32).to_be_bytes());
    for part in parts {
        out.extend_from_slice(part);
    }
}
