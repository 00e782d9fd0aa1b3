//! Forgetting a tenant: each rank destroys its keys, and one that is away is told when it joins
//! again.
//!
//! What ranks have yet to forget is on the medium: it must survive a leader that ends before a rank
//! is back. A line of text for each rank and tenant, between one that says what the file is and one
//! that says how many there are:
//!
//! ```text
//! kvbm debts 1
//! 2 7
//! end 1
//! ```

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::Duration;

use crossbeam_channel::Sender;
use parking_lot::{Condvar, Mutex};

use super::connection::SendResult;
use super::leader::{Leader, LeaderState};
use super::protocol::{ForgotTenant, ToRank};
use crate::clock;
use crate::copy::Owner;
use crate::error::{SetupError, SetupErrorKind};
use crate::files::{OwnDirectory, open_ours, replace};
use crate::fork::ServiceThread;

/// Ranks that have not destroyed all keys of a tenant, as far as their leader knows. It tells each
/// again when it joins.
#[derive(Debug)]
pub struct NotForgotten {
    tenant: u32,
    /// By number, with the reason.
    ranks: Vec<(u16, String)>,
    /// Why the next leader will not know.
    unwritten: Option<SetupError>,
}

impl fmt::Display for NotForgotten {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not every rank has destroyed the keys of tenant {}:", self.tenant)?;
        self.ranks.iter().try_for_each(|(rank, why)| write!(f, " rank {rank} {why};"))?;
        match &self.unwritten {
            None => f.write_str(" a rank that was away is told when it joins again"),
            Some(error) => write!(
                f,
                " a rank that was away is told when it joins this leader again, and no other, since that could not be \
                 written down: {error}"
            ),
        }
    }
}

impl std::error::Error for NotForgotten {}

impl Leader {
    /// Has every rank destroy the keys of what a tenant stored in earlier lives than `life`, and
    /// waits for them until `limit` has passed.
    ///
    /// # Errors
    /// Some rank is away, fails, or does not answer.
    pub fn forget(&self, tenant: u32, life: u32, limit: Duration) -> Result<(), NotForgotten> {
        let deadline = clock::now() + limit;
        // Before any rank is told: a leader that ends now leaves word.
        let unwritten = self.shared.debts.owe(tenant, life).err();
        let told = self.shared.tell_to_forget(tenant, life);
        let debts = &self.shared.debts;
        let mut owed = debts.owed.lock();
        // A rank that is away, or goes now, is not waited for.
        let is_awaited = |owed: &[OwedDeletion]| {
            told.iter().any(|&rank| owed[usize::from(rank)].is_awaited(tenant, life))
        };
        while is_awaited(&owed) && !debts.changed.wait_until(&mut owed, deadline).timed_out() {}
        let why = |(rank, owed): (u16, &OwedDeletion)| Some((rank, owed.why_not(tenant, life)?));
        let ranks: Vec<_> = (0..).zip(&*owed).filter_map(why).collect();
        if ranks.is_empty() { Ok(()) } else { Err(NotForgotten { tenant, ranks, unwritten }) }
    }
}

/// What ranks have yet to forget.
#[derive(Debug)]
pub(super) struct PendingDeletions {
    owed: Mutex<Vec<OwedDeletion>>,
    changed: Condvar,
    /// Where they are written down; `None`: a leader that ends takes them along.
    file: Option<DebtFile>,
}

/// What one rank has yet to forget.
#[derive(Clone, Debug, Default)]
struct OwedDeletion {
    is_away: bool,
    /// By tenant.
    tenants: BTreeMap<u32, PendingDeletion>,
}

#[derive(Clone, Debug)]
struct PendingDeletion {
    life: u32,
    /// Why it could not.
    failed: Option<String>,
}

impl OwedDeletion {
    fn debt(&self, tenant: u32, life: u32) -> Option<&PendingDeletion> {
        // A later life includes the earlier ones.
        self.tenants.get(&tenant).filter(|debt| debt.life >= life)
    }

