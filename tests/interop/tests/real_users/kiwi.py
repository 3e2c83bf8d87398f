# KIWI's step from the raw disk that it has built to the qcow2 image that it ships.
import os

from kiwi.storage.subformat.qcow2 import DiskFormatQcow2
from kiwi.xml_description import XMLDescription
from kiwi.xml_state import XMLState

here = os.getcwd()
state = XMLState(XMLDescription("config.xml").load(), None, "oem")
image = DiskFormatQcow2(state, here, here, {"cluster_size=2M": None, "compat": "1.1", "lazy_refcounts": None})
os.rename("disk.raw", image.diskname)
assert image.resize_raw_disk(16 << 20)
assert not image.resize_raw_disk(16 << 20)
assert image.resize_raw_disk(1 << 20, append=True)
image.create_image_format()
os.symlink(image.diskname, "disk.raw")
os.symlink(image.get_target_file_path_for_format("qcow2"), "disk.qcow2")
