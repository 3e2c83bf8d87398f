//! What options mean, and which are refused.

use super::*;

fn spec(text: &str) -> ImageSpec {
    let spec = ImageSpec::parse(text, !text.starts_with("json:"), None);
    spec.unwrap_or_else(|failure| panic!("{failure}"))
}

fn refused(text: &str) -> String {
    let spec = ImageSpec::parse(text, !text.starts_with("json:"), None);
    spec.expect_err(text).to_string()
}

fn writing() -> OpenOptions {
    OpenOptions::new(References::Any)
}

#[test]
fn option_string_and_json_give_the_same_spec() {
    let string = spec(
        "driver=qcow2,file.driver=file,file.filename=a,,b.qcow2,l2-cache-size=64k,\
         allocation=contiguous,\
         l2-cache-entry-size=4k,refcount-cache-size=1M,cache-clean-interval=7,\
         decompressed-cache-size=8M,\
         file.cache.direct=on,file.aio=native,file.locking=off,discard=ignore,backing=",
    );
    let json = spec(
        r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"a,b.qcow2",
           "cache":{"direct":true},"aio":"native","locking":"off"},"l2-cache-size":65536,
           "allocation":"contiguous",
           "l2-cache-entry-size":"4k","refcount-cache-size":1048576,
           "decompressed-cache-size":"8M",
           "cache-clean-interval":7,"discard":"off","backing":null}"#,
    );
    for spec in [string, json] {
        assert_eq!(
            (spec.path(), spec.format()),
            ("a,b.qcow2", Some(Format::Qcow2))
        );
        assert_eq!(spec.clean_interval(), Some(Duration::from_secs(7)));
        assert_eq!(spec.aio(), Some(Aio::Native));
        let options = spec.open_options(&writing()).expect("consistent options");
        assert!(options.direct && !options.lock && !options.discard && !options.backing);
        assert_eq!(options.backing_direct, Some(false));
        assert_eq!(options.allocation, Some(AllocationPolicy::Contiguous));
        let cache = CacheOptions {
            total_bytes: None,
            l2_bytes: Some(65536),
            l2_entry_bytes: Some(4096),
            refcount_bytes: Some(1 << 20),
            decompressed_bytes: Some(8 << 20),
        };
        assert_eq!(options.cache, cache);
    }
}

#[test]
fn plain_path_is_not_parsed_as_options() {
    let spec = ImageSpec::parse("a=b,c", false, None).expect("a path");
    assert_eq!((spec.path(), spec.format()), ("a=b,c", None));
    assert_eq!(spec.clean_interval(), Some(Duration::from_secs(600)));
    let options = spec.open_options(&writing()).expect("no options");
    assert!(options.lock && options.discard && options.backing && !options.direct);
}

