//! The landing: results of copies, told to the table in batches; and how transfers end.

use std::ops::Range;
use std::time::Duration;

use kvbm_tiers::{Frame, SlotId, Tier};

use super::{
    BlockState, BlockWaiter, Destination, Effects, Homecoming, OpenTransfer, Reply, SaveAgain,
    Spent, TransferCaller, TransferCut, TransferParent, TransferPlan,
};
use crate::observe::events::StoreReason;
use crate::table::budget::Budget;
use crate::table::flush_queue::DirtyBlock;
use crate::table::index::{KeyHash, RecordId};
use crate::table::pins::Pins;
use crate::table::{MissReason, RequestInfo, Table};
use crate::task::{Class, CopyTask, Outcome, TaskResult, TransferId};

/// How a transfer ended.
#[derive(Debug)]
pub struct TransferEnd {
    /// The transfer.
    pub id: TransferId,
    /// What kind of work it was.
    pub class: Class,
    /// Where the blocks went.
    pub to: Tier,
    /// Blocks that were to be copied.
    pub blocks: usize,
    /// Those of them that are resident now.
    pub copied: usize,
    /// The tier that all of them came from, if there is one.
    pub source: Option<Tier>,
    /// Blocks that the engine brought and that are there already.
    pub duplicates: usize,
    /// How long their copies took, time in queues included; `None` if not all of them arrived.
    pub took: Option<Duration>,
    /// Blocks left to the engine, which computes them faster than they are loaded.
    pub recompute: usize,
    /// Blocks that were not worth their room to the destination.
    pub declined: usize,
    /// Blocks that found no room or no route.
    pub refused: usize,
    /// The caller's lease, which also holds the destination's part.
    pub pins: Option<Pins>,
    reply: Option<Reply>,
}

impl TransferEnd {
    /// Tells the caller. Not under the table's lock: a lease that is no longer wanted ends here.
    pub fn report(mut self) {
        if let Some(Reply(reply)) = self.reply.take() {
            reply(self);
        }
    }
}

impl Table {
    /// Records the results of copies, at `now` by the clock of the hardware: publishes what can be,
    /// frees the slots of what failed, ends transfers. What follows is done with the table
    /// unlocked.
    pub fn land(
        &mut self,
        results: impl IntoIterator<Item = TaskResult>,
        now: Duration,
    ) -> Effects {
        for TaskResult { task, outcome } in results {
            let (id, block) = (task.id.transfer, task.id.block as usize);
            // The block stays in the slot that it passes.
            let passed = task.via.and_then(|_| self.transfers.at_mut(id));
            let kept = passed.and_then(|transfer| transfer.kept_block(block));
            match outcome {
                Outcome::Arrived => {
                    for (id, block) in kept.into_iter().chain([(id, block)]) {
                        self.block_arrived(id, block, None, now);
                        // Blocks of a batch are published together: one touch for all of them.
                        if self.transfers.ready.last() != Some(&id) {
                            self.transfers.ready.push(id);
                        }
                    }
                }
                Outcome::Failed { halfway, defect } => {
                    if let Some(defect) = defect {
                        self.quarantine(task.block, task.from, defect);
                    }
                    if let Some((id, block)) = kept {
                        if halfway {
                            self.block_arrived(id, block, None, now);
                            self.transfers.ready.push(id);
                        } else {
                            self.block_failed(id, block, None);
                        }
                    }
                    self.block_failed(id, block, None);
                }
                Outcome::Overdue { writes_destination } => {
                    kept.into_iter().for_each(|(id, block)| self.block_overdue(id, block));
                    if writes_destination {
                        self.block_overdue(id, block);
                    } else {
                        // The medium is busy with the source; nothing will arrive here.
                        self.fail_for_good(id, block);
                        self.free_slot(id, block, None);
                    }
                }
                Outcome::Returned => {
                    for (id, block) in kept.into_iter().chain([(id, block)]) {
                        self.block_returned(id, block, None);
                    }
                }
            }
        }
        self.publish_more()
    }