    fn is_awaited(&self, tenant: u32, life: u32) -> bool {
        !self.is_away && self.debt(tenant, life).is_some_and(|debt| debt.failed.is_none())
    }

    fn why_not(&self, tenant: u32, life: u32) -> Option<String> {
        let debt = self.debt(tenant, life)?;
        let silence = if self.is_away { "is away" } else { "did not answer in time" };
        Some(debt.failed.as_ref().map_or(silence.to_owned(), |why| format!("says: {why}")))
    }
}

impl PendingDeletions {
    /// Those that an earlier leader left in a file.
    pub(super) fn open(world: u16, path: Option<&Path>) -> Result<Self, SetupError> {
        let (file, left) = path.map(DebtFile::open).transpose()?.unzip();
        let mut owed = vec![OwedDeletion::default(); usize::from(world)];
        for (rank, tenant) in left.into_iter().flatten() {
            // Tenants' lives are counted from the leader's start: all that the rank has of the
            // tenant is of an earlier one.
            let debt = PendingDeletion { life: 0, failed: None };
            if let Some(owed) = owed.get_mut(usize::from(rank)) {
                owed.tenants.insert(tenant, debt);
            }
        }
        Ok(Self { owed: Mutex::new(owed), changed: Condvar::new(), file })
    }

    fn owe(&self, tenant: u32, life: u32) -> Result<(), SetupError> {
        let mut owed = self.owed.lock();
        for owed in &mut *owed {
            owed.tenants.insert(tenant, PendingDeletion { life, failed: None });
        }
        self.write(&owed)
    }

    fn write(&self, owed: &[OwedDeletion]) -> Result<(), SetupError> {
        let Some(file) = &self.file else { return Ok(()) };
        let of_rank = |(rank, owed): (u16, &OwedDeletion)| {
            owed.tenants.keys().map(move |&tenant| (rank, tenant)).collect::<Vec<_>>()
        };
        file.write((0..).zip(owed).flat_map(of_rank))
    }

    /// A rank joined: what it is to be told.
    pub(super) fn of_newcomer(&self, rank: u16) -> Vec<ToRank> {
        let mut owed = self.owed.lock();
        let owed = &mut owed[usize::from(rank)];
        owed.is_away = false;
        let tenants = owed.tenants.iter_mut();
        tenants
            .map(|(&tenant, debt)| {
                debt.failed = None;
                ToRank::Forget { tenant, life: debt.life }
            })
            .collect()
    }

    pub(super) fn lost(&self, rank: u16) {
        self.owed.lock()[usize::from(rank)].is_away = true;
        self.changed.notify_all();
    }

    /// A rank has done what it was told, or could not.
    pub(super) fn answered(&self, rank: u16, ForgotTenant { tenant, life, failed }: ForgotTenant) {
        let mut owed = self.owed.lock();
        let tenants = &mut owed[usize::from(rank)].tenants;
        match (failed, tenants.get_mut(&tenant)) {
            (Some(why), Some(debt)) if debt.life == life => debt.failed = Some(why),
            (None, Some(debt)) if debt.life <= life => {
                tenants.remove(&tenant);
                // A rank that is told twice does it twice.
                if let Err(error) = self.write(&owed) {
                    tracing::warn!(%error, rank, "a tenant whom a rank has forgotten stays written down");
                }
            }
            // Of an earlier call; the latest will be answered too.
            _ => {}
        }
        self.changed.notify_all();
    }
}

impl LeaderState {
    /// Returns who was told.
    fn tell_to_forget(&self, tenant: u32, life: u32) -> Vec<u16> {
        // A rank that joins from here on is told then; one that is told twice does it twice.
        let message = ToRank::Forget { tenant, life };
        let present = self.present();
        let is_told = |(rank, connection)| {
            (self.send_to(connection, &message) != SendResult::Refused).then_some(rank)
        };
        present
            .iter()
            .map(|(rank, connection)| (*rank, &**connection))
            .filter_map(is_told)
            .collect()
    }
}

