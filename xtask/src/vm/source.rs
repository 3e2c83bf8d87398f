//! The kernel's source: Debian's newest `linux-source` package of a suite, through an index of its own,
//! so that the machine's package management stays as it is.

use std::path::{Path, PathBuf};
use std::process::Command;

use gaur_artifacts::{entries, failed, make_folder, write};

use crate::workspace::{output, succeed};

/// Where newer kernels than the stable release's own are packaged.
const SUITE_DEFAULT: &str = "trixie-backports";
/// Debian's keys; the name has changed between releases.
const KEYRINGS: [&str; 2] = [
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "/usr/share/keyrings/debian-archive-keyring.pgp",
];

/// What User-Mode Linux is built from, less than half of the source.
const NEEDED: [&str; 22] = [
    "*/Kconfig*",
    "*/Kbuild*",
    "*/Makefile*",
    "*/arch/um/*",
    "*/arch/x86/*",
    "*/block/*",
    "*/certs/*",
    "*/crypto/*",
    "*/drivers/*.[ch]",
    "*/fs/*",
    "*/include/*",
    "*/init/*",
    "*/io_uring/*",
    "*/ipc/*",
    "*/kernel/*",
    "*/lib/*",
    "*/mm/*",
    "*/net/*.[ch]",
    "*/scripts/*",
    "*/security/*.[ch]",
    "*/usr/*",
    "*/virt/*",
];
const UNNEEDED: [&str; 3] = [
    "*/drivers/gpu/*.[ch]",
    "*/drivers/media/*.[ch]",
    "*/drivers/net/*/*.[ch]",
];

/// A package's name and version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    name: String,
    version: String,
}

impl Package {
    /// Both, as part of a file name.
    pub fn shown(&self) -> String {
        format!("{}_{}", self.name, self.version)
    }
}

/// The package index of a suite.
#[derive(Debug)]
pub struct Index {
    folder: PathBuf,
}

impl Index {
    /// Fetches the index into a folder, from the mirror that the machine's own package management uses.
    pub fn fetch(folder: &Path) -> Result<Index, String> {
        let suite = std::env::var("GAUR_VM_SUITE").unwrap_or_else(|_| SUITE_DEFAULT.into());
        let index = Index {
            folder: folder.to_path_buf(),
        };
        for folder in ["lists/partial", "archives/partial", "parts"] {
            make_folder(&index.folder.join(folder))?;
        }
        let keyring = KEYRINGS.iter().find(|path| Path::new(path).exists());
        let keyring = keyring.ok_or("no keys of Debian here: install debian-archive-keyring")?;
        let line = format!("deb [signed-by={keyring}] {} {suite} main\n", mirror()?);
        write(&index.folder.join("sources.list"), &line)?;
        write(&index.folder.join("apt.conf"), &index.configuration())?;
        succeed(index.apt("apt-get").args(["update", "-q"]))?;
        Ok(index)
    }

    fn configuration(&self) -> String {
        let folder = self.folder.display();
        format!(
            r#"Dir::Etc::sourcelist "{folder}/sources.list";
Dir::Etc::sourceparts "{folder}/parts";
Dir::Etc::preferences "{folder}/none";
Dir::Etc::preferencesparts "{folder}/parts";
Dir::State::lists "{folder}/lists";
Dir::Cache::archives "{folder}/archives";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::Retries "3";
"#
        )
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", self.folder.join("apt.conf"));
        command
    }

    /// The newest `linux-source` package.
    pub fn newest(&self) -> Result<Package, String> {
        let pattern = "^linux-source-[0-9.]+$";
        let listed = output(
            self.apt("apt-cache")
                .args(["search", "--names-only", pattern]),
        )?;
        let names = listed.lines().filter_map(|line| line.split(' ').next());
        let name = names
            .max_by_key(|name| numbers(name))
            .ok_or("the suite has no linux-source package")?;
        let shown = output(
            self.apt("apt-cache")
                .args(["show", "--no-all-versions", name]),
        )?;
        let version = shown
            .lines()
            .find_map(|line| line.strip_prefix("Version: "));
        Ok(Package {
            name: name.to_owned(),
            version: version.ok_or("a package without a version")?.to_owned(),
        })
    }

    /// Downloads a package and unpacks the kernel's source in it to `folder`.
    pub fn unpack(&self, package: &Package, folder: &Path) -> Result<(), String> {
        let packed = folder.with_extension("package");
        make_folder(&packed)?;
        make_folder(folder)?;
        let mut download = self.apt("apt-get");
        succeed(
            download
                .args(["download", "-q", &package.name])
                .current_dir(&packed),
        )?;
        let file = only(&packed, ".deb")?;
        succeed(Command::new("dpkg").arg("-x").args([&file, &packed]))?;
        let archive = only(&packed.join("usr/src"), ".tar.xz")?;
        let mut unpack = Command::new("tar");
        unpack.arg("-xf").arg(archive).arg("-C").arg(folder);
        unpack.args(["--strip-components=1", "--wildcards"]);
        for pattern in UNNEEDED {
            unpack.arg(format!("--exclude={pattern}"));
        }
        succeed(unpack.args(NEEDED))?;
        std::fs::remove_dir_all(&packed).map_err(|error| failed(&packed, &error))
    }
}

/// The address of the mirror that serves this machine's release, as apt understands its sources.
fn mirror() -> Result<String, String> {
    if let Ok(mirror) = std::env::var("GAUR_VM_MIRROR") {
        return Ok(mirror);
    }
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let mut apt = Command::new("apt-get");
    apt.args([
        "indextargets",
        "--format",
        "$(CODENAME) $(REPO_URI)",
        "Created-By: Packages",
    ]);
    let targets = output(&mut apt)?;
    let mut targets = targets.lines().filter_map(|line| line.split_once(' '));
    targets
        .find(|(code, _)| Some(*code) == name)
        .map(|(_, address)| address.trim_end_matches('/').to_owned())
        .ok_or_else(|| "apt knows no mirror of this release: set GAUR_VM_MIRROR".into())
}

/// The one file of a folder whose name ends like that.
fn only(folder: &Path, ending: &str) -> Result<PathBuf, String> {
    let mut found = entries(folder)?;
    found.retain(|path| path.to_string_lossy().ends_with(ending));
    match (found.pop(), found.is_empty()) {
        (Some(file), true) => Ok(file),
        _ => Err(format!("{}: not one file *{ending}", folder.display())),
    }
}

/// The numbers in a name: they say which version is newer.
pub fn numbers(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_is_told_by_numbers_not_by_letters() {
        let names = ["linux-source-6.9", "linux-source-6.12", "linux-source-6.2"];
        let newest = names.into_iter().max_by_key(|name| numbers(name));
        assert_eq!(newest, Some("linux-source-6.12"));
    }
}