    /// Makes resident what can be, and gives up what failed, as much as a hold has time for:
    /// thousands of blocks may have waited for one that arrived or failed.
    pub fn publish_more(&mut self) -> Effects {
        let mut budget = Budget::of_a_hold();
        self.give_up_failed(&mut budget);
        while !budget.is_spent()
            && let Some(id) = self.transfers.ready.pop()
        {
            self.publish_ready(id, &mut budget);
            self.give_up_failed(&mut budget);
        }
        self.take_effects()
    }

    /// Takes what was put off until the table is unlocked.
    pub fn take_effects(&mut self) -> Effects {
        let has_more = !(self.transfers.ready.is_empty() && self.transfers.failed.is_empty());
        let news = self.listeners.take_news();
        Effects { news, has_more, ..std::mem::take(&mut self.transfers.effects) }
    }

    /// Whether there are copies to make once the table is unlocked.
    pub const fn has_tasks(&self) -> bool {
        self.transfers.tasks_planned() > 0
    }

    /// Ends a transfer early: queued copies are dropped.
    pub fn cancel(&mut self, id: TransferId) -> Effects {
        self.fail_for_good(id, 0);
        self.publish_more()
    }

    /// Takes no more transfers. Existing ones [end one by one](Self::end_next); copies that a
    /// medium works on keep their slots until they end.
    pub fn close(&mut self) {
        // Set under the lock: a later plan sees it, and earlier transfers are among those that end.
        self.transfers.is_closed = true;
        self.listeners.close();
    }

    /// Ends a transfer of a past namespace, or any once the table is [closed](Self::close): the
    /// first from place `from` on. Returns where to go on. `None`: there are no more.
    pub fn end_next(&mut self, from: u32, budget: &mut Budget) -> Option<u32> {
        let (present, is_closed) = (self.namespace(), self.transfers.is_closed);
        let is_past = |transfer: &OpenTransfer| is_closed || transfer.namespace != present;
        let id = self.transfers.next(from, |transfer| is_past(transfer) && !transfer.has_ended)?;
        self.fail_for_good(id, 0);
        self.give_up_failed(budget);
        Some(id.place + 1)
    }

    /// Makes blocks resident that an engine has filled: the `first`-th of a transfer and those
    /// behind it.
    pub fn fill(
        &mut self,
        id: TransferId,
        first: usize,
        frames: impl IntoIterator<Item = Frame>,
    ) -> Effects {
        for (block, frame) in (first..).zip(frames) {
            self.block_arrived(id, block, Some(frame), Duration::ZERO);
        }
        self.transfers.ready.push(id);
        self.publish_more()
    }

    /// Frees the slots of blocks that an engine does not fill: the `first`-th of a transfer and
    /// those behind it.
    pub fn abandon(
        &mut self,
        id: TransferId,
        first: usize,
        frames: impl IntoIterator<Item = Frame>,
    ) -> Effects {
        self.fail(id, first);
        for (block, frame) in (first..).zip(frames) {
            self.block_returned(id, block, Some(frame));
        }
        self.publish_more()
    }

    /// Blocks that an engine was to fill do not come, and something may still write their slots:
    /// they are lost until they are [given back](Self::abandon).
    pub fn lose(&mut self, id: TransferId, blocks: Range<usize>) -> Effects {
        blocks.for_each(|block| self.block_overdue(id, block));
        self.publish_more()
    }

    /// No more blocks of a transfer come.
    pub fn end_plan(&mut self, id: TransferId) {
        self.end_plan_for(id, None);
    }

    /// The same; the caller is told of its end, and gets a lease of what it brought.
    pub(super) fn end_plan_for(&mut self, id: TransferId, caller: Option<TransferCaller>) {
        let Some(transfer) = self.transfers.at_mut(id) else { return };
        transfer.is_open = false;
        transfer.caller = caller;
        let kept = transfer.kept;
        let sources = if transfer.away == 0 { transfer.sources.take() } else { None };
        sources.into_iter().for_each(|pins| self.release(pins));
        kept.into_iter().for_each(|(kept, _)| self.end_plan(kept));
        self.end_if_done(id);
    }