/// What a rank does when a tenant is forgotten: at once what needs no store, so that what the
/// leader says next comes after it; and the rest on a thread that ends with this, since stores of
/// keys may take their time.
pub(super) struct RankForgetter {
    begin: Box<BeginForgetting>,
    // Before the thread, which finishes what it was given.
    queue: Sender<(u32, u32, DestroyKeys)>,
    _thread: ServiceThread,
}

type BeginForgetting = dyn Fn(u32, u32) -> DestroyKeys + Send + Sync;
/// Says what may be left.
pub type DestroyKeys = Box<dyn FnOnce() -> Result<(), String> + Send>;

impl RankForgetter {
    /// `tell` is called with what became of each order.
    pub(super) fn start(
        begin: Box<BeginForgetting>,
        tell: impl Fn(ForgotTenant) + Send + 'static,
    ) -> io::Result<Self> {
        let (queue, orders) = crossbeam_channel::unbounded::<(u32, u32, DestroyKeys)>();
        let work = move || {
            for (tenant, life, destroy) in orders {
                tell(ForgotTenant::new(Owner { tenant, life }, destroy()));
            }
        };
        Ok(Self { begin, queue, _thread: ServiceThread::spawn("kvbm-forget", work)? })
    }

    pub(super) fn forget(&self, tenant: u32, life: u32) {
        let destroy = (self.begin)(tenant, life);
        // The thread ends with this value.
        let _ = self.queue.send((tenant, life, destroy));
    }
}

impl fmt::Debug for RankForgetter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Forgetter")
    }
}

const FIRST_LINE: &str = "kvbm debts 1";
/// Half a million debts. Nothing larger is read.
const MAX_BYTES: u64 = 8 << 20;

/// A rank, and a tenant whose keys it is to destroy.
type RankAndTenant = (u16, u32);

/// Where debts are written down.
#[derive(Debug)]
struct DebtFile(OwnDirectory);

impl DebtFile {
    /// The file, and what an earlier leader left in it.
    ///
    /// # Errors
    /// `Invalid`: it is damaged. `NotWritable`: it is not a file of this user's that is closed to
    /// all others. `Io`: the medium.
    pub(super) fn open(path: &Path) -> Result<(Self, Vec<RankAndTenant>), SetupError> {
        let site = OwnDirectory::new(path, &crate::disk::SETTINGS);
        let mut text = String::new();
        if let Some(file) = open_ours(&site)? {
            let read = file.take(MAX_BYTES).read_to_string(&mut text);
            read.map_err(|error| site.failed(&error))?;
        } else {
            return Ok((Self(site), Vec::new()));
        }
        let debts = parse(&text).ok_or_else(|| {
            let what = "is damaged: it said which ranks have yet to destroy which tenants' keys. Forget these tenants again \
                        (kvbm forget, with each rank's settings), and remove it";
            site.error(SetupErrorKind::Invalid, what)
        })?;
        Ok((Self(site), debts))
    }

    /// Replaces what is written there: on the medium when it returns.
    pub(super) fn write(
        &self,
        debts: impl Iterator<Item = RankAndTenant>,
    ) -> Result<(), SetupError> {
        let Self(site) = self;
        let Some(text) = written(debts) else { return self.remove() };
        if let Some(dir) = site.path.parent() {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
            made.map_err(|error| site.failed(&error))?;
        }
        replace(site, text.as_bytes())
    }

    fn remove(&self) -> Result<(), SetupError> {
        let Self(site) = self;
        match fs::remove_file(&site.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(site.failed(&error)),
            _ => Ok(()),
        }
    }
}

/// `None`: there are none.
fn written(debts: impl Iterator<Item = RankAndTenant>) -> Option<String> {
    let (mut text, mut count) = (format!("{FIRST_LINE}\n"), 0);
    for (rank, tenant) in debts {
        count += 1;
        let _ = writeln!(text, "{rank} {tenant}");
    }
    let _ = writeln!(text, "end {count}");
    (count > 0).then_some(text)
}

