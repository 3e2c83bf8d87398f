# OpenStack's library to deploy images on machines, and the parser that all of OpenStack reads `qemu-img info` with.
import subprocess
import sys

from ironic_lib import disk_utils
from oslo_config import cfg
from oslo_utils import imageutils

theirs = sys.argv[1]
cfg.CONF([], project="test")


def human(program):
    done = subprocess.run([program, "info", "top.qcow2"], capture_output=True, text=True, check=True)
    return str(imageutils.QemuImgInfo(done.stdout))


seen = disk_utils.qemu_img_info("top.qcow2")
assert seen.file_format == "qcow2" and seen.virtual_size == 32 << 20, str(seen)
assert seen.backing_file == "base.qcow2" and seen.backing_file_format == "qcow2", str(seen)
assert [one["name"] for one in seen.snapshots] == ["one", "two"], seen.snapshots
assert human("qemu-img") == human(theirs)
# Under limits of memory, as it has them for images that strangers bring.
disk_utils.convert_image("top.qcow2", "flat.qcow2", "qcow2")
disk_utils.convert_image("top.qcow2", "flat.raw", "raw", cache="none", out_of_order=True, sparse_size="0")
disk_utils.populate_image("top.qcow2", "populated.raw")
