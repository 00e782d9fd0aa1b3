//! Files that settings name: secrets, keys and certificates.

use std::fs::File;
use std::io::{self, Read};

use kvbm_settings::MIN_TOKEN_BYTES;
use kvbm_tiers::{open_secret, privacy_problem};

use crate::error::{Error, ErrorKind, Result};

/// Nothing larger is read: some certificates of CAs.
const MAX_BYTES: u64 = 1 << 20;

/// The only line of a file, which `setting` names. Other programs may read it too, such as one that
/// shows the secret here. No message contains it.
///
/// # Errors
/// [`ErrorKind::Unavailable`]: the file cannot be read. [`ErrorKind::Invalid`]: it is no secret.
#[cfg(feature = "serve")]
pub(crate) fn read_secret(path: &str, setting: &str) -> Result<String> {
    only_line(&read_text(path, setting)?, path, setting)
}

/// The text of a file that others may read.
///
/// # Errors
/// As those of [`read_private`], but for others.
pub(crate) fn read_text(path: &str, setting: &str) -> Result<String> {
    let file = open_secret(path).map_err(|error| unreadable(path, setting, error))?;
    text_of(file, path, setting)
}

/// The only line of a file that no other user can read. No message contains it.
///
/// # Errors
/// As those of [`read_private`], and [`ErrorKind::Invalid`]: it is no secret.
pub(crate) fn read_private_secret(path: &str, setting: &str) -> Result<String> {
    only_line(&read_private(path, setting)?, path, setting)
}

/// The only line of a file that no other user can read, as it is: others chose it. No message contains
/// it.
///
/// # Errors
/// As those of [`read_private`], and [`ErrorKind::Invalid`]: it is no line.
pub(crate) fn read_password(path: &str, setting: &str) -> Result<String> {
    let text = read_private(path, setting)?;
    let password = text.trim_end_matches(['\r', '\n']);
    if password.is_empty() || password.contains(char::is_control) {
        return Err(Error::invalid(format!("{path} ({setting}) is not a password: one line")));
    }
    Ok(password.to_owned())
}

/// The text of a file that no other user can read.
///
/// # Errors
/// [`ErrorKind::Unavailable`]: it cannot be read. [`ErrorKind::Invalid`]: others can read it, or it
/// is too large.
pub(crate) fn read_private(path: &str, setting: &str) -> Result<String> {
    let file = open_secret(path).map_err(|error| unreadable(path, setting, error))?;
    check_privacy(&file, path, setting)?;
    text_of(file, path, setting)
}

fn text_of(file: File, path: &str, setting: &str) -> Result<String> {
    let mut text = String::new();
    let read = file.take(MAX_BYTES + 1).read_to_string(&mut text);
    let bytes = read.map_err(|error| unreadable(path, setting, error))?;
    if bytes as u64 > MAX_BYTES {
        return Err(Error::invalid(format!("{path} ({setting}) is larger than {MAX_BYTES} bytes")));
    }
    Ok(text)
}

/// As a file of encryption keys.
fn check_privacy(file: &File, path: &str, setting: &str) -> Result<()> {
    let problem = privacy_problem(file).map_err(|error| unreadable(path, setting, error))?;
    match problem {
        Some(problem) => Err(Error::invalid(format!("{path} ({setting}) {problem}"))),
        None => Ok(()),
    }
}

fn only_line(text: &str, path: &str, setting: &str) -> Result<String> {
    let secret = text.trim();
    if secret.len() < MIN_TOKEN_BYTES || secret.contains(char::is_whitespace) {
        let message = format!(
            "{path} ({setting}) is not a secret: one line of {MIN_TOKEN_BYTES} bytes or more, without spaces"
        );
        return Err(Error::invalid(message));
    }
    Ok(secret.to_owned())
}

fn unreadable(path: &str, setting: &str, error: io::Error) -> Error {
    let message = format!("cannot read {path} ({setting})");
    Error::caused(ErrorKind::Unavailable, message, error)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_secret_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        fs::write(&path, "0123456789abcdef\n").unwrap();
        let path = path.to_str().unwrap();
        for mode in [0o644, 0o640, 0o604, 0o666] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
            let error = read_private_secret(path, "peers.secret_file").unwrap_err().to_string();
            assert!(
                error.contains(&format!("mode {mode:04o}")) && error.contains("chmod"),
                "{error}"
            );
        }
        for mode in [0o600, 0o400] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(read_private_secret(path, "peers.secret_file").unwrap(), "0123456789abcdef");
        }
    }

    #[test]
    fn what_is_no_secret_is_named_and_not_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        let long = "x".repeat(MAX_BYTES as usize + 1);
        for (text, why) in [("short", "16 bytes"), ("two words of it", "spaces"), (&long, "larger")]
        {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            let error = read_private_secret(path.to_str().unwrap(), "peers.secret_file");
            let error = error.unwrap_err().to_string();
            assert!(error.contains(why) && !error.contains(text), "{error}");
        }
        for (text, password) in [("s3 cret\r\n", Some("s3 cret")), ("\n", None), ("a\nb\n", None)] {
            fs::write(&path, text).unwrap();
            let read = read_password(path.to_str().unwrap(), "peers.etcd_password_file");
            assert_eq!(read.ok().as_deref(), password);
        }
        let error = read_private_secret(dir.path().to_str().unwrap(), "peers.secret_file");
        assert!(error.unwrap_err().to_string().contains("is not a file"));
        let pipe = dir.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let error = read_private_secret(pipe.to_str().unwrap(), "peers.secret_file");
        assert!(error.unwrap_err().to_string().contains("is not a file"), "and is not waited for");
    }
}