    /// The bytes of a block have arrived. `frame`: the handle to its slot, from the engine that had
    /// it.
    fn block_arrived(&mut self, id: TransferId, block: usize, frame: Option<Frame>, now: Duration) {
        let Some(transfer) = self.transfers.at_mut(id) else { return };
        // An earlier block failed during its copy: its bytes are right but useless.
        if block >= transfer.alive {
            return self.block_returned(id, block, frame);
        }
        let arrived = &mut transfer.blocks[block];
        debug_assert_eq!(arrived.state, BlockState::Coming, "a block arrived twice");
        arrived.state = BlockState::Arrived;
        if frame.is_some() {
            arrived.frame = frame;
        }
        debug_assert_eq!(
            arrived.frame.as_ref().map(Frame::slot),
            arrived.record().map(|_| arrived.slot),
            "the handle of another slot came back"
        );
        transfer.account.copied = Some(now);
        let homecoming = transfer.takes_home(block);
        self.came_home(id, homecoming);
    }

    /// A block will not come, and nothing touches its slot any more.
    fn block_failed(&mut self, id: TransferId, block: usize, frame: Option<Frame>) {
        self.fail(id, block);
        self.block_returned(id, block, frame);
    }

    /// A block will not come, and a medium may still write its slot.
    fn block_overdue(&mut self, id: TransferId, block: usize) {
        // The blocks behind it can never be published, so no one need wait for them either.
        self.fail_for_good(id, block);
        let Some(transfer) = self.transfers.at_mut(id) else { return };
        let (tier, held) = (transfer.to, &mut transfer.blocks[block]);
        debug_assert_eq!(held.state, BlockState::Coming, "a block that had ended is overdue");
        held.state = BlockState::Overdue;
        if held.record().is_some() {
            self.tier_mut(tier).lost += 1;
        }
    }

    /// No queue, medium or engine has a failed block any more.
    fn block_returned(&mut self, id: TransferId, block: usize, frame: Option<Frame>) {
        self.free_slot(id, block, frame);
        let Some(transfer) = self.transfers.at_mut(id) else { return };
        let homecoming = transfer.takes_home(block);
        self.came_home(id, homecoming);
    }

    /// Nothing touches the slot of a failed block any more.
    fn free_slot(&mut self, id: TransferId, block: usize, frame: Option<Frame>) {
        let Some(transfer) = self.transfers.at_mut(id) else { return };
        let (tier, held) = (transfer.to, &mut transfer.blocks[block]);
        debug_assert!(block >= transfer.alive, "the slot of a block that may still come");
        let was = std::mem::replace(&mut held.state, BlockState::Ended);
        let frame = frame.or(held.frame.take());
        if held.record().is_none() {
            return;
        }
        let of_tier = self.tier_mut(tier);
        of_tier.lost -= u32::from(was == BlockState::Overdue);
        frame.into_iter().for_each(|frame| of_tier.pool.give_back(frame));
    }

    /// No queue, no medium and no engine has a block any more.
    fn came_home(&mut self, id: TransferId, block: Homecoming) {
        block.source.into_iter().for_each(|slot| self.unpin(Tier::Host, slot));
        if block.is_last {
            block.sources.into_iter().for_each(|pins| self.release(pins));
            // One whose foreign copies failed waits for its own before it begins anew.
            self.end_if_done(id);
            self.forget_if_home(id);
        }
    }

