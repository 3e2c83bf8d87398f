# mkosi's last step.
import os
import sys
import types

sys.path.insert(0, sys.argv[1] + "/usr/lib/python3/dist-packages")
import mkosi

config = types.SimpleNamespace(output_format=mkosi.OutputFormat.gpt_ext4, qcow2=True, output=mkosi.Path("disk"))
with open("disk.raw", "r+b") as raw:
    made = mkosi.qcow2_output(config, raw)
    os.link(made.name, "disk.qcow2")
