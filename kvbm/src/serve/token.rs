//! What readers of other machines show.

use std::fs;

use kvbm_settings::{MIN_TOKEN_BYTES, MetricsSettings};

use crate::error::{Error, ErrorKind, Result};

/// The hash of a token: the process does not hold the token itself, and a comparison takes the same
/// time for any wrong one.
#[derive(Clone, Debug)]
pub(super) struct BearerToken(blake3::Hash);

impl BearerToken {
    /// `None`: everyone who reaches the address may read.
    pub(super) fn of(settings: &MetricsSettings) -> Result<Option<Self>> {
        let file = settings.token_file.as_ref().map(|path| read(path)).transpose()?;
        let token = file.as_ref().or(settings.token.as_ref());
        Ok(token.map(|token| Self(blake3::hash(token.as_bytes()))))
    }

    /// Whether the value of a header `Authorization` shows it.
    pub(super) fn is_shown(&self, authorization: &[u8]) -> bool {
        let shown = authorization.split_at_checked(SCHEME.len());
        shown.is_some_and(|(scheme, token)| {
            scheme.eq_ignore_ascii_case(SCHEME) && blake3::hash(token.trim_ascii()) == self.0
        })
    }
}

const SCHEME: &[u8] = b"Bearer ";

fn read(path: &str) -> Result<String> {
    // No message contains the file's content.
    let text = fs::read_to_string(path).map_err(|error| {
        let message = format!("cannot read the token of metrics in {path} (metrics.token_file)");
        Error::caused(ErrorKind::Unavailable, message, error)
    })?;
    let token = text.trim();
    if token.len() < MIN_TOKEN_BYTES || token.contains(char::is_whitespace) {
        let message = format!(
            "{path} (metrics.token_file) is not a token: one line of {MIN_TOKEN_BYTES} bytes or more, without spaces"
        );
        return Err(Error::new(ErrorKind::Invalid, message));
    }
    Ok(token.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_shown_unchanged_or_not_at_all() {
        let settings = MetricsSettings {
            token: Some("0123456789abcdef".into()),
            ..MetricsSettings::default()
        };
        let token = BearerToken::of(&settings).unwrap().unwrap();
        assert!(
            token.is_shown(b"Bearer 0123456789abcdef")
                && token.is_shown(b"bearer 0123456789abcdef")
        );
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "0123456789abcdef",
            "Bearer 0123456789abcde",
            "Basic 0123456789abcdef",
        ] {
            assert!(!token.is_shown(wrong.as_bytes()), "{wrong}");
        }
        assert!(!format!("{token:?}").contains("0123456789abcdef"));
    }

    #[test]
    fn a_file_has_one_line_of_some_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let open = |text: &str| {
            fs::write(&path, text).unwrap();
            let token_file = Some(path.display().to_string());
            BearerToken::of(&MetricsSettings { token_file, ..MetricsSettings::default() })
        };
        assert!(open("0123456789abcdef\n").unwrap().unwrap().is_shown(b"Bearer 0123456789abcdef"));
        for text in ["", "short", "0123456789abcdef\n0123456789abcdef\n"] {
            let error = open(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(text.is_empty() || !error.to_string().contains(text), "{error}");
        }
        fs::remove_file(&path).unwrap();
        let missing = MetricsSettings {
            token_file: Some(path.display().to_string()),
            ..MetricsSettings::default()
        };
        assert_eq!(BearerToken::of(&missing).unwrap_err().kind(), ErrorKind::Unavailable);
    }
}
