//! Keys of tenants: random, wrapped by a main key, and destroyed with what they sealed.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Prk};
use ring::rand::{SecureRandom, SystemRandom};
use zeroize::Zeroizing;

use super::keys::{KeyRing, Secret};
use crate::copy::Owner;
use crate::error::{SetupError, SetupErrorKind};
use crate::index::IndexEntry;

/// Bytes of a wrapped key.
pub const RECORD_BYTES: usize = 128;
/// Bytes of the name of a key.
pub(super) const ID_BYTES: usize = 16;

const KEY_BYTES: usize = 32;
const SALT_BYTES: usize = 16;
const TAG_BYTES: usize = 16;
/// A wrapped key, in the first version, and what is left of one that was destroyed.
const LIVE: [u8; 4] = *b"KVK1";
const DESTROYED: [u8; 4] = *b"KVK0";
/// What the tag covers beside the key.
const CLEAR_BYTES: usize = 64;
const SALT_AT: usize = 32;
const NONCE_AT: usize = 48;
const TAG_AT: usize = CLEAR_BYTES + KEY_BYTES;
/// Keys are wrapped for nothing else, and nothing else is derived so.
const PURPOSE: &[u8] = b"kvbm tenant key v1";

/// Names a tenant's key: random.
pub type KeyId = [u8; ID_BYTES];

/// A tenant's key as it is stored: encrypted and authenticated by a main key.
///
/// ```text
///  0 magic 4 │ main key 4 │ tenant 8, 0 nobody's, else one more │ id 16 │ salt 16 │ nonce 12 │ zero 4
/// 64 the key 32, encrypted │ tag 16 │ zero 16
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct WrappedKey([u8; RECORD_BYTES]);

impl fmt::Debug for WrappedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WrappedKey").field("tenant", &self.tenant()).finish_non_exhaustive()
    }
}

impl WrappedKey {
    /// `None`: they are no wrapped key.
    pub fn parse(bytes: [u8; RECORD_BYTES]) -> Option<Self> {
        bytes.starts_with(&LIVE).then_some(Self(bytes))
    }

    /// The name of the key that was here before it was destroyed, if one was.
    pub(super) fn destroyed(bytes: &[u8; RECORD_BYTES]) -> Option<KeyId> {
        bytes.starts_with(&DESTROYED).then(|| array_at(bytes, 16))
    }

    /// What takes its place when it is destroyed: its name, so that no copy of it comes back.
    pub(super) fn tombstone(id: KeyId) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..4].copy_from_slice(&DESTROYED);
        bytes[16..32].copy_from_slice(&id);
        bytes
    }

    pub(crate) const fn bytes(&self) -> &[u8; RECORD_BYTES] {
        &self.0
    }

    /// Its name.
    pub fn id(&self) -> KeyId {
        array_at(&self.0, 16)
    }

    /// Whose blocks it seals; `None`: nobody's in particular.
    pub fn tenant(&self) -> Option<u32> {
        let tenant = u64::from_le_bytes(array_at(&self.0, 8));
        tenant.checked_sub(1).and_then(|tenant| u32::try_from(tenant).ok())
    }

    fn main(&self) -> u32 {
        u32::from_le_bytes(array_at(&self.0, 4))
    }
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|byte| bytes[at + byte])
}

/// Where wrapped keys are kept.
pub trait KeyStore: Send + Sync + fmt::Debug {
    /// All that there are.
    ///
    /// # Errors
    /// The medium.
    fn load(&self) -> io::Result<Vec<WrappedKey>>;

    /// One that was not there when all were loaded: another worker may have made it.
    ///
    /// # Errors
    /// The medium.
    fn find(&self, _id: KeyId) -> io::Result<Option<WrappedKey>> {
        Ok(None)
    }

    /// Keeps another one. It survives the end of the machine when this returns.
    ///
    /// # Errors
    /// It may not be kept.
    fn add(&self, key: &WrappedKey) -> io::Result<()>;

    /// Destroys all keys of a tenant, known or not, for good. Returns how many.
    ///
    /// # Errors
    /// Some may be left: which place is named.
    fn destroy(&self, tenant: u32) -> io::Result<usize>;
}

/// Keys that end with their process.
#[derive(Debug, Default)]
pub struct KeysInMemory;

impl KeyStore for KeysInMemory {
    fn load(&self) -> io::Result<Vec<WrappedKey>> {
        Ok(Vec::new())
    }

    fn add(&self, _: &WrappedKey) -> io::Result<()> {
        Ok(())
    }

    fn destroy(&self, _: u32) -> io::Result<usize> {
        Ok(0)
    }
}

