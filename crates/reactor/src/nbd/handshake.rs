//! The handshake of a connection, from the greeting to an export.

use gaur_block::Errno;
use gaur_nbd::options::{self, Chosen, REPLIES_MAX, REPLY_HEADER_LEN};
use gaur_nbd::wire::{
    ALLOCATION_CONTEXT, Fields, GREETING_LEN, export_flag, handshake_flag, opt, rep,
};
use gaur_nbd::{Headers, Remote, Replies, Server, Tls, Violation};
use gaur_tls::ClientCredentials;

use super::Trouble;
use crate::secure::SecureStream;

/// Alignment where the server does not say: what the protocol asks of clients then.
const SECTOR_BYTES: u32 = 512;

/// What the two sides agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Session {
    pub(super) export: Chosen,
    pub(super) headers: Headers,
    /// The number of the context that blocks are asked about, `base:allocation` unless another was named.
    pub(super) context: Option<u32>,
}

impl Session {
    /// Offsets and lengths of requests are multiples of this.
    pub(super) fn alignment(&self) -> u32 {
        let sectors = self.export.size_bytes.is_multiple_of(SECTOR_BYTES.into());
        let usual = if sectors { SECTOR_BYTES } else { 1 };
        self.export.minimum_block.unwrap_or(usual)
    }

    /// Whether a change that is done on one connection is seen on all, and a flush there covers all.
    pub(super) fn allows_several(&self) -> bool {
        self.export.has(export_flag::CAN_MULTI_CONN)
    }

    /// Whether all that was asked for by what was agreed on `before` may still be asked for.
    pub(super) fn can_replace(&self, before: &Session) -> bool {
        let (new, old) = (&self.export, &before.export);
        let kept = [
            export_flag::SEND_FLUSH,
            export_flag::SEND_TRIM,
            export_flag::SEND_WRITE_ZEROES,
        ];
        new.size_bytes == old.size_bytes
            && kept.iter().all(|flag| new.has(*flag) || !old.has(*flag))
            && (old.has(export_flag::READ_ONLY) || !new.has(export_flag::READ_ONLY))
            && self.alignment() <= before.alignment()
            && new.maximum_payload >= old.maximum_payload
            && (self.context.is_some() || before.context.is_none())
            && (self.headers == Headers::Extended || before.headers != Headers::Extended)
    }

    pub(super) fn replies(&self) -> Replies {
        Replies::new(self.headers, self.context)
    }
}

/// A connection before its first request.
struct Handshake<'a> {
    stream: &'a SecureStream,
}

