//! Tests against QEMU's tools, libnbd, fio and a kernel.