#[test]
fn protocol_node_alone_or_below_format_node() {
    for (text, format) in [
        ("driver=raw,file.filename=a", Some(Format::Raw)),
        ("driver=file,filename=a", Some(Format::Raw)),
        (
            "driver=host_device,filename=a,aio=threads",
            Some(Format::Raw),
        ),
        ("file.filename=a", None),
        (r#"json:{"file":{"driver":"file","filename":"a"}}"#, None),
    ] {
        assert_eq!(
            (spec(text).path(), spec(text).format()),
            ("a", format),
            "{text}"
        );
    }
}

#[test]
fn format_switch_overrides_json_driver() {
    let name = r#"json:{"driver":"raw","file.filename":"a"}"#;
    let spec = ImageSpec::parse(name, false, Some(Format::Qcow2)).expect("a spec");
    assert_eq!(spec.format(), Some(Format::Qcow2));
}

#[test]
fn cache_direct_of_image_applies_to_backing_files() {
    let options = |text: &str| {
        let options = spec(text).open_options(&writing()).expect("options");
        (options.direct, options.backing_direct)
    };
    let all = "driver=qcow2,file.filename=a,cache.direct=on";
    assert_eq!(options(all), (true, Some(true)));
    let others = "driver=qcow2,file.filename=a,cache.direct=on,file.cache.direct=off";
    assert_eq!(options(others), (false, Some(true)));
    let own = "driver=qcow2,file.filename=a,file.cache.direct=on";
    assert_eq!(options(own), (true, Some(false)));
}

/// What is refused, and words of the message.
const REFUSED: &[(&str, &str)] = &[
    ("driver=qcow2,file.filename=a,foo=1", "'foo' is unknown"),
    (
        "driver=qcow2,file.filename=a,file.foo=1",
        "'file.foo' is unknown",
    ),
    (
        "driver=qcow2,file.filename=a,filename=b",
        "'filename' is unknown",
    ),
    (
        "driver=qcow2,file.filename=a,cache.writeback=on",
        "'cache.writeback'",
    ),
    (
        "driver=raw,file.filename=a,l2-cache-size=1M",
        "'l2-cache-size' is unknown",
    ),
    (
        "driver=raw,file.filename=a,backing=",
        "'backing' is unknown",
    ),
    (
        "driver=qcow2,file.filename=a,offset=512",
        "'offset' is unknown",
    ),
    ("driver=raw,file.filename=a,size=1000", "no multiple of 512"),
    (
        "driver=raw,offset=1k,file.driver=raw,file.size=1k,file.file.filename=a",
        "a part of a part",
    ),
    (
        "driver=qcow2,file.filename=a,encrypt.format=des",
        "'encrypt.format' is 'des'",
    ),
    (
        "driver=qcow2,file.filename=a,encrypt.cipher-alg=aes-256",
        "'encrypt.cipher-alg' is unknown",
    ),
    (
        "driver=raw,file.filename=a,encrypt.key-secret=a",
        "'encrypt.key-secret' is unknown",
    ),
    (
        "driver=qcow2,file.filename=a,backing.node-name=b",
        "'backing.node-name' is not",
    ),
    ("driver=qcow2,file.filename=a,backing=b", "'backing' is 'b'"),
    ("driver=qcow2,file=a", "'file' is 'a'"),
    ("driver=qcow2", "'file.filename' is missing"),
    ("driver=file,file.filename=a", "'filename' is missing"),
    ("filename=a", "'file.filename' is missing"),
    ("driver=qed,file.filename=a", "'qed' is not supported"),
    (
        "driver=qcow2,file.driver=ssh,file.host=a",
        "'file.driver' is 'ssh'",
    ),
    (
        "driver=qcow2,file.filename=a,detect-zeroes=some",
        "'detect-zeroes' is 'some'",
    ),
    (
        "driver=raw,file.filename=a,discard-no-unref=on",
        "'discard-no-unref' is unknown",
    ),
    (
        "driver=qcow2,file.filename=a,overlap-check=all,overlap-check.template=none",
        "contradict",
    ),
    (
        "driver=qcow2,file.filename=a,overlap-check=some",
        "'overlap-check' is 'some'",
    ),
    (
        "driver=qcow2,file.filename=a,l2-cache-size=-1",
        "'l2-cache-size'",
    ),
    (
        "driver=qcow2,file.filename=a,cache-clean-interval=-1",
        "'cache-clean-interval'",
    ),
    (
        r#"json:{"driver":"qcow2","file":["a"]}"#,
        "'file.filename' is missing",
    ),
    (
        r#"json:{"driver":"qcow2","file":{"filename":null}}"#,
        "'file.filename' is null",
    ),
];

#[test]
fn unknown_and_unsupported_options_are_named() {
    for (text, key) in REFUSED {
        let message = refused(text);
        assert!(message.contains(key), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

#[test]
fn options_without_effect_are_accepted() {
    let taken = spec(
        "driver=qcow2,file.filename=a,node-name=n,auto-read-only=on,lazy-refcounts=on,\
         overlap-check=none,overlap-check.main-header=off,\
         file.drop-cache=off,\
         file.aio-max-batch=8,cache-clean-interval=0,cache.no-flush=on",
    );
    assert_eq!(taken.clean_interval(), None);
    assert!(taken.ignores_flushes());
}

#[test]
fn discard_can_be_ignored_at_guest_image_or_file_level() {
    let read = |options: &str| {
        let spec = spec(&format!("driver=qcow2,file.filename=a,{options}"));
        let opened = spec.open_options(&writing()).expect("options");
        (spec.ignores_discards(), opened.discard)
    };
    assert_eq!(read("discard=unmap"), (Some(false), true));
    assert_eq!(read("discard=ignore"), (Some(true), false));
    assert_eq!(read("file.discard=ignore"), (None, false));
}

#[test]
fn options_that_contradict_the_command_are_refused() {
    let told = |text: &str, base: &OpenOptions| {
        let options = spec(text).open_options(base);
        options.expect_err(text).to_string()
    };
    let reading = open::reading(None, true, References::Any);
    let read_only = "driver=qcow2,file.filename=a,read-only=on";
    assert!(told(read_only, &writing()).contains("this command writes"));
    assert!(spec(read_only).open_options(&reading).is_ok());
    let alone = "driver=qcow2,file.filename=a,force-share=off";
    assert!(told(alone, &reading).contains("contradict"));
    let native = "driver=qcow2,file.filename=a,file.aio=native";
    assert!(told(native, &writing()).contains("aio=native"));
}

#[test]
fn space_options_reach_the_engine_and_contradictions_are_refused() {
    let read = |options: &str| {
        let spec = spec(&format!("driver=qcow2,file.filename=a,{options}"));
        spec.open_options(&writing())
    };
    let plain = read("discard=on").expect("options");
    assert_eq!(plain.pass_discard, PassDiscard::default());
    assert_eq!(plain.detect_zeroes, DetectZeroes::Off);
    let all = "pass-discard-request=off,pass-discard-snapshot=on,pass-discard-other=off,\
               discard-no-unref=on,detect-zeroes=unmap";
    let told = read(all).expect("options");
    let wanted = PassDiscard {
        request: Some(false),
        snapshot: Some(true),
        other: Some(false),
    };
    assert_eq!(told.pass_discard, wanted);
    assert!(told.discard && told.discard_no_unref);
    assert_eq!(told.detect_zeroes, DetectZeroes::Unmap);
    // No hole is made in a file that is not to have any.
    let none = read("file.discard=ignore,pass-discard-snapshot=on").expect("options");
    assert_eq!(
        (none.discard, none.pass_discard),
        (false, PassDiscard::default())
    );
    let failure = read("discard=ignore,detect-zeroes=unmap").expect_err("they contradict");
    assert!(
        failure.to_string().contains("needs discard=unmap"),
        "{failure}"
    );
}

#[test]
fn options_of_the_nbd_driver_name_an_export() {
    for (options, name) in [
        ("driver=nbd,host=h,export=x", "nbd://h:10809/x"),
        (
            "driver=nbd,server.type=inet,server.host=h,server.port=7",
            "nbd://h:7",
        ),
        (
            "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path=/s,file.export=a b",
            "nbd+unix:///a%20b?socket=/s",
        ),
        (
            "driver=qcow2,file.driver=nbd,file.path=/s,file.reconnect-delay=9,file.open-timeout=2,\
             file.request-timeout=3",
            "nbd+unix://?socket=/s&reconnect-delay=9&open-timeout=2&request-timeout=3",
        ),
        ("driver=raw,file.filename=nbd:h:1", "nbd:h:1"),
        (
            "driver=raw,file.driver=file,file.filename=nbd:h:1",
            "./nbd:h:1",
        ),
        (
            r#"json:{"driver":"qcow2","file":{"driver":"nbd","server":{"type":"inet","host":"h","port":"1"}}}"#,
            "nbd://h:1",
        ),
    ] {
        assert_eq!(spec(options).path(), name, "{options}");
    }
}

#[test]
fn options_of_the_nbd_driver_that_mean_nothing_here_are_refused() {
    for (options, words) in [
        ("driver=nbd", "server.host"),
        ("driver=nbd,host=h,path=/s", "server.host"),
        ("driver=nbd,server.type=unix,host=h", "server.host"),
        ("driver=nbd,host=h,server.host=h", "the same"),
        ("driver=nbd,host=h,port=x", "no port"),
        ("driver=nbd,path=/s,port=1", "no use"),
        (
            "driver=nbd,host=h,tls-creds=t",
            "no TLS credentials with id 't'",
        ),
        ("driver=nbd,host=h,tls-hostname=t", "without 'tls-creds'"),
        ("driver=nbd,server.type=fd,server.str=3", "inet"),
        ("driver=nbd,host=h,filename=x", "unknown"),
        (
            "driver=qcow2,file.driver=nbd,file.host=h,file.exports=x",
            "unknown",
        ),
    ] {
        let said = refused(options);
        assert!(said.contains(words), "{options}: {said}");
    }
}