/// The keys that blocks of one tier and namespace are sealed with: one for each tenant and main key.
#[derive(Debug)]
pub struct TenantKeys {
    ring: Arc<KeyRing>,
    namespace: String,
    store: Box<dyn KeyStore>,
    random: SystemRandom,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    by_id: HashMap<KeyId, Key>,
    /// What is sealed with now.
    current: HashMap<Option<u32>, KeyId>,
    /// How often each tenant was forgotten here.
    lives: HashMap<u32, u32>,
    /// Names that no store has: each is asked for once.
    missing: HashSet<KeyId>,
}

#[derive(Clone)]
struct Key {
    tenant: Option<u32>,
    secret: Arc<Secret>,
}

impl fmt::Debug for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Known").field("keys", &self.by_id.len()).finish_non_exhaustive()
    }
}

/// Why there is no key to seal a block with.
#[derive(Debug)]
pub(super) enum NoKey {
    /// Its tenant was forgotten since it set out. That says nothing of any medium.
    Forgotten,
    /// A new one could not be made or kept.
    Failed(io::Error),
}

impl From<io::Error> for NoKey {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

/// Whoever writes garbage into a bucket does not make us remember all of it.
const MAX_MISSING: usize = 1 << 16;

impl TenantKeys {
    /// Those that are kept in `store`, of one namespace.
    ///
    /// # Errors
    /// `Io`: the store.
    pub fn open(ring: Arc<KeyRing>, namespace: &str, store: Box<dyn KeyStore>) -> Result<Self, SetupError> {
        let kept = store.load().map_err(|error| {
            SetupError::caused(
                SetupErrorKind::Io,
                format!("the keys of tenants cannot be read: {error}"),
                error,
            )
        })?;
        let random = SystemRandom::new();
        let keys = Self { ring, namespace: namespace.to_owned(), store, random, known: Mutex::default() };
        let unreadable = kept.iter().filter(|wrapped| keys.learn(wrapped).is_none()).count();
        if unreadable > 0 {
            tracing::warn!(
                unreadable,
                namespace,
                "keys of tenants are under main keys that are not given here: what they sealed is not found"
            );
        }
        Ok(keys)
    }

    /// Keys that end with this process.
    pub fn in_memory(ring: Arc<KeyRing>, namespace: &str) -> Self {
        let (store, random) = (Box::new(KeysInMemory), SystemRandom::new());
        Self { ring, namespace: namespace.to_owned(), store, random, known: Mutex::default() }
    }

    /// The main keys.
    pub const fn ring(&self) -> &Arc<KeyRing> {
        &self.ring
    }

    /// Drops what is said of blocks of tenants who have no key here: nobody can read them.
    pub fn retain_readable(&self, entries: &mut Vec<IndexEntry>) {
        let tenants: HashSet<_> = self.known.lock().by_id.values().map(|key| key.tenant).collect();
        entries.retain(|entry| tenants.contains(&entry.tenant));
    }

    /// The key to seal a block of `owner` with, made if there is none.
    pub(super) fn to_seal(&self, owner: Option<Owner>) -> Result<(KeyId, Arc<Secret>), NoKey> {
        let tenant = owner.map(|owner| owner.tenant);
        let mut known = self.known.lock();
        let is_past = |owner: Owner| known.lives.get(&owner.tenant).is_some_and(|&life| owner.life < life);
        if owner.is_some_and(is_past) {
            return Err(NoKey::Forgotten);
        }
        if let Some(id) = known.current.get(&tenant) {
            return Ok((*id, Arc::clone(&known.by_id[id].secret)));
        }
        // With the lock held: a tenant has one key to seal with, and a new one is rare.
        let (wrapped, secret) = self.make(tenant)?;
        self.store.add(&wrapped)?;
        let key = Key { tenant, secret };
        let secret = Arc::clone(&key.secret);
        known.by_id.insert(wrapped.id(), key);
        known.current.insert(tenant, wrapped.id());
        Ok((wrapped.id(), secret))
    }

    /// The key of that name; `None`: it was destroyed, or is under a main key that is not given here.
    pub(super) fn to_open(&self, id: KeyId) -> io::Result<Option<Arc<Secret>>> {
        let known = self.known.lock();
        if let Some(key) = known.by_id.get(&id) {
            return Ok(Some(Arc::clone(&key.secret)));
        }
        if known.missing.contains(&id) {
            return Ok(None);
        }
        // A store may take seconds.
        drop(known);
        let found = self.store.find(id)?;
        let learnt = found.filter(|wrapped| wrapped.id() == id).and_then(|wrapped| self.learn(&wrapped));
        if learnt.is_none() {
            let mut known = self.known.lock();
            if known.missing.len() < MAX_MISSING {
                known.missing.insert(id);
            }
        }
        Ok(learnt)
    }

