//! Options of QEMU's `nbd` driver, which name an export.

use std::path::PathBuf;

use gaur_reactor::nbd::{Patience, Remote, Server, Tls};

use super::OptionReader;
use crate::failure::Failure;
use crate::key_values::Value;
use crate::tls_objects;

#[derive(Clone, Copy)]
enum Kind {
    Inet,
    Unix,
}

impl OptionReader {
    /// The options of an export, whose names begin with `below`; returns its name.
    pub(super) fn nbd(&mut self, below: &str) -> Result<String, Failure> {
        let keys = &mut self.keys;
        let key = |name: &str| format!("{below}{name}");
        let inet = [("inet", Kind::Inet), ("unix", Kind::Unix)];
        let kind = keys.take_choice(&key("server.type"), &inet)?;
        // QEMU's older names of the same. Both may not be said.
        let mut one = |new: &str, old: &str| {
            let said = (keys.take(&key(new)), keys.take(&key(old)));
            match said {
                (Some(_), Some(_)) => {
                    let (new, old) = (key(new), key(old));
                    let message = format!("options '{new}' and '{old}' are the same");
                    Err(Failure::new(message))
                }
                (value, None) | (None, value) => Ok(value.map(|value| match value {
                    Value::String(text) => text,
                    other => other.to_string(),
                })),
            }
        };
        let host = one("server.host", "host")?;
        let port = one("server.port", "port")?;
        let path = one("server.path", "path")?;
        let server = match (kind, host, path) {
            (None | Some(Kind::Unix), None, Some(path)) => match port {
                None => Server::Unix(PathBuf::from(path)),
                Some(_) => {
                    let message = format!("option '{}' has no use with a path", key("port"));
                    return Err(Failure::new(message));
                }
            },
            (None | Some(Kind::Inet), Some(host), None) => {
                let port = port.map_or(Ok(Server::PORT), |port| {
                    let bad = || Failure::new(format!("'{port}' is no port"));
                    port.parse().map_err(|_| bad())
                })?;
                Server::Inet { host, port }
            }
            _ => {
                let failure = Failure::new(format!(
                    "an NBD export is named by '{}' or by '{}'",
                    key("server.host"),
                    key("server.path")
                ));
                let hint = "server.type=inet,server.host=HOST,server.port=PORT or server.type=unix,server.path=PATH";
                return Err(failure.hint(hint));
            }
        };
        let usual = Patience::default();
        let mut seconds = |name: &str, usual: u32| {
            let told = keys.take_number(&key(name))?;
            Ok::<_, Failure>(told.unwrap_or(usual))
        };
        let patience = Patience {
            reconnect_delay: seconds("reconnect-delay", usual.reconnect_delay)?,
            open_timeout: seconds("open-timeout", usual.open_timeout)?,
            request_timeout: seconds("request-timeout", usual.request_timeout)?,
        };
        let tls = self.nbd_tls(below)?;
        let keys = &mut self.keys;
        let remote = Remote {
            server,
            tls,
            context: keys.take_text(&key("x-dirty-bitmap"))?,
            export: keys.take_text(&key("export"))?.unwrap_or_default(),
            patience,
        };
        Ok(remote.to_string())
    }

    /// How the connection is encrypted.
    fn nbd_tls(&mut self, below: &str) -> Result<Option<Tls>, Failure> {
        let (name, creds) = (format!("{below}tls-hostname"), format!("{below}tls-creds"));
        let hostname = self.keys.take_text(&name)?;
        match (self.keys.take_text(&creds)?, hostname) {
            (Some(id), hostname) => tls_objects::client_tls(&id, hostname).map(Some),
            (None, None) => Ok(None),
            (None, Some(_)) => Err(Failure::new(format!("option '{name}' without '{creds}'"))),
        }
    }
}
