//! `qemu-nbd -L`: what another server exports. A client that talks and never reads a disk; its calls block.

use std::io::Write;
use std::net::ToSocketAddrs;
use std::path::Path;
use std::sync::Arc;

use gaur_nbd::options::{self, REPLY_HEADER_LEN};
use gaur_nbd::wire::{Fields, GREETING_LEN, export_flag, handshake_flag, info, opt, rep};
use gaur_reactor::{Address, SecureStream, Stream, block_on};
use gaur_tls::{ClientCredentials, Session};

use crate::failure::Failure;

/// Most exports, and most contexts of one, that are listed.
const LIST_MAX: usize = 1 << 16;

/// Transmission flags, lowest first, by their names in QEMU's list.
const FLAGS: [(u16, &str); 11] = [
    (export_flag::READ_ONLY, "readonly"),
    (export_flag::SEND_FLUSH, "flush"),
    (export_flag::SEND_FUA, "fua"),
    (1 << 4, "rotational"),
    (export_flag::SEND_TRIM, "trim"),
    (export_flag::SEND_WRITE_ZEROES, "zeroes"),
    (export_flag::SEND_DF, "df"),
    (export_flag::CAN_MULTI_CONN, "multi"),
    (export_flag::SEND_CACHE, "cache"),
    (export_flag::SEND_FAST_ZERO, "fast-zero"),
    (export_flag::BLOCK_STAT_PAYLOAD, "block-status-payload"),
];

/// Where the server is.
pub enum Place<'a> {
    Unix(&'a Path),
    Tcp(&'a str, u16),
}

/// TLS, and the name that the server's certificate has to have.
pub struct Tls<'a> {
    pub credentials: ClientCredentials,
    pub host: Option<&'a str>,
}

/// What a server says of an export.
#[derive(Debug, Default)]
pub(super) struct Export {
    name: String,
    description: String,
    pub(super) size_bytes: u64,
    pub(super) flags: u16,
    /// Minimum, preferred and maximum.
    pub(super) blocks: Option<[u32; 3]>,
    contexts: Vec<String>,
}

/// Prints what the server exports.
pub fn run(place: &Place<'_>, tls: Option<Tls<'_>>, out: &mut dyn Write) -> Result<u8, Failure> {
    let client = Client {
        stream: SecureStream::plain(Arc::new(connect(place)?)),
    };
    client.greet()?;
    if let Some(tls) = tls {
        client.start_tls(&tls)?;
    }
    let is_extended = client.agrees(opt::EXTENDED_HEADERS)?;
    let is_structured = is_extended || client.agrees(opt::STRUCTURED_REPLY)?;
    let mut exports = client.list()?;
    for export in &mut exports {
        client.info(export)?;
        if is_structured {
            export.contexts = client.contexts(&export.name)?;
        }
    }
    client.send(&options::option(opt::ABORT, &[]))?;
    print(&exports, is_extended, out)?;
    Ok(0)
}

pub(super) fn connect(place: &Place<'_>) -> Result<Stream, Failure> {
    let try_one = |address: &Address| block_on(Stream::connect(address));
    match place {
        Place::Unix(path) => {
            let connected = try_one(&Address::Unix(path.to_path_buf()));
            connected.map_err(|errno| Failure::about(path, format!("cannot connect: {errno}")))
        }
        Place::Tcp(host, port) => {
            let name = format!("{host}:{port}");
            let unknown = || Failure::about(&name, "no such address or host name");
            let addresses = (*host, *port).to_socket_addrs().map_err(|_| unknown())?;
            let mut failure = unknown();
            for address in addresses {
                match try_one(&Address::Tcp(address)) {
                    Ok(stream) => return Ok(stream),
                    Err(errno) => {
                        failure = Failure::about(&name, format!("cannot connect: {errno}"));
                    }
                }
            }
            Err(failure)
        }
    }
}

