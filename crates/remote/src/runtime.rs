//! The threads that talk to stores. Those that serve disks never do.

use std::sync::{OnceLock, mpsc};

use tokio::runtime::{Builder, Runtime};

/// Most threads: what they do besides waiting is to decrypt, to hash and to copy.
const THREADS: usize = 4;

static RUNTIME: OnceLock<Option<Runtime>> = OnceLock::new();

/// The runtime, started by who asks first.
pub(crate) fn get() -> Result<&'static Runtime, String> {
    let start = || {
        // Another library of the process may have chosen one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Builder::new_multi_thread()
            .worker_threads(processors.min(THREADS))
            .thread_name("gaur-remote")
            .enable_all()
            .build()
            .ok()
    };
    let runtime = RUNTIME.get_or_init(start).as_ref();
    runtime.ok_or_else(|| "cannot start threads".to_owned())
}

/// Runs a future there, and waits for its end without a reactor of this thread's.
pub(crate) fn run<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> Result<T, String> {
    let (tell, told) = mpsc::sync_channel(1);
    get()?.spawn(async move { tell.send(future.await) });
    told.recv().map_err(|_| "a thread failed".to_owned())
}
