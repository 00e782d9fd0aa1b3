//! What a store may cost: requests and bytes in a period, which refill with every second.
//!
//! Stores charge for requests by class. What blocks need is refused when a budget is spent; what
//! keeps a worker's manifest alive is not, and neither is what is under way: the debt is paid back
//! before anything else is bought. Deleting costs nothing.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::traffic::RequestKind;
use crate::clock;

/// What may be spent in a period; `None`: no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budgets {
    /// Requests that write or list.
    pub puts: Option<u64>,
    /// Requests that read.
    pub gets: Option<u64>,
    /// Bytes of objects, sent and received.
    pub bytes: Option<u64>,
    /// The period.
    pub period: Duration,
}

/// What is spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Expense {
    /// Requests that write or list.
    Puts,
    /// Requests that read.
    Gets,
    /// Bytes, sent and received.
    Bytes,
}

impl Expense {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Puts, Self::Gets, Self::Bytes];

    /// Name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Puts => "puts",
            Self::Gets => "gets",
            Self::Bytes => "bytes",
        }
    }

    /// `None`: it costs nothing.
    const fn of(kind: RequestKind) -> Option<Self> {
        match kind {
            RequestKind::Put | RequestKind::List => Some(Self::Puts),
            RequestKind::Get => Some(Self::Gets),
            RequestKind::Delete => None,
        }
    }
}

impl Default for Budgets {
    fn default() -> Self {
        Self { puts: None, gets: None, bytes: None, period: Duration::from_hours(1) }
    }
}

/// The accounts of one store.
#[derive(Debug)]
pub(super) struct RequestBudget {
    accounts: [Option<BudgetAccount>; 3],
    refused: [AtomicU64; 3],
    /// That they are spent was logged.
    told: [AtomicBool; 3],
}

#[derive(Debug)]
struct BudgetAccount {
    /// What there is after a period without expenses.
    most: f64,
    /// In seconds.
    period: f64,
    balance: Mutex<(f64, Instant)>,
}

impl RequestBudget {
    pub(super) fn new(budgets: &Budgets) -> Self {
        let account = |most: Option<u64>| most.map(|most| BudgetAccount::new(most, budgets.period));
        let accounts = [budgets.puts, budgets.gets, budgets.bytes].map(account);
        Self { accounts, refused: Default::default(), told: Default::default() }
    }

    /// A request was sent.
    pub(super) fn pay_request(&self, kind: RequestKind) {
        if let Some(expense) = Expense::of(kind) {
            self.pay(expense, 1);
        }
    }

    /// Something was spent.
    pub(super) fn pay(&self, expense: Expense, amount: u64) {
        if let Some(account) = &self.accounts[expense as usize] {
            account.pay(amount as f64);
        }
    }

    /// Whether all of these can be paid; if not, what cannot be is counted.
    pub(super) fn affords(&self, expenses: &[Expense]) -> Result<(), Expense> {
        for &expense in expenses {
            let is_spent = self.is_spent(expense);
            let was_told = self.told[expense as usize].swap(is_spent, Ordering::Relaxed);
            if is_spent {
                self.refused[expense as usize].fetch_add(1, Ordering::Relaxed);
                if !was_told {
                    tracing::warn!(
                        budget = expense.name(),
                        "a budget of the object tier is spent for now"
                    );
                }
                return Err(expense);
            }
        }
        Ok(())
    }

    fn is_spent(&self, expense: Expense) -> bool {
        self.accounts[expense as usize].as_ref().is_some_and(|account| account.left() < 1.0)
    }

    /// The share that is left, 0 to 1; `None`: there is no limit.
    pub(super) fn left(&self, expense: Expense) -> Option<f64> {
        let account = self.accounts[expense as usize].as_ref()?;
        Some((account.left() / account.most).clamp(0.0, 1.0))
    }

    /// How often something was refused.
    pub(super) fn refused(&self, expense: Expense) -> u64 {
        self.refused[expense as usize].load(Ordering::Relaxed)
    }
}

impl BudgetAccount {
    fn new(most: u64, period: Duration) -> Self {
        // A store that takes no requests is none: allow one a period.
        let most = most.max(1) as f64;
        Self {
            most,
            period: period.as_secs_f64().max(1e-3),
            balance: Mutex::new((most, clock::now())),
        }
    }

    fn left(&self) -> f64 {
        self.charge(0.0)
    }

    fn pay(&self, amount: f64) {
        self.charge(amount);
    }

    /// The balance after the refill up to now and an expense. No debt exceeds a period's budget:
    /// else, where the budget is too small for the manifests, it would never end.
    fn charge(&self, expense: f64) -> f64 {
        let (mut balance, now) = (self.balance.lock(), clock::now());
        let earned =
            now.saturating_duration_since(balance.1).as_secs_f64() * self.most / self.period;
        *balance = ((balance.0 + earned).min(self.most) - expense, now);
        balance.0 = balance.0.max(-self.most);
        balance.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(puts: u64, period: Duration) -> RequestBudget {
        RequestBudget::new(&Budgets { puts: Some(puts), period, ..Budgets::default() })
    }

    #[test]
    fn a_budget_is_spent_and_comes_back() {
        let budget = budget(20, Duration::from_millis(400));
        for _ in 0..20 {
            assert!(budget.affords(&[Expense::Puts, Expense::Bytes]).is_ok());
            budget.pay_request(RequestKind::Put);
        }
        // A request is there again after 20 ms.
        while budget.affords(&[Expense::Puts]).is_ok() {
            budget.pay_request(RequestKind::List);
        }
        assert!(budget.refused(Expense::Puts) > 0);
        budget.pay_request(RequestKind::Get);
        budget.pay_request(RequestKind::Delete);
        assert_eq!((budget.left(Expense::Gets), budget.affords(&[Expense::Gets])), (None, Ok(())));
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(budget.affords(&[Expense::Puts]), Ok(()));
        assert!(budget.left(Expense::Puts).unwrap() > 0.1);
    }

    #[test]
    fn no_debt_is_forever() {
        let budget = budget(10, Duration::from_millis(100));
        budget.pay(Expense::Puts, 1_000_000);
        assert_eq!(
            (budget.left(Expense::Puts), budget.affords(&[Expense::Puts])),
            (Some(0.0), Err(Expense::Puts))
        );
        std::thread::sleep(Duration::from_millis(250));
        assert_eq!(budget.affords(&[Expense::Puts]), Ok(()));
    }
}
