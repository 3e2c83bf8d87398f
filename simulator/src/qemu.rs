//! QEMU as a judge: `qemu-img check` and `qemu-img convert`.

use std::fs;
use std::path::Path;
use std::process::Command;

use gaur_sim::FileImage;
use tempfile::TempDir;

use crate::model::FoundSnapshot;
use crate::shape::Shape;
use crate::view::Files;

fn temp_dir() -> Result<TempDir, String> {
    let made = tempfile::Builder::new().prefix("gaur-simulator-").tempdir();
    made.map_err(|error| error.to_string())
}

/// Lets QEMU check the image called `name` and compares its view of the disk with `view`, and that of
/// its snapshots with `snapshots`. Leaks are allowed, and there must be as many as `leaks` says;
/// anything else is an error.
pub fn judge(
    files: &Files,
    name: &str,
    view: &[u8],
    snapshots: &[FoundSnapshot],
    leaks: Option<u64>,
) -> Result<(), String> {
    let directory = temp_dir()?;
    write_files(directory.path(), files)?;
    let found = check(directory.path(), name)?;
    if leaks.is_some_and(|leaks| leaks != found) {
        return Err(format!(
            "qemu-img check finds {found} leaks, we find {leaks:?}"
        ));
    }
    compare(directory.path(), name, None, view)?;
    snapshots.iter().try_for_each(|seen| {
        let which = format!("snapshot.id={},snapshot.name={}", seen.id, seen.name);
        compare(directory.path(), name, Some(&which), &seen.disk)
    })
}

/// Compares what `qemu-img convert` makes of an image, or of one of its snapshots, with `view`.
fn compare(directory: &Path, name: &str, which: Option<&str>, view: &[u8]) -> Result<(), String> {
    let mut arguments = vec!["convert", "-f", "qcow2", "-O", "raw"];
    arguments.extend(which.iter().flat_map(|which| ["-l", which]));
    arguments.extend([name, "view"]);
    run(directory, &arguments, &[0])?;
    let raw = directory.join("view");
    let seen = fs::read(&raw).map_err(|error| format!("{}: {error}", raw.display()))?;
    // Of a snapshot QEMU shows as much as the active disk has.
    let len = match which {
        Some(_) => view.len().min(seen.len()),
        None => view.len(),
    };
    if seen.get(..len) != view.get(..len) || which.is_none() && seen.len() != len {
        let at = seen.iter().zip(view).position(|(one, other)| one != other);
        return Err(format!(
            "qemu-img convert sees another {}: {} bytes for {}, first difference at {at:?}",
            which.unwrap_or("disk"),
            seen.len(),
            view.len()
        ));
    }
    Ok(())
}

/// Writes the files into a directory, which is made if need be.
pub(crate) fn write_files(directory: &Path, files: &Files) -> Result<(), String> {
    let shown = directory.display();
    fs::create_dir_all(directory).map_err(|error| format!("{shown}: {error}"))?;
    for (file, image) in files {
        let bytes = image.bytes(0, image.len_bytes() as usize);
        fs::write(directory.join(file), bytes)
            .map_err(|error| format!("{shown}/{file}: {error}"))?;
    }
    Ok(())
}

/// An image in the making.
pub(crate) struct Image {
    directory: TempDir,
}

impl Image {
    /// Makes an image that holds what `raw` does.
    pub(crate) fn make(shape: Shape, raw: &FileImage, compressed: bool) -> Result<Image, String> {
        let directory = temp_dir()?;
        write_files(
            directory.path(),
            &Files::from([("raw".to_owned(), raw.clone())]),
        )?;
        let compat = if shape.version == 2 { "0.10" } else { "1.1" };
        let options = format!(
            "compat={compat},cluster_size={},extended_l2={},refcount_bits={}",
            shape.cluster_bytes(),
            if shape.extended { "on" } else { "off" },
            1 << shape.refcount_order
        );
        let mut arguments = vec!["convert", "-f", "raw", "-O", "qcow2", "-o", &options];
        if compressed {
            arguments.push("-c");
        }
        arguments.extend(["raw", "image"]);
        run(directory.path(), &arguments, &[0])?;
        Ok(Image { directory })
    }

    /// Takes an internal snapshot.
    pub(crate) fn snapshot(&mut self, number: u32) -> Result<(), String> {
        let name = format!("snapshot-{number}");
        run(
            self.directory.path(),
            &["snapshot", "-c", &name, "image"],
            &[0],
        )?;
        Ok(())
    }

    /// Writes guest bytes.
    pub(crate) fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<(), String> {
        let path = self.directory.path().join("bytes");
        fs::write(&path, bytes).map_err(|error| format!("{}: {error}", path.display()))?;
        let command = format!("write -q -s bytes {offset_bytes} {}", bytes.len());
        run_tool(
            "qemu-io",
            self.directory.path(),
            &["-f", "qcow2", "-c", &command, "image"],
            &[0],
        )?;
        Ok(())
    }

    /// The file.
    pub(crate) fn file(&self) -> Result<FileImage, String> {
        let path = self.directory.path().join("image");
        let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(FileImage::from_bytes(&bytes))
    }
}

fn check(directory: &Path, name: &str) -> Result<u64, String> {
    let output = run(
        directory,
        &["check", "-f", "qcow2", "--output=json", name],
        &[0, 3],
    )?;
    let report: serde_json::Value =
        serde_json::from_str(&output).map_err(|error| format!("qemu-img check: {error}"))?;
    for count in ["corruptions", "check-errors"] {
        if report[count].as_u64().unwrap_or(0) > 0 {
            return Err(format!("qemu-img check finds {count}: {output}"));
        }
    }
    Ok(report["leaks"].as_u64().unwrap_or(0))
}

fn run(directory: &Path, arguments: &[&str], fine: &[i32]) -> Result<String, String> {
    run_tool("qemu-img", directory, arguments, fine)
}

fn run_tool(
    tool: &str,
    directory: &Path,
    arguments: &[&str],
    fine: &[i32],
) -> Result<String, String> {
    let output = Command::new(tool)
        .args(arguments)
        .current_dir(directory)
        .output()
        .map_err(|error| format!("{tool} cannot be run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output
        .status
        .code()
        .is_none_or(|code| !fine.contains(&code))
    {
        let complaint = String::from_utf8_lossy(&output.stderr);
        let verb = arguments.first().copied().unwrap_or_default();
        return Err(format!(
            "{tool} {verb}: {} {text}{complaint}",
            output.status
        ));
    }
    Ok(text)
}
