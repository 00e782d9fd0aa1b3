//! Secrets in files.

use std::fs;

use kvbm_settings::MIN_TOKEN_BYTES;

use crate::error::{Error, ErrorKind, Result};

/// The only line of a file, which `setting` names. No message contains it.
///
/// # Errors
/// [`ErrorKind::Unavailable`]: the file cannot be read. [`ErrorKind::Invalid`]: it is no secret.
pub(crate) fn read_secret(path: &str, setting: &str) -> Result<String> {
    let text = fs::read_to_string(path).map_err(|error| {
        let message = format!("cannot read the secret in {path} ({setting})");
        Error::caused(ErrorKind::Unavailable, message, error)
    })?;
    let secret = text.trim();
    if secret.len() < MIN_TOKEN_BYTES || secret.contains(char::is_whitespace) {
        let message = format!(
            "{path} ({setting}) is not a secret: one line of {MIN_TOKEN_BYTES} bytes or more, without spaces"
        );
        return Err(Error::invalid(message));
    }
    Ok(secret.to_owned())
}
