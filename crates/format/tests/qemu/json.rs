//! Just enough JSON to take numbers out of flat objects.

/// A flat object as printed.
#[derive(Debug)]
pub struct Json(pub String);

impl Json {
    /// The number under `key`, 0 when it is missing.
    pub fn number(&self, key: &str) -> u64 {
        let Some((_, rest)) = self.0.split_once(&format!("\"{key}\":")) else {
            return 0;
        };
        let digits: String = rest
            .trim_start()
            .chars()
            .take_while(char::is_ascii_digit)
            .collect();
        digits.parse().unwrap()
    }
}
