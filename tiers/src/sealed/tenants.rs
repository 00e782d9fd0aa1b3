//! Keys of tenants: random, wrapped by a main key, and destroyed with what they sealed.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Prk};
use ring::rand::{SecureRandom, SystemRandom};
use zeroize::Zeroizing;

use super::keys::{KeyRing, SecretKey};
use crate::copy::Owner;
use crate::fields::{array_at, u32_at, u64_at};
use crate::index::IndexEntry;

/// Bytes of a wrapped key.
pub const RECORD_BYTES: usize = 128;
/// Bytes of the name of a key.
pub(super) const ID_BYTES: usize = 16;
/// Of these, bytes that name the tenant.
pub(crate) const TENANT_BYTES: usize = 5;

const KEY_BYTES: usize = 32;
const SALT_BYTES: usize = 16;
const TAG_BYTES: usize = 16;
/// A wrapped key, in the first version, and what is left of one that was destroyed.
const LIVE: [u8; 4] = *b"KVK1";
const DESTROYED: [u8; 4] = *b"KVK0";
/// What the tag covers beside the key.
const CLEAR_BYTES: usize = 64;
const ID_AT: usize = 16;
const SALT_AT: usize = 32;
const NONCE_AT: usize = 48;
const TAG_AT: usize = CLEAR_BYTES + KEY_BYTES;
/// Keys are wrapped for nothing else, and nothing else is derived so.
const PURPOSE: &[u8] = b"kvbm tenant key v1";

/// Names a tenant's key: the tenant's number plus one (0: no tenant's) in 5 bytes, highest first,
/// and 11 random ones. So a store finds a key and all keys of a tenant without a look at others.
pub type KeyId = [u8; ID_BYTES];

/// A tenant's key as it is stored: encrypted and authenticated by a main key.
///
/// ```text
///  0 magic 4 │ main key 4 │ tenant 8, 0 none, else one more │ its name 16 │ salt 16 │ nonce 12 │ zero 4
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
        // Nothing less: a bit that flips makes no key a destroyed one.
        let id = array_at(bytes, ID_AT);
        (*bytes == Self::tombstone(id)).then_some(id)
    }

    /// What takes its place when it is destroyed: its name, so that no copy of it comes back.
    pub(super) fn tombstone(id: KeyId) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..4].copy_from_slice(&DESTROYED);
        bytes[ID_AT..SALT_AT].copy_from_slice(&id);
        bytes
    }

    /// As it is stored.
    pub const fn bytes(&self) -> &[u8; RECORD_BYTES] {
        &self.0
    }

    /// Its name.
    pub fn id(&self) -> KeyId {
        array_at(&self.0, ID_AT)
    }

    /// Whose blocks it seals; `None`: no particular tenant's.
    pub fn tenant(&self) -> Option<u32> {
        let tenant = u64_at(&self.0, 8);
        tenant.checked_sub(1).and_then(|tenant| u32::try_from(tenant).ok())
    }

    fn main(&self) -> u32 {
        u32_at(&self.0, 4)
    }
}

/// The tenant's number plus one; 0: no tenant's.
fn numbered(tenant: Option<u32>) -> u64 {
    tenant.map_or(0, |tenant| u64::from(tenant) + 1)
}

/// What the names of a tenant's keys begin with.
pub(crate) fn id_prefix(tenant: Option<u32>) -> [u8; TENANT_BYTES] {
    array_at(&numbered(tenant).to_be_bytes(), size_of::<u64>() - TENANT_BYTES)
}

/// What such a name begins with.
pub(crate) fn tenant_prefix(id: &KeyId) -> [u8; TENANT_BYTES] {
    array_at(id, 0)
}

/// What a store has under the name of a key. That it could not be asked is an error, and none of
/// these.
#[derive(Debug)]
pub enum FoundKey {
    /// Its copies, as far as they differ: one at most is what was written.
    Live(Vec<WrappedKey>),
    /// It was destroyed: its name lies in its place.
    Destroyed,
    /// Nothing.
    Absent,
}

/// Where wrapped keys are kept. A caller may wait seconds for the answer.
pub trait KeyStore: Send + Sync + fmt::Debug {
    /// The key of that name.
    ///
    /// # Errors
    /// The medium: it is unknown.
    fn find(&self, id: KeyId) -> io::Result<FoundKey>;

    /// Of each of these tenants the keys, as many as it takes to go on with one.
    ///
    /// # Errors
    /// The medium: it is unknown for this tenant.
    fn of_tenants(&self, tenants: &[Option<u32>]) -> Vec<io::Result<Vec<WrappedKey>>>;

    /// Keeps another one. It survives the end of the machine when this returns.
    ///
    /// # Errors
    /// It may not be kept.
    fn add(&self, key: &WrappedKey) -> io::Result<()>;

    /// Puts a copy that is what was written in the place of those that are not. One that is gone
    /// stays so.
    ///
    /// # Errors
    /// The medium.
    fn repair(&self, _good: &WrappedKey) -> io::Result<()> {
        Ok(())
    }

