//! Main keys: where they come from, and which one is used for what.

#![expect(unsafe_code, reason = "wipes keys")]

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::hkdf::{HKDF_SHA256, Prk, Salt};
use ring::hmac;
use zeroize::{Zeroizing, zeroize_flat_type};

use crate::error::{SetupError, SetupErrorKind};
use crate::files::{open_secret, privacy_problem};

/// The variable that holds keys.
const VARIABLE: &str = "DYN_KVBM_ENCRYPTION_KEY";
/// The variable that names a file of keys.
const FILE_VARIABLE: &str = "DYN_KVBM_ENCRYPTION_KEY_FILE";
/// How a key is written, for messages.
const FORM: &str = "NUMBER:KEY, where NUMBER is 1 to 4294967295 and KEY is 32 random bytes, as 64 hexadecimal digits \
                    (openssl rand -hex 32) or in base64 (openssl rand -base64 32)";
const KEY_BYTES: usize = 32;
/// Some thousand keys. Nothing larger is read.
const MAX_FILE_BYTES: u64 = 64 << 10;
/// Keeps this program's keys apart from any other use that an operator makes of them.
const PURPOSE: &[u8] = b"kvbm main key v2";

/// The main keys, by number. Keys of tenants are wrapped by the first that was given; the others
/// open what was sealed under them.
///
/// So a key is replaced by writing a new one before it, and is dropped when nothing that it sealed
/// matters any more: blocks whose key is gone are misses. Keys are wiped from memory when this
/// goes, and never shown.
pub struct KeyRing {
    current: u32,
    keys: BTreeMap<u32, SecretKey>,
}

impl KeyRing {
    /// Keys as the variable writes them: separated by commas or lines, the one to seal with first.
    ///
    /// # Errors
    /// `Invalid`: what is wrong with which key; none of it is repeated.
    pub fn parse(text: &str) -> Result<Self, SetupError> {
        Self::read(text, VARIABLE)
    }

    /// Keys from a file: one on each line, the one to seal with first; `#` begins a remark.
    ///
    /// # Errors
    /// `Invalid`: there is no such file, others than its owner may read it, its owner is neither
    /// this user nor root, or its content is not keys.
    pub fn from_file(path: &Path) -> Result<Self, SetupError> {
        let place = format!("{FILE_VARIABLE} ({})", path.display());
        let file = open_secret(path).map_err(|error| unreadable(&place, error))?;
        check_privacy(&file, &place)?;
        let mut text = Zeroizing::new(String::with_capacity(MAX_FILE_BYTES as usize + 1));
        let read = file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text);
        let bytes = read.map_err(|error| unreadable(&place, error))?;
        if bytes as u64 > MAX_FILE_BYTES {
            return Err(SetupError::invalid(format!(
                "{place} is larger than {MAX_FILE_BYTES} bytes: name a file of keys"
            )));
        }
        Self::read(&text, &place)
    }

    /// The number of the key that blocks are sealed with.
    pub const fn current(&self) -> u32 {
        self.current
    }

    /// The numbers of all keys.
    pub fn numbers(&self) -> impl Iterator<Item = u32> {
        self.keys.keys().copied()
    }

    pub(super) fn get(&self, number: u32) -> Option<&Prk> {
        self.keys.get(&number).map(SecretKey::get)
    }

    /// A key that authenticates, under a main key; `None`: that is not given.
    pub(crate) fn mac_key(&self, number: u32, purpose: &[u8]) -> Option<MacKey> {
        let info = [purpose];
        let key = self.get(number)?.expand(&info, hmac::HMAC_SHA256).ok()?;
        Some(MacKey { number, key: hmac::Key::from(key) })
    }

    fn read(text: &str, place: &str) -> Result<Self, SetupError> {
        let mut ring = Self { current: 0, keys: BTreeMap::new() };
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
        let written =
            lines.flat_map(|line| line.split(',')).map(str::trim).filter(|key| !key.is_empty());
        for (position, written) in written.enumerate() {
            let wrong = |why: &str| {
                SetupError::invalid(format!("{place}: key {}: {why}: write {FORM}", position + 1))
            };
            let (number, key) = parse_key(written).map_err(wrong)?;
            if ring.keys.insert(number, key).is_some() {
                return Err(wrong("another one has its number"));
            }
            if position == 0 {
                ring.current = number;
            }
        }
        if ring.keys.is_empty() {
            return Err(SetupError::invalid(format!("{place} holds no key: write {FORM}")));
        }
        Ok(ring)
    }
}

fn parse_key(written: &str) -> Result<(u32, SecretKey), &'static str> {
    let (number, key) = written.split_once(':').ok_or("it has no number")?;
    let number =
        number.trim().parse().ok().filter(|&number| number > 0).ok_or("its number is none")?;
    let key = key.trim();
    let bytes =
        if key.len() == 2 * KEY_BYTES { hex::decode(key).ok() } else { STANDARD.decode(key).ok() };
    let bytes = Zeroizing::new(bytes.ok_or("it is neither hexadecimal digits nor base64")?);
    if bytes.len() != KEY_BYTES {
        return Err("it has not 32 bytes");
    }
    // A key that is typed by hand is refused.
    if bytes.iter().all(|byte| *byte == bytes[0]) {
        return Err("it is not random");
    }
    Ok((number, SecretKey::of(Salt::new(HKDF_SHA256, PURPOSE).extract(&bytes))))
}

