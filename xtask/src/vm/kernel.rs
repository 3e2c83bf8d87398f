//! The guest's kernel: found in the cache, or built into it.
//!
//! A kernel's folder is named after the source package and a hash of the configuration, and appears
//! after the kernel has booted once. So what is there is whole and works, whatever happened to the build
//! before it.

use std::borrow::Borrow;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gaur_artifacts::{BuildLock, Cache, entries, failed, make_folder, remove, write};

use crate::vm::console::Output;
use crate::vm::guest::Guest;
use crate::vm::source::{Index, Package, numbers};
use crate::workspace::succeed;

/// On top of `make allnoconfig`.
const CONFIGURATION: &str = include_str!("kernel.config");
/// Grows when the way of building changes.
const RECIPE: &str = "2";
/// About as many lines as make prints, and how often one of this program says how far it is.
const STEPS: u32 = 1300;
const PROGRESS: Duration = Duration::from_secs(20);
/// What a new kernel has to show before it counts.
const TRIAL: &str =
    "test -c /dev/ublk-control && test -b /dev/nbd0 && test -c /dev/vduse/control &&
    test -c /dev/fuse && grep -qw xfs /proc/filesystems && mountpoint -q /scratch";

/// The kernel to boot: the one that `GAUR_VM_KERNEL` names, or the cache's, built now if it is not
/// there yet.
pub fn find(cache: &Cache) -> Result<PathBuf, String> {
    if let Some(kernel) = std::env::var_os("GAUR_VM_KERNEL") {
        let kernel = PathBuf::from(kernel);
        return match kernel.is_file() {
            true => Ok(kernel),
            false => Err(format!(
                "GAUR_VM_KERNEL: {}: no such file",
                kernel.display()
            )),
        };
    }
    match newest(cache)? {
        Some(kernel) => Ok(kernel),
        None => prepare(cache, false),
    }
}

/// Makes sure that there is a kernel for later test runs.
pub fn prepare_once() -> Result<(), String> {
    let kernel = find(&Cache::open()?)?;
    println!("kernel: {}", kernel.display());
    Ok(())
}

/// Builds the kernel if the cache has none of this configuration; if `update`, also if the suite has
/// a newer source.
pub fn prepare(cache: &Cache, update: bool) -> Result<PathBuf, String> {
    let workshop = cache.lock("guest-kernel")?;
    if let Some(kernel) = newest(cache)?.filter(|_| !update) {
        return Ok(kernel);
    }
    let start = Instant::now();
    let place = BuildFolder::beside(&workshop)?;
    let index = Index::fetch(&place.folder.join("apt"))?;
    let package = index.newest()?;
    let name = folder_name(&package);
    let complete = cache.folder().join(&name);
    if complete.exists() {
        return Ok(complete.join("linux"));
    }
    build(&index, &package, &place.folder)?;
    let result = workshop.folder().join("result");
    make_folder(&result)?;
    for (from, to) in [("linux", "linux"), (".config", "config")] {
        let from = place.folder.join("objects").join(from);
        std::fs::copy(&from, result.join(to)).map_err(|error| failed(&from, &error))?;
    }
    try_out(cache, &result.join("linux"))?;
    let complete = workshop.publish(&result, &name)?;
    let minutes = start.elapsed().as_secs_f64() / 60.0;
    println!("{} built in {minutes:.1} minutes", complete.display());
    Ok(complete.join("linux"))
}

/// Where the kernel is built: in the workshop, unless its path has what the kernel's makefiles do not
/// take.
struct BuildFolder {
    folder: PathBuf,
    is_temporary: bool,
}

impl BuildFolder {
    fn beside(workshop: &BuildLock) -> Result<BuildFolder, String> {
        let folder = workshop.folder().join("build");
        if is_plain(&folder) {
            make_folder(&folder)?;
            return Ok(BuildFolder {
                folder,
                is_temporary: false,
            });
        }
        // The same for each build of this cache, so that the next one removes what a killed one has left.
        let name = format!(
            "gaur-kernel-{}",
            hash(folder.as_os_str().as_encoded_bytes())
        );
        let folder = std::env::temp_dir().join(name);
        if !is_plain(&folder) {
            return Err(format!(
                "{}: kernels cannot be built below such a name: set GAUR_CACHE or TMPDIR to a folder \
                 without spaces and colons",
                folder.display()
            ));
        }
        remove(&folder)?;
        make_folder(&folder)?;
        Ok(BuildFolder {
            folder,
            is_temporary: true,
        })
    }
}

impl Drop for BuildFolder {
    fn drop(&mut self) {
        if self.is_temporary
            && let Err(message) = remove(&self.folder)
        {
            eprintln!("vm: {message}");
        }
    }
}

/// Whether the path is one word to make, to the shell and to apt.
fn is_plain(path: &Path) -> bool {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/._-+@%".contains(byte);
    path.as_os_str().as_encoded_bytes().iter().all(is_plain)
}

/// The newest kernel in the cache that has this configuration.
fn newest(cache: &Cache) -> Result<Option<PathBuf>, String> {
    let ending = format!("-{}", fingerprint());
    let mut found = entries(cache.folder())?;
    found.retain(|path| path.to_string_lossy().ends_with(&ending));
    let newest = found.into_iter().max_by_key(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        numbers(name.trim_end_matches(&ending))
    });
    Ok(newest.map(|folder| folder.join("linux")))
}