    /// Publishes what is ready of a transfer, as far as the hold goes. Then transfers that hang on
    /// it are ready too.
    fn publish_ready(&mut self, id: TransferId, budget: &mut Budget) {
        let present = self.namespace();
        let Some(transfer) = self.transfers.at_mut(id) else { return };
        if transfer.namespace != present {
            return self.fail(id, 0);
        }
        let (tier, parent, before) = (transfer.to, transfer.parent, transfer.published);
        let (info, reason) = (transfer.context.info, transfer.reason);
        let mut is_dropped = false;
        while !budget.is_spent()
            && let Some(transfer) = self.transfers.at_mut(id)
            && let Some(next) = transfer.next_ready()
        {
            budget.change();
            let record = match next {
                Destination::Tier(record) => record,
                Destination::Engine { source } => {
                    // Once the engine was told that a block is wrong, it must not hear that the
                    // block is there.
                    is_dropped = !self.is_given(source);
                    if is_dropped {
                        break;
                    }
                    self.transfers.at_mut(id).and_then(OpenTransfer::take_ready);
                    continue;
                }
            };
            let Some(frame) = transfer.take_ready() else { continue };
            self.publish(record, frame, info, reason);
            for waiter in self.transfers.take_waiting_for(tier, record) {
                match waiter {
                    BlockWaiter::Transfer(waiting) => {
                        self.hang_on(waiting, tier, record);
                        self.transfers.ready.push(waiting);
                    }
                    BlockWaiter::Copy(task) => self.resume(task),
                }
            }
        }
        self.advance_parent(id, parent, before);
        if is_dropped {
            self.fail(id, 0);
        }
        if budget.is_spent() {
            // Perhaps for nothing: the next step will see.
            self.transfers.ready.push(id);
        }
        self.end_if_done(id);
    }

    /// The block that a transfer waited for is resident.
    fn hang_on(&mut self, id: TransferId, tier: Tier, record: RecordId) {
        let parent = self.pin_parent(tier, Some(record));
        match self.transfers.at_mut(id) {
            Some(transfer) => transfer.parent = parent,
            None => self.unpin_parent(tier, parent),
        }
    }

    /// Moves a transfer's pin to the last block that it published, and reports the use.
    fn advance_parent(&mut self, id: TransferId, old: TransferParent, before: usize) {
        let now_ms = self.now_ms;
        let Some(transfer) = self.transfers.at_mut(id) else { return };
        let inserted = transfer.published - before;
        let Some(last) = transfer.published.checked_sub(1).filter(|_| inserted > 0) else { return };
        let (tier, context) = (transfer.to, transfer.context);
        let slot = transfer.blocks[last].slot;
        let Some(record) = transfer.blocks[last].record() else { return };
        transfer.parent = TransferParent::Resident(slot);
        let depth = self.records.depth(record);
        let (held, records) = self.tier_and_records(tier);
        // The new pin first: the ancestors must not be evictable in between.
        held.pin(slot);
        let access = context.access(now_ms, slot, depth, inserted as u32);
        held.touch(&access, records);
        self.unpin_parent(tier, old);
    }

    /// Pins the block that a transfer will hang on.
    pub(in crate::table) fn pin_parent(
        &mut self,
        tier: Tier,
        parent: Option<RecordId>,
    ) -> TransferParent {
        let Some(parent) = parent else { return TransferParent::Root };
        let record = self.records.at(parent);
        if record.filling().has(tier) {
            return TransferParent::Awaited(parent);
        }
        let slot = record.slot(tier);
        self.tier_mut(tier).pin(slot);
        TransferParent::Resident(slot)
    }

    pub(in crate::table) fn unpin_parent(&mut self, tier: Tier, parent: TransferParent) {
        if let TransferParent::Resident(slot) = parent {
            self.unpin(tier, slot);
        }
    }