fn print(exports: &[Export], is_extended: bool, out: &mut dyn Write) -> Result<(), Failure> {
    writeln!(out, "exports available: {}", exports.len())?;
    for export in exports {
        writeln!(out, " export: '{}'", export.name)?;
        if !export.description.is_empty() {
            writeln!(out, "  description: {}", export.description)?;
        }
        if export.flags & export_flag::HAS_FLAGS != 0 {
            writeln!(out, "  size:  {}", export.size_bytes)?;
            let known = FLAGS.iter().filter(|(flag, _)| export.flags & flag != 0);
            let names: String = known.map(|(_, name)| format!(" {name}")).collect();
            writeln!(out, "  flags: 0x{:x} ({names} )", export.flags)?;
        }
        if let Some([minimum, preferred, maximum]) = export.blocks {
            writeln!(out, "  min block: {minimum}\n  opt block: {preferred}")?;
            writeln!(out, "  max block: {maximum}")?;
        }
        let bits = if is_extended { 64 } else { 32 };
        writeln!(out, "  transaction size: {bits}-bit")?;
        if !export.contexts.is_empty() {
            let count = export.contexts.len();
            writeln!(out, "  available meta contexts: {count}")?;
            for context in &export.contexts {
                writeln!(out, "   {context}")?;
            }
        }
    }
    Ok(())
}

pub(super) struct Client {
    pub(super) stream: SecureStream,
}

impl Client {
    fn send(&self, bytes: &[u8]) -> Result<(), Failure> {
        let sent = block_on(self.stream.send(bytes));
        sent.map_err(|errno| Failure::new(format!("cannot send: {errno}")))
    }

    fn receive(&self, len: usize) -> Result<Vec<u8>, Failure> {
        let mut bytes = vec![0; len];
        match block_on(self.stream.recv_exact(&mut bytes)) {
            Ok(count) if count == len => Ok(bytes),
            Ok(_) => Err(Failure::new("the server hung up")),
            Err(errno) => Err(Failure::new(match self.stream.failure() {
                Some(why) => format!("TLS: {why}"),
                None => format!("cannot receive: {errno}"),
            })),
        }
    }