    /// Destroys what the blocks of a tenant were sealed with: nobody reads them again who has no copy of it. What is
    /// sealed for him from here on has another key; what is of an earlier `life` is not sealed any more.
    ///
    /// # Errors
    /// Some of it may be left on a medium. In this process it is gone.
    pub fn forget(&self, tenant: u32, life: u32) -> io::Result<()> {
        let mut known = self.known.lock();
        known.lives.insert(tenant, life);
        known.current.remove(&Some(tenant));
        let gone: Vec<_> =
            known.by_id.iter().filter(|(_, key)| key.tenant == Some(tenant)).map(|(id, _)| *id).collect();
        for id in gone {
            known.by_id.remove(&id);
            known.missing.insert(id);
        }
        self.store.destroy(tenant).map(drop)
    }

    fn make(&self, tenant: Option<u32>) -> io::Result<(WrappedKey, Arc<Secret>)> {
        let no_random = |_| io::Error::other("the system gives no random bytes to make a key of");
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        self.random.fill(&mut *key).map_err(no_random)?;
        let mut bytes = [0; RECORD_BYTES];
        self.random.fill(&mut bytes[16..NONCE_AT + NONCE_LEN]).map_err(no_random)?;
        bytes[..4].copy_from_slice(&LIVE);
        bytes[4..8].copy_from_slice(&self.ring.current().to_le_bytes());
        let numbered = tenant.map_or(0, |tenant| u64::from(tenant) + 1);
        bytes[8..16].copy_from_slice(&numbered.to_le_bytes());
        let (wrapping, nonce) = self.wrapping(&bytes).ok_or_else(|| io::Error::other("no main key"))?;
        bytes[CLEAR_BYTES..TAG_AT].copy_from_slice(&*key);
        let covered = self.covered(&bytes);
        let tag = wrapping
            .seal_in_place_separate_tag(nonce, Aad::from(covered), &mut bytes[CLEAR_BYTES..TAG_AT])
            .map_err(|_| io::Error::other("a key could not be wrapped"))?;
        bytes[TAG_AT..TAG_AT + TAG_BYTES].copy_from_slice(tag.as_ref());
        Ok((WrappedKey(bytes), secret(&key)))
    }

    /// Unwraps a key; `None`: its main key is not given here, or it is not what was written.
    fn learn(&self, wrapped: &WrappedKey) -> Option<Arc<Secret>> {
        let bytes = wrapped.bytes();
        let (wrapping, nonce) = self.wrapping(bytes)?;
        let mut key = Zeroizing::new(array_at::<KEY_BYTES>(bytes, CLEAR_BYTES));
        let tag = Tag::from(array_at::<TAG_BYTES>(bytes, TAG_AT));
        let covered = Aad::from(self.covered(bytes));
        wrapping.open_in_place_separate_tag(nonce, covered, tag, &mut *key, 0..).ok()?;
        let mut known = self.known.lock();
        // Destroyed since it was read.
        if known.missing.contains(&wrapped.id()) {
            return None;
        }
        let key = Key { tenant: wrapped.tenant(), secret: secret(&key) };
        if wrapped.main() == self.ring.current() {
            known.current.entry(key.tenant).or_insert(wrapped.id());
        }
        let secret = Arc::clone(&key.secret);
        known.by_id.insert(wrapped.id(), key);
        Some(secret)
    }

    fn wrapping(&self, bytes: &[u8; RECORD_BYTES]) -> Option<(LessSafeKey, Nonce)> {
        let number = u32::from_le_bytes(array_at(bytes, 4));
        let info = [PURPOSE, &bytes[SALT_AT..SALT_AT + SALT_BYTES]];
        let key = self.ring.get(number)?.expand(&info, &AES_256_GCM).ok()?;
        let nonce = Nonce::assume_unique_for_key(array_at(bytes, NONCE_AT));
        Some((LessSafeKey::new(UnboundKey::from(key)), nonce))
    }

