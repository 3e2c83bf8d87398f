//! Where lines for people go.

use std::sync::Arc;

/// Takes one line about a client: who came, who left and why.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;
