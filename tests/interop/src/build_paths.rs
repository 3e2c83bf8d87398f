//! Where this build keeps things.

use std::path::{Path, PathBuf};

/// The folder of the running build's profile, where its programs are (`target/debug`).
pub fn profile_dir() -> PathBuf {
    let program = std::env::current_exe().expect("a test program knows where it is");
    let deps = program.parent().expect("a program lies in a folder");
    deps.parent()
        .expect("test programs lie in deps below the profile's folder")
        .to_path_buf()
}

/// The build folder.
pub fn target_dir() -> PathBuf {
    profile_dir()
        .parent()
        .expect("the profile's folder lies in the build folder")
        .to_path_buf()
}

/// The workspace's folder.
pub fn workspace_dir() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors()
        .nth(2)
        .expect("this crate lies two levels below the workspace")
}
