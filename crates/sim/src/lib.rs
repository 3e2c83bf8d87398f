//! A simulated host: disks with volatile and durable sectors, a seeded scheduler, faults.