    /// Destroys all keys of a tenant, known or not, for good, but for those that are spared.
    /// Returns how many.
    ///
    /// # Errors
    /// Some may be left: which place is named.
    fn destroy(&self, tenant: u32, spared: &[KeyId]) -> io::Result<usize>;
}

/// Keys that end with their process.
#[derive(Debug, Default)]
pub struct KeysInMemory;

impl KeyStore for KeysInMemory {
    fn find(&self, _: KeyId) -> io::Result<FoundKey> {
        Ok(FoundKey::Absent)
    }

    fn of_tenants(&self, tenants: &[Option<u32>]) -> Vec<io::Result<Vec<WrappedKey>>> {
        tenants.iter().map(|_| Ok(Vec::new())).collect()
    }

    fn add(&self, _: &WrappedKey) -> io::Result<()> {
        Ok(())
    }

    fn destroy(&self, _: u32, _: &[KeyId]) -> io::Result<usize> {
        Ok(0)
    }
}

/// The keys that blocks of one tier and namespace are sealed with: one for each tenant and main
/// key.
///
/// Three things are told apart: a key is known, or it is gone, or its store could not be asked. The
/// store is asked outside the lock, about one thing once at a time: a caller whose key is known
/// does not wait.
///
/// A tenant that is forgotten begins another *life*. A key that was made in a life seals that
/// life's blocks alone, and [forgetting](Self::forget) spares the keys of the life that it names
/// and of later ones. So it does not matter in which order two calls, or a call and the first
/// blocks behind it, come here.
#[derive(Debug)]
pub struct TenantKeys {
    ring: Arc<KeyRing>,
    namespace: String,
    store: Box<dyn KeyStore>,
    random: SystemRandom,
    known: Mutex<KeyCache>,
    /// The store has answered a caller.
    answered: Condvar,
}

#[derive(Default)]
struct KeyCache {
    by_id: HashMap<KeyId, SealKey>,
    tenants: HashMap<Option<u32>, TenantState>,
    /// Names that were read in a destroyed key's place, and of keys that were forgotten here.
    destroyed: HashSet<KeyId>,
    /// What the store is being asked about.
    asked: HashSet<Subject>,
    /// How often forgetting a tenant began or ended.
    forgets: u64,
}

#[derive(Clone)]
struct SealKey {
    tenant: Option<u32>,
    /// Of the tenant, in which it was made here; `None`: in an earlier process, or by another
    /// worker.
    life: Option<u32>,
    secret: Arc<SecretKey>,
    /// As it is stored, for workers that are sent what it sealed.
    wrapped: WrappedKey,
}

struct TenantState {
    /// The latest that was named here.
    life: u32,
    /// No call asked to forget it: what comes is sealed with a key that is there already, if one
    /// is.
    adopts: bool,
    /// What is sealed with now.
    current: Option<KeyId>,
    /// Its keys are to be destroyed, and may not be yet: what the store has is not believed.
    is_condemned: bool,
    /// [`KeyCache::forgets`] when forgetting it began or ended last: answers to older questions
    /// mean nothing.
    forgotten_at: u64,
}

impl Default for TenantState {
    fn default() -> Self {
        Self { life: 0, adopts: true, current: None, is_condemned: false, forgotten_at: 0 }
    }
}

/// What a store is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Subject {
    /// The key of that name.
    Key(KeyId),
    /// A tenant's keys: which there are, another one, or the end of all.
    Tenant(Option<u32>),
}

impl fmt::Debug for KeyCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Known").field("keys", &self.by_id.len()).finish_non_exhaustive()
    }
}

/// Why there is no key.
#[derive(Debug)]
pub(super) enum NoKey {
    /// The block's tenant was forgotten since it set out. That says nothing of any medium.
    Forgotten,
    /// It was destroyed, or is under a main key that is not given here, or is not what was written.
    Gone,
    /// The store could not be asked, or a new key not be kept. The next time may be better.
    Failed(io::Error),
}

impl From<io::Error> for NoKey {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

/// Garbage written onto a medium must not make us remember all of it.
const MAX_DESTROYED: usize = 1 << 16;

impl TenantKeys {
    /// Those that are kept in `store`, of one namespace.
    pub fn new(ring: Arc<KeyRing>, namespace: &str, store: Box<dyn KeyStore>) -> Self {
        Self {
            ring,
            namespace: namespace.to_owned(),
            store,
            random: SystemRandom::new(),
            known: Mutex::default(),
            answered: Condvar::new(),
        }
    }

    /// Keys that end with this process.
    pub fn in_memory(ring: Arc<KeyRing>, namespace: &str) -> Self {
        Self::new(ring, namespace, Box::new(KeysInMemory))
    }

    /// The main keys.
    pub const fn ring(&self) -> &Arc<KeyRing> {
        &self.ring
    }