/// `None`: that is not what was written.
fn parse(text: &str) -> Option<Vec<RankAndTenant>> {
    let mut lines = text.strip_suffix('\n')?.lines();
    let is_ours = lines.next()? == FIRST_LINE;
    let count: usize = lines.next_back()?.strip_prefix("end ")?.parse().ok()?;
    let debt = |line: &str| {
        let (rank, tenant) = line.split_once(' ')?;
        Some((rank.parse().ok()?, tenant.parse().ok()?))
    };
    let debts: Vec<_> = lines.map(debt).collect::<Option<_>>()?;
    (is_ours && debts.len() == count).then_some(debts)
}

/// Reads a file, as it is and between a first and a last line that fit. For fuzzing: whatever the
/// bytes are, it answers.
///
/// # Panics
/// If writing again what was understood, and reading that, gives other debts.
#[cfg(any(test, feature = "testing"))]
pub fn read_debts(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let lines = text.lines().count();
    for text in [text, &format!("{FIRST_LINE}\n{text}\nend {lines}\n")] {
        if let Some(debts) = parse(text)
            && let Some(again) = written(debts.iter().copied())
        {
            assert_eq!(parse(&again), Some(debts));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::files::{LockWait, create_locked, partial, remove_abandoned};

    proptest! {
        #[test]
        fn debts_are_read_as_they_were_written(debts in prop::collection::vec(any::<RankAndTenant>(), 1..20), cut: usize) {
            let home = tempfile::tempdir().unwrap();
            let path = home.path().join("made").join("kvbm-test.debts");
            let (file, found) = DebtFile::open(&path).unwrap();
            prop_assert_eq!(found, vec![]);
            for _ in 0..2 {
                file.write(debts.iter().copied()).unwrap();
                prop_assert_eq!(&DebtFile::open(&path).unwrap().1, &debts);
            }
            prop_assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
            // Whatever part of it is lost, it is not read as another list.
            let text = fs::read_to_string(&path).unwrap();
            prop_assert_eq!(parse(&text[..cut % text.len()]), None);
            fs::write(&path, &text[..cut % text.len()]).unwrap();
            prop_assert_eq!(DebtFile::open(&path).unwrap_err().kind(), SetupErrorKind::Invalid);
            file.write(std::iter::empty()).unwrap();
            prop_assert!(!path.exists());
        }

        #[test]
        fn whatever_lies_there_is_read_without_panic(text: String) {
            read_debts(text.as_bytes());
        }
    }

    #[test]
    fn debts_are_locked_while_they_are_written() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("kvbm-test.debts");
        let (file, _) = DebtFile::open(&path).unwrap();
        let site = OwnDirectory::new(&path, &crate::disk::SETTINGS);
        // Another leader is half-way.
        let theirs = create_locked(&partial(&site), &mut LockWait::new(Duration::ZERO)).unwrap();
        remove_abandoned(home.path(), &crate::disk::SETTINGS);
        assert!(partial(&site).path.exists(), "who starts leaves it alone");
        assert_eq!(file.write([(1, 7)].into_iter()).unwrap_err().kind(), SetupErrorKind::InUse);
        drop(theirs);
        // Killed there, it left a name that forbids nothing.
        file.write([(1, 7)].into_iter()).unwrap();
        assert_eq!(DebtFile::open(&path).unwrap().1, [(1, 7)]);
        assert!(!partial(&site).path.exists());
        // A link that a stranger made is not written through.
        let precious = home.path().join("precious");
        fs::write(&precious, "kept").unwrap();
        std::os::unix::fs::symlink(&precious, partial(&site).path).unwrap();
        assert_eq!(
            file.write([(2, 8)].into_iter()).unwrap_err().kind(),
            SetupErrorKind::NotWritable
        );
        assert_eq!(fs::read_to_string(&precious).unwrap(), "kept");
        fs::remove_file(partial(&site).path).unwrap();
        file.write([(2, 8)].into_iter()).unwrap();
        assert_eq!(DebtFile::open(&path).unwrap().1, [(2, 8)]);
    }
}
