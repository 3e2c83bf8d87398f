//! What the images of a command line are called as exports.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use gaur_server::export_name::stem;

use super::Args;
use crate::exporter::{AddExport, ImageOptions, NewExport};
use crate::failure::Failure;
use crate::fronts::FrontConfig;
use crate::image_spec::ImageSpec;
use crate::new_image;

/// Names and images of the exports.
pub fn images(args: &Args) -> Result<Vec<(String, ImageSpec)>, Failure> {
    let single = args.images.len() == 1;
    if args.image.snapshot.is_some() && !single {
        let failure = Failure::new("--snapshot is one of one image, but there are several images");
        return Err(failure.hint("serve each with a command of its own"));
    }
    if args.export_name.is_some() && !single {
        let failure = Failure::new("-x names one export, but there are several images");
        return Err(failure.hint("write NAME=FILE for each"));
    }
    let made_as = |file: &OsStr| {
        let by_name = args.create.map(|_| new_image::format_by_name(file, "-f"));
        by_name.transpose()
    };
    let export = |text: &OsString| {
        let (name, given) = named_file(text, &args.image);
        let format = match args.image.format {
            Some(format) => Some(format),
            None => made_as(given)?,
        };
        let spec = ImageSpec::parse(given, args.image.image_opts, format)?;
        let name = match name {
            Some(name) => name.to_owned(),
            None if single => String::new(),
            None => stem(spec.path()),
        };
        Ok((name, spec))
    };
    let exports: Result<Vec<(String, ImageSpec)>, Failure> =
        args.images.iter().map(export).collect();
    let mut exports = exports?;
    if let (Some(name), Some(first)) = (&args.export_name, exports.first_mut()) {
        first.0.clone_from(name);
    }
    Ok(exports)
}

/// The name of an export, if one is given (`NAME=FILE`), and its image.
pub fn named_file<'a>(text: &'a OsStr, image: &ImageOptions) -> (Option<&'a str>, &'a OsStr) {
    match split_name(text) {
        // Every option has an equals sign.
        Some((name, file)) if !image.image_opts => (Some(name), file),
        _ => (None, text),
    }
}

/// `NAME=FILE`, unless the whole is an image.
fn split_name(text: &OsStr) -> Option<(&str, &OsStr)> {
    let bytes = text.as_bytes();
    let at = bytes.iter().position(|byte| *byte == b'=')?;
    let name = std::str::from_utf8(bytes.get(..at)?).ok()?;
    let file = OsStr::from_bytes(bytes.get(at + 1..)?);
    let is_name = !name.is_empty() && !name.contains('/') && !file.is_empty();
    let is_file = bytes.starts_with(b"json:") || Path::new(text).exists();
    (is_name && !is_file).then_some((name, file))
}

/// An export as the control socket has it, to serve by itself.
pub fn from_json(json: &str, recover: bool) -> Result<NewExport, Failure> {
    let wrong = |error: String| Failure::new(format!("--export-json: {error}"));
    let fields = serde_json::from_str::<serde_json::Map<_, _>>(json);
    let mut fields = fields.map_err(|error| wrong(error.to_string()))?;
    let name = fields.remove("export");
    let name = name.and_then(|name| name.as_str().map(str::to_owned));
    let mut new = AddExport::from_fields(fields).map_err(wrong)?.named(name)?;
    if let FrontConfig::Ublk(request) = &mut new.front {
        request.recover = recover;
    }
    Ok(new)
}

/// The exports that the command line asks for. Those of NBD come first; each front end shows the one
/// image, under its name or that of its file, and its own behind it where there are several.
pub fn exports(
    args: &Args,
    images: Vec<(String, ImageSpec)>,
    fronts: Vec<FrontConfig>,
    nbd: bool,
) -> Result<Vec<NewExport>, Failure> {
    let export = |name: String, spec: &ImageSpec, front: FrontConfig| NewExport {
        name,
        spec: spec.clone(),
        image: args.image.clone(),
        description: args.description.clone().unwrap_or_default(),
        front,
    };
    let mut exports = Vec::new();
    let count = fronts.len() + usize::from(nbd);
    if let (false, [(given, spec)]) = (fronts.is_empty(), images.as_slice()) {
        let given = if given.is_empty() {
            stem(spec.path())
        } else {
            given.clone()
        };
        for front in fronts {
            let name = match count {
                1 => given.clone(),
                _ => format!("{given}-{}", front.name()),
            };
            exports.push(export(name, spec, front));
        }
    }
    if nbd {
        let of_nbd = images
            .iter()
            .map(|(name, spec)| export(name.clone(), spec, FrontConfig::Nbd {}));
        exports = of_nbd.chain(exports).collect();
    }
    if count > 1 && exports.iter().any(|new| new.image.writes_file(&new.spec)) {
        let message = "an image has one export that may write, but several are asked for";
        return Err(Failure::new(message).hint("say -r, or ask for one"));
    }
    Ok(exports)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn names(words: &[&str]) -> Result<Vec<(String, String)>, Failure> {
        let line = Line::try_parse_from([&["serve"], words].concat());
        let exports = images(&line.expect("a valid command line").args)?;
        let paths = exports
            .into_iter()
            .map(|(name, spec)| (name, spec.path().to_owned()));
        Ok(paths.collect())
    }

    fn pair(name: &str, file: &str) -> (String, String) {
        (name.to_owned(), file.to_owned())
    }

    #[test]
    fn one_image_has_the_empty_name_and_several_are_called_after_their_files() {
        assert_eq!(
            names(&["d/a.qcow2"]).expect("names"),
            [pair("", "d/a.qcow2")]
        );
        assert_eq!(
            names(&["d/a.qcow2", "b", "x=c.raw"]).expect("names"),
            [pair("a", "d/a.qcow2"), pair("b", "b"), pair("x", "c.raw")]
        );
    }

    #[test]
    fn a_name_given_to_several_images_is_refused() {
        assert_eq!(
            names(&["-x", "n", "a.qcow2"]).expect("names"),
            [pair("n", "a.qcow2")]
        );
        assert!(names(&["-x", "n", "a.qcow2", "b.qcow2"]).is_err());
    }

    #[test]
    fn an_equals_sign_in_a_directory_is_no_name() {
        assert_eq!(names(&["./a=b/c"]).expect("names"), [pair("", "./a=b/c")]);
        assert_eq!(names(&["a=b/c"]).expect("names"), [pair("a", "b/c")]);
        assert_eq!(names(&["=b"]).expect("names"), [pair("", "=b")]);
    }

    #[test]
    fn an_equals_sign_among_options_is_no_name() {
        let options = "driver=qcow2,file.filename=d/a.qcow2";
        assert_eq!(
            names(&["--image-opts", options]).expect("names"),
            [pair("", "d/a.qcow2")]
        );
        assert_eq!(
            names(&["--image-opts", options, "driver=raw,file.filename=b.raw"]).expect("names"),
            [pair("a", "d/a.qcow2"), pair("b", "b.raw")]
        );
        let json = r#"json:{"driver":"raw","file.filename":"c=d"}"#;
        assert_eq!(names(&[json]).expect("names"), [pair("", "c=d")]);
        assert_eq!(
            names(&[&format!("n={json}")]).expect("names"),
            [pair("n", "c=d")]
        );
    }
}