    pub(super) fn greet(&self) -> Result<(), Failure> {
        let greeting = self.receive(GREETING_LEN)?;
        let offered = options::greeting(&greeting).map_err(strange)?;
        if offered & handshake_flag::FIXED_NEWSTYLE == 0 {
            return Err(Failure::new("the server is too old to list its exports"));
        }
        let flags = offered & (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        self.send(&flags.to_be_bytes())
    }

    /// The next reply to an option: its type and content.
    fn reply(&self, option: u32) -> Result<(u32, Vec<u8>), Failure> {
        let header = self.receive(REPLY_HEADER_LEN)?;
        let (kind, len) = options::reply_header(&header, option).map_err(strange)?;
        Ok((kind, self.receive(len)?))
    }

    fn start_tls(&self, tls: &Tls<'_>) -> Result<(), Failure> {
        self.send(&options::option(opt::STARTTLS, &[]))?;
        let (kind, message) = self.reply(opt::STARTTLS)?;
        if kind != rep::ACK {
            let why = options::refusal(kind, &message);
            return Err(Failure::new(format!("no TLS: {why}")));
        }
        let failed = |error: gaur_tls::TlsError| Failure::new(error.to_string());
        let host = tls.host.ok_or_else(|| {
            let failure = Failure::new("no hostname for certificate validation");
            failure.hint("--tls-hostname NAME gives it")
        })?;
        let session = Session::client(&tls.credentials, host).map_err(failed)?;
        block_on(self.stream.encrypt(session)).map_err(Failure::new)
    }

    /// Whether the server agrees to an option without content.
    fn agrees(&self, option: u32) -> Result<bool, Failure> {
        self.send(&options::option(option, &[]))?;
        match self.reply(option)? {
            (rep::ACK, _) => Ok(true),
            (rep::ERR_TLS_REQD, _) => Err(tls_wanted()),
            _ => Ok(false),
        }
    }

    fn list(&self) -> Result<Vec<Export>, Failure> {
        self.send(&options::option(opt::LIST, &[]))?;
        let mut exports = Vec::new();
        while exports.len() < LIST_MAX {
            match self.reply(opt::LIST)? {
                (rep::ACK, _) => return Ok(exports),
                (rep::SERVER, data) => {
                    let mut fields = Fields(&data);
                    let name = fields.string().ok_or_else(malformed)?;
                    exports.push(Export::named(String::from_utf8_lossy(name).into_owned()));
                }
                (rep::ERR_TLS_REQD, _) => return Err(tls_wanted()),
                (kind, message) => return Err(Failure::new(options::refusal(kind, &message))),
            }
        }
        Err(Failure::new(format!(
            "the server lists more than {LIST_MAX} exports"
        )))
    }

    /// Asks about an export. Nothing more is known of it when the server does not answer that.
    fn info(&self, export: &mut Export) -> Result<(), Failure> {
        self.ask(opt::INFO, export).map(drop)
    }

    /// Begins transmission with an export, and learns about it.
    pub(super) fn go(&self, export: &mut Export) -> Result<(), Failure> {
        match self.ask(opt::GO, export)? {
            (rep::ACK, _) => Ok(()),
            (kind, message) => Err(Failure::new(options::refusal(kind, &message))),
        }
    }

    /// Asks about an export; the reply that ends the answer.
    fn ask(&self, option: u32, export: &mut Export) -> Result<(u32, Vec<u8>), Failure> {
        let name = export.name.as_bytes();
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend_from_slice(name);
        let items = [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE];
        data.extend_from_slice(&(items.len() as u16).to_be_bytes());
        data.extend(items.iter().flat_map(|item| item.to_be_bytes()));
        self.send(&options::option(option, &data))?;
        for _ in 0..LIST_MAX {
            match self.reply(option)? {
                (rep::INFO, item) => export.add(&item).ok_or_else(malformed)?,
                end => return Ok(end),
            }
        }
        Err(malformed())
    }

    fn contexts(&self, export: &str) -> Result<Vec<String>, Failure> {
        let mut data = (export.len() as u32).to_be_bytes().to_vec();
        data.extend_from_slice(export.as_bytes());
        data.extend_from_slice(&0_u32.to_be_bytes());
        self.send(&options::option(opt::LIST_META_CONTEXT, &data))?;
        let mut contexts = Vec::new();
        while contexts.len() < LIST_MAX {
            match self.reply(opt::LIST_META_CONTEXT)? {
                (rep::META_CONTEXT, data) => {
                    let name = data.get(4..).ok_or_else(malformed)?;
                    contexts.push(String::from_utf8_lossy(name).into_owned());
                }
                _ => return Ok(contexts),
            }
        }
        Err(malformed())
    }
}

impl Export {
    pub(super) fn named(name: String) -> Export {
        Export {
            name,
            ..Export::default()
        }
    }

    fn add(&mut self, item: &[u8]) -> Option<()> {
        let mut fields = Fields(item);
        match fields.u16()? {
            info::EXPORT => {
                self.size_bytes = fields.u64()?;
                self.flags = fields.u16()?;
            }
            info::DESCRIPTION => {
                self.description = String::from_utf8_lossy(fields.0).into_owned();
            }
            info::BLOCK_SIZE => {
                self.blocks = Some([fields.u32()?, fields.u32()?, fields.u32()?]);
            }
            _ => {}
        }
        Some(())
    }
}

fn strange(violation: gaur_nbd::Violation) -> Failure {
    Failure::new(violation.to_string())
}

fn malformed() -> Failure {
    Failure::new("the server's answer is malformed")
}

fn tls_wanted() -> Failure {
    let failure = Failure::new("the server wants TLS before it lists its exports");
    failure.hint("--tls-creds names credentials")
}
