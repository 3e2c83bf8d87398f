//! What a serving process is: its exports and the images behind them, the control protocol, and what is
//! kept for the next server when this one is killed.

#![forbid(unsafe_code)]

pub mod cache_cleaner;
pub mod cached_device;
pub mod check_facts;
pub mod control;
pub mod export_name;
pub mod exporter;
pub mod failure;
pub mod fronts;
pub mod guest;
mod handover;
mod health;
pub mod host_kind;
pub mod image_file;
pub mod image_spec;
mod json;
mod kept;
pub mod key_values;
pub mod keys;
pub mod new_luks;
pub mod notice;
pub mod open;
pub mod options;
pub mod pin;
pub mod references;
pub mod server;
pub mod shared_image;
pub mod size;
pub mod snapshot_facts;
pub mod snapshot_operation;
pub mod state_pipe;
pub mod stream_facts;
pub mod temporary;
pub mod tls_objects;
mod trimmer;
pub mod ublk_state;
pub mod vm_state;
