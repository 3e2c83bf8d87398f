//! The Debian packages, installed and used in the smallest Debian system.

use gaur_interop::build_paths::workspace_dir;
use gaur_interop::gaur::binary;
use gaur_interop::guest::root_tar;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, run, run_for};

/// Unpacks the system at `$1/root` without its devices, and runs the rest of the script in it, as its root.
const INSIDE: &str = r#"
cd "$1"
mkdir root
tar --zstd -xf "$2" -C root --exclude=./dev/* --no-same-owner
mkdir -p root/dev root/packages
: >root/dev/null
cp packages/*.deb root/packages
cat >root/script
enter=()
[ "$(id -u)" = 0 ] || enter=(unshare --map-root-user)
exec "${enter[@]}" chroot root /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C /bin/bash -euo pipefail /script
"#;

/// What an administrator does.
const USE: &str = r#"
dpkg -i /packages/gaur_*.deb
gaur --version
cd /root
gaur create -q disk.qcow2 1G
gaur check disk.qcow2
[ -f /usr/share/man/man1/gaur-serve.1.gz ]
grep -q gaur /usr/share/bash-completion/completions/gaur
for unit in gaur-nbd@.socket gaur-nbd@.service gaur-ublk@.service; do
    [ -f /lib/systemd/system/$unit ]
done
! command -v qemu-img

dpkg -i /packages/gaur-qemu-utils_*.deb
qemu-img --version | grep -q 'version 10\..*gaur'
qemu-img create -q -f qcow2 theirs.qcow2 64M
qemu-io -f qcow2 -c 'write -P 7 0 1M' theirs.qcow2
qemu-nbd --version | grep -q gaur
update-alternatives --query qemu-img | grep -q 'Value: /usr/lib/gaur/qemu-img'
cp theirs.qcow2 /packages

dpkg -r gaur-qemu-utils
! command -v qemu-img
gaur info theirs.qcow2
dpkg -r gaur
! command -v gaur
[ ! -e /lib/systemd/system/gaur-nbd@.socket ]
echo installed, used, removed
"#;

#[test]
fn packages_are_installed_used_and_removed_in_a_bare_system() {
    let scratch = Scratch::new("package");
    let build = format!("{}/packaging/build-deb", workspace_dir().display());
    // A clock may be behind the last commit's time.
    let build = |folder: &str| {
        let epoch = "SOURCE_DATE_EPOCH=4102444800";
        run_for("env", &[epoch, &build, binary(), folder], 300).ok()
    };
    let packages = scratch.path("packages");
    let built = build(&packages).stdout;
    assert_eq!(built.lines().count(), 2, "{built}");
    for package in built.lines() {
        run("dpkg-deb", &["--info", package]).ok();
    }
    // The same program makes the same packages.
    let again = scratch.path("again");
    build(&again);
    run("diff", &["-r", &packages, &again]).ok();
    let script = scratch.file("use", USE.as_bytes());
    let folder = scratch.folder().display().to_string();
    let tar = root_tar().display().to_string();
    let inside = format!("exec <\"$3\"\n{INSIDE}");
    let line = [
        "-euo", "pipefail", "-c", &inside, "bash", &folder, &tar, &script,
    ];
    let used = run_for("bash", &line, 300).ok();
    assert!(
        used.stdout.ends_with("installed, used, removed\n"),
        "{used}"
    );
    // QEMU reads what was made there.
    assert_clean(&scratch.path("root/packages/theirs.qcow2"));
}