    fn covered(&self, bytes: &[u8; RECORD_BYTES]) -> Vec<u8> {
        [&bytes[..CLEAR_BYTES], self.namespace.as_bytes()].concat()
    }
}

/// What keys of blocks are derived from.
fn secret(key: &[u8; KEY_BYTES]) -> Arc<Secret> {
    Arc::new(Secret::of(Prk::new_less_safe(HKDF_SHA256, key)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A store in memory that outlives those who use it.
    #[derive(Debug, Default, Clone)]
    struct Shelf(Arc<Mutex<Vec<WrappedKey>>>);

    impl KeyStore for Shelf {
        fn load(&self) -> io::Result<Vec<WrappedKey>> {
            Ok(self.0.lock().clone())
        }

        fn find(&self, id: KeyId) -> io::Result<Option<WrappedKey>> {
            Ok(self.0.lock().iter().find(|key| key.id() == id).cloned())
        }

        fn add(&self, key: &WrappedKey) -> io::Result<()> {
            self.0.lock().push(key.clone());
            Ok(())
        }

        fn destroy(&self, tenant: u32) -> io::Result<usize> {
            let mut keys = self.0.lock();
            let before = keys.len();
            keys.retain(|key| key.tenant() != Some(tenant));
            Ok(before - keys.len())
        }
    }

    fn ring(number: u32, digits: &str) -> Arc<KeyRing> {
        Arc::new(KeyRing::parse(&format!("{number}:{}", digits.repeat(4))).unwrap())
    }

    fn open(ring: Arc<KeyRing>, namespace: &str, shelf: &Shelf) -> TenantKeys {
        TenantKeys::open(ring, namespace, Box::new(shelf.clone())).unwrap()
    }

    const ONE: &str = "0123456789abcdef";
    const OTHER: &str = "fedcba9876543210";

    #[expect(clippy::unnecessary_wraps, reason = "as a copy has it")]
    fn owner(tenant: u32, life: u32) -> Option<Owner> {
        Some(Owner { tenant, life })
    }

    #[test]
    fn each_tenant_has_a_key_that_the_next_process_finds_and_others_do_not() {
        let shelf = Shelf::default();
        let first = open(ring(1, ONE), "here", &shelf);
        let ids = [None, owner(0, 0), owner(u32::MAX, 0)].map(|owner| first.to_seal(owner).unwrap().0);
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 3);
        assert_eq!(first.to_seal(owner(0, 0)).unwrap().0, ids[1], "one each");
        let again = open(ring(1, ONE), "here", &shelf);
        assert!(ids.iter().all(|&id| again.to_open(id).unwrap().is_some()));
        assert_eq!(again.to_seal(owner(0, 0)).unwrap().0, ids[1]);
        for stranger in [
            open(ring(1, OTHER), "here", &shelf),
            open(ring(2, ONE), "here", &shelf),
            open(ring(1, ONE), "there", &shelf),
        ] {
            assert!(ids.iter().all(|&id| stranger.to_open(id).unwrap().is_none()));
        }
    }

    #[test]
    fn any_flipped_bit_of_a_wrapped_key_is_noticed() {
        let shelf = Shelf::default();
        let id = open(ring(1, ONE), "here", &shelf).to_seal(owner(7, 0)).unwrap().0;
        let good = *shelf.0.lock()[0].bytes();
        for bit in 0..8 * (TAG_AT + TAG_BYTES) {
            let mut bytes = good;
            bytes[bit / 8] ^= 1 << (bit % 8);
            shelf.0.lock().clear();
            shelf.0.lock().extend(WrappedKey::parse(bytes));
            assert!(open(ring(1, ONE), "here", &shelf).to_open(id).unwrap().is_none(), "bit {bit}");
        }
    }

    #[test]
    fn a_new_main_key_has_new_keys_under_it_and_the_old_ones_are_read() {
        let shelf = Shelf::default();
        let old = open(ring(1, ONE), "here", &shelf).to_seal(owner(7, 0)).unwrap().0;
        let both = Arc::new(KeyRing::parse(&format!("2:{},1:{}", OTHER.repeat(4), ONE.repeat(4))).unwrap());
        let rotated = open(both, "here", &shelf);
        let new = rotated.to_seal(owner(7, 0)).unwrap().0;
        assert!(new != old && rotated.to_open(old).unwrap().is_some());
        let later = open(ring(2, OTHER), "here", &shelf);
        assert!(later.to_open(old).unwrap().is_none() && later.to_open(new).unwrap().is_some());
    }

    #[test]
    fn who_is_forgotten_has_no_key_here_or_later_and_others_keep_theirs() {
        let shelf = Shelf::default();
        let keys = open(ring(1, ONE), "here", &shelf);
        let [gone, kept] = [7, 8].map(|tenant| keys.to_seal(owner(tenant, 0)).unwrap().0);
        keys.forget(7, 1).unwrap();
        assert!(keys.to_open(gone).unwrap().is_none() && keys.to_open(kept).unwrap().is_some());
        assert!(keys.to_seal(owner(7, 0)).is_err(), "it was on its way");
        let new = keys.to_seal(owner(7, 1)).unwrap().0;
        assert_ne!(new, gone);
        let later = open(ring(1, ONE), "here", &shelf);
        assert!(later.to_open(gone).unwrap().is_none() && later.to_open(kept).unwrap().is_some());
        assert!(later.to_open(new).unwrap().is_some());
    }

    #[test]
    fn a_key_that_another_worker_made_is_found_when_it_is_asked_for() {
        let shelf = Shelf::default();
        let (one, other) = (open(ring(1, ONE), "here", &shelf), open(ring(1, ONE), "here", &shelf));
        let id = one.to_seal(None).unwrap().0;
        assert!(other.to_open(id).unwrap().is_some());
        assert!(other.to_open([9; ID_BYTES]).unwrap().is_none());
    }
}