    /// Drops what is said of blocks of tenants that have no key: no one can read them. Where the
    /// store does not say, they stay.
    pub fn retain_readable(&self, entries: &mut Vec<IndexEntry>) {
        let tenants: HashSet<_> = entries.iter().map(|entry| entry.tenant).collect();
        let tenants: Vec<_> = tenants.into_iter().collect();
        let began = self.known.lock().forgets;
        let answers = self.store.of_tenants(&tenants);
        let (mut unreadable, mut unknown, mut dropped) = (0, 0, HashSet::new());
        for (tenant, answer) in tenants.into_iter().zip(answers) {
            let Ok(keys) = answer else {
                unknown += 1;
                continue;
            };
            let learnt = keys.iter().filter(|key| self.learn(key, began).is_some()).count();
            unreadable += keys.len() - learnt;
            if learnt == 0 && !self.known.lock().by_id.values().any(|key| key.tenant == tenant) {
                dropped.insert(tenant);
            }
        }
        if unknown + unreadable > 0 {
            tracing::warn!(
                unreadable,
                unknown,
                namespace = self.namespace,
                "keys of tenants are under main keys that are not given here, or could not be asked for: what the former \
                 sealed is not found, and what the latter did when they can be had"
            );
        }
        entries.retain(|entry| !dropped.contains(&entry.tenant));
    }

    /// Whether [`to_seal`](Self::to_seal) answers at once.
    pub(super) fn can_seal(&self, owner: Option<Owner>) -> bool {
        !matches!(self.known.lock().current(owner), Ok(None))
    }

    /// Whether [`to_open`](Self::to_open) answers at once.
    pub(super) fn can_open(&self, id: KeyId) -> bool {
        let known = self.known.lock();
        known.by_id.contains_key(&id) || known.destroyed.contains(&id)
    }

    /// The key to seal a block of `owner` with, made if there is none.
    pub(super) fn to_seal(&self, owner: Option<Owner>) -> Result<(KeyId, Arc<SecretKey>), NoKey> {
        let tenant = owner.map(|owner| owner.tenant);
        loop {
            let mut known = self.known.lock();
            if let Some(found) = known.current(owner)? {
                return Ok(found);
            }
            let Some(_turn) = self.begin(&mut known, Subject::Tenant(tenant)) else { continue };
            let adopts = known.tenant(tenant).adopts;
            drop(known);
            let kept = if adopts { self.find_current(tenant)? } else { None };
            let (id, key) = kept.map_or_else(|| self.make_and_keep(tenant, owner), Ok)?;
            self.known.lock().install(id, key);
        }
    }

    /// The key of that name.
    pub(super) fn to_open(&self, id: KeyId) -> Result<Arc<SecretKey>, NoKey> {
        loop {
            let mut known = self.known.lock();
            if let Some(key) = known.by_id.get(&id) {
                return Ok(Arc::clone(&key.secret));
            }
            if known.destroyed.contains(&id) {
                return Err(NoKey::Gone);
            }
            let Some(_turn) = self.begin(&mut known, Subject::Key(id)) else { continue };
            let began = known.forgets;
            drop(known);
            match self.store.find(id)? {
                FoundKey::Live(copies) => self.learn_one(id, &copies, began)?,
                FoundKey::Destroyed => self.known.lock().note_destroyed(id),
                FoundKey::Absent => return Err(NoKey::Gone),
            }
        }
    }

    /// The key of that name as it is stored; none of a tenant that was forgotten.
    pub(super) fn wrapped(&self, id: KeyId) -> Result<WrappedKey, NoKey> {
        self.to_open(id)?;
        let known = self.known.lock();
        known.by_id.get(&id).map(|key| key.wrapped.clone()).ok_or(NoKey::Gone)
    }

    /// Learns a key that another worker sent: an error says why it cannot be used here.
    pub(super) fn take(&self, record: &[u8; RECORD_BYTES]) -> Result<(), String> {
        let wrapped = WrappedKey::parse(*record).ok_or("what was sent is no key")?;
        let number = wrapped.main();
        if self.ring.get(number).is_none() {
            return Err(format!(
                "main key {number} is not given here: add it to encryption.key_file \
                 (DYN_KVBM_ENCRYPTION_KEY_FILE)"
            ));
        }
        self.learn(&wrapped, 0).ok_or_else(|| {
            format!("main key {number} is another one here, or what was sent has changed")
        })
    }

    /// Destroys what the blocks of a tenant were sealed with in earlier lives than `life`: no one
    /// without a copy of it reads them again. What is sealed for it from here on has another key;
    /// blocks of an earlier life are not sealed any more.
    ///
    /// # Errors
    /// Some of it may be left on a medium. In this process it is gone.
    pub fn forget(&self, tenant: u32, life: u32) -> io::Result<()> {
        self.begin_forgetting(tenant, life);
        self.destroy(tenant, life)
    }

    /// The first half of [`forget`](Self::forget), which asks no store: in this process the keys
    /// are gone.
    pub fn begin_forgetting(&self, tenant: u32, life: u32) {
        self.known.lock().condemn(tenant, life);
    }

