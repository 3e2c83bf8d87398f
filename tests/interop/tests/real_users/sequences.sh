# The calls that well-known programs make, which are not in the distribution or need a machine to run.
truncate -s 32M cloud.raw
seq 300000 | dd of=cloud.raw conv=notrunc bs=1M seek=3 status=none
qemu-img convert -q -f raw -O qcow2 cloud.raw cloud.img

echo "Packer's QEMU builder"
qemu-img create -f qcow2 packer 40960M
qemu-img create -f qcow2 -b cloud.img -F qcow2 packer-backed 50G
qemu-img convert -O qcow2 cloud.img packer-copy
qemu-img resize -f qcow2 packer-copy 40960M
qemu-img convert -c -f qcow2 -O qcow2 packer-copy packer-copy.convert
mv packer-copy.convert packer-copy
qemu-img info --output=json packer-copy | python3 -c 'import json, sys; print(json.load(sys.stdin)["format"])'

echo "Multipass"
cp cloud.img multipass.img
qemu-img info --output=json multipass.img | python3 -c 'import json, sys; print(json.load(sys.stdin)["virtual-size"])'
qemu-img convert -p -O qcow2 cloud.raw multipass.qcow2 >progress
grep -q '100\.00/100%' progress
qemu-img resize multipass.img 5368709120
qemu-img snapshot -c @first multipass.img
qemu-img snapshot -a @first multipass.img
qemu-img snapshot -l multipass.img | awk '{ print $1, $2 }'
qemu-img snapshot -d @first multipass.img
qemu-img amend -o compat=1.1 multipass.img

echo "Lima"
qemu-img create -f qcow2 -F qcow2 -b "$PWD/cloud.img" lima 107374182400
qemu-img info --output=json --force-share lima | python3 -c 'import json, sys; one = json.load(sys.stdin); print(one["backing-filename-format"], one["format-specific"]["type"])'
qemu-img convert -O raw cloud.img lima.raw
qemu-img resize -f raw lima.raw 64M

echo "oVirt's vdsm"
qemu-img measure --output json -O qcow2 cloud.raw | python3 -c 'import json, sys; print(sorted(json.load(sys.stdin)))'
qemu-img create -f qcow2 -o compat=1.1 vdsm-target 32M
qemu-img convert -p -t none -T none -f raw -O qcow2 -n -W cloud.raw vdsm-target >/dev/null
qemu-img create -f qcow2 -u -o compat=1.1,backing_file=vdsm-target,backing_fmt=qcow2 vdsm-top 33554432
qemu-img bitmap --add --enable -g 65536 vdsm-top 3c1c9a0a
qemu-io -f qcow2 -c 'write -q -P 9 1M 64k' vdsm-top
qemu-img map --output json vdsm-top | python3 -c 'import json, sys; print([one["length"] for one in json.load(sys.stdin) if one["depth"] == 0])'
qemu-img rebase -t none -T none -u -f qcow2 -F qcow2 -b "$PWD/vdsm-target" vdsm-top
qemu-img compare -p -f raw -F qcow2 cloud.raw vdsm-target >/dev/null
qemu-img commit -p -t none -b "$PWD/vdsm-target" -f qcow2 vdsm-top >/dev/null
qemu-img check --output json -f qcow2 -T none vdsm-target | python3 -c 'import json, sys; print(json.load(sys.stdin)["check-errors"])'

echo "KubeVirt's importer"
qemu-img info --output=json cloud.img | python3 -c 'import json, sys; print(json.load(sys.stdin)["format"])'
qemu-img convert -t writeback -p -O raw cloud.img kubevirt.raw >/dev/null
qemu-img resize -f raw kubevirt.raw 67108864
qemu-img create -f qcow2 -o compat=1.1,nocow=off kubevirt.qcow2 1G
qemu-img convert -t none -p -O raw -S 0 cloud.img kubevirt-full.raw >/dev/null

echo "OpenStack's Nova"
env LC_ALL=C LANG=C qemu-img info cloud.img --force-share --output=json | python3 -c 'import json, sys; print(json.load(sys.stdin)["cluster-size"])'
env LC_ALL=C LANG=C qemu-img create -f qcow2 -o backing_file="$PWD/cloud.img",backing_fmt=qcow2,cluster_size=65536 nova 1G
qemu-img resize -f qcow2 nova 2147483648
qemu-img convert -t none -O qcow2 -f qcow2 -c nova nova-snapshot
qemu-img rebase -b '' -F qcow2 nova 2>/dev/null || qemu-img rebase -b '' nova