    pub(in crate::table) fn publish(
        &mut self,
        record: RecordId,
        frame: Frame,
        info: RequestInfo,
        reason: StoreReason,
    ) {
        let tier = frame.tier();
        let known = self.records.at_mut(record);
        known.publish(tier);
        let (key, parent, resident) = (known.key(), known.parent(), known.resident());
        self.index.note(KeyHash::of(key), record, resident);
        if let Some(parent) = parent {
            let parent = self.records.at(parent).slot(tier);
            let held = self.tier_mut(tier);
            held.gain_child(parent);
            // The chain is used again: it may be worth more by now.
            held.turned_away = held.turned_away.filter(|block| block.slot != parent);
        }
        let since_ms = self.now_ms;
        let held = self.tier_mut(tier);
        let slot = held.pool.deposit(frame);
        held.occupy(slot, record);
        if held.flush_to.is_some_and(|below| !resident.has(below)) {
            held.queue(DirtyBlock { slot, record, since_ms, info });
        }
        self.note_stored(tier, record);
        self.tell_stored(tier, record, info, reason);
        self.mark_clean_above(tier, record);
    }

    /// `record` reached `tier`: it is clean now in a tier that waited for that before evicting it.
    fn mark_clean_above(&mut self, tier: Tier, record: RecordId) {
        if let Some((above, slot, _)) = self.above(tier, record) {
            above.flush_succeeded();
            above.turned_away = above.turned_away.filter(|block| block.slot != slot);
            above.reconsider(slot);
        }
    }

    /// The block that a copy waited for has reached the host tier, or never will: sends the copy.
    fn resume(&mut self, mut task: CopyTask) {
        let there = self.pin_resident_slot(Tier::Host, task.block);
        let (id, block) = (task.id.transfer, task.id.block as usize);
        if self.transfers.at_mut(id).is_none_or(|transfer| block >= transfer.alive) {
            there.into_iter().for_each(|slot| self.unpin(Tier::Host, slot));
            return self.block_returned(id, block, None);
        }
        if let Some(slot) = there {
            task.from = self.slot_ref(Tier::Host, slot);
            self.transfers.read_from(task.id, slot);
        }
        self.transfers.effects.tasks.push(task);
    }

    /// [Fails](Self::fail) a transfer from its `from`-th block on, and gives up what failed as far
    /// as a hold goes; [`publish_more`](Self::publish_more) does the rest.
    pub(in crate::table) fn abort(&mut self, id: TransferId, from: usize) {
        self.fail_for_good(id, from);
        self.give_up_failed(&mut Budget::of_a_hold());
    }

    /// [Fails](Self::fail) a transfer, which is not planned anew.
    fn fail_for_good(&mut self, id: TransferId, from: usize) {
        if let Some(transfer) = self.transfers.at_mut(id) {
            transfer.cut = TransferCut::Failed;
        }
        self.fail(id, from);
    }

    /// From its `from`-th block on nothing of a transfer lands any more. The records of these
    /// blocks, and every transfer that hangs on one of them, are to be [given
    /// up](Self::give_up_failed).
    pub(in crate::table) fn fail(&mut self, id: TransferId, from: usize) {
        let Some(transfer) = self.transfers.at_mut(id) else { return };
        let was = transfer.alive;
        transfer.alive = from.max(transfer.published).min(was);
        if !transfer.is_cut() {
            transfer.cut = TransferCut::Failed;
        }
        let (alive, is_away) = (transfer.alive, transfer.away > 0);
        if alive < was && is_away {
            transfer.cancellations += 1;
            self.transfers.effects.cancelled.push((id, alive as u32));
        }
        self.transfers.failed.push(id);
    }

    /// One of the [cancellations](Effects::cancelled) of a transfer was made: its copies are out of
    /// the queues.
    pub fn cancellation_made(&mut self, id: TransferId) -> Effects {
        if let Some(transfer) = self.transfers.at_mut(id) {
            transfer.cancellations = transfer.cancellations.saturating_sub(1);
            self.end_if_done(id);
            self.forget_if_home(id);
        }
        self.take_effects()
    }