    /// The second half of [`forget`](Self::forget), for as long as the store takes.
    ///
    /// # Errors
    /// Some of it may be left on a medium.
    pub fn destroy(&self, tenant: u32, life: u32) -> io::Result<()> {
        let mut known = self.known.lock();
        let _turn = loop {
            if let Some(turn) = self.begin(&mut known, Subject::Tenant(Some(tenant))) {
                break turn;
            }
        };
        let (at, spared) =
            (known.tenant(Some(tenant)).forgotten_at, known.keys_since(tenant, life));
        drop(known);
        let destroyed = self.store.destroy(tenant, &spared);
        self.known.lock().end_forgetting(tenant, at, destroyed.is_ok());
        destroyed.map(drop)
    }

    /// The caller with the turn asks the store. `None`: another had it, and has an answer now.
    fn begin(&self, known: &mut MutexGuard<'_, KeyCache>, subject: Subject) -> Option<Turn<'_>> {
        if known.asked.insert(subject) {
            return Some(Turn { keys: self, subject });
        }
        self.answered.wait(known);
        None
    }

    /// The key that what comes for a tenant is sealed with, if an earlier process or another worker
    /// made one.
    fn find_current(&self, tenant: Option<u32>) -> io::Result<Option<(KeyId, SealKey)>> {
        let kept = self.store.of_tenants(&[tenant]).pop().unwrap_or_else(|| Ok(Vec::new()))?;
        let mut current =
            kept.iter().filter(|key| key.main() == self.ring.current() && key.tenant() == tenant);
        Ok(current.find_map(|key| {
            let (secret, wrapped) = (self.unwrap(key)?, key.clone());
            Some((key.id(), SealKey { tenant, life: None, secret, wrapped }))
        }))
    }

    fn make_and_keep(
        &self,
        tenant: Option<u32>,
        owner: Option<Owner>,
    ) -> Result<(KeyId, SealKey), NoKey> {
        let (wrapped, secret) = self.make(tenant)?;
        self.store.add(&wrapped)?;
        let life = Some(owner.map_or(0, |owner| owner.life));
        Ok((wrapped.id(), SealKey { tenant, life, secret, wrapped }))
    }

    /// Learns a key from what a store has of it.
    fn learn_one(&self, id: KeyId, copies: &[WrappedKey], began: u64) -> Result<(), NoKey> {
        let is_good = |copy: &&WrappedKey| copy.id() == id && self.unwrap(copy).is_some();
        let good = copies.iter().find(is_good).ok_or(NoKey::Gone)?;
        if copies.len() > 1
            && let Err(error) = self.store.repair(good)
        {
            tracing::warn!(%error, "a damaged copy of a tenant's key stays");
        }
        if self.known.lock().tenant(good.tenant()).is_condemned {
            return Err(NoKey::Gone);
        }
        // A tenant that was forgotten meanwhile may have another answer now.
        self.learn(good, began);
        Ok(())
    }

    /// Unwraps a key and remembers it, unless its tenant was forgotten since the question began;
    /// `None`: its main key is not given here, or it is not what was written.
    fn learn(&self, wrapped: &WrappedKey, began: u64) -> Option<()> {
        let secret = self.unwrap(wrapped)?;
        let mut known = self.known.lock();
        let state = known.tenant(wrapped.tenant());
        if !state.is_condemned && state.forgotten_at <= began {
            let (tenant, of_store) = (wrapped.tenant(), wrapped.clone());
            let key = SealKey { tenant, life: None, secret, wrapped: of_store };
            known.by_id.entry(wrapped.id()).or_insert(key);
        }
        Some(())
    }

    fn make(&self, tenant: Option<u32>) -> io::Result<(WrappedKey, Arc<SecretKey>)> {
        let no_random = |_| io::Error::other("the system gives no random bytes to make a key of");
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        self.random.fill(&mut *key).map_err(no_random)?;
        let mut bytes = [0; RECORD_BYTES];
        self.random.fill(&mut bytes[ID_AT..NONCE_AT + NONCE_LEN]).map_err(no_random)?;
        bytes[..4].copy_from_slice(&LIVE);
        bytes[4..8].copy_from_slice(&self.ring.current().to_le_bytes());
        bytes[8..16].copy_from_slice(&numbered(tenant).to_le_bytes());
        bytes[ID_AT..ID_AT + TENANT_BYTES].copy_from_slice(&id_prefix(tenant));
        let (wrapping, nonce) =
            self.wrapping(&bytes).ok_or_else(|| io::Error::other("no main key"))?;
        bytes[CLEAR_BYTES..TAG_AT].copy_from_slice(&*key);
        let covered = self.covered(&bytes);
        let tag = wrapping
            .seal_in_place_separate_tag(nonce, Aad::from(covered), &mut bytes[CLEAR_BYTES..TAG_AT])
            .map_err(|_| io::Error::other("a key could not be wrapped"))?;
        bytes[TAG_AT..TAG_AT + TAG_BYTES].copy_from_slice(tag.as_ref());
        Ok((WrappedKey(bytes), secret(&key)))
    }

    /// `None`: its main key is not given here, or it is not what was written.
    fn unwrap(&self, wrapped: &WrappedKey) -> Option<Arc<SecretKey>> {
        let bytes = wrapped.bytes();
        let (wrapping, nonce) = self.wrapping(bytes)?;
        let mut key = Zeroizing::new(array_at::<KEY_BYTES>(bytes, CLEAR_BYTES));
        let tag = Tag::from(array_at::<TAG_BYTES>(bytes, TAG_AT));
        let covered = Aad::from(self.covered(bytes));
        wrapping.open_in_place_separate_tag(nonce, covered, tag, &mut *key, 0..).ok()?;
        Some(secret(&key))
    }

    fn wrapping(&self, bytes: &[u8; RECORD_BYTES]) -> Option<(LessSafeKey, Nonce)> {
        let number = u32_at(bytes, 4);
        let info = [PURPOSE, &bytes[SALT_AT..SALT_AT + SALT_BYTES]];
        let key = self.ring.get(number)?.expand(&info, &AES_256_GCM).ok()?;
        let nonce = Nonce::assume_unique_for_key(array_at(bytes, NONCE_AT));
        Some((LessSafeKey::new(UnboundKey::from(key)), nonce))
    }

    fn covered(&self, bytes: &[u8; RECORD_BYTES]) -> Vec<u8> {
        [&bytes[..CLEAR_BYTES], self.namespace.as_bytes()].concat()
    }
}

/// The right to ask the store about something. It passes to another caller even if the store
/// panics.
struct Turn<'k> {
    keys: &'k TenantKeys,
    subject: Subject,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.keys.known.lock().asked.remove(&self.subject);
        self.keys.answered.notify_all();
    }
}

