//! Several processes, one cache. The other processes are this test program again, told by an
//! environment variable what to do.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gaur_artifacts::Cache;
use tempfile::TempDir;

/// Names the cache for [`makes_the_artifact`].
const FOLDER: &str = "GAUR_TEST_ARTIFACTS";
/// Set if the maker is to wait for its end while it makes.
const STALLS: &str = "GAUR_TEST_STALLS";
/// Files of the artifact.
const PARTS: usize = 20;

/// The cache in a folder that is gone at the end.
fn cache_in(temporary: &TempDir) -> PathBuf {
    temporary.path().join("a cache")
}

/// Another process that wants the artifact.
fn maker(cache: &Path, stalls: bool) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "makes_the_artifact", "--nocapture"]);
    command.env(FOLDER, cache).stdout(Stdio::null());
    if stalls {
        command.env(STALLS, "1");
    }
    command.spawn().unwrap()
}

/// How often the artifact was begun.
fn begun(cache: &Path) -> usize {
    let log = std::fs::read_to_string(cache.join("begun")).unwrap_or_default();
    log.lines().count()
}

#[track_caller]
fn assert_whole(artifact: &Path) {
    assert_eq!(gaur_artifacts::entries(artifact).unwrap().len(), PARTS);
}

/// Not a test of its own: what the other processes do. In several steps that take a while, as a
/// download, unpacking and a build do.
#[test]
fn makes_the_artifact() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else {
        return;
    };
    let make = |new: &Path| {
        let log = folder.join("begun");
        let mut log = std::fs::File::options()
            .append(true)
            .create(true)
            .open(log)
            .unwrap();
        writeln!(log, "begun").unwrap();
        std::fs::create_dir(new).unwrap();
        for part in 0..PARTS {
            std::fs::write(new.join(part.to_string()), "a part").unwrap();
            std::thread::sleep(Duration::from_millis(10));
            if std::env::var_os(STALLS).is_some() && part == PARTS / 2 {
                std::thread::sleep(Duration::from_secs(60));
            }
        }
        Ok(())
    };
    let artifact = Cache::at(&folder).unwrap().get("kernel", make).unwrap();
    assert_whole(&artifact);
}

/// Several tests that need a kernel's package ran side by side for the first time. Each saw that it was
/// not there, fetched it and moved it to its place; `mv` put one of the folders into the other. The
/// tests then had the paths of two kernels for one, and failed.
#[test]
fn processes_at_once_with_an_empty_cache_get_one_artifact() {
    let temporary = tempfile::tempdir().unwrap();
    let cache = cache_in(&temporary);
    let makers: Vec<Child> = (0..8).map(|_| maker(&cache, false)).collect();
    for mut maker in makers {
        assert!(maker.wait().unwrap().success());
    }
    assert_eq!(begun(&cache), 1);
    assert_whole(&cache.join("kernel"));
    let left = gaur_artifacts::entries(&cache.join("making")).unwrap();
    assert_eq!(left, Vec::<PathBuf>::new());
}

#[test]
fn artifact_of_a_killed_process_is_rebuilt() {
    let temporary = tempfile::tempdir().unwrap();
    let cache = cache_in(&temporary);
    let mut killed = maker(&cache, true);
    let half = cache.join(format!("making/kernel/new/{}", PARTS / 2));
    let start = Instant::now();
    while !half.exists() {
        assert!(start.elapsed() < Duration::from_secs(60), "it never began");
        std::thread::sleep(Duration::from_millis(10));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(!cache.join("kernel").exists());
    assert!(maker(&cache, false).wait().unwrap().success());
    assert_eq!(begun(&cache), 2);
    assert_whole(&cache.join("kernel"));
}

#[test]
fn failed_artifact_is_retried() {
    let temporary = tempfile::tempdir().unwrap();
    let cache = Cache::at(&cache_in(&temporary)).unwrap();
    let half = |new: &Path| {
        std::fs::write(new, "half").unwrap();
        Err("no network".to_owned())
    };
    assert_eq!(cache.get("root", half), Err("no network".to_owned()));
    let whole = |new: &Path| std::fs::write(new, "whole").map_err(|error| error.to_string());
    let made = cache.get("root", whole).unwrap();
    assert_eq!(std::fs::read_to_string(made).unwrap(), "whole");
}