    /// Gives up blocks that have failed, as many as the hold has time for.
    pub(in crate::table) fn give_up_failed(&mut self, budget: &mut Budget) {
        while let Some(&id) = self.transfers.failed.last() {
            if !budget.look() {
                return;
            }
            match self.transfers.at_mut(id).and_then(|transfer| transfer.last_failed()) {
                Some((tier, block, record)) => {
                    // Records that name a record as their parent must be forgotten before it.
                    if !record.is_some_and(|record| self.fail_waiting(tier, record)) {
                        budget.change();
                        self.give_up_block(id, block);
                    }
                }
                None => {
                    self.transfers.failed.pop();
                    // Not before: the block that it hangs on may fail too, and must not be given up
                    // first.
                    let is_nothing = |held: &mut OpenTransfer| held.is_cut() && held.alive == 0;
                    if self.transfers.at_mut(id).is_some_and(is_nothing) {
                        self.stop_waiting(id);
                    }
                    self.end_if_done(id);
                }
            }
        }
    }

    /// Fails what waits for a failed block. Returns whether there are transfers to give up before
    /// it.
    fn fail_waiting(&mut self, tier: Tier, record: RecordId) -> bool {
        let mut goes_first = false;
        for waiter in self.transfers.take_waiting_for(tier, record) {
            match waiter {
                BlockWaiter::Transfer(waiting) => {
                    if let Some(held) = self.transfers.at_mut(waiting) {
                        held.parent = TransferParent::Root;
                        // One that failed by itself was not let down by another.
                        if !held.is_cut() {
                            held.cut = TransferCut::LetDown;
                        }
                    }
                    self.fail(waiting, 0);
                    goes_first = true;
                }
                BlockWaiter::Copy(task) => self.resume(task),
            }
        }
        goes_first
    }

    /// A transfer that hangs on a block on its way stops waiting for it.
    fn stop_waiting(&mut self, id: TransferId) {
        let Some(transfer) = self.transfers.at_mut(id) else { return };
        let TransferParent::Awaited(record) = transfer.parent else { return };
        transfer.parent = TransferParent::Root;
        let block = (transfer.to, record);
        if let Some(waiting) = self.transfers.waiting.get_mut(&block) {
            waiting
                .retain(|waiter| !matches!(waiter, BlockWaiter::Transfer(other) if *other == id));
            if waiting.is_empty() {
                self.transfers.waiting.remove(&block);
            }
        }
    }

    /// The block will not become resident: its record forgets the tier. If its bytes have arrived,
    /// its slot is free.
    fn give_up_block(&mut self, id: TransferId, block: usize) {
        let Some(transfer) = self.transfers.at_mut(id) else { return };
        transfer.recorded = block;
        let (tier, held) = (transfer.to, &mut transfer.blocks[block]);
        let record = held.record();
        if held.state == BlockState::Arrived {
            held.state = BlockState::Ended;
            let frame = held.frame.take();
            frame.into_iter().for_each(|frame| self.tier_mut(tier).pool.give_back(frame));
        }
        let Some(record) = record else { return };
        self.records.at_mut(record).leave(tier);
        self.retry_above(tier, record);
        self.forget_if_nowhere(record, MissReason::IoError, tier);
    }