impl KeyCache {
    fn tenant(&mut self, tenant: Option<u32>) -> &mut TenantState {
        self.tenants.entry(tenant).or_default()
    }

    /// What a block of `owner` is sealed with; `None`: that is not known yet.
    fn current(&mut self, owner: Option<Owner>) -> Result<Option<(KeyId, Arc<SecretKey>)>, NoKey> {
        let state = self.tenant(owner.map(|owner| owner.tenant));
        let life = owner.map_or(0, |owner| owner.life);
        if life < state.life {
            return Err(NoKey::Forgotten);
        }
        if life > state.life {
            // The call that forgets it is on the way here.
            (state.life, state.adopts, state.current) = (life, false, None);
        }
        let current = state.current;
        Ok(current.and_then(|id| Some((id, Arc::clone(&self.by_id.get(&id)?.secret)))))
    }

    /// A key was found or made to seal with. Where its tenant was forgotten meanwhile it goes with
    /// the others.
    fn install(&mut self, id: KeyId, key: SealKey) {
        let state = self.tenant(key.tenant);
        let is_of_now = key.life.map_or(state.adopts, |life| life == state.life);
        if is_of_now {
            state.current = Some(id);
            self.by_id.insert(id, key);
        }
    }

    fn note_destroyed(&mut self, id: KeyId) {
        if self.destroyed.len() >= MAX_DESTROYED {
            self.destroyed.clear();
        }
        self.destroyed.insert(id);
    }

    /// The keys of a tenant that were made here in this life or later ones.
    fn keys_since(&self, tenant: u32, life: u32) -> Vec<KeyId> {
        let keys = self.by_id.iter().filter(|(_, key)| key.tenant == Some(tenant));
        keys.filter(|(_, key)| key.life.is_some_and(|made| made >= life))
            .map(|(id, _)| *id)
            .collect()
    }

    fn condemn(&mut self, tenant: u32, life: u32) {
        self.forgets += 1;
        let at = self.forgets;
        let is_past =
            |key: &SealKey| key.tenant == Some(tenant) && key.life.is_none_or(|made| made < life);
        let gone: Vec<_> = self.by_id.extract_if(|_, key| is_past(key)).map(|(id, _)| id).collect();
        gone.into_iter().for_each(|id| self.note_destroyed(id));
        let is_known = |id: &KeyId| self.by_id.contains_key(id);
        let state = self.tenants.entry(Some(tenant)).or_default();
        state.current = state.current.filter(is_known);
        (state.life, state.adopts) = (state.life.max(life), false);
        (state.is_condemned, state.forgotten_at) = (true, at);
    }

    /// `at`: when the forgetting began that ends now.
    fn end_forgetting(&mut self, tenant: u32, at: u64, is_done: bool) {
        self.forgets += 1;
        let now = self.forgets;
        let state = self.tenant(Some(tenant));
        state.is_condemned &= !is_done || state.forgotten_at != at;
        state.forgotten_at = now;
    }
}

