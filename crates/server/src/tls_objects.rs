//! `--object` of QEMU's command lines: credentials for TLS, and who may come in. Secrets are for [`crate::keys`].

use std::path::PathBuf;
use std::sync::OnceLock;

use gaur_reactor::nbd::Tls;
use gaur_tls::{Authorization, ClientCredentials, Decision, Pattern, Rule, ServerCredentials};

use crate::failure::Failure;
use crate::key_values::KeyValues;

/// Which side of a connection has credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    Server,
    Client,
}

/// Where credentials are.
#[derive(Clone, Debug)]
struct Credentials {
    id: String,
    endpoint: Endpoint,
    directory: PathBuf,
    verify_peer: bool,
}

/// The objects of a command line.
#[derive(Clone, Debug, Default)]
pub struct TlsObjects {
    credentials: Vec<Credentials>,
    authorizations: Vec<(String, Authorization)>,
    /// The objects of other kinds, word by word.
    others: Vec<String>,
}

/// The objects of this process's command line that are about TLS, and their words. Images name credentials by their
/// ids, wherever they are named.
static NAMED: OnceLock<(TlsObjects, Vec<String>)> = OnceLock::new();

/// Takes the objects of the command line, before any image is named. Later calls change nothing.
///
/// # Errors
/// When one of them makes no sense.
pub fn name(objects: &[String]) -> Result<(), Failure> {
    let all = TlsObjects::parse(objects)?;
    let is_ours = |text: &&String| !all.others.contains(text);
    let words = objects.iter().filter(is_ours).cloned().collect();
    NAMED.get_or_init(|| (all, words));
    Ok(())
}

/// Whether an object is one of those, and so none for [`crate::keys`].
pub(crate) fn is_named(object: &str) -> bool {
    let named = NAMED.get();
    named.is_some_and(|(_, words)| words.iter().any(|word| word == object))
}

/// How a connection is encrypted with the credentials of this id.
pub(crate) fn client_tls(id: &str, hostname: Option<String>) -> Result<Tls, Failure> {
    let none = TlsObjects::default();
    let objects = NAMED.get().map_or(&none, |(objects, _)| objects);
    let found = objects.find(id, Endpoint::Client).map_err(|failure| {
        let object = format!("--object tls-creds-x509,id={id},dir=DIRECTORY");
        match failure.hint.is_some() {
            true => failure,
            false => failure.hint(format!("{object} names them")),
        }
    })?;
    Ok(Tls {
        directory: found.directory.clone(),
        hostname,
        verify_peer: found.verify_peer,
    })
}

/// Most rules of a list.
const RULES_MAX: usize = 10_000;

impl TlsObjects {
    /// Reads the objects. Nothing is loaded yet.
    ///
    /// # Errors
    /// When one of them makes no sense.
    pub fn parse(objects: &[String]) -> Result<TlsObjects, Failure> {
        let mut all = TlsObjects::default();
        for text in objects {
            let added = all.add(text);
            added.map_err(|failure| failure.with_subject("--object"))?;
        }
        Ok(all)
    }

    fn add(&mut self, text: &str) -> Result<(), Failure> {
        let (kind, rest) = text.split_once(',').unwrap_or((text, ""));
        let read = || KeyValues::from_option_string(rest);
        match kind {
            "tls-creds-x509" => self.credentials.push(credentials(read()?)?),
            "authz-simple" => self.authorizations.push(simple(read()?)?),
            "authz-list" => self.authorizations.push(list(read()?)?),
            "tls-creds-psk" | "tls-creds-anon" => {
                let message = format!("{kind} is not supported, rustls has only certificates");
                return Err(
                    Failure::new(message).hint("tls-creds-x509 names a directory with them")
                );
            }
            "authz-list-file" | "authz-pam" => {
                let failure = Failure::new(format!("{kind} is not supported"));
                return Err(failure.hint("authz-simple and authz-list are"));
            }
            _ => self.others.push(text.to_owned()),
        }
        Ok(())
    }

    /// Those that are not about TLS.
    pub fn others(&self) -> &[String] {
        &self.others
    }

    /// Loads a server's credentials.
    ///
    /// # Errors
    /// When there are none of that id for a server, or they cannot be used.
    pub fn server(&self, id: &str) -> Result<ServerCredentials, Failure> {
        let found = self.find(id, Endpoint::Server)?;
        ServerCredentials::load(&found.directory, found.verify_peer).map_err(failed)
    }

    /// Loads a client's credentials.
    ///
    /// # Errors
    /// As [`TlsObjects::server`].
    pub fn client(&self, id: &str) -> Result<ClientCredentials, Failure> {
        let found = self.find(id, Endpoint::Client)?;
        ClientCredentials::load(&found.directory, found.verify_peer).map_err(failed)
    }

    /// Who may come in.
    ///
    /// # Errors
    /// When no authorization has that id.
    pub fn authorization(&self, id: &str) -> Result<Authorization, Failure> {
        let found = self.authorizations.iter().find(|(own, _)| own == id);
        let found = found.map(|(_, authorization)| authorization.clone());
        found.ok_or_else(|| Failure::new(format!("no authorization object with id '{id}'")))
    }

    fn find(&self, id: &str, endpoint: Endpoint) -> Result<&Credentials, Failure> {
        let found = self.credentials.iter().find(|one| one.id == id);
        let found =
            found.ok_or_else(|| Failure::new(format!("no TLS credentials with id '{id}'")))?;
        if found.endpoint != endpoint {
            let wanted = match endpoint {
                Endpoint::Server => "server",
                Endpoint::Client => "client",
            };
            let message = format!("the TLS credentials '{id}' are not for a {wanted}");
            return Err(Failure::new(message).hint(format!("say endpoint={wanted}")));
        }
        Ok(found)
    }
}