fn folder_name(package: &Package) -> String {
    format!("{}-{}", package.shown(), fingerprint())
}

/// A hash of everything that decides about the kernel beside its source.
fn fingerprint() -> String {
    hash(RECIPE.bytes().chain(wanted().flat_map(str::bytes)))
}

/// FNV-1a.
fn hash(bytes: impl IntoIterator<Item = impl Borrow<u8>>) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in bytes {
        hash = (hash ^ u64::from(*byte.borrow())).wrapping_mul(0x100_0000_01b3);
    }
    format!("{hash:016x}")
}

/// The lines of the configuration, without comments.
fn wanted() -> impl Iterator<Item = &'static str> {
    CONFIGURATION
        .lines()
        .filter(|line| line.starts_with("CONFIG_"))
}

/// Builds in a folder; its `objects` has the kernel and its configuration then.
fn build(index: &Index, package: &Package, folder: &Path) -> Result<(), String> {
    let [source, objects] = ["source", "objects"].map(|name| folder.join(name));
    println!("unpacking {}", package.shown());
    index.unpack(package, &source)?;
    with_dma(&source)?;
    make_folder(&objects)?;
    let minimal = folder.join("minimal");
    write(&minimal, CONFIGURATION)?;
    let make = || {
        // It ends with this program, and goes behind what is built meanwhile.
        let mut make = Command::new("setpriv");
        make.args(["--pdeathsig", "TERM", "--", "nice", "-n", "5", "make"]);
        make.arg("-C").arg(&source).arg("ARCH=um");
        make.arg(format!("O={}", objects.display()));
        // What cargo tells the programs it starts is not meant for this make.
        make.env_remove("MAKEFLAGS").env_remove("CARGO_MAKEFLAGS");
        make
    };
    let configure = ["-s", "allnoconfig"];
    succeed(make().args(configure).env("KCONFIG_ALLCONFIG", &minimal))?;
    let taken = std::fs::read_to_string(objects.join(".config"));
    let taken = taken.map_err(|error| failed(&objects, &error))?;
    let missing = missing(&taken);
    if !missing.is_empty() {
        return Err(format!(
            "{} does not take {}",
            package.shown(),
            missing.join(" ")
        ));
    }
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    with_progress(make().arg(format!("-j{jobs}")).arg("linux"))
}

/// Drivers of vDPA devices do not bind without DMA, which User-Mode Linux has only together with PCI: a
/// sixth of the kernel more. So it becomes an option of its own.
fn with_dma(source: &Path) -> Result<(), String> {
    const OPTION: &str = "config UML_DMA_EMULATION\n\tbool\n";
    let path = source.join("arch/um/Kconfig");
    let text = std::fs::read_to_string(&path).map_err(|error| failed(&path, &error))?;
    if !text.contains(OPTION) {
        return Err(format!(
            "{}: no UML_DMA_EMULATION as it was",
            path.display()
        ));
    }
    let with_prompt = OPTION.replace("bool", "bool \"DMA emulation\"");
    write(&path, &text.replace(OPTION, &with_prompt))
}

/// Runs make, and says now and then how far it is.
fn with_progress(make: &mut Command) -> Result<(), String> {
    let shown = format!("{make:?}");
    let fail = |error: std::io::Error| format!("{shown}: {error}");
    println!("building the guest's kernel, once: some minutes");
    let start = Instant::now();
    let mut child = make.stdout(Stdio::piped()).spawn().map_err(fail)?;
    let lines = child.stdout.take().map(BufReader::new);
    let (mut steps, mut told) = (0, start);
    for line in lines.into_iter().flat_map(BufRead::lines) {
        let line = line.map_err(fail)?;
        // `  CC      kernel/fork.o`
        if !line.starts_with("  ") {
            continue;
        }
        steps += 1;
        if told.elapsed() > PROGRESS {
            told = Instant::now();
            let percent = (steps * 100 / STEPS).min(99);
            let seconds = start.elapsed().as_secs();
            println!("guest's kernel: {percent:2} %, {seconds} s");
        }
    }
    let status = child.wait().map_err(fail)?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("{shown}: {status}")),
    }
}

/// The wanted lines that a configuration lacks.
fn missing(taken: &str) -> Vec<&'static str> {
    let has = |wanted: &&str| taken.lines().any(|line| line == *wanted);
    wanted().filter(|line| !has(line)).collect()
}

/// Boots a new kernel once.
fn try_out(cache: &Cache, kernel: &Path) -> Result<(), String> {
    let guest = Guest::new(
        kernel.to_path_buf(),
        vec!["sh".into(), "-c".into(), TRIAL.into()],
    );
    let ended = guest.run(cache, Output::Kept)?;
    match ended.code {
        0 => Ok(()),
        code => Err(format!(
            "the new kernel does not do ({code}): {}{}",
            ended.stderr, ended.kernel_log
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_the_kernel_did_not_take_is_named() {
        let taken: Vec<&str> = wanted().filter(|line| !line.contains("UBLK=")).collect();
        assert_eq!(missing(&taken.join("\n")), ["CONFIG_BLK_DEV_UBLK=y"]);
    }

    #[test]
    fn the_fingerprint_is_the_same_in_every_build_and_for_other_comments() {
        assert_eq!(fingerprint(), fingerprint());
        assert_eq!(fingerprint().len(), 16);
        assert!(wanted().all(|line| !line.contains('#')));
    }
}