/// Anyone who can read the file can read all that was ever sealed.
fn check_privacy(file: &File, place: &str) -> Result<(), SetupError> {
    let problem = privacy_problem(file).map_err(|error| unreadable(place, error))?;
    match problem {
        Some(problem) => Err(SetupError::invalid(format!("{place} {problem}"))),
        None => Ok(()),
    }
}

fn unreadable(place: &str, error: io::Error) -> SetupError {
    let message =
        format!("cannot read {place}: {error}: name a file of keys that this user may read");
    SetupError::caused(SetupErrorKind::Invalid, message, error)
}

impl fmt::Debug for KeyRing {
    /// Numbers alone.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<_> = self.numbers().collect();
        f.debug_struct("KeyRing").field("current", &self.current).field("keys", &numbers).finish()
    }
}

/// What other keys are derived from. In one place of memory from the start, and wiped at the end.
pub(super) struct SecretKey(ManuallyDrop<Box<Prk>>);

impl SecretKey {
    pub(super) fn of(key: Prk) -> Self {
        Self(ManuallyDrop::new(Box::new(key)))
    }

    pub(super) fn get(&self) -> &Prk {
        &self.0
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Drop for SecretKey {
    fn drop(&mut self) {
        // SAFETY: it is taken here only, and not used after.
        let key = Box::into_raw(unsafe { ManuallyDrop::take(&mut self.0) });
        // SAFETY: a value of the library's that has no destructor and owns nothing but its own
        // bytes: two states of a hash and references to tables. Nothing uses it after this.
        unsafe { zeroize_flat_type(key) };
        // SAFETY: the box's own memory, of the same layout, given back as bytes that mean nothing.
        drop(unsafe { Box::from_raw(key.cast::<MaybeUninit<Prk>>()) });
    }
}

/// HMAC-SHA-256 under a main key.
#[derive(Clone)]
pub(crate) struct MacKey {
    number: u32,
    key: hmac::Key,
}

impl MacKey {
    /// That of the main key.
    pub(crate) const fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn sign(&self, parts: &[&[u8]]) -> hmac::Tag {
        let mut context = hmac::Context::with_key(&self.key);
        parts.iter().for_each(|part| context.update(part));
        context.sign()
    }

    /// Whether a code is that of these bytes. Takes the same time wherever it differs.
    pub(crate) fn is_of(&self, code: &[u8], parts: &[&[u8]]) -> bool {
        hmac::verify(&self.key, &parts.concat(), code).is_ok()
    }
}

/// One main key of a number is all that a process has.
impl PartialEq for MacKey {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for MacKey {}

impl fmt::Debug for MacKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MacKey").field("number", &self.number).finish_non_exhaustive()
    }
}

const _: () = assert!(!std::mem::needs_drop::<Prk>(), "its bytes are wiped instead of dropped");

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const HEX: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
    const BASE64: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

    fn refusal(text: &str) -> String {
        let error = KeyRing::parse(text).expect_err("no keys");
        assert_eq!(error.kind(), SetupErrorKind::Invalid);
        format!("{error} {error:?}")
    }

    #[test]
    fn the_first_key_is_current_and_others_are_kept() {
        let ring = KeyRing::parse(&format!("7:{HEX}, 3:{BASE64}")).unwrap();
        assert_eq!((ring.current(), ring.numbers().collect::<Vec<_>>()), (7, vec![3, 7]));
        assert!(ring.get(3).is_some() && ring.get(1).is_none());
    }

    #[test]
    fn nothing_shows_a_key() {
        let ring = KeyRing::parse(&format!("7:{HEX}")).unwrap();
        assert_eq!(format!("{ring:?}"), "KeyRing { current: 7, keys: [7] }");
        let last_digit_wrong = format!("1:{}g", &HEX[..63]);
        let twice = format!("1:{HEX},1:{HEX}");
        let too_short = format!("1:{}", &HEX[..62]);
        for text in
            ["", HEX, "0:AAAA", "x:AAAA", &last_digit_wrong, &twice, &too_short, &"0".repeat(64)]
        {
            let refusal = refusal(text);
            assert!(refusal.contains(VARIABLE), "{refusal}");
            assert!(!refusal.contains("0001020304") && !refusal.contains("AAAA"), "{refusal}");
        }
        assert!(refusal(&format!("1:{}", "ab".repeat(32))).contains("not random"));
    }

    #[test]
    fn a_file_must_be_its_owners_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        fs::write(&path, format!("# new\n2:{HEX}\n\n1:{BASE64} # old\n")).unwrap();
        let with_mode = |mode| {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            KeyRing::from_file(&path)
        };
        for mode in [0o600, 0o400] {
            assert_eq!(with_mode(mode).unwrap().current(), 2);
        }
        for mode in [0o644, 0o640, 0o604, 0o620] {
            let error = with_mode(mode).unwrap_err().to_string();
            assert!(error.contains(FILE_VARIABLE) && error.contains("chmod 0600"), "{error}");
        }
        for bad in [dir.path(), &dir.path().join("none")] {
            assert_eq!(KeyRing::from_file(bad).unwrap_err().kind(), SetupErrorKind::Invalid);
        }
        fs::write(&path, "1:".repeat(40_000)).unwrap();
        assert!(with_mode(0o600).unwrap_err().to_string().contains("larger"));
    }
}