/// Chooses the export.
pub(super) async fn shake_hands(
    stream: &SecureStream,
    remote: &Remote,
) -> Result<Session, Trouble> {
    let handshake = Handshake { stream };
    let greeting = handshake.receive::<GREETING_LEN>().await?;
    let is_plain = remote.export.is_empty() && remote.tls.is_none() && remote.context.is_none();
    let offered = match options::greeting(&greeting) {
        Err(Violation::Oldstyle) if is_plain => {
            return handshake.oldstyle(&greeting).await;
        }
        greeted => greeted?,
    };
    let flags = offered & (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
    handshake.send(&flags.to_be_bytes()).await?;
    let no_zeroes = flags & handshake_flag::NO_ZEROES != 0;
    let has_options = flags & handshake_flag::FIXED_NEWSTYLE != 0;
    if let Some(tls) = &remote.tls {
        let host = match (&tls.hostname, &remote.server) {
            (Some(name), _) => name,
            (None, Server::Inet { host, .. }) => host,
            (None, Server::Unix(_)) => "localhost",
        };
        handshake.start_tls(tls, host, has_options).await?;
    }
    let headers = match has_options {
        true => handshake.headers().await?,
        false => Headers::Simple,
    };
    let context = match headers {
        Headers::Simple => None,
        _ => handshake.context(remote).await?,
    };
    let gone = match has_options {
        true => handshake.go(remote).await?,
        false => None,
    };
    let export = match gone {
        Some(export) => export,
        None => handshake.export_name(remote, no_zeroes).await?,
    };
    if let (Some(name), None) = (&remote.context, context) {
        let text = format!("the server has no bitmap or context '{name}' of this export");
        return Err(Trouble::final_word(Errno::ENOENT, text));
    }
    Ok(Session {
        export,
        headers,
        context,
    })
}

impl Handshake<'_> {
    async fn receive<const N: usize>(&self) -> Result<[u8; N], Trouble> {
        let mut bytes = [0; N];
        self.receive_into(&mut bytes).await?;
        Ok(bytes)
    }

    async fn receive_into(&self, bytes: &mut [u8]) -> Result<(), Trouble> {
        match self.stream.recv_exact(bytes).await {
            Ok(count) if count == bytes.len() => Ok(()),
            Ok(_) => Err(Trouble::closed(
                "the server closed the connection in the handshake",
            )),
            Err(errno) => Err(Trouble::system("cannot receive", errno)),
        }
    }

    async fn send(&self, bytes: &[u8]) -> Result<(), Trouble> {
        let sent = self.stream.send(bytes).await;
        sent.map_err(|errno| Trouble::system("cannot send", errno))
    }

    /// The next reply to an option: its type and content.
    async fn reply(&self, option: u32) -> Result<(u32, Vec<u8>), Trouble> {
        let header = self.receive::<REPLY_HEADER_LEN>().await?;
        let (kind, len) = options::reply_header(&header, option)?;
        let mut data = vec![0; len];
        self.receive_into(&mut data).await?;
        Ok((kind, data))
    }

    /// Has everything encrypted from here on.
    async fn start_tls(&self, tls: &Tls, host: &str, has_options: bool) -> Result<(), Trouble> {
        let refused = |text: String| Trouble::final_word(Errno::EACCES, text);
        let certificates = ClientCredentials::load(&tls.directory, tls.verify_peer)
            .and_then(|credentials| gaur_tls::Session::client(&credentials, host));
        let session = certificates.map_err(|error| refused(error.to_string()))?;
        if !has_options {
            return Err(refused("the server is too old for TLS".to_owned()));
        }
        self.send(&options::option(opt::STARTTLS, &[])).await?;
        match self.reply(opt::STARTTLS).await? {
            (rep::ACK, _) => self.stream.encrypt(session).await.map_err(refused),
            (kind, message) => Err(refused(format!(
                "the server has no TLS: {}",
                options::refusal(kind, &message)
            ))),
        }
    }

    /// The best headers that the server has.
    async fn headers(&self) -> Result<Headers, Trouble> {
        for (option, headers) in [
            (opt::EXTENDED_HEADERS, Headers::Extended),
            (opt::STRUCTURED_REPLY, Headers::Structured),
        ] {
            self.send(&options::option(option, &[])).await?;
            if self.reply(option).await?.0 == rep::ACK {
                return Ok(headers);
            }
        }
        Ok(Headers::Simple)
    }

    /// The number of the context that blocks are asked about, if the server has it.
    async fn context(&self, remote: &Remote) -> Result<Option<u32>, Trouble> {
        let context = remote.context.as_deref().unwrap_or(ALLOCATION_CONTEXT);
        let ask = options::set_meta_context(&remote.export, context);
        self.send(&ask).await?;
        let mut id = None;
        for _ in 0..REPLIES_MAX {
            match self.reply(opt::SET_META_CONTEXT).await? {
                (rep::META_CONTEXT, data) => {
                    id = Some(options::context_id(&data, context)?);
                }
                (rep::ACK, _) => return Ok(id),
                // Whatever is wrong, choosing the export tells it better.
                _ => return Ok(None),
            }
        }
        Err(Violation::OptionReplies(opt::SET_META_CONTEXT).into())
    }

    /// Nothing when the server does not know how; it chose no export then.
    async fn go(&self, remote: &Remote) -> Result<Option<Chosen>, Trouble> {
        self.send(&options::go(&remote.export)).await?;
        let mut chosen = Chosen::new(u64::MAX, 0);
        for _ in 0..REPLIES_MAX {
            match self.reply(opt::GO).await? {
                (rep::INFO, item) => chosen.add(&item)?,
                (rep::ACK, _) => return Ok(Some(chosen.check()?)),
                (rep::ERR_UNSUP, _) => return Ok(None),
                (kind, message) => {
                    let errno = match kind {
                        rep::ERR_UNKNOWN => Errno::ENOENT,
                        rep::ERR_POLICY => Errno::EACCES,
                        _ => Errno::EIO,
                    };
                    let _ = self.send(&options::option(opt::ABORT, &[])).await;
                    return Err(Trouble::final_word(errno, options::refusal(kind, &message)));
                }
            }
        }
        Err(Violation::OptionReplies(opt::GO).into())
    }

    /// The rest of what a server says that has one export and no options. Its size begins in the greeting.
    async fn oldstyle(&self, greeting: &[u8; GREETING_LEN]) -> Result<Session, Trouble> {
        let rest = self.receive::<{ 6 + 4 + 124 }>().await?;
        let told = [&greeting[16..], &rest[..10]].concat();
        let mut told = Fields(&told);
        let size_bytes = told.u64().unwrap_or_default();
        let flags = told.u32().unwrap_or_default() as u16;
        Ok(Session {
            export: Chosen::new(size_bytes, flags).check()?,
            headers: Headers::Simple,
            context: None,
        })
    }

    /// The way of servers that know no other. They close the connection when they have no such export.
    async fn export_name(&self, remote: &Remote, no_zeroes: bool) -> Result<Chosen, Trouble> {
        let ask = options::option(opt::EXPORT_NAME, remote.export.as_bytes());
        self.send(&ask).await?;
        let mut told = [0; 10 + 124];
        let told = match no_zeroes {
            true => &mut told[..10],
            false => &mut told[..],
        };
        self.receive_into(told).await?;
        let (size, rest) = told.split_at(8);
        let size_bytes = size
            .iter()
            .fold(0, |size, byte| size << 8 | u64::from(*byte));
        let flags = u16::from_be_bytes([rest[0], rest[1]]);
        Ok(Chosen::new(size_bytes, flags).check()?)
    }
}