/// What is wrong with credentials.
pub fn failed(error: gaur_tls::TlsError) -> Failure {
    Failure::new(error.to_string())
}

fn needed(options: &mut KeyValues, key: &str) -> Result<String, Failure> {
    let value = options.take_text(key)?;
    value.ok_or_else(|| Failure::new(format!("option '{key}' is missing")))
}

fn nothing_left(options: &KeyValues) -> Result<(), Failure> {
    match options.find_key(|_| true) {
        Some(key) => Err(Failure::new(format!("option '{key}' is unknown"))),
        None => Ok(()),
    }
}

fn credentials(mut options: KeyValues) -> Result<Credentials, Failure> {
    for key in ["priority", "passwordid"] {
        if options.take_text(key)?.is_some() {
            return Err(Failure::new(format!("option '{key}' is not supported")));
        }
    }
    // They are checked in any case.
    options.take_bool("sanity-check")?;
    let endpoints = [("server", Endpoint::Server), ("client", Endpoint::Client)];
    let endpoint = options.take_choice("endpoint", &endpoints)?;
    let credentials = Credentials {
        id: needed(&mut options, "id")?,
        endpoint: endpoint.unwrap_or(Endpoint::Client),
        directory: needed(&mut options, "dir")?.into(),
        verify_peer: options.take_bool("verify-peer")?.unwrap_or(true),
    };
    nothing_left(&options)?;
    Ok(credentials)
}

fn simple(mut options: KeyValues) -> Result<(String, Authorization), Failure> {
    let id = needed(&mut options, "id")?;
    let identity = needed(&mut options, "identity")?;
    nothing_left(&options)?;
    Ok((id, Authorization::names([identity])))
}

fn list(mut options: KeyValues) -> Result<(String, Authorization), Failure> {
    const DECISIONS: [(&str, Decision); 2] = [("allow", Decision::Allow), ("deny", Decision::Deny)];
    let id = needed(&mut options, "id")?;
    let otherwise = options.take_choice("policy", &DECISIONS)?;
    let mut rules = Vec::new();
    while rules.len() < RULES_MAX {
        let key = |name: &str| format!("rules.{}.{name}", rules.len());
        let Some(text) = options.take_text(&key("match"))? else {
            break;
        };
        let formats = [("exact", false), ("glob", true)];
        let is_glob = options.take_choice(&key("format"), &formats)?;
        let decision = options.take_choice(&key("policy"), &DECISIONS)?;
        let missing = || Failure::new(format!("option '{}' is missing", key("policy")));
        rules.push(Rule {
            decision: decision.ok_or_else(missing)?,
            pattern: match is_glob {
                Some(true) => Pattern::Glob(text),
                _ => Pattern::Exact(text),
            },
        });
    }
    nothing_left(&options)?;
    let otherwise = otherwise.unwrap_or(Decision::Deny);
    Ok((id, Authorization { rules, otherwise }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(objects: &[&str]) -> Result<TlsObjects, Failure> {
        let objects: Vec<String> = objects.iter().map(|text| (*text).to_owned()).collect();
        TlsObjects::parse(&objects)
    }

    #[test]
    fn objects_are_told_apart() {
        let all = parse(&[
            "secret,id=s,file=x",
            "tls-creds-x509,id=t,dir=/nowhere,endpoint=server,verify-peer=no",
            "authz-simple,id=one,identity=CN=laptop,,O=Home",
            "authz-list,id=more,policy=deny,rules.0.match=CN=a,rules.0.policy=deny,\
             rules.1.match=CN=*,rules.1.policy=allow,rules.1.format=glob",
        ])
        .expect("objects");
        assert_eq!(all.others(), ["secret,id=s,file=x"]);
        assert!(
            all.authorization("one")
                .expect("one")
                .allows("CN=laptop,O=Home")
        );
        let more = all.authorization("more").expect("more");
        assert!(more.allows("CN=b") && !more.allows("CN=a"));
        assert!(all.authorization("t").is_err());
        let failure = all.server("t").expect_err("no files").to_string();
        assert!(
            failure.starts_with("/nowhere/ca-cert.pem: no such file"),
            "{failure}"
        );
        let failure = all.client("t").expect_err("a server's").to_string();
        assert!(failure.contains("endpoint=client"), "{failure}");
        assert!(all.server("x").is_err());
    }

    #[test]
    fn wrong_objects_are_refused_in_one_line() {
        for (text, word) in [
            ("tls-creds-psk,id=t,dir=x", "rustls has only certificates"),
            ("tls-creds-x509,dir=x", "'id' is missing"),
            ("tls-creds-x509,id=t", "'dir' is missing"),
            ("tls-creds-x509,id=t,dir=x,endpoint=both", "endpoint"),
            ("tls-creds-x509,id=t,dir=x,priority=NORMAL", "'priority'"),
            (
                "tls-creds-x509,id=t,dir=x,colour=red",
                "'colour' is unknown",
            ),
            ("authz-simple,id=a", "'identity' is missing"),
            (
                "authz-list,id=a,rules.0.match=x",
                "'rules.0.policy' is missing",
            ),
            (
                "authz-list,id=a,rules.1.match=x,rules.1.policy=deny",
                "unknown",
            ),
            ("authz-pam,id=a,service=x", "not supported"),
        ] {
            let failure = parse(&[text]).expect_err(word).to_string();
            assert!(failure.contains(word), "{failure}");
            assert_eq!(failure.lines().count(), 1, "{failure}");
        }
    }
}