    fn end_if_done(&mut self, id: TransferId) {
        let present = self.namespace();
        let is_over = |held: &mut OpenTransfer| held.is_done() && !held.has_ended;
        if !self.transfers.at_mut(id).is_some_and(is_over) || self.begins_anew(id) {
            return;
        }
        let Some(transfer) = self.transfers.at_mut(id) else { return };
        transfer.has_ended = true;
        let (tier, parent, namespace) = (transfer.to, transfer.parent, transfer.namespace);
        let copied = if namespace == present { transfer.published } else { 0 };
        // Copies that come back later are not reported: the end is reported once.
        let caller = transfer.caller.take();
        let account = std::mem::take(&mut transfer.account);
        let (class, blocks) = (transfer.class, account.blocks);
        let took = account
            .copied
            .filter(|_| copied == blocks)
            .map(|end| end.saturating_sub(account.started));
        let (pins, reply) = match caller {
            Some(TransferCaller { pins, reply }) if namespace != present => {
                self.unpin_parent(tier, parent);
                let nothing = Pins::of_nothing(pins.context(), namespace);
                self.release(pins);
                (Some(nothing), Some(reply))
            }
            Some(TransferCaller { mut pins, reply }) => {
                self.extend_lease(&mut pins, tier, parent, account.before + copied);
                if copied == 0 {
                    // As much of what other transfers brought as arrived.
                    self.hold_leading(
                        &mut pins,
                        tier,
                        account.before - account.found.len(),
                        &account.found,
                    );
                }
                self.drop_quarantined(&mut pins);
                (Some(pins), Some(reply))
            }
            None => {
                self.unpin_parent(tier, parent);
                (None, None)
            }
        };
        // Blocks that others should have brought, or had, and that are missing: to the engine they
        // failed.
        let there = pins.as_ref().map_or(0, |pins| pins.held().blocks(tier));
        let gone = account.before.saturating_sub(there).min(account.duplicates);
        self.transfers.effects.ended.push(TransferEnd {
            id,
            class,
            to: tier,
            blocks: blocks + gone,
            copied,
            duplicates: account.duplicates - gone,
            source: account.source,
            took,
            recompute: account.recompute,
            declined: account.declined,
            refused: account.refused,
            pins,
            reply,
        });
        self.forget_if_home(id);
    }

    /// Plans a save anew from the engine's slots, if it relied on copies of others that failed. Its
    /// own copies must have ended first, since the next ones get their names. False: it ends.
    fn begins_anew(&mut self, id: TransferId) -> bool {
        let (present, dropped) = (self.namespace(), self.quarantines.names_dropped());
        let is_closed = self.transfers.is_closed;
        let Some(transfer) =
            self.transfers.at_mut(id).filter(|held| held.cut == TransferCut::LetDown)
        else {
            return false;
        };
        let is_of_now = !is_closed && transfer.namespace == present;
        let may_come = transfer.relying.as_ref().is_some_and(|own| own.names_dropped == dropped);
        if !is_of_now || !may_come || transfer.caller.is_none() {
            return false;
        }
        // A cancellation that is made later must not take copies of the new plan, which have the
        // same names.
        if transfer.away > 0 || transfer.cancellations > 0 {
            return true;
        }
        let (Some(own), Some(TransferCaller { pins, reply })) =
            (transfer.relying.take(), transfer.caller.take())
        else {
            return false;
        };
        (transfer.is_open, transfer.cut) = (true, TransferCut::Whole);
        let plan = TransferPlan::again(id, transfer.to, own, pins);
        self.transfers.effects.again.push(SaveAgain { plan, reply });
        true
    }

    /// Hands a transfer's pin over to its caller's lease, which holds `blocks` leading ones from
    /// now on.
    fn extend_lease(&mut self, pins: &mut Pins, tier: Tier, parent: TransferParent, blocks: usize) {
        self.drop_quarantined(pins);
        if let TransferParent::Resident(slot) = parent {
            // Blocks missing elsewhere are no reason to release what it has here.
            if pins.held().blocks(tier) > blocks {
                return self.unpin(tier, slot);
            }
            self.release_tier(pins, tier);
            pins.hold(tier, slot, blocks);
        }
    }

    fn forget_if_home(&mut self, id: TransferId) {
        let is_over = |transfer: &&mut OpenTransfer| transfer.has_ended && transfer.away == 0;
        if self.transfers.at_mut(id).as_ref().is_some_and(is_over) {
            let Some(over) = self.transfers.remove(id) else { return };
            debug_assert!(over.sources.is_none(), "what was read stays pinned");
            self.transfers.effects.spent.push(Spent(over.blocks, over.relying));
            self.transfers.effects.released.extend(over.with_media);
        }
    }

    /// Pins the slot of a block in `tier`. `None`: the tier lacks it.
    fn pin_resident_slot(&mut self, tier: Tier, key: kvbm_tiers::BlockKey) -> Option<SlotId> {
        let slot = self.slot_of(tier, key)?;
        self.tier_mut(tier).pin(slot);
        Some(slot)
    }
}
