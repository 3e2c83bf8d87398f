//! The images that the tests in the guest are made for.

use crate::gaur::gaur;
use crate::op::{self, Op};
use crate::scratch::Scratch;

const MIB: u64 = 1 << 20;

/// Standard or extended L2 entries, alone or above a backing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Extended L2 entries.
    pub extended: bool,
    /// There is a backing file.
    pub backed: bool,
}

impl Shape {
    /// What follows `-o` when such an image is created.
    pub fn options(self) -> &'static str {
        match self.extended {
            true => "extended_l2=on",
            false => "extended_l2=off",
        }
    }

    /// The unit in which space is given back: a subcluster or a cluster, in bytes.
    pub fn unit_bytes(self) -> u64 {
        match self.extended {
            true => 2048,
            false => 65536,
        }
    }

    /// An image of that many MiB. What is behind it is shorter, full of noise here and there, partly
    /// compressed.
    #[track_caller]
    pub fn create(self, scratch: &Scratch, size_mib: u64) -> String {
        let base = self.backed.then(|| noisy_base(scratch, size_mib - 16));
        self.create_above(scratch, "disk.qcow2", base.as_deref(), size_mib)
    }

    /// An image above another, or above none.
    #[track_caller]
    pub fn create_above(
        self,
        scratch: &Scratch,
        name: &str,
        base: Option<&str>,
        size_mib: u64,
    ) -> String {
        let path = scratch.path(name);
        let size = format!("{size_mib}M");
        let mut arguments = vec!["create", "-q", "-f", "qcow2", "-o", self.options()];
        if let Some(base) = base {
            arguments.extend(["-b", base, "-F", "qcow2"]);
        }
        arguments.extend([path.as_str(), &size]);
        gaur(&arguments).ok();
        path
    }
}

#[track_caller]
fn noisy_base(scratch: &Scratch, size_mib: u64) -> String {
    let path = scratch.path("base.qcow2");
    let size = format!("{size_mib}M");
    gaur(&["create", "-q", "-f", "qcow2", &path, &size]).ok();
    let file = crate::builder::noise(scratch);
    let mut ops = Vec::new();
    for place in 0..8 {
        let offset = place * size_mib / 8 * MIB;
        ops.push(Op::WriteFile {
            offset,
            len: MIB,
            file: file.clone(),
        });
        ops.push(Op::Compressed {
            offset: offset + 2 * MIB,
            len: MIB,
            pattern: 0x5a,
        });
        ops.push(Op::Zero {
            offset: offset + 4 * MIB,
            len: MIB,
            unmap: false,
        });
    }
    op::apply("qcow2", &path, &ops);
    path
}

/// Makes a test of a scenario for every way and shape: `every_disk!(scenario)` calls
/// `scenario(DeviceKind, Shape)` in a test for each, `nbd::standard` and so on. Further arguments come first.
#[macro_export]
macro_rules! every_disk {
    ($scenario:path $(, $argument:expr)*) => {
        $crate::every_shape!(nbd, Nbd, $scenario $(, $argument)*);
        $crate::every_shape!(ublk, Ublk, $scenario $(, $argument)*);
        $crate::every_shape!(vduse, Vduse, $scenario $(, $argument)*);
    };
}

/// The tests of one way; see [`every_disk!`].
#[macro_export]
macro_rules! every_shape {
    ($module:ident, $via:ident, $scenario:path $(, $argument:expr)*) => {
        mod $module {
            $crate::shape_tests! { $via, $scenario, ($($argument),*);
                standard: false, false;
                standard_with_backing: false, true;
                extended: true, false;
                extended_with_backing: true, true;
            }
        }
    };
}

/// One test a line: name, extended, backed.
#[macro_export]
macro_rules! shape_tests {
    ($via:ident, $scenario:path, $arguments:tt; $($name:ident: $extended:literal, $backed:literal;)*) => {$(
        $crate::shape_test!($via, $scenario, $arguments; $name, $extended, $backed);
    )*};
}

/// One test.
#[macro_export]
macro_rules! shape_test {
    ($via:ident, $scenario:path, ($($argument:expr),*); $name:ident, $extended:literal, $backed:literal) => {
        #[test]
        #[ignore = "runs in the guest: cargo xtask vm test"]
        fn $name() {
            let shape = $crate::attached::Shape { extended: $extended, backed: $backed };
            $scenario($($argument,)* $crate::attached::DeviceKind::$via, shape);
        }
    };
}
