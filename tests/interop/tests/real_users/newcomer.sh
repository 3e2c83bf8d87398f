# How somebody builds an image who has read the manual of qemu-img.
field() { python3 -c 'import json, sys; print(eval("one" + sys.argv[1], {"one": json.load(sys.stdin)}))' "$1"; }

mkdir -p root/etc root/srv
echo image >root/etc/hostname
seq 200000 >root/srv/numbers
mkfs.ext4 -q -F -E root_owner=0:0 -U 6a3b1c68-53f8-4f0c-a32f-8d0c0f4c1de1 -d root disk.raw 24M
qemu-img convert -p -c -f raw -O qcow2 -o compression_type=zstd,cluster_size=128k disk.raw base.qcow2 >progress
grep -q '(100.00/100%)' progress
qemu-img compare disk.raw base.qcow2
[ "$(qemu-img info --output=json base.qcow2 | field '["virtual-size"]')" = 25165824 ]
qemu-img info --output=json base.qcow2 | field '["format-specific"]["data"]["compression-type"]'

qemu-img create -f qcow2 -b base.qcow2 -F qcow2 work.qcow2
qemu-img resize work.qcow2 +8M
qemu-img info work.qcow2 | grep -E '^(image|file format|virtual size|cluster_size|backing)'
qemu-io -c 'write -P 17 25M 1M' -c 'discard 25M 128k' work.qcow2 | grep -c '^wrote'
qemu-img snapshot -c before work.qcow2
qemu-io -c 'write -P 18 26M 512k' work.qcow2 >/dev/null
[ "$(qemu-img snapshot -l work.qcow2 | awk '$2 == "before"' | wc -l)" = 1 ]
qemu-img snapshot -a before work.qcow2
qemu-io -r -c 'read -P 0 26M 512k' work.qcow2 | grep -c '^read'
qemu-img snapshot -d before work.qcow2
qemu-img snapshot -l work.qcow2
qemu-img check work.qcow2 | head -1
[ "$(qemu-img check --output=json work.qcow2 | field '["check-errors"]')" = 0 ]

cp base.qcow2 moved.qcow2
qemu-img rebase -u -b moved.qcow2 -F qcow2 work.qcow2
[ "$(qemu-img info --output=json --backing-chain work.qcow2 | field '[1]["filename"]')" = moved.qcow2 ]
qemu-img map --output=json work.qcow2 | field '[-1]["depth"]'
qemu-img convert -O qcow2 work.qcow2 flat.qcow2
qemu-img resize moved.qcow2 32M
qemu-img commit work.qcow2
qemu-img compare moved.qcow2 flat.qcow2
qemu-img rebase -b '' work.qcow2
qemu-img info work.qcow2 | grep -c backing || true
qemu-img amend -o compat=0.10 flat.qcow2
qemu-img measure -O qcow2 flat.qcow2 | sed 's/: [1-9][0-9]*$/: some/'
qemu-img create -f qcow2 /nowhere/disk.qcow2 1G 2>/dev/null || echo "exit code $?"
qemu-img compare disk.raw work.qcow2 >/dev/null 2>&1 || echo "exit code $?"
qemu-img info disk.raw | head -2