/// What keys of blocks are derived from.
fn secret(key: &[u8; KEY_BYTES]) -> Arc<SecretKey> {
    Arc::new(SecretKey::of(Prk::new_less_safe(HKDF_SHA256, key)))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::copy::{BlockKey, SlotId};
    use crate::testing::key_ring;

    /// A store in memory that outlives those who use it, fails as long as it is told to, and holds
    /// up its callers.
    #[derive(Debug, Default, Clone)]
    struct KeyShelf(Arc<Shelved>);

    #[derive(Debug, Default)]
    struct Shelved {
        keys: Mutex<Vec<WrappedKey>>,
        mood: Mutex<Mood>,
        changed: Condvar,
    }

    #[derive(Debug, Default)]
    struct Mood {
        fails: bool,
        holds: bool,
        waiting: usize,
        asked: usize,
    }

    impl KeyShelf {
        fn fail(&self, fails: bool) {
            self.0.mood.lock().fails = fails;
        }

        fn hold(&self) {
            self.0.mood.lock().holds = true;
        }

        fn release(&self) {
            self.0.mood.lock().holds = false;
            self.0.changed.notify_all();
        }

        fn wait_for(&self, callers: usize) {
            let mut mood = self.0.mood.lock();
            while mood.waiting < callers {
                self.0.changed.wait(&mut mood);
            }
        }

        fn asked(&self) -> usize {
            self.0.mood.lock().asked
        }

        /// A call on its way.
        fn call(&self) -> io::Result<()> {
            let mut mood = self.0.mood.lock();
            mood.asked += 1;
            mood.waiting += 1;
            self.0.changed.notify_all();
            while mood.holds {
                self.0.changed.wait(&mut mood);
            }
            mood.waiting -= 1;
            if mood.fails { Err(io::Error::other("503")) } else { Ok(()) }
        }

        fn ids(&self) -> Vec<KeyId> {
            self.0.keys.lock().iter().map(WrappedKey::id).collect()
        }
    }

    impl KeyStore for KeyShelf {
        /// The answer is of the moment of the question.
        fn find(&self, id: KeyId) -> io::Result<FoundKey> {
            let found: Vec<_> =
                self.0.keys.lock().iter().filter(|key| key.id() == id).cloned().collect();
            self.call()?;
            Ok(if found.is_empty() { FoundKey::Absent } else { FoundKey::Live(found) })
        }

        fn of_tenants(&self, tenants: &[Option<u32>]) -> Vec<io::Result<Vec<WrappedKey>>> {
            let keys = self.0.keys.lock().clone();
            let of =
                |tenant| Ok(keys.iter().filter(|key| key.tenant() == tenant).cloned().collect());
            tenants.iter().map(|&tenant| self.call().and_then(|()| of(tenant))).collect()
        }

        fn add(&self, key: &WrappedKey) -> io::Result<()> {
            self.call()?;
            self.0.keys.lock().push(key.clone());
            Ok(())
        }

        fn destroy(&self, tenant: u32, spared: &[KeyId]) -> io::Result<usize> {
            self.call()?;
            let mut keys = self.0.keys.lock();
            let before = keys.len();
            keys.retain(|key| key.tenant() != Some(tenant) || spared.contains(&key.id()));
            Ok(before - keys.len())
        }
    }

    fn open(ring: Arc<KeyRing>, namespace: &str, shelf: &KeyShelf) -> TenantKeys {
        TenantKeys::new(ring, namespace, Box::new(shelf.clone()))
    }

    const ONE: &str = "0123456789abcdef";
    const OTHER: &str = "fedcba9876543210";

    #[expect(clippy::unnecessary_wraps, reason = "as a copy has it")]
    fn owner(tenant: u32, life: u32) -> Option<Owner> {
        Some(Owner { tenant, life })
    }

    fn is_gone(keys: &TenantKeys, id: KeyId) -> bool {
        matches!(keys.to_open(id), Err(NoKey::Gone))
    }

    #[test]
    fn each_tenants_key_is_found_later_and_by_no_other() {
        let shelf = KeyShelf::default();
        let first = open(key_ring(1, ONE), "here", &shelf);
        let ids =
            [None, owner(0, 0), owner(u32::MAX, 0)].map(|owner| first.to_seal(owner).unwrap().0);
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 3);
        assert_eq!(first.to_seal(owner(0, 0)).unwrap().0, ids[1], "one each");
        let again = open(key_ring(1, ONE), "here", &shelf);
        assert!(ids.iter().all(|&id| again.to_open(id).is_ok()));
        assert_eq!(again.to_seal(owner(0, 0)).unwrap().0, ids[1]);
        for stranger in [
            open(key_ring(1, OTHER), "here", &shelf),
            open(key_ring(2, ONE), "here", &shelf),
            open(key_ring(1, ONE), "there", &shelf),
        ] {
            assert!(ids.iter().all(|&id| is_gone(&stranger, id)));
        }
    }

    #[test]
    fn any_flipped_bit_of_a_wrapped_key_is_noticed() {
        let shelf = KeyShelf::default();
        let id = open(key_ring(1, ONE), "here", &shelf).to_seal(owner(7, 0)).unwrap().0;
        let good = *shelf.0.keys.lock()[0].bytes();
        for bit in 0..8 * (TAG_AT + TAG_BYTES) {
            let mut bytes = good;
            bytes[bit / 8] ^= 1 << (bit % 8);
            let mut keys = shelf.0.keys.lock();
            keys.clear();
            keys.extend(WrappedKey::parse(bytes));
            drop(keys);
            assert!(is_gone(&open(key_ring(1, ONE), "here", &shelf), id), "bit {bit}");
        }
    }

    #[test]
    fn a_new_main_key_makes_keys_and_reads_old_ones() {
        let shelf = KeyShelf::default();
        let old = open(key_ring(1, ONE), "here", &shelf).to_seal(owner(7, 0)).unwrap().0;
        let both = Arc::new(
            KeyRing::parse(&format!("2:{},1:{}", OTHER.repeat(4), ONE.repeat(4))).unwrap(),
        );
        let rotated = open(both, "here", &shelf);
        let new = rotated.to_seal(owner(7, 0)).unwrap().0;
        assert!(new != old && rotated.to_open(old).is_ok());
        let later = open(key_ring(2, OTHER), "here", &shelf);
        assert!(is_gone(&later, old) && later.to_open(new).is_ok());
    }

    #[test]
    fn the_forgotten_lose_their_keys_and_others_keep_theirs() {
        let shelf = KeyShelf::default();
        let keys = open(key_ring(1, ONE), "here", &shelf);
        let [gone, kept] = [7, 8].map(|tenant| keys.to_seal(owner(tenant, 0)).unwrap().0);
        keys.forget(7, 1).unwrap();
        assert!(is_gone(&keys, gone) && keys.to_open(kept).is_ok());
        assert!(keys.to_seal(owner(7, 0)).is_err(), "it was on its way");
        let new = keys.to_seal(owner(7, 1)).unwrap().0;
        assert_ne!(new, gone);
        let later = open(key_ring(1, ONE), "here", &shelf);
        assert!(is_gone(&later, gone) && later.to_open(kept).is_ok());
        assert!(later.to_open(new).is_ok());
    }

    #[test]
    fn a_key_of_another_worker_is_found_when_asked() {
        let shelf = KeyShelf::default();
        let (one, other) =
            (open(key_ring(1, ONE), "here", &shelf), open(key_ring(1, ONE), "here", &shelf));
        let id = one.to_seal(None).unwrap().0;
        assert!(other.to_open(id).is_ok());
        assert!(is_gone(&other, [9; ID_BYTES]));
    }

    #[test]
    fn an_unreadable_key_is_asked_for_again() {
        let shelf = KeyShelf::default();
        let (one, other) =
            (open(key_ring(1, ONE), "here", &shelf), open(key_ring(1, ONE), "here", &shelf));
        let id = one.to_seal(owner(7, 0)).unwrap().0;
        shelf.fail(true);
        for _ in 0..3 {
            assert!(matches!(other.to_open(id), Err(NoKey::Failed(_))), "it is unknown");
        }
        assert!(matches!(other.to_seal(owner(7, 0)), Err(NoKey::Failed(_))));
        shelf.fail(false);
        // And then it heals.
        assert!(other.to_open(id).is_ok());
        assert_eq!(other.to_seal(owner(7, 0)).unwrap().0, id);
        // Nothing is there: that may be another's mistake, and is not remembered.
        let there = std::mem::take(&mut *shelf.0.keys.lock());
        let third = open(key_ring(1, ONE), "here", &shelf);
        assert!(is_gone(&third, id));
        shelf.0.keys.lock().extend(there);
        assert!(third.to_open(id).is_ok());
    }

    #[test]
    fn what_cannot_be_asked_for_stays_readable() {
        let shelf = KeyShelf::default();
        let first = open(key_ring(1, ONE), "here", &shelf);
        first.to_seal(owner(7, 0)).unwrap();
        let entry = |tenant| IndexEntry {
            slot: SlotId(0),
            generation: 0,
            block: BlockKey { hash: 1, group: 0 },
            parent: None,
            checksum: 1,
            tenant: Some(tenant),
        };
        let left = || {
            let mut entries = vec![entry(7), entry(8)];
            open(key_ring(1, ONE), "here", &shelf).retain_readable(&mut entries);
            entries.iter().filter_map(|entry| entry.tenant).collect::<Vec<_>>()
        };
        assert_eq!(left(), [7]);
        shelf.fail(true);
        assert_eq!(left(), [7, 8]);
        shelf.fail(false);
        assert_eq!(left(), [7]);
    }

    #[test]
    fn a_look_up_under_way_brings_no_forgotten_key_back() {
        let shelf = KeyShelf::default();
        let (writer, reader) =
            (open(key_ring(1, ONE), "here", &shelf), open(key_ring(1, ONE), "here", &shelf));
        let old = writer.to_seal(owner(7, 0)).unwrap().0;
        let before = writer.to_seal(owner(8, 0)).unwrap().0;
        shelf.hold();
        thread::scope(|scope| {
            let reading = scope.spawn(|| is_gone(&reader, old));
            shelf.wait_for(1);
            let forgetting = scope.spawn(|| reader.forget(7, 1));
            shelf.wait_for(2);
            shelf.release();
            forgetting.join().unwrap().unwrap();
            assert!(reading.join().unwrap());
        });
        assert!(is_gone(&reader, old));
        let new = reader.to_seal(owner(7, 1)).unwrap().0;
        assert!(new != old && shelf.ids().contains(&new), "the next process has it");
        assert!(reader.to_open(before).is_ok());
    }

    #[test]
    fn of_two_calls_the_later_life_wins_whichever_comes_first() {
        for lives in [[1, 2], [2, 1]] {
            let shelf = KeyShelf::default();
            let keys = open(key_ring(1, ONE), "here", &shelf);
            let old = keys.to_seal(owner(7, 0)).unwrap().0;
            // What comes after both is there before the last of them.
            keys.forget(7, lives[0]).unwrap();
            let new = keys.to_seal(owner(7, 2)).unwrap().0;
            keys.forget(7, lives[1]).unwrap();
            assert!(matches!(keys.to_seal(owner(7, 1)), Err(NoKey::Forgotten)));
            assert_eq!(keys.to_seal(owner(7, 2)).unwrap().0, new);
            assert!(is_gone(&keys, old));
            assert_eq!(shelf.ids(), [new], "it is not lost to the next process");
        }
    }

    #[test]
    fn blocks_from_before_a_forget_have_keys_that_outlive_it() {
        let shelf = KeyShelf::default();
        open(key_ring(1, ONE), "here", &shelf).to_seal(owner(7, 0)).unwrap();
        for is_known in [true, false] {
            let keys = open(key_ring(1, ONE), "here", &shelf);
            let old = shelf.ids();
            if is_known {
                assert!(old.contains(&keys.to_seal(owner(7, 0)).unwrap().0));
            }
            let new = keys.to_seal(owner(7, 1)).unwrap().0;
            assert!(!old.contains(&new));
            keys.forget(7, 1).unwrap();
            assert_eq!(keys.to_seal(owner(7, 1)).unwrap().0, new);
            assert_eq!(shelf.ids(), [new]);
        }
    }

    #[test]
    fn a_key_made_meanwhile_is_destroyed_or_kept_whole() {
        for (life, is_kept) in [(0, false), (1, true)] {
            let shelf = KeyShelf::default();
            let keys = open(key_ring(1, ONE), "here", &shelf);
            shelf.hold();
            thread::scope(|scope| {
                let sealing = scope.spawn(|| keys.to_seal(owner(7, life)));
                shelf.wait_for(1);
                keys.begin_forgetting(7, 1);
                let forgetting = scope.spawn(|| keys.destroy(7, 1));
                shelf.release();
                forgetting.join().unwrap().unwrap();
                assert_eq!(sealing.join().unwrap().is_ok(), is_kept);
            });
            let new = keys.to_seal(owner(7, 1)).unwrap().0;
            assert_eq!(shelf.ids(), [new]);
        }
    }

    #[test]
    fn keys_not_destroyed_are_gone_here_and_destroyed_later() {
        let shelf = KeyShelf::default();
        let keys = open(key_ring(1, ONE), "here", &shelf);
        let old = keys.to_seal(owner(7, 0)).unwrap().0;
        keys.begin_forgetting(7, 1);
        shelf.fail(true);
        keys.destroy(7, 1).unwrap_err();
        shelf.fail(false);
        assert!(is_gone(&keys, old), "the store has it still");
        let new = keys.to_seal(owner(7, 1)).unwrap().0;
        assert_eq!(shelf.ids(), [old, new]);
        keys.forget(7, 1).unwrap();
        assert_eq!(shelf.ids(), [new]);
        assert_eq!(keys.to_seal(owner(7, 1)).unwrap().0, new);
    }

    #[test]
    fn whoever_has_a_known_key_waits_for_no_store() {
        let shelf = KeyShelf::default();
        let keys = open(key_ring(1, ONE), "here", &shelf);
        let known = keys.to_seal(owner(1, 0)).unwrap().0;
        let before = shelf.asked();
        shelf.hold();
        thread::scope(|scope| {
            let others: Vec<_> =
                (0..3).map(|_| scope.spawn(|| keys.to_seal(owner(2, 0)).unwrap().0)).collect();
            let reader = scope.spawn(|| is_gone(&keys, [9; ID_BYTES]));
            let forgetting = scope.spawn(|| keys.forget(3, 1));
            shelf.wait_for(3);
            assert!(
                keys.can_open(known) && keys.can_seal(owner(1, 0)) && !keys.can_seal(owner(2, 0))
            );
            assert!(keys.to_open(known).is_ok());
            assert_eq!(keys.to_seal(owner(1, 0)).unwrap().0, known);
            assert_eq!(shelf.asked() - before, 3, "about each thing once at a time");
            shelf.release();
            let made: HashSet<_> = others.into_iter().map(|other| other.join().unwrap()).collect();
            assert_eq!(made.len(), 1, "one key for all three");
            assert!(reader.join().unwrap());
            forgetting.join().unwrap().unwrap();
        });
    }
}
