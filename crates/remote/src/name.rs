//! Names of objects: `PROTOCOL://HOST/PATH`.

use std::fmt;

use percent_encoding::percent_decode_str;
use url::{Host, Url};

/// The name of an object, or of all objects below it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Name {
    url: Url,
}

/// What a name's protocol is answered by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// Amazon's S3, and what speaks like it.
    S3,
    /// Google's store.
    Google,
    /// Azure's store.
    Azure,
    /// A web server.
    Web,
    /// A registry of container images.
    Registry,
}

impl Name {
    /// Reads a name; the error is in words.
    pub(crate) fn parse(text: &str) -> Result<Name, String> {
        let url = Url::parse(text).map_err(|error| format!("no name of an object: {error}"))?;
        if !url.username().is_empty() || url.password().is_some() {
            let what =
                "a name holds no user and no password; credentials come from the environment";
            return Err(what.to_owned());
        }
        if url.host_str().is_none_or(str::is_empty) {
            return Err("the name has no host or bucket".to_owned());
        }
        let name = Name { url };
        if name.protocol()? != Protocol::Web && name.url.query().is_some() {
            return Err("a '?' in a key is written %3F".to_owned());
        }
        if name.url.fragment().is_some() {
            return Err("a '#' in a name is written %23".to_owned());
        }
        Ok(name)
    }

    pub(crate) fn protocol(&self) -> Result<Protocol, String> {
        match self.url.scheme() {
            "s3" => Ok(Protocol::S3),
            "gs" => Ok(Protocol::Google),
            "az" | "azure" => Ok(Protocol::Azure),
            "http" | "https" => Ok(Protocol::Web),
            "oci" => Ok(Protocol::Registry),
            other => Err(format!("{other}: is not supported")),
        }
    }

    /// Bucket, container or host.
    pub(crate) fn host(&self) -> &str {
        self.url.host_str().unwrap_or_default()
    }

    /// The host with its port, if it has one.
    pub(crate) fn authority(&self) -> String {
        let port = self.url.port().map(|port| format!(":{port}"));
        format!("{}{}", self.host(), port.unwrap_or_default())
    }

    /// Whether it is on this machine.
    pub(crate) fn is_loopback(&self) -> bool {
        let ip = self.host().trim_matches(['[', ']']).parse();
        self.host() == "localhost" || ip.is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
    }

    pub(crate) fn url(&self) -> &Url {
        &self.url
    }

    /// The key in the bucket, as it is there.
    pub(crate) fn key(&self) -> Result<String, String> {
        let path = self.url.path().trim_start_matches('/');
        let key = percent_decode_str(path).decode_utf8();
        match key {
            Ok(key) if key.is_empty() => Err("the name has a bucket and no key".to_owned()),
            Ok(key) => Ok(key.into_owned()),
            Err(_) => Err("the key is no UTF-8".to_owned()),
        }
    }

    /// Whether it is `place`, or lies below it.
    pub(crate) fn is_within(&self, place: &Name) -> bool {
        let (own, other) = (&self.url, &place.url);
        let same_host = own.scheme() == other.scheme()
            && own.host() == other.host()
            && own.port_or_known_default() == other.port_or_known_default();
        if !same_host || own == other || other.query().is_some() {
            return own == other;
        }
        let rest = own.path().strip_prefix(other.path().trim_end_matches('/'));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// Whether it leads to where machines of a cloud ask about themselves.
    pub(crate) fn is_link_local(&self) -> bool {
        leads_to_link_local(&self.url)
    }
}

/// Whether the host of a URL is such an address itself.
pub(crate) fn leads_to_link_local(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(ip)) => is_link_local(ip.into()),
        Some(Host::Ipv6(ip)) => is_link_local(ip.into()),
        // The host of a protocol that `Url` does not know is no more than text.
        Some(Host::Domain(host)) => host.parse().is_ok_and(is_link_local),
        None => false,
    }
}

/// Whether the host of a URL is this machine, in any spelling that needs no look-up.
pub(crate) fn leads_to_loopback(url: &Url) -> bool {
    let own = |ip: std::net::IpAddr| {
        let ip = ip.to_canonical();
        ip.is_loopback() || ip.is_unspecified()
    };
    match url.host() {
        Some(Host::Ipv4(ip)) => own(ip.into()),
        Some(Host::Ipv6(ip)) => own(ip.into()),
        Some(Host::Domain(host)) => {
            let host = host.trim_end_matches('.');
            host.eq_ignore_ascii_case("localhost")
                || host.to_ascii_lowercase().ends_with(".localhost")
        }
        None => false,
    }
}

/// Whether an address is of this link only, or of a cloud's service about the machine itself.
pub(crate) fn is_link_local(ip: std::net::IpAddr) -> bool {
    match ip.to_canonical() {
        std::net::IpAddr::V4(ip) => ip.is_link_local(),
        std::net::IpAddr::V6(ip) => {
            ip.is_unicast_link_local() || ip.segments()[..2] == [0xfd00, 0x0ec2]
        }
    }
}

/// Without the query, which may hold a signature.
impl fmt::Display for Name {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = self.url.clone();
        shown.set_query(None);
        out.write_str(shown.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap()
    }

    #[test]
    fn a_key_is_as_it_is_in_the_bucket() {
        assert_eq!(name("s3://b/a/b c%3F.qcow2").key().unwrap(), "a/b c?.qcow2");
        assert_eq!(name("gs://b/x").host(), "b");
        assert!(name("s3://b").key().is_err());
    }

    #[test]
    fn secrets_and_odd_names_are_refused() {
        for text in [
            "s3://key:secret@b/x",
            "https://u@h/x",
            "s3:///x",
            "s3://b/x?y",
            "https://h/x#y",
            "ftp://h/x",
        ] {
            assert!(Name::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_signature_is_not_shown() {
        assert_eq!(name("https://h/x?sig=abc").to_string(), "https://h/x");
    }

    #[test]
    fn below_a_place_means_whole_components_and_no_way_up() {
        let within = |own: &str, place: &str| name(own).is_within(&name(place));
        for (own, place) in [
            ("s3://b/x", "s3://b"),
            ("s3://b/a/x", "s3://b/a"),
            ("s3://b/a/x", "s3://b/a/"),
            ("s3://b/a", "s3://b/a"),
            ("https://h/a/x", "https://h:443/a"),
            ("https://h/x?s=1", "https://h/x?s=1"),
        ] {
            assert!(within(own, place), "{own} {place}");
        }
        for (own, place) in [
            ("s3://b/ab", "s3://b/a"),
            ("s3://c/a", "s3://b"),
            ("s3://b/a/../x", "s3://b/a"),
            ("s3://b/a/%2e%2e/x", "s3://b/a"),
            ("http://h/a", "https://h/a"),
            ("https://h:8443/a", "https://h/a"),
            ("https://h/y", "https://h/x?s=1"),
        ] {
            assert!(!within(own, place), "{own} {place}");
        }
    }

    #[test]
    fn addresses_of_a_machines_own_services_are_known_in_all_spellings() {
        for host in [
            "169.254.169.254",
            "0xa9fea9fe",
            "[::ffff:169.254.169.254]",
            "[fd00:ec2::254]",
            "[fe80::1]",
        ] {
            assert!(name(&format!("http://{host}/x")).is_link_local(), "{host}");
        }
        assert!(!name("http://10.0.0.1/x").is_link_local());
    }
}
